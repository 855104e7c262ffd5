"""Findings about data, the choice of a split for evaluation, and the survey of series of numbers."""

import contextlib
import re
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd

from ..errors import DataError
from ..terminal import count_of
from .about import Part, find_part, find_table
from .cells import MISSING, are_values, check_classes, class_name, find_amount, is_number
from .files import list_files
from .opening import SourceError, open_source
from .roles import GROUPS, Hints, Roles, find_roles, is_prose, may_rise
from .sequence_files import ARRAY_COLUMN, ARRAYS, TS, UNLABELLED, holds_lists, is_sequence, read_file
from .source import DataSource
from .splits import compare_splits, find_usable, read_labels, read_splits, set_tests_apart, slice_split, split_examples
from .tables import Table, option, read_table, shorten

# Share of each class that is held out, and largest number of held-out examples.
_KEPT, _MOST_KEPT = 0.1, 1000
# A column beside texts that holds no more different cells than this share of the rows may name classes.
CLASSES = 0.2
# Words that programs write where a class is missing.
_MISSING = {"nan", "NaN", "-nan", "NA", "N/A", "n/a", "<NA>", "#N/A", "null", "NULL", "None"}
# A name that ends in a number, as fold1 and patient_02.
_NUMBERED = re.compile(r"(.*?[^\W\d_])[\W_]*\d+")
# Persons who are recognised by their voices and hands; patients are seldom classes.
_KNOWN = re.compile(r"(speaker|spk|singer|author|writer|reader|sprecher|autor|locuteur|hablante).*", re.IGNORECASE)
_LABELS = ("label", "labels", "y", "class", "classes", "target", "targets")


@dataclass
class Survey:
    """Findings about data. Lengths are samples of a sound, bytes of a text, steps of a series."""

    kind: str
    train: dict[str, Any]
    eval: dict[str, Any] | None
    learned: int  # number of training examples; `count` is that of all but those of a test
    about: str
    count: int
    classes: list[str] = field(default_factory=list)
    named: bool = False  # True if the data contain class names with their numbers, as folders do
    # Pictures: shorter sides in ascending order; True if all are squares of one size; True if all are grey; most bits
    # per channel, 32 if the range is unknown, as of floats; size of those in hq/ relative to those in lq/
    sides: list[int] = field(default_factory=list)
    square: bool = False
    gray: bool = False
    bits: int = 8
    scale: int = 1
    rate: int = 0
    lengths: list[int] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    captions: str | None = None  # Pictures: column of captions
    # Advice where classes are missing: the flag that names them, or the file that lies at another depth than others
    advice: str = ""
    # Series: number of channels of a list column; True if each step has a label; True if labels are values
    channels: int | None = None
    rows_have_labels: bool = False
    values: bool = False
    broken: float = 0.0  # Share of unreadable files
    # Sentences: roles of the columns, conversions, unused columns
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
            learned, measured = (part.get("split", part["path"]) for part in (self.train, self.eval))
            split = f"{learned} for training, {measured} for evaluation"
        classes = "; values to be told" if self.values else ""
        if self.classes:
            place = " of steps" if self.rows_have_labels else ""
            classes = f"; {count_of(len(self.classes), 'class', 'classes')}{place}: {shorten(self.classes)}"
        return [
            f"data: {self.about}{classes}",
            f"columns: {'; '.join(self.roles) or shorten(self.columns) or 'none'}",
            f"read as: {'; '.join(self.notes) or 'plain values'}",
            f"split: {split}",
            f"left out: {'; '.join(self.left_out) or 'nothing'}",
        ]


