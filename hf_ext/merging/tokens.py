"""Tokens of the rows of two vocabularies, read from the files of their tokenizers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ..errors import DataError

# Files that list tokens, the first that is there counts.
TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt")


def compare_tokens(
    base: Mapping[str, Path], task: Mapping[str, Path], taken: dict[int, str], rows: int | None = None
) -> str:
    """
    Compares what the rows of two vocabularies mean.

    Args:
        base (`Mapping[str, Path]`): Files of the base's tokenizer by their names.
        task (`Mapping[str, Path]`): Those of the task's.
        taken (`dict[int, str]`):
            Tokens that earlier tasks have in rows to which the base gives no meaning; the task's are added.
        rows (`int`, *optional*):
            So many leading rows must mean the same. If `None`, a row must not mean two tokens in the base and the
            tasks: one that has a token in one of them only, and a tokenizer that is not there, do not count.

    Returns:
        `str`: The first difference in words, empty if there is none.
    """
    ours, theirs = (next((files[name] for name in TOKENIZERS if name in files), None) for files in (base, task))
    if theirs is None or (ours is None and rows is not None):
        who = "the base" if ours is None else "the task"
        return "" if rows is None else f"{who} has no {', '.join(TOKENIZERS)}, to tell which rows are the same"
    # those of fine-tunes mostly have the same bytes, and to parse them takes longer
    if ours and ours.stat().st_size == theirs.stat().st_size and ours.read_bytes() == theirs.read_bytes():
        return ""
    first, second = {} if ours is None else _read_tokens(ours), _read_tokens(theirs)
    known = {**taken, **first} if rows is None else first
    compared = sorted(known.keys() & second.keys()) if rows is None else range(rows)
    row = next((row for row in compared if known.get(row) != second.get(row)), None)
    if row is not None:
        where = "the base" if known.get(row) == first.get(row) else "another task"
        return f"token {row} is {known.get(row)!r} in {where} and {second.get(row)!r} in the task"
    if rows is None:
        taken.update({row: token for row, token in second.items() if row not in first})
    return ""


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
