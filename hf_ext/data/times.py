"""Times in cells of tables: dates, times of day, durations, months and quarters, as seconds."""

import contextlib
import re
import warnings
from typing import Any

import numpy as np
import pandas as pd

from ..errors import DataError
from .numbers import is_number

# 31/12/2024, 12-31-2024 and 31.12.24, with or without a time of day. 24-12-31 begins with the year.
_DATE = r"^(\d{1,2})([./-])(\d{1,2})(?:[./-](?=\d{4}(?!\d))|[./](?=\d\d(?!\d)))(\d{4}|\d\d)((?:[ T].*)?)$"
# A time of day, or a duration in hours or days.
_CLOCK = r"^(\d+):([0-5]\d)(?::([0-5]\d(?:[.,]\d+)?))?\s*([AaPp])?(?:\.?[Mm]\.?)?$"
_DURATION = re.compile(r"\d+ days?.*")
_QUARTER = re.compile(r"(\d{4})[- ]?[qQ]([1-4])|[qQ]([1-4])[-/ ]?(\d{4})")
# Writings that pandas does not know, or takes for others: Jan-24 for the 24th of January.
_FORMATS = (
    (r"\d{4}-\d{3}", "%Y-%j"),
    (r"[A-Za-z]{3}-\d\d", "%b-%y"),
    (r"[A-Za-z]{4,}-\d\d", "%B-%y"),
    (r"\d{4}-\d\d-\d\d[-_ ]\d\d[.-]\d\d[.-]\d\d", None),
    (r"\d{8}[-_ T]\d{6}", "%Y%m%d%H%M%S"),
)
# Dates that are written as one number, by their digits.
_NUMBERS = {8: "%Y%m%d", 10: "%Y%m%d%H", 12: "%Y%m%d%H%M", 14: "%Y%m%d%H%M%S"}


