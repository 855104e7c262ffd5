"""Evaluation over all processes, and the files beside a model that tell of it: eval.json and training.json."""

import contextlib
import functools
import json
import logging
import math
import platform
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from glob import has_magic
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate import Accelerator, PartialState

from ..distributed import Ranks
from ..errors import DataError, UsageError
from ..files import write_json
from ..progress import progress
from .arguments import DataSource, TrainingArguments, map_paths
from .loader_processes import read_batches
from .state import Progress
from .task import Task

logger = logging.getLogger(__name__)


def evaluate(
    task: Task,
    model: torch.nn.Module,
    data: datasets.Dataset,
    accelerator: Accelerator | None = None,
    *,
    batch_size: int | None = None,
    num_workers: int = 0,
    after_batch: Callable[[], None] | None = None,
    scored: dict[int, dict[str, float]] | None = None,
) -> dict[str, float]:
    """
    Evaluates a model on every example of a data set exactly once, over all processes.

    Args:
        task ([`Task`]): Says how a batch is scored and how scores are summarised.
        model (`torch.nn.Module`): The model; it is in evaluation mode for the call.
        data (`datasets.Dataset`): The examples, at least one.
        accelerator (`Accelerator`, *optional*): Of a running training; the processes of `accelerate launch` otherwise.
        batch_size (`int`, *optional*): Examples that a process scores at once; the task's own number when not given.
        num_workers (`int`, defaults to 0): Loader processes for each process, which read and decode.
        after_batch (`Callable`, *optional*): Called after each batch; what it raises ends the evaluation.
        scored (`dict`, *optional*): Scores that are known, by the index of the example; this process's are added.

    Returns:
        `dict[str, float]`: Metrics by name.
    """
    require_examples(data)
    # A script may train after it, and the processes find each other once: here as for a training, on its devices.
    ranks = Ranks(accelerator or PartialState())
    if accelerator is None:
        ranks.part()
    was_training = model.training
    model.eval()
    scores = {} if scored is None else scored
    left = [index for index in range(len(data)) if index not in scores]
    shared = share_batches(len(left), batch_size or task.eval_batch_size, ranks.index, ranks.count)
    batches = [([left[place] for place in places], is_repeat) for places, is_repeat in shared]
    bar = progress(batches, "evaluating", leave=False, shown=ranks.index == 0)
    # Closed by name: the traceback of an error would keep the loader processes alive.
    with torch.no_grad(), contextlib.closing(read_batches(data, [part for part, _ in batches], num_workers)) as read:
        for (indices, is_repeat), examples in zip(bar, read, strict=True):
            found = task.evaluate_batch(model, examples, indices)
            rows = [*found] if isinstance(found, Iterable) else []
            if len(rows) != len(indices):
                told = f"{type(task).__name__}.evaluate_batch returned {found!r:.80}"
                raise UsageError(f"{told}; allowed: scores for each of the {len(indices)} examples.")
            if not is_repeat:
                scores.update(zip(indices, rows, strict=True))
            if after_batch is not None:
                after_batch()
    model.train(was_training)
    gathered = {index: row for part in ranks.gather(scores) for index, row in part.items()}
    # A task that sums up its own rows may have others than dictionaries.
    values = {index: row.values() if isinstance(row, dict) else [row] for index, row in sorted(gathered.items())}
    unsure = [index for index, found in values.items() if any(map(is_nan, found))]
    if unsure and ranks.index == 0:
        told = "scores of %d of %d examples are NaN, such as those of the examples %s (counted from 0)"
        logger.warning(told, len(unsure), len(gathered), ", ".join(map(str, unsure[:4])))
    return _read_metrics(task, task.summarize([gathered[index] for index in sorted(gathered)]))


