"""Small tables and texts for the tests of what `init` makes of them."""

import gzip
import json
from pathlib import Path

import numpy as np
import pandas as pd


def write(path: Path, rows: list, form: str = "lines") -> str:
    """JSON lines, or one list, compressed where the name says so."""
    held = (json.dumps(rows) if form == "list" else "\n".join(map(json.dumps, rows))).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(held) if path.suffix == ".gz" else held)
    return str(path)


def write_table(path: Path, columns: dict) -> str:
    pd.DataFrame(columns).to_csv(path, index=False)
    return str(path)


def texts_of(part: str, classes: str) -> dict:
    return {"text": [f"{part} has some words {n}" for n in range(24)], "label": [*classes] * (24 // len(classes))}


def series_of(part: str, classes: str) -> dict:
    numbers = np.random.default_rng(len(part)).normal(size=(9, 24))
    return {**{f"t{step}": row for step, row in enumerate(numbers)}, "label": [*classes] * (24 // len(classes))}


def recording_of(part: str, classes: str) -> dict:
    return {"time": range(24), "x": series_of(part, classes)["t0"], "label": sorted(classes * (24 // len(classes)))}


def say(word: str) -> list[str]:
    return [f"{word} number {n} says something about {chr(97 + n)}" for n in range(24)]
