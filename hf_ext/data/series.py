"""Survey of series: one per file, one per row of a table, or several in one table; with their labels."""

import re
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd

from ..errors import DataError
from ..terminal import count_of
from .about import METADATA, find_about, find_folder
from .found import Survey, compare_classes, keep_back, rename, tell_unlabelled
from .labels import are_values, check_classes, class_name
from .opening import open_source
from .roles import Hints, Roles, find_roles
from .sequence_files import (
    ARRAY_COLUMN,
    ARRAYS,
    TS,
    UNLABELLED,
    holds_lists,
    open_arrays,
    read_file,
    split_files,
)
from .source import DataSource
from .splits import find_usable, slice_split
from .tables import Table, option, read_table, shorten
from .walking import list_files

_LABELS = ("label", "labels", "y", "class", "classes", "target", "targets")


def look_at_series(path: str, places: list[Path], ending: str, hints: Hints) -> Survey | None:
    """Tables and arrays of numbers; None where rows are examples of something else."""
    below = {file for file in list_files(*places) if file.suffix.lower() == ending}
    files = sorted(file for file in below if file.name not in METADATA)
    files, named = _split_about(places, files)
    if ending == TS:
        train: dict[str, Any] = {"path": path, "split": "train", "rows": "series"}
        return look_at_lists(train, open_source(DataSource(**train)), [ARRAY_COLUMN], hints)
    if ending in ARRAYS:
        if len(files) == 1 and places[0].is_file():
            return _look_at_arrays(path, files[0], hints)
        if apart := [file for file in files if file.stem.lower().partition("_")[0] in _LABELS]:
            raise DataError(
                f"{path}: {apart[0].name} contains the labels of another file: save both in one file per split, "
                "np.savez('train.npz', X=..., label=...)."
            )
        return _look_at_tables(path, files, None, Roles("positions", list(read_file(files[0]))), hints, named)
    if ending == ".parquet" and holds_lists(files[0]):
        # Pictures, for instance, or lists.
        return None
    table = read_table(files[0], label=hints.label)
    if not len(table.frame):
        raise DataError(f"{files[0]} has no row below the names of its columns: add rows, or remove the file.")
    try:
        roles = find_roles(table, hints)
    except ValueError as error:
        raise DataError(f"{files[0]}: {error}.") from error
    if roles.layout == "texts":
        return None
    for name in roles.inputs:
        if (infinite := np.isinf(table.frame[name].to_numpy(dtype=np.float64, na_value=np.nan))).any():
            raise DataError(
                f"{files[0]}: column {name!r}, row {int(infinite.argmax()) + 1}: contains an infinite number; leave "
                "the cell empty if the value is unknown."
            )
    roles.notes += table.notes
    if len(places) == 1 and places[0].is_dir() and split_files(files, "train"):
        files = files[:1]
    return _look_at_tables(path, files, table, roles, hints, named)


def _split_about(places: list[Path], files: list[Path]) -> tuple[list[Path], list[Path] | None]:
    """The files of series, and those of them that the table beside them may not name; None where there is none."""
    if len(places) > 1 or not places[0].is_dir():
        return files, None
    folder = find_folder(places[0], "train")
    below = [file for file in files if folder in file.parents]
    about = find_about(folder, below) if below else None
    named = [file for file in below if file != about]
    return [file for file in files if file != about], None if about is None else named


def _look_at_tables(
    path: str, files: list[Path], table: Table | None, roles: Roles, hints: Hints, named: list[Path] | None
) -> Survey:
    """Rows that are series, series one under the other, one long series, or a file for each."""
    train: dict[str, Any] = {"path": path, "split": "train", "rows": roles.layout}
    train |= {name: value for name in ("time", "series") if (value := getattr(roles, name)) is not None}
    train |= rename(hints.label or roles.label)
    count, steps, how, columns = len(files), 0, ", a file each", roles.inputs
    if table is not None and roles.layout == "series":
        count, steps, how, columns = len(table.frame), len(columns), ", a row each", [ARRAY_COLUMN]
    elif table is not None and roles.series is not None:
        count, how = table.frame[roles.series].nunique(), f", named by {roles.series}"
    elif table is not None and len(files) == 1:
        steps, how = len(table.frame), ""
    length = f" of {count_of(steps, 'step')}" if steps else ""
    about = "; ".join([f"{count:,} series{length}{how}", *_columns(roles), *roles.notes])
    if roles.label is None and how != ", a file each":
        _refuse_unlabelled(path, about, table, roles)
    if roles.problems:
        raise DataError(f"{path}: {about}. {_sentence(roles.problems)}")
    data = open_source(DataSource(**train))
    if "label" not in data.features:
        _refuse_unlabelled(path, about, None, roles)
    is_long = not how and len(data) == 1
    # The last part of one long series measures.
    parts = {"train": {**train, "split": "train[:80%]"}, "eval": {**train, "split": "train[80%:]"}, "learned": 1}
    survey = _measure(parts if is_long else keep_back(train, data), data, columns, hints.values, how)
    _tell(survey, table, roles)
    if is_long and survey.rows_have_labels:
        # Classes that only one part of the recording has, where 80 % of its time is for training.
        labels = [value for row in data["label"] for value in row]
        steps = len(slice_split("train[:80%]", len(labels)))
        advice = "the evaluation is the last 20 %: record each class several times, or in several series"
        if told := compare_classes(labels[:steps], labels[steps:]):
            survey.notes.append(f"{'; '.join(told)}; {advice}")
    if named is not None and len(named) > len(data):
        survey.left_out.append(f"{count_of(len(named) - len(data), 'file')} without a row in the table beside them")
    return survey


