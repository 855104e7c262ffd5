"""Sequences in files: each CSV, TSV, parquet or NumPy file is one example, whose columns are lists."""

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from transformers.utils import logging

from hf_ext import __version__

from ..errors import BROKEN_ARCHIVE, DataError
from .about import METADATA, find_part, find_table, match_rows, require_part
from .cells import class_name, is_number, to_seconds
from .files import list_files
from .roles import GROUPS, order_rows, step_columns
from .source import DataSource
from .splits import make_part, slice_split, split_of
from .tables import read_table

logger = logging.get_logger(__name__)

# Files of sktime and aeon: a series in each line, its channels and its class between colons.
TS = ".ts"
SUFFIXES = (".csv", ".tsv", ".parquet", ".npy", ".npz", TS)
ARRAYS = (".npy", ".npz")
# The column of the array in a `.npy` file.
ARRAY_COLUMN = "values"
# Of series that nothing is known of.
UNLABELLED = "Series need labels: one for each, or a class for each position. For forecasts use statsmodels or sktime."
# The column that numbers the file of a row.
_ORIGIN = "the number of its file"


def open_sequences(found: list[str], source: DataSource) -> datasets.Dataset:
    """
    Opens a folder or files of sequences: for each its columns as lists, `file`, `first_row`, and what is known of it:
    `label`, the name of its folder, or its row of `metadata.csv`. A slice of the split, `train[:80%]`, takes some of
    the files, or of a single one a part of its rows.
    """
    split = source.split
    folder, files = _list_files(found, split)
    label = source.column_of("label")
    if source.rows == "series":
        return _open_rows(files, source)
    if source.series is not None:
        return _open_panel(files, source)
    files, about = (files, {}) if folder is None else _read_about(folder, files, label)
    first = _find_kinds(files, label)
    # Of labels at every position, a column of the files, folders are something else: patients, machines.
    if not about and "label" not in first and folder is not None and all(file.parent != folder for file in files):
        about = {"label": [file.parent.name for file in files]}
    kept, rows = range(len(files)), range(1 << 60)
    if "[" in split and len(files) == 1:
        rows = slice_split(split, len(next(iter(first.values()))))
    elif "[" in split:
        kept = slice_split(split, len(files))
    if not kept or not rows:
        raise DataError(f"the split {split!r} of {found[0]} is empty: take a larger part.")
    # As pictures and recordings have it: what names a bad example, and hashes its file, looks for both.
    file = datasets.Features({"path": datasets.Value("string"), "bytes": datasets.Value("binary")})
    kinds = {name: "string" if isinstance(values[0], str) else "float64" for name, values in about.items()}
    known = {"file": file, "first_row": datasets.Value("int64"), **{n: datasets.Value(k) for n, k in kinds.items()}}
    if both := sorted(known.keys() & first.keys()):
        raise DataError(f"{files[0]} has a column {both[0]!r}, the name of a property of a file: rename the column.")
    about |= {"file": [{"path": str(file), "bytes": None} for file in files], "first_row": [rows.start] * len(files)}
    options = {
        # A tuple: `datasets` would make a shard of each item of a list, and forget the first file.
        "records": tuple({name: values[index] for name, values in about.items()} for index in kept),
        "stop": rows.stop,
        "first": str(files[0]),
        "texts": {name: _is_text(values) for name, values in first.items()},
        "keys": (source.time, label),
        # They change with a file.
        "stamps": tuple((at.st_size, at.st_mtime_ns) for at in (files[index].stat() for index in kept)),
    }
    return _make(_generate_files, options, {**known, **{n: _feature(values) for n, values in first.items()}}, split)


def _open_rows(files: list[Path], source: DataSource) -> datasets.Dataset:
    """Tables whose rows are series: their numbers as the list `values`, the label, and what names groups of them."""
    label, named = source.column_of("label"), dict[str, list[Any]]()
    if files[0].suffix.lower() == TS:
        series, classes = ([*chain(*parts)] for parts in zip(*map(read_ts, files), strict=True))
    else:
        frames = [read_table(file, label=label).frame for file in files]
        kinds = frames[0].dtypes.drop(label, errors="ignore")
        is_numeric = pd.api.types.is_numeric_dtype
        numbers = [name for name, kind in kinds.items() if is_numeric(kind) and not GROUPS.fullmatch(name)]
        # Columns of texts may name groups, such as patients.
        groups = [*kinds.index.difference([*numbers, ARRAY_COLUMN], sort=False)]
        steps = step_columns(numbers) or numbers
        frame = _stack(files, frames, [*steps, label, *groups])
        series = [trim(row) for row in frame[steps].to_numpy(dtype=np.float64)]
        classes, named = frame[label].tolist(), {name: [*map(class_name, frame[name])] for name in groups}
    kind, labels = _column_of(classes)
    features = {ARRAY_COLUMN: _feature(series[0]), label: kind}
    return make_part({ARRAY_COLUMN: series, label: labels, **named}, features, source.split).with_format("numpy")


