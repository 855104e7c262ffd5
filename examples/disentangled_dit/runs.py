"""Training runs of the study, each through `accelerate launch` on one thread and skipped where done."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import classifier
import peers

from hf_ext.settings import build
from hf_ext.training import TrainingArguments, build_task
from hf_ext.training.arguments import apply_overrides, read_yaml
from hf_ext.training.loop import Task
from hf_ext.training.provenance import public_arguments

EXAMPLES = Path(__file__).resolve().parent
LAUNCH = ["--cpu", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
# What trains: our network, the classifier, or one of diffusers' networks by its name in peers.py.
OURS, CLASSIFIER = "ours", "classifier"


def recipe(kind: str) -> Path:
    """The YAML file of what trains."""
    return EXAMPLES / ("classifier.yaml" if kind == CLASSIFIER else "study.yaml")


def script(kind: str) -> list[str]:
    """The program that trains it."""
    words = {OURS: ["train.py"], CLASSIFIER: ["classifier.py"]}.get(kind, ["peers.py", kind])
    return [str(EXAMPLES / words[0]), *words[1:]]


def make_task(arguments: TrainingArguments, kind: str) -> Task:
    """Its task."""
    if kind == OURS:
        return build_task(arguments)
    if kind == CLASSIFIER:
        return build(classifier.ClassifierTask, arguments.task, "task")
    return peers.make_task(arguments, kind)


def flags(values: dict[str, Any]) -> list[str]:
    """`--field=value` words; what is neither word nor path as JSON, which is YAML."""
    return [
        f"--{name}={value if isinstance(value, (str, Path)) else json.dumps(value)}" for name, value in values.items()
    ]


def run_arguments(values: dict[str, Any], kind: str = OURS) -> TrainingArguments:
    """What the recipe with these values says; its run folder has no meaning."""
    words = flags({"output_dir": "unused", **values})
    return build(TrainingArguments, apply_overrides(read_yaml(recipe(kind)), words))


def is_complete(run: Path, arguments: TrainingArguments) -> bool:
    """Whether the run's snapshot is the end of exactly this training."""
    report = run / "snapshot" / "training.json"
    if not report.is_file():
        return False
    content = json.loads(report.read_text(encoding="utf-8"))
    return content["arguments"] == public_arguments(arguments) and content["steps"] == arguments.max_steps


def train(run: Path, values: dict[str, Any], kind: str = OURS) -> dict[str, Any]:
    """Trains or continues a run; its budget, scores and losses. Of a finished one snapshot, curves, samples stay."""
    values = {**values, "output_dir": run}
    if not is_complete(run, run_arguments(values, kind)):
        # What another run, of other settings, left here; a run that was interrupted has a state.
        shutil.rmtree(run / "snapshot" if any(run.glob("state/step-*")) else run, ignore_errors=True)
        command = [sys.executable, "-m", "accelerate.commands.launch", *LAUNCH, "--num_cpu_threads_per_process", "1"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        subprocess.run([*command, *script(kind), str(recipe(kind)), *flags(values)], check=True, env=environment)
    for name in ("state", "best"):
        shutil.rmtree(run / name, ignore_errors=True)
    return summary(run)


def summary(run: Path) -> dict[str, Any]:
    """What the tables say of a finished run."""
    report = json.loads((run / "snapshot" / "training.json").read_text(encoding="utf-8"))
    scores = json.loads((run / "snapshot" / "eval.json").read_text(encoding="utf-8"))["results"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [[row["samples"], round(row["loss"], 5)] for row in rows if "loss" in row]
    # At most a hundred points, the last among them.
    kept = losses[:: -max(1, len(losses) // 100)][::-1]
    return {
        **{key: report[key] for key in ("steps", "samples", "seconds", "hardware", "commit", "versions", "arguments")},
        "scores": {row["metric"]: row["value"] for row in scores},
        "losses": kept,
    }
