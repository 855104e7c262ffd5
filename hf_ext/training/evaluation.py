"""Evaluation: examples shared out over the processes, gathered, summarised, written as eval.json."""

import atexit
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from tqdm import tqdm

from ..files import write_json
from .arguments import DataSource
from .data import read_example
from .provenance import published_name
from .task import Task


def evaluate(
    task: Task, model: torch.nn.Module, data: datasets.Dataset, accelerator: Accelerator | None = None
) -> dict[str, float]:
    """
    Evaluates a model on every example of a data set exactly once, over all processes.

    Args:
        task ([`Task`]): Says how a batch is scored and how scores are summarised.
        model (`torch.nn.Module`): The model; it is in evaluation mode for the call.
        data (`datasets.Dataset`): The examples.
        accelerator (`Accelerator`, *optional*): Of a running training; a new one otherwise.

    Returns:
        `dict[str, float]`: Metrics by name.

    Raises:
        ValueError: If there are no examples.
    """
    if len(data) == 0:
        raise ValueError("the evaluation data is empty: check data.eval.path and data.eval.split.")
    if accelerator is None:
        accelerator = Accelerator()
        # A process that ends with the group's threads alive is now and then aborted by them.
        atexit.register(accelerator.state.destroy_process_group)
    was_training = model.training
    model.eval()
    scores: list[tuple[int, dict[str, float]]] = []
    with torch.no_grad():
        shares = (accelerator.process_index, accelerator.num_processes)
        batches = list(share_batches(len(data), task.eval_batch_size, *shares))
        for indices, is_repeat in tqdm(batches, "evaluating", leave=False, disable=not accelerator.is_main_process):
            examples = [read_example(data, index) for index in indices]
            rows = task.evaluate_batch(model, examples, indices)
            if not is_repeat:
                scores += zip(indices, rows, strict=True)
    model.train(was_training)
    gathered = sorted(gather_object(scores), key=lambda item: item[0])
    return task.summarize([row for _, row in gathered])


def share_batches(count: int, batch_size: int, rank: int, world_size: int) -> Iterator[tuple[list[int], bool]]:
    """Batches of indices of one process, and whether each only repeats another process's."""
    # All processes get equally many: the forward passes of a sharded model run on all of them together.
    batches = [list(range(start, min(start + batch_size, count))) for start in range(0, count, batch_size)]
    for mine in range(rank, rank + len(batches), world_size):
        yield batches[min(mine, len(batches) - 1)], mine >= len(batches)


def write_results(
    path: Path | None, task: Task, metrics: dict[str, float], source: DataSource, revision: str | None = None
) -> dict[str, Any]:
    """Writes `eval.json`: what was measured, how, on what."""
    results = [
        {
            "metric": name,
            "name": task.metric_names[name],
            "value": value,
            "dataset": published_name(source.path),
            "split": source.split,
            "task": task.pipeline_tag,
            "arguments": task.describe(),
        }
        for name, value in metrics.items()
    ]
    content = {"results": results, "revision": revision}
    if path is not None:
        write_json(path, content)
    return content