def _stack(files: list[Path], frames: list[pd.DataFrame], needed: list[str]) -> pd.DataFrame:
    """The rows of all tables, each of which must have some columns."""
    for file, frame in zip(files, frames, strict=True):
        if absent := [name for name in needed if name not in frame.columns]:
            raise DataError(f"{file} has no column {absent[0]!r}; it has {', '.join(map(str, frame.columns))!s:.200}.")
    if not any(map(len, frames)):
        raise DataError(f"{files[0]} holds no row below the names of its columns: add rows.")
    return pd.concat(frames, ignore_index=True)


def read_ts(path: Path) -> tuple[list[np.ndarray], list[Any]]:
    """The series of a file of sktime and aeon, `[steps, channels]` each, and their classes or values."""
    head, mark, body = re.sub("(?im)^@data", "@data", path.read_text(encoding="utf-8-sig")).partition("@data")
    about = dict(line[1:].lower().partition(" ")[::2] for line in head.splitlines() if line.startswith("@"))
    if not mark or "true" in about.get("timestamps", ""):
        raise DataError(f"{path} is not a .ts file of sktime, or has times: numbers must follow @data, without times.")
    values = "true" in about.get("targetlabel", "")
    labelled = values or "true" in about.get("classlabel", "")
    found, labels = [], []
    lines = (line for line in body.splitlines() if line.strip() and not line.lstrip().startswith(("#", "%")))
    for number, line in enumerate(lines, 1):
        *parts, label = line.strip().split(":") if labelled else (*line.strip().split(":"), "")
        if len({part.count(",") for part in parts}) > 1:
            raise DataError(f"{path}, series {number}: its channels differ in length; fill short ones up with ?.")
        try:
            cells = ([cell.strip() for cell in part.split(",")] for part in parts)
            series = np.array([[np.nan if cell in ("?", "") else float(cell) for cell in row] for row in cells]).T
            labels.append(float(label) if values else label.strip() or None)
        except ValueError as error:
            raise DataError(f"{path}, series {number}: {error}.") from error
        found.append(trim(series))
    if not found or len({series.shape[1] for series in found}) > 1:
        raise DataError(f"{path} must hold series, all of as many channels.")
    return found, labels


def trim(steps: np.ndarray) -> np.ndarray:
    """A series without the end where all its channels are missing: shorter ones are filled up there."""
    missing = np.atleast_2d(np.isnan(steps).T).all(0)
    return steps[: int(np.flatnonzero(~missing).max(initial=-1)) + 1]


def holds_lists(path: Path) -> bool:
    """True if the rows of a parquet file are examples: they hold lists, or files."""
    try:
        kinds = pa.types.is_nested, pa.types.is_large_binary, pa.types.is_binary
        return any(is_kind(column) for column in pq.read_schema(path).types for is_kind in kinds)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {str(error).strip().rstrip('.')}.") from error


def _open_panel(files: list[Path], source: DataSource) -> datasets.Dataset:
    """Tables of several series, one under the other: each is an example, its columns lists of its rows."""
    series, label = str(source.series), source.column_of("label")
    needed = [series] if source.time is None else [series, source.time]
    frames = [read_table(file, label=label).frame for file in files]
    frame = _stack(files, frames, needed)
    _check_joined(frame.assign(**{_ORIGIN: np.repeat(range(len(files)), [*map(len, frames)])}), files, needed)
    groups = order_rows(frame, series, source.time)
    features: dict[str, Any] = {}
    columns: dict[str, list[Any]] = {series: [*map(class_name, groups)]}
    for name in (name for name in frame if name != series):
        values = plain_column(frame[name].rename("label" if name == label else name))
        parts = [values[rows] for rows in groups.values()]
        may_name = name == label or GROUPS.fullmatch(name) or _is_text(values)
        named = (map(class_name, part.tolist()) for part in parts)
        # The class of a whole series stands in each of its rows, or in the first alone.
        if may_name and all({*others} <= {first} or {*others} == {None} for first, *others in named):
            features[name], columns[name] = _column_of([part[0] for part in parts])
        else:
            features[name], columns[name] = _feature(values), parts
    return make_part(columns, features, source.split).with_format("numpy")


