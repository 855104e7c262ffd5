"""Adding tasks to an artifact and removing them, atomically.

Added, a task is merged with all others again, from where they came. Added frozen, it only gets a mask and a scale, and
the unified weights stay. Removing a task leaves the unified weights and the others as they are.
"""

import contextlib
import dataclasses
import os
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..emr.arithmetic import SUMS
from ..emr.artifact import hash_files, list_files, mark_root, read_sums, read_totals, write_sums, write_totals
from ..emr.manifest import Manifest, SourceRecord, TaskRecord, find_recorded, recorded_path
from ..errors import DataError, UsageError
from ..files import carry_over, lies_in_cache, link_file, read_json, recover_folder, replace_folder, sync
from ..hub.cards import write_card
from .compare import REPORT
from .configuration import MergeConfig
from .finishing import rewrite_report
from .journal import find_own, masked_names
from .merge import merge_checkpoints
from .methods import METHODS
from .plan import Plan, make_plan
from .publishing import VOTED, find_voters, keep_tasks
from .vectors import NotFiniteError

# Options of the merge that determine a frozen task's tensors and scale.
_KEPT = ("rescale", "exclude", "dtype", "adapters")
# Sums of a task vector by itself; the others depend on the unified model, which changes with every task.
_OF_TASK = [SUMS.index(name) for name in ("abs", "square", "nonzero")]


def add_task(
    folder: str | Path,
    name: str,
    source: str,
    *,
    frozen: bool = False,
    base: str | None = None,
    token: str | bool | None = None,
    endpoint: str | None = None,
) -> dict[str, Any]:
    """
    Adds a task to an artifact.

    All tasks are merged again, from where they came, by the options of the first merge: the result is that of a merge
    of all. Their checkpoints must still be there, on the Hub or on this disk. Frozen, unified weights and other tasks
    stay bit for bit as they are, only the new checkpoint and the base are read: the new task has no vote, is
    restored less well, and the card says so. `base` is needed if it is not where the artifact says.
    """
    place, manifest = _open(folder)
    if manifest.library == "peft":
        raise ValueError(f"{place} contains adapters, which are small: merge all of them again with the new one")
    if known := [task for task in manifest.tasks if task.casefold() == name.casefold()]:
        raise UsageError(f"{place} has a task {known[0]!r}; choose another name than {name!r}, or remove it first")
    if base is None:
        inside = manifest.base.folder
        base = source_spec(manifest.base, place) if inside is None else str(place / inside)
    add, how = (_add_frozen, "frozen") if frozen else (_merge_again, "merged again")
    add(place, manifest, name, source, base, {"token": token, "endpoint": endpoint})
    record = Manifest.read(place).tasks[name]
    about = {"scale": record.scale, "density": record.density, "path": str(place)}
    return {"task": name, "how": how, **about, "warnings": read_json(place / REPORT)["warnings"]}


