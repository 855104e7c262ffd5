"""Sequences in files: of each CSV, TSV, parquet or NumPy file one example, whose columns are lists of its rows."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd

from hf_ext import __version__

SUFFIXES = (".csv", ".tsv", ".parquet", ".npy", ".npz")
ARRAYS = (".npy", ".npz")
METADATA = "metadata.csv"
# The column of the array in a `.npy` file.
ARRAY_COLUMN = "values"
_TIME, _EPOCH = re.compile(r"\d{4}-\d\d-\d\d"), pd.Timestamp(0, tz="UTC")
# As pictures and recordings have it: what names a bad example, and hashes its file, looks for both.
_FILE = {"path": "string", "bytes": "binary"}


def open_sequences(found: list[str], split: str) -> datasets.Dataset:
    """
    Opens files of sequences.

    Of a folder the files are those in the sub-folder that is named as the split, or in the folder itself; a slice of
    the split takes some of them. Of a single file a slice takes a part of its rows: `train[:80%]`.

    Args:
        found (`list[str]`): A folder, or files.
        split (`str`): Name of the split, with or without a slice.

    Returns:
        `datasets.Dataset`: For each file its columns as lists, `file`, `first_row`, and what is known of it: `label`,
        the name of its folder, or its row of `metadata.csv`.

    Raises:
        ValueError: If there are no such files, or one cannot be read; with its name and line.
    """
    folder, files = _list_files(found, split)
    about = {} if folder is None else _read_metadata(folder, files)
    first = read_file(files[0])
    # Of labels at every position, a column of the files, folders are something else: patients, machines.
    if not about and "label" not in first and folder is not None and all(file.parent != folder for file in files):
        about = {"label": [file.parent.name for file in files]}
    kept = range(len(files))
    part: tuple[int, int | None] = (0, None)
    if "[" in split and folder is None and len(files) == 1:
        rows = slice_split(split, len(next(iter(first.values()))))
        part = (rows.start, rows.stop)
    elif "[" in split:
        kept = slice_split(split, len(files))
    if not kept or part[0] == part[1]:
        raise ValueError(f"the split {split!r} of {found[0]} is empty: take a larger part.")
    known: dict[str, Any] = {"file": datasets.Features({name: datasets.Value(kind) for name, kind in _FILE.items()})}
    known |= {"first_row": datasets.Value("int64")}
    known |= {
        name: datasets.Value("string" if isinstance(values[0], str) else "float64") for name, values in about.items()
    }
    if both := sorted(known.keys() & first.keys()):
        raise ValueError(f"{files[0]} has a column {both[0]!r}, which says something of the whole file: rename it.")
    # A tuple: `datasets` would make a shard of each item of a list, and forget the first file.
    records = tuple(
        {
            "file": {"path": str(files[index]), "bytes": None},
            "first_row": part[0],
            **{name: values[index] for name, values in about.items()},
        }
        for index in kept
    )
    columns = {name: _feature(values) for name, values in first.items()}
    options = {"records": records, "stop": part[1], "stamps": tuple(_stamp(files[index]) for index in kept)}
    return _make(_generate_files, options, {**known, **columns}, split)


def open_arrays(path: Path, split: str) -> datasets.Dataset:
    """Opens one `.npy` or `.npz` file, the first axis of whose arrays are the examples."""
    arrays = read_file(path)
    kept = slice_split(split, len(next(iter(arrays.values()))))
    features = {name: _feature(values[0]) for name, values in arrays.items()}
    options = {"path": str(path), "stamp": _stamp(path), "first": kept.start, "stop": kept.stop}
    return _make(_generate_rows, options, features, split)


def slice_split(split: str, count: int) -> range:
    """The numbers that a split such as `train[:80%]` takes of so many."""
    name = split.partition("[")[0]
    found = datasets.ReadInstruction.from_spec(split).to_absolute({name: count})
    if len(found) != 1:
        raise ValueError(f"the split {split!r} has {len(found)} parts: name one slice.")
    return range(found[0].from_ or 0, count if found[0].to is None else found[0].to)


def read_file(path: Path) -> dict[str, np.ndarray]:
    """The columns of a file, all of one length: numbers as they are, everything else as texts."""
    try:
        if path.suffix.lower() in ARRAYS:
            columns = _read_arrays(path)
        else:
            kind = {".csv": (pd.read_csv, {}), ".tsv": (pd.read_csv, {"sep": "\t"}), ".parquet": (pd.read_parquet, {})}
            read, options = kind[path.suffix.lower()]
            columns = {str(name): _plain_column(values) for name, values in read(path, **options).items()}
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} cannot be read: {str(error).strip().rstrip('.')}.") from error
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) != 1 or not min(lengths.values()):
        raise ValueError(f"{path} must hold rows, as many in each column; got {lengths or 'no column'}.")
    return columns


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    found = np.load(path, allow_pickle=False)
    arrays = {ARRAY_COLUMN: found} if isinstance(found, np.ndarray) else dict(found)
    if scalars := [name for name, array in arrays.items() if array.ndim == 0]:
        raise ValueError(f"{', '.join(scalars)} has no axis")
    return arrays


def _plain_column(values: "pd.Series[Any]") -> np.ndarray:
    """Numbers as float64, times as seconds, everything else as texts."""
    if not pd.api.types.is_numeric_dtype(values) and _TIME.match(str(values.iloc[0] if len(values) else "")):
        # A long table with a time in each row: as texts they would take longer to read than all else.
        with contextlib.suppress(ValueError, TypeError):
            values = (pd.to_datetime(values, format="ISO8601", utc=True) - _EPOCH).dt.total_seconds()
    if pd.api.types.is_numeric_dtype(values):
        return values.to_numpy(dtype=np.float64, na_value=np.nan)
    return values.astype(object).where(values.notna(), "").astype(str).to_numpy(dtype=object)


def _list_files(found: list[str], split: str) -> tuple[Path | None, list[Path]]:
    """The folder of a split and its files, in order; no folder where files were named."""
    place, name = Path(found[0]), split.partition("[")[0]
    if not place.is_dir():
        files = [Path(file).resolve() for file in found]
        if strange := [file for file in files if file.suffix.lower() not in SUFFIXES]:
            raise ValueError(f"{strange[0]} is no sequence: allowed are {', '.join(SUFFIXES)}.")
        return None, files
    folder = (place / name if (place / name).is_dir() else place).resolve()
    if folder == place.resolve() and name != "train":
        raise ValueError(f"{place} has no folder {name!r}: make one, or name another split.")
    files = sorted(
        file
        for file in folder.rglob("*")
        if file.suffix.lower() in SUFFIXES and file.name != METADATA and not file.name.startswith(".")
    )
    if not files:
        raise ValueError(f"{folder} holds no file of {', '.join(SUFFIXES)}: each file is one sequence.")
    return folder, files


def _read_metadata(folder: Path, files: list[Path]) -> dict[str, list[Any]]:
    """What `metadata.csv` says of each file, by column; nothing where there is none."""
    table = folder / METADATA
    if not table.is_file():
        return {}
    columns = {name: values.tolist() for name, values in read_file(table).items()}
    if "file_name" not in columns:
        raise ValueError(f"{table} has the columns {', '.join(columns)}: one must be file_name.")
    rows = {name: row for row, name in enumerate(columns.pop("file_name"))}
    names = [file.relative_to(folder).as_posix() for file in files]
    absent, unknown = sorted(rows.keys() - {*names}), sorted({*names} - rows.keys())
    if absent or unknown or len(rows) < len(names):
        raise ValueError(
            f"{table} and the files do not agree: {len(absent)} rows have no file, such as {absent[:3]}, and "
            f"{len(unknown)} files no row, such as {unknown[:3]}. Give each file one row."
        )
    return {name: [values[rows[file]] for file in names] for name, values in columns.items()}


def _feature(values: np.ndarray) -> Any:
    """The type of a column that is a list for each file."""
    kind: Any = datasets.Value("string" if values.dtype.kind in "OU" else values.dtype.name)
    for _ in range(values.ndim):
        kind = datasets.List(kind)
    return kind


def _generate_files(records: tuple[dict[str, Any], ...], stop: int | None, **_: Any) -> Iterator[dict[str, Any]]:
    first_path = Path(records[0]["file"]["path"])
    first = read_file(first_path)
    for record in records:
        path = Path(record["file"]["path"])
        columns = read_file(path)
        _compare_columns(path, columns, first_path, first)
        yield {**record, **{name: values[record["first_row"] : stop] for name, values in columns.items()}}


def _compare_columns(
    path: Path, columns: dict[str, np.ndarray], first_path: Path, first: dict[str, np.ndarray]
) -> None:
    """Refuses a file whose columns are not those of the first."""
    if columns.keys() != first.keys():
        raise ValueError(f"{path} has the columns {', '.join(columns)}; {first_path} has {', '.join(first)}.")
    for name, values in columns.items():
        if values.dtype == object and first[name].dtype != object:
            row = next(row for row, value in enumerate(values) if not is_number(value))
            raise ValueError(f"{path}, line {row + 2}: column {name!r} holds {values[row]!r}, which is no number.")
        if values.dtype != object and first[name].dtype == object:
            columns[name] = values.astype(str).astype(object)


def is_number(value: Any) -> bool:
    """Whether a cell can be read as a number."""
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _generate_rows(path: str, first: int, stop: int, **_: Any) -> Iterator[dict[str, Any]]:
    arrays = read_file(Path(path))
    for index in range(first, stop):
        yield {name: values[index] for name, values in arrays.items()}


def _stamp(path: Path) -> tuple[int, int]:
    """What changes with a file."""
    return path.stat().st_size, path.stat().st_mtime_ns


def _make(generate: Any, options: dict[str, Any], features: dict[str, Any], split: str) -> datasets.Dataset:
    """A data set that `datasets` keeps until an option changes; its lists come as arrays."""
    name = datasets.NamedSplit(split.partition("[")[0])
    try:
        data = datasets.Dataset.from_generator(
            generate, features=datasets.Features(features), gen_kwargs={**options, "version": __version__}, split=name
        )
    except datasets.exceptions.DatasetGenerationError as error:
        # It says nothing but that there was an error.
        raise error.__cause__ or error from None
    return data.with_format("numpy")
