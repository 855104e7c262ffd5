"""Where the checkpoints of an artifact came from: opened again for a new task, or merged again with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hf_ext.emr.manifest_emr import Manifest, SourceRecord
from hf_ext.emr.places_emr import find_recorded

from ..hub.safetensors_headers import CheckpointError
from .configuration import MergeConfig
from .merge import merge_checkpoints
from .plan import make_plan
from .plan_table import Plan

# Options of the first merge that decide what happens to a new task's tensors and to its scale.
_KEPT = ("rescale", "exclude", "shape_policy", "small_raw", "dtype", "adapters")
# In the manifest's method: the tasks that voted, once they are not simply all tasks.
VOTED = "elected_from"


def plan_task(
    place: Path, manifest: Manifest, name: str, source: str, base: str | None, options: dict[str, Any]
) -> Plan:
    """Plans the new task alone, on the base of the merge."""
    if manifest.library == "peft":
        raise ValueError(f"{place} holds adapters, which are small: merge them again with the new one")
    given = {"base": _base_spec(place, manifest.base, base), "tasks": {name: source}, **record_options(manifest)}
    plan = make_plan(MergeConfig.from_dict(given), **options)
    try:
        _require_same(manifest.base, plan.base.identity(hash_files=True), f"the base {given['base']}")
    except BaseException:
        plan.close()
        raise
    return plan


def merge_again(
    place: Path, manifest: Manifest, name: str, source: str, base: str | None, why: str, options: dict[str, Any]
) -> None:
    """Merges all tasks from their recorded sources and the new one, by the options of the first merge."""
    method = {key: value for key, value in manifest.method.items() if key != VOTED}
    if method.get("merged"):
        merged = find_recorded(str(method["merged"]), place)
        method["merged"] = str(merged) if merged.exists() else method["merged"]
    tasks = {task: source_spec(record.origin, place) for task, record in manifest.tasks.items()}
    config = MergeConfig.from_dict(
        {**method, "base": _base_spec(place, manifest.base, base), "tasks": {**tasks, name: source}}
    )
    try:
        with make_plan(config, **options) as plan:
            for opened in plan.tasks[:-1]:
                _require_same(manifest.tasks[opened.label].origin, opened.identity(), f"task {opened.label!r}")
    except (CheckpointError, ValueError) as error:
        raise ValueError(
            f"{place}: {name!r} cannot be added exactly: {why}. Then all tasks have to be merged again, and that "
            f"fails: {error} Add it frozen (hf-ext emr add --frozen), or bring the checkpoints back"
        ) from error
    merge_checkpoints(config, place, **options, overwrite=True)


def record_options(manifest: Manifest) -> dict[str, Any]:
    """The options of the merge that hold for a new task too."""
    return {key: manifest.method[key] for key in _KEPT if key in manifest.method}


def _require_same(record: SourceRecord, found: dict[str, Any], what: str) -> None:
    """The files of a source are those of the merge, as far as their hashes are known."""
    for file, about in record.files.items():
        other = found["files"].get(file, {})
        for key in ("bytes", "header_sha256", "sha256"):
            if other.get(key) != about.get(key) and None not in (other.get(key), about.get(key)):
                raise ValueError(
                    f"{what} is not the one that was merged: {key} of {file} is {other.get(key)}, expected "
                    f"{about.get(key)}; give the checkpoint of the merge, or merge all again"
                )
    if record.files.keys() != found["files"].keys():
        raise ValueError(
            f"{what} is not the one that was merged: its files are {sorted(found['files'])}, expected "
            f"{sorted(record.files)}; give the checkpoint of the merge, or merge all again"
        )


def _base_spec(place: Path, base: SourceRecord, given: str | None) -> str:
    if given is not None:
        return given
    if base.folder is not None:
        return str(place / base.folder)
    return source_spec(base, place)


def source_spec(source: SourceRecord, place: Path) -> str:
    """How a recorded source is given to a merge."""
    if source.revision:
        return f"{source.source.partition('@')[0]}@{source.revision}"
    found = find_recorded(source.source, place)
    return str(found) if Path(source.source).expanduser().is_absolute() else os.path.relpath(found)