def _check_joined(frame: pd.DataFrame, files: list[Path], needed: list[str]) -> None:
    """Refuses series of one name in several files whose times repeat; says where they are joined without times."""
    named = frame.drop_duplicates([needed[0], _ORIGIN])
    both = named[named.duplicated(needed[0])]
    if not len(both):
        return
    told = f"{needed[0]} {class_name(both[needed[0]].iloc[0])} is in several files, such as "
    told += files[both[_ORIGIN].iloc[0]].name
    if len(needed) > 1 and frame.duplicated(needed).sum() > frame.duplicated([*needed, _ORIGIN]).sum():
        raise DataError(f"{told}, with the same times in {needed[1]}: give each series a name of its own.")
    if len(needed) == 1:
        logger.warning_once(f"{told}, and is read as one series, in the order of their names.")


def _column_of(labels: list[Any]) -> tuple[Any, list[Any]]:
    """The type of a column of labels, and its cells: numbers stay numbers, everything else are names."""
    given = [value for value in labels if value == value and value is not None]
    if given and all(isinstance(value, int | float | np.number) and not isinstance(value, bool) for value in given):
        return datasets.Value("float64"), [None if value is None else float(value) for value in labels]
    return datasets.Value("string"), [class_name(value) for value in labels]


def open_arrays(path: Path, split: str) -> datasets.Dataset:
    """Opens one `.npy` or `.npz` file, the first axis of whose arrays are the examples."""
    arrays = read_file(path)
    kept = slice_split(split, len(next(iter(arrays.values()))))
    features = {name: _feature(values[0]) for name, values in arrays.items()}
    stamp = path.stat().st_size, path.stat().st_mtime_ns
    options = {"path": str(path), "stamp": stamp, "first": kept.start, "stop": kept.stop}
    return _make(_generate_rows, options, features, split)


def read_file(path: Path, time: str | None = None, label: str | None = None) -> dict[str, np.ndarray]:
    """The columns of a file, all of one length, sorted by a time: numbers as they are, everything else as texts."""
    try:
        if path.suffix.lower() in ARRAYS:
            columns = _read_arrays(path)
        else:
            frame = read_table(path, label=label).frame
            if time is not None and time not in frame.columns:
                raise DataError(f"{path} has no column {time!r}, which was given as the time.")
            if time is not None:
                frame = frame.iloc[order_rows(frame, None, time)[None]]
            columns = {name: plain_column(values) for name, values in frame.items()}
    except DataError:
        raise
    except (OSError, ValueError, TypeError, MemoryError, *BROKEN_ARCHIVE) as error:
        told = str(error).strip().rstrip(".")
        if "allow_pickle" in told:
            told += ": they may run code; save series of different lengths as lists in parquet, with a column label"
        raise DataError(f"{path} cannot be read: {told}.") from error
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) != 1 or not min(lengths.values()):
        told = f"{path} must hold rows of one split, as many in all columns; got {lengths or 'no column'}"
        if len({*map(split_of, columns)} - {None}) > 1:
            told += ": save each split in a file, train.npz and test.npz with the same names, and give their folder"
        raise DataError(f"{told}.")
    return columns


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    with path.open("rb") as file:
        found = np.load(file, allow_pickle=False)
        arrays = {ARRAY_COLUMN: found} if isinstance(found, np.ndarray) else dict(found)
    # A member of another ending is given as its bytes.
    if wrong := [name for name, array in arrays.items() if not getattr(array, "ndim", 0)]:
        raise DataError(f"{path} cannot be read: {', '.join(wrong)} is not an array with at least one axis.")
    # `datasets` knows no times, no numbers of 16 bytes, and one order of bytes.
    kinds: dict[str, Any] = {"g": np.float64, "m": str, "M": str}
    for name, array in arrays.items():
        if array.dtype.kind in "cV":
            raise DataError(f"{path}: {name} holds complex numbers or records: save plain numbers, as channels.")
        plain = np.char.decode(array) if array.dtype.kind == "S" else array
        arrays[name] = plain.astype(kinds.get(plain.dtype.char, plain.dtype.newbyteorder("=")), copy=False)
    return arrays


def plain_column(values: "pd.Series[Any]") -> np.ndarray:
    """Numbers as float64, times as seconds, everything else as texts."""
    kind = values.dtype
    if pd.api.types.is_numeric_dtype(kind) and not (values.name == "label" and pd.api.types.is_bool_dtype(kind)):
        return values.to_numpy(dtype=np.float64, na_value=np.nan)
    if len(values) and isinstance(values.iloc[0], list | np.ndarray):
        raise DataError(f"column {values.name!r} contains lists, so its rows are examples and not steps")
    first = str(values.iloc[0]) if len(values) else ""
    if pd.api.types.is_datetime64_any_dtype(kind) or re.match(r"\d{4}-\d\d-\d\d", first):
        # A long table with a time in each row: as texts they would take longer to read than all else.
        seconds = to_seconds(values)
        if seconds is not None:
            return seconds
    return values.astype(object).where(values.notna(), "").astype(str).to_numpy(dtype=object)