def keep_back(train: dict[str, Any], data: Any) -> dict[str, Any]:
    """Source for training, source for evaluation (a split or a held-out share), and number of training examples."""
    try:
        data, tests = set_tests_apart(data)
    except DataError as error:
        raise DataError(f"{train['path']}: {error}") from error
    whole: dict[str, Any] = {"train": train, "eval": None, "learned": len(data), "count": len(data), "notes": []}
    held = dict[str, Any]()
    for split in ("validation", "test") if Path(train["path"]).expanduser().is_dir() else ():
        with contextlib.suppress(SourceError):
            held[split] = open_source(DataSource(**{**train, "split": split}))
    given = read_splits(data) is not None
    if "validation" in held and (given or len(tests)):
        both = "a folder or file validation, and a column that names splits: remove one of them"
        raise DataError(f"{train['path']} has {both}.")
    held |= {"test": tests} if len(tests) else {}
    told = {split: [*compare_splits(data, part), *_compare_labels(data, part)] for split, part in held.items()}
    if "test" in told:
        whole["notes"] = [line.replace(":", ": of test,", 1) for line in told["test"] if line.startswith("WARNING")]
        flags = "--data.eval.split test" + " --data.eval.hold_out 0" * ("validation" not in told and not len(tests))
        whole["left_out"] = [tell_test(flags)]
    if "validation" in told:
        return {**whole, "eval": {**train, "split": "validation"}, "notes": told["validation"] + whole["notes"]}
    share = float(f"{min(_KEPT, _MOST_KEPT / max(1, len(data))):.1g}")
    chosen, kept = split_examples(data, share, 0)
    count = int((~chosen).sum())
    if not 0 < count < len(data):
        if len(tests):
            learned = f"the {count_of(len(data), 'example')} that a column calls train"
            raise DataError(f"{train['path']}: {learned} cannot be split: call some validation.")
        return whole
    kept_back = {**train, "hold_out": share, "hold_out_seed": 0}
    parts = [data.select(np.flatnonzero(chosen == side)) for side in (False, True)]
    kept += [*(compare_splits(*parts) if given else ()), *_compare_labels(*parts)]
    measured = {**kept_back, "split": "validation"}
    found = {"train": kept_back, "eval": measured, "learned": count}
    return {**whole, **found, "notes": [*kept, *whole["notes"]]}


def tell_test(flags: str) -> str:
    """The test split, which chooses nothing, and how it measures."""
    return f"the split test, which nothing learns or chooses by: for the end, `hf-ext evaluate` with {flags}"


def _compare_labels(learned: Any, measured: Any) -> list[str]:
    kind = learned.features.get("label")
    held = measured.with_format(None)["label"] if "label" in measured.features else []
    if kind is None:
        return []
    if all(label is None for label in held):
        return ["WARNING: no evaluation example has a label"]
    if isinstance(getattr(kind, "feature", None), datasets.Value):
        steps = ([*chain(*filter(None, part.with_format(None)["label"]))] for part in (learned, measured))
        return compare_classes(*([] if are_values(labels) else labels for labels in steps))
    named = kind.names if isinstance(kind, datasets.ClassLabel) else []
    # Few whole numbers would be classes, of which all together are values.
    if isinstance(kind, datasets.Value) and are_values([*learned.with_format(None)["label"], *held]):
        return []
    return compare_classes(read_labels(learned), [*read_labels(measured), *named])


def compare_classes(learned: list[Any], measured: list[Any]) -> list[str]:
    """Warnings of the classes that only the labels of the training or only those of the evaluation have."""
    known, seen = ({*map(class_name, labels)} - {None} for labels in (learned, measured))
    told = {"no training example is of": seen - known, "the evaluation contains no": known - seen if seen else set()}
    return [f"WARNING: {words} {shorten(sorted(names))}" for words, names in told.items() if names]


def tell_unlabelled(survey: Survey, labels: list[Any]) -> None:
    """Counts the examples without a label, and doubts words that may mean none."""
    survey.leave_out(sum(class_name(label) is None for label in labels), len(labels), "without a label")
    _doubt_words(survey, labels)


def _doubt_words(survey: Survey, labels: list[Any]) -> None:
    """Warns of classes whose names may say that there is no class, or a group."""
    names = {label for label in labels if isinstance(label, str)}
    # Beside numbers, none and - say so more often than beside names.
    beside = {name for name in names if name.lower() in MISSING} if any(map(is_number, names)) else set()
    # Such as the ten folds of UrbanSound8K.
    called = sorted(names | {*survey.classes})
    called = [] if all(map(_KNOWN.fullmatch, called)) else called
    if len(called) > 1 and all((of := _NUMBERED.fullmatch(name)) and GROUPS.fullmatch(of[1]) for name in called):
        told = "as groups, not as classes: if they are some, name the classes by --label NAME, or add a metadata.csv"
        survey.notes.append(f"WARNING: {shorten(called)} are named {told} with file_name and label")
    if words := sorted(_MISSING & names | beside):
        survey.notes.append(f"WARNING: {shorten(words)} is read as a class: empty the cells if it means none")