def is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _read_metrics(task: Task, found: Any) -> dict[str, float]:
    """Metrics as plain numbers, which JSON and trackers take, also where they are of numpy or torch."""
    try:
        plain = {name: value.item() if hasattr(value, "item") else value for name, value in found.items()}
        return {name: value if isinstance(value, int | float) else float(value) for name, value in plain.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        told = f"{type(task).__name__}.summarize returned {found!r:.200}"
        raise UsageError(f"{told}; allowed: a number for each name of a metric.") from error


def require_examples(data: Any) -> None:
    if isinstance(data, datasets.IterableDataset) or len(data) == 0:
        raise DataError("the evaluation data is empty, or a stream: check data.eval.path and data.eval.split.")


def evaluate_sets(
    task: Task, model: torch.nn.Module, data: dict[str, datasets.Dataset], *where: Accelerator, **options: Any
) -> dict[str, float]:
    """Evaluates on each data set; the metrics of several sets have the set's name as a prefix."""
    scored = options.pop("scored", {})
    return {
        f"{name}_{metric}" if name else metric: value
        for name, rows in data.items()
        for metric, value in evaluate(task, model, rows, *where, scored=scored.setdefault(name, {}), **options).items()
    }


def share_batches(count: int, batch_size: int, rank: int, world_size: int) -> Iterator[tuple[list[int], bool]]:
    """Batches of indices of one process, each with a flag for repetitions of another process's batch."""
    # All processes get equally many: the forward passes of a sharded model run on all of them together.
    batches = [list(range(start, min(start + batch_size, count))) for start in range(0, count, batch_size)]
    for mine in range(rank, rank + len(batches), world_size):
        yield batches[min(mine, len(batches) - 1)], mine >= len(batches)


def write_results(
    path: Path | None,
    task: Task,
    metrics: dict[str, float],
    sources: dict[str, DataSource],
    revision: str | None = None,
    counts: dict[str, int] | None = None,
    precision: str = "no",
) -> dict[str, Any]:
    """Writes `eval.json`: finite metrics, protocol, data and, where given, the number of examples of each set."""
    results: list[dict[str, Any]] = [
        {
            "metric": metric,
            "name": words,
            "value": metrics[told],
            "dataset": published_name(source.path),
            "split": source.split,
            **({"examples": counts[name]} if counts else {}),
            "task": task.pipeline_tag,
            "arguments": _describe(task) | ({} if precision == "no" else {"mixed_precision": precision}),
        }
        for name, source in sources.items()
        for metric, words in task.metric_names.items()
        if (told := f"{name}_{metric}" if name else metric) in metrics
    ]
    content = {"results": results, "revision": revision}
    if path is not None:
        # JSON has no other numbers, and a card shows none.
        if lost := [f"{each['metric']} ({each['value']})" for each in results if not math.isfinite(each["value"])]:
            logger.warning("%s leaves out %s, which JSON does not have", path.name, ", ".join(lost))
        write_json(path, {**content, "results": [each for each in results if math.isfinite(each["value"])]})
    return content


def _describe(task: Task) -> dict[str, Any]:
    """Settings of a task for JSON; those of one written by a user, such as a tensor, as texts."""
    return dict(json.loads(json.dumps(task.describe(), default=str)))


def provenance(arguments: TrainingArguments, task: Task, progress: Progress, processes: int) -> dict[str, Any]:
    """The content of `training.json`."""
    libraries = ("hf-ext", "torch", "transformers", "diffusers", "peft", "accelerate", "datasets")
    cpu = f"CPU ({platform.machine()}), {torch.get_num_threads()} thread(s)"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu
    return {
        "arguments": public_arguments(arguments),
        "commit": source_commit(),
        "task": _describe(task),
        "hardware": f"{processes} process(es) on {device}",
        "seconds": round(progress.seconds, 1),
        "steps": progress.step,
        "samples": progress.samples,
        "versions": {name: version(name) for name in libraries},
    }


def published_name(path: str | list) -> str:
    """The public name of a data set or model: a local folder by its last name, a Hub id as it is."""
    if isinstance(path, list):
        return " + ".join(published_name(part["path"] if isinstance(part, dict) else part) for part in path)
    local = Path(path).expanduser()
    return local.resolve().name if local.exists() or has_magic(path) else path


def public_arguments(arguments: TrainingArguments) -> dict[str, Any]:
    """Arguments for publication: only the last names of local folders."""
    content = asdict(arguments)
    del content["output_dir"], content["resume_from_checkpoint"]
    content["data"] = map_paths(content["data"], published_name)
    if content["init_from"] is not None:
        content["init_from"] = published_name(content["init_from"])
    # An autoencoder, a text encoder.
    words = {name: value for name, value in content["task"].items() if isinstance(value, str) and value}
    content["task"] |= {name: published_name(value) for name, value in words.items()}
    return content


@functools.cache
def source_commit() -> str | None:
    """The commit of hf_ext, where it runs from its git checkout, as this process found it first."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
