"""MRConv on tokens: ListOps, texts as bytes, pairs of texts, language modelling, causal and masked."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from huggingface_hub.dataclasses import strict
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import nn
from transformers import DataCollatorForLanguageModeling, PreTrainedModel, PreTrainedTokenizerFast

from hf_ext.mrconv.modeling_mrconv import MRConvForRetrieval
from hf_ext.mrconv.modeling_positions_mrconv import MRConvForCausalLM, MRConvForMaskedLM

from ..errors import DataError
from .checks import Scores, all_or_none, column, require
from .sequences import Batch, ClassificationTask, MRConvTask, join_samples, make_rows, predict, sum_losses

PAD, UNKNOWN, EOS, MASK = "<pad>", "<unk>", "<eos>", "<mask>"
# What ListOps is written with, beside digits: examples/mrconv/data/make_listops.py makes its expressions.
LISTOPS_OPERATORS, LISTOPS_END = ("[MIN", "[MAX", "[MED", "[SM"), "]"


def _for_transformers(tokenizer: Tokenizer, max_length: int, **special: str) -> PreTrainedTokenizerFast:
    """The tokenizer for transformers; it ends every text with `<eos>`, also one that it cuts."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A {EOS} $B:1 {EOS}:1", special_tokens=[(EOS, tokenizer.token_to_id(EOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        model_max_length=max_length,
        padding_side="right",
        model_input_names=["input_ids", "attention_mask"],
        **special,
    )


def byte_tokenizer(max_length: int, **special: str) -> PreTrainedTokenizerFast:
    """Tokens of any text: its UTF-8 bytes, which are its characters where it is English; further special ones last."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [PAD, EOS, *alphabet, *special.values()]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _for_transformers(tokenizer, max_length, **special)


@strict
@dataclass
class TokenTask(MRConvTask):
    """Base of tasks on texts: tokens, and the longest kernel, which is that of the longest text."""

    max_length: int = 4096
    text_column: str = "text"

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return byte_tokenizer(self.max_length)

    def validate_max_length(self) -> None:
        require(self, ("max_length", self.max_length >= 2, f"at least 2, a token and the {EOS} after it"))

    def model_fields(self) -> dict[str, Any]:
        return {
            "vocab_size": len(self.tokenizer),
            "pad_token_id": self.tokenizer.pad_token_id,
            "eos_token_id": self.tokenizer.eos_token_id,
            "max_position_embeddings": self.max_length,
        }

    def read_tokens(self, example: dict[str, Any], name: str, option: str) -> Batch:
        """The text in a column as tokens, cut and padded to the tokenizer's length."""
        options: Any = {"truncation": True, "padding": "max_length", "return_tensors": "pt"}
        tokens = self.tokenizer(read_text(example, name, option), **options)
        return {name: tokens[name][0] for name in ("input_ids", "attention_mask")}

    def processor(self) -> PreTrainedTokenizerFast:
        return self.tokenizer


@strict
@dataclass
class TextTask(TokenTask, ClassificationTask):
    """
    Classification of texts, byte by byte, with [`MRConvForSequenceClassification`].

    Args:
        max_length (`int`, defaults to 4096): Most tokens of a text, `<eos>` included; also the longest kernel.
        text_column (`str`, defaults to `"text"`): Column of the text.
    """

    pipeline_tag: ClassVar[str] = "text-classification"

    def encode(self, example: dict[str, Any]) -> Batch:
        return {**self.read_tokens(example, self.text_column, "text_column"), "labels": self.label(example)}


@strict
@dataclass
class ListOpsTask(TextTask):
    """
    ListOps with [`MRConvForSequenceClassification`]; `examples/mrconv/data/make_listops.py` writes the data.

    Args:
        max_length (`int`, defaults to 2048): Most tokens of an expression, `<eos>` included.
    """

    max_length: int = 2048

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Tokens of ListOps: digits, operators and their end between spaces."""
        # Parentheses, which the published files have, are dropped; `]` becomes `X`, as in the S4 recipes.
        words = [PAD, UNKNOWN, EOS, *map(str, range(10)), *LISTOPS_OPERATORS, "X"]
        tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNKNOWN))
        changes = {"(": " ", ")": " ", LISTOPS_END: "X"}
        tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(*pair) for pair in changes.items()])
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return _for_transformers(tokenizer, self.max_length, unk_token=UNKNOWN)


@strict
@dataclass
class RetrievalTask(TextTask):
    """
    Classification of pairs of texts as matching or not, byte by byte, with [`MRConvForRetrieval`].

    Args:
        num_labels (`int`, defaults to 2): Number of classes.
        max_length (`int`, defaults to 4000): Most tokens of each text, `<eos>` included.
        text_column (`str`, defaults to `"text1"`): Column of the first text.
        second_text_column (`str`, defaults to `"text2"`): Column of the second text.
    """

    num_labels: int = 2
    max_length: int = 4000
    text_column: str = "text1"
    second_text_column: str = "text2"

    model_class: ClassVar[Callable[..., PreTrainedModel]] = MRConvForRetrieval

    def label_fields(self) -> dict[str, Any]:
        return {**super().label_fields(), "input_columns": [self.text_column, self.second_text_column]}

    def encode(self, example: dict[str, Any]) -> Batch:
        second = self.read_tokens(example, self.second_text_column, "second_text_column")
        return {**super().encode(example), **{f"{name}_2": values for name, values in second.items()}}


@strict
@dataclass
class LanguageModelTask(TokenTask):
    """
    Causal language modelling of bytes with [`MRConvForCausalLM`].

    A training sample is a random window of a text, an evaluated one its beginning: cut long texts into windows first.

    Args:
        max_length (`int`, defaults to 1024): Bytes of a window; also the longest kernel.
        text_column (`str`, defaults to `"text"`): Column of the text.
        packed (`bool`, defaults to `False`): Put the texts of a training batch into one row, instead of padding them
            to the longest: the same loss and gradients, faster if the lengths differ much.
    """

    max_length: int = 1024
    packed: bool = False

    special_tokens: ClassVar[dict[str, str]] = {}
    model_class: ClassVar[Callable[..., PreTrainedModel]] = MRConvForCausalLM
    pipeline_tag: ClassVar[str] = "text-generation"
    metric_names: ClassVar[dict[str, str]] = {"bits_per_byte": "bits per byte"}
    greater_is_better: ClassVar[bool] = False

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """One token for each byte, and those of `special_tokens`. A prompt must not end with `<eos>`."""
        tokenizer = byte_tokenizer(self.max_length, **self.special_tokens)
        tokenizer.backend_tokenizer.post_processor = processors.Sequence([])
        return tokenizer

    def encode(self, example: dict[str, Any], start: int = 0) -> Batch:
        """A window that begins at a byte; padding is not predicted."""
        tokens = self.read_window(example, start)
        return {**tokens, "labels": torch.where(tokens["attention_mask"] == 1, tokens["input_ids"], -100)}

    def training_sample(self, example: dict[str, Any], generator: np.random.Generator) -> Batch:
        return self.encode(example, self.choose_start(example, generator))

    def choose_start(self, example: dict[str, Any], generator: np.random.Generator) -> int:
        """The start of a window: the last one holds the `<eos>` after the text."""
        count = len(read_text(example, self.text_column, "text_column").encode()) + 1
        return int(generator.integers(max(1, count - self.max_length + 1)))

    def read_window(self, example: dict[str, Any], start: int) -> Any:
        """Tokens of a text from a byte on, padded to one length, with their mask."""
        text = read_text(example, self.text_column, "text_column")
        # Each byte is a token, also of a text that spells `<mask>`. The end of a text is predicted too.
        tokens = self.tokenizer(text, verbose=False, split_special_tokens=True)["input_ids"]
        ids = [*tokens, self.tokenizer.eos_token_id][start : start + self.max_length]
        if len(ids) < 2:
            raise DataError(f"column {self.text_column!r} contains an empty text; remove it from the data.")
        return self.tokenizer.pad({"input_ids": ids}, padding="max_length", return_tensors="pt")

    def loss(self, model: nn.Module, batch: dict[str, Any], step: int) -> torch.Tensor:
        return super().loss(model, pack_texts(batch) if self.packed else batch, step)

    def count_targets(self, batch: dict[str, Any]) -> torch.Tensor:
        return (batch["labels"][:, 1:] != -100).sum()

    def evaluate_batch(self, model: nn.Module, examples: list[dict[str, Any]], indices: list[int]) -> Scores:
        """Summed cross entropy and number of the predicted bytes of each text."""
        logits, labels = predict(model, self.batch(model, examples))
        logits, labels = logits[:, :-1], labels[:, 1:]
        return make_rows(nats=sum_losses(logits, labels), bytes=(labels != -100).sum(1))

    def summarize(self, rows: Scores) -> dict[str, float]:
        nats, count = (sum(row[name] for row in rows) for name in ("nats", "bytes"))
        return {"bits_per_byte": float(nats / count / np.log(2))}


@strict
@dataclass
class MaskedLanguageModelTask(LanguageModelTask):
    """
    Masked language modelling of bytes with [`MRConvForMaskedLM`], masked as `DataCollatorForLanguageModeling` does: of
    the chosen bytes, 15 % of all, 80 % become `<mask>`, 10 % another one. In an evaluation, the number of a text
    decides its mask.
    """

    special_tokens: ClassVar[dict[str, str]] = {"mask_token": MASK}
    model_class: ClassVar[Callable[..., PreTrainedModel]] = MRConvForMaskedLM
    pipeline_tag: ClassVar[str] = "fill-mask"
    metric_names: ClassVar[dict[str, str]] = {
        "accuracy": "share of the masked bytes",
        "perplexity": "perplexity of a masked byte",
        "accuracy_of_largest": "that of always saying the byte that was masked most often",
    }
    greater_is_better: ClassVar[bool] = True

    def training_sample(self, example: dict[str, Any], generator: np.random.Generator) -> Batch:
        return self.mask(self.read_window(example, self.choose_start(example, generator)), generator)

    def mask(self, tokens: Any, generator: np.random.Generator) -> Batch:
        """Tokens of which some are to be predicted, at least one."""
        collator = DataCollatorForLanguageModeling(self.tokenizer, return_tensors="np")
        collator.generator = generator
        special = np.isin(tokens["input_ids"], self.tokenizer.all_special_ids)
        while True:
            # A short text may have none by chance.
            ids, labels = collator.numpy_mask_tokens(tokens["input_ids"].numpy().copy(), special)
            if (labels != -100).any() or special.all():
                return {**tokens, "input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}

    def count_targets(self, batch: dict[str, Any]) -> torch.Tensor:
        return (batch["labels"] != -100).sum()

    def evaluate_batch(self, model: nn.Module, examples: list[dict[str, Any]], indices: list[int]) -> Scores:
        """Of each text the masked bytes, those that were found, their summed cross entropy, and each byte's number."""
        generators = [np.random.default_rng((5, index)) for index in indices]
        windows = [self.read_window(example, 0) for example in examples]
        batch = join_samples(model, [self.mask(*pair) for pair in zip(windows, generators, strict=True)])
        logits, labels = predict(model, batch)
        rows = []
        for truth, found, nats in zip(labels, logits.argmax(-1), sum_losses(logits, labels).tolist(), strict=True):
            masked = truth[truth != -100]
            counts = torch.bincount(masked, minlength=len(self.tokenizer)).tolist()
            hits = (found[truth != -100] == masked).sum()
            rows.append({"nats": nats, "hits": float(hits), **{str(byte): float(n) for byte, n in enumerate(counts)}})
        return rows

    def summarize(self, rows: Scores) -> dict[str, float]:
        counts = [sum(row[str(byte)] for row in rows) for byte in range(len(self.tokenizer))]
        total = max(1.0, sum(counts))
        nats, hits = (sum(row[name] for row in rows) for name in ("nats", "hits"))
        found = {
            "accuracy": float(hits / total),
            "perplexity": float(np.exp(nats / total)),
            "accuracy_of_largest": float(max(counts) / total),
        }
        return all_or_none(found)


def pack_texts(batch: Batch) -> Batch:
    """A batch of padded texts as one row without padding; the positions count from 0 again where a text begins."""
    valid = batch["attention_mask"].bool()
    positions = torch.arange(valid.shape[1], device=valid.device).expand_as(valid)
    rows = {"input_ids": batch["input_ids"], "position_ids": positions, "labels": batch["labels"]}
    return {name: values[valid][None] for name, values in rows.items()}


def read_text(example: dict[str, Any], name: str, option: str) -> str:
    text = column(example, name, option)
    if text is None:
        raise DataError(f"column {name!r} is empty: fill it in, remove the example, or set task.{option}.")
    if not isinstance(text, str):
        raise DataError(f"expected a text, got {type(text).__name__}: set task.{option} to a column of strings.")
    return text
