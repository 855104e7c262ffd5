"""Tables that say what is known of other files, a row each: their classes, values, captions."""

import re
from collections import Counter
from pathlib import Path

import pandas as pd
from transformers.utils import logging

from ..errors import DataError
from .roles import LABEL, class_name
from .tables import read_table, shorten

logger = logging.get_logger(__name__)

# Their names in `datasets`. Others are known by what they hold.
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
TABLES = (".csv", ".tsv", ".jsonl", ".parquet")
# Bytes of a file that tell whether its first rows name others.
_HEAD = 1 << 12


def find_about(place: Path, files: list[Path]) -> Path | None:
    """
    The table beside files that has a row of each.

    It is called `metadata.csv`, `.jsonl` or `.parquet`, or its first row names one of the files. It lies in the folder
    of a split, or beside it under the same name.

    Raises:
        DataError: If several tables name the files.
    """
    if named := [place / name for name in METADATA if (place / name).is_file()]:
        return named[0]
    keys = {key for file in files for key in (file.relative_to(place.parent).as_posix(), file.name, file.stem)}
    keys |= {file.relative_to(place).as_posix() for file in files}
    usual = Counter(file.suffix.lower() for file in files).most_common(1)[0][0]
    beside = sorted(file for file in (*place.iterdir(), *place.parent.glob(f"{place.name}.*")) if file.is_file())
    found = [file for file in beside if file.suffix.lower() in TABLES and _names_one(file, keys, usual)]
    if len(found) > 1:
        raise DataError(f"{found[0]} and {found[1].name} both name the files: leave one.")
    return found[0] if found else None


def _names_one(table: Path, keys: set[str], usual: str) -> bool:
    """True if the first row of a table names a file. Beside tables, names that are numbers may be their values."""
    if table.suffix.lower() == ".parquet":
        # Of many such files each may be a series.
        cells = [] if usual == ".parquet" else [str(cell) for cell in pd.read_parquet(table).head(1).squeeze(axis=0)]
    else:
        with table.open("rb") as file:
            head = file.read(_HEAD)
        # UTF-16 has a zero beside each letter.
        lines = head.replace(b"\0", b"").decode("utf-8", errors="replace").splitlines()[:2]
        cells = re.split(r'[,;\t|"]', lines[-1]) if lines else []
    own = {table.name, table.stem}
    values = r"[-+.\d\s]*" if usual in TABLES else r"\s*"
    return any(cell.strip() in keys - own and not re.fullmatch(values, cell) for cell in cells)


def match_rows(table: Path, files: list[Path], label: str) -> tuple[list[Path], pd.DataFrame] | None:
    """
    The files that a table names, in the order of its rows, and its other columns; None where it names none.

    The column of the names is the one that names the most, with endings or without, with folders or without them where
    one file alone is called so. A column of classes is called `label`, whatever its name. Files that have no row are
    left out, and counted in a warning.

    Raises:
        DataError: If a row names no file, a file has several rows, or several columns may be the class.
    """
    jsonl = table.suffix.lower() == ".jsonl"
    frame = pd.read_json(table, lines=True, dtype=False) if jsonl else read_table(table, keep_index=True).frame
    known: dict[str, Path | None] = {}
    paths = {file.relative_to(table.parent): file for file in files}
    for path, file in paths.items():
        for key in {path.with_suffix("").as_posix(), path.name, path.stem}:
            known[key] = None if key in known else file
    # A whole path is that file alone.
    known |= {path.as_posix(): file for path, file in paths.items()}
    named = {
        str(name): [class_name(value) or "" for value in frame[name]] for name in frame if name not in (label, "label")
    }
    best = max(named, key=lambda name: sum(cell in known for cell in named[name]), default=None)
    if best is None or not any(cell in known for cell in named[best]):
        return None
    if absent := [cell for cell in named[best] if known.get(cell) is None]:
        told = "that are called so in several folders" if absent[0] in known else "that are not there"
        raise DataError(
            f"{table} names {len(absent):,} files in its column {best} {told}, such as {absent[0]!r}: name each with "
            "its folder, remove the rows, or bring the files."
        )
    chosen = [one for cell in named[best] if (one := known[cell]) is not None]
    if len({*chosen}) < len(chosen):
        twice = next(file for file in chosen if chosen.count(file) > 1)
        raise DataError(f"{table} has several rows of {twice.name} in its column {best}: leave one of each.")
    frame = frame.drop(columns=best)
    classes = [str(name) for name in frame if LABEL.fullmatch(str(name))]
    if label not in frame and len(classes) > 1:
        raise DataError(f"{table}: {shorten(classes)} may each be the class: say which, --label {classes[0]}.")
    if label not in frame and classes:
        frame = frame.rename(columns={classes[0]: "label"})
    if len(chosen) < len(files):
        logger.warning(
            f"{len(files) - len(chosen):,} of {len(files):,} files have no row in {table}: they are left out."
        )
    return chosen, frame