def refuse_free_texts(path: str, about: str, labels: list[Any], hints: Hints) -> None:
    """Refuses labels that are no classes, unless the user says so: each differs, or they are texts, seldom alike."""
    given = [label for label in labels if class_name(label) is not None]
    if hints.values is not False and (amount := find_amount(given)) is not None:
        told = "is no number, where others are or hold some: write numbers alone, in one unit, and empty cells without"
        raise DataError(f"{path}: {about}; the label {amount!r:.60} {told} one; --classes takes each as a class.")
    kinds = {*map(class_name, given)}
    is_free = hints.label is None and len(kinds) > max(2, 0.5 * len(given))
    is_free = is_free and is_prose(pd.Series(given, dtype=object))
    if hints.values is not False and (is_free or len(kinds) == len(given) > 2):
        told = f"the {len(given)} labels are {len(kinds)} different ones"
        advice = "a class occurs several times; --label NAME names another column, --values predicts numbers, and"
        raise DataError(f"{path}: {about}; {told}: {advice} --classes takes them as classes.")


def rename(label: str | None) -> dict[str, Any]:
    """Renames the column of the label to the name that trainings use."""
    return {"rename_columns": {label: "label"}} if label not in (None, "label") else {}


def span(values: list[Any], form: str = "") -> str:
    """The least and the largest of some numbers, or the one that all are."""
    return " to ".join(dict.fromkeys(f"{value:{form}}" for value in (min(values), max(values))))


def look_at_series(path: str, places: list[Path], ending: str, hints: Hints) -> Survey | None:
    """Tables and arrays of numbers; None where rows are examples of something else."""
    below, is_folder = sorted(filter(is_sequence, list_files(*places))), places[0].is_dir()
    part = find_part(places[0], "train", below) if is_folder else Part(below, places)
    about = find_table(part.places[0], below)[0] if is_folder else None
    files = [file for file in part.files if file != about]
    files, table = [file for file in files if file.suffix.lower() == ending] or files, None
    if ending == TS:
        train: dict[str, Any] = {"path": path, "split": "train", "rows": "series"}
        if hints.label not in (None, "label"):
            raise DataError(f"{path}: there is no column {hints.label!r}; the columns are {ARRAY_COLUMN}, label.")
        return look_at_lists(train, open_source(DataSource(**train)), hints)
    if ending in ARRAYS and len(files) == 1 and (part.named or not is_folder):
        return _look_at_arrays(path, files[0], hints)
    if ending in ARRAYS:
        if apart := [file for file in files if file.stem.lower().partition("_")[0] in _LABELS]:
            told = "are those of another file: save both in one, np.savez('train.npz', X=..., label=...)."
            raise DataError(f"{path}: the labels in {apart[0].name} {told}")
        columns, named = [*read_file(files[0])], (hints.time, hints.series, *hints.inputs)
        if unknown := [name for name in named if name is not None and name not in columns]:
            raise DataError(f"{files[0]}: there is no column {unknown[0]!r}; the columns are {shorten(columns)}.")
        label = hints.label or "label"
        channels = [*hints.inputs] or [name for name in columns if name not in (hints.time, label)]
        roles = Roles("positions", channels, left_out={name: "the time" for name in columns if name == hints.time})
    elif ending == ".parquet" and holds_lists(files[0]):
        return None
    else:
        table = read_table(files[0], label=hints.label)
        # The table beside the files may hold the label.
        own_hints = hints if about is None or hints.label in table.frame else replace(hints, label=None)
        if (roles := _find_roles(files[0], table, own_hints)).layout == "texts":
            return None
    survey = _look_at_tables(path, files, table, roles, hints, about)
    every = DataSource(**{**survey.train, "hold_out": 0.0}) if about is not None else None
    if every is not None and (absent := len(files) - len(open_source(every))) > 0:
        survey.left_out.append(f"{count_of(absent, 'file')} without a row in the table beside them")
    return survey


