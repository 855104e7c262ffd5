"""Tokens of the rows of two vocabularies, read from the files of their tokenizers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ..errors import DataError

# Files that list tokens, the first that is there counts.
TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt")


def compare_tokens(base: Mapping[str, Path], task: Mapping[str, Path], rows: int | None = None) -> str:
    """
    Compares what the rows of two vocabularies mean.

    Args:
        base (`Mapping[str, Path]`): Files of the base's tokenizer by their names.
        task (`Mapping[str, Path]`): Those of the task's.
        rows (`int`, *optional*):
            So many leading rows must mean the same. If `None`, a row must not mean two tokens: one that has a token in
            one of the tokenizers only, and a tokenizer that is not there, do not count.

    Returns:
        `str`: The first difference in words, empty if there is none.
    """
    ours, theirs = (next((files[name] for name in TOKENIZERS if name in files), None) for files in (base, task))
    if ours is None or theirs is None:
        who = "the base" if ours is None else "the task"
        return "" if rows is None else f"{who} has no {', '.join(TOKENIZERS)}, to tell which rows are the same"
    # those of fine-tunes mostly have the same bytes, and to parse them takes longer
    if ours.stat().st_size == theirs.stat().st_size and ours.read_bytes() == theirs.read_bytes():
        return ""
    first, second = _read_tokens(ours), _read_tokens(theirs)
    compared = sorted(first.keys() & second.keys()) if rows is None else range(rows)
    row = next((row for row in compared if first.get(row) != second.get(row)), None)
    return "" if row is None else f"token {row} is {first.get(row)!r} in the base and {second.get(row)!r} in the task"


def _read_tokens(file: Path) -> dict[int, str]:
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
        raise DataError(f"{file}: malformed ({type(error).__name__}: {error}); fetch it again.") from error
