"""Tasks added to an artifact and removed from it. The artifact changes in one step when all is written, or not at all.

Exactly: with the state that the merge kept (`keep_state`) the election is held again, and the result equals that of
merging all tasks anew. Frozen: the unified weights stay, the new task only gets a mask and a scale. Removing a task
leaves the unified weights and the others as they are.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hf_ext.emr.artifact_emr import compute_scales, open_masks, read_sums
from hf_ext.emr.files_emr import hash_files
from hf_ext.emr.manifest_emr import TASK_ID, TENSOR_RESCALES, Manifest, TaskRecord
from hf_ext.emr.ops_emr import SUMS
from hf_ext.emr.places_emr import recorded_path
from hf_ext.emr.sums_emr import read_totals, write_sums, write_totals
from hf_ext.emr.tasks_emr import mark_root

from ..files import recover_folder, replace_folder, sync
from ..hub.cards import write_card
from .electing import elect_again, write_signs
from .merge import merge_checkpoints
from .origins import VOTED, merge_again, plan_task, record_options
from .plan_table import Plan
from .report_files import rewrite_report


def add_task(
    folder: str | Path,
    name: str,
    source: str,
    *,
    base: str | None = None,
    token: str | bool | None = None,
    endpoint: str | None = None,
) -> dict[str, Any]:
    """
    Adds a task exactly: unified weights, masks and scales become those of a merge of all tasks.

    With the state that `keep_state` kept, only the base and the new checkpoint are read. Where the state does not
    suffice (there is none; the scales are least squares, which need the magnitudes of all task vectors; the new task
    has fewer tokens), all tasks are merged again from their recorded sources, which must still be there.

    Args:
        folder (`str` or `Path`): The artifact.
        name (`str`): The new task: up to 64 of the letters A-Z and a-z, digits, `.`, `_` and `-`.
        source (`str`): Its checkpoint: a folder, or `org/name[@revision]`.
        base (`str`, *optional*): Where the base is, if not where the artifact says.
        token (`str` or `bool`, *optional*): Token of the Hub.
        endpoint (`str`, *optional*): Address of the Hub. Defaults to `HF_ENDPOINT`.

    Returns:
        `dict[str, Any]`: `task`, `how` (`"state"` or `"merged again"`), `why` (of merging again), `scale`, `density`
        and `path`.

    Raises:
        ValueError: The task is there already, does not fit, or cannot be added exactly; the message says what to do.
    """
    place, manifest = _open(folder)
    _require_new(manifest, name, place)
    options: dict[str, Any] = {"token": token, "endpoint": endpoint}
    with plan_task(place, manifest, name, source, base, options) as plan:
        why = _why_not_by_state(place, manifest, plan, name)
        if why is None:
            with _rewrite(place) as work:
                election = elect_again(place, work, manifest, plan)
                _widen_totals(work, manifest, election.manifest)
                manifest = _rescale_tasks(work, election.manifest, election.sums)
                voters = [*_voters(manifest), name]
                manifest.write(work)
                manifest = _append(work, place, manifest, voters, name, source, plan, options)
                _complete(work, place, manifest, plan.warnings)
            return _summary(place, manifest, name, "state", None)
    merge_again(place, manifest, name, source, base, why, options)
    return _summary(place, Manifest.read(place), name, "merged again", why)


def add_task_frozen(
    folder: str | Path,
    name: str,
    source: str,
    *,
    base: str | None = None,
    token: str | bool | None = None,
    endpoint: str | None = None,
) -> dict[str, Any]:
    """
    Adds a task without its vote: the unified weights and all other tasks stay bit for bit as they are. The new task
    is restored less well than after a merge of all, and the card says so.

    Args:
        folder (`str` or `Path`): The artifact.
        name (`str`): The new task.
        source (`str`): Its checkpoint: a folder, or `org/name[@revision]`.
        base (`str`, *optional*): Where the base is, if not where the artifact says.
        token (`str` or `bool`, *optional*): Token of the Hub.
        endpoint (`str`, *optional*): Address of the Hub. Defaults to `HF_ENDPOINT`.

    Returns:
        `dict[str, Any]`: `task`, `how` (`"frozen"`), `scale`, `density` and `path`.

    Raises:
        ValueError: The task is there already, or does not fit; the message says what to do.
    """
    place, manifest = _open(folder)
    _require_new(manifest, name, place)
    options: dict[str, Any] = {"token": token, "endpoint": endpoint}
    with plan_task(place, manifest, name, source, base, options) as plan, _rewrite(place) as work:
        unsealed = dataclasses.replace(manifest, files={})
        manifest = _append(work, place, unsealed, _voters(manifest), name, source, plan, options)
        _complete(work, place, manifest, plan.warnings)
    return _summary(place, manifest, name, "frozen", None)


def remove_task(folder: str | Path, name: str) -> dict[str, Any]:
    """
    Removes a task: its mask, its scale and what it kept. The unified weights, which still hold its vote, and the other
    tasks stay bit for bit as they are; a merge without it needs the others' checkpoints.

    Args:
        folder (`str` or `Path`): The artifact.
        name (`str`): The task.

    Returns:
        `dict[str, Any]`: `removed`, `tasks` (those that are left) and `path`.

    Raises:
        ValueError: There is no such task, or it is the last one.
    """
    place, manifest = _open(folder)
    if name not in manifest.tasks:
        raise ValueError(f"{place} has no task {name!r}; it has {', '.join(manifest.tasks)}")
    if len(manifest.tasks) == 1:
        raise ValueError(f"{name!r} is the last task of {place}; delete the folder instead")
    tasks = {task: record for task, record in manifest.tasks.items() if task != name}
    before = manifest
    manifest = dataclasses.replace(_replace_tasks(manifest, tasks, _voters(manifest)), files={})
    with _rewrite(place) as work:
        totals, gram = read_totals(work, before)
        left = [row for row, task in enumerate(before.tasks) if task != name]
        write_totals(work, totals, gram[np.ix_(left, left)])
        shutil.rmtree(work / "tasks" / name)
        _complete(work, place, manifest, [])
    return {"removed": name, "tasks": list(tasks), "path": str(place)}


def has_state(folder: str | Path) -> bool:
    """Whether an artifact kept what adding a task exactly needs."""
    return Path(folder, "state.safetensors").is_file()


def _open(folder: str | Path) -> tuple[Path, Manifest]:
    place = Path(folder).expanduser().resolve()
    recover_folder(place)
    if place.parent.name == "snapshots":
        raise ValueError(f"{place} lies in the cache of the Hub, which is not changed; download it to another folder")
    return place, Manifest.read(place)


def _require_new(manifest: Manifest, name: str, place: Path) -> None:
    if not TASK_ID.fullmatch(name):
        raise ValueError(
            f"{name!r:.80} cannot be the name of a task: use up to 64 of the letters A-Z and a-z, digits, '.', '_' "
            "and '-', and not '.' or '..' alone"
        )
    known = [task for task in manifest.tasks if task.casefold() == name.casefold()]
    if known:
        raise ValueError(f"{place} has a task {known[0]!r}; choose another name than {name!r}, or remove it first")


def _voters(manifest: Manifest) -> list[str]:
    return list(manifest.method.get(VOTED, manifest.tasks))


def _replace_tasks(manifest: Manifest, tasks: dict[str, TaskRecord], voters: list[str]) -> Manifest:
    """The manifest with other tasks."""
    method = {key: value for key, value in manifest.method.items() if key != VOTED}
    if voters != list(tasks):
        method[VOTED] = voters
    return dataclasses.replace(manifest, tasks=tasks, method=method)


def _complete(work: Path, place: Path, manifest: Manifest, warnings: list[str]) -> None:
    """What follows from the tasks: the mark of the root, the report, the hashes, the card."""
    mark_root(work, list(manifest.tasks))
    rewrite_report(work, manifest, warnings)
    # Files that the copy shares with the artifact have the hashes that they had.
    before = Manifest.read(place).files
    shared = {name: about for name, about in before.items() if _is_shared(work / name, place / name)}
    dataclasses.replace(manifest, files=hash_files(work, known=shared)).write(work)
    write_card(work, repo_id=place.name)


def _is_shared(ours: Path, theirs: Path) -> bool:
    return ours.is_file() and theirs.is_file() and ours.samefile(theirs)


def _why_not_by_state(place: Path, manifest: Manifest, plan: Plan, name: str) -> str | None:
    """Why the kept state does not suffice to add a task exactly."""
    if not has_state(place):
        return "the merge kept no state (keep_state)"
    if manifest.method["rescale"] in ("l2", "tensor_l2"):
        return (
            f"rescale {manifest.method['rescale']} needs the products of every task's vector with the new unified "
            "one, and the state holds signs only"
        )
    if name in _voters(manifest):
        return f"{name!r} was merged before and removed, so that its vote would count twice"
    for part in plan.merged:
        tensor = next(tensor for tensor in manifest.tensors if tensor.name == part.name)
        if tensor.elements not in (0, part.elements) or tensor.dtype != part.dtype:
            return f"{part.name!r} would be merged in {part.elements} elements of {part.dtype}, not as before"
    return None


@contextmanager
def _rewrite(place: Path) -> Iterator[Path]:
    """A copy of the artifact that shares its files; in the end it takes its place in one step."""
    work = place.with_name(f".{place.name}.update")
    # what an update that was killed left
    shutil.rmtree(work, ignore_errors=True)
    try:
        shutil.copytree(place, work, copy_function=_link)
        yield work
        sync(work)
        replace_folder(work, place)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        # a file system without links
        shutil.copyfile(source, target)


def _widen_totals(work: Path, before: Manifest, after: Manifest) -> None:
    """Rows for tensors that are merged from now on."""
    totals, gram = read_totals(work, before)
    rows = {name: row for row, name in enumerate(after.merged)}
    wide = np.zeros((len(rows), totals.shape[1]))
    wide[[rows[name] for name in before.merged]] = totals
    write_totals(work, wide, gram)


def _rescale_tasks(work: Path, manifest: Manifest, sums: dict[str, np.ndarray]) -> Manifest:
    """The old tasks with the scales and densities that follow from new sums."""
    merged = list(manifest.merged.values())
    elements = np.array([tensor.elements for tensor in merged], np.int64)
    mode = manifest.method["rescale"]
    tasks = {}
    for task, record in manifest.tasks.items():
        write_sums(work, task, sums[task])
        named = _names(work, manifest, task)
        part = np.array([[tensor.name in named] for tensor in merged], bool).reshape(-1, 1)
        scales = compute_scales(sums[task][:, None], elements, part, mode)
        count = int(elements[part[:, 0]].sum())
        density = float(sums[task][:, SUMS.index("mask")].sum() / count) if count else 0.0
        if mode in TENSOR_RESCALES:
            rows = {tensor.name: row for row, tensor in enumerate(merged)}
            by_tensor = {own: float(scales[rows[tensor], 0]) for tensor, own in named.items()}
            tasks[task] = dataclasses.replace(record, density=density, scales=by_tensor)
        else:
            tasks[task] = dataclasses.replace(record, density=density, scale=float(scales[0]))
    return dataclasses.replace(manifest, tasks=tasks)


def _names(folder: Path, manifest: Manifest, task: str) -> dict[str, str]:
    """The tensors in which a task takes part: its own names by the root's."""
    with open_masks(folder, manifest, task) as masks:
        return {manifest.tasks[task].base_name(name): name for name in masks}


