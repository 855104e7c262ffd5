"""Trains the released models, or goes on: a run for each core, on one thread at the lowest priority.

python examples/released/train.py DATA [WORK]
DATA holds bsds500, cifar10, set5, set12, bsd68 and fsdd. WORK keeps data, runs and their resume states, by default in
the user's cache: it may be stopped at any time (Ctrl-C), and the same command goes on. An empty file WORK/pause holds
all runs while something else is timed. `release.py` makes models of what they have reached.

On another machine, where WORK is empty, a run begins another stretch with the weights that were committed: those of
the released model, or of `reached/NAME`, which `release.py --keep` writes.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from data import prepare
from stretches import QUEUE, WORK, begin_stretch, find_recipe, is_done

SECONDS_BETWEEN_LOOKS = 5.0


def begin(work: Path, name: str) -> subprocess.Popen[bytes]:
    """Starts or continues a run. Paths are relative to WORK, so that a run may move to another machine."""
    command = ["nice", "-n", "19", sys.executable, "-m", "hf_ext_cli.main", "train"]
    command += begin_stretch(work, name)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    (work / "runs").mkdir(exist_ok=True)
    with open(work / "runs" / f"{name}.log", "ab") as log:
        process = subprocess.Popen(command, cwd=work, env=environment, stdout=log, stderr=log, start_new_session=True)
    # On Linux each session has a share of the processor, as large as that of any other, and `nice` counts within a
    # session alone: a training has a session of its own, with the smallest share.
    with contextlib.suppress(OSError):
        Path(f"/proc/{process.pid}/autogroup").write_text("19")
    return process


class CoreHours:
    """
    Processor time of each run, kept in WORK/core_seconds.json: what the cards say.

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
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.seconds, indent=1))
        temporary.replace(self.path)


def work_through(work: Path, slots: int) -> int:
    """Runs the queue to its end; the number of runs that failed."""
    hours = CoreHours(work / "core_seconds.json")
    running: dict[str, subprocess.Popen[bytes]] = {}
    failed: set[str] = set()
    paused = False
    try:
        while True:
            for name, process in list(running.items()):
                hours.count(name, process.pid)
                if process.poll() is not None:
                    del running[name]
                    if process.returncode:
                        failed.add(name)
                    print(f"{time.strftime('%H:%M')} {name} ended with {process.returncode}", flush=True)
            if paused != (work / "pause").exists():
                paused = not paused
                for process in running.values():
                    process.send_signal(signal.SIGSTOP if paused else signal.SIGCONT)
            ready = [
                name
                for name in QUEUE
                if name not in running
                and name not in failed
                and find_recipe(name)[0].is_file()
                and not is_done(work, name)
                and all(is_done(work, source) for source in QUEUE[name])
            ]
            for name in ready[: 0 if paused else slots - len(running)]:
                print(f"{time.strftime('%H:%M')} {name} goes on", flush=True)
                running[name] = begin(work, name)
            if not running and not ready:
                return len(failed)
            time.sleep(SECONDS_BETWEEN_LOOKS)
    finally:
        for process in running.values():
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in running.values():
            # It saves its state first.
            process.wait()


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    work = Path(sys.argv[2]) if len(sys.argv) == 3 else WORK
    # Ended as by Ctrl-C, with its runs: left alone they would go on, and refuse the same command's next start.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    prepare(Path(sys.argv[1]), work)
    failed = work_through(work, os.cpu_count() or 1)
    sys.exit(f"{failed} run(s) failed; WORK/runs/NAME.log says why." if failed else 0)


if __name__ == "__main__":
    main()
