"""A part of a run on two processes: `main FOLDER DATA CHANGES STEP`, under `fork_two`; samples are written down."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from hf_ext.training import TrainingArguments, train

from .tiny import Interrupted, TinyTask, make_arguments


class NotingTask(TinyTask):
    """Writes down the samples of each step by a mark."""

    folder: Path

    def loss(self, model: torch.nn.Module, batch: dict[str, Any], step: int) -> torch.Tensor:
        loss = super().loss(model, batch, step)
        rank = PartialState().process_index
        with (self.folder / f"samples-{rank}.txt").open("a") as file:
            for noisy in batch["pixel_values"]:
                # Example, flip and noise have all left their mark in the sum.
                file.write(f"{step} {float(noisy.double().sum())}\n")
        return loss


def read_samples(folder: Path) -> list[list[str]]:
    """Step and mark of every sample, in no particular order within a step."""
    lines = [line for path in folder.glob("samples-*.txt") for line in path.read_text().splitlines()]
    return sorted(line.split() for line in lines)


def split_arguments(output: Path, data: str, source: dict[str, Any], **changes: Any) -> TrainingArguments:
    """A run without dropout and statistics of batches, which depend on how a batch is split."""
    sources = {"train": {"path": data, **source}, "eval": {"path": data}}
    return make_arguments(output, sources, model={"dropout": 0.0, "batch_norm": False}, **changes)


def train_until(arguments: TrainingArguments, step: int) -> None:
    """Trains as far as the beginning of a step."""
    task = NotingTask(interrupt_at=step)
    task.folder = Path(arguments.output_dir).parent
    try:
        train(task, arguments)
    except Interrupted:
        return


def main() -> None:
    output, data, changes, step = sys.argv[1:]
    PartialState.destroy_process_group = lambda self, group=None: None
    train_until(split_arguments(Path(output), data, {}, **json.loads(changes)), int(step))
    torch.distributed.destroy_process_group()
