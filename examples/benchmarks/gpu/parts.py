"""Shared code of the parts of `make gpu`: their command line, rows that survive, timing in turns.

A part is a script that names cases and what measures them; `run.py` starts it in a process of its own. A case gives
one or more rows; all are written at once, so that a part killed at its limit keeps what it has, and the next run
measures what is missing.
"""

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import turn, write_json
from torch import AcceleratorError

# Rounds of a case, and seconds after which no further one starts.
ROUNDS, SECONDS = 20, 1.5
Values = dict[str, Any]
Case = Callable[[], dict[str, Values]]


def read_words() -> argparse.Namespace:
    """The words that the runner gives to every part."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--tiny", action="store_true", help="sizes of the rehearsal")
    parser.add_argument("--output", type=Path, required=True, help="the part's JSON file")
    words = parser.parse_args()
    # What is compared with float32 must be float32.
    torch.backends.cudnn.allow_tf32 = False
    return words


def run_part(words: argparse.Namespace, cases: dict[str, Case]) -> None:
    """The whole of a part: what has no row yet, then again what has failed, and last what hung or died before."""
    path = words.output
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"rows": []}
    states = {row["case"]: "error" in row for row in content["rows"]}
    names = [name for name in cases if states.get(name, True)]
    names.sort(key=lambda name: (name == content.get("running"), name in states))
    for case in names:
        print(case, flush=True)
        # For whoever finds the process dead.
        write_json(path, {**content, "running": case})
        lost = False
        try:
            rows = cases[case]()
        except Exception as error:
            traceback.print_exc()
            rows, lost = (
                {"": {"error": f"{type(error).__name__}: {error}"[:2000]}},
                isinstance(error, AcceleratorError),
            )
        kept = [row for row in content["rows"] if row["case"] != case]
        named = [{"key": f"{case} / {name}" if name else case, "case": case, **row} for name, row in rows.items()]
        content = {**content, "rows": kept + named}
        content.pop("running", None)
        write_json(path, content)
        if lost:
            # Nothing works in this process any more: the same command goes on in another one.
            sys.exit(1)
        if words.device == "cuda":
            torch.cuda.empty_cache()
    sys.exit(int(any("error" in row for row in content["rows"])))


def seconds(call: Callable[[], Any], device: str) -> float:
    """Of one call: by CUDA's events, or by the clock."""
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def peak_bytes(call: Callable[[], Any], device: str) -> int | None:
    """Bytes that a call allocates beyond those allocated before; None where they are not counted."""
    if device != "cuda":
        call()
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def in_turns(calls: dict[str, Callable[[], Any]], words: argparse.Namespace, **facts: Any) -> dict[str, Values]:
    """
    A row for each call: median, least and greatest seconds of rounds in which all run one after the other, in an order
    that turns, and the peak memory. What does not fit into memory gets a row that says so.
    """
    rows: dict[str, Values] = {}
    taken: dict[str, list[float]] = {}
    for name, call in calls.items():
        try:
            # The first call compiles and warms up, the second is counted.
            call()
            rows[name] = {**facts, "bytes": peak_bytes(call, words.device)}
            taken[name] = []
        except torch.OutOfMemoryError:
            rows[name] = {**facts, "bytes": None, "out_of_memory": True}
            torch.cuda.empty_cache()
    names, begin = list(taken), time.monotonic()
    for number in range(2 if words.tiny else ROUNDS):
        if number > 2 and time.monotonic() - begin > SECONDS:
            break
        for name in turn(names, number):
            taken[name].append(seconds(calls[name], words.device))
    for name, times in taken.items():
        rows[name] |= {"median": statistics.median(times), "min": min(times), "max": max(times), "rounds": len(times)}
    return rows
