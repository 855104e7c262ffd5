"""Runs of two processes that fail: `main FOLDER CASE`, under `fork_two`; each writes down how it ended."""

import contextlib
import io
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from hf_ext.training import Callback, loop, train
from tests.kit.process_state import forget_accelerate

from .tiny import TinyTask, make_arguments

CASES = ("error", "kill", "busy")


class FailingTask(TinyTask):
    """Fails, or is killed, in the second process."""

    case = ""

    def loss(self, model: torch.nn.Module, batch: dict[str, Any], step: int) -> torch.Tensor:
        if step == 1 and PartialState().process_index == 1 and self.case == "error":
            raise ValueError("its disk is gone")
        if step == 1 and PartialState().process_index == 1 and self.case == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch, step)


class SlowPush(Callback):
    """Keeps the main process busy for longer than the others wait."""

    def on_save(self, step: int, folder: Path, is_best: bool) -> None:
        time.sleep(12)


def main() -> None:
    root, case = Path(sys.argv[1]), sys.argv[2]
    loop.plot_curves = lambda run: None
    forget_accelerate()
    task, callbacks = FailingTask(), [SlowPush()] if case == "busy" else []
    task.case = case
    limit = {"timeout_minutes": 0.1} if case == "busy" else {}
    arguments = make_arguments(root / "run", {"train": {"path": str(root / "examples")}}, **limit)
    said, kind = io.StringIO(), ""
    with contextlib.redirect_stderr(said):
        try:
            train(task, arguments, None, None, callbacks)
        except Exception as error:
            kind = type(error).__name__
    (root / f"ended-{os.environ['RANK']}.json").write_text(json.dumps({"kind": kind, "said": said.getvalue()}))
    # Without the group's own farewell, for which the other one would have to be there.
    os._exit(0)
