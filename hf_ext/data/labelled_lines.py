"""Lines of text with a label in each: those of fastText are read, others are refused, as they would be plain texts."""

import re
from itertools import islice
from typing import Any

import datasets

from ..errors import DataError

# A word of fastText that is a label, at any place of a line.
_LABEL = re.compile(r"(?:^|(?<=\s))__label__(\S+)\s?")
_TEXTS = ("string", "large_string")
# Rows of a file that tell what all of them are.
_HEAD = 64
# Places of a label in a line of text: before or behind a mark, a number at the start, in brackets at either end,
# `ABBR:exp` of TREC.
_PLACES = (
    r"(\S{1,30}?)\s*(?:[\t,;|]|::?\s)", r".*(?:[\t,;|]|\s::?)\s*([^\s,]{1,30})$", r"([-+]?\d{1,3})\s",
    r"[\[(<](\S{1,30})[\])>]\s", r".*\s[\[(<](\S{1,30})[\])>]$", r"([A-Z]{2,}:\w+)\s",
)  # fmt: skip
_SPARSE = re.compile(r"[-+.\w]+(\s+\d+:[-+.\deE]+)+\s*")


def split_labels(data: Any) -> Any:
    """Texts and labels of lines in fastText's format, `__label__good a text`; other data as they are."""
    if [*(data.features or {})] != ["text"] or getattr(data.features["text"], "dtype", "") not in _TEXTS:
        return data
    head = [row["text"] for row in islice(data, _HEAD)]
    given = [line for line in head if line and line.strip()]
    if not given or not all(map(_LABEL.search, given)):
        return data
    # A line without a word is no example.
    kept = data.filter(lambda text: bool(text.strip()), input_columns=["text"])
    text = datasets.Value("string")
    return kept.map(_split_line, features=datasets.Features({"text": text, "label": text}))


def _split_line(row: dict[str, str]) -> dict[str, str]:
    labels = _LABEL.findall(row["text"])
    if len(labels) != 1:
        raise DataError(f"{len(labels)} labels in the line {row['text']!r:.80}: a text has one, as in __label__good")
    return {"text": _LABEL.sub("", row["text"]).strip(), "label": labels[0]}


def refuse_labelled(path: str, lines: list[str]) -> None:
    """
    Refuses lines that hold a label beside the text, or numbers in the format of LIBSVM.

    Raises:
        DataError: If they do; the message says how they are read, and the flag for plain texts.
    """
    given = [line for line in lines if line and line.strip()]
    if given and all(map(_SPARSE.fullmatch, given)):
        raise DataError(
            f"{path} holds sparse numbers of LIBSVM, such as {given[0]!r:.40}: save them as a table, a row for each "
            "example, with a line of names and a column label."
        )
    for place in _PLACES:
        found = [match[1] for line in given if (match := re.match(place, line))]
        kinds = {*found}
        if len(found) == len(given) > 5 and 1 < len(kinds) <= max(3, 0.2 * len(given)):
            raise DataError(
                f"{path} holds lines with what may be a label in each, {', '.join(sorted(kinds)[:4])}: write "
                "__label__ before each label, as fastText has it, or save a .tsv whose first line has the names label "
                "and text. If the lines are plain texts, say --inputs text."
            )
