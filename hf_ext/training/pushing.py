"""Pushing models to a Hub beside the steps of a run."""

import contextlib
import os
import shutil
import sys
import threading
from pathlib import Path

import torch
from tqdm import tqdm

from ..files import whole_folder
from .arguments import TrainingArguments
from .callbacks import Callback
from .state import RunFolder

# Seconds that a complete run waits for its last push.
_PATIENCE = 3600


class PushModels(Callback):
    """Pushes models to the repository that a run names. A push that fails is a warning and a row of metrics."""

    # A thread pushes one model after the other. Of those that are saved meanwhile only the newest waits, so a slow Hub
    # holds up no step and collects no work. `best/` may be replaced during a push: what is pushed are links to its
    # files in `.push/step-N`, which stay until the push has ended, so that a run that goes on after a kill begins with
    # the push that was cut off.

    def __init__(self, arguments: TrainingArguments, run: RunFolder):
        assert arguments.hub_model_id is not None
        self.repo_id, self.private = arguments.hub_model_id, arguments.hub_private_repo
        self.strategy = arguments.hub_strategy
        self.run = run
        self.copies = run.path / ".push"
        self._lock = threading.Lock()
        self._waiting: Path | None = None
        self._thread: threading.Thread | None = None

    def on_begin(self, step: int, folder: Path, model: torch.nn.Module) -> None:
        """Resumes pushes that an earlier process did not finish."""
        for left in sorted(self.copies.glob("step-*"), key=_read_step):
            self._push_soon(left)

    def on_save(self, step: int, folder: Path, is_best: bool) -> None:
        """Pushes the model that was saved, where the run's strategy says so."""
        if self.strategy == ("best" if is_best else "every_save"):
            self._take(folder, step)

    def on_end(self, step: int) -> None:
        """Pushes the last model, where only that is wanted, and waits for what is under way."""
        if self.strategy == "end":
            self._take(self.run.snapshot, step)
        if (thread := self._thread) is not None:
            thread.join(_PATIENCE)
            if thread.is_alive():
                self._warn(step, f"the push has not ended after {_PATIENCE // 60} minutes")

    def _take(self, model: Path, step: int) -> None:
        with whole_folder(self.copies / f"step-{step}") as folder:
            shutil.copytree(model, folder, copy_function=_link_file, dirs_exist_ok=True)
        self._push_soon(self.copies / f"step-{step}")

    def _push_soon(self, copy: Path) -> None:
        with self._lock:
            if self._waiting not in (None, copy):
                shutil.rmtree(self._waiting)
            self._waiting = copy
            if self._thread is None:
                # A daemon: a run that a signal ends does not wait for a Hub.
                self._thread = threading.Thread(target=self._push_all, daemon=True)
                self._thread.start()

    def _push_all(self) -> None:
        while True:
            with self._lock:
                copy, self._waiting = self._waiting, None
                if copy is None:
                    self._thread = None
                    return
            self._push(copy, _read_step(copy))
            shutil.rmtree(copy, ignore_errors=True)

    def _push(self, copy: Path, step: int) -> None:
        from hf_ext.hub.publish import push

        kind = "Best model" if self.strategy == "best" else "Model"
        try:
            commit = push(copy, self.repo_id, private=self.private, commit_message=f"{kind}, step {step}")
            tqdm.write(f"step {step}: pushed to {commit.commit_url}", file=sys.stderr)
        # Any error: a Hub that is down for an hour must not end a training of a week.
        except Exception as error:
            self._warn(step, f"{type(error).__name__}: {error}")

    def _warn(self, step: int, reason: str) -> None:
        tqdm.write(f"warning: step {step}: the model was not pushed to {self.repo_id} ({reason})", file=sys.stderr)
        with contextlib.suppress(OSError):
            self.run.add_metrics({"step": step, "push_error": reason})


def _read_step(copy: Path) -> int:
    return int(copy.name.partition("-")[2])


def _link_file(source: str, target: str) -> None:
    """The same file under another name, or a copy where the file system knows no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
