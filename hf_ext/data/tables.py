"""Reading of tables with pandas: encodings, separators, decimal commas, units, indices."""

import codecs
import contextlib
import csv
import io
import re
import shlex
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil

from ..errors import DataError
from ..terminal import count_of
from .cells import MISSING, are_values, find_filled, has_decimal_comma, is_number, to_numbers, to_seconds

# Names of columns of classes.
LABEL = re.compile(r"(label|labels|class|classes|cls|category|target)", re.IGNORECASE)
# A cell is missing where it is empty, and no column is an index.
_CELLS: dict[str, Any] = {"keep_default_na": False, "na_values": [""], "index_col": False, "skipinitialspace": True}
# Characters of a file that tell its separator.
_SAMPLE = 1 << 16
_CODE = re.compile(r"0\d+|[-+]?\d{16,}")
_SIGNED_CODE = re.compile(r"\d+[eE]\d+|\+\d+")
# Keys, of which two would be one number as floats.
_KEY = re.compile(r"\d{19,40}")
_SEPARATORS = (",", ";", "\t", "|", "~", "^")
_INDEX = re.compile(r"(Unnamed: 0(\.\d+)?|index|row|rownames?|row_?id|id|)", re.IGNORECASE)
# Memory that a table of words needs, in lengths of its file: 9.7 for numbers, 10.0 for short texts.
_MEMORY = 10
# Columns from which on a table whose first line are numbers is one without names: a series in each row.
_NAMELESS = 8


@dataclass
class Table:
    """Rows of a file: numbers as float64, everything else as texts, and what was done to them, in words."""

    frame: pd.DataFrame
    notes: list[str] = field(default_factory=list)
    nameless: bool = False
    separator: str = ","