def _list_files(found: list[str], split: str) -> tuple[Path | None, list[Path]]:
    """The folder of a split and its files, in order; no folder where files were named."""
    place = Path(found[0])
    if not place.is_dir():
        files = [Path(file).resolve() for file in found]
        if strange := [file for file in files if file.suffix.lower() not in SUFFIXES]:
            raise DataError(f"{strange[0]} is not a sequence file; allowed: {', '.join(SUFFIXES)}.")
        return None, files
    folder = place.resolve()
    part = find_part(folder, split, filter(is_sequence, list_files(folder)))
    if not part.files:
        raise DataError(f"{place} contains no files of type {', '.join(SUFFIXES)}; each file is one sequence.")
    return require_part(folder, part, split), part.files


def is_sequence(file: Path) -> bool:
    """True for a file that may hold series, and is not one that describes others."""
    return file.suffix.lower() in SUFFIXES and file.name not in METADATA


def _read_about(folder: Path, files: list[Path], label: str) -> tuple[list[Path], dict[str, list[Any]]]:
    """The files, those of a table beside them where there is one, and its columns: numbers, everything else texts."""
    table, beside = find_table(folder, filter(is_sequence, list_files(folder)))
    if table is None:
        return files, {}
    files = [file for file in files if file != table]
    if (found := match_rows(table, files, label, [file for file in beside if file != table])) is None:
        raise DataError(f"{table} names none of the files, such as {files[0].name}: add a column file_name.")
    files, frame = found
    if reserved := sorted({"file", "first_row"} & {*frame}):
        raise DataError(f"{table} has a column {reserved[0]!r}, a reserved name: rename it.")
    return files, {name: plain_column(frame[name]).tolist() for name in frame}


def _feature(values: np.ndarray) -> Any:
    """The type of a column that is a list for each file."""
    kind: Any = datasets.Value("string" if _is_text(values) else values.dtype.name)
    for _ in range(values.ndim):
        kind = datasets.List(kind)
    return kind


def _generate_files(
    records: tuple[dict[str, Any], ...], stop: int, first: str, texts: dict[str, bool], keys: tuple[Any, ...], **_: Any
) -> Iterator[dict[str, Any]]:
    """The record and the columns of each file, as those of the first; refuses what cannot be."""
    for record in records:
        path = Path(record["file"]["path"])
        columns = read_file(path, *keys)
        if columns.keys() != texts.keys():
            told = "A table that names the class of each file is metadata.csv, with the columns file_name and label."
            raise DataError(f"{path} has the columns {', '.join(columns)}; {first} has {', '.join(texts)}. {told}")
        for name, values in columns.items():
            if _is_text(values) and not texts[name]:
                row = next((row for row, value in enumerate(values) if not is_number(value)), 0)
                raise DataError(f"{path}, line {row + 2}: column {name!r} holds {values[row]!r}, and {first} numbers.")
            if texts[name] and not _is_text(values):
                # Numbers as names of classes would be written.
                columns[name] = np.array([class_name(value) or "" for value in values], dtype=object)
        yield {**record, **{name: values[record["first_row"] : stop] for name, values in columns.items()}}


def _find_kinds(files: list[Path], label: str) -> dict[str, np.ndarray]:
    """The columns of the first file; where one is all empty, as labels may be, those of the first that says more."""
    found = read_file(files[0], label=label)
    for file in files[1:]:
        empty = [name for name, values in found.items() if values.dtype.kind == "f" and np.isnan(values).all()]
        if not empty:
            break
        other = read_file(file, label=label)
        found |= {name: other[name] for name in empty if name in other}
    return found


def _is_text(values: np.ndarray) -> bool:
    return values.dtype.kind in "OU"


def _generate_rows(path: str, first: int, stop: int, **_: Any) -> Iterator[dict[str, Any]]:
    arrays = read_file(Path(path))
    for index in range(first, stop):
        yield {name: values[index] for name, values in arrays.items()}


def _make(generate: Any, options: dict[str, Any], features: dict[str, Any], split: str) -> datasets.Dataset:
    """A data set that `datasets` keeps until an option changes; its lists come as arrays."""
    name = datasets.NamedSplit(split.partition("[")[0])
    try:
        data = datasets.Dataset.from_generator(
            generate,
            features=datasets.Features(features),
            gen_kwargs={**options, "version": __version__},
            split=name,
            # Examples that are in memory at once: each may be a long file.
            writer_batch_size=16,
        )
    except datasets.exceptions.DatasetGenerationError as error:
        # It says nothing but that there was an error.
        raise error.__cause__ or error from None
    return data.with_format("numpy")
