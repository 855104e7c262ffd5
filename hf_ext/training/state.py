"""State of a run: its folder, its progress, and resume states that are whole, or found to be damaged."""

import contextlib
import errno
import json
import os
import pickle
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from filelock import FileLock, Timeout
from safetensors import SafetensorError

from .. import files
from ..distributed import Ranks
from ..errors import DataError, UsageError
from ..system import sync_directory
from .arguments import TrainingArguments, find_paths
from .changes import Changes, compare_classes, compare_data, compare_settings
from .optimizing import WeightAverage

MANIFEST = "manifest.json"
# What accelerate calls the state of what is registered first.
PROGRESS = "custom_checkpoint_0.pkl"


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
    # Its scores until then, by the name of the set and the index of the example.
    scored: dict[str, dict[int, Any]] = field(default_factory=dict)
    # A callback ended the run.
    ended: bool = False

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class RunFolder(contextlib.AbstractContextManager["RunFolder"]):
    """The folder of one run."""

    # args.json        the arguments, written first: it marks the folder as ours
    # metrics.jsonl    a row for each log and each evaluation
    # state/step-N/    resume states of all processes: whole, or absent; their manifest tells whether they still are
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
        self.failure = self.path / ".failure.json"
        self.lock = FileLock(self.path / ".lock", timeout=0)
        # What the run is now (`changes.describe_run`), for the next state.
        self.about: dict[str, Any] = {}
        # Found by `check`: the step to go on from, what its state says, and how that differs.
        self.start: int | None = None
        self.before: dict[str, Any] | None = None
        self.changes = Changes()
        self.notes: list[str] = []

    def __exit__(self, *error: object) -> None:
        self.lock.release(force=True)

    def check(self, arguments: TrainingArguments, about: dict[str, Any], task: type = object) -> None:
        """Refuses a folder that a run must not be written to, and finds the state from which one goes on."""
        self.about = about
        if self.arguments.exists():
            found = files.read_json(self.arguments)
            if not isinstance(found, dict) or not found.keys() >= {"arguments", "processes"}:
                raise UsageError(f"{self.arguments} was not written by a training: choose another output_dir.")
            for part in (self.states, self.snapshot, self.best):
                if part.exists() and not part.is_dir():
                    raise DataError(f"{part} is a file where a run has a folder: move it away.")
            # Before anything is read that another process may be writing.
            self._acquire_lock()
            self._find_start()
            if self.before is not None:
                self.changes = compare_settings(self.before, about, self.path, task)
            return
        if os.path.lexists(self.path) and not self.path.is_dir():
            raise UsageError(f"{self.path} is no folder, or a link to nothing: choose a folder as output_dir.")
        # Beside a new run may lie hidden files, and the files that its output goes to.
        others = sorted(path.name for path in self.path.glob("[!.]*") if path.suffix not in (".log", ".out", ".err"))
        if others:
            raise UsageError(f"{self.path} holds {others[0]} and no args.json of a run: choose another output_dir.")
        for place in find_paths(arguments.data):
            data = Path(place).expanduser()
            if data.is_dir() and not (data / "lq").is_dir() and self.path.resolve().is_relative_to(data.resolve()):
                raise DataError(f"{self.path} is inside the data folder {place}: choose another output_dir.")

    def _acquire_lock(self) -> None:
        """Takes the right to write here, also where this object has it; refuses where another process has it."""
        try:
            self.lock.acquire()
        except Timeout as error:
            raise ValueError(f"another process trains in {self.path}: stop it, or change output_dir.") from error
        except OSError as error:
            # Of a file system that does not lock, as some network disks.
            raise OSError(f"{self.lock.lock_file} cannot be locked ({error}): choose another output_dir.") from error

    def _find_start(self) -> None:
        """Finds the newest state that is whole; where there are states and none is, nothing begins anew by itself."""
        for aside in self.states.glob(".step-*.old"):
            files.recover_folder(aside.with_name(aside.stem[1:]))
        damaged = []
        for step in reversed(self.saved_steps()):
            try:
                self.before, self.start = read_manifest(self.state(step)), step
                return
            except DamagedState as error:
                damaged.append(f"step {step}: {error}")
                self.notes.append(f"warning: {self.state(step)} is damaged: {error}")
        if damaged:
            told = f"no state of {self.path} is whole ({'; '.join(damaged)})"
            raise DataError(f"{told}: restore one, or delete {self.states} to start again.")

    def check_data(self, fingerprint: dict[str, Any]) -> None:
        """Refuses training data that is not what the run began with."""
        self.about["data"] = fingerprint
        if self.before is not None:
            compare_data(self.before, self.about, self.path, self.changes)

    def check_classes(self, names: list[str] | None) -> None:
        """Refuses classes whose numbers are not those that the run began with."""
        self.about["classes"] = names
        if self.before is not None:
            compare_classes(self.before, self.about, self.path)

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
            files.write_json(self.arguments, {name: self.about[name] for name in ("arguments", "processes")})
            self.states.mkdir(exist_ok=True)
        for leftover in self.states.glob("step-*.tmp"):
            files.remove(leftover)
        files.remove_leftovers(self.path)
        for folder in (self.snapshot, self.best):
            files.recover_folder(folder)
        # States after the start are damaged: they are kept until the run has saved another one.
        for step in (step for step in self.saved_steps() if step > (self.start or 0)):
            aside = self.states / f"damaged-step-{step}"
            if os.path.lexists(aside):
                files.remove(aside)
            os.replace(self.state(step), aside)

    def saved_steps(self) -> list[int]:
        names = [re.fullmatch(r"step-([1-9][0-9]*)", path.name) for path in self.states.glob("step-*")]
        return sorted(int(match[1]) for match in names if match)

    @property
    def last_good(self) -> str:
        """The state from which a failed run resumes, in words."""
        steps = self.saved_steps()
        return f"the last good state is step {steps[-1]}" if steps else "there is no state yet"

    def state(self, step: int) -> Path:
        return self.states / f"step-{step}"

    def prune(self, keep_last: int, best_step: int) -> None:
        """Deletes all resume states but the last `keep_last` and the best."""
        for damaged in self.states.glob("damaged-step-*"):
            files.remove(damaged)
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
        files.write_rows(self.metrics, rows)

    def add_metrics(self, row: dict[str, Any]) -> None:
        with clear_write_errors(self.metrics.name, self), self.metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        return files.read_rows(self.metrics, "step", int)


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
            raise OSError(f"{run.path} was removed or renamed: put it back and run the command again.") from error
        free = shutil.disk_usage(run.path).free / 2**30
        is_full = not isinstance(error, OSError) or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
        raise OSError(
            f"cannot write {what} to {run.path} ({error}); {free:.1f} GiB are free there; {run.last_good}. "
            f"{'Free some space' if is_full else 'Remove the cause'} and run the same command again."
        ) from error


