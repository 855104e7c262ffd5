"""Data and training runs of the study, each run through `accelerate launch` on one thread and skipped where done."""

import shutil
import sys
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from pyarrow import parquet

from hf_ext.tasks.listops import ListOps, write_listops
from hf_ext.training import TrainingArguments

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from studies import launch, read_arguments, summary  # noqa: E402  found through the line above

EXAMPLES = Path(__file__).resolve().parent
UNSEEN = "theo"
DIGITS = datasets.Features({"audio": datasets.List(datasets.Value("int16")), "label": datasets.Value("int64")})
LISTOPS = {"train": 8000, "validation": 100, "test": 1000}


def read_digit(path: Path) -> dict[str, Any]:
    """The samples of a recording `{digit}_{speaker}_{number}.wav`, 16 bits, and its digit."""
    with wave.open(str(path)) as file:
        if (file.getsampwidth(), file.getnchannels(), file.getframerate()) != (2, 1, 8000):
            raise ValueError(f"{path} must be 16-bit mono of 8000 Hz, it has {file.getparams()}.")
        samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
    return {"audio": samples, "label": int(path.stem.partition("_")[0])}


def write_digits(fsdd: Path, out: Path) -> None:
    """The official split, whose test recordings are those numbered 0 to 4, and one of a speaker never heard before."""

    def is_official_test(path: Path) -> bool:
        return int(path.stem.rpartition("_")[2]) < 5

    def is_unseen(path: Path) -> bool:
        return path.stem.split("_")[1] == UNSEEN

    paths = sorted(fsdd.glob("*.wav"))
    if not paths:
        raise ValueError(f"{fsdd} holds no .wav files: give the folder of the Free Spoken Digit Dataset.")
    splits: dict[str, Callable[[Path], bool]] = {"official": is_official_test, "unseen": is_unseen}
    for name, is_test in splits.items():
        for part, wanted in (("train", False), ("test", True)):
            rows = [read_digit(path) for path in paths if is_test(path) is wanted]
            write_parquet(out / name / f"{part}.parquet", rows, DIGITS)


def write_images(cifar10: Path, out: Path) -> None:
    """CIFAR-10, its test images in random order: they come class by class, and the study scores the first of them."""
    test = parquet.read_table(cifar10 / "test.parquet")
    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(cifar10 / "train.parquet", out / "train.parquet")
    temporary = out / "test.tmp"
    parquet.write_table(test.take(np.random.default_rng(0).permutation(len(test))), temporary)
    temporary.rename(out / "test.parquet")


def write_text(out: Path) -> None:
    """The documentation of Python that comes with it, in windows of a kilobyte; every tenth topic is for testing."""
    from pydoc_data.topics import topics

    parts: dict[str, list[dict[str, Any]]] = {"train": [], "test": []}
    for index, name in enumerate(sorted(topics)):
        text = topics[name].strip()
        windows = [{"text": text[start : start + 1024]} for start in range(0, len(text), 1024)]
        parts["test" if index % 10 == 0 else "train"] += windows
    for part, rows in parts.items():
        write_parquet(out / f"{part}.parquet", rows, datasets.Features({"text": datasets.Value("string")}))


def write_parquet(path: Path, rows: list[dict[str, Any]], features: datasets.Features) -> None:
    """Rows as one file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    datasets.Dataset.from_list(rows, features=features).to_parquet(temporary)
    temporary.rename(path)


def prepare(fsdd: Path, cifar10: Path, work: Path) -> dict[str, Path]:
    """Writes the data that are not there yet; the folder of each."""
    data = work / "data"
    if not (data / "fsdd" / "unseen" / "test.parquet").is_file():
        write_digits(fsdd, data / "fsdd")
    if not (data / "cifar10" / "test.parquet").is_file():
        write_images(cifar10, data / "cifar10")
    if not (data / "listops").is_dir():
        write_listops(data / "listops", LISTOPS, ListOps())
    if not (data / "text" / "test.parquet").is_file():
        write_text(data / "text")
    return {
        "fsdd": data / "fsdd" / "official",
        "unseen": data / "fsdd" / "unseen",
        "cifar10": data / "cifar10",
        "listops": data / "listops",
        "text": data / "text",
    }


def run_arguments(recipe: str, values: dict[str, Any]) -> TrainingArguments:
    """What a recipe with these values says."""
    return read_arguments(EXAMPLES / f"{recipe}.yaml", values)


def train(recipe: str, run: Path, values: dict[str, Any], peer: str | None = None) -> dict[str, Any]:
    """Trains or continues a run; its budget, scores and losses. Of a finished one only snapshot and curves stay."""
    script = ["train.py"] if peer is None else ["peers.py", peer]
    launch(run, [EXAMPLES / script[0], *script[1:]], EXAMPLES / f"{recipe}.yaml", values)
    return summary(run)
