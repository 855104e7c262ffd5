"""Data and training runs of the study, each run through `accelerate launch` on one thread and skipped where done."""

import json
import os
import shutil
import subprocess
import sys
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from pyarrow import parquet

from hf_ext.mrconv.listops_mrconv import ListOps, write_listops
from hf_ext.training import TrainingArguments
from hf_ext.training.arguments import apply_overrides, build, read_yaml
from hf_ext.training.provenance import public_arguments

EXAMPLES = Path(__file__).resolve().parent
UNSEEN = "theo"
LISTOPS = {"train": 8000, "validation": 100, "test": 1000}
LAUNCH = ["--cpu", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]


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
    features = datasets.Features({"audio": datasets.List(datasets.Value("int16")), "label": datasets.Value("int64")})
    for name, is_test in splits.items():
        for part, wanted in (("train", False), ("test", True)):
            rows = [read_digit(path) for path in paths if is_test(path) is wanted]
            write_parquet(out / name / f"{part}.parquet", rows, features)


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
    datasets.disable_progress_bars()
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


def flags(values: dict[str, Any]) -> list[str]:
    """`--field=value` words; mappings as JSON, which is YAML."""
    return [f"--{name}={json.dumps(value) if isinstance(value, dict) else value}" for name, value in values.items()]


def run_arguments(recipe: str, values: dict[str, Any]) -> TrainingArguments:
    """What a recipe with these values says; its run folder has no meaning."""
    words = flags({"output_dir": "unused", **values})
    return build(TrainingArguments, apply_overrides(read_yaml(EXAMPLES / f"{recipe}.yaml"), words))


def is_complete(run: Path, arguments: TrainingArguments) -> bool:
    """Whether the run's snapshot is the end of exactly this training."""
    report = run / "snapshot" / "training.json"
    if not report.is_file():
        return False
    content = json.loads(report.read_text(encoding="utf-8"))
    return content["arguments"] == public_arguments(arguments) and content["steps"] == arguments.max_steps


def train(recipe: str, run: Path, values: dict[str, Any], peer: str | None = None) -> dict[str, Any]:
    """Trains or continues a run; its budget, scores and losses. Of a finished one only snapshot and curves stay."""
    config = EXAMPLES / f"{recipe}.yaml"
    values = {**values, "output_dir": run}
    if not is_complete(run, run_arguments(recipe, values)):
        shutil.rmtree(run / "snapshot", ignore_errors=True)
        script = [str(EXAMPLES / "train.py")] if peer is None else [str(EXAMPLES / "peers.py"), peer]
        command = [sys.executable, "-m", "accelerate.commands.launch", *LAUNCH, "--num_cpu_threads_per_process", "1"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        subprocess.run([*command, *script, str(config), *flags(values)], check=True, env=environment)
    for name in ("state", "best"):
        shutil.rmtree(run / name, ignore_errors=True)
    return summary(run)


def summary(run: Path) -> dict[str, Any]:
    """What the tables say of a finished run."""
    report = json.loads((run / "snapshot" / "training.json").read_text(encoding="utf-8"))
    scores = json.loads((run / "snapshot" / "eval.json").read_text(encoding="utf-8"))["results"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [[row["samples"], round(row["loss"], 4)] for row in rows if "loss" in row]
    # At most a hundred points, the last among them.
    kept = losses[:: -max(1, len(losses) // 100)][::-1]
    return {
        **{key: report[key] for key in ("steps", "samples", "seconds", "hardware", "commit", "versions", "arguments")},
        "scores": {row["metric"]: row["value"] for row in scores},
        "losses": kept,
    }
