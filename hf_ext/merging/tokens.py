"""Tokens of the rows of two vocabularies, read from the files of their tokenizers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from ..errors import DataError
from ..files import same_bytes

# Files of tokens that are not read, only compared as a whole.
_WHOLE = (
    *("tokenizer.model", "tokenizer.model.v3", "tekken.json", "spiece.model", "sentencepiece.bpe.model"),
    *("sentencepiece.model", "spm.model", "spm_char.model", "tiktoken.model", "qwen.tiktoken", "vocab.tiktoken"),
    *("vocab.bpe", "bpe.codes", "dict.txt", "prophetnet.tokenizer", "vocab-src.json"),
)
# Files that list tokens, the first that is there counts.
TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt", *_WHOLE)
# Tokens that were added to those of the other files.
_ADDED = ("added_tokens.json", "tokenizer_config.json")
# Beside the rows of tokens: the identity of a file that is compared as a whole.
_FILE = -1


class UnreadableError(Exception):
    """A tokenizer whose tokens cannot be told here."""


def compare_tokens(base: Mapping[str, Path], task: Mapping[str, Path], taken: dict[int, str]) -> str:
    """
    The first difference in words of what the rows of two vocabularies mean, from the files of their tokenizers.

    No row may mean two tokens. One that has a token on one side only, and a tokenizer that is not there, do not count.
    `taken` has the tokens of earlier tasks in rows to which the base gives no meaning; the task's are added. Raises
    `UnreadableError` if the two share no form of tokenizer, and transformers cannot read one of them.
    """
    # of tokenizers in several forms, one that both have
    common = next((name for name in TOKENIZERS if name in base and name in task), None)
    ours, theirs = _choose(base, common), _choose(task, common)
    if not theirs:
        return ""
    # those of fine-tunes mostly have the same bytes, and to parse them takes longer
    if [path.name for path in ours] == [path.name for path in theirs] and all(map(same_bytes, ours, theirs)):
        return ""
    first, second = (_read_tokens(files, load=bool(ours) and common is None) for files in (ours, theirs))
    known = {**taken, **first}
    for row in sorted(known.keys() & second.keys()):
        if known[row] != second[row]:
            where = "the base" if row in first else "another task"
            what = "the tokenizer" if row == _FILE else f"token {row}"
            return f"{what} is {known[row]!r} in {where} and {second[row]!r} in the task"
    taken.update({row: token for row, token in second.items() if row not in first})
    return ""


def count_tokens(files: Mapping[str, Path]) -> int:
    """The rows of a vocabulary, by the files of its tokenizer; 0 if they do not tell them."""
    return 1 + max(_read_tokens(_choose(files, None), load=False), default=_FILE)


def _choose(files: Mapping[str, Path], wanted: str | None) -> list[Path]:
    """The files that tell the tokens of a vocabulary: one that lists them, and those that add to it."""
    listing = wanted or next((name for name in TOKENIZERS if name in files), None)
    if listing is None:
        return []
    added = () if listing == "tokenizer.json" else _ADDED
    return [files[name] for name in (listing, *added) if name in files]


def _read_tokens(files: Sequence[Path], *, load: bool) -> dict[int, str]:
    """The tokens of a vocabulary by their rows, of a file that is no list as transformers loads it if `load`."""
    tokens: dict[int, str] = {}
    if load and files and files[0].name in _WHOLE:
        return _load_tokens(files[0])
    for file in files:
        try:
            tokens |= _read_file(file)
        except Exception as error:
            # that of the library of tokenizers has no class of its own
            raise DataError(f"{file}: malformed ({type(error).__name__}: {error}); fetch it again.") from error
    return tokens


def _load_tokens(file: Path) -> dict[int, str]:
    """The tokens by their rows as transformers loads the tokenizer of a folder."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, local_files_only=True, trust_remote_code=False)
        added = set(tokenizer.get_added_vocab())
        tokens = {row: token for token, row in tokenizer.get_vocab().items()}
    except Exception as error:
        # whatever the class of the tokenizer raises, such as for a library that is not installed
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UnreadableError(f"transformers does not load {file.name} here ({reason:.160})") from error
    if added >= set(tokens.values()):
        # a class that does not find its file may begin with nothing but its special tokens
        raise UnreadableError(f"transformers finds no tokens in {file.name} here")
    return tokens


def _read_file(file: Path) -> dict[int, str]:
    """The tokens of one file by their rows; its errors are those of a malformed file."""
    if file.name in _WHOLE:
        return _read_whole(file)
    if file.name == "tokenizer.json":
        return {row: token for token, row in Tokenizer.from_file(str(file)).get_vocab().items()}
    text = file.read_text(encoding="utf-8")
    if file.name == "vocab.txt":
        return dict(enumerate(text.removesuffix("\n").split("\n")))
    told = json.loads(text)
    if file.name == "tokenizer_config.json":
        return {int(row): item["content"] for row, item in told.get("added_tokens_decoder", {}).items()}
    if any(isinstance(row, dict) for row in told.values()):
        # a vocabulary for each language, as of MMS, whose tokens share the rows
        return _read_whole(file)
    return {row: token for token, row in told.items()}


def _read_whole(file: Path) -> dict[int, str]:
    return {_FILE: f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"}
