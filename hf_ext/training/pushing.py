"""Models and resume states on a Hub: pushed beside the steps of a run, fetched where one begins elsewhere."""

import contextlib
import re
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import load
from huggingface_hub import HfApi, snapshot_download
from tqdm import tqdm

from ..errors import DataError, UsageError
from ..files import copy_into, link_file, read_json, read_json_object, whole_folder, write_json
from ..hub.checkpoints import explain_hub, split_revision
from .arguments import TrainingArguments
from .callbacks import Callback
from .state import RunFolder

# Seconds that a complete run waits for its last push.
_PATIENCE = 3600
# The folder of a repository that has the last state, as transformers calls it.
LAST = "last-checkpoint"
# All that is taken from there: what `RunFolder` holds of a run whose weights are not sharded.
_FETCHED = re.compile(
    r"args\.json|metrics\.jsonl|best/.+|state/step-\d+/(manifest\.json|model\.safetensors|optimizer\.bin|scaler\.pt"
    r"|custom_checkpoint_\d\.pkl|stream-\d+\.json)"
)


class PushModels(Callback):
    """Pushes models to the repository that a run names. A push that fails is a warning and a row of metrics."""

    # A thread pushes one model after the other. Of those that are saved meanwhile only the newest waits: a slow Hub
    # holds up no step and collects no work. `best/` may be replaced during a push: what is pushed are links to its
    # files in `.push/step-N`. A copy stays until it is pushed or a newer one is there; `.pushed.json` says what was
    # pushed last, so that a run that goes on after a kill, or the same command after a failure, begins with the push
    # that is missing.

    def __init__(self, arguments: TrainingArguments, run: RunFolder):
        assert arguments.hub_model_id is not None
        self.repo_id, self.private = arguments.hub_model_id, arguments.hub_private_repo
        self.strategy = arguments.hub_strategy
        self.run = run
        self.copies, self.last = run.path / ".push", run.path / ".pushed.json"
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._pushed: Path | None = None

    def on_begin(self, step: int, folder: Path, model: torch.nn.Module) -> None:
        """Pushes what an earlier process did not, because it was killed or the Hub failed."""
        if self.strategy != "end":
            self._take_missing()
        self._start()

    def on_save(self, step: int, folder: Path, is_best: bool) -> None:
        """Pushes the model that was saved, where the run's strategy says so."""
        if is_best == (self.strategy == "best") and self.strategy != "end":
            self._take(folder, step)

    def on_end(self, step: int) -> None:
        """Pushes the last model, where only that is wanted, and waits."""
        if self.strategy == "end":
            self._take_missing()
        if (thread := self._thread) is not None:
            thread.join(_PATIENCE)
            if thread.is_alive():
                self._warn(step, f"the push has not ended after {_PATIENCE // 60} minutes")

    def _take_missing(self) -> None:
        """Takes the last model, unless it was taken or pushed before."""
        model = self.run.best if self.strategy == "best" else self.run.snapshot
        if not model.is_dir():
            return
        step = read_json(model / "training.json")["steps"]
        if self.strategy == "checkpoint" and not self.run.state(step).is_dir():
            # Evaluations have saved later states since: the push would delete an earlier one, and bring none.
            return
        # In this order: a copy goes when its push was written down.
        is_known = (self.copies / f"step-{step}").is_dir()
        if not is_known and self._told(step) != read_json_object(self.last, optional=True):
            self._take(model, step)

    def _told(self, step: int) -> dict[str, Any]:
        return {"repository": self.repo_id, "strategy": self.strategy, "step": step}

    def _take(self, model: Path, step: int) -> None:
        parts = {"model": model}
        if self.strategy == "checkpoint":
            state = self.run.state(step)
            parts |= {f"run/{LAST}/state/{state.name}": state, f"run/{LAST}/best": self.run.best}
        with whole_folder(self.copies / f"step-{step}") as folder:
            for name, part in parts.items():
                if part.is_dir():
                    shutil.copytree(part, folder / name, copy_function=link_file)
            if self.strategy == "checkpoint":
                # Rows are added to the one, and links would follow.
                for file in (self.run.arguments, self.run.metrics):
                    shutil.copy2(file, folder / "run" / LAST)
        self._start()

    def _start(self) -> None:
        with self._lock:
            for copy in self._list_copies()[:-1]:
                if copy != self._pushed:
                    shutil.rmtree(copy)
            if self._thread is None:
                # A daemon: a run that a signal ends does not wait for a Hub.
                self._thread = threading.Thread(target=self._push_all, daemon=True)
                self._thread.start()

    def _push_all(self) -> None:
        failed: Path | None = None
        while True:
            with self._lock:
                copies = self._list_copies()
                if not copies or copies[-1] == failed:
                    self._thread = None
                    return
                copy = self._pushed = copies[-1]
            failed = None if self._push(copy, _read_step(copy)) else copy
            with self._lock:
                self._pushed = None
                if failed is None or copy != self._list_copies()[-1]:
                    shutil.rmtree(copy, ignore_errors=True)

    def _list_copies(self) -> list[Path]:
        return sorted(self.copies.glob("step-*"), key=_read_step)

    def _push(self, copy: Path, step: int) -> bool:
        from hf_ext.hub.publish import push

        kind, what = "Best model" if self.strategy == "best" else "Model", "model"
        try:
            commit = push(copy / "model", self.repo_id, private=self.private, commit_message=f"{kind}, step {step}")
            if (copy / "run").is_dir():
                what = "state"
                # With its owner, which the run need not name.
                _push_state(copy / "run", commit.repo_url.repo_id, step)
            tqdm.write(f"step {step}: pushed to {commit.commit_url}", file=sys.stderr)
            write_json(self.last, self._told(step))
        # Any error: a Hub that is down for an hour must not end a training of a week.
        except Exception as error:
            self._warn(step, f"{type(error).__name__}: {error}", what)
            return False
        return True

    def _warn(self, step: int, reason: str, what: str = "model") -> None:
        tqdm.write(f"warning: step {step}: the {what} was not pushed to {self.repo_id} ({reason})", file=sys.stderr)
        with contextlib.suppress(OSError):
            self.run.add_metrics({"step": step, "push_error": reason})


