"""Findings about data, and the part that measures."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from .opening import SourceError, open_source
from .roles import Hints, class_name
from .source import DataSource
from .splits import choose
from .tables import shorten

# Of each class this share is held out, and of all at most about so many.
_KEPT, _MOST_KEPT = 0.1, 1000
# A number above this, and above the number of examples, is no class.
_MOST_CLASSES = 1000


@dataclass
class Survey:
    """Findings about data. Lengths are samples of a sound, bytes of a text, steps of a series."""

    kind: str
    train: dict[str, Any]
    eval: dict[str, Any] | None
    # Examples that are trained on, and all of them.
    learned: int
    about: str
    count: int = 0
    classes: list[str] = field(default_factory=list)
    # whether the data give the classes' names with their numbers, as folders do
    named: bool = False
    # of pictures: the shorter sides, the smallest first; whether all have one size; whether they have no colour
    sides: list[int] = field(default_factory=list)
    equal: bool = False
    gray: bool = False
    # whether some have more than 8 bits a channel, and whether nobody knows their range: 32 bits, floats
    deep: bool = False
    boundless: bool = False
    # how many times the pictures of hq/ are as large as those of lq/
    scale: int = 1
    rate: int = 0
    lengths: list[int] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    # of pictures: the column of captions
    captions: str | None = None
    # of series: channels of a column that holds several; a label for each step; numbers as labels that are no classes
    channels: int | None = None
    rows_have_labels: bool = False
    values: bool = False
    # the share of files that cannot be read
    broken: float = 0.0
    # In words: what the columns are, what was done to them, what is not used.
    roles: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.count = self.count or self.learned

    def longest(self, limit: int) -> int:
        """A length that 95 of 100 examples do not exceed, and no more than a limit."""
        return min(limit, int(np.ceil(np.quantile(self.lengths, 0.95))))

    @property
    def lines(self) -> list[str]:
        """Five lines that describe the data."""
        if self.eval is None:
            split = "all is trained on, nothing measures"
        elif "hold_out" in self.eval:
            split = f"{self.learned:,} are trained on, {self.count - self.learned:,} held out to measure"
        else:
            split = f"{self.train.get('split', self.train['path'])} is trained on, "
            split += f"{self.eval.get('split', self.eval['path'])} measures"
        return [
            f"data: {self.about}",
            f"columns: {'; '.join(self.roles) or shorten_or_none(self.columns)}",
            f"read as: {'; '.join(self.notes) or 'it is written'}",
            f"split: {split}",
            f"left out: {'; '.join(self.left_out) or 'nothing'}",
        ]


def shorten_or_none(names: list[str]) -> str:
    """The columns that are learned from."""
    return shorten(names) or "none"


def keep_back(train: dict[str, Any], data: Any) -> tuple[dict[str, Any], dict[str, Any] | None, int]:
    """Training source, measuring source (a split of its own, or a held-out share), number of training examples."""
    if Path(train["path"]).expanduser().is_dir() and _has_split(train, "validation"):
        return train, {**train, "split": "validation"}, len(data)
    # Of many examples no more than enough, in a round number.
    share = float(f"{min(_KEPT, _MOST_KEPT / max(1, len(data))):.1g}")
    measures = int(choose(data, share, 0).sum())
    if not 0 < measures < len(data):
        return train, None, len(data)
    learned = {**train, "hold_out": share, "hold_out_seed": 0}
    return learned, {**learned, "split": "validation"}, len(data) - measures


def _has_split(train: dict[str, Any], split: str) -> bool:
    """True if there is a split for validation. The one for the test waits for the end."""
    try:
        open_source(DataSource(**{**train, "split": split}))
    except SourceError:
        return False
    return True


def rename(hints: Hints) -> dict[str, Any]:
    """The column that was said to be the label, as trainings call it."""
    return {"rename_columns": {hints.label: "label"}} if hints.label not in (None, "label") else {}


def are_values(labels: list[Any]) -> bool:
    """True if labels are measured numbers and not classes."""
    given = [value for value in labels if class_name(value) is not None]
    numbers = [float(value) for value in given if isinstance(value, int | float | np.number)]
    return len(numbers) == len(given) > 0 and any(value % 1 for value in numbers)


def require_classes(labels: list[Any]) -> None:
    """Refuses numbers that are no classes."""
    given = [value for value in labels if class_name(value) is not None and not isinstance(value, str)]
    odd = [value for value in given if value % 1 or not abs(value) < max(_MOST_CLASSES, len(labels))]
    if odd:
        raise DataError(
            f"the column `label` holds {min(odd)} and the like, no classes. Classes are names or whole numbers; for "
            "values start from the recipe of mrconv-regression: hf-ext recipes mrconv/sensors."
        )
