"""One vocabulary for models whose tokenizers differ: the tokens of all, and rows for those that a model lacks.

The base's tokens keep their ids; the others' come after them, in the order of the tasks. A row of a token that the
base lacks is the mean of the rows of the tasks that have it; a task that lacks a token has the base's row, so that its
difference there is zero. Rows are put in their places when they are read.
"""

from __future__ import annotations

import copy
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_ext.files import write_json
from hf_ext.hub.safetensors_headers import TensorInfo

from .adapters import VirtualSource
from .fitting import meta_model, tokens_by_id, vocabulary_size
from .sources import SMALL_FILES, Source
from .tensors import Names

# Of a tokenizer: how it cuts texts.
_CUTTING = ("normalizer", "pre_tokenizer", "decoder")
# Vocabularies in older forms, which lack the new tokens.
_OTHER_FORMS = (
    "added_tokens.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "spiece.model",
    "spm.model",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)
_LACKING = -1


def unite_vocabularies(base: Source, tasks: Sequence[Source]) -> tuple[Source, tuple[Source, ...]]:
    """
    The same models with one vocabulary.

    Raises:
        ValueError: A tokenizer is missing or of another kind, or a model has no vocabulary.
    """
    tokenizers = [_read_tokenizer(source) for source in (base, *tasks)]
    if tokenizers[0] is None:
        raise ValueError(f"{base.title} has no tokenizer.json, to which tokenizer: union would add tokens; save one.")
    tokens = tokens_by_id(base)
    united, known = copy.deepcopy(tokenizers[0]), set(tokens.values())
    for source, tokenizer in zip(tasks, tokenizers[1:], strict=True):
        if tokenizer is None:
            _require_same_size(base, source)
        else:
            _require_same_kind(base, source, tokenizers[0], tokenizer)
            _add_tokens(united, tokenizer, tokens, known)
    rows = max(_count_rows(base), 1 + max(tokens))
    # without a tokenizer a task has the base's
    maps = [
        _map_rows(source, tokens_by_id(base if tokenizer is None else source), tokens, rows)
        for source, tokenizer in zip((base, *tasks), tokenizers, strict=True)
    ]
    first = UnitedSource(base, maps[0], united)
    others = tuple(UnitedSource(task, own) for task, own in zip(tasks, maps[1:], strict=True))
    first.stand_ins = list(others)
    for other in others:
        other.stand_ins = [first]
        _require_rows(first, other)
    return first, others


