"""Sequences in files: of each CSV, TSV, parquet or NumPy file one example, whose columns are lists of its rows."""

import contextlib
import re
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
from datasets.data_files import SPLIT_KEYWORDS

from hf_ext import __version__

SUFFIXES = (".csv", ".tsv", ".parquet", ".npy", ".npz")
ARRAYS = (".npy", ".npz")
METADATA = "metadata.csv"
# The column of the array in a `.npy` file.
ARRAY_COLUMN = "values"
# Of series that nothing is known of.
UNLABELLED = (
    "Series are learned with labels: a class or value of each, or a class at each position. For forecasts use "
    "statsmodels or sktime."
)
# What programs write for a number that is missing. In a column of texts, such as names of classes, they are words.
_MISSING = {"nan", "-nan", "na", "n/a", "<na>", "#n/a", "null", "none"}
# Of tables of text: a cell is missing where it is empty, and no column is an index.
_TABLE: dict[str, Any] = {"keep_default_na": False, "na_values": [""], "index_col": False}
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
    first = _find_kinds(files)
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
    kinds = {name: "text" if _is_text(values) else "number" for name, values in first.items()}
    options = {
        "records": records,
        "stop": part[1],
        "first": str(files[0]),
        "kinds": kinds,
        "stamps": tuple(_stamp(files[index]) for index in kept),
    }
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
            columns = {str(name): _plain_column(values) for name, values in _read_table(path).items()}
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, pd.errors.ParserWarning) as error:
        raise ValueError(f"{path} cannot be read: {str(error).strip().rstrip('.')}.") from error
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) != 1 or not min(lengths.values()):
        raise ValueError(f"{path} must hold rows, as many in each column; got {lengths or 'no column'}.")
    return columns


def _read_table(path: Path) -> pd.DataFrame:
    if path.suffix.lower() == ".parquet":
        return pd.read_parquet(path)
    with warnings.catch_warnings():
        # It says that fields without a name are dropped.
        warnings.simplefilter("error", pd.errors.ParserWarning)
        table = pd.read_csv(path, sep="\t" if path.suffix.lower() == ".tsv" else ",", **_TABLE)
    if len(table.columns) and all(is_number(name) for name in table.columns):
        raise ValueError(f"its first line, {', '.join(table.columns)!s:.60}, must hold the names of the columns")
    return table


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    with path.open("rb") as file:
        found = np.load(file, allow_pickle=False)
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
    if not pd.api.types.is_numeric_dtype(values):
        # Numbers among which some are missing, written as a word.
        given = values[values.notna() & ~values.astype(str).str.strip().str.lower().isin(_MISSING)]
        if len(given):
            with contextlib.suppress(ValueError, TypeError):
                values = pd.to_numeric(given).reindex(values.index)
    if pd.api.types.is_numeric_dtype(values):
        return values.to_numpy(dtype=np.float64, na_value=np.nan)
    return values.astype(object).where(values.notna(), "").astype(str).to_numpy(dtype=object)


def _list_files(found: list[str], split: str) -> tuple[Path | None, list[Path]]:
    """The folder of a split and its files, in order; no folder where files were named."""
    place, name = Path(found[0]), split.partition("[")[0]
    if len(found) > 1 and (folders := [file for file in found if Path(file).is_dir()]):
        raise ValueError(
            f"the pattern matches the folder {folders[0]}: name one folder, or match files, as in {folders[0]}/*.csv."
        )
    if not place.is_dir():
        files = [Path(file).resolve() for file in found]
        if strange := [file for file in files if file.suffix.lower() not in SUFFIXES]:
            raise ValueError(f"{strange[0]} is no sequence: allowed are {', '.join(SUFFIXES)}.")
        return None, files
    folder = (place / name if (place / name).is_dir() else place).resolve()
    if folder == place.resolve() and name != "train":
        raise ValueError(f"{place} has no folder {name!r}: make one, or name another split.")
    splits = {word for words in SPLIT_KEYWORDS.values() for word in words}
    if folder == place.resolve() and (other := sorted(item.name for item in folder.iterdir() if item.name in splits)):
        raise ValueError(
            f"{place} has the folder {other[0]!r}, another split, and none of the name 'train': move the files of "
            "the training there."
        )
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
    if reserved := sorted(columns.keys() & {"file", "first_row"}):
        raise ValueError(f"{table} has a column {reserved[0]!r}, a name that is taken: rename it.")
    named = columns.pop("file_name")
    rows = {name: row for row, name in enumerate(named)}
    if len(rows) < len(named):
        twice = next(name for row, name in enumerate(named) if rows[name] != row)
        raise ValueError(f"{table} has two rows of {twice}: give each file one row.")
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


def _generate_files(
    records: tuple[dict[str, Any], ...], stop: int | None, first: str, kinds: dict[str, str], **_: Any
) -> Iterator[dict[str, Any]]:
    for record in records:
        path = Path(record["file"]["path"])
        columns = _fit_columns(path, read_file(path), first, kinds)
        yield {**record, **{name: values[record["first_row"] : stop] for name, values in columns.items()}}


def _find_kinds(files: list[Path]) -> dict[str, np.ndarray]:
    """The columns of the first file; where one is all empty, as labels may be, those of the first that says more."""
    found = read_file(files[0])
    for file in files[1:]:
        empty = [name for name, values in found.items() if _is_empty(values)]
        if not empty:
            break
        other = read_file(file)
        found |= {name: other[name] for name in empty if name in other}
    return found


def _fit_columns(
    path: Path, columns: dict[str, np.ndarray], first: str, kinds: dict[str, str]
) -> dict[str, np.ndarray]:
    """The columns of a file as those of the first; refuses what cannot be."""
    if columns.keys() != kinds.keys():
        raise ValueError(f"{path} has the columns {', '.join(columns)}; {first} has {', '.join(kinds)}.")
    fitted = {}
    for name, values in columns.items():
        if _is_text(values) and kinds[name] == "number":
            row = next((row for row, value in enumerate(values) if not is_number(value)), 0)
            raise ValueError(f"{path}, line {row + 2}: column {name!r} holds {values[row]!r}, which is no number.")
        plain = _is_text(values) or kinds[name] == "number"
        fitted[name] = values if plain else np.array([_write_number(value) for value in values], dtype=object)
    return fitted


def _is_text(values: np.ndarray) -> bool:
    return values.dtype.kind in "OU"


def _is_empty(values: np.ndarray) -> bool:
    return values.dtype.kind == "f" and bool(np.isnan(values).all())


def _write_number(value: Any) -> str:
    """A number as a name of a class would be written: nothing where it is missing, without `.0` where it is whole."""
    if value != value:
        return ""
    return f"{value:.0f}" if float(value).is_integer() else str(value)


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
