"""The base and its ten fine-tunes, each trained by `accelerate launch` and skipped where it is already there."""

import math
import sys
from pathlib import Path

from tweets import SEED, TASKS, write_task

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from studies import copy_minilm, launch  # noqa: E402  found through the line above

EXAMPLES = Path(__file__).resolve().parent
BASE = "all-MiniLM-L6-v2"


def copy_base(work: Path) -> Path:
    """The encoder that every fine-tune starts from."""
    return copy_minilm(work / "base" / BASE)


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
    run = work / "runs" / task
    launch(run, [EXAMPLES / "train.py"], EXAMPLES / "finetune.yaml", values)
    return run / "snapshot"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("python examples/emr/finetunes.py TWEETEVAL WORK")
    for name in TASKS:
        fine_tune(name, Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
