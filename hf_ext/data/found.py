"""Findings about data, and the choice of a split for evaluation."""

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from ..terminal import count_of
from .labels import class_name
from .opening import SourceError, open_source
from .source import DataSource
from .splits import compare_splits, read_labels, split_examples
from .tables import shorten

# Share of each class that is held out, and largest number of held-out examples.
_KEPT, _MOST_KEPT = 0.1, 1000
# Words that programs write where a class is missing.
_MISSING = {"nan", "NaN", "-nan", "NA", "N/A", "n/a", "<NA>", "#N/A", "null", "NULL", "None"}


@dataclass
class Survey:
    """Findings about data. Lengths are samples of a sound, bytes of a text, steps of a series."""

    kind: str
    train: dict[str, Any]
    eval: dict[str, Any] | None
    # Number of training examples, and of all examples.
    learned: int
    about: str
    count: int
    classes: list[str] = field(default_factory=list)
    # True if the data contain class names with their numbers, as folders do
    named: bool = False
    # Pictures: shorter sides in ascending order; True if all are squares of one size; True if all are grey
    sides: list[int] = field(default_factory=list)
    square: bool = False
    gray: bool = False
    # Most bits per channel; 32 if the range is unknown, as of floats
    bits: int = 8
    # Size of the pictures in hq/ relative to those in lq/
    scale: int = 1
    rate: int = 0
    lengths: list[int] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    # Pictures: column of captions
    captions: str | None = None
    # Advice where classes are missing: the flag that names them, or the file that lies at another depth than others
    advice: str = ""
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

    def leave_out(self, count: int, of: int, why: str) -> None:
        """Counts examples that a training leaves out."""
        if count:
            self.left_out.append(f"{count:,} of {count_of(of, 'example')} {why}")
            self.broken = max(self.broken, count / of)

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
            held = open_source(DataSource(**(other := {**train, "split": "validation"})))
            return {**whole, "eval": other, "notes": [*compare_splits(data, held), *_compare_labels(data, held)]}
    # Limit the number of held-out examples, with a rounded share.
    share = float(f"{min(_KEPT, _MOST_KEPT / max(1, len(data))):.1g}")
    chosen, told = split_examples(data, share, 0)
    count = int((~chosen).sum())
    if not 0 < count < len(data):
        return whole
    learned = {**train, "hold_out": share, "hold_out_seed": 0}
    told += _compare_labels(*(data.select(np.flatnonzero(chosen == side)) for side in (False, True)))
    return {"train": learned, "eval": {**learned, "split": "validation"}, "learned": count, "notes": told}


def _compare_labels(learned: Any, measured: Any) -> list[str]:
    """Warnings of the classes that only one part of the data has."""
    kind = learned.features.get("label")
    named = kind.names if isinstance(kind, datasets.ClassLabel) else []
    return compare_classes(read_labels(learned), [*read_labels(measured), *named])


def compare_classes(learned: list[Any], measured: list[Any]) -> list[str]:
    """Warnings of the classes that only the labels of the training or only those of the evaluation have."""
    known, seen = ({*map(class_name, labels)} - {None} for labels in (learned, measured))
    told = {"no training example is of": seen - known, "the evaluation contains no": known - seen if seen else set()}
    return [f"WARNING: {words} {shorten(sorted(names))}" for words, names in told.items() if names]


def tell_unlabelled(survey: Survey, labels: list[Any]) -> None:
    """Counts the examples without a label, and doubts words that may mean none."""
    survey.leave_out(sum(class_name(label) is None for label in labels), len(labels), "without a label")
    if words := sorted(_MISSING & {label for label in labels if isinstance(label, str)}):
        survey.notes.append(f"WARNING: {shorten(words)} is read as a class: empty the cells if it means none")


def rename(label: str | None) -> dict[str, Any]:
    """Renames the column of the label to the name that trainings use."""
    return {"rename_columns": {label: "label"}} if label not in (None, "label") else {}
