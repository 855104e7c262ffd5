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


class Rows:
    """The rows of a part in its JSON file."""

    def __init__(self, path: Path):
        self.path = path
        self.content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"rows": []}

    def begin(self, case: str) -> None:
        """Notes what is measured now, for whoever finds the process dead."""
        self.content["running"] = case
        write_json(self.path, self.content)

    def add(self, case: str, rows: dict[str, Values]) -> None:
        """Puts a case's rows in place of earlier ones and writes the file."""
        kept = [row for row in self.content["rows"] if row["case"] != case]
        named = [{"key": f"{case} / {name}" if name else case, "case": case, **row} for name, row in rows.items()]
        self.content["rows"] = kept + named
        self.content.pop("running", None)
        write_json(self.path, self.content)


def run_part(words: argparse.Namespace, cases: dict[str, Case]) -> None:
    """The whole of a part: what has no row yet, then again what has failed, and last what hung or died before."""
    rows = Rows(words.output)
    states = {row["case"]: "error" in row for row in rows.content["rows"]}
    names = [name for name in cases if states.get(name, True)]
    names.sort(key=lambda name: (name == rows.content.get("running"), name in states))
    for name in names:
        print(name, flush=True)
        rows.begin(name)
        try:
            rows.add(name, cases[name]())
        except Exception as error:
            traceback.print_exc()
            rows.add(name, {"": {"error": f"{type(error).__name__}: {error}"[:2000]}})
            if isinstance(error, torch.AcceleratorError):
                # Nothing works in this process any more: the same command goes on in another one.
                sys.exit(1)
        if words.device == "cuda":
            torch.cuda.empty_cache()
    sys.exit(int(any("error" in row for row in rows.content["rows"])))


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


def training_step(model: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
    """Forward and backward; gradients are dropped before."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        loss().backward()

    return step


def autocast(words: argparse.Namespace, dtype: str, call: Callable[[], Any]) -> Callable[[], Any]:
    """The call under autocast to a half type, or as it is for float32."""
    if dtype == "float32":
        return call

    def wrapped() -> Any:
        with torch.autocast(words.device, getattr(torch, dtype)):
            return call()

    return wrapped
