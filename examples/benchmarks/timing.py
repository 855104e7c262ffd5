"""Shared parts of the benchmarks: entries that take turns, and what a result says of its machine."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def installed_versions(*names: str) -> dict[str, str]:
    """Python's version and those of libraries, some of which may be missing."""
    return {"python": platform.python_version(), **{name: _version_of(name) for name in names}}


def _version_of(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def describe_machine(*libraries: str) -> dict[str, Any]:
    """Processor, threads, load and versions."""
    return {
        "device": f"CPU ({platform.machine()}), {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
        "versions": installed_versions(*libraries),
    }


def time_of(call: Callable[[], Any], clock: Callable[[], float] = time.process_time) -> float:
    """Seconds of a call, of processor time if no other clock is given."""
    start = clock()
    call()
    return clock() - start


def in_turns(names: list[str], rounds: int, measure: Callable[[str], Any]) -> dict[str, list[Any]]:
    """
    Measurements of each name by round. Within a round each is measured once, in an order that turns from round to
    round: so other load of the machine, and what one entry leaves in caches, hits all.
    """
    found: dict[str, list[Any]] = {name: [] for name in names}
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            found[name].append(measure(name))
    return found


def median_ratio(times: list[float], base: list[float]) -> float:
    """The median over the rounds of a ratio within a round."""
    return statistics.median(one / other for one, other in zip(times, base, strict=True))


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """Rows of cells as Markdown."""
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def write_result(output: Path, content: dict[str, Any], table: str = "") -> None:
    """A result as JSON, whole or as before, and its table beside it."""
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    temporary.replace(output)
    if table:
        output.with_suffix(".md").write_text(table, encoding="utf-8")
        print(table)