def _look_at_arrays(path: str, file: Path, hints: Hints) -> Survey:
    """Arrays `[examples, steps, channels]` with an array of labels."""
    arrays = read_file(file)
    flat = [name for name, values in arrays.items() if values.ndim == 1]
    label = hints.label or next((name for name in flat if name.lower() in _LABELS), None)
    inputs = list(hints.inputs) or [name for name, values in arrays.items() if values.ndim in (2, 3) and name != label]
    shapes = ", ".join(f"{name} {[*values.shape]}" for name, values in arrays.items())
    if label not in arrays or len(inputs) != 1:
        raise DataError(
            f"{path}: arrays {shapes}: name one of the series, [examples, steps, channels], and one of the classes: "
            f"--inputs NAME --label NAME. Save each split as a separate file. {UNLABELLED}"
        )
    if arrays[label].shape != arrays[inputs[0]].shape[: arrays[label].ndim]:
        raise DataError(
            f"{path}: {shapes}: {label} must hold a class for each example, or for each step; of one-hot rows save "
            f"{label}.argmax(1)."
        )
    renamed = rename(label)
    data = open_arrays(file, "train").rename_columns(renamed.get("rename_columns", {}))
    survey = look_at_lists({"path": path, "split": "train", **renamed}, data, inputs, hints)
    survey.roles.append(f"label in {label}")
    survey.left_out += [name for name in arrays if name not in (*inputs, label)]
    return survey


def is_list_of_numbers(kind: Any) -> bool:
    """True if a column holds a series of numbers, of one channel or several."""
    inner = getattr(kind, "feature", None)
    inner = getattr(inner, "feature", inner)
    return isinstance(inner, datasets.Value) and inner.dtype.startswith(("float", "int", "uint"))


def look_at_lists(train: dict[str, Any], data: Any, columns: list[str], hints: Hints) -> Survey:
    """A series in each example, whose columns are lists."""
    known = [key for key, kind in data.features.items() if key.lower() in _LABELS and isinstance(kind, datasets.Value)]
    renamed = known[0] if "label" not in data.features and len(known) == 1 else None
    if renamed is not None:
        train, data = {**train, **rename(renamed)}, data.rename_columns({renamed: "label"})
    if "label" not in data.features:
        raise DataError(
            f"{train['path']}: {len(data):,} series in {shorten(columns)}, and no label. {UNLABELLED} Add a column "
            "label, or give its name: --label NAME."
        )
    columns = [name for name in columns if name != "label"]
    survey = _measure(keep_back(train, data), data, columns, hints.values)
    survey.roles = [f"numbers in {shorten(columns)}", *([f"label in {renamed}"] if renamed is not None else [])]
    if survey.channels is not None and survey.channels > max(survey.lengths):
        survey.notes.append("fewer steps than channels: transpose the array if the axes are swapped")
    return survey


def _measure(kept: dict[str, Any], data: Any, columns: list[str], wanted: bool | None, how: str = "") -> Survey:
    """Survey of opened series: lengths, channels, classes or values."""
    survey = Survey("series", **kept, about=f"{len(data):,} series", count=len(data), columns=columns)
    _read_labels(survey, data, wanted)
    # Numbers that are too large are counted already.
    with np.errstate(over="ignore"):
        first = np.asarray(data.with_format("numpy")[int(np.argmax(survey.lengths))][columns[0]])
    survey.channels = first.shape[1] if first.ndim == 2 else None
    survey.lengths = [length for length in survey.lengths if length]
    channels = survey.channels or len(columns)
    survey.about += f" of {_span(survey.lengths)}{f' and {channels} channels' if channels > 1 else ''}{how}"
    if survey.values:
        survey.about += "; values to be told"
    elif survey.classes:
        place = " of steps" if survey.rows_have_labels else ""
        survey.about += f"; {count_of(len(survey.classes), 'class', 'classes')}{place}: {shorten(survey.classes)}"
    return survey


def _span(lengths: list[int]) -> str:
    least = f"{min(lengths):,} to " if len({*lengths}) > 1 else ""
    return least + count_of(max(lengths), "step")


