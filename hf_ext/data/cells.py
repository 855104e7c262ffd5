"""Cells of tables: numbers as people write them, times as seconds, labels as names of classes."""

import contextlib
import re
import unicodedata
import warnings
from typing import Any

import numpy as np
import pandas as pd

from ..errors import DataError

# Marks of missing numbers. In a column of texts, such as class names, they are plain words.
MISSING = {"nan", "-nan", "na", "n/a", "n.a.", "<na>", "#n/a", "#div/0!", "#value!", "#ref!", "null", "none", "nil",
           "nd", "n.d.", "?", "-", "--", "---", "–", "—", ".", "..", "...", "*", "\\n", "missing"}  # fmt: skip
# 12,000 and 1.234.567,8 and 12 000: groups of three digits after the first.
_COMMA_GROUPS = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?")
_POINT_GROUPS = re.compile(r"[-+]?\d{1,3}(\.\d{3})+(,\d+)?")
_SPACE_GROUPS = re.compile(r"[-+]?\d{1,3}([\u0020\u00a0\u202f'’]\d{3})+([.,]\d+)?")
_DECIMAL_COMMA = re.compile(r"[-+]?\d*,\d+([eE][-+]?\d+)?")
# 31/12/2024, 12-31-2024 and 31.12.24, with or without a time of day. 24-12-31 begins with the year.
_DATE = r"^(\d{1,2})([./-])(\d{1,2})(?:[./-](?=\d{4}(?!\d))|[./](?=\d\d(?!\d)))(\d{4}|\d\d)((?:[ T].*)?)$"
# A time of day, or a duration in hours or days.
_CLOCK = r"^(\d+):([0-5]\d)(?::([0-5]\d(?:[.,]\d+)?))?\s*([AaPp])?(?:\.?[Mm]\.?)?$"
_QUARTER = re.compile(r"(\d{4})[- ]?[qQ]([1-4])|[qQ]([1-4])[-/ ]?(\d{4})")
# Dates that are written as one number, by their digits.
_NUMBERS = {8: "%Y%m%d", 10: "%Y%m%d%H", 12: "%Y%m%d%H%M", 14: "%Y%m%d%H%M%S"}
# Writings that pandas does not know, or takes for others: Jan-24 for the 24th of January.
_FORMATS = ((r"\d{4}-\d{3}", "%Y-%j"), (r"[A-Za-z]{3}-\d\d", "%b-%y"), (r"[A-Za-z]{4,}-\d\d", "%B-%y"))
_STAMPS = re.compile(r"\d{4}-\d\d-\d\d[-_ ]\d\d[.-]\d\d[.-]\d\d|\d{8}[-_ T]\d{6}")
# A number with a sign or a unit, as 8.1 %, $5, <5 and 3 mg/dl, but not 18-25, 12:30 or 1/2.
_AMOUNT = re.compile(r"[-+(<>~≤≥±−\s]*([$€£¥]?)\s*(\d[\d.,]*|[.,]\d+)\s*([^-\d\s.,()/:+_–][^.,()]{0,11})?\)?")
# What pandas raises at cells that are no times.
_NO_TIME = (ValueError, TypeError, OverflowError, AttributeError)
# More different whole numbers than these are values.
_MOST_CLASSES = 20
# As many numbers with a unit, or fewer, may be classes.
_FEW = 8


def is_number(value: Any) -> bool:
    """True if a cell can be read as a number; 1_12 of Python is a name."""
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return "_" not in str(value)


def find_filled(values: "pd.Series[Any]") -> tuple[np.ndarray, list[str]]:
    """The rows of a column that hold something, and their texts."""
    # A call of pandas takes longer than a short column does in Python, and a file may have 20,000 of them.
    held = values.to_numpy(dtype=object)
    rows = np.flatnonzero(pd.notna(held))
    cells = [str(cell).strip() for cell in held[rows]]
    kept = [number for number, cell in enumerate(cells) if cell.lower() not in MISSING]
    return rows[kept], [cells[number] for number in kept]