class UnitedSource(VirtualSource):
    """A model with a row for each token of a united vocabulary."""

    def __init__(self, source: Source, rows: np.ndarray, tokenizer: dict[str, Any] | None = None) -> None:
        super().__init__(source.label, source.spec, source.checkpoint, source.place)
        self._source, self._rows, self._tokenizer = source, rows, tokenizer
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        # whose rows a token has that this model lacks: their mean
        self.stand_ins: list[UnitedSource] = []
        self.library, self.same_as_base = source.library, source.same_as_base
        self.config = _with_vocabulary(source.config, len(rows))
        self.resized = _find_vocabulary(source)
        self.tensors = {
            name: _resize(info, len(rows)) if name in self.resized else info for name, info in source.tensors.items()
        }
        self._names: dict[int, Names] = {}

    def brings(self, base: UnitedSource) -> bool:
        """Whether it has a token that the base lacks."""
        return bool(((self._rows != _LACKING) & (base._rows == _LACKING)).any())

    def location(self, name: str) -> tuple[int, int] | None:
        """As [`Source.location`]; rows of a vocabulary lie in other places."""
        return None if name in self.resized else self._source.location(name)

    def will_need(self, name: str, start: int, stop: int) -> None:
        """As [`Source.will_need`]."""
        if name not in self.resized:
            self._source.will_need(name, start, stop)

    def read_into(self, name: str, start: int, stop: int, out: torch.Tensor) -> None:
        """As [`Source.read_into`]."""
        if name not in self.resized:
            self._source.read_into(name, start, stop, out)
            return
        width = math.prod(self.tensors[name].shape[1:])
        top, bottom = start // width, -(-stop // width)
        block = torch.empty(bottom - top, width, dtype=out.dtype)
        places = self._rows[top:bottom]
        # runs of rows that follow one another in the file, or that all are lacking
        steps = np.where(places[:-1] == _LACKING, places[1:] != _LACKING, places[1:] != places[:-1] + 1)
        for run in np.split(np.arange(bottom - top), 1 + np.flatnonzero(steps)):
            part = block[run[0] : run[-1] + 1]
            place = int(places[run[0]])
            if place == _LACKING:
                for offset, row in enumerate(run):
                    part[offset] = self._stand_in(name, top + int(row))
            else:
                flat = part.view(-1)
                self._source.read_into(name, place * width, place * width + len(flat), flat)
        out.copy_(block.view(-1)[start - top * width : stop - top * width])

    def _stand_in(self, name: str, row: int) -> torch.Tensor:
        """A row of a token that this model lacks: of the base, or the mean of the tasks that have it."""
        found = []
        for other in self.stand_ins:
            theirs = self._name_in(other, name)
            # the base of a task answers in any case
            if theirs in other.resized and (self._tokenizer is None or other._rows[row] != _LACKING):
                width = math.prod(other.tensors[theirs].shape[1:])
                values = torch.empty(width, dtype=other.tensors[theirs].dtype)
                other.read_into(theirs, row * width, (row + 1) * width, values)
                found.append(values.float())
        # some tokenizers have a token that no model has a row for: asked for it, that model would fail
        return torch.stack(found).mean(0) if found else torch.zeros(math.prod(self.tensors[name].shape[1:]))

    def _name_in(self, other: UnitedSource, name: str) -> str:
        if id(other) not in self._names:
            self._names[id(other)] = Names(other.tensors, self.tensors)
        return self._names[id(other)].in_base(name)

    def small_files(self, patterns: tuple[str, ...] = SMALL_FILES) -> dict[str, Path]:
        """As [`Source.small_files`], with the united tokenizer and its size in the configuration."""
        found = self._source.small_files(patterns)
        if self._tokenizer is None:
            return found
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory()
            self._write_files(Path(self._folder.name))
        own = {path.name: path for path in Path(self._folder.name).iterdir()}
        kept = {name: path for name, path in found.items() if name not in _OTHER_FORMS}
        return kept | {name: path for name, path in own.items() if name in found}

    def _write_files(self, folder: Path) -> None:
        assert self._tokenizer is not None
        write_json(folder / "config.json", self.config, indent=2)
        write_json(folder / "tokenizer.json", self._tokenizer, indent=None)
        settings = self._source.small_files(("tokenizer_config.json",)).get("tokenizer_config.json")
        told = json.loads(settings.read_text(encoding="utf-8")) if settings is not None else {}
        if "added_tokens_decoder" in told:
            added = {str(item["id"]): dict(item) for item in self._tokenizer.get("added_tokens", ())}
            told["added_tokens_decoder"] = {
                number: {key: value for key, value in item.items() if key != "id"} for number, item in added.items()
            }
        write_json(folder / "tokenizer_config.json", told, indent=2)

    def close(self) -> None:
        """Closes the files, and deletes those that were written."""
        super().close()
        if self._folder is not None:
            self._folder.cleanup()


def _read_tokenizer(source: Source) -> dict[str, Any] | None:
    path = source.small_files(("tokenizer.json",)).get("tokenizer.json")
    if path is None:
        return None
    # says in words what is malformed
    tokens_by_id(source)
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _count_rows(source: Source) -> int:
    rows = vocabulary_size(source.config)
    if rows is None:
        raise ValueError(f"{source.title}: its config.json tells no vocab_size, which tokenizer: union needs.")
    # An adapter has the base's configuration, and may hold more rows.
    return max([rows, *(source.tensors[name].shape[0] for name in _find_vocabulary(source))])