def _merge_again(place: Path, manifest: Manifest, name: str, source: str, base: str, options: dict[str, Any]) -> None:
    # What the artifact tells besides, such as who voted, is no field of a configuration.
    method = {key: value for key, value in manifest.method.items() if key in MergeConfig.__dataclass_fields__}
    if method.get("merged") and (merged := find_recorded(str(method["merged"]), place)).exists():
        method["merged"] = str(merged)
    tasks = {task: source_spec(record.origin, place) for task, record in manifest.tasks.items()}
    method |= _own_options(manifest, tasks)
    config = MergeConfig.from_dict({**method, "base": base, "tasks": {**tasks, name: source}})

    def require_same_checkpoints(plan: Plan) -> None:
        _require_same(manifest.base, plan.base.identity(hash_files=True)["files"], f"the base {base}")
        for opened in plan.tasks[:-1]:
            _require_same(manifest.tasks[opened.label].origin, opened.identity()["files"], f"task {opened.label!r}")
        if (first := manifest.base).folder is not None:
            plan.base.origin = (first.source if first.revision else source_spec(first, place), first.revision)

    def require_same_weights(result: Path) -> None:
        artifacts = (place, manifest), (result, Manifest.read(result))
        for task in manifest.tasks:
            _require_same_weights(task, *artifacts)
        _require_same_angles([*manifest.tasks], *(read_totals(*artifact)[1] for artifact in artifacts))

    checks: dict[str, Any] = {"show": require_same_checkpoints, "check": require_same_weights}
    try:
        merge_checkpoints(config, place, **options, **checks, overwrite=True, progress=False)
    except NotFiniteError:
        raise
    except DataError as error:
        # what is wrong with the base or the new task, no other checkpoint mends
        with make_plan({"base": base, "tasks": {name: source}}, **options) as plan:
            _require_same(manifest.base, plan.base.identity(hash_files=True)["files"], f"the base {base}")
        raise DataError(
            f"{place}: to add {name!r}, all tasks are merged again, and that fails: {error} Restore the checkpoints, "
            "or add the task frozen (hf-ext emr add --frozen)"
        ) from error


def _own_options(manifest: Manifest, tasks: Collection[str]) -> dict[str, Any]:
    """The method and its options, of these tasks: others may have been removed since."""
    if (name := str(manifest.method.get("method"))) not in METHODS:
        return {}
    known = METHODS[name].options
    return {"method": name} | {key: keep_tasks(own, tasks) for key, own in manifest.method.items() if key in known}


def _add_frozen(place: Path, manifest: Manifest, name: str, source: str, base: str, options: dict[str, Any]) -> None:
    """Masks and rescales the new task against the unified weights as they are: method `given`, of one task."""
    method = {key: manifest.method[key] for key in _KEPT if key in manifest.method}
    if manifest.deltas:
        method |= _own_options(manifest, {name})
    config = {**method, "base": base, "tasks": {name: source}}
    # What was not merged before, or not in as many elements, has no unified weights: the task keeps it.
    merged = manifest.merged
    elements = {tensor: record.elements for tensor, record in merged.items()}
    with make_plan(config, **options) as plan:
        _require_same(manifest.base, plan.base.identity(hash_files=True)["files"], f"the base {base}")
        own = [row.name for row in plan.merged_rows if elements.get(row.name) != row.elements]
    config["exclude"] = [*config.get("exclude", []), *(f"{re.escape(tensor)}$" for tensor in own)]
    with _rewrite(place) as work:
        alone = work / ".adding"
        # deltas need no unified weights, so that the others never matter
        way = {} if manifest.deltas else {"method": "given", "merged": str(work)}
        merge_checkpoints(config | way, alone, **options, progress=False)
        found, told = Manifest.read(alone), read_json(alone / REPORT)["plan_warnings"]
        record = found.tasks[name]
        if record.origin.revision is None:
            origin = dataclasses.replace(record.origin, source=recorded_path(source, place))
            record = dataclasses.replace(record, origin=origin)
        rows = [list(merged).index(tensor) for tensor in found.merged]
        sums = np.zeros((len(merged), len(SUMS)))
        sums[rows] = read_sums(alone, found, name)
        totals, gram = read_totals(work, manifest)
        totals[rows], own_gram = read_totals(alone, found)
        # the inner products with the others need their checkpoints
        gram = np.pad(gram, (0, 1), constant_values=np.nan)
        gram[-1, -1] = own_gram[0, 0]
        write_totals(work, totals, gram)
        # what its owner keeps for it
        carry_over(work / "tasks" / name, alone / "tasks" / name, lambda _: False)
        shutil.rmtree(work / "tasks" / name, ignore_errors=True)
        os.replace(alone / "tasks" / name, work / "tasks" / name)
        shutil.rmtree(alone)
        write_sums(work, name, sums)
        manifest = _replace_tasks(manifest, {**manifest.tasks, name: record})
        manifest.write(work)
        _complete(work, place, manifest, told)