def to_seconds(values: "pd.Series[Any]") -> np.ndarray | None:
    """Times as seconds since 1970, of clocks since midnight; nothing where one is no time."""
    # Most columns of texts end here.
    if not len(values) or not re.search(r"\d", str(values.iloc[0])) or is_number(values.iloc[0]):
        return None
    cells = values.astype(str).str.strip()
    if not cells.str.contains(r"\d", regex=True).all():
        return None
    for read in (_read_clocks, _read_periods, _read_dates):
        with contextlib.suppress(ValueError, TypeError, OverflowError, AttributeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if (found := read(cells)) is not None:
                return found
    return None


def _read_clocks(cells: "pd.Series[Any]") -> np.ndarray | None:
    """Times of day and durations."""
    parts = cells.str.extract(_CLOCK)
    if parts[0].notna().all():
        hours = parts[0].astype(float)
        half = parts[3].str.lower()
        hours = hours.where(half.isna(), hours % 12) + 12 * (half == "p")
        seconds = parts[2].fillna("0").str.replace(",", ".").astype(float)
        return np.array(3600 * hours + 60 * parts[1].astype(float) + seconds, dtype=np.float64)
    if _DURATION.fullmatch(cells.iloc[0]):
        return np.asarray(pd.to_timedelta(cells).dt.total_seconds(), dtype=np.float64)
    return None


def _read_periods(cells: "pd.Series[Any]") -> np.ndarray | None:
    """Quarters, and what else pandas does not know."""
    found = [_QUARTER.fullmatch(cell) for cell in cells] if _QUARTER.fullmatch(cells.iloc[0]) else []
    if found:
        names = [f"{match[1] or match[4]}Q{match[2] or match[3]}" for match in found if match is not None]
        return _seconds(pd.PeriodIndex(names, freq="Q").to_timestamp()) if len(names) == len(cells) else None
    for pattern, form in _FORMATS:
        if re.fullmatch(pattern, cells.iloc[0]):
            if form is None or "%Y%m%d" in form:
                cells, form = cells.str.replace(r"\D", "", regex=True), _NUMBERS[14]
            return _seconds(pd.DatetimeIndex(pd.to_datetime(cells, format=form)))
    return None


def _read_dates(cells: "pd.Series[Any]") -> np.ndarray | None:
    """Dates with times of day or without."""
    parts = cells.str.extract(_DATE)
    if parts.notna().all(axis=None):
        return _seconds_of_dates(parts)
    for options in ({"format": "ISO8601"}, {"format": "mixed"}, {"format": "mixed", "dayfirst": True}):
        with contextlib.suppress(ValueError, TypeError, OverflowError, AttributeError):
            return _seconds(pd.DatetimeIndex(pd.to_datetime(cells, utc=True, **options)))
    return None


def _seconds_of_dates(parts: pd.DataFrame) -> np.ndarray:
    """Times of dates such as 3/1/2024, all in one order: pandas would choose one for each cell."""
    days_first = bool((parts[1] == ".").any() or (parts[0].astype(int) > 12).any())
    days = parts[0] + "/" + parts[2] + "/" + parts[3]
    year = "%Y" if parts[3].str.len().eq(4).all() else "%y"
    dates = pd.to_datetime(days, format=f"{'%d/%m' if days_first else '%m/%d'}/{year}")
    clock = parts[4].where(parts[4].str.strip() != "", "00:00:00")
    times = pd.to_datetime("1970-01-01 " + clock.str.strip(), format="mixed")
    return _seconds(pd.DatetimeIndex(dates)) + _seconds(pd.DatetimeIndex(times))


def _seconds(times: pd.DatetimeIndex) -> np.ndarray:
    # A difference to 1970 would overflow for years far from it.
    plain = times.tz_convert(None) if times.tz is not None else times
    return plain.to_numpy().astype("datetime64[us]").astype(np.float64) / 1e6


def unclear_date(values: "pd.Series[Any]") -> str | None:
    """A date that may begin with the day or the month, where no other tells which, or others are written otherwise."""
    cells = values.astype(str).str.strip()
    parts = cells.str.extract(_DATE)
    written = parts.notna().all(axis=1)
    if not written.any():
        return None
    if not written.all():
        return str(cells[written].iloc[0])
    if (parts[1] == ".").any():
        return None
    first, second = parts[0].astype(int), parts[2].astype(int)
    return None if (first > 12).any() or (second > 12).any() or not (first != second).any() else (
        str(cells[first != second].iloc[0]))  # fmt: skip


def is_clock(values: "pd.Series[Any]") -> bool:
    """True for times of day without a date; durations have more hours than a day."""
    if pd.api.types.is_numeric_dtype(values.dtype):
        return False
    hours = values.astype(str).str.strip().str.extract(_CLOCK)[0]
    return bool(len(hours)) and bool(hours.notna().all()) and bool((hours.astype(int) <= 24).all())


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
        return _seconds(pd.DatetimeIndex(pd.to_datetime(pd.Series(cells), format=form)))
    return None


def is_dated(values: "pd.Series[Any]") -> bool:
    """True if a column of times holds dates or times of day, and not numbers of steps or seconds."""
    return not pd.api.types.is_numeric_dtype(values.dtype) or _read_numbers(values) is not None


def seconds_of(values: "pd.Series[Any]", parts: list[np.ndarray] | None = None) -> np.ndarray:
    """
    A column of times as numbers that rise with them.

    Args:
        values (`pd.Series`): The column.
        parts (`list[np.ndarray]`, *optional*): The rows of each series; all rows are one when not given.

    Raises:
        DataError: If a cell is no time, may mean two dates, or times of day without a date fall within a series.
    """
    if pd.api.types.is_numeric_dtype(values.dtype):
        dates = _read_numbers(values)
        return values.to_numpy(dtype=np.float64, na_value=np.nan) if dates is None else dates
    if (date := unclear_date(values)) is not None:
        raise DataError(f"column {values.name!r}: {date} may start with the day or the month: write it as 2024-12-31")
    found = to_seconds(values)
    if found is None:
        row = next((row for row, cell in enumerate(values) if to_seconds(pd.Series([cell])) is None), 0)
        held = values.iloc[row]
        told = "is empty" if pd.isna(held) or held == "" else f"holds {held!r}, which is not a time"
        raise DataError(
            f"column {values.name!r}, row {row + 1}: {told}; write times as 2024-12-31 23:59, and remove rows without "
            "one, or leave the column out: --inputs NAME,NAME names the columns to read"
        )
    if is_clock(values):
        for rows in [np.arange(len(found))] if parts is None else parts:
            if (np.diff(found[rows]) < 0).any():
                raise DataError(
                    f"column {values.name!r} holds times of day without a date, which fall: add the date to each, as "
                    "in 2024-12-31 23:59"
                )
    return found