def _append(
    work: Path,
    place: Path,
    manifest: Manifest,
    voters: list[str],
    name: str,
    source: str,
    plan: Plan,
    options: dict[str, Any],
) -> Manifest:
    """Masks and rescales the new task against the unified weights as they are: method `given`, of one task."""
    merged = manifest.merged
    # What was not merged before, or not in as many elements, has no unified weights: the task keeps it.
    own = [part.name for part in plan.merged if part.name not in merged or merged[part.name].elements != part.elements]
    kept = record_options(manifest)
    given = {
        **kept,
        "base": plan.config.base,
        "tasks": {name: source},
        "method": "given",
        "merged": str(work),
        "exclude": [*kept.get("exclude", []), *(f"{re.escape(tensor)}$" for tensor in own)],
    }
    alone = work / ".adding"
    merge_checkpoints(given, alone, **options, progress=False)
    found = Manifest.read(alone)
    record: TaskRecord = found.tasks[name]
    if record.origin.revision is None:
        origin = dataclasses.replace(record.origin, source=recorded_path(source, place))
        record = dataclasses.replace(record, origin=origin)
    sums = np.zeros((len(merged), len(SUMS)))
    rows = {tensor: row for row, tensor in enumerate(merged)}
    sums[[rows[tensor] for tensor in found.merged]] = read_sums(alone, found, name)
    totals, gram = read_totals(work, manifest)
    totals[[rows[tensor] for tensor in found.merged]], own_gram = read_totals(alone, found)
    # the inner products with the others need their checkpoints
    gram = np.pad(gram, (0, 1), constant_values=np.nan)
    gram[-1, -1] = own_gram[0, 0]
    write_totals(work, totals, gram)
    os.replace(alone / "tasks" / name, work / "tasks" / name)
    shutil.rmtree(alone)
    write_sums(work, name, sums)
    manifest = _replace_tasks(manifest, {**manifest.tasks, name: record}, voters)
    if has_state(work):
        write_signs(work, name, record, manifest, plan)
    manifest.write(work)
    return manifest


def _summary(place: Path, manifest: Manifest, name: str, how: str, why: str | None) -> dict[str, Any]:
    record = manifest.tasks[name]
    return {
        "task": name,
        "how": how,
        "why": why,
        "scale": record.scale,
        "density": record.density,
        "path": str(place),
    }
