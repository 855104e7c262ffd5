"""Last files of a merge, written after all weights: scales, manifest, small files, report, card."""

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..emr import emr_loader
from ..emr.arithmetic import SUMS, TENSOR_RESCALES, compute_scales
from ..emr.artifact import hash_files, list_files, mark_root, read_sums, read_totals, write_sums, write_totals
from ..emr.manifest import Manifest, SourceRecord, TaskRecord, TensorRecord, recorded_path
from ..emr.report import TensorSums, make_report
from ..files import copy_into, read_json, read_json_object, write_json
from ..hub.cards import write_card
from .companions import find_absent, find_agreed, same_content
from .compare import REPORT, explain_damage
from .configuration import RUNNING, MergeConfig
from .journal import masked_names
from .plan import Plan, warn_of_size
from .sources import CONFIGURATION_FILES, open_weights
from .tensors import SHARED
from .vectors import require_restorable

_NEWER = "generation_config.json"

# Beside the weights at the root.
SUMS_FILE = "sums.safetensors"


def finish(folder: Path, plan: Plan, sums: TensorSums, base: Mapping[str, Any], *, out: Path) -> dict[str, Any]:
    """Completes the folder of a merge whose weights are written."""
    config = plan.config
    with ThreadPoolExecutor(1) as beside:
        # The weights are complete, but for sums, and reading them through for their hashes needs no interpreter.
        stored = [name for name in list_files(folder) if name.endswith(".safetensors")]
        weights = [name for name in stored if not name.endswith(SUMS_FILE)]
        hashing = beside.submit(hash_files, folder, weights) if config.with_masks else None
        _copy_companions(folder, plan)
        # After the other files: it reads the copy's configuration.
        copied = beside.submit(_identify_copy, folder / "base") if config.include_base else None
        sources = {
            "base": _record_identity(base, out),
            "tasks": {task.label: _record_identity(task.identity(), out) for task in plan.tasks},
        }
        method = _record_method(config, out)
        if config.with_masks:
            for index, task in enumerate(plan.tasks):
                write_sums(folder, task.label, sums.sums[:, index])
            write_totals(folder, sums.totals, sums.gram)
            copy_into({"emr_loader.py": Path(emr_loader.__file__)}, folder)
        kept = copied.result() if copied is not None else None
        # the sizes that came out are warned of, not those of the plan
        warnings = [text for text in plan.warnings if text not in plan.size_warnings]
        # a folder is named by what it is of the merge, not by where it lay
        for source in plan.sources:
            place = f" ({source.spec})" if source.repo_id is None else ""
            warnings = [text.replace(place, "") for text in warnings]
        report = write_report(
            folder,
            sums,
            sources=sources,
            base=sources["base"]["files"] if kept is None else kept,
            library=plan.base.library,
            warnings=warnings,
            method=method,
            masks=config.with_masks,
            measured=config.is_measured,
        )
        if hashing is not None:
            scales = compute_scales(sums.sums, sums.elements, sums.participates, config.scaling)
            require_restorable(folder, plan, sums.totals, scales)
            manifest = _make_manifest(folder, plan, sums.sums, scales, sources, kept, method)
            dataclasses.replace(manifest, files=hash_files(folder, known=hashing.result())).write(folder)
    write_card(folder, repo_id=out.name)
    return report


def _record_method(config: MergeConfig, out: Path) -> dict[str, Any]:
    """The options that decided the numbers."""
    # the others do not change what comes out, or are told elsewhere
    decisive = config.to_dict().keys() - {"base", "tasks", *RUNNING}
    record = {key: value for key, value in config.to_dict().items() if key in decisive}
    record |= config.arguments | {"rescale": config.scaling}
    if config.merge_method.deltas:
        record["deltas"] = config.merge_method.deltas
    record["statistics"] = {task: _record_place(spec, out) for task, spec in config.statistics.items()}
    return record | {"merged": config.merged and _record_place(config.merged, out)}


def _record_place(source: str, out: Path) -> str:
    """A source as an artifact names it: of a path that is there the one from the artifact."""
    return recorded_path(source, out) if Path(source).expanduser().exists() else source


def _record_identity(identity: Mapping[str, Any], out: Path) -> dict[str, Any]:
    source = identity["source"]
    return {**identity, "source": source if identity["revision"] else _record_place(source, out)}


def _copy_companions(folder: Path, plan: Plan) -> None:
    """Copies the model's companions to the root, and to each task its configuration and its own files."""
    base, dtype, tasks = plan.base.companions.all, plan.config.dtype, plan.tasks if plan.config.with_masks else ()
    # in an artifact these folders are its own
    free = {name: path for name, path in base.items() if not name.startswith(("tasks/", "base/"))}
    root = free if plan.config.with_masks else plan.companions
    copy_into(root, folder)
    agreed = (
        {} if plan.config.with_masks else find_agreed(plan.base.companions, [own.companions for own in plan.tasks])
    )
    for name, settings in agreed.items():
        # what is in the newer place goes before; tasks that have a file there tell their ends in it
        stays = name == "config.json" and not any(_NEWER in own.companions.files for own in plan.tasks)
        newer = [folder / _NEWER] * (stays and _NEWER in root)
        for path in (folder / name, *newer):
            write_json(path, read_json_object(path) | settings)
    if plan.config.include_base:
        copy_into(base, folder / "base")
    for task in tasks:
        differing = {
            name: path
            for name, path in task.companions.all.items()
            if name in CONFIGURATION_FILES or name not in root or not same_content(path, root[name])
        }
        copy_into(differing, folder / "tasks" / task.label)
    for path in (folder / "config.json", *(folder / "tasks" / task.label / "config.json" for task in tasks)):
        if dtype and plan.base.library == "transformers" and path.is_file():
            # Weights are loaded in the type that the configuration tells: the one that they were written in.
            config = read_json(path)
            write_json(path, config | dict.fromkeys(["dtype", *({"torch_dtype"} & config.keys())], dtype))
    if tasks:
        mark_root(folder, [task.label for task in tasks])


