"""Files of sktime and aeon, `.ts`: a series in each line, its channels and its class between colons."""

from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError

TS = ".ts"


def read_ts(path: Path) -> tuple[list[np.ndarray], list[Any]]:
    """The series of a file of sktime and aeon, `[steps, channels]` each, and their classes or values."""
    head, mark, body = path.read_text(encoding="utf-8-sig").partition("@data")
    about = dict(line[1:].lower().partition(" ")[::2] for line in head.splitlines() if line.startswith("@"))
    if not mark or "true" in about.get("timestamps", ""):
        raise DataError(f"{path} is not a .ts file of sktime, or has times: numbers must follow @data, without times.")
    values = "true" in about.get("targetlabel", "")
    labelled = values or "true" in about.get("classlabel", "")
    found, labels = [], []
    for number, line in enumerate(body.strip().splitlines(), 1):
        *parts, label = line.strip().split(":") if labelled else (*line.strip().split(":"), "")
        try:
            series = np.array([[_number(cell.strip()) for cell in part.split(",")] for part in parts]).T
            labels.append(float(label) if values else label.strip() or None)
        except ValueError as error:
            raise DataError(f"{path}, series {number}: {error}.") from error
        # Shorter series are filled up at the end.
        found.append(series[: int(np.flatnonzero(~np.isnan(series).all(1)).max(initial=-1)) + 1])
    if not found or len({series.shape[1] for series in found}) > 1:
        raise DataError(f"{path} must hold series, all of as many channels.")
    return found, labels


def _number(cell: str) -> float:
    return np.nan if cell in ("?", "") else float(cell)