def remove_task(folder: str | Path, name: str) -> dict[str, Any]:
    """Removes a task: its mask, its scale and what it kept. The unified weights, which still hold its vote, and the
    other tasks stay bit for bit as they are; a merge without it needs the others' checkpoints."""
    place, manifest = _open(folder)
    if name not in manifest.tasks:
        raise UsageError(f"{place} has no task {name!r}; it has {', '.join(manifest.tasks)}")
    if len(manifest.tasks) == 1:
        raise UsageError(f"{name!r} is the last task of {place}; delete the folder instead")
    tasks = {task: record for task, record in manifest.tasks.items() if task != name}
    left = [row for row, task in enumerate(manifest.tasks) if task != name]
    with _rewrite(place) as work:
        totals, gram = read_totals(work, manifest)
        write_totals(work, totals, gram[np.ix_(left, left)])
        # it may be gone already
        shutil.rmtree(work / "tasks" / name, ignore_errors=True)
        is_ours = find_own(place)
        carry_over(place / "tasks" / name, work / "tasks" / name, lambda file: is_ours(f"tasks/{name}/{file}"))
        _complete(work, place, _replace_tasks(manifest, tasks), [])
    return {"removed": name, "tasks": list(tasks), "path": str(place)}


def source_spec(source: SourceRecord, place: Path) -> str:
    """The string that gives a recorded source to a merge; a relative path must not look like `org/name`."""
    if source.revision:
        return f"{source.source.partition('@')[0]}@{source.revision}"
    found = find_recorded(source.source, place)
    return str(found) if Path(source.source).expanduser().is_absolute() else os.path.join(".", os.path.relpath(found))


def _open(folder: str | Path) -> tuple[Path, Manifest]:
    place = Path(folder).expanduser().resolve()
    recover_folder(place)
    if lies_in_cache(place):
        raise UsageError(f"{place} is in the Hub's cache, which must not be changed; download it to another folder")
    return place, Manifest.read(place)


def _require_same(record: SourceRecord, files: dict[str, Any], what: str) -> None:
    """The files of a source are those of the merge, as far as their hashes are known."""
    changed = [] if files.keys() == record.files.keys() else [f"files {sorted(files)}, not {sorted(record.files)}"]
    for file, about in record.files.items():
        for key, told in about.items():
            ours = files.get(file, {}).get(key)
            changed += [f"{key} of {file}: {ours}, not {told}"] if ours != told and ours and told else []
    _refuse_changed(what, changed)


# A merge does not hash the tasks on this disk, which would take about as long as the merge. But it keeps sums of each
# tensor, what is not merged, and small files: of an unchanged task that is merged again, all of these are the same.
def _require_same_weights(task: str, before: tuple[Path, Manifest], after: tuple[Path, Manifest]) -> None:
    """Refuses a task of which two artifacts, before and after a merge, do not keep the same."""
    old, new, changed = before[1], after[1], []
    named = masked_names(*before, task)
    ours, theirs = (
        dict(zip(artifact[1].merged.values(), read_sums(*artifact, task)[:, _OF_TASK], strict=True))
        for artifact in (before, after)
    )
    both = [tensor for tensor in ours if tensor in theirs and tensor.name in named]
    # Kernels of numba and of torch add up in other orders.
    changed += [tensor.name for tensor in both if not np.allclose(ours[tensor], theirs[tensor], rtol=1e-10, atol=0)]
    for name in sorted(old.files.keys() & new.files.keys()):
        # Masks depend on the other tasks, but for deltas.
        others = ("sums.safetensors",) if old.deltas else ("mask.safetensors", "sums.safetensors")
        own = name.startswith(f"tasks/{task}/") and not name.endswith(others)
        # A task that was added frozen has kept more tensors.
        fits = not name.endswith(".safetensors") or old.files[name]["bytes"] == new.files[name]["bytes"]
        changed += [name] if own and fits and old.files[name] != new.files[name] else []
    alike = {*old.tasks[task].shared} ^ {*new.tasks[task].shared}
    changed += sorted(name for name in alike if old.tasks[task].base_name(name) not in new.merged)
    _refuse_changed(f"task {task!r}", [f"{name} has changed" for name in changed])


