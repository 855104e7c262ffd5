"""What a merge writes when all weights are in place: scales, manifest, small files, report, picture, card."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from hf_ext.emr.artifact_emr import compute_scales
from hf_ext.emr.manifest_emr import TENSOR_RESCALES, Manifest, SourceRecord, TaskRecord, TensorRecord
from hf_ext.emr.ops_emr import SUMS
from hf_ext.emr.report_emr import make_report
from hf_ext.emr.sums_emr import write_sums, write_totals

from ..hub.safetensors_headers import header_length
from .configuration import MergeConfig
from .outputs import masked_parts, root_tensors
from .plan import Extra, Plan, Shared
from .sources import CONFIGURATION_FILES, PROCESSOR_FILES, TOKENIZER_FILES
from .work import TensorSums

# Beside the weights at the root.
NOT_WEIGHTS = ("state.safetensors", "sums.safetensors")
# They do not change what comes out, or are told elsewhere.
_NOT_METHOD = ("base", "tasks", "memory", "workers", "max_shard_size")


def finish(
    folder: Path,
    plan: Plan,
    extras: Sequence[Extra],
    shared: Sequence[Shared],
    sums: TensorSums,
    base: Mapping[str, Any],
    *,
    name: str,
) -> dict[str, Any]:
    """
    Completes the folder of a merge whose weights are written.

    Args:
        folder (`Path`): The folder.
        plan ([`Plan`]): What was merged.
        extras (`Sequence[Extra]`): What the tasks keep.
        shared (`Sequence[Shared]`): What the tasks have in common with the base.
        sums ([`TensorSums`]): Sums of the merge.
        base (`Mapping`): Identity of the base.
        name (`str`): What the card calls the model.

    Returns:
        `dict[str, Any]`: The report.
    """
    own_files = _copy_small_files(folder, plan)
    participates = np.array([[name is not None for name in part.task_names] for part in plan.merged], bool)
    participates = participates.reshape(len(plan.merged), len(plan.tasks))
    elements = np.array([part.elements for part in plan.merged], np.int64)
    method = method_record(plan.config)
    if plan.config.with_masks:
        scales = compute_scales(sums.tensors, elements, participates, plan.config.rescale)
        for index, task in enumerate(plan.tasks):
            write_sums(folder, task.label, sums.tensors[:, index])
        _write_manifest(folder, plan, shared, extras, sums.tensors, scales, base, method)
        write_totals(folder, sums.totals, sums.gram)
        loader = resources.files("hf_ext.emr").joinpath("emr_loader.py").read_text(encoding="utf-8")
        (folder / "emr_loader.py").write_text(loader, encoding="utf-8")
    report = make_report(
        tasks=[task.label for task in plan.tasks],
        names=[part.name for part in plan.merged],
        elements=elements,
        participates=participates,
        sums=sums.tensors,
        totals=sums.totals,
        gram=sums.gram,
        method=method,
        sizes=_sizes(folder, plan),
    )
    report["warnings"] = [*plan.warnings, *report["warnings"]]
    report["files"] = own_files
    report["library"] = plan.base.library
    report["sources"] = {"base": dict(base), "tasks": {task.label: task.identity() for task in plan.tasks}}
    _write_report(folder, report, name)
    return report


def method_record(config: MergeConfig) -> dict[str, Any]:
    """
    The options that decided the numbers.

    Args:
        config ([`MergeConfig`]): The configuration.

    Returns:
        `dict[str, Any]`: For `emr.json`.
    """
    return {key: value for key, value in config.to_dict().items() if key not in _NOT_METHOD}


def _copy_small_files(folder: Path, plan: Plan) -> dict[str, list[str]]:
    """The base's files to the root, every task's configuration and what else is its own to the task; names of that."""
    root = plan.base.small_files()
    _copy(root, folder)
    if plan.config.include_base:
        _copy(root, folder / "base")
    own_files: dict[str, list[str]] = {}
    for task in plan.tasks if plan.config.with_masks else ():
        place = folder / "tasks" / task.label
        _copy(task.small_files(CONFIGURATION_FILES), place)
        if task.config and task.library != "peft" and not (place / "config.json").is_file():
            # full weights of an adapter: nobody has written their configuration yet
            (place / "config.json").write_text(json.dumps(task.config, indent=2) + "\n", encoding="utf-8")
        candidates = task.small_files((*TOKENIZER_FILES, *PROCESSOR_FILES))
        own = {name: path for name, path in candidates.items() if name not in root or not _same(path, root[name])}
        _copy(own, place)
        if own:
            own_files[task.label] = sorted(own)
    return own_files


def _copy(files: Mapping[str, Path], folder: Path) -> None:
    for name, path in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def _same(first: Path, second: Path) -> bool:
    """Whether two files say the same; JSON may be formatted differently."""
    ours, theirs = first.read_bytes(), second.read_bytes()
    if ours == theirs or first.suffix != ".json":
        return ours == theirs
    try:
        return bool(json.loads(ours) == json.loads(theirs))
    except ValueError:
        return False


def _write_manifest(
    folder: Path,
    plan: Plan,
    shared: Sequence[Shared],
    extras: Sequence[Extra],
    sums: np.ndarray,
    scales: np.ndarray,
    base: Mapping[str, Any],
    method: dict[str, Any],
) -> None:
    elements = {part.name: part.elements for part in plan.merged}
    tensors = tuple(
        TensorRecord(name, tuple(shape), dtype, elements.get(name, 0))
        for name, (dtype, shape) in root_tensors(plan).items()
    )
    record = SourceRecord(base["source"], base["revision"], base["files"])
    if plan.config.include_base:
        record = SourceRecord(base["source"], base["revision"], _weight_files(folder / "base"), "base")
    tasks = {}
    for index, task in enumerate(plan.tasks):
        own_shared = tuple(item.name for item in shared if item.task == index)
        tails = {item.name: tuple(item.shape) for item in extras if item.task == index and item.start}
        tasks[task.label] = _task_record(plan, index, sums[:, index], scales, own_shared, tails)
    from .. import __version__

    Manifest(
        library=plan.base.library,
        base=record,
        unified={
            path.name: {"bytes": path.stat().st_size}
            for path in sorted(folder.glob("*.safetensors"))
            if path.name not in NOT_WEIGHTS
        },
        method=method,
        tensors=tensors,
        aliases=plan.aliases,
        tasks=tasks,
        version=__version__,
    ).write(folder)


def _task_record(
    plan: Plan,
    index: int,
    sums: np.ndarray,
    scales: np.ndarray,
    shared: tuple[str, ...],
    tails: dict[str, tuple[int, ...]],
) -> TaskRecord:
    task, parts = plan.tasks[index], masked_parts(plan, index)
    identity = task.identity()
    merged = sum(part.elements for part in parts.values())
    rows = {part.name: row for row, part in enumerate(plan.merged)}
    by_tensor = plan.config.rescale in TENSOR_RESCALES
    architectures = task.config.get("architectures") or [task.config.get("_class_name")]
    base_prefix, task_prefix = plan.renames[index]
    return TaskRecord(
        origin=SourceRecord(identity["source"], identity["revision"], identity["files"]),
        architecture=architectures[0],
        base_prefix=base_prefix,
        task_prefix=task_prefix,
        scale=None if by_tensor else float(scales[index]),
        density=float(sums[:, SUMS.index("mask")].sum() / merged) if merged else 0.0,
        scales={name: float(scales[rows[part.name], index]) for name, part in parts.items()} if by_tensor else {},
        shared=shared,
        tails=tails,
    )


def _weight_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Lengths and hashes of weight files that were just written."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as file:
            prefix = file.read(8)
            header = file.read(header_length(prefix, path.stat().st_size, path.name))
        found[path.name] = {
            "bytes": path.stat().st_size,
            "sha256": _hash(path),
            "header_sha256": hashlib.sha256(prefix + header).hexdigest(),
        }
    return found


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sizes(folder: Path, plan: Plan) -> dict[str, int]:
    def total(pattern: str) -> int:
        return sum(path.stat().st_size for path in folder.glob(pattern))

    return {
        "checkpoints": plan.checkpoints_bytes,
        "base": plan.base.nbytes,
        "unified": total("*.safetensors") - sum(map(total, NOT_WEIGHTS)),
        "masks": total("tasks/*/mask.safetensors"),
        "extras": total("tasks/*/extra.safetensors"),
    }


def _write_report(folder: Path, report: Mapping[str, Any], name: str) -> None:
    from hf_ext.emr.pictures_emr import draw_report

    from ..hub.cards import write_card

    text = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / "report.json").write_text(text + "\n", encoding="utf-8")
    draw_report(report, folder / "report.png")
    write_card(folder, repo_id=name)