def _read_step(copy: Path) -> int:
    return int(copy.name.partition("-")[2])


def _push_state(folder: Path, repo_id: str, step: int) -> None:
    """Commits a state in place of the one before, and compares it with the Hub; settings with a secret are refused."""
    from hf_ext.hub.commits import commit_folder
    from hf_ext.hub.disclosure import refuse_secret

    for name in (f"{LAST}/args.json", f"{LAST}/metrics.jsonl"):
        refuse_secret(folder / name, name)
    commit_folder(
        *(HfApi(), folder, repo_id, "main"),
        create_pr=False,
        message=f"State, step {step}",
        find_stale=lambda names: [name for name in names if name.startswith(f"{LAST}/")],
    )


def fetch_run(source: str, run: RunFolder) -> None:
    """Downloads the run whose last state a repository has into the run folder; leaves one alone that holds a run."""
    if run.arguments.exists():
        return
    if run.path.exists() and not (run.path.is_dir() and not any(run.path.iterdir())):
        raise UsageError(f"resume_from_checkpoint needs a new or empty output_dir, and {run.path} holds other files.")
    name, revision = split_revision(source)
    with whole_folder(run.path) as folder:
        with explain_hub(source, None):
            place = Path(snapshot_download(name, revision=revision, allow_patterns=f"{LAST}/*"), LAST)
        files = {path.relative_to(place).as_posix(): path for path in place.rglob("*") if path.is_file()}
        if not {"args.json", "metrics.jsonl"} <= files.keys():
            raise DataError(f"{source} has no {LAST}/ of a run: push states with --hub_strategy checkpoint.")
        if others := [inner for inner in files if not _FETCHED.fullmatch(inner)]:
            raise DataError(f"{source}: {LAST}/{others[0]} is not a file of a state, so it is not used.")
        for inner, path in files.items():
            # A pickle may run any code when it is loaded, and accelerate loads some without looking: so each file from
            # elsewhere is read here once, before, with `weights_only`. A damaged one may raise anything.
            try:
                if inner.startswith("state/") and path.name.endswith((".bin", ".pkl", ".pt")):
                    load(path, map_location="cpu", weights_only=True)
            except Exception as error:
                raise DataError(f"{source}: {LAST}/{inner} is not loaded: damaged, or more than tensors.") from error
        copy_into(files, folder)
