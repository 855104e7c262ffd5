"""Tables that describe other files, one per row: classes, values, captions."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from transformers.utils import logging

from ..errors import DataError
from .roles import class_name
from .tables import LABEL, option, read_table, shorten

logger = logging.get_logger(__name__)

# Names that `datasets` reads. Other tables are recognised by their content.
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
TABLES = (".csv", ".tsv", ".jsonl", ".parquet")
# Bytes of a table that tell whether its first rows name files.
_HEAD = 1 << 12


def find_about(place: Path, files: list[Path]) -> Path | None:
    """
    The table beside files that has a row of each.

    It is called `metadata.csv`, `.jsonl` or `.parquet`, or one of its first rows names a file. It lies in the folder
    of a split, or beside it under the same name.

    Raises:
        DataError: If several tables name the files.
    """
    if named := [place / name for name in METADATA if (place / name).is_file()]:
        return named[0]
    usual = Counter(file.suffix.lower() for file in files).most_common(1)[0][0]
    tables = [
        file
        for file in sorted([*place.iterdir(), *place.parent.glob(f"{place.name}.*")])
        if file.suffix.lower() in TABLES and file.is_file()
    ]
    known = {folder: _index(folder, files) for folder in {table.parent for table in tables}}
    # Beside tables, one with the columns that most have is one of them.
    heads = Counter(_read_lines(file)[0] for file in files[:20] if usual in TABLES[:2]).most_common(1)
    common = heads[0][0] if heads and heads[0][1] > 1 else None
    found = [file for file in tables if _names_one(file, known[file.parent], usual, common)]
    if len(found) > 1:
        raise DataError(f"{found[0]} and {found[1].name} both describe the files: remove one of them.")
    return found[0] if found else None


def _index(folder: Path, files: list[Path]) -> dict[str, Path | None]:
    """
    Files by the names that a table may use for them; None for ambiguous names.

    With their folders or without, with endings or without, in any case of letters. A whole path is that file alone.
    """
    paths = {file.relative_to(folder): file for file in files}
    known: dict[str, Path | None] = {}
    for path, file in paths.items():
        names = {path.as_posix(), path.with_suffix("").as_posix(), path.name, path.stem}
        for name in names | {name.casefold() for name in names}:
            known[name] = None if name in known else file
    return known | {path.as_posix(): file for path, file in paths.items()}


def _spell(cell: str, known: dict[str, Path | None]) -> str:
    """The name in an index that a cell means, written in Windows' way or with folders of another machine."""
    plain = cell.strip().replace("\\", "/").removeprefix("./")
    name = plain.rpartition("/")[2]
    return next((each for each in (plain, plain.casefold(), name, name.casefold()) if each in known), cell)


def _read_lines(table: Path) -> list[str]:
    """The first lines of a table of text."""
    with table.open("rb") as file:
        head = file.read(_HEAD)
    # UTF-16 has a zero beside each letter.
    return head.replace(b"\0", b"").decode("utf-8", errors="replace").splitlines()[:5] or [""]


def _names_one(table: Path, known: dict[str, Path | None], usual: str, common: str | None) -> bool:
    """True if a first row of a table names a file. Beside tables, names that are numbers may be their values."""
    if table.suffix.lower() == ".parquet":
        # Of many such files each may be a series; one may hold all pictures.
        try:
            first = (
                [] if usual == ".parquet" else next(pq.ParquetFile(table).iter_batches(1), pa.table({})).to_pylist()
            )
        except (OSError, ValueError) as error:
            raise DataError(f"{table} cannot be read: {str(error).strip().rstrip('.')}.") from error
        cells = [cell for row in first for cell in row.values() if isinstance(cell, str)]
    else:
        lines = _read_lines(table)
        cells = [] if lines[0] == common else re.split(r'[,;\t|"]', "\t".join(lines))
    values = r"[-+.\d\s]*" if usual in TABLES else r"\s*"
    meant = (_spell(cell, known) for cell in cells if not re.fullmatch(values, cell))
    return any(name in known and known[name] != table for name in meant)


def match_rows(table: Path, files: list[Path], label: str) -> tuple[list[Path], pd.DataFrame] | None:
    """
    The files that a table names, in the order of its rows, and its other columns; None where it names none.

    The column of the names is the one that names the most, with endings or without, with folders or without them where
    one file alone is called so. A column of classes is called `label`, whatever its name. Files that have no row are
    left out, and counted in a warning.

    Raises:
        DataError: If it cannot be read, a row names no file, a file has several rows, or several columns may be the
            class.
    """
    if table.suffix.lower() == ".jsonl":
        try:
            frame = pd.read_json(table, lines=True, dtype=False)
        except (OSError, ValueError) as error:
            raise DataError(f"{table} cannot be read: {str(error).strip().rstrip('.')}.") from error
    else:
        frame = read_table(table, keep_index=True).frame
    known = _index(table.parent, files)
    nested = [
        str(name) for name in frame if frame[name].map(lambda cell: isinstance(cell, list | dict | np.ndarray)).any()
    ]
    if held := {label, "label"} & {*nested}:
        raise DataError(
            f"{table}: the column {held.pop()} holds lists, but a class is one text or one number: correct the column."
        )
    if nested:
        logger.warning(f"{table}: {shorten(nested)} hold lists, and are left out.")
        frame = frame.drop(columns=nested)
    named = {
        str(name): [_spell(class_name(value) or "", known) for value in frame[name]]
        for name in frame
        if name not in (label, "label")
    }
    best = max(named, key=lambda name: sum(cell in known for cell in named[name]), default=None)
    if best is None or not any(cell in known for cell in named[best]):
        return None
    if absent := [cell for cell in named[best] if known.get(cell) is None]:
        told = "that several folders contain" if absent[0] in known else "that do not exist"
        raise DataError(
            f"{table} names {len(absent):,} files in its column {best} {told}, such as {absent[0]!r}: add the folders "
            "to the names, remove the rows, or add the files."
        )
    chosen = [one for cell in named[best] if (one := known[cell]) is not None]
    (often, count), *_ = Counter(chosen).most_common(1)
    if count > 1:
        raise DataError(f"{table} has {count} rows for {often.name} in its column {best}: keep one row per file.")
    frame = frame.drop(columns=best)
    classes = [str(name) for name in frame if LABEL.fullmatch(str(name))]
    if label not in frame and len(classes) > 1:
        raise DataError(
            f"{table}: {shorten(classes)} may each be the class: choose one, such as {option('label', classes[0])}."
        )
    if label not in frame and classes:
        frame = frame.rename(columns={classes[0]: "label"})
    if len(chosen) < len(files):
        logger.warning(
            f"{len(files) - len(chosen):,} of {len(files):,} files have no row in {table} and are left out."
        )
    return chosen, frame
