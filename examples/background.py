"""Trainings in the background: a process for each, on one thread at the lowest priority, its core time counted.

What the released models and the studies share; their scripts put this folder on `sys.path`. A training may be stopped
at any time and goes on with the same words. An empty file `pause` holds all of them while something else is timed.
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil

from hf_ext.files import write_json
from hf_ext.training.stopping import EXIT_CODE

# Data, runs and their resume states, where nobody says another place.
WORK = Path.home() / ".cache" / "hf_ext_released"
SECONDS_BETWEEN_LOOKS = 5.0


class Job(NamedTuple):
    """
    A training.

    Args:
        name (`str`): Of the run, whose log is runs/NAME.log.
        find_words (`Callable`): Makes the words after `python` when it begins or goes on. Paths are relative to the
            work folder, so that a run may move.
        core_seconds (`float`): When it has used so many in all, it is asked to save and end.
    """

    name: str
    find_words: Callable[[], list[str]]
    core_seconds: float = math.inf


class CoreHours:
    """
    Processor time of each run, kept in a file.

    Args:
        path (`Path`): The file.
    """

    def __init__(self, path: Path):
        self.path = path
        self.seconds: dict[str, float] = json.loads(path.read_text()) if path.is_file() else {}
        self.counted: dict[int, float] = {}

    def count(self, name: str, process: int) -> None:
        """Adds what a process has used since the last look."""
        try:
            times = psutil.Process(process).cpu_times()
        except psutil.Error:
            return
        used = times.user + times.system
        self.seconds[name] = self.seconds.get(name, 0.0) + used - self.counted.get(process, 0.0)
        self.counted[process] = used
        write_json(self.path, self.seconds)


def begin(work: Path, job: Job) -> subprocess.Popen[bytes]:
    """Starts or continues a training."""
    (work / "runs").mkdir(exist_ok=True)
    with open(work / "runs" / f"{job.name}.log", "ab") as log:
        process = subprocess.Popen(
            ["nice", "-n", "19", sys.executable, *job.find_words()],
            cwd=work,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    # On Linux each session has a share of the processor, as large as that of any other, and `nice` counts within a
    # session alone: a training has a session of its own, with the smallest share.
    with contextlib.suppress(OSError):
        Path(f"/proc/{process.pid}/autogroup").write_text("19")
    return process


def tell(text: str) -> None:
    """A line with the time."""
    print(f"{time.strftime('%H:%M')} {text}", flush=True)


def work_through(
    work: Path, find_jobs: Callable[[dict[str, float]], list[Job]], slots: int, pause: Path, look: float
) -> set[str]:
    """
    Runs jobs, a few at a time, until there are none.

    Args:
        work (`Path`): Holds runs/ and core_seconds.json.
        find_jobs (`Callable`): From the core seconds of each run to all jobs that could run or go on, the first first.
        slots (`int`): How many run at once.
        pause (`Path`): While this file is there, nothing runs.
        look (`float`): Seconds between two looks at the processes.

    Returns:
        `set[str]`: Names of the runs that failed.
    """
    hours = CoreHours(work / "core_seconds.json")
    running: dict[str, tuple[Job, subprocess.Popen[bytes]]] = {}
    asked, failed = set[int](), set[str]()
    paused = False
    try:
        while True:
            for name, (job, process) in list(running.items()):
                hours.count(name, process.pid)
                is_spent = hours.seconds.get(name, 0.0) >= job.core_seconds
                if (code := process.poll()) is not None:
                    del running[name]
                    # Killed by the signal: it came before the training listened.
                    if code not in (0, *([EXIT_CODE, -signal.SIGTERM] if is_spent else [])):
                        failed.add(name)
                    tell(f"{name} ended with {code}")
                elif is_spent and not paused and process.pid not in asked:
                    asked.add(process.pid)
                    process.terminate()
            if paused != pause.exists():
                paused = not paused
                for _, process in running.values():
                    process.send_signal(signal.SIGSTOP if paused else signal.SIGCONT)
            # Only where there is room for one: a run that was asked to end has saved by then.
            found = find_jobs(hours.seconds) if len(running) < slots else []
            jobs = [job for job in found if job.name not in failed and job.name not in running]
            for job in jobs[: 0 if paused else slots - len(running)]:
                tell(f"{job.name} goes on")
                running[job.name] = job, begin(work, job)
            if not running and not jobs:
                return failed
            time.sleep(look)
    finally:
        for _, process in running.values():
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for name, (_, process) in running.items():
            # It saves its state first.
            while process.poll() is None:
                hours.count(name, process.pid)
                time.sleep(min(look, 0.5))


def end_with_runs(work: Callable[[], set[str]]) -> None:
    """
    Ends the program as its work ends. SIGTERM ends it as Ctrl-C does, with its runs: left alone they would go on, and
    refuse the same command's next start.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        failed = work()
    except KeyboardInterrupt:
        sys.exit("ended: what runs had reached is saved, and the same command goes on.")
    sys.exit(f"failed: {', '.join(sorted(failed))}; runs/NAME.log says why." if failed else 0)
