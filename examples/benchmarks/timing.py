"""The frame of the benchmarks: their command line, processes of their own, entries that take turns, results in files.

A benchmark names its cases, measures them and draws their table. `run` reads the words, keeps to one thread and
writes results/NAME.json, with the machine and the versions, and NAME.md beside it.
"""

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parent / "results"
Content = dict[str, Any]


def run(
    name: str,
    doc: str | None,
    measure: Callable[..., Iterator[Content]],
    draw: Callable[[Content], str] | None,
    **options: Any,
) -> None:
    """
    The whole of a benchmark: reads its words, measures, and writes JSON and table after each result of `measure`.

    Args:
        name (`str`): Name of its files in `results`.
        doc (`str`): Its help.
        measure (`Callable`): Takes the words, and yields what is found so far.
        draw (`Callable`, *optional*): Makes the table of that.
        options: Each word with its default, whose type it has; of a list one or more; False for a switch. With the
            switch `quick` the files go into the folder that `folder` names.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in options.items():
        if default is False:
            parser.add_argument(f"--{option}", action="store_true")
            continue
        several = isinstance(default, list)
        kind = type(default[0] if several else default)
        parser.add_argument(f"--{option}", type=kind, nargs="+" if several else None, default=default)
    parser.add_argument("--output", type=Path)
    words = parser.parse_args()
    words.output = words.output or (Path(words.folder) if vars(words).get("quick") else RESULTS) / f"{name}.json"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for content in measure(words):
        write_result(words.output, {**content, **describe_machine()}, draw and draw(content))


def installed_versions(*names: str) -> dict[str, str]:
    """Python's version and those of libraries, some of which may be missing."""
    return {"python": platform.python_version(), **{name: _version_of(name) for name in names}}


def _version_of(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def describe_machine() -> Content:
    """Processor, threads, load and the versions of all libraries that measure or are measured."""
    libraries = ("hf-ext", "torch", "transformers", "diffusers", "accelerate", "datasets", "numba")
    return {
        "device": f"CPU ({platform.machine()}), {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
        "versions": installed_versions(*libraries, "mamba-ssm"),
    }


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """A function's value in a process that is new and ends: what an entry leaves of the heap decides on the next's."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


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
    for number in range(rounds):
        for name in turn(names, number):
            found[name].append(measure(name))
    return found


def turn(names: list[str], number: int) -> list[str]:
    """The order of a round."""
    shift = number % max(1, len(names))
    return names[shift:] + names[:shift]


def median_ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """The median over the rounds of a ratio within a round."""
    return statistics.median(one / other for one, other in zip(times, base, strict=True))


def compare(
    calls: dict[str, Callable[[], Any]],
    rounds: int,
    bases: int = 1,
    patience: float = math.inf,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, dict[str, float]]:
    """
    Median seconds of calls that take turns, and the median ratio within a round to the fastest of the first `bases`. A
    first call of each warms caches and compiles; what takes longer than `patience` is measured by it.
    """
    first = {name: time_of(call, clock) for name, call in calls.items()}
    again = [name for name in calls if first[name] <= patience]
    times = in_turns(again, rounds, lambda name: time_of(calls[name], clock))
    base = min((times[name] for name in [*calls][:bases]), key=statistics.median)
    rows = {}
    for name in calls:
        taken = times.get(name) or [first[name]]
        ratio = median_ratio(taken, base if name in times else [statistics.median(base)])
        seconds = {"seconds": statistics.median(taken), "first_call_seconds": first[name]}
        rows[name] = {**seconds, "ratio": ratio, "runs": len(taken)}
    return rows


def training_step(module: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
    """Forward and backward pass; gradients are dropped before."""

    def step() -> None:
        module.zero_grad(set_to_none=True)
        loss().backward()

    return step


def resident(field: str) -> int:
    """
    Bytes of this process: `VmRSS` now, `VmHWM` at most since [`reset_peak`]. Not getrusage, whose maximum a process
    inherits from the one that starts it.
    """
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(status.split(field + ":")[1].split()[0])


def reset_peak() -> None:
    """Sets the high-water mark of memory to what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """Rows of cells as Markdown."""
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def write_json(path: Path, content: Any, indent: int = 1) -> None:
    """The file is whole or as before. Not hf_ext's own: a result must be able to say that hf_ext does not import."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(content, indent=indent) + "\n", encoding="utf-8")
    temporary.replace(path)


def write_result(output: Path, content: Content, table: str | None) -> None:
    """A result as JSON, whole or as before, and its table beside it, below which a person's notes stay."""
    write_json(output, content, indent=2)
    if table is None:
        print(output)
        return
    page = output.with_suffix(".md")
    lines = page.read_text(encoding="utf-8").splitlines(keepends=True) if page.exists() else []
    tables = [index for index, line in enumerate(lines) if line.startswith("|")]
    page.write_text(table + "".join(lines[tables[-1] + 1 :] if tables else []), encoding="utf-8")
    print(table)
