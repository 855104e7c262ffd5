"""A run that tests kill, and end by signals and by the clock; it has saved when it ends with `EXIT_CODE`."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from hf_ext.training import train
from hf_ext.training.stopping import EXIT_CODE, SIGNALS, RunStopped

from .tiny import TinyTask, make_arguments


class SlowTask(TinyTask):
    """Steps that last long enough to be hit."""

    def loss(self, model, batch, step):
        time.sleep(0.002)
        return super().loss(model, batch, step)


def main(output: str, data: str, changes: dict[str, Any], rank: int = 0, port: int = 0) -> None:
    """Trains, alone or as one of two processes that meet at a port."""
    # A shell's background and `nohup` hand ignored signals on to the tests.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    if port:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sources = {"train": {"path": data}, "eval": {"path": data}, "num_workers": changes.pop("num_workers", 0)}
    settings = {"save_steps": 10_000, "eval_steps": 10_000, "logging_steps": 1, "gradient_accumulation_steps": 1}
    try:
        train(SlowTask(), make_arguments(Path(output), sources, **{**settings, **changes}))
    except RunStopped as stopped:
        print(stopped, file=sys.stderr, flush=True)
        sys.exit(EXIT_CODE)
