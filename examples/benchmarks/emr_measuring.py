"""The programs of `emr_merge.py` run here: one child at a time, on two cores, with files in the page cache."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CORES = 2
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": str(CORES),
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class FailedRunError(RuntimeError):
    """A program ended with an error; the message holds the end of what it wrote."""


def keep_to_cores() -> list[int]:
    """Binds this process, and so its children, to the first two cores that it may use."""
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    os.sched_setaffinity(0, cores)
    return cores


def warm(files: Iterable[Path]) -> None:
    buffer = bytearray(4 << 20)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def file_sizes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}


def remove(folder: Path) -> None:
    """Removes a result, then waits until nothing is left to be written that would slow the next program."""
    shutil.rmtree(folder, ignore_errors=True)
    os.sync()


def run_child(command: list[str], log: Path) -> tuple[str, dict[str, Any]]:
    """Runs `command`; what it printed and the wall time, processor time and memory of the whole process."""
    start = time.perf_counter()
    with log.open("w") as errors:
        child = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert child.stdout is not None
        printed = child.stdout.read()
        # Ended, but not yet collected: its counters can still be read.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        seconds = time.perf_counter() - start
        io = dict(line.split(": ") for line in Path(f"/proc/{child.pid}/io").read_text().splitlines())
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        end = (log.read_text() + printed).strip()[-2000:]
        raise FailedRunError(f"{' '.join(command)[:300]} ended with status {child.returncode}:\n{end}")
    return printed, {
        "process_seconds": seconds,
        "process_processor_seconds": usage.ru_utime + usage.ru_stime,
        "process_peak": usage.ru_maxrss * 1024,
        "process_bytes_read": int(io["rchar"]),
        "process_bytes_written": int(io["wchar"]),
    }


def run_program(
    name: str, words: dict[str, Any], log: Path, python: str = sys.executable, sample: bool = False
) -> dict[str, Any]:
    """Runs a program of `emr_programs.py`; its own measures and those of its process."""
    command = [python, str(HERE / "emr_programs.py"), name, json.dumps(words)] + ["--sample"] * sample
    printed, process = run_child(command, log)
    return {**json.loads(printed.splitlines()[-1]), **process}


class RunLog:
    """The runs so far, a line of JSON each, so that a stopped benchmark goes on where it was."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.rows = path, {}
        if path.is_file():
            # The last line may have been cut.
            head, *lines = path.read_text().rpartition("\n")[0].split("\n")
            if head == json.dumps(settings):
                self.rows = {row["key"]: row for row in map(json.loads, lines)}
        if not self.rows:
            path.write_text(json.dumps(settings) + "\n")

    def add(self, key: str, row: dict[str, Any]) -> dict[str, Any]:
        row = {"key": key, "load_average": os.getloadavg()[0], **row}
        with self.path.open("a") as stream:
            stream.write(json.dumps(row) + "\n")
        self.rows[key] = row
        return row

    def named(self, name: str) -> list[dict[str, Any]]:
        """All rounds of one row."""
        return [row for key, row in self.rows.items() if key.rpartition("/")[0] == name]
