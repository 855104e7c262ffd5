"""Findings about data, and the choice of a split for evaluation."""

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

# Share of each class that is held out, and largest number of held-out examples.
_KEPT, _MOST_KEPT = 0.1, 1000
# Numbers above this, and above the number of examples, are not classes.
_MOST_CLASSES = 1000


@dataclass
class Survey:
    """Findings about data. Lengths are samples of a sound, bytes of a text, steps of a series."""

    kind: str
    train: dict[str, Any]
    eval: dict[str, Any] | None
    # Number of training examples, and of all examples.
    learned: int
    about: str
    count: int = 0
    classes: list[str] = field(default_factory=list)
    # True if the data contain class names with their numbers, as folders do
    named: bool = False
    # Pictures: shorter sides in ascending order; True if all have one size; True if all are grey
    sides: list[int] = field(default_factory=list)
    equal: bool = False
    gray: bool = False
    # True if some have more than 8 bits per channel; True if their range is unknown: 32 bits, floats
    deep: bool = False
    boundless: bool = False
    # Size of the pictures in hq/ relative to those in lq/
    scale: int = 1
    rate: int = 0
    lengths: list[int] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    # Pictures: column of captions
    captions: str | None = None
    # Series: number of channels of a list column; True if each step has a label; True if labels are values
    channels: int | None = None
    rows_have_labels: bool = False
    values: bool = False
    # Share of unreadable files
    broken: float = 0.0
    # Sentences: roles of the columns, conversions, unused columns.
    roles: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.count = self.count or self.learned

    def longest(self, limit: int) -> int:
        """The 95th percentile of the lengths, at most a limit."""
        return min(limit, int(np.ceil(np.quantile(self.lengths, 0.95))))

    @property
    def lines(self) -> list[str]:
        """Five lines that describe the data."""
        if self.eval is None:
            split = "all examples for training, none for evaluation"
        elif "hold_out" in self.eval:
            split = f"{self.learned:,} for training, {self.count - self.learned:,} held out for evaluation"
        else:
            split = f"{self.train.get('split', self.train['path'])} for training, "
            split += f"{self.eval.get('split', self.eval['path'])} for evaluation"
        return [
            f"data: {self.about}",
            f"columns: {'; '.join(self.roles) or shorten(self.columns) or 'none'}",
            f"read as: {'; '.join(self.notes) or 'plain values'}",
            f"split: {split}",
            f"left out: {'; '.join(self.left_out) or 'nothing'}",
        ]


def keep_back(train: dict[str, Any], data: Any) -> tuple[dict[str, Any], dict[str, Any] | None, int]:
    """Training source, evaluation source (a split or a held-out share), and number of training examples."""
    if Path(train["path"]).expanduser().is_dir() and _has_split(train, "validation"):
        return train, {**train, "split": "validation"}, len(data)
    # Limit the number of held-out examples, with a rounded share.
    share = float(f"{min(_KEPT, _MOST_KEPT / max(1, len(data))):.1g}")
    measures = int(choose(data, share, 0).sum())
    if not 0 < measures < len(data):
        return train, None, len(data)
    learned = {**train, "hold_out": share, "hold_out_seed": 0}
    return learned, {**learned, "split": "validation"}, len(data) - measures


def _has_split(train: dict[str, Any], split: str) -> bool:
    try:
        open_source(DataSource(**{**train, "split": split}))
    except SourceError:
        return False
    return True


def rename(hints: Hints) -> dict[str, Any]:
    """Renames the column of --label to the name that trainings use."""
    return {"rename_columns": {hints.label: "label"}} if hints.label not in (None, "label") else {}


def are_values(labels: list[Any]) -> bool:
    """True if labels are measured numbers and not classes."""
    given = [value for value in labels if class_name(value) is not None]
    numbers = [float(value) for value in given if isinstance(value, int | float | np.number)]
    return len(numbers) == len(given) > 0 and any(value % 1 for value in numbers)


def require_classes(labels: list[Any]) -> None:
    """Refuses numbers that are not classes."""
    given = [value for value in labels if class_name(value) is not None and not isinstance(value, str)]
    odd = [value for value in given if value % 1 or not abs(value) < max(_MOST_CLASSES, len(labels))]
    if odd:
        raise DataError(
            f"the column `label` holds numbers such as {min(odd)}, which are not classes. Classes are names or whole "
            "numbers; to predict values, start from the recipe of mrconv-regression: hf-ext recipes mrconv/sensors."
        )
