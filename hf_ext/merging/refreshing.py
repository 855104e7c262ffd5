"""The report and picture of an artifact whose tasks have changed, from the sums that lie in it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from hf_ext.emr.artifact_emr import open_masks, read_sums
from hf_ext.emr.manifest_emr import Manifest
from hf_ext.emr.report_emr import make_report
from hf_ext.emr.sums_emr import read_totals

from .card import read_report
from .report_files import list_own_files, measure_sizes, write_report


def refresh(folder: Path, manifest: Manifest, warnings: list[str]) -> dict[str, Any]:
    """
    Writes report and picture anew.

    Args:
        folder (`Path`): The artifact, with its manifest and all sums.
        manifest ([`Manifest`]): Its manifest.
        warnings (`list[str]`): What its plan warned of.

    Returns:
        `dict[str, Any]`: The report.
    """
    before = read_report(folder)
    report = _report(folder, manifest)
    unknown = [entry["task"] for entry in report["tasks"] if entry["error"]["masked"] is None and entry["norm"]]
    if unknown:
        warnings = [
            *warnings,
            f"since a task was added from the kept state, distances and errors of {', '.join(unknown)} are not known: "
            "they need the checkpoints.",
        ]
    report["warnings"] = [*dict.fromkeys([*warnings, *report["warnings"]])]
    report["files"] = list_own_files(folder, manifest.tasks)
    report["library"] = manifest.library
    report["sources"] = before.get("sources", {}) | {
        "tasks": {
            task: {"source": record.origin.source, "revision": record.origin.revision, "files": record.origin.files}
            for task, record in manifest.tasks.items()
        }
    }
    write_report(folder, report)
    return report


def _report(folder: Path, manifest: Manifest) -> dict[str, Any]:
    merged = list(manifest.merged.values())
    participates = np.zeros((len(merged), len(manifest.tasks)), bool)
    for index, (task, record) in enumerate(manifest.tasks.items()):
        with open_masks(folder, manifest, task) as masks:
            named = {record.base_name(mask) for mask in masks}
        participates[:, index] = [tensor.name in named for tensor in merged]
    totals, gram = read_totals(folder, manifest)
    report = make_report(
        tasks=list(manifest.tasks),
        names=[tensor.name for tensor in merged],
        elements=np.array([tensor.elements for tensor in merged], np.int64),
        participates=participates,
        sums=np.stack([read_sums(folder, manifest, task) for task in manifest.tasks], axis=1),
        totals=totals,
        gram=gram,
        method=manifest.method,
        sizes=measure_sizes(folder, manifest.base.files, [record.origin.files for record in manifest.tasks.values()]),
    )
    found: dict[str, Any] = _finite(report)
    return found


def _finite(value: Any) -> Any:
    """The value with null for what is not known."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