def has_decimal_comma(values: "pd.Series[Any]") -> bool:
    """True if a cell has a comma that cannot stand between thousands."""
    return any(
        (_DECIMAL_COMMA.fullmatch(cell) and not _COMMA_GROUPS.fullmatch(cell)) or re.match(r"[-+]?0,\d", cell)
        for cell in find_filled(values)[1]
        if "," in cell
    )


def to_numbers(cells: list[str], decimal: bool) -> tuple[np.ndarray | None, str]:
    """Numbers of cells, and how they were written; none where one is none. `decimal` decides on unclear commas."""
    if (found := _plain_numbers(cells)) is not None:
        return found, ""
    if any(map(_SPACE_GROUPS.fullmatch, cells)):
        joined = [re.sub(r"[\u0020\u00a0\u202f'’]", "", cell).replace(",", ".") for cell in cells]
        if (found := _plain_numbers(joined)) is not None:
            return found, "groups of three digits"
    written = [cell for cell in cells if "," in cell]
    groups = written and all(map(_COMMA_GROUPS.fullmatch, written))
    if groups and (not decimal or any(cell.count(",") > 1 for cell in written)):
        return _plain_numbers([cell.replace(",", "") for cell in cells]), "commas between thousands"
    if written and all(_DECIMAL_COMMA.fullmatch(cell) or _POINT_GROUPS.fullmatch(cell) for cell in written):
        if any("." in cell for cell in written):
            cells = [cell.replace(".", "") for cell in cells]
        return _plain_numbers([cell.replace(",", ".") for cell in cells]), "decimal commas"
    return None, ""


def _plain_numbers(cells: list[str]) -> np.ndarray | None:
    """Cells as float64; nothing where one is none. A number of 400 digits is infinite."""
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        return np.asarray(pd.to_numeric(cells), dtype=np.float64)
    return np.array([*map(float, cells)]) if all(map(is_number, cells)) else None


def to_seconds(values: "pd.Series[Any]") -> np.ndarray | None:
    """Times as seconds since 1970, of clocks since midnight; nothing where one is no time."""
    # Most columns of texts end here.
    if not len(values) or not re.search(r"\d", str(values.iloc[0])) or is_number(values.iloc[0]):
        return None
    cells = values.astype(str).str.strip()
    if not cells.str.contains(r"\d", regex=True).all():
        return None
    for read in (_read_clocks, _read_periods, _read_dates):
        with contextlib.suppress(*_NO_TIME), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if (found := read(cells)) is not None:
                return found
    return None


def _read_clocks(cells: "pd.Series[Any]") -> np.ndarray | None:
    """Times of day and durations."""
    parts = cells.str.extract(_CLOCK)
    if parts[0].notna().all():
        hours, half = parts[0].astype(float), parts[3].str.lower()
        hours = hours.where(half.isna(), hours % 12) + 12 * (half == "p")
        seconds = parts[2].fillna("0").str.replace(",", ".").astype(float)
        return np.array(3600 * hours + 60 * parts[1].astype(float) + seconds, dtype=np.float64)
    if re.fullmatch(r"\d+ days?.*", cells.iloc[0]):
        return np.asarray(pd.to_timedelta(cells).dt.total_seconds(), dtype=np.float64)
    return None


def _read_periods(cells: "pd.Series[Any]") -> np.ndarray | None:
    """Quarters, and what else pandas does not know."""
    if _QUARTER.fullmatch(cells.iloc[0]):
        found = [match for match in map(_QUARTER.fullmatch, cells) if match is not None]
        names = [f"{match[1] or match[4]}Q{match[2] or match[3]}" for match in found]
        return _seconds(pd.PeriodIndex(names, freq="Q").to_timestamp()) if len(names) == len(cells) else None
    if _STAMPS.fullmatch(cells.iloc[0]):
        return _seconds(pd.to_datetime(cells.str.replace(r"\D", "", regex=True), format=_NUMBERS[14]))
    form = next((form for pattern, form in _FORMATS if re.fullmatch(pattern, cells.iloc[0])), None)
    return None if form is None else _seconds(pd.to_datetime(cells, format=form))


