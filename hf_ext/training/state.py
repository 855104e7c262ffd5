"""State of a run: its folder, progress, weight average, and resume states that are whole or absent."""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..files import read_json, recover_folder, remove_leftovers, sync, whole_file, write_json
from .arguments import TrainingArguments

# What may differ between the two halves of an interrupted run: nothing here changes a weight.
FREE_TO_CHANGE = {"output_dir", "logging_steps", "eval_steps", "save_steps", "save_total_limit", "report_to"}
FREE_TO_CHANGE |= {"save_minutes", "deadline_minutes"}


@dataclass
class Progress:
    """How far a run is; saved with every state."""

    step: int = 0
    samples: int = 0
    seconds: float = 0.0
    best_step: int = -1
    best_value: float = float("nan")

    def state_dict(self) -> dict[str, Any]:
        """The fields as a dictionary."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores [`~Progress.state_dict`]."""
        for name, value in state.items():
            setattr(self, name, value)


class WeightAverage:
    """Exponential moving average of a model's parameters and saved floating-point buffers."""

    # The decay is reached from below, as (1 + t) / (10 + t), so that the first weights are soon forgotten. Statistics
    # such as those of BatchNorm belong to the averaged weights: they are averaged over the same horizon. Frozen
    # parameters and integer buffers are copied. One kernel goes over all tensors: a loop over them costs more than the
    # optimizer's step. Of a sharded model each process averages its part of every weight, and nothing is exchanged.

    def __init__(self, model: torch.nn.Module, decay: float):
        self.decay = decay
        self.steps = 0
        saved = model.state_dict(keep_vars=True)
        self.tensors = [*model.parameters(), *(buffer for name, buffer in model.named_buffers() if name in saved)]
        self.averages = [own_part(tensor).clone() for tensor in self.tensors]
        frozen = {id(parameter) for parameter in model.parameters() if not parameter.requires_grad}
        self._follows = [tensor.is_floating_point() and id(tensor) not in frozen for tensor in self.tensors]

    def _pairs(self, follows: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Averages that follow their tensors, or those that copy them, and these tensors."""
        chosen = [place for place, moves in enumerate(self._follows) if moves == follows]
        return [self.averages[place] for place in chosen], [own_part(self.tensors[place]) for place in chosen]

    @torch.no_grad()
    def step(self) -> None:
        """Takes the current weights into the average."""
        decay = min((1 + self.steps) / (10 + self.steps), self.decay) if self.steps else 0.0
        self.steps += 1
        torch._foreach_lerp_(*self._pairs(True), 1 - decay)
        copies, originals = self._pairs(False)
        if copies:
            torch._foreach_copy_(copies, originals)

    @contextlib.contextmanager
    def apply(self) -> Iterator[None]:
        """Puts the averaged weights into the model for the duration of a `with` block."""
        kept = [own_part(tensor).clone() for tensor in self.tensors]
        self._fill_model(self.averages)
        try:
            yield
        finally:
            self._fill_model(kept)

    @torch.no_grad()
    def _fill_model(self, values: list[Tensor]) -> None:
        torch._foreach_copy_([own_part(tensor) for tensor in self.tensors], values)

    def state_dict(self) -> dict[str, Any]:
        """State of the average."""
        return {"shadow_params": self.averages, "optimization_step": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores [`~WeightAverage.state_dict`]."""
        self.steps = state["optimization_step"]
        for average, saved in zip(self.averages, state["shadow_params"], strict=True):
            average.copy_(saved)


def own_part(tensor: Tensor) -> Tensor:
    """What this process holds of a weight: all of it, or a part, where the weights are sharded."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.detach()


class RunFolder:
    """The folder of one run."""

    # args.json        the arguments, written first: it marks the folder as ours
    # metrics.jsonl    a row for each log and each evaluation
    # state/step-N/    resume states of all processes: whole, or absent
    # snapshot/, best/ loadable models: the last saved and the best evaluated
    #
    # How a run resumes. A state is written under a temporary name, synced, and renamed when it is complete, after
    # everything else of its step: the newest state therefore never promises what is not on disk. Whatever was written
    # after it (rows of metrics, a newer snapshot) belongs to steps that are done again: rows are dropped, snapshots
    # replaced whole. tests/training/test_kill.py kills runs at any moment and compares what they leave.

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.arguments = self.path / "args.json"
        self.metrics = self.path / "metrics.jsonl"
        self.states = self.path / "state"
        self.snapshot = self.path / "snapshot"
        self.best = self.path / "best"
        # The system lets go of it when the process ends, however it ends.
        self.lock = FileLock(self.path / ".lock", timeout=0)

    def check(self, arguments: TrainingArguments, processes: int) -> None:
        """Refuses a folder that a run must not be written to; nothing is written."""
        if self.arguments.exists():
            self._check_arguments(read_json(self.arguments), {"arguments": asdict(arguments), "processes": processes})
            return
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file: choose a folder as output_dir.")
        if any(path.exists() for path in (self.states, self.snapshot, self.best, self.metrics)):
            raise ValueError(
                f"{self.path} holds training files but no args.json, so it is not a run that can be continued: "
                "choose another output_dir."
            )
        # Beside a new run may lie hidden files, and the files that its output goes to.
        names = sorted(path.name for path in self.path.glob("*"))
        others = [name for name in names if not name.startswith(".") and not name.endswith((".log", ".out", ".err"))]
        if others:
            raise ValueError(
                f"{self.path} holds other files ({', '.join(others[:4])}{', …' if len(others) > 4 else ''}): choose a "
                "folder that is new or empty as output_dir."
            )
        for place in arguments.data_arguments.paths:
            data = Path(place).expanduser()
            if data.is_dir() and not (data / "lq").is_dir() and self.path.resolve().is_relative_to(data.resolve()):
                raise ValueError(
                    f"{self.path} lies inside the data {place}, which would take the files of the run for data: "
                    "choose another output_dir."
                )

    def prepare(self, arguments: TrainingArguments, processes: int) -> None:
        """Creates the folder, or prepares an existing run of the same arguments for going on."""
        self.check(arguments, processes)
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            self.lock.acquire()
        except Timeout as error:
            raise ValueError(
                f"another process trains in {self.path}: wait for it, end it, or choose another output_dir."
            ) from error
        # First: it is what marks the folder as ours.
        write_json(self.arguments, {"arguments": asdict(arguments), "processes": processes})
        self.states.mkdir(exist_ok=True)
        for leftover in self.states.glob("step-*.tmp"):
            shutil.rmtree(leftover)
        remove_leftovers(self.path)
        for folder in (self.snapshot, self.best):
            recover_folder(folder)

    def _check_arguments(self, found: dict[str, Any], wanted: dict[str, Any]) -> None:
        if not isinstance(found, dict) or not found.keys() >= wanted.keys():
            raise ValueError(f"{self.arguments} was not written by a training: choose another output_dir.")
        before, now = found["arguments"], wanted["arguments"]
        changed = [
            f"{name}: {before.get(name)!r} → {now.get(name)!r}"
            for name in now
            if name not in FREE_TO_CHANGE and before.get(name) != now.get(name)
        ]
        if found["processes"] != wanted["processes"]:
            changed.append(f"number of processes: {found['processes']} → {wanted['processes']}")
        if changed and self.saved_steps():
            raise ValueError(
                f"{self.path} holds a run with other settings ({'; '.join(changed)}). Continue it with the same "
                "settings, or choose another output_dir."
            )

    def saved_steps(self) -> list[int]:
        """Steps of the complete resume states, ascending."""
        names = [re.fullmatch(r"step-(\d+)", path.name) for path in self.states.glob("step-*")]
        return sorted(int(match[1]) for match in names if match)

    @property
    def last_good(self) -> str:
        """Where a failed run goes on, in words."""
        steps = self.saved_steps()
        return f"the last good state is step {steps[-1]}" if steps else "there is no state yet"

    def state(self, step: int) -> Path:
        """Folder of one resume state."""
        return self.states / f"step-{step}"

    def prune(self, keep_last: int, best_step: int) -> None:
        """Deletes all resume states but the last `keep_last` and the best."""
        for step in self.saved_steps()[:-keep_last]:
            if step != best_step:
                doomed = self.state(step).with_suffix(".tmp")
                os.replace(self.state(step), doomed)
                shutil.rmtree(doomed)

    def truncate_metrics(self, step: int) -> None:
        """Drops rows that were written after the state from which the run continues."""
        rows = [row for row in self.read_metrics() if row["step"] <= step]
        with whole_file(self.metrics, "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def name_bad_examples(self, rank: int) -> Path:
        """Where a process lists the examples that it left out."""
        return self.path / f"bad_examples{f'-{rank}' if rank else ''}.jsonl"

    def add_metrics(self, row: dict[str, Any]) -> None:
        """Adds a row to `metrics.jsonl`."""
        with clear_write_errors(self.metrics.name, self), self.metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """Rows of `metrics.jsonl`; a last line that a crash cut off is left out."""
        if not self.metrics.exists():
            return []
        text = self.metrics.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


@contextlib.contextmanager
def clear_write_errors(what: str, run: RunFolder) -> Iterator[None]:
    """Turns a failed write into a message that names the place, the free space and the last good state."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        # torch and safetensors report a full disk as RuntimeError and SafetensorError; anything else is passed on.
        writing = ("PytorchStreamWriter", "unexpected pos", "file write", "iostream error", "os error")
        if not isinstance(error, OSError) and not any(text in str(error) for text in writing):
            raise
        free = shutil.disk_usage(run.path).free / 2**30
        raise OSError(
            f"cannot write {what} to {run.path} ({error}); {free:.1f} GiB are free there; {run.last_good}. "
            "Make room and run the same command again."
        ) from error


def save_state(
    accelerator: Accelerator, run: RunFolder, step: int, stream_states: list[Any], average: WeightAverage | None
) -> None:
    """
    Writes the resume state of all processes: under a temporary name, renamed once it is complete and durable. An
    average is given where each process has its own part of it.
    """
    temporary = run.states / f"step-{step}.tmp"
    with clear_write_errors(f"the state of step {step}", run):
        accelerator.save_state(str(temporary))
        write_json(temporary / f"stream-{accelerator.process_index}.json", stream_states)
        if average is not None:
            torch.save(average.state_dict(), temporary / f"average-{accelerator.process_index}.pt")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            sync(temporary)
            os.replace(temporary, run.state(step))
    accelerator.wait_for_everyone()


def load_state(accelerator: Accelerator, run: RunFolder, step: int, average: WeightAverage | None) -> list[Any]:
    """Restores what [`save_state`] wrote; returns the reading states for this process's loader."""
    # States are pickles: only folders of this run are read.
    accelerator.load_state(str(run.state(step)))
    if average is not None:
        average.load_state_dict(torch.load(run.state(step) / f"average-{accelerator.process_index}.pt"))
    states: list[Any] = read_json(run.state(step) / f"stream-{accelerator.process_index}.json")
    return states
