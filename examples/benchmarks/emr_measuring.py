"""The programs of `emr_merge.py` run here: one child at a time, on two cores, with files in the page cache."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from timing import apart, in_turns
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedConfig

HERE = Path(__file__).parent
CORES = 2
MOVE = 2e-3
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": str(CORES),
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def prepare(words: Any) -> Path:
    """Binds this process, and so its children, to the first two cores that it may use; the scratch folder."""
    if not words.folder:
        sys.exit("--folder SCRATCH is needed, outside the repository")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    scratch = Path(words.folder).resolve() / ("quick" if words.quick else "full")
    scratch.mkdir(parents=True, exist_ok=True)
    return scratch


def warm(files: Iterable[Path]) -> None:
    buffer = bytearray(4 << 20)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


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
        raise RuntimeError(f"{' '.join(command)[:300]} ended with status {child.returncode}:\n{end}")
    return printed, {
        "process_seconds": seconds,
        "process_processor_seconds": usage.ru_utime + usage.ru_stime,
        "process_peak": usage.ru_maxrss * 1024,
        "process_bytes_read": int(io["rchar"]),
        "process_bytes_written": int(io["wchar"]),
    }


def run_program(name: str, words: dict[str, Any], log: Path, python: str = sys.executable) -> dict[str, Any]:
    """Runs a program of `emr_programs.py`; its own measures and those of its process."""
    printed, process = run_child([python, str(HERE / "emr_programs.py"), name, json.dumps(words)], log)
    return {**json.loads(printed.splitlines()[-1]), **process}


def write_base(folder: Path, config: PreTrainedConfig) -> None:
    """A language model of transformers' own initialisation."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    model.save_pretrained(folder, max_shard_size="100GB")


def write_task(base: Path, folder: Path, seed: int) -> None:
    """A fine-tune, in which every weight is moved by a uniform random number."""
    generator = torch.Generator().manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for file in base.glob("*.json"):
        shutil.copy(file, folder)
    for file in sorted(base.glob("*.safetensors")):
        weights = load_file(file)
        for weight in weights.values():
            weight += torch.rand(weight.shape, generator=generator).mul_(2 * MOVE).sub_(MOVE)
        save_file(weights, folder / file.name, metadata={"format": "pt"})


def make_set(folder: Path, tasks: int, width: int, layers: int) -> list[Path]:
    """Writes fine-tunes of a GPT-2 that are not there yet; the files of weights, the base first."""
    places = [folder / name for name in ("base", *(f"task{index}" for index in range(1, tasks + 1)))]
    files = [place / "model.safetensors" for place in places]
    # Each in a process of its own: the large set has 5 GB a file. The file of weights is written last.
    if not files[0].is_file():
        config = GPT2Config(n_embd=width, n_layer=layers, n_head=width // 64, dtype="float32")
        apart(write_base, places[0], config)
    for seed, file in enumerate(files):
        if not file.is_file():
            apart(write_task, places[0], file.parent, seed)
    return files


def run_rounds(rows: dict[str, Callable[[], dict[str, Any]]], rounds: int, out: Path) -> dict[str, dict[str, Any]]:
    """Medians of rows that take turns; each finds `out` free."""

    def measure(name: str) -> dict[str, Any]:
        remove(out)
        row = rows[name]()
        print(f"{name:24} {row['process_seconds']:8.2f} s", flush=True)
        return row

    found = in_turns([*rows], rounds, measure)
    remove(out)
    return {
        name: {key: statistics.median(row[key] for row in taken) for key in taken[0]} for name, taken in found.items()
    }
