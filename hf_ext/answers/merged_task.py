"""A task of a merge with its tokenizer or processor, for the app and `examples/emr/serve.py`."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoFeatureExtractor, AutoImageProcessor, AutoTokenizer, GenerationConfig

from hf_ext.emr.building import model_class
from hf_ext.emr.model import EMRModel
from hf_ext.files import copy_into
from hf_ext.tasks.pictures import in_colours

from ..errors import DataError
from .classifying import find_first_position, hears, require_unicode

_READERS: dict[str, Any] = {"Sequence": AutoTokenizer, "Image": AutoImageProcessor, "Audio": AutoFeatureExtractor}
# Of nothing but a configuration, transformers makes a tokenizer that knows no word.
_FILES = ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json")
# Settings of generation by which a token depends on the tokens before it alone, however these came.
_BY_TOKEN = {
    *("_from_model_config", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache"),
    *("decoder_start_token_id", "forced_bos_token_id", "do_sample", "temperature", "top_k", "top_p", "min_p", "top_h"),
    *("typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids"),
    *("sequence_bias", "suppress_tokens", "max_length", "max_new_tokens", "length_penalty"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
    *("early_stopping", "cache_implementation", "renormalize_logits", "remove_invalid_values"),
}


class AnsweringTask:
    """
    A task of a merge, with what turns a text, a picture or a sound into the input of its model.

    `kind` is `"classification"`, `"generation"` or `"restoration"`; any other model is refused by a [`DataError`].
    `reads` is `"Sequence"`, `"Image"` or `"Audio"`. A text whose attention may need more than `gigabytes`
    is refused. `in_turns` tells whether a text may be generated in several turns: beams and what depends on the length
    of the whole text, such as `forced_eos_token_id`, need one.
    """

    def __init__(self, emr: EMRModel, name: str, gigabytes: float = math.inf) -> None:
        self._emr, self.name, self._gigabytes = emr, name, gigabytes
        library = emr.weights.manifest.library
        if library != "transformers":
            raise DataError(f"task {name!r} is of {library}; only models of transformers are supported")
        with tempfile.TemporaryDirectory() as place:
            copy_into(emr.weights.small_files(name), Path(place))
            self.config: Any = AutoConfig.from_pretrained(place)
            found: Any = model_class(self.config, Path(place), False)
            self.reads, ends, _ = found.__name__.rpartition("For")[2].partition("Classification")
            if self.reads == "Sequence" and hears(self.config):
                self.reads = "Audio"
            if self.config.model_type == "semanir":
                self.kind, self.reads = "restoration", "Image"
            elif ends and self.reads in _READERS:
                self.kind = "classification"
            elif found.can_generate():
                self.kind, self.reads = "generation", "Sequence"
            else:
                raise DataError(f"task {name!r} is a {found.__name__}, no classifier, generator or restorer")
            self.reader: Any = None if self.kind == "restoration" else self._load_reader(place)
        if self.kind == "generation":
            own = emr.generation_config(name)
            settings = GenerationConfig.from_dict(own) if own else GenerationConfig.from_model_config(self.config)
            self.in_turns = settings.to_diff_dict().keys() <= _BY_TOKEN
        text = self.config.get_text_config()
        limits = [getattr(text, key, None) for key in ("max_position_embeddings", "n_positions")]
        if self.reads == "Sequence":
            with torch.device("meta"):
                first = find_first_position(found(self.config))
            limits = [limit and limit - first for limit in limits]
        limits.append(getattr(self.reader, "model_max_length", None))
        self.limit = min([limit for limit in limits if isinstance(limit, int)], default=None)
        self._heads = getattr(text, "num_attention_heads", 1)

    def _load_reader(self, place: str) -> Any:
        kind = "tokenizer" if self.reads == "Sequence" else f"{self.reads.lower()} processor"
        try:
            if any(Path(place, name).is_file() for name in _FILES):
                return _READERS[self.reads].from_pretrained(place)
            why = f"none of {', '.join(_FILES)} is there"
        except Exception as error:
            # Libraries of many kinds read these files, and raise what they like: tokenizers a plain Exception.
            why = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(f"task {self.name!r} has no {kind} ({why}); put its files beside the artifact's emr.json")

    @torch.no_grad()
    def classify(self, given: Any) -> tuple[str, list[float]]:
        """
        The label of a text, of a picture of Pillow, or of a sound as a list of numbers at the model's rate; and the
        probabilities of all labels, or the numbers of a regression.
        """
        if self.reads == "Sequence":
            inputs = {key: torch.tensor([value]) for key, value in self.encode(given).items()}
        elif self.reads == "Image":
            grey = getattr(self.config, "num_channels", 3) == 1
            inputs = dict(self.reader([in_colours(given, "L" if grey else "RGB")], return_tensors="pt"))
        else:
            sound = torch.tensor(given)
            if not sound.numel() or not sound.isfinite().all():
                raise DataError("the sound is empty, or holds numbers that are too large")
            inputs = dict(self.reader([sound.numpy()], sampling_rate=self.reader.sampling_rate, return_tensors="pt"))
        batch = {key: value.to(self._emr.device) for key, value in inputs.items()}
        logits = self._emr(**batch, task_ids=[self.name]).logits[0].float().cpu()
        if not logits.isfinite().all():
            raise RuntimeError("the model gives logits that are infinite or no number")
        if self.config.problem_type == "multi_label_classification":
            logits = logits.sigmoid()
        elif len(logits) > 1 and self.config.problem_type != "regression":
            logits = logits.softmax(-1)
        return self.config.id2label.get(int(logits.argmax())), logits.tolist()

    def encode(self, text: str, more: int = 0) -> dict[str, list[int]]:
        """The tokens of a text, to which so many more shall come."""
        require_unicode(text)
        found = dict(self.reader(text))
        count = len(found["input_ids"])
        room = 0 if self.config.is_encoder_decoder else more
        most = getattr(self.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if self.config.is_encoder_decoder and most is not None and more > most:
            raise DataError(f"task {self.name!r} makes up to {most} tokens, and {more} are wanted")
        if not count or (self.limit is not None and count + room > self.limit):
            told = f"the text has {count} tokens, and {room} more are wanted"
            raise DataError(f"{told}; task {self.name!r} takes 1 to {self.limit}")
        # Scores and weights of a layer, which some models hold for all pairs of tokens.
        needed = 8 * self._heads * (count + room) ** 2 / 1e9
        if needed > self._gigabytes:
            may = f"a request may take {self._gigabytes:g} GB"
            raise DataError(f"attention to the {count} tokens of the text may need {needed:.3g} GB; {may}")
        return found

    @torch.no_grad()
    def generate(self, prompt: list[int], made: list[int], count: int, **options: Any) -> tuple[list[int], bool]:
        """Up to `count` tokens after a prompt and what was made of it before, and whether the text has ended."""
        with self._emr.task(self.name) as model:
            given = model.generation_config.eos_token_id
            ends = given if isinstance(given, list) else [given]
            tokens, start = torch.tensor([[*prompt, *made]], device=self._emr.device), len(prompt) + len(made)
            if self.config.is_encoder_decoder:
                first = model.generation_config.decoder_start_token_id
                begun = torch.tensor([[first, *made]], device=self._emr.device)
                tokens, start = tokens[:, : len(prompt)], 1 + len(made)
                options["decoder_input_ids"] = begun
            options.setdefault("do_sample", False)
            mask = torch.ones_like(tokens)
            if model.generation_config.pad_token_id is None:
                options["pad_token_id"] = 0
            found = model.generate(tokens, attention_mask=mask, max_new_tokens=count, **options)[0, start:].tolist()
        # of beams the best may be padded
        last = next((place for place, token in enumerate(found, 1) if token in ends), None)
        return found[:last], last is not None

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens, without special ones."""
        return str(self.reader.decode(tokens, skip_special_tokens=True))