def _read_labels(survey: Survey, data: Any, wanted: bool | None) -> None:
    """Lengths of all series, and their classes or values."""
    path, kind = survey.train["path"], data.features["label"]
    survey.rows_have_labels = not isinstance(kind, datasets.Value | datasets.ClassLabel)
    if survey.rows_have_labels and not isinstance(getattr(kind, "feature", None), datasets.Value):
        raise DataError(f"{path}: the column label must hold one text or number for each series, or for each step.")
    raw = data.with_format("arrow").select_columns(list({*survey.columns, "label"}))[:]
    parts = {name: raw[name].combine_chunks().value_lengths() for name in survey.columns}
    sizes = {name: [size or 0 for size in part.to_pylist()] for name, part in parts.items()}
    survey.lengths = sizes[survey.columns[0]]
    for name, others in sizes.items():
        if odd := [row for row, size in enumerate(others, 1) if size != survey.lengths[row - 1]]:
            raise DataError(
                f"{path}, row {odd[0]}: {survey.columns[0]} and {name} differ in length, but a series has the same "
                "steps in all channels."
            )
    usable = find_usable(data, survey.columns)
    survey.leave_out(int((~usable).sum()), len(data), "without a number, or with an infinite one")
    if not usable.any():
        raise DataError(f"{path}: no series in {shorten(survey.columns)} has a number.")
    labels = raw["label"].combine_chunks()
    found = (labels.flatten() if survey.rows_have_labels else labels).to_pylist()
    if not survey.rows_have_labels:
        tell_unlabelled(survey, found)
        survey.values = are_values(found, wanted)
    given = [value for value in found if class_name(value) is not None]
    if not survey.rows_have_labels and all(type(value) in (int, float) and value % 1 == 0 for value in given):
        kinds = ("classes", "--values predicts them"), ("values to predict", "--classes takes them as classes")
        survey.notes.append("the whole numbers of label are {}; {}".format(*kinds[survey.values]))
    if survey.values:
        return
    survey.classes = check_classes(path, found, wanted)
    if len(survey.classes) == len(found) > 2:
        raise DataError(
            f"{path}: {survey.about}; the label has {len(found)} different values, one each: it names the examples. A "
            "class occurs several times; --values predicts numbers."
        )
    if len(survey.classes) < 2:
        only = survey.classes or "missing"
        raise DataError(f"{path}: {survey.about}; the only class is {only}; a classifier needs at least two.")


def _refuse_unlabelled(path: str, about: str, table: Table | None, roles: Roles) -> None:
    """Refuses series that nothing is known of, with all findings; of a file for each there is no table."""
    which, files = "--label NAME", ""
    if table is None:
        files = "Put the files into a folder for each class, name the class of each in a metadata.csv, or: "
    elif texts := [name for name, why in roles.left_out.items() if why == "texts"]:
        # Classes are fewer than names.
        which = option("label", min(texts, key=lambda name: table.frame[name].nunique()))
    raise DataError(
        f"{path}: {about}; and no label. {_sentence([*roles.problems, UNLABELLED[:-1]])} {files}Add a column label "
        f"with the class of each {'series' if roles.layout == 'series' or roles.series else 'row'}, or say which it "
        f"is: {which}."
    )


def _sentence(parts: list[str]) -> str:
    return " ".join(f"{part[:1].upper()}{part[1:]}." for part in parts)


def _columns(roles: Roles) -> list[str]:
    found = [] if roles.layout == "series" else [f"numbers in {shorten(roles.inputs)}"]
    found += [] if roles.series is None else [f"series named in {roles.series}"]
    return found + ([] if roles.label is None else [f"label in {roles.label}"])


def _tell(survey: Survey, table: Table | None, roles: Roles) -> None:
    survey.roles = _columns(roles)
    survey.notes += roles.notes
    survey.left_out += [f"{name} ({why})" for name, why in roles.left_out.items()]
    if table is not None and roles.layout != "series":
        missing = {name: int(table.frame[name].isna().sum()) for name in roles.inputs}
        told = [f"{name} {count}" for name, count in missing.items() if count]
        still = [name for name in roles.inputs if table.frame[name].nunique() < 2 and len(table.frame) > 1]
        marks = {name: mark for name in roles.inputs if (mark := _find_mark(table.frame[name])) is not None}
        for name, mark in marks.items():
            survey.notes.append(f"WARNING: {mark:g} in {name} is read as a number: empty the cells if it means none")
        if told:
            survey.notes.append(f"missing values by a mask: {shorten(told)}")
        if still:
            survey.notes.append(f"{shorten(still)} never changes")


def _find_mark(values: "pd.Series[Any]") -> float | None:
    """A number such as -999 that several cells have, far from all others, as programs write what is missing."""
    given = np.unique(values.dropna().to_numpy(dtype=np.float64))
    for mark, rest in ((given[0], given[1:]), (given[-1], given[:-1])) if len(given) > 2 else ():
        far = np.abs(rest - mark).min() > 3 * (rest.max() - rest.min())
        if far and re.fullmatch(r"-?9{2,}|-?8{2,}", f"{mark:.0f}") and (values == mark).sum() > 1:
            return float(mark)
    return None
