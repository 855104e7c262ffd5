"""Captions for the training of a text-to-image Disentangled DiT, through a frozen transformers encoder.

The encoder runs in every step, or once: `hf-ext dit precompute --text-encoder` writes beside each column of captions,
such as `text`, what it says of them: `text_states`, the real tokens of each caption as float16 bytes. `states_shape`
tells tokens and width that a text is padded to; in the first row of every file `null_states` are those of no text, and
`states_encoder` names the encoder.
The padding, and its noise, is made in the step.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch import Generator, Tensor
from transformers import AutoModelForTextEncoding, AutoTokenizer, PreTrainedTokenizerBase

from hf_ext.hub.checkpoints import split_revision
from hf_ext.pipelines.disentangled_dit.pipeline import DisentangledDiTPipeline
from hf_ext.training.models import pipeline_index

from ..errors import DataError, UsageError
from .checks import column
from .diffusion_data import unpack_row

# Columns of a row with states, and what the name of a column of captions gets for that of its own.
SHAPE, NULL, ENCODER, SUFFIX = "states_shape", "null_states", "states_encoder", "_states"
# Rows in which the states of no text are looked for: more than a file of `precompute` has.
_ROWS_LOOKED_AT = 100_000


def weigh_columns(columns: str | dict[str, float]) -> dict[str, float]:
    weights = {columns: 1.0} if isinstance(columns, str) else columns
    shares = weights.values()
    if not weights or not all(type(share) in (int, float) and 0 < share < float("inf") for share in shares):
        wanted = "a column, or columns with weights above 0 such as {short: 1, long: 3}"
        raise ValueError(f"text_column must be {wanted}; got {columns!r}.")
    return {name: float(share) for name, share in weights.items()}


def read_captions(example: dict[str, Any], name: str) -> list[str]:
    """The captions of a column, which holds one or a list of them."""
    value = column(example, name, "text_column")
    captions = list(value) if isinstance(value, list | tuple) else [value]
    if not captions or not all(isinstance(caption, str) and caption.strip() for caption in captions):
        raise DataError(f"column {name!r} holds {value!r:.80}; a caption, or a list of captions, is needed.")
    return captions


@dataclass
class TextEncoder:
    """A tokenizer and a frozen text encoder."""

    source: str
    max_length: int

    @cached_property
    def encoder(self) -> Any:
        # A PreTrainedModel; mypy does not see that its `to`, which transformers wraps, is a method.
        encoder: Any = AutoModelForTextEncoding.from_pretrained(**self._place("text_encoder"))
        most = getattr(encoder.config, "max_position_embeddings", None)
        if most is not None and self.max_length > most:
            raise UsageError(f"max_text_length is {self.max_length}, and {self.source} takes {most} tokens at most.")
        encoder.requires_grad_(False).eval()
        return encoder

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Its tokenizer, loaded alone: the processes that read data need nothing else."""
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(**self._place("tokenizer"))
        return found

    def _place(self, folder: str) -> dict[str, Any]:
        """Location of a part: in a folder of a pipeline, or where the source says."""
        name, revision = split_revision(self.source)
        subfolder = folder if pipeline_index(self.source) else ""
        return {"pretrained_model_name_or_path": name, "revision": revision, "subfolder": subfolder}

    def tokens(self, captions: str | list[str]) -> dict[str, Tensor]:
        """`input_ids` and `attention_mask` [.., max_length], padded on the right, cut where a caption is longer."""
        options: Any = {"padding": "max_length", "padding_side": "right", "max_length": self.max_length}
        found = self.tokenizer(captions, truncation=True, return_tensors="pt", **options)
        names = ("input_ids", "attention_mask")
        return {name: found[name][0] if isinstance(captions, str) else found[name] for name in names}

    @torch.no_grad()
    def states(self, tokens: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The encoder's output [B, max_length, width], on the device of the tokens, and how many are real [B]."""
        mask = tokens["attention_mask"]
        if self.encoder.device != mask.device:
            self.encoder.to(mask.device)
        found = self.encoder(input_ids=tokens["input_ids"], attention_mask=mask).last_hidden_state
        # Of a text without any token the encoder's first one stands for it, as in the pipeline.
        return found, mask.sum(1).clamp(min=1)

    def pack(self, captions: list[str], device: torch.device | str) -> list[bytes]:
        """The states of the real tokens of each caption, float16."""
        tokens = {name: value.to(device) for name, value in self.tokens(captions).items()}
        states, lengths = self.states(tokens)
        halves = states.to(torch.float16).cpu()
        if not halves.isfinite().all():
            advice = "leave out text_encoder here, and set task.text_encoder in the training"
            raise ValueError(f"{self.source} gives values beyond float16 (65,504): {advice}.")
        return [row[:length].numpy().tobytes() for row, length in zip(halves, lengths.tolist(), strict=True)]


@dataclass
class Captions(TextEncoder):
    """The captions of a training: drawn, encoded or read, dropped, and padded by the pipeline's `pad_text`."""

    padding: str
    noise: float
    columns: str | dict[str, float]

    def __post_init__(self) -> None:
        self.weights = weigh_columns(self.columns)
        # Of data with states: their width, and the states of no text.
        self.width: int | None = None
        self.null: dict[str, Tensor] | None = None

    def read_data(self, data: datasets.Dataset | datasets.IterableDataset) -> None:
        """Takes the states of no text, and their width, from data that has them."""
        # Of some streams the columns are known when they are read.
        names = data.column_names or [*next(iter(data.take(1)), {})]
        stored = [name for name in self.weights if f"{name}{SUFFIX}" in names]
        if not stored:
            return
        if len(stored) < len(self.weights):
            told = f"of the columns {list(self.weights)} the data contain encoded texts for {stored} only"
            raise DataError(f"{told}: precompute all, or remove the others from task.text_column.")
        columns = [name for name in (SHAPE, NULL, ENCODER, "json") if name in names]
        rows: Iterable[dict[str, Any]] = islice(data.select_columns(columns), _ROWS_LOOKED_AT)
        # Tar files have an empty file in the other rows.
        found = next((unpack_row(row) for row in rows if row[NULL]), None)
        if found is None:
            where = "which `hf-ext dit precompute` writes into the first row of every file"
            raise UsageError(f"no row of the training data has {NULL}, {where}: train on complete files.")
        encoder = found.get(ENCODER)
        # By the last part of its name: folders move.
        if encoder is not None and Path(encoder).name != Path(self.source).name:
            told = f"the data's texts were encoded by {encoder}, task.text_encoder is {self.source}"
            raise UsageError(f"{told}: set it to the same encoder, or precompute again.")
        self.width = int(found[SHAPE][1])
        self.null = self._unpack(found[NULL], found[SHAPE])

    def draw(self, example: dict[str, Any], generator: np.random.Generator | None) -> tuple[str, str, int]:
        """A caption, its column and its place there, drawn by the weights; without a generator the first."""
        columns = list(self.weights)
        # A single column draws nothing, so that it is as it always was.
        place = 0
        if generator is not None and len(columns) > 1:
            shares = np.array([*self.weights.values()])
            place = int(generator.choice(len(columns), p=shares / shares.sum()))
        captions, index = read_captions(example, columns[place]), 0
        if generator is not None and len(captions) > 1:
            index = int(generator.integers(len(captions)))
        return captions[index], columns[place], index

    def sample(self, example: dict[str, Any], generator: np.random.Generator | None) -> dict[str, Tensor]:
        """The tokens of a caption or, where the data has them, its states [max_length, width] and their number."""
        caption, column, index = self.draw(example, generator)
        stored = example.get(f"{column}{SUFFIX}")
        return self.tokens(caption) if stored is None else self._unpack(stored[index], example[SHAPE])

    def _unpack(self, content: bytes, shape: list[int]) -> dict[str, Tensor]:
        length, width = shape
        if length != self.max_length:
            told = f"the data's texts have {length} tokens at most, task.max_text_length is {self.max_length}"
            raise UsageError(f"{told}: set it to {length}, or precompute again.")
        real = torch.frombuffer(bytearray(content), dtype=torch.float16).view(-1, width)
        states = real.new_zeros(length, width)
        states[: len(real)] = real
        return {"states": states, "length": torch.tensor(len(real))}

    @cached_property
    def null_tokens(self) -> dict[str, Tensor]:
        """The tokens of no text, which stand for a caption that was dropped."""
        return self.tokens("")

    def drop(self, batch: dict[str, Any], dropped: Tensor) -> dict[str, Tensor]:
        """Replaces the captions of a batch where `dropped` [B] says so."""
        is_stored = "states" in batch
        names = ("states", "length") if is_stored else ("input_ids", "attention_mask")
        if is_stored and self.null is None:
            # An evaluation drops nothing, and looks at no training data.
            return {name: batch[name] for name in names}
        null: Any = self.null if is_stored else self.null_tokens
        masks = {name: dropped.view(-1, *[1] * (batch[name].ndim - 1)) for name in names}
        return {name: torch.where(masks[name], null[name].to(dropped.device), batch[name]) for name in names}

    def encode(self, tokens: dict[str, Tensor], generator: Generator | list[Generator] | None = None) -> Tensor:
        """The states to attend to, [B, max_length, width]; fresh noise in the padding without a generator."""
        if "states" in tokens:
            states, lengths = tokens["states"].float(), tokens["length"]
        else:
            states, lengths = self.states(tokens)
        return DisentangledDiTPipeline.pad_text(states, lengths, self.padding, self.noise, generator)