def _read_dates(cells: "pd.Series[Any]") -> np.ndarray | None:
    """Dates with times of day or without; 3/1/2024 and others all in one order: pandas chooses for each cell."""
    parts = cells.str.extract(_DATE)
    if not parts.notna().all(axis=None):
        for options in ({"format": "ISO8601"}, {"format": "mixed"}, {"format": "mixed", "dayfirst": True}):
            with contextlib.suppress(*_NO_TIME):
                return _seconds(pd.to_datetime(cells, utc=True, **options))
        return None
    days_first = bool((parts[1] == ".").any() or (parts[0].astype(int) > 12).any())
    year = "%Y" if parts[3].str.len().eq(4).all() else "%y"
    days, form = parts[0] + "/" + parts[2] + "/" + parts[3], f"{'%d/%m' if days_first else '%m/%d'}/{year}"
    clock = "1970-01-01 " + parts[4].str.strip().replace("", "00:00:00")
    return _seconds(pd.to_datetime(days, format=form)) + _seconds(pd.to_datetime(clock, format="mixed"))


def _seconds(times: Any) -> np.ndarray:
    times = pd.DatetimeIndex(times)
    # A difference to 1970 would overflow for years far from it.
    plain = times.tz_convert(None) if times.tz is not None else times
    return plain.to_numpy().astype("datetime64[us]").astype(np.float64) / 1e6


def _find_unclear_date(values: "pd.Series[Any]") -> str | None:
    """A date that may begin with the day or the month, where no other tells which, or others are written otherwise."""
    cells = values.astype(str).str.strip()
    parts = cells.str.extract(_DATE)
    written = parts.notna().all(axis=1)
    if not written.all():
        return str(cells[written].iloc[0]) if written.any() else None
    first, second = parts[0].astype(int), parts[2].astype(int)
    if (parts[1] == ".").any() or (first > 12).any() or (second > 12).any():
        return None
    return next(map(str, cells[first != second]), None)


def is_clock(values: "pd.Series[Any]") -> bool:
    """True for times of day without a date; durations have more hours than a day."""
    if pd.api.types.is_numeric_dtype(values.dtype):
        return False
    hours = values.astype(str).str.strip().str.extract(_CLOCK)[0]
    return bool(len(hours) and hours.notna().all() and (hours.astype(int) <= 24).all())


def _read_numbers(values: "pd.Series[Any]") -> np.ndarray | None:
    """Seconds of dates that are written as one number, 20241231; nothing where they are others."""
    numbers = values.to_numpy(dtype=np.float64, na_value=np.nan)
    if not len(numbers) or not np.isfinite(numbers).all() or (numbers % 1).any() or numbers.min() < 1:
        return None
    cells = [f"{number:.0f}" for number in numbers]
    form = _NUMBERS.get(len(cells[0]))
    if form is None or not all(cell[:2] in ("19", "20") and len(cell) == len(cells[0]) for cell in cells):
        return None
    with contextlib.suppress(ValueError, TypeError):
        return _seconds(pd.to_datetime(cells, format=form))
    return None


def is_dated(values: "pd.Series[Any]") -> bool:
    """True if a column of times holds dates or times of day, and not numbers of steps or seconds."""
    return not pd.api.types.is_numeric_dtype(values.dtype) or _read_numbers(values) is not None


def seconds_of(values: "pd.Series[Any]", parts: list[np.ndarray] | None = None) -> np.ndarray:
    """
    Times as numbers that rise with them; refuses what is none or unclear, and times of day that fall in a series,
    whose rows `parts` has: all by default.
    """
    if pd.api.types.is_numeric_dtype(values.dtype):
        dates = _read_numbers(values)
        return values.to_numpy(dtype=np.float64, na_value=np.nan) if dates is None else dates
    if (date := _find_unclear_date(values)) is not None:
        raise DataError(f"column {values.name!r}: {date} may start with the day or the month: write it as 2024-12-31")
    found = to_seconds(values)
    if found is None:
        # Among numbers the first that is none.
        counts = values.map(is_number).mean() > 0.5
        fits = [is_number(cell) if counts else to_seconds(pd.Series([cell])) is not None for cell in values]
        row = fits.index(False) if False in fits else 0
        held = values.iloc[row]
        told = "is empty" if pd.isna(held) or held == "" else f"holds {held!r}, which is not a time"
        told += "; write 2024-12-31 23:59, remove the row, or name the columns to read: --inputs NAME,NAME"
        raise DataError(f"column {values.name!r}, row {row + 1}: {told}")
    if is_clock(values) and any((np.diff(found[rows]) < 0).any() for rows in parts or [np.arange(len(found))]):
        raise DataError(f"column {values.name!r} has times of day that fall: add the dates, as in 2024-12-31 23:59")
    return found


