"""Observers of a run: callbacks, the times between rows of metrics, and trackers."""

import contextlib
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator

from ..files import read_json, write_json
from .arguments import TrainingArguments


class Callback:
    """
    Observer of a run, in its main process. Override the methods that you need. An error of a callback is reported and
    counted, and the run continues; with `strict_callbacks` it ends the run.

    The value that a method returns controls the run, in all processes and within two steps: `"save"` saves a state,
    `"evaluate"` evaluates and saves, `"end"` also ends the run as complete; `None` has no effect.

    Example:
        >>> from hf_ext.training import Callback
        >>> class Goal(Callback):
        ...     def on_evaluate(self, step, metrics, model):
        ...         return "end" if metrics["accuracy"] > 0.99 else None
        >>> Goal().on_evaluate(100, {"accuracy": 0.995}, None)
        'end'
    """

    def on_begin(self, step: int, folder: Path, model: torch.nn.Module) -> str | None:
        """Called before the first step of this process; `step` steps are done, and the run writes to `folder`."""

    def on_log(self, step: int, values: dict[str, Any]) -> str | None:
        """Called with each row of `metrics.jsonl`."""

    def on_evaluate(self, step: int, metrics: dict[str, float], model: torch.nn.Module) -> str | None:
        """Called after each evaluation; the model has the weights that were evaluated."""

    def on_save(self, step: int, folder: Path, is_best: bool) -> str | None:
        """Called when a model was written: `folder` is `snapshot/`, or `best/` where it is the best so far."""

    def on_end(self, step: int) -> None:
        """Called when the run is complete; not where a signal or a deadline ends it before."""


class Clock:
    """Stopwatch for the time between two rows of metrics: data, compute, and overhead for the rest."""

    # Data is waiting for the loader and giving the batch to the device. Compute is forward, backward, the update and
    # the weight average, as this process sees them: it does not stop the device to look. On a GPU that is the launch
    # of its kernels and, at the row, where the loss is read, the wait for those that are not done.

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        # `time.monotonic` has steps of 15.6 ms on Windows before Python 3.13, and a row may be shorter.
        self.began = time.perf_counter()
        self.spent = {"data": 0.0, "compute": 0.0, "excluded": 0.0}

    @contextlib.contextmanager
    def count(self, part: str) -> Iterator[None]:
        """Counts the time inside a `with` block as data, compute, or excluded, such as an evaluation."""
        began = time.perf_counter()
        yield
        self.spent[part] += time.perf_counter() - began

    @property
    def seconds(self) -> float:
        """Since the last row."""
        return time.perf_counter() - self.began - self.spent["excluded"]

    def row(self, samples: int, left: int, device: torch.device) -> dict[str, float]:
        """Speed, shares of the time, memory of this process, and the time left."""
        seconds, on_gpu = self.seconds, device.type == "cuda"
        memory = torch.cuda.max_memory_allocated(device) if on_gpu else psutil.Process().memory_info().rss
        data, compute = self.spent["data"] / seconds, self.spent["compute"] / seconds
        return {
            "samples_per_second": round(samples / seconds, 2),
            "data_share": round(data, 3),
            "compute_share": round(compute, 3),
            "overhead_share": round(1 - data - compute, 3),
            "memory_gb": round(memory / 1e9, 2),
            "minutes_left": round(left / samples * seconds / 60, 1),
        }


def start_trackers(accelerator: Accelerator, arguments: TrainingArguments, folder: Path, step: int) -> None:
    """Starts the trackers, or goes on with the run of them that this run folder began."""
    settings = list_tracker_settings(arguments, folder, step) if accelerator.is_main_process else {}
    # Trackers take plain values only.
    plain = bool, int, float, str
    config = {name: value if isinstance(value, plain) else str(value) for name, value in vars(arguments).items()}
    accelerator.init_trackers(arguments.tracker_project, config=config, init_kwargs=settings)


def list_tracker_settings(arguments: TrainingArguments, folder: Path, step: int) -> dict[str, dict[str, Any]]:
    """The start settings of each tracker: a run folder is one run of a tracker, however often it is resumed."""
    file = folder / "tracker.json"
    if not file.exists():
        write_json(file, {"id": uuid.uuid4().hex[:16]})
    name = arguments.run_name or folder.resolve().name
    return {
        # Hides what a run wrote after the state from which it continues.
        "tensorboard": {"purge_step": step + 1},
        "wandb": {"name": name, "id": read_json(file)["id"], "resume": "allow", "dir": str(folder)},
        "trackio": {"name": name, "resume": "allow"},
    }
