"""Unusable examples: a run skips and lists a few of them, and ends if there are too many."""

import json
import sys
from pathlib import Path
from typing import Any

import datasets
from tqdm import tqdm

from ..errors import DataError
from ..files import read_rows, whole_file
from .files import UNDECODABLE, UNUSABLE

# The length of a stream is unknown: the share refers to the examples read so far, and at least to this number.
_LEAST_COUNT = 1000


class BadExamples:
    """The bad examples of one process, and the number that is allowed."""

    # A bad example is replaced by its neighbour in the order of the epoch, which is a function of the position, as the
    # order is: a run that was interrupted leaves out the same ones. Whoever makes a sample (mostly a loader process)
    # hands on what it left out with its batch; the training process counts each once and adds a line to the file.
    # The file is read again when the run goes on, so that the count goes on too.

    def __init__(self, share: float = 0.0, total: int | None = None, file: Path | None = None):
        self.share, self.total, self.file = share, total, file
        self.found: set[str] = set()
        if file is not None and file.exists():
            # What a crash cut off is met again, and begins a line of its own.
            rows = read_rows(file, "example", str)
            with whole_file(file, "w") as mended:
                mended.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            self.found = {row["example"] for row in rows}

    def count_allowed(self, read: int) -> int:
        """The number of examples that may be bad once `read` were read."""
        # 0.29 * 100 is less than 29 by its last bit.
        return int(round(self.share * (max(read, _LEAST_COUNT) if self.total is None else self.total), 9))

    def add(self, rows: list[dict[str, str]], read: int) -> None:
        """Lists new bad examples; raises `ValueError` if there are more than allowed."""
        new = {row["example"]: row for row in rows if row["example"] not in self.found}
        if not new:
            return
        self.found |= new.keys()
        if self.file is not None:
            if len(new) == len(self.found):
                tqdm.write(f"skipped: {describe_bad(rows[0])} {self.file} lists all of them.", file=sys.stderr)
            with self.file.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in new.values())
        if len(self.found) > self.count_allowed(read):
            listed = "" if self.file is None else f" {self.file} lists them."
            told = f"{len(self.found)} examples cannot be used, more than data.max_bad_examples {self.share:g} allows"
            raise DataError(f"{told}; the last one: {describe_bad(rows[-1])}{listed} Repair them, or allow more.")


def describe_bad(row: dict[str, str]) -> str:
    """A sentence with an example, its file and the error."""
    where = f" ({row['file']})" if row["file"] and row["file"] not in row["reason"] else ""
    return f"example {row['example']}{where} cannot be read: {row['reason'].rstrip('.')}."


def name_bad(example: str, place: str | dict[str, Any], error: BaseException) -> dict[str, str]:
    """The line of `bad_examples.jsonl` for an example, of which the file or the row is known."""
    file = find_row_file(place) if isinstance(place, dict) else place
    return {"example": example, "file": file, "reason": str(error) or type(error).__name__}


def read_example(source: datasets.Dataset, index: int) -> dict[str, Any]:
    """One example; a file that vanished or cannot be decoded is named."""
    try:
        return source[index]
    except UNDECODABLE as error:
        row = name_bad(str(index), find_example_file(source, index), error)
        told = "Restore the file or remove it; of training data, data.max_bad_examples sets the share to skip."
        raise OSError(f"{describe_bad(row)} {told}") from error


def decode_row(features: datasets.Features | None, row: dict[str, Any]) -> dict[str, Any]:
    """The example of a row that was not decoded; whatever a decoder raises is an `OSError` or among `UNUSABLE`."""
    try:
        return row if features is None else features.decode_example(row)
    except UNUSABLE:
        raise
    except UNDECODABLE as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def find_example_file(source: datasets.Dataset, index: int) -> str:
    """Paths or names of the pictures or recordings of an example; nothing is decoded."""
    return find_row_file(source.with_format("arrow")[index : index + 1].to_pylist()[0])


def find_row_file(row: dict[str, Any]) -> str:
    """The same of an example that was not decoded."""
    return ", ".join(value["path"] for value in row.values() if isinstance(value, dict) and value.get("path"))
