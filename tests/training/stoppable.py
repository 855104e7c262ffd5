"""A run that tests kill, and end by signals and by the clock; it has saved when it ends with `EXIT_CODE`."""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from hf_ext.training import train
from hf_ext.training.stopping import EXIT_CODE, SIGNALS, RunStopped

from .launching import free_port
from .tiny import TinyTask, make_arguments

# Runs are forks of a process that has imported everything, so that they start at once.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.training.stoppable"])


class SlowTask(TinyTask):
    """Steps that last long enough to be hit, and evaluations that may send their process a signal."""

    signal = 0

    def evaluate_batch(self, model, examples, indices):
        if self.signal and indices[0] >= 2:
            os.kill(os.getpid(), self.signal)
        return super().evaluate_batch(model, examples, indices)

    def loss(self, model, batch, step):
        time.sleep(0.002)
        return super().loss(model, batch, step)


def start(folder: Path, data: Path, processes: int = 1, **changes: Any) -> list[Any]:
    """Processes that train; a run that was stopped or killed goes on. The last may get a signal in an evaluation."""
    port = free_port() if processes > 1 else ""
    words = [(str(folder), str(data), changes, rank, port) for rank in range(processes)]
    started = [PROCESSES.Process(target=main, args=each) for each in words]
    for process in started:
        process.start()
    return started


def finish(started: list[Any], *codes: int) -> int:
    """Waits for processes, which all end with the same one of these codes, or 0; the code."""
    for process in started:
        process.join(300)
    (code,) = {process.exitcode for process in started}
    assert code in (codes or (0,))
    return int(code)


def main(output: str, data: str, changes: dict[str, Any], rank: int, port: str) -> None:
    """Trains, alone or as one of two processes that meet at a port."""
    # A shell's background and `nohup` hand ignored signals on to the tests.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    if port:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    sources = {"train": {"path": data}, "eval": {"path": data}, "num_workers": changes.pop("num_workers", 0)}
    settings = {"save_steps": 10_000, "eval_steps": 10_000, "logging_steps": 1, "gradient_accumulation_steps": 1}
    task, number = SlowTask(), changes.pop("signal", 0)
    task.signal = number if not port or rank else 0
    try:
        train(task, make_arguments(Path(output), sources, **{**settings, **changes}))
    except RunStopped as stopped:
        print(stopped, file=sys.stderr, flush=True)
        sys.exit(EXIT_CODE)