def _find_roles(file: Path, table: Table, hints: Hints) -> Roles:
    """The roles of a table's columns; refuses one without rows, or with infinite numbers."""
    if not len(table.frame):
        raise DataError(f"{file} has no row below the names of its columns: add rows, or remove the file.")
    try:
        roles = find_roles(table, hints)
    except ValueError as error:
        raise DataError(f"{file}: {error}.") from error
    for name in roles.inputs if roles.layout != "texts" else ():
        if (infinite := np.isinf(table.frame[name].to_numpy(dtype=np.float64, na_value=np.nan))).any():
            row = int(infinite.argmax()) + 1
            raise DataError(f"{file}: column {name!r}, row {row}: an infinite number; empty the cell if unknown.")
    roles.notes += table.notes
    return roles


def _look_at_tables(
    path: str, files: list[Path], table: Table | None, roles: Roles, hints: Hints, beside: Path | None
) -> Survey:
    """Rows that are series, series one under the other, one long series, or a file for each."""
    train: dict[str, Any] = {"path": path, "split": "train", "rows": roles.layout}
    train |= {name: value for name in ("time", "series") if (value := getattr(roles, name)) is not None}
    train |= rename(hints.label or roles.label)
    count, length, how, columns = len(files), "", ", a file each", roles.inputs
    if table is not None and roles.layout == "series":
        count, length = len(table.frame), f" of {count_of(len(columns), 'step')}"
        how, columns = ", a row each", [ARRAY_COLUMN]
    elif table is not None and roles.series is not None:
        count, how = table.frame[roles.series].nunique(), f", named by {roles.series}"
    elif table is not None and len(files) == 1:
        length, how = f" of {count_of(len(table.frame), 'step')}", ""
    named = [f"numbers in {shorten(roles.inputs)}"] if roles.layout != "series" else []
    named += [f"series named in {roles.series}"] if roles.series is not None else []
    named += [f"label in {roles.label}"] if roles.label is not None else []
    about = "; ".join([f"{count:,} series{length}{how}", *named, *roles.notes])
    if roles.label is None and how != ", a file each":
        _refuse_unlabelled(path, about, table, roles)
    if roles.problems:
        raise DataError(f"{path}: {about}. {_sentence(roles.problems)}")
    data = open_source(DataSource(**train))
    if "label" not in data.features:
        _refuse_unlabelled(path, about, None, roles, beside)
    kept = keep_back(train, data)
    if is_long := not how and len(data) == 1 and kept["eval"] is None:
        # The last part of one long series measures.
        kept |= {"train": {**train, "split": "train[:80%]"}, "eval": {**train, "split": "train[80%:]"}}
    survey = _measure(kept, data, columns, hints, how)
    survey.roles = named
    survey.notes += roles.notes
    survey.left_out += [f"{name} ({why})" for name, why in roles.left_out.items()]
    if table is not None and roles.layout != "series":
        _tell_values(survey, table.frame, roles.inputs)
    if is_long and survey.rows_have_labels:
        # Classes that only one part of the recording has, where 80 % of its time is for training.
        labels = [value for row in data["label"] for value in row]
        steps = len(slice_split("train[:80%]", len(labels)))
        advice = "the evaluation is the last 20 %: record each class several times, or in several series"
        if told := compare_classes(labels[:steps], labels[steps:]):
            survey.notes.append(f"{'; '.join(told)}; {advice}")
    return survey


def _look_at_arrays(path: str, file: Path, hints: Hints) -> Survey:
    """Arrays `[examples, steps, channels]` with an array of labels."""
    arrays = read_file(file)
    flat = [name for name, values in arrays.items() if values.ndim == 1]
    label = hints.label or next((name for name in flat if name.lower() in _LABELS), None)
    inputs = list(hints.inputs) or [name for name, values in arrays.items() if values.ndim in (2, 3) and name != label]
    shapes = ", ".join(f"{name} {[*values.shape]}" for name, values in arrays.items())
    if label not in arrays or len(inputs) != 1 or inputs[0] not in arrays:
        told = "name the series, [examples, steps, channels], and the classes: --inputs NAME --label NAME. "
        told += "Save each split in a file, train.npz and test.npz with the same names, and give their folder."
        raise DataError(f"{path}: arrays {shapes}: {told} {UNLABELLED}")
    if arrays[label].shape != arrays[inputs[0]].shape[: arrays[label].ndim]:
        told = f"must hold a class for each example or step; of one-hot rows save {label}.argmax(1)."
        raise DataError(f"{path}: {shapes}: {label} {told}")
    train = {"path": path, "split": "train", **rename(label)}
    survey = look_at_lists(train, open_source(DataSource(**train)), replace(hints, inputs=(inputs[0],)))
    survey.roles.append(f"label in {label}")
    return survey


