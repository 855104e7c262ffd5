"""`report.json` and its picture, as both a new merge and one whose tasks have changed write them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_ext.emr.artifact_emr import open_masks, read_sums
from hf_ext.emr.files_emr import STATE
from hf_ext.emr.manifest_emr import Manifest
from hf_ext.emr.report_emr import make_report
from hf_ext.emr.sums_emr import read_totals

from .card import read_report
from .sources import CONFIGURATION_FILES

# What is recorded of files: bytes and hash, by name.
Files = Mapping[str, Mapping[str, Any]]

# Beside the weights at the root.
NOT_WEIGHTS = (STATE, "sums.safetensors")


def _measure_sizes(folder: Path, base: Files, tasks: Iterable[Files]) -> dict[str, int]:
    """Bytes of what was merged and of what came out: of whole files, so that they can be compared."""

    def total(pattern: str) -> int:
        return sum(path.stat().st_size for path in folder.glob(pattern))

    return {
        "checkpoints": sum(about["bytes"] for files in tasks for about in files.values()),
        "base": sum(about["bytes"] for about in base.values()),
        "unified": total("*.safetensors") - sum(map(total, NOT_WEIGHTS)),
        "masks": total("tasks/*/mask.safetensors"),
        "extras": total("tasks/*/extra.safetensors"),
    }


def _list_own_files(folder: Path, tasks: Iterable[str]) -> dict[str, list[str]]:
    """What the tasks have beside weights and configuration: tokenizers and the like that differ from the base's."""
    found = {}
    for task in tasks:
        place = folder / "tasks" / task
        paths = [path for path in place.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
        names = sorted(path.relative_to(place).as_posix() for path in paths)
        found[task] = [name for name in names if name not in CONFIGURATION_FILES]
    return {task: names for task, names in found.items() if names}


def write_report(
    folder: Path,
    *,
    sources: Mapping[str, Any],
    base: Files,
    library: str,
    warnings: Sequence[str],
    masks: bool,
    **numbers: Any,
) -> dict[str, Any]:
    """Writes `report.json` and `report.png`; sizes and names of files are those that lie in the folder. Files of
    those names are replaced by new ones, since they may be shared with the artifact that is being replaced."""
    from hf_ext.plots.merges import draw_report

    tasks = sources["tasks"]
    sizes = _measure_sizes(folder, base, [source["files"] for source in tasks.values()])
    report = _finite(make_report(tasks=list(tasks), sizes=sizes, **numbers))
    report["warnings"] = list(dict.fromkeys([*warnings, *report["warnings"]]))
    report["files"] = _list_own_files(folder, tasks) if masks else {}
    report["library"] = library
    report["sources"] = sources
    for file in ("report.json", "report.png"):
        (folder / file).unlink(missing_ok=True)
    text = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / "report.json").write_text(text + "\n", encoding="utf-8")
    draw_report(report, folder / "report.png")
    return report


def rewrite_report(folder: Path, manifest: Manifest, warnings: Sequence[str]) -> None:
    """[`write_report`] of an artifact whose tasks have changed, from the sums that lie in it."""
    merged, tasks = list(manifest.merged.values()), manifest.tasks
    participates = np.zeros((len(merged), len(tasks)), bool)
    for index, (task, record) in enumerate(tasks.items()):
        with open_masks(folder, manifest, task) as masks:
            named = {record.base_name(mask) for mask in masks}
        participates[:, index] = [tensor.name in named for tensor in merged]
    totals, gram = read_totals(folder, manifest)
    sums = np.stack([read_sums(folder, manifest, task) for task in tasks], axis=1)
    # Earlier versions added tasks without the checkpoints of the older ones.
    unknown = [task for task, own in zip(tasks, sums.sum(axis=0), strict=True) if np.isnan(own).any()]
    if unknown:
        warnings = [
            *warnings,
            f"distances and errors of {', '.join(unknown)} are not known: an earlier version added a task without "
            "their checkpoints.",
        ]
    origins = {
        task: {"source": record.origin.source, "revision": record.origin.revision, "files": record.origin.files}
        for task, record in tasks.items()
    }
    write_report(
        folder,
        sources=read_report(folder).get("sources", {}) | {"tasks": origins},
        base=manifest.base.files,
        library=manifest.library,
        warnings=warnings,
        masks=True,
        names=[tensor.name for tensor in merged],
        elements=np.array([tensor.elements for tensor in merged], np.int64),
        participates=participates,
        sums=sums,
        totals=totals,
        gram=gram,
        method=manifest.method,
    )


def _finite(value: Any) -> Any:
    """The value with null for what is not known."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
