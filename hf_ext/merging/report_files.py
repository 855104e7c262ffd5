"""`report.json` and its picture, as both a new merge and one whose tasks have changed write them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .sources import CONFIGURATION_FILES

# Beside the weights at the root.
NOT_WEIGHTS = ("state.safetensors", "sums.safetensors")


def measure_sizes(
    folder: Path, base: Mapping[str, Mapping[str, Any]], tasks: Iterable[Mapping[str, Mapping[str, Any]]]
) -> dict[str, int]:
    """
    Bytes of files, of what was merged and of what came out; all with their headers, so that they can be compared.

    Args:
        folder (`Path`): The merge, with all weights in place.
        base (`Mapping`): What is recorded of the base's files.
        tasks (`Iterable[Mapping]`): What is recorded of every task's files.

    Returns:
        `dict[str, int]`: `checkpoints`, `base`, `unified`, `masks` and `extras`.
    """

    def total(pattern: str) -> int:
        return sum(path.stat().st_size for path in folder.glob(pattern))

    return {
        "checkpoints": sum(about["bytes"] for files in tasks for about in files.values()),
        "base": sum(about["bytes"] for about in base.values()),
        "unified": total("*.safetensors") - sum(map(total, NOT_WEIGHTS)),
        "masks": total("tasks/*/mask.safetensors"),
        "extras": total("tasks/*/extra.safetensors"),
    }


def list_own_files(folder: Path, tasks: Iterable[str]) -> dict[str, list[str]]:
    """
    Lists what the tasks have beside weights and configuration: tokenizers and the like that differ from the base's.

    Args:
        folder (`Path`): The merge.
        tasks (`Iterable[str]`): Names of the tasks.

    Returns:
        `dict[str, list[str]]`: Names of files by task, of tasks that have some.
    """
    found = {}
    for task in tasks:
        place = folder / "tasks" / task
        paths = [path for path in place.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
        names = sorted(path.relative_to(place).as_posix() for path in paths)
        found[task] = [name for name in names if name not in CONFIGURATION_FILES]
    return {task: names for task, names in found.items() if names}


def write_report(folder: Path, report: Mapping[str, Any]) -> None:
    """
    Writes `report.json` and `report.png`.

    Args:
        folder (`Path`): The merge; files of those names are replaced by new ones, since they may be shared with the
            artifact that is being replaced.
        report (`Mapping`): The report.
    """
    from hf_ext.plots.merges import draw_report

    for file in ("report.json", "report.png"):
        (folder / file).unlink(missing_ok=True)
    text = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / "report.json").write_text(text + "\n", encoding="utf-8")
    draw_report(report, folder / "report.png")