def _require_same_size(base: Source, source: Source) -> None:
    """A task without a tokenizer has the base's."""
    if _count_rows(base) != _count_rows(source):
        raise ValueError(
            f"{source.title} has {_count_rows(source)} tokens, the base {_count_rows(base)}, and no tokenizer.json "
            "that tells which; save its tokenizer there."
        )


def _require_same_kind(base: Source, source: Source, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Refuses tokenizers that cut texts otherwise: no vocabulary serves both."""
    kinds = ours["model"].get("type"), theirs["model"].get("type")
    reason = f"is {kinds[1]}, the base's {kinds[0]}" if kinds[0] != kinds[1] else ""
    for key in _CUTTING:
        if not reason and ours.get(key) != theirs.get(key):
            reason = f"has another {key} than the base's"
    if not reason and ours["model"] != theirs["model"]:
        reason = f"({kinds[0]}) has other words than the base's"
    if reason:
        raise ValueError(
            f"{source.title}: its tokenizer {reason}, so that texts are cut otherwise and no vocabulary serves both. "
            "tokenizer: union takes tokenizers that differ in added tokens."
        )


def _add_tokens(united: dict[str, Any], tokenizer: dict[str, Any], tokens: dict[int, str], known: set[str]) -> None:
    """Adds the added tokens of a tokenizer that are new, with the next ids."""
    for item in sorted(tokenizer.get("added_tokens", ()), key=lambda item: int(item["id"])):
        if item["content"] not in known:
            place = 1 + max(tokens)
            tokens[place] = item["content"]
            known.add(item["content"])
            united.setdefault("added_tokens", []).append(item | {"id": place})


def _map_rows(source: Source, own: dict[int, str], tokens: dict[int, str], rows: int) -> np.ndarray:
    """The row of each id in a model with tokens of its own, or that it lacks it."""
    held = _count_rows(source)
    known = {token: place for place, token in own.items() if place < held}
    found = np.array([known.get(tokens.get(place, ""), _LACKING) for place in range(rows)], np.int64)
    if source.label == "base":
        # rows without a token fill its matrix up
        spare = [place for place in range(held) if place not in tokens]
        found[spare] = spare
    return found


def _require_rows(base: UnitedSource, task: UnitedSource) -> None:
    """Refuses a task that brings tokens and has no rows for them in a tensor of the base."""
    names = Names(base.tensors, task.tensors)
    lacking = [name for name in sorted(base.resized) if names.in_task(name) not in task.resized]
    if lacking and task.brings(base):
        raise ValueError(f"{task.title} has tokens that the base lacks, and no {lacking[0]!r} with rows for them.")


def _with_vocabulary(config: dict[str, Any], rows: int) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    part = changed if isinstance(changed.get("vocab_size"), int) else changed["text_config"]
    part["vocab_size"] = rows
    return changed


def _resize(info: TensorInfo, rows: int) -> TensorInfo:
    shape = (rows, *info.shape[1:])
    return TensorInfo(info.dtype, shape, math.prod(shape) * info.dtype.itemsize, "", 0)


def _find_vocabulary(source: Source) -> frozenset[str]:
    """The tensors of a checkpoint that have a row for each token, by what its class says of its embeddings."""
    model = meta_model(source.config)
    if model is None:
        raise ValueError(f"{source.title}: transformers does not know its class, and so nobody which are embeddings.")
    outline: Any = model
    held = [outline.get_input_embeddings(), outline.get_output_embeddings()]
    parts = {id(tensor) for module in held if module is not None for tensor in module.parameters()}
    state = model.state_dict(keep_vars=True)
    names = Names(source.tensors, state)
    found = {names.in_base(name) for name, tensor in state.items() if id(tensor) in parts}
    # BART and its kin have a number for each token besides.
    biased = next((name for name in source.tensors if name.endswith("final_logits_bias")), None)
    if biased is not None:
        raise ValueError(
            f"{source.title}: {biased!r} has a column for each token, which tokenizer: union cannot place."
        )
    return frozenset(found & source.tensors.keys())
