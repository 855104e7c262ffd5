"""The recordings of the Free Spoken Digit Dataset as parquet files."""

import wave
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import soxr

from hf_ext.files import whole_file

FEATURES = datasets.Features({"audio": datasets.List(datasets.Value("int16")), "label": datasets.Value("int64")})


def read_digit(path: Path) -> dict[str, Any]:
    """The samples of a recording `{digit}_{speaker}_{number}.wav`, 16 bits, and its digit."""
    with wave.open(str(path)) as file:
        if (file.getsampwidth(), file.getnchannels(), file.getframerate()) != (2, 1, 8000):
            raise ValueError(f"{path} must be 16-bit mono of 8000 Hz, it has {file.getparams()}.")
        samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
    return {"audio": samples, "label": int(path.stem.partition("_")[0])}


def vary_digit(samples: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """A recording as another would have made it: 12 % slower to faster, later or cut, louder or softer, with noise."""
    varied = soxr.resample(samples.astype("float32"), 8000, 8000 * generator.uniform(0.88, 1.12))
    start = int(generator.integers(-160, 400))
    varied = np.pad(varied, (start, 0)) if start > 0 else varied[-start:]
    varied = varied * generator.uniform(0.5, 1.5)
    varied = varied + generator.normal(size=len(varied)) * generator.uniform(0, 0.01) * np.abs(varied).max()
    return np.clip(np.rint(varied), -32768, 32767).astype("int16")


def write_digits(path: Path, rows: list[dict[str, Any]]) -> None:
    """Recordings as one parquet file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        datasets.Dataset.from_list(rows, features=FEATURES).to_parquet(file)


def split_digits(files: list[Path], every: int) -> dict[str, list[Path]]:
    """The official test, recordings 0 to 4 of each digit and speaker; number 5 of so many of the others chooses."""
    parts: dict[str, list[Path]] = {"train": [], "validation": [], "test": []}
    for file in sorted(files):
        number = int(file.stem.rpartition("_")[2])
        parts["test" if number < 5 else "validation" if number % every == 5 else "train"].append(file)
    return parts
