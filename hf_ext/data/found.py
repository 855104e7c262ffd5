"""Findings about data, and the choice of a split for evaluation."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from .opening import SourceError, open_source
from .roles import class_name, name_classes
from .source import DataSource
from .splits import choose, lost_groups
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
    # Pictures: shorter sides in ascending order; True if all are squares of one size; True if all are grey
    sides: list[int] = field(default_factory=list)
    square: bool = False
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


def keep_back(train: dict[str, Any], data: Any) -> dict[str, Any]:
    """Source for training, source for evaluation (a split or a held-out share), and number of training examples."""
    whole = {"train": train, "eval": None, "learned": len(data)}
    if Path(train["path"]).expanduser().is_dir():
        with contextlib.suppress(SourceError):
            open_source(DataSource(**(other := {**train, "split": "validation"})))
            return {**whole, "eval": other}
    # Limit the number of held-out examples, with a rounded share.
    share = float(f"{min(_KEPT, _MOST_KEPT / max(1, len(data))):.1g}")
    measures = int(choose(data, share, 0).sum())
    if not 0 < measures < len(data):
        return whole
    learned = {**train, "hold_out": share, "hold_out_seed": 0}
    lost = [f"examples of one {name} may be on both sides, as each class has one alone" for name in lost_groups(data)]
    return {
        "train": learned,
        "eval": {**learned, "split": "validation"},
        "learned": len(data) - measures,
        "notes": lost,
    }


def rename(label: str | None) -> dict[str, Any]:
    """Renames the column of the label to the name that trainings use."""
    return {"rename_columns": {label: "label"}} if label not in (None, "label") else {}


def are_values(labels: list[Any]) -> bool:
    """True if labels are measured numbers and not classes."""
    given = [value for value in labels if class_name(value) is not None]
    numbers = [float(value) for value in given if isinstance(value, int | float | np.number)]
    return len(numbers) == len(given) > 0 and any(value % 1 for value in numbers)


def check_classes(path: str, labels: list[Any]) -> list[str]:
    """The classes that occur in labels; refuses numbers that are none, and two spellings of one name."""
    given = [value for value in labels if class_name(value) is not None and not isinstance(value, str)]
    if odd := [value for value in given if value % 1 or not abs(value) < max(_MOST_CLASSES, len(labels))]:
        raise DataError(
            f"the column `label` holds numbers such as {min(odd)}, which are not classes. Classes are names or whole "
            "numbers; to predict values, start from the recipe of mrconv-regression: hf-ext recipes mrconv/sensors."
        )
    names = name_classes(labels)
    spelled: dict[str, str] = {}
    for name in names:
        other = spelled.setdefault(name.strip().casefold(), name)
        # Single letters may differ in case: beats of a heart are N and n.
        if other != name and len(name.strip()) > 1:
            raise DataError(f"{path}: the classes {other!r} and {name!r} are spelled differently: use one spelling.")
    return names