def _require_same_angles(tasks: list[str], before: np.ndarray, after: np.ndarray) -> None:
    """Refuses a task that lies on the other side of the base than before: of it the sums of magnitudes are the same,
    but not its products with other tasks. Those of a task that was added frozen are NaN."""
    now = after[: len(tasks), : len(tasks)]
    norms = np.sqrt(np.diag(now))
    moved = np.triu(np.abs(now - before) > 1e-10 * np.outer(norms, norms), 1)
    for first, second in zip(*np.nonzero(moved), strict=True):
        which = f"task {tasks[first]!r} or task {tasks[second]!r}"
        _refuse_changed(which, ["the inner product of their differences from the base has changed"])


def _refuse_changed(what: str, changed: list[str]) -> None:
    if changed:
        advice = "give the checkpoint of the merge, or merge all again"
        raise DataError(f"{what} is not the one that was merged ({changed[0]}): {advice}")


# An update is a copy of the folder in which some files are new. The copy costs nothing: its files are hard links to
# those of the artifact. Hence the one rule of this module: a file of the copy is never written into, it is removed and
# made anew (`write_json`, `whole_file`, `unlink` before a write), or the artifact, and whoever has it open, would
# change under the old name. When all is on the disk, copy and artifact change places in one step, as a merge's folder
# does; a kill before that leaves `.NAME.update`, which the next update removes. The tests hold links to an artifact
# while it is updated, make every step fail, kill it before the exchange, and compare every byte.
@contextlib.contextmanager
def _rewrite(place: Path) -> Iterator[Path]:
    """A copy of the artifact that shares its files; in the end it takes its place in one step."""
    work = place.with_name(f".{place.name}.update")
    # what an update that was killed left
    shutil.rmtree(work, ignore_errors=True)
    try:
        shutil.copytree(place, work, symlinks=True, copy_function=link_file)
        # What these lead to would be written into.
        for link in (path for path in work.iterdir() if path.is_symlink() and path.is_file()):
            target = link.resolve()
            link.unlink()
            link_file(target, link)
        yield work
        sync(work)
        replace_folder(work, place)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _replace_tasks(manifest: Manifest, tasks: dict[str, TaskRecord]) -> Manifest:
    """The manifest with other tasks; those that voted stay the same."""
    # a removed one, whose name another has now
    reused = tasks.keys() - manifest.tasks.keys()
    voted = find_voters(manifest.method, manifest.tasks)
    voters = [f"{name} (removed)" if name in reused else name for name in voted]
    method = {key: value for key, value in manifest.method.items() if key != VOTED}
    if voters != list(tasks) and not manifest.deltas:
        method[VOTED] = voters
    return dataclasses.replace(manifest, tasks=tasks, method=method, files={})


def _complete(work: Path, place: Path, manifest: Manifest, warnings: list[str]) -> None:
    """Writes everything that follows from the tasks: the mark of the root, the report, the hashes, the card."""
    mark_root(work, list(manifest.tasks))
    rewrite_report(work, manifest, warnings)
    # Files that the copy shares with the artifact have the hashes that they had.
    before = Manifest.read(place).files
    there = (name for name in before if (work / name).is_file() and (place / name).is_file())
    shared = {name: before[name] for name in there if (work / name).samefile(place / name)}
    named = [name for name in list_files(work) if name in before or not (place / name).exists()]
    dataclasses.replace(manifest, files=hash_files(work, named, known=shared)).write(work)
    write_card(work, repo_id=place.name)
