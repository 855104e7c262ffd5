"""State of a run: its folder, progress, weight average, and resume states that are whole or absent."""

import contextlib
import errno
import json
import os
import pickle
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hf_ext.errors import DataError, UsageError

from ..distributed import Ranks
from ..files import (
    open_to_readers,
    read_json,
    read_rows,
    recover_folder,
    remove,
    remove_leftovers,
    replace_folder,
    sync,
    whole_file,
    write_json,
)
from ..system import sync_directory
from .arguments import TrainingArguments, find_paths
from .changes import Changes, compare_data, compare_settings
from .manifest import NAME, RANDOM_STATES, DamagedState, hash_files, list_files, read_manifest, write_manifest


@dataclass
class Progress:
    """Progress of a run, saved with every state."""

    step: int = 0
    samples: int = 0
    seconds: float = 0.0
    best_step: int = -1
    best_value: float = float("nan")
    # Evaluations since the best one.
    stale: int = 0
    # The evaluation of this step was interrupted: neither its row nor the models that come of it are on disk.
    owes_evaluation: bool = False
    # A callback ended the run.
    ended: bool = False

    def state_dict(self) -> dict[str, Any]:
        """The fields as a dictionary."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores [`~Progress.state_dict`]."""
        vars(self).update(state)


class WeightAverage:
    """Exponential moving average of a model's parameters and saved floating-point buffers."""

    # The decay is reached from below, as (1 + t) / (10 + t), so that the first weights are soon forgotten. Statistics
    # such as those of BatchNorm belong to the averaged weights: they are averaged over the same horizon. Frozen
    # parameters and integer buffers are copied. One kernel goes over all tensors: a loop over them costs more than the
    # optimizer's step. Of a sharded model each process averages its part of every weight, and nothing is exchanged.

    def __init__(self, model: torch.nn.Module, decay: float):
        self.model = model
        self.decay = decay
        self.steps = 0
        saved = model.state_dict(keep_vars=True)
        named = dict(model.named_parameters()) | {name: part for name, part in model.named_buffers() if name in saved}
        self.names, self.tensors = [*named], [*named.values()]
        self.averages = [own_part(tensor).clone() for tensor in self.tensors]
        frozen = {id(parameter) for parameter in model.parameters() if not parameter.requires_grad}
        self._is_sharded = any(isinstance(tensor, DTensor) for tensor in self.tensors)
        follows = [tensor.is_floating_point() and id(tensor) not in frozen for tensor in self.tensors]
        copies = [not moves for moves in follows]
        self._averages, self._followed = (list(compress(items, follows)) for items in (self.averages, self.tensors))
        self._copies, self._copied = (list(compress(items, copies)) for items in (self.averages, self.tensors))

    @torch.no_grad()
    def step(self) -> None:
        """Takes the current weights into the average."""
        decay = min((1 + self.steps) / (10 + self.steps), self.decay) if self.steps else 0.0
        self.steps += 1
        torch._foreach_lerp_(self._averages, self._own_parts(self._followed), 1 - decay)
        if self._copies:
            torch._foreach_copy_(self._copies, self._own_parts(self._copied))

    def _own_parts(self, tensors: list[Tensor]) -> list[Tensor]:
        """This process's parts of tensors, to be read without a gradient."""
        # The parameters themselves, which stay the same objects: loading and optimizers write into them, and FSDP2
        # replaces them before the average is made. A part of one is another tensor after FSDP2 has padded it.
        return [own_part(tensor) for tensor in tensors] if self._is_sharded else tensors

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
        # FSDP2 keeps what the last forward pass gathered of the outer modules for a backward pass, which comes at once
        # in training. After an evaluation the next step would compute with it, not with what was filled in here.
        for part in self.model.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def state_dict(self) -> dict[str, Any]:
        """State of the average."""
        return {"shadow_params": self.averages, "optimization_step": self.steps}

    def _list_shards(self) -> dict[str, Any]:
        """The averages by name, each as the part of a whole that this process holds; they share its memory."""
        shards = {"optimization_step": torch.tensor(self.steps)}
        for name, tensor, average in zip(self.names, self.tensors, self.averages, strict=True):
            shards[name] = average
            if isinstance(tensor, DTensor):
                mesh, places, shape = tensor.device_mesh, tensor.placements, tensor.shape
                shards[name] = DTensor.from_local(average, mesh, places, shape=shape, stride=tensor.stride())
        return shards

    def save_shards(self, folder: Path) -> None:
        """Writes the average of a sharded model; each process writes its part."""
        checkpoint.save(self._list_shards(), storage_writer=checkpoint.FileSystemWriter(folder))

    def load_shards(self, folder: Path) -> None:
        """Restores [`~WeightAverage.save_shards`], written by any number of processes."""
        shards = self._list_shards()
        checkpoint.load(shards, storage_reader=checkpoint.FileSystemReader(folder))
        self.steps = int(shards["optimization_step"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores [`~WeightAverage.state_dict`]."""
        self.steps = state["optimization_step"]
        for average, saved in zip(self.averages, state["shadow_params"], strict=True):
            average.copy_(saved)


def own_part(tensor: Tensor) -> Tensor:
    """This process's part of a weight: all of it, or a part, where the weights are sharded."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.detach()


class RunFolder:
    """The folder of one run."""

    # args.json        the arguments, written first: it marks the folder as ours
    # metrics.jsonl    a row for each log and each evaluation
    # state/step-N/    resume states of all processes: whole, or absent; `manifest` tells whether they still are
    # snapshot/, best/ loadable models: the last saved and the best evaluated
    # .lock            one process trains here; the system releases it when that ends
    #
    # How a run resumes. A state is written under a temporary name, synced, and renamed when it is complete, after
    # everything else of its step: the newest state therefore never promises what is not on disk. Whatever was written
    # after it (rows of metrics, a newer snapshot) belongs to steps that are done again: rows are dropped, snapshots
    # replaced whole. So a run may go on from any state that is whole, and ends as if it had never stopped: one that
    # was damaged since is set aside until the next is saved. tests/training/test_kill.py kills runs at any moment,
    # test_damage.py damages states; both compare what the runs leave.

    def __init__(self, path: str | Path):
        self.path = Path(path).expanduser()
        self.arguments = self.path / "args.json"
        self.metrics = self.path / "metrics.jsonl"
        self.states = self.path / "state"
        self.snapshot = self.path / "snapshot"
        self.best = self.path / "best"
        # Left by a process that fails, for the others.
        self.failure = self.path / ".failure.json"
        self.lock = FileLock(self.path / ".lock", timeout=0)
        # What the run is now (`changes.describe_run`), for the next state.
        self.about: dict[str, Any] = {}
        # Found by `check`: the step to go on from, what its state says, how that differs, and damaged states after it.
        self.start: int | None = None
        self.before: dict[str, Any] | None = None
        self.changes = Changes()
        self.damaged: dict[int, DamagedState] = {}
        self.notes: list[str] = []

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *error: object) -> None:
        self.lock.release(force=True)

    def check(self, arguments: TrainingArguments, about: dict[str, Any]) -> None:
        """Refuses a folder that a run must not be written to, and finds the state from which one goes on."""
        self.about = about
        if self.arguments.exists():
            found = read_json(self.arguments)
            if not isinstance(found, dict) or not found.keys() >= {"arguments", "processes"}:
                raise UsageError(f"{self.arguments} was not written by a training: choose another output_dir.")
            for part in (self.states, self.snapshot, self.best):
                if part.exists() and not part.is_dir():
                    raise DataError(f"{part} is a file where a run has a folder: move it away.")
            # Before anything is read that another process may be writing.
            self._acquire_lock()
            self._find_start()
            if self.before is not None:
                self.changes = compare_settings(self.before, about, self.path)
            return
        if os.path.lexists(self.path) and not self.path.is_dir():
            raise UsageError(f"{self.path} is no folder, or a link to nothing: choose a folder as output_dir.")
        # Beside a new run may lie hidden files, and the files that its output goes to.
        names = sorted(path.name for path in self.path.glob("*"))
        others = [name for name in names if not name.startswith(".") and not name.endswith((".log", ".out", ".err"))]
        if others:
            raise UsageError(
                f"{self.path} holds other files ({', '.join(others[:4])}{', …' if len(others) > 4 else ''}), and no "
                "args.json of a run: choose a new or empty folder as output_dir."
            )
        for place in find_paths(arguments.data):
            data = Path(place).expanduser()
            if data.is_dir() and not (data / "lq").is_dir() and self.path.resolve().is_relative_to(data.resolve()):
                raise DataError(
                    f"{self.path} is inside the data folder {place}, so that the files of the run would be read as "
                    "data: choose another output_dir."
                )

    def _acquire_lock(self) -> None:
        """Takes the right to write here, unless this object has it; refuses where another process has it."""
        if self.lock.is_locked:
            return
        try:
            self.lock.acquire()
        except Timeout as error:
            raise ValueError(
                f"another process trains in {self.path}: wait until it ends, stop it, or choose another output_dir."
            ) from error
        except OSError as error:
            # What `flock` says on file systems that do not lock.
            if error.errno not in (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK):
                raise
            raise ValueError(
                f"{self.lock.lock_file} cannot be locked ({error.strerror}): the file system of {self.path} has no "
                "locks, as some network disks. Choose another output_dir, on a local disk."
            ) from error

    def _find_start(self) -> None:
        """Finds the newest state that is whole; where there are states and none is, nothing begins anew by itself."""
        for aside in self.states.glob(".step-*.old"):
            recover_folder(aside.with_name(aside.stem[1:]))
        for step in reversed(self.saved_steps()):
            try:
                self.before = read_manifest(self.state(step))
            except DamagedState as error:
                self.damaged[step] = error
                self.notes.append(f"warning: {self.state(step)} is damaged: {error}")
                continue
            self.start = step
            return
        if self.damaged:
            told = "; ".join(f"step {step}: {error}" for step, error in self.damaged.items())
            raise DataError(
                f"no state of {self.path} is whole ({told}). Restore one from a backup, or delete "
                f"{self.states} to start this run again."
            )

    def check_data(self, fingerprint: dict[str, Any]) -> None:
        """Refuses training data that is not what the run began with."""
        self.about["data"] = fingerprint
        if self.before is not None:
            compare_data(self.before, self.about, self.path, self.changes)

    def prepare(self) -> None:
        """Creates the folder, or prepares the run in it for going on."""
        self.path.mkdir(parents=True, exist_ok=True)
        was_ours = self.lock.is_locked
        self._acquire_lock()
        if not was_ours and self.arguments.exists():
            raise ValueError(f"another process started a run in {self.path} just now: choose another output_dir.")
        self.failure.unlink(missing_ok=True)
        # First: it is what marks the folder as ours.
        with clear_write_errors(self.arguments.name, self):
            write_json(self.arguments, {name: self.about[name] for name in ("arguments", "processes")})
            self.states.mkdir(exist_ok=True)
        for leftover in self.states.glob("step-*.tmp"):
            remove(leftover)
        remove_leftovers(self.path)
        for folder in (self.snapshot, self.best):
            recover_folder(folder)
        for step in self.damaged:
            if os.path.lexists(self._aside(step)):
                remove(self._aside(step))
            os.replace(self.state(step), self._aside(step))

    def saved_steps(self) -> list[int]:
        """Steps of the complete resume states, ascending."""
        names = [re.fullmatch(r"step-([1-9][0-9]*)", path.name) for path in self.states.glob("step-*")]
        return sorted(int(match[1]) for match in names if match)

    @property
    def last_good(self) -> str:
        """The state from which a failed run resumes, in words."""
        steps = self.saved_steps()
        return f"the last good state is step {steps[-1]}" if steps else "there is no state yet"

    def state(self, step: int) -> Path:
        """Folder of one resume state."""
        return self.states / f"step-{step}"

    def _aside(self, step: int) -> Path:
        """The folder that keeps an unusable state until the run has saved another one."""
        return self.states / f"damaged-step-{step}"

    def prune(self, keep_last: int, best_step: int) -> None:
        """Deletes all resume states but the last `keep_last` and the best."""
        for damaged in self.states.glob("damaged-step-*"):
            remove(damaged)
        for step in self.saved_steps()[:-keep_last]:
            if step != best_step:
                doomed = self.state(step).with_suffix(".tmp")
                os.replace(self.state(step), doomed)
                shutil.rmtree(doomed)

    def truncate_metrics(self, progress: Progress) -> None:
        """Drops rows that were written after the state from which the run continues."""
        rows = [row for row in self.read_metrics() if row["step"] <= progress.step]
        if progress.owes_evaluation:
            rows = [row for row in rows if row["step"] < progress.step or "loss" in row]
        with whole_file(self.metrics, "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def add_metrics(self, row: dict[str, Any]) -> None:
        """Adds a row to `metrics.jsonl`."""
        with clear_write_errors(self.metrics.name, self), self.metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """Rows of `metrics.jsonl`."""
        return read_rows(self.metrics, "step", int)


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
        if not run.path.is_dir():
            raise OSError(
                f"{run.path} was removed or renamed while the run was writing to it: the same command resumes once it "
                "is back, and starts again without it."
            ) from error
        free = shutil.disk_usage(run.path).free / 2**30
        is_full = not isinstance(error, OSError) or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
        raise OSError(
            f"cannot write {what} to {run.path} ({error}); {free:.1f} GiB are free there; {run.last_good}. "
            f"{'Free some space' if is_full else 'Remove the cause'} and run the same command again."
        ) from error


def save_state(
    accelerator: Accelerator, run: RunFolder, step: int, stream_states: list[Any] | None, average: WeightAverage | None
) -> None:
    """Writes the resume state of all processes: its manifest last, and its name after that."""
    # `stream_states` are this process's, where it reads a stream; an average is given where each process has a part
    # of it.
    temporary, rank = run.states / f"step-{step}.tmp", accelerator.process_index
    ranks = Ranks(accelerator)
    with clear_write_errors(f"the state of step {step}", run):
        accelerator.save_state(str(temporary))
        (temporary / RANDOM_STATES.format(rank=rank)).unlink()
        if stream_states is not None:
            write_json(temporary / f"stream-{rank}.json", stream_states)
        if average is not None:
            average.save_shards(temporary / "average")
        ranks.wait()
        # Hashing takes a processor, syncing a disk: together they take little longer than the slower one. Each process
        # hashes its share of the files.
        with ThreadPoolExecutor(1) as pool:
            hashed = pool.submit(hash_files, temporary, ranks.share(list_files(temporary)))
            if accelerator.is_main_process:
                open_to_readers(temporary)
                sync(temporary)
        files = {name: entry for part in ranks.gather(hashed.result()) for name, entry in part.items()}
        if accelerator.is_main_process:
            write_manifest(temporary, {**run.about, "step": step, "files": files})
            sync_directory(temporary)
            # There already where an interrupted evaluation was done.
            replace_folder(temporary, run.state(step))
            # Its name too, before an earlier state is deleted.
            sync_directory(run.states)
    ranks.wait()


def load_state(accelerator: Accelerator, run: RunFolder, step: int, average: WeightAverage | None) -> list[Any] | None:
    """Restores what [`save_state`] wrote; returns the reading states of this process, if it reads a stream."""
    folder, rank = run.state(step), accelerator.process_index
    # States are pickles: only folders of this run are read. Their files are whole, so what fails here are the classes
    # that the state is loaded into.
    try:
        accelerator.load_state(str(folder))
    except (OSError, RuntimeError, ValueError, KeyError, SafetensorError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"{folder} cannot be loaded into this run's model and optimizer ({error}). Use the library versions that "
            f"{NAME} in this folder lists, or delete the state to resume from the previous one."
        ) from error
    # accelerate counts backward passes, of which a state has a whole number of steps, however many passes one has now.
    accelerator.step = 0
    if average is not None:
        average.load_shards(folder / "average")
    stream = folder / f"stream-{rank}.json"
    states: list[Any] | None = read_json(stream) if stream.is_file() else None
    return states


def use_plain_names(accelerator: Accelerator) -> None:
    """Lets states have the weights under the model's own names, so that those of one process fit several."""

    # torch wraps the model of a process that has others beside it, and puts `module.` before the names. accelerate
    # calls these before it writes or reads; of sharded weights it gives them nothing.
    def before_saving(models: list[torch.nn.Module], weights: list[dict[str, Tensor]], folder: str) -> None:
        weights[:] = [accelerator.get_state_dict(model) for model in models[: len(weights)]]

    def before_loading(models: list[torch.nn.Module], folder: str) -> None:
        models[:] = [accelerator.unwrap_model(model) for model in models]

    accelerator.register_save_state_pre_hook(before_saving)
    accelerator.register_load_state_pre_hook(before_loading)