def keep_others(old: Path, new: Path) -> None:
    """Links what its owner put into a snapshot into the one that replaces it: all that no save or card writes."""
    from ..hub.cards import is_written

    ours = {path.relative_to(new).as_posix() for path in new.rglob("*")} | {"eval.json", ".eval_results/hf_ext.yaml"}
    card = old / "README.md"
    if card.is_file() and not is_written(card.read_text(encoding="utf-8", errors="replace")):
        ours.add(card.name)
    # a loader might prefer older weights in another form
    weights = re.compile(r"(adapter_)?model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
    files.carry_over(old, new, lambda name: name in ours or bool(weights.fullmatch(name)))


# A state is a folder of files that libraries read without asking whether they are whole: a flipped bit of a weight is
# loaded in silence. So the last thing written into a state is its manifest: the SHA-256 of every other file, what the
# run was when it was saved (`changes` compares it with what it is now), and a SHA-256 of all this text. The folder
# gets its name only after that: a state without a manifest was damaged later. Hashing takes a processor for 0.6 to 1 s
# a gigabyte, partly while the disk syncs: no background is needed.


class DamagedState(DataError):
    """A resume state is not what was saved; the message says why."""


def hash_files(folder: Path, names: list[str]) -> dict[str, str]:
    # hashlib lets other threads run.
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(names, pool.map(files.hash_file, (folder / name for name in names)), strict=True))


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    files.write_json(folder / MANIFEST, {**content, "sha256": files.hash_json(content)})


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a state whose files are all whole."""
    if not (folder / MANIFEST).is_file():
        raise DamagedState(f"{MANIFEST} is missing")
    try:
        content: dict[str, Any] = files.read_json(folder / MANIFEST)
        is_whole, saved = content.pop("sha256") == files.hash_json(content), content["files"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        is_whole = False
    if not is_whole:
        raise DamagedState(f"{MANIFEST} is damaged")
    if missing := [name for name in saved if not (folder / name).is_file()]:
        raise DamagedState(f"{missing[0]} is missing")
    try:
        found = hash_files(folder, [*saved])
    except OSError as error:
        raise DamagedState(f"a file cannot be read ({error})") from error
    if changed := [name for name in saved if found[name] != saved[name]]:
        raise DamagedState(f"{', '.join(changed)} changed after being saved")
    return content


def save_state(
    accelerator: Accelerator, run: RunFolder, step: int, stream_states: list[Any] | None, average: WeightAverage | None
) -> None:
    """Writes the resume state of all processes: its manifest last, and its name after that."""
    # `stream_states` are this process's; an average is given where each process has a part of it.
    temporary, rank = run.states / f"step-{step}.tmp", accelerator.process_index
    ranks = Ranks(accelerator)
    with clear_write_errors(f"the state of step {step}", run):
        accelerator.save_state(str(temporary))
        # No step reads random states (`loop`).
        (temporary / f"random_states_{rank}.pkl").unlink()
        if stream_states is not None:
            files.write_json(temporary / f"stream-{rank}.json", stream_states)
        if average is not None:
            average.save_shards(temporary / "average")
        ranks.wait()
        # Hashing takes a processor, syncing a disk: together they take little longer than the slower one.
        with ThreadPoolExecutor(1) as pool:
            names = [path.relative_to(temporary).as_posix() for path in temporary.rglob("*") if path.is_file()]
            hashed = pool.submit(hash_files, temporary, ranks.share(sorted(names)))
            if accelerator.is_main_process:
                files.open_to_readers(temporary)
                files.sync(temporary)
        hashes = {name: entry for part in ranks.gather(hashed.result()) for name, entry in part.items()}
        if accelerator.is_main_process:
            _finish_state(temporary, run, step, hashes)
    ranks.wait()


def _finish_state(temporary: Path, run: RunFolder, step: int, hashes: dict[str, str]) -> None:
    """Completes a state by its manifest, and by its name after that."""
    write_manifest(temporary, {**run.about, "step": step, "files": hashes})
    sync_directory(temporary)
    # There already where an evaluation was done after it.
    files.replace_folder(temporary, run.state(step))
    # Its name too, before an earlier state is deleted.
    sync_directory(run.states)


def save_progress(accelerator: Accelerator, run: RunFolder, progress: Progress) -> None:
    """Puts the progress into the state of its step, which this run has written; its other files are linked."""
    folder, temporary = run.state(progress.step), run.states / f"step-{progress.step}.tmp"
    if accelerator.is_main_process:
        with clear_write_errors(f"the state of step {progress.step}", run):
            temporary.mkdir()
            torch.save(progress.state_dict(), temporary / PROGRESS)
            files.carry_over(folder, temporary, {PROGRESS, MANIFEST}.__contains__)
            files.open_to_readers(temporary)
            files.sync(temporary)
            hashes = files.read_json(folder / MANIFEST)["files"] | hash_files(temporary, [PROGRESS])
            _finish_state(temporary, run, progress.step, hashes)
    Ranks(accelerator).wait()


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
            f"{MANIFEST} in this folder lists, or delete the state to resume from the previous one."
        ) from error
    # accelerate counts backward passes, of which a state has a whole number of steps, however many passes one has now.
    accelerator.step = 0
    if average is not None:
        average.load_shards(folder / "average")
    stream = folder / f"stream-{rank}.json"
    return files.read_json(stream) if stream.is_file() else None


def use_plain_names(accelerator: Accelerator) -> None:
    """Lets states have the weights under the model's own names, so that those of one process fit several."""

    # torch wraps the model of a process that has others beside it, and puts `module.` before the names. accelerate
    # calls these before it writes or reads; of sharded weights it gives them nothing.
    def before_saving(models: list[torch.nn.Module], weights: list[dict[str, torch.Tensor]], folder: str) -> None:
        weights[:] = [accelerator.get_state_dict(model) for model in models[: len(weights)]]

    def before_loading(models: list[torch.nn.Module], folder: str) -> None:
        models[:] = [accelerator.unwrap_model(model) for model in models]

    accelerator.register_save_state_pre_hook(before_saving)
    accelerator.register_load_state_pre_hook(before_loading)
