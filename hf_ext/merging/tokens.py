"""Which tokens the rows of a vocabulary mean: rows are merged only where they mean the same ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .sources import Source

_FILES = ("tokenizer.json", "vocab.json", "vocab.txt")


def vocabulary_size(config: Mapping[str, Any]) -> int | None:
    """The `vocab_size` of a configuration, of its text model if it has several."""
    for part in (config, config.get("text_config")):
        if isinstance(part, Mapping) and isinstance(part.get("vocab_size"), int):
            return int(part["vocab_size"])
    return None


def has_rows_of_tokens(base: Source, name: str, task: Source, own: str) -> bool:
    """Whether a tensor has one row for each token, in the base and in a task, and equally many columns."""
    ours, theirs = base.tensors[name].shape, task.tensors[own].shape
    if not ours or not theirs or ours[1:] != theirs[1:]:
        return False
    return (vocabulary_size(base.config), vocabulary_size(task.config)) == (ours[0], theirs[0])


def find_other_token(base: Source, task: Source) -> str:
    """A row that means one token in the base and another one in a task, in words; empty if none is known."""
    ours, theirs = find_tokenizer(base), find_tokenizer(task)
    if ours is None or theirs is None or _say_the_same(ours, theirs):
        return ""
    tokens = read_tokens(base, ours), read_tokens(task, theirs)
    # a row that one of them has no token for is not asked for there
    row = min((row for row in tokens[0].keys() & tokens[1].keys() if tokens[0][row] != tokens[1][row]), default=None)
    return "" if row is None else f"token {row} is {tokens[0][row]!r} in the base and {tokens[1][row]!r} in the task"


def require_same_tokens(base: Source, task: Source, rows: int, name: str) -> None:
    """Refuses to merge leading rows of a resized vocabulary if they do not mean the same tokens."""
    advice = "Use shape_policy: extra, which keeps the whole tensor with the task."
    tokens = []
    for source in (base, task):
        file = find_tokenizer(source)
        if file is None:
            raise ValueError(
                f"{name!r}: {source.title} has no tokenizer.json, vocab.json or vocab.txt, so that nobody can "
                f"tell which rows of the vocabularies belong together. {advice}"
            )
        tokens.append(read_tokens(source, file))
    for row in range(rows):
        ours, theirs = (found.get(row) for found in tokens)
        if ours != theirs:
            raise ValueError(
                f"{name!r}: token {row} is {ours!r} in the base and {theirs!r} in {task.title}: the rows do "
                f"not belong together. {advice}"
            )


def find_tokenizer(source: Source) -> Path | None:
    """The file of a source that lists its tokens."""
    files = source.small_files(_FILES)
    return next((files[name] for name in _FILES if name in files), None)


def _say_the_same(first: Path, second: Path) -> bool:
    """Whether two files have the same bytes, as those of fine-tunes mostly have: to parse them takes longer."""
    return first.stat().st_size == second.stat().st_size and first.read_bytes() == second.read_bytes()


def read_tokens(source: Source, file: Path) -> dict[int, str]:
    """The tokens of a vocabulary by their rows."""
    try:
        text = file.read_text(encoding="utf-8")
        if file.name == "vocab.txt":
            return dict(enumerate(text.removesuffix("\n").split("\n")))
        told = json.loads(text)
        vocabulary = told if file.name == "vocab.json" else told["model"]["vocab"]
        # a unigram model lists [token, score]; the others map tokens to rows
        if isinstance(vocabulary, list):
            tokens = {row: item[0] for row, item in enumerate(vocabulary)}
        else:
            tokens = {row: token for token, row in vocabulary.items()}
        added = told.get("added_tokens", ()) if file.name == "tokenizer.json" else ()
        return tokens | {item["id"]: item["content"] for item in added}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{source.title}: {file.name} is malformed ({error}); fetch it again.") from error
