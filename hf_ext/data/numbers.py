"""Numbers in cells of tables: decimal commas, thousands, words for what is missing."""

import contextlib
import re
from typing import Any

import numpy as np
import pandas as pd

# Marks of missing numbers. In a column of texts, such as class names, they are plain words.
MISSING = {"nan", "-nan", "na", "n/a", "n.a.", "<na>", "#n/a", "#div/0!", "#value!", "#ref!", "null", "none", "nil",
           "nd", "n.d.", "?", "-", "--", "---", "–", "—", ".", "..", "...", "*", "\\n", "missing"}  # fmt: skip
# 12,000 and 1.234.567,8 and 12 000: groups of three digits after the first.
_COMMA_GROUPS = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?")
_POINT_GROUPS = re.compile(r"[-+]?\d{1,3}(\.\d{3})+(,\d+)?")
_SPACE_GROUPS = re.compile(r"[-+]?\d{1,3}([\u0020\u00a0\u202f'’]\d{3})+([.,]\d+)?")
_DECIMAL_COMMA = re.compile(r"[-+]?\d*,\d+([eE][-+]?\d+)?")


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
    found = _plain_numbers(cells)
    if found is not None:
        return found, ""
    if any(map(_SPACE_GROUPS.fullmatch, cells)):
        found = _plain_numbers([re.sub(r"[\u0020\u00a0\u202f'’]", "", cell).replace(",", ".") for cell in cells])
        if found is not None:
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
