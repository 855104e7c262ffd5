"""The programs that `emr_merge.py` times, each in a process of its own: `python emr_programs.py NAME '{...}'`.

A program is a function that imports its libraries and returns the work to do; the process reports, as its last line,
the time of both, and of the work alone the processor time, the bytes passed to read and write, and how far resident
memory rose above the process after its imports. Only the standard library is imported at the top, so that the
environments of other tools can run this file. Without words, it does the work of each line of JSON that it reads.
"""

import contextlib
import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()
MEGABYTE = 1 << 20
Work = Callable[[], Any]


def hf_ext_merge(config: dict[str, Any], out: str) -> Work:
    """Our merge through its public function."""
    import numba
    import safetensors.torch
    import torch

    import hf_ext

    del numba, safetensors, torch
    # imported here, as mergekit's is
    merge = hf_ext.merge_checkpoints
    return lambda: merge(config, out, progress=False)


def in_memory(base: str, tasks: list[str], out: str) -> Work:
    """EMR as the authors' scripts lay it out in memory: all task vectors at once, a byte for each bit of a mask."""
    import torch
    from safetensors.torch import load_file

    def work() -> None:
        pretrained = load_file(base)
        vectors = [{name: weight - pretrained[name] for name, weight in load_file(task).items()} for task in tasks]
        unified, masks = {}, [{} for _ in tasks]
        for name in pretrained:
            stacked = torch.stack([vector[name] for vector in vectors])
            direction = torch.sign(stacked.mean(dim=0))
            largest = torch.zeros_like(direction)
            for vector, mask in zip(vectors, masks, strict=True):
                mask[name] = vector[name] * direction > 0
                largest = torch.maximum(largest, mask[name] * vector[name].abs())
            unified[name] = direction * largest
        scales = []
        for vector, mask in zip(vectors, masks, strict=True):
            whole = sum(vector[name].abs().mean() for name in unified)
            scales.append(whole / sum((mask[name] * unified[name]).abs().mean() for name in unified))
        os.makedirs(out)
        torch.save({"unified": unified, "masks": masks, "scales": scales}, f"{out}/merged.pt")

    return work


def mergekit(config: str, out: str) -> Work:
    """mergekit's own command in this process; its model card would ask the Hub about local paths."""
    from mergekit.scripts.run_yaml import main

    words = [config, out, "--no-write-model-card", "--no-copy-tokenizer", "--quiet"]
    return lambda: main(words, standalone_mode=False)


def read_write(files: list[str], out: str, sizes: list[int], threads: int) -> Work:
    """The floor: read every input through a buffer of 1 MiB for each thread, then write as much as a merge."""

    def read(mine: list[str]) -> None:
        buffer = bytearray(MEGABYTE)
        for file in mine:
            with open(file, "rb", buffering=0) as stream:
                while stream.readinto(buffer):
                    pass

    def write(mine: list[tuple[int, int]]) -> None:
        block = memoryview(os.urandom(MEGABYTE))
        for index, size in mine:
            with open(f"{out}/{index}", "wb", buffering=0) as stream:
                for start in range(0, size, MEGABYTE):
                    stream.write(block[: size - start])
                os.fsync(stream.fileno())

    def share(target: Callable[[list[Any]], None], items: list[Any]) -> None:
        with ThreadPoolExecutor(threads) as pool:
            # Taken out, so that an error of a thread is one of the program.
            list(pool.map(target, (items[index::threads] for index in range(threads))))

    def work() -> None:
        os.makedirs(out)
        share(read, files)
        share(write, list(enumerate(sizes)))

    return work


PROGRAMS: tuple[Callable[..., Work], ...] = (hf_ext_merge, in_memory, mergekit, read_write)


def memory(field: str) -> int:
    """Bytes of this process: `VmRSS` now, `VmHWM` at most since the last reset."""
    return 1024 * int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0])


def counters() -> dict[str, float]:
    lines = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    io, usage = {key: int(value) for key, value in lines}, resource.getrusage(resource.RUSAGE_SELF)
    return {
        "seconds": time.perf_counter(),
        "processor_seconds": usage.ru_utime + usage.ru_stime,
        "bytes_read": io["rchar"],
        "bytes_written": io["wchar"],
    }


def measure(program: str, words: dict[str, Any]) -> dict[str, Any]:
    work = {function.__name__: function for function in PROGRAMS}[program](**words)
    imports = time.perf_counter() - STARTED
    gc.collect()
    # 5 resets the high-water mark to what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    resident, before = memory("VmRSS"), counters()
    work()
    after = counters()
    row: dict[str, Any] = {key: after[key] - before[key] for key in before}
    row |= {"import_seconds": imports, "peak_above_imports": memory("VmHWM") - resident}
    return row


if __name__ == "__main__":
    # What the tools print must not end up in our line.
    for line in sys.argv[2:] or iter(sys.stdin.readline, ""):
        with contextlib.redirect_stdout(sys.stderr):
            found = measure(sys.argv[1], json.loads(line))
        print(json.dumps(found), flush=True)