def read_table(
    path: Path | str, keep_index: bool = False, held: bytes | None = None, label: str | None = None, raw: bool = False
) -> Table:
    """
    Reads a CSV, TSV, JSON lines or parquet file, or what was `held` of one; refuses what is no table or too large.

    `keep_index` keeps first columns that count the rows, as they may name files; `raw` leaves all cells of text as
    they are written, also numbers; `label` is the column of classes, if its name does not say that.
    """
    path = Path(path)
    kind, size = path.suffix.lower(), path.stat().st_size if held is None and path.is_file() else len(held or b"")
    # Of a file that does not fit, the system would kill the process without a word.
    if (needed := _MEMORY * size) > (free := psutil.virtual_memory().available) and kind != ".parquet":
        told = f"needs about {needed / 1e9:.2g} GB of memory, and {free / 1e9:.2g} GB are free"
        raise DataError(f"{path} {told}: split it, or write it as parquet, which is read in pieces.")
    try:
        if kind == ".parquet":
            table = Table(_plain_frame(pd.read_parquet(path)))
        elif kind == ".jsonl":
            table = Table(pd.read_json(path, lines=True, dtype=False).rename(columns=str))
        else:
            table = _read_table(path, path.read_bytes() if held is None else held, label, raw)
        if not raw:
            _convert_columns(table, label)
    except (OSError, ValueError, TypeError, OverflowError, csv.Error, pd.errors.ParserWarning) as error:
        told = str(error).strip().partition("\n")[0].rstrip(".")
        if (found := re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", told)) is not None:
            told = f"line {found[2]} has {found[3]} cells, others {found[1]}: quote cells that hold a separator"
        elif "EOF inside string" in told:
            told = "a quote is opened and never closed: write quotes inside of cells twice, or remove them"
        elif isinstance(error, pd.errors.ParserWarning):
            told = "its lines have more cells than the line of names: give each column a name"
        raise DataError(f"{path} cannot be read: {told}.") from error
    # A table that was written twice has two.
    while not keep_index and _drop_index(table):
        pass
    return table


def read_text(path: Path) -> str:
    """The text of a file in any usual encoding."""
    try:
        return _decode(path.read_bytes())[0].strip()
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {str(error).strip().rstrip('.')}.") from error


def _plain_frame(frame: pd.DataFrame) -> pd.DataFrame:
    # An index of dates is a column as any other.
    frame = frame if isinstance(frame.index, pd.RangeIndex) else frame.reset_index()
    names = ["_".join(map(str, name)).rstrip("_") if isinstance(name, tuple) else str(name) for name in frame.columns]
    frame.columns = [name.strip() for name in names]
    if twice := frame.columns[frame.columns.duplicated()].tolist():
        raise DataError(f"several columns are called {twice[0]!r}: give each column a different name")
    for name, values in frame.items():
        # Of nullable types, whose pd.NA is neither equal to anything nor unequal.
        if getattr(values.dtype, "na_value", None) is pd.NA:
            frame[name] = values.astype(object).where(values.notna(), np.nan).infer_objects()
    return frame


def _read_table(path: Path, held: bytes, label: str | None, raw: bool) -> Table:
    text, notes = _decode(held)
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise ValueError(f"line {line} holds a zero byte, which no text has: remove it")
    # Old Macs end lines with a return alone.
    lines = re.sub(r"\r\n?", "\n", text).split("\n")
    rows = (n for n, line in enumerate(lines) if line.strip() and not line.lstrip().startswith(("#", "%", "//")))
    start = next(rows, len(lines))
    if comments := sum(bool(line.strip()) for line in lines[:start]):
        notes.append(f"{count_of(comments, 'comment line')} before the names of the columns")
    usual = "\t" if ".tsv" in map(str.lower, path.suffixes) else ","
    # As Excel writes it before a table.
    told = re.fullmatch(r"(?i)sep=(.)\s*", lines[start]) if start < len(lines) else None
    text = "\n".join(lines[start if told is None else start + 1 :])
    if told is not None:
        separator = told[1]
    else:
        separator = usual if usual == "\t" and "\t" in text[:_SAMPLE] else _find_separator(text[:_SAMPLE])
    if separator != usual:
        names = {";": "semicolons", "\t": "tabs", "|": "bars", ",": "commas", r"\s+": "spaces"}
        notes.append(f"separated by {names.get(separator, repr(separator))}")
    if len(separator) == 1:
        text = _begin_at_names(text, separator, notes)
    first = next(_read_rows(text, separator), [])
    named = _has_names(first, _read_some(text, separator), separator, notes)
    with warnings.catch_warnings():
        # It says that fields without a name are dropped.
        warnings.simplefilter("error", pd.errors.ParserWarning)
        kinds = {name.lstrip(): str for name in first if LABEL.fullmatch(name.strip())}
        # Read in parts, a long column would be of numbers in one and of texts in another.
        options = {**_CELLS, "low_memory": False, "header": "infer" if named else None, "dtype": str if raw else kinds}
        if _has_plain_quotes(text, separator):
            options["quoting"] = csv.QUOTE_NONE
            notes.append("quotes are letters, as each line is a row")
        frame = pd.read_csv(io.StringIO(text), sep=separator, **options)
    frame.columns = [str(name).strip() for name in frame.columns]
    if label in frame and pd.api.types.is_numeric_dtype(frame[label].dtype):
        options |= {"dtype": str, "usecols": [frame.columns.get_loc(label)]}
        written = pd.read_csv(io.StringIO(text), sep=separator, **options).iloc[:, 0]
        frame[label] = written if _has_codes(written.dropna()) else frame[label]
    # As after a separator at the end of each line.
    empty = [name for name in frame.columns if name.startswith("Unnamed:") and frame[name].isna().all()]
    if empty and named:
        frame = frame.drop(columns=empty)
        notes.append(f"{count_of(len(empty), 'column')} without a name and without a cell left out")
    if not named:
        notes.append("no line of names: columns count from 0")
    table = Table(frame, notes, not named, separator)
    _drop_units(table)
    return table


def _read_rows(text: str, separator: str) -> Iterator[list[str]]:
    """The rows of a table, or of a part of it, of which the last may be cut off."""
    lines = io.StringIO(text)
    return map(str.split, lines) if len(separator) > 1 else csv.reader(lines, delimiter=separator)


def _read_some(text: str, separator: str) -> list[list[str]]:
    """The rows of the beginning of a table: of long ones some that are whole."""
    rows = [*_read_rows(text[:_SAMPLE], separator)]
    # A cell may be too long, as after a quote that is never closed.
    with contextlib.suppress(csv.Error):
        rows = rows if len(rows) > 20 else [*islice(_read_rows(text, separator), 20)]
    return rows


def _has_plain_quotes(text: str, separator: str) -> bool:
    """True if quotes are letters, as in many TSV files: read as quotes, they would join lines that are whole rows."""
    lines = [line for line in text.split("\n") if line.strip()]
    odd = any(line.count('"') % 2 for line in lines)
    if len(separator) > 1 or not odd or len({line.count(separator) for line in lines}) > 1:
        return False
    # The lines of a text may have a comma each; then all its quotes are as they must be.
    for strict in [False, True] if separator in (",", ";") else [False]:
        with contextlib.suppress(csv.Error):
            if sum(1 for _ in csv.reader(lines, delimiter=separator, strict=strict)) == len(lines) or strict:
                return False
    return True


def _decode(held: bytes) -> tuple[str, list[str]]:
    """The text of a file, and its encoding where it is not the usual one."""
    if held.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return held.decode("utf-16"), ["encoded as UTF-16"]
    if held[:200].count(0) > len(held[:200]) // 4:
        order = "le" if held[1:2] == b"\0" else "be"
        return held.decode(f"utf-16-{order}"), ["encoded as UTF-16"]
    for encoding, name in (("utf-8-sig", ""), ("cp1252", "Windows-1252 (latin-1)")):
        with contextlib.suppress(UnicodeDecodeError):
            return held.decode(encoding), [f"encoded as {name}"] * bool(name)
    return held.decode("latin-1"), ["encoded as latin-1"]


def is_utf8(path: Path, megabytes: int = 64) -> bool:
    """True if a file is text in UTF-8, as far as is read."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as file:
        try:
            text = decoder.decode(file.read(_SAMPLE))
            # One word far down is enough.
            for _ in range(megabytes):
                decoder.decode(file.read(1 << 20))
        except UnicodeDecodeError:
            return False
    return "\0" not in text


def _find_separator(sample: str) -> str:
    """The separator that cuts all lines into as many fields, more than one."""
    best, most = ",", 1
    for separator in (*_SEPARATORS, r"\s+"):
        with contextlib.suppress(csv.Error):
            rows = [*islice(filter(None, _read_rows(sample, separator)), 50)] or [[]]
            # The last line of a sample may be cut off.
            rows = rows[:-1] if len(rows) > 2 else rows
            # Words have spaces as well: only numbers have nothing else between them.
            spaces = len(separator) > 1 and (most > 1 or not all(map(is_number, rows[-1])))
            if not spaces and len({*map(len, rows)}) == 1 and len(rows[0]) > most:
                best, most = separator, len(rows[0])
    if most > 1:
        return best
    # Lines of different lengths: the separator of the first line, so that the error names a line.
    first = sample.split("\n", 1)[0]
    return max(_SEPARATORS, key=lambda separator: (first.count(separator), separator == ","))


def _begin_at_names(text: str, separator: str, notes: list[str]) -> str:
    """A table without the title above its names; with a name for the index that R writes without one."""
    rows = [*islice(_read_rows(text[:_SAMPLE], separator), 50)]
    counts = [len(row) for row in rows if row]
    width = Counter(counts).most_common(1)[0][0] if counts else 0
    counted = len(rows) > 2 and [row[:1] for row in rows[1:]] == [[str(place)] for place in range(1, len(rows))]
    if counted and counts[0] == width - 1 and {*counts[1:]} == {width}:
        return separator + text
    start = next((place for place, row in enumerate(rows) if len(row) == width), 0)
    # A line of one cell, or of few, is no line of names.
    if width < 3 or not start or any(len(row) > width / 2 for row in rows[:start]):
        return text
    notes.append(f"{count_of(sum(map(any, rows[:start])), 'line')} above the names of the columns left out")
    return "\n".join(text.split("\n")[start:])


def _has_names(first: list[str], rows: list[list[str]], separator: str, notes: list[str]) -> bool:
    """True if the first row holds names; False if it is a series, with its class or without. Refuses another row."""
    cells = first if separator == "," else [name.replace(",", ".") for name in first]
    words = [place for place, cell in enumerate(cells) if not is_number(cell)]
    # 0, 1, 2, …, as pandas writes columns without any.
    start = 0 if len(first) < _NAMELESS or first[0].strip() == "0" else 1
    counts_up = len(first) > 1 and [name.strip() for name in first] == [str(n + start) for n in range(len(first))]
    is_axis = _is_axis(first, rows, separator) and not _repeats(first, rows, words)
    if first and not counts_up and not is_axis:
        # The class, first or last, is one that other rows have in its place.
        classes = words if len(separator) == 1 and len(first) > _NAMELESS and words in ([0], [len(first) - 1]) else []
        numbers = not words and len(first) >= _NAMELESS and len(set(first)) > 2
        if numbers or _repeats(first, rows, classes):
            return False
        # A number of stars or a class, which others have too, and a review.
        alone = [place for place, name in enumerate(first) if name.strip() and " " not in name.strip()]
        row = len(separator) == 1 and any(name.count(" ") > 3 for name in first) and _repeats(first, rows, alone)
        # Years and wavelengths rise; values do not, and some are below 0.
        given = [float(cell) for place, cell in enumerate(cells) if place not in words]
        row = row or any(number < 0 or after <= number for number, after in zip(given[:-1], given[1:], strict=True))
        if row or not words:
            advice = ", such as label and text" if row else ""
            raise DataError(f"its first line, {', '.join(first)!s:.60}, must hold the names of the columns{advice}")
    if is_axis and not words and not counts_up:
        notes.append(f"the first line, {shorten(first)}, counts evenly: it is read as the names of the columns")
    names = Counter(name.strip() for name in first if name.strip())
    if twice := [name for name, count in names.items() if count > 1]:
        raise DataError(f"{names[twice[0]]} columns are called {twice[0]!r}: give each column a different name")
    return True


def _is_axis(first: list[str], rows: list[list[str]], separator: str) -> bool:
    """True if the numbers of the first row alone, beside words or not, count evenly up or down: wavelengths, years."""
    found = []
    for row in (first, *(row for row in rows[1:] if len(row) == len(first))):
        cells = row if separator == "," else [cell.replace(",", ".") for cell in row]
        steps = np.diff([float(cell) for cell in cells if is_number(cell)])
        usual = np.median(steps) if len(steps) + 1 >= _NAMELESS else 0.0
        found.append(bool(usual and (abs(steps / usual - 1) < 0.5).all()))
    return rows != [first] and found[0] and not any(found[1:])


def _repeats(first: list[str], rows: list[list[str]], places: list[int]) -> bool:
    """True if a cell of the first row, at one of these places, stands again in its column."""
    alike = [row for row in rows if len(row) == len(first)]
    return any([row[place].strip() for row in alike].count(first[place].strip()) > 1 for place in places)


def _drop_units(table: Table) -> None:
    """Leaves out a first row of units: words where all that follows are numbers."""
    frame = table.frame
    units = {}
    for name, values in frame.items() if len(frame) > 1 else ():
        first, rest = str(values.iloc[0]).strip(), values.iloc[1:]
        if pd.isna(values.iloc[0]) or first.lower() in MISSING:
            continue
        # With a decimal comma a number too.
        if to_numbers([first], decimal=True)[0] is not None:
            return
        if to_numbers(find_filled(rest)[1], decimal=True)[0] is not None:
            units[name] = first
        elif to_seconds(rest) is None or to_seconds(values) is not None:
            return
    if units:
        table.frame = frame.iloc[1:].reset_index(drop=True)
        told = ", ".join(f"{name} in {unit}" for name, unit in list(units.items())[:6])
        table.notes.append(f"a row of units: {told}")


def _convert_columns(table: Table, label: str | None) -> None:
    """Makes numbers of columns of texts that are some: with commas, thousands, words for what is missing."""
    columns = {name: values for name, values in table.frame.items() if _has_texts(values)}
    # 1,234 is a thousand or one and a quarter: other cells of the file tell.
    decimal = table.separator == ";" or any(map(has_decimal_comma, columns.values()))
    said: dict[str, list[str]] = defaultdict(list)
    changed: dict[str, np.ndarray] = {}
    for name, values in columns.items():
        rows, cells = find_filled(values)
        is_code = (name == label or LABEL.fullmatch(name)) and (_has_codes(cells) or _has_words(values, cells))
        if is_code or (cells and all(map(_KEY.fullmatch, cells))):
            continue
        numbers, how = to_numbers(cells, decimal) if cells or values.isna().all() else (None, "")
        if numbers is None:
            continue
        changed[name] = np.full(len(values), np.nan)
        changed[name][rows] = numbers
        said[how].append(name)
        if np.isinf(numbers).any():
            row = rows[np.isinf(numbers).argmax()] + 1
            raise DataError(f"column {name!r}, row {row}: the number is too large, or infinite")
    if changed:
        # At once: one after the other they would be moved again and again.
        table.frame = pd.DataFrame({**dict(table.frame.items()), **changed})
    table.notes += [f"{how} in {shorten(names)}" for how, names in said.items() if how]


def _has_codes(cells: Iterable[str]) -> bool:
    """True for classes that are written as 01 and 02, all as 1e5 or +49, or with more digits than a number keeps."""
    cells = [*cells]
    return any(map(_CODE.fullmatch, cells)) or (bool(cells) and all(map(_SIGNED_CODE.fullmatch, cells)))


def _has_words(values: "pd.Series[Any]", cells: list[str]) -> bool:
    """True for classes that are numbers, and a word such as none or -; among values it says that one is missing."""
    words = {str(cell).strip().lower() for cell in values.dropna()} & MISSING - {"nan", "-nan"}
    return bool(words) and all(map(is_number, cells)) and not are_values([*map(float, cells)])


def _has_texts(values: "pd.Series[Any]") -> bool:
    """True for a column of texts; a column of lists, as parquet may have, stays as it is."""
    kind = values.dtype
    if pd.api.types.is_object_dtype(kind):
        return not any(isinstance(cell, list | np.ndarray | dict | bytes) for cell in values.head(5))
    return pd.api.types.is_string_dtype(kind) or isinstance(kind, pd.CategoricalDtype)


def _drop_index(table: Table) -> bool:
    """Leaves out a first column that counts the rows, as `to_csv()` writes it; True if there is one."""
    frame = table.frame
    if len(frame.columns) < 2 or not len(frame):
        return False
    name, values = frame.columns[0], frame.iloc[:, 0]
    counts = pd.api.types.is_numeric_dtype(values) and values.dtype != bool
    # Whole numbers as they are: large ones are equal as floats.
    if counts and _INDEX.fullmatch(name) and len(frame) > 1 and (np.diff(values.to_numpy()) == 1).all():
        table.frame = frame.iloc[:, 1:]
        told = "" if name.startswith("Unnamed") or not name else f", {name},"
        table.notes.append(f"the first column{told} counts the rows, and is left out")
        return True
    if name.startswith("Unnamed:"):
        table.frame = frame.iloc[:, 1:] if counts and len(frame) == 1 else frame.rename(columns={name: "index"})
    return False


def option(name: str, *columns: Any) -> str:
    """An option with names of columns as a shell takes it: spaces are quoted, and commas in a list."""
    listed = io.StringIO()
    csv.writer(listed, lineterminator="").writerow(columns)
    return f"--{name} {shlex.quote(listed.getvalue() if name == 'inputs' else str(columns[0]))}"


def shorten(names: list[Any]) -> str:
    """The first of many names, as many as a line has room for."""
    told = [str(name) if len(str(name)) <= 40 else f"{str(name)[:39]}…" for name in names[:6]]
    while len(told) > 1 and sum(map(len, told)) > 80:
        told.pop()
    return ", ".join(told) + (f", … ({len(names):,} in all)" if len(names) > len(told) else "")
