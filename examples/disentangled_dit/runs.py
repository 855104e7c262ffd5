"""Training runs of the study, each through `accelerate launch` on one thread and skipped where done."""

import sys
from pathlib import Path
from typing import Any

import classifier
import peers

from hf_ext.training import Task, TrainingArguments, build_task

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from studies import launch, read_arguments, summary  # noqa: E402  found through the line above

EXAMPLES = Path(__file__).resolve().parent
# What trains: our network, the classifier, or one of diffusers' networks by its name in peers.py.
OURS, CLASSIFIER = "ours", "classifier"


def recipe(kind: str) -> Path:
    """The YAML file of what trains."""
    return EXAMPLES / ("classifier.yaml" if kind == CLASSIFIER else "study.yaml")


def script(kind: str) -> list[str | Path]:
    """The program that trains it."""
    words = {OURS: ["train.py"], CLASSIFIER: ["classifier.py"]}.get(kind, ["peers.py", kind])
    return [EXAMPLES / words[0], *words[1:]]


def make_task(arguments: TrainingArguments, kind: str) -> Task:
    """Its task."""
    if kind == OURS:
        return build_task(arguments)
    if kind == CLASSIFIER:
        return classifier.make_task(arguments)
    return peers.make_task(arguments, kind)


def run_arguments(values: dict[str, Any], kind: str = OURS) -> TrainingArguments:
    """What the recipe with these values says."""
    return read_arguments(recipe(kind), values)


def train(run: Path, values: dict[str, Any], kind: str = OURS) -> dict[str, Any]:
    """Trains or continues a run; its budget, scores and losses. Of a finished one snapshot, curves, samples stay."""
    launch(run, script(kind), recipe(kind), values)
    return summary(run)
