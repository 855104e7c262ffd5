"""Merges side by side, by their reports."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..emr.artifact import fetch_file
from ..emr.report import NOT_MEASURED, is_measured, mean_of, number_text
from ..errors import UsageError
from ..files import read_json_object
from ..hub.header_format import CheckpointError

REPORT = "report.json"


@contextlib.contextmanager
def explain_damage(where: str | Path) -> Iterator[None]:
    """Says of a report that does not hold what a merge writes that it is damaged."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{where}: damaged ({error!r}); merge again, or remove it.") from error


def read_report(source: str | Path, *, token: str | bool | None = None, endpoint: str | None = None) -> dict[str, Any]:
    path = Path(source).expanduser()
    if not path.exists() and "/" in str(source):
        path = fetch_file(str(source), REPORT, token=token, endpoint=endpoint)
    elif path.is_dir():
        path = path / REPORT
    if not path.is_file():
        raise CheckpointError(f"{source}: {REPORT} is missing; give the folder or org/name[@revision] of a merge.")
    report = read_json_object(path)
    if report.get("format_version") != 1:
        raise CheckpointError(f"{path} is not a report that this version reads; merge again.")
    if not is_measured(report):
        raise CheckpointError(f"{source}: {NOT_MEASURED}")
    return report


def compare_merges(
    sources: Sequence[str | Path], *, token: str | bool | None = None, endpoint: str | None = None
) -> dict[str, Any]:
    """Sets merges side by side: their errors for each task, beside those of 1-bit deltas, and their sizes."""
    if not sources:
        raise UsageError("nothing to compare: give at least one merge, as a folder or org/name[@revision].")
    reports = [read_report(source, token=token, endpoint=endpoint) for source in sources]
    with explain_damage(f"a {REPORT} of {', '.join(map(str, sources))}"):
        return _compare([*map(str, sources)], reports)


def _compare(sources: Sequence[str], reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    entries = [{entry["task"]: entry for entry in report["tasks"]} for report in reports]
    kinds = ["rescaled" if report["method"]["masks"] else "unified" for report in reports]
    tasks: list[dict[str, Any]] = []
    for name in dict.fromkeys(task for found in entries for task in found):
        held = [found[name]["error"] if name in found else None for found in entries]
        errors = [error and error[kind] for error, kind in zip(held, kinds, strict=True)]
        one_bit = next(error for error in held if error is not None)["one_bit"]
        tasks.append({"task": name, "errors": errors, "one_bit": one_bit})
    shared = [task for task in tasks if None not in task["errors"]]
    merges = []
    for index, (source, report) in enumerate(zip(sources, reports, strict=True)):
        about = {key: report["method"][key] for key in ("method", "rescale", "masks")}
        error, alone = mean_of([task["errors"][index] for task in shared]), report["sizes"]["artifact"]
        both = report["sizes"].get("artifact_and_base", alone)
        merges.append({"name": source, **about, "error": error, "bytes": alone, "bytes_with_base": both})
    warnings = [
        text
        for source, found in zip(sources[1:], entries[1:], strict=True)
        for text in _differences(f"{source} and {sources[0]} differ in", entries[0], found)
    ]
    one_bit = mean_of([task["one_bit"] for task in shared])
    return {"merges": merges, "tasks": tasks, "one_bit": one_bit, "warnings": warnings}


def _differences(begin: str, first: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    if other.keys() != first.keys():
        yield f"{begin} tasks ({', '.join(sorted(other.keys() ^ first.keys()))}): means are over common tasks."
    changed = []
    for name, ours in first.items():
        theirs = other.get(name, ours)
        alike = math.isclose(ours["norm"] or 0, theirs["norm"] or 0, rel_tol=1e-9)
        changed += [] if alike and ours["elements"] == theirs["elements"] else [name]
    if changed:
        yield f"{begin} the task vectors of {', '.join(changed)}: their checkpoints, bases or merged tensors differ."


def comparison_table(found: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    merges = found["merges"]
    names = [Path(merge["name"]).name for merge in merges]
    if len(set(names)) < len(names):
        names = [merge["name"] for merge in merges]
    header = ["error", *names, "1-bit deltas"]
    return header, [
        *([task["task"], *map(number_text, [*task["errors"], task["one_bit"]])] for task in found["tasks"]),
        ["mean", *map(number_text, [*(merge["error"] for merge in merges), found["one_bit"]])],
        ["method", *(merge["method"] for merge in merges), ""],
        ["rescale", *(merge["rescale"] if merge["masks"] else "-" for merge in merges), ""],
        ["bytes", *(f"{merge['bytes']:,}" for merge in merges), ""],
        ["with the base", *(f"{merge['bytes_with_base']:,}" for merge in merges), ""],
    ]