def list_columns(data: Any) -> list[str]:
    """The columns of series, of one channel or several; labels of steps are none."""
    inner = {name: getattr(kind, "feature", None) for name, kind in data.features.items() if name != "label"}
    return [name for name, kind in inner.items() if is_numeric(getattr(kind, "feature", kind))]


def is_numeric(kind: Any) -> bool:
    """True for a type of numbers."""
    return isinstance(kind, datasets.Value) and kind.dtype.startswith(("float", "int", "uint"))


def look_at_lists(train: dict[str, Any], data: Any, hints: Hints) -> Survey:
    """A series in each example, whose columns are lists. The time, whose numbers rise in each, is no channel."""
    lists = list_columns(data)
    known = [key for key, kind in data.features.items() if key.lower() in _LABELS and isinstance(kind, datasets.Value)]
    renamed = known[0] if "label" not in data.features and len(known) == 1 else None
    if renamed is not None:
        train, data = {**train, **rename(renamed)}, data.rename_columns({renamed: "label"})
    if "label" not in data.features:
        told = f"{UNLABELLED} Add a column label, or give its name: --label NAME."
        raise DataError(f"{train['path']}: {len(data):,} series in {shorten(lists)}, and no label. {told}")
    if wrong := [name for name in (hints.time, *hints.inputs) if name is not None and name not in lists]:
        told = f"{shorten(wrong)} holds no lists of numbers; the columns that do are {shorten(lists)}"
        raise DataError(f"{train['path']}: {told}.")
    named = [name for name in lists if name == hints.time or (may_rise(name) and not hints.inputs)]
    times = [name for name in named if all((np.diff(row) > 0).all() for row in data.with_format("numpy")[name])]
    if hints.time not in (None, *times):
        told = f"the numbers of {hints.time} do not rise in each row: sort the steps by them."
        raise DataError(f"{train['path']}: {told}")
    columns = [*hints.inputs] or [name for name in lists if name not in times] or lists
    survey = _measure(keep_back(train, data), data, columns, hints)
    survey.roles = [f"numbers in {shorten(columns)}", *([f"label in {renamed}"] if renamed is not None else [])]
    unread = [name for name in data.features if name not in (*columns, "label")]
    survey.left_out += [f"{name} ({'the time' if name in times else 'no input'})" for name in unread]
    if survey.channels is not None and survey.channels > max(survey.lengths):
        survey.notes.append("fewer steps than channels: transpose the array if the axes are swapped")
    return survey


def _measure(kept: dict[str, Any], data: Any, columns: list[str], hints: Hints, how: str = "") -> Survey:
    """Survey of opened series: lengths, channels, classes or values."""
    survey = Survey("series", **kept, about=f"{len(data):,} series", columns=columns)
    _read_labels(survey, data, hints)
    # Numbers that are too large are counted already.
    with np.errstate(over="ignore"):
        first = np.asarray(data.with_format("numpy")[int(np.argmax(survey.lengths))][columns[0]])
    survey.channels = first.shape[1] if first.ndim == 2 else None
    survey.lengths = [length for length in survey.lengths if length]
    channels, steps = survey.channels or len(columns), "step" if max(survey.lengths) == 1 else "steps"
    told = f" and {channels} channels" if channels > 1 else ""
    _tell_marks(survey, data)
    survey.about += f" of {span(survey.lengths, ',')} {steps}{told}{how}"
    return survey