def class_name(value: Any) -> str | None:
    """A class as it is called: texts as they are, numbers without `.0`; none where it is missing or -100."""
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or value == "" or value != value or value == -100:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value)


def are_values(labels: list[Any], wanted: bool | None = None) -> bool:
    """True if labels are values to predict, as is `wanted` or as their numbers say; refuses names as values."""
    given = {value for value in labels if class_name(value) is not None}
    numbers = {float(value) for value in given if isinstance(value, int | float | np.number)}
    if not given or len(numbers) < len(given) or bool in map(type, given):
        if wanted and given:
            raise DataError(f"--values: the labels hold names such as {next(iter(given - numbers), True)!r}")
        return False
    if wanted is not None:
        return wanted
    # Classes count up from 0 or 1 without a gap, or are few.
    counted = min(numbers) in (0, 1) and max(numbers) - min(numbers) + 1 == len(numbers)
    return any(value % 1 for value in numbers) or (len(numbers) > _MOST_CLASSES and not counted)


def find_amount(labels: list[Any]) -> str | None:
    """A label that is no number where most are some, or hold one with the same unit, and are values by these."""
    names = {label.strip() for label in labels if isinstance(label, str)}
    cells = sorted(name for name in names if name and name.lower() not in MISSING)
    odd = [cell for cell in cells if to_numbers([cell], decimal=True)[0] is None]
    if not odd or any(re.match(r"0\d", cell) for cell in cells):
        return None
    # Codes such as 31-33 and V58.61 are classes; a word, such as bad, may spoil values.
    if any(re.search(r"\d", cell) and not _AMOUNT.fullmatch(cell) for cell in odd):
        return None
    found = [part for part in map(_AMOUNT.fullmatch, cells) if part is not None]
    units = {(part[1], part[3]) for part in map(_AMOUNT.fullmatch, odd) if part is not None}
    if len(found) < 0.8 * len(cells) or (len(units) > 1 and len(odd) >= 0.2 * len(cells)):
        return None
    numbers = to_numbers([part[2] for part in found], decimal=True)[0]
    # Few may be classes: 0.5 mg, 1 mg.
    is_value = numbers is not None and len({*numbers}) > _FEW and are_values([*map(float, numbers)])
    return odd[0] if is_value else None


def check_classes(path: str, labels: list[Any], wanted: bool | None = None) -> list[str]:
    """The classes that occur in labels, in order; refuses values that are not wanted as classes, and two spellings."""
    if wanted is not False and are_values(labels, wanted):
        values = {value for value in labels if class_name(value) is not None}
        told = f"{len(values):,} numbers such as {min((value for value in values if value % 1), default=min(values))}"
        advice = "mrconv-regression learns one for each series of numbers; --classes takes each as a class"
        raise DataError(f"the column `label` holds {told}, which are not classes but values: {advice}")
    names = sorted({name for name in map(class_name, {*labels}) if name is not None})
    if all(map(is_number, names)):
        # Of many digits, two may be one as floats: those stay in the order of their names.
        names.sort(key=float)
    spelled: dict[str, str] = {}
    for name in names:
        plain = unicodedata.normalize("NFC", name).strip().casefold()
        other = spelled.setdefault(str(int(plain)) if plain.isdecimal() else plain, name)
        # Single letters may differ in case: beats of a heart are N and n.
        if other != name and not len(name) == len(other) == 1:
            told = "are spelled differently: use one spelling, or other names if they are two classes."
            raise DataError(f"{path}: the classes {other!r} and {name!r} {told}")
    return names