def _make_manifest(
    folder: Path,
    plan: Plan,
    sums: np.ndarray,
    scales: np.ndarray,
    sources: Mapping[str, Any],
    kept: dict[str, dict[str, Any]] | None,
    method: dict[str, Any],
) -> Manifest:
    from .. import __version__

    base = SourceRecord(**sources["base"])
    return Manifest(
        library=plan.base.library,
        base=base if kept is None else SourceRecord(base.source, base.revision, kept, "base"),
        unified={
            path.name: {"bytes": path.stat().st_size}
            for path in sorted(folder.glob("*.safetensors"))
            if path.name != SUMS_FILE
        },
        method=method,
        tensors=tuple(
            TensorRecord(row.name, row.shape, row.dtype, row.elements if row.members else 0) for row in plan.rows
        ),
        aliases=plan.matching.aliases,
        tasks={
            name: _task_record(plan, index, SourceRecord(**origin), sums[:, index], scales)
            for index, (name, origin) in enumerate(sources["tasks"].items())
        },
        version=__version__,
        deltas=plan.config.merge_method.deltas,
    )


def _task_record(plan: Plan, index: int, origin: SourceRecord, sums: np.ndarray, scales: np.ndarray) -> TaskRecord:
    task, names = plan.tasks[index], plan.matching.names[index]
    masked = [(place, row) for place, row in enumerate(plan.merged_rows) if index in row.members]
    merged = sum(row.elements for _, row in masked)
    by_tensor = plan.config.scaling in TENSOR_RESCALES
    return TaskRecord(
        origin=origin,
        architecture=None if task.library == "peft" else task.architecture,
        base_prefix=names.base_prefix,
        task_prefix=names.task_prefix,
        scale=None if by_tensor else float(scales[index]),
        density=float(sums[:, SUMS.index("mask")].sum() / merged) if merged else 0.0,
        scales={row.members[index]: float(scales[place, index]) for place, row in masked} if by_tensor else {},
        shared=tuple(item.name for item in plan.own_tensors(SHARED, task=index)),
        absent=find_absent(plan.base.companions.all, task.companions),
    )


def _identify_copy(folder: Path) -> dict[str, dict[str, Any]]:
    with open_weights("base", folder) as copy:
        return dict(copy.identity(hash_files=True)["files"])


def write_report(
    folder: Path,
    sums: TensorSums,
    *,
    sources: Mapping[str, Any],
    base: Mapping[str, Mapping[str, Any]],  # bytes and hash of its files, by name
    library: str,
    warnings: Sequence[str],
    method: Mapping[str, Any],
    masks: bool,
    measured: bool = True,
) -> dict[str, Any]:
    """Writes `report.json` with the sizes of files in the folder, anew: an artifact may share an old one."""

    def total(pattern: str) -> int:
        return sum(path.stat().st_size for path in folder.glob(pattern))

    tasks = sources["tasks"]
    # of whole files, so that what was merged and what came out can be compared
    sizes = {
        "checkpoints": sum(about["bytes"] for source in tasks.values() for about in source["files"].values()),
        "base": sum(about["bytes"] for about in base.values()),
        "unified": total("*.safetensors") - total(SUMS_FILE),
        "masks": total("tasks/*/mask.safetensors"),
        "extras": total("tasks/*/extra.safetensors"),
    }
    report = make_report([*tasks], sums, method=method, masks=masks, sizes=sizes, measured=measured)
    compared = ("artifact_and_base", "checkpoints", "one_bit_and_base")
    large = warn_of_size(*(report["sizes"][key] for key in compared)) if masks else []
    report["warnings"] = list(dict.fromkeys([*warnings, *report["warnings"], *large]))
    report |= {"plan_warnings": list(warnings), "library": library, "sources": sources}
    # of an artifact the manifest names them
    report |= {} if masks else {"files": list_files(folder)}
    write_json(folder / REPORT, report, indent=1)
    return report


def rewrite_report(folder: Path, manifest: Manifest, told: Sequence[str]) -> None:
    """[`write_report`] after tasks changed, from the sums in the folder; `told` is said of a new one."""
    before = read_json_object(folder / REPORT, optional=True)
    with explain_damage(folder / REPORT):
        sources = dict(before.get("sources", {}))
        gone = sources.get("tasks", {}).keys() - manifest.tasks.keys()
        begins = tuple(begin for name in gone for begin in (f"task {name!r} ", f"task {name!r}:", f"{name}:"))
        warnings = [text for text in [*before.get("plan_warnings", ()), *told] if not text.startswith(begins)]
    merged, tasks = manifest.merged, manifest.tasks
    masked = [masked_names(folder, manifest, task) for task in tasks]
    sums = TensorSums(
        np.array([tensor.elements for tensor in merged.values()], np.int64),
        np.array([[name in named for named in masked] for name in merged]),
        np.stack([read_sums(folder, manifest, task) for task in tasks], axis=1),
        *read_totals(folder, manifest),
    )
    write_report(
        folder,
        sums,
        sources=sources | {"tasks": {task: record.origin.as_given() for task, record in tasks.items()}},
        base=manifest.base.files,
        library=manifest.library,
        warnings=warnings,
        method=manifest.method,
        masks=True,
    )