def _read_labels(survey: Survey, data: Any, hints: Hints) -> None:
    """Lengths of all series, and their classes or values."""
    path, kind = survey.train["path"], data.features["label"]
    survey.rows_have_labels = not isinstance(kind, datasets.Value | datasets.ClassLabel)
    if survey.rows_have_labels and not isinstance(getattr(kind, "feature", None), datasets.Value):
        raise DataError(f"{path}: the column label must hold one text or number for each series, or for each step.")
    raw = data.with_format("arrow").select_columns(list({*survey.columns, "label"}))[:]
    sizes = {name: raw[name].combine_chunks().value_lengths().fill_null(0).to_pylist() for name in survey.columns}
    survey.lengths = sizes[survey.columns[0]]
    for name, others in sizes.items():
        if odd := [row for row, size in enumerate(others, 1) if size != survey.lengths[row - 1]]:
            told = "differ in length, but a series has the same steps in all channels."
            raise DataError(f"{path}, row {odd[0]}: {survey.columns[0]} and {name} {told}")
    usable = find_usable(data, survey.columns)
    survey.leave_out(int((~usable).sum()), len(data), "without a number, or with an infinite one")
    if not usable.any():
        raise DataError(f"{path}: each series in {shorten(survey.columns)} has no number, or one too large.")
    labels = raw["label"].combine_chunks()
    found = (labels.flatten() if survey.rows_have_labels else labels).to_pylist()
    if survey.rows_have_labels:
        _doubt_words(survey, found)
    else:
        tell_unlabelled(survey, found)
        survey.values = are_values(found, hints.values)
        given = [value for value in found if class_name(value) is not None]
        if all(type(value) in (int, float) and value % 1 == 0 for value in given):
            kinds = ("classes", "--values predicts them"), ("values to predict", "--classes takes them as classes")
            survey.notes.append("the whole numbers of label are {}; {}".format(*kinds[survey.values]))
    if survey.values:
        return
    survey.classes = check_classes(path, found, hints.values)
    refuse_free_texts(path, survey.about, found, hints)
    if len(survey.classes) < 2:
        only = survey.classes or "missing"
        raise DataError(f"{path}: {survey.about}; the only class is {only}; a classifier needs at least two.")


def _refuse_unlabelled(path: str, about: str, table: Table | None, roles: Roles, beside: Path | None = None) -> None:
    """Refuses series that nothing is known of, with all findings; of a file for each a table may lie `beside` them."""
    which, place = "--label NAME", "a column label"
    column = "column" if beside is None else f"column, of {beside.name} or the files,"
    if table is None:
        place = "a folder for each class, a metadata.csv that names the class of each file, or a column label"
    elif texts := [name for name, why in roles.left_out.items() if why == "texts"]:
        # Classes are fewer than names.
        which = option("label", min(texts, key=lambda name: table.frame[name].nunique()))
    told = _sentence([*roles.problems, UNLABELLED[:-1]])
    raise DataError(f"{path}: {about}; and no label. {told} Add {place}, or say which {column} it is: {which}.")


def _sentence(parts: list[str]) -> str:
    return " ".join(f"{part[:1].upper()}{part[1:]}." for part in parts)


def _tell_values(survey: Survey, frame: pd.DataFrame, inputs: list[str]) -> None:
    """Notes on cells without a number, and columns that never change."""
    if told := [f"{name} {count}" for name in inputs if (count := int(frame[name].isna().sum()))]:
        survey.notes.append(f"missing values by a mask: {shorten(told)}")
    if still := [name for name in inputs if frame[name].nunique() < 2 and len(frame) > 1]:
        survey.notes.append(f"{shorten(still)} never changes")


def _tell_marks(survey: Survey, data: Any) -> None:
    """Warns of numbers that may mean none, in each channel and in values to be told."""
    raw, width = data.with_format("arrow").select_columns([*survey.columns, "label"])[:], survey.channels or 1
    marks = {"label": _find_mark(raw["label"].to_numpy(), 1)} if survey.values else {}
    for name in survey.columns:
        cells = raw[name].combine_chunks()
        while hasattr(cells.type, "value_field"):
            cells = cells.flatten()
        numbers = cells.to_numpy(zero_copy_only=False)
        found = (_find_mark(numbers[channel::width], 2) for channel in range(width))
        marks[name] = next((mark for mark in found if mark is not None), None)
    for name, mark in marks.items():
        if mark is not None:
            survey.notes.append(f"WARNING: {mark:g} in {name} is read as a number: empty the cells if it means none")


def _find_mark(values: np.ndarray, least: int) -> float | None:
    """A number such as -999 that so many cells have, far from all others, as programs write what is missing."""
    for mark in (np.fmin.reduce(values), np.fmax.reduce(values)) if len(values) else ():
        if re.fullmatch(r"-?9{2,}|-?8{2,}", f"{mark:.0f}"):
            rest = values[(values != mark) & ~np.isnan(values)].astype(np.float64)
            varies = rest.size and rest.min() < rest.max()
            far = varies and np.abs(rest - mark).min() > 3 * (rest.max() - rest.min())
            if far and (values == mark).sum() >= least:
                return float(mark)
    return None
