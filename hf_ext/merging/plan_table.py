"""A plan as a table for the terminal and as JSON."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from .sources import Source
from .tensor_rules import Copied, Extra, Part

if TYPE_CHECKING:
    from .plan import Plan

_SHOWN_NAMES = 3


def size_text(count: int) -> str:
    """
    A number of bytes for people.

    Args:
        count (`int`): Bytes.

    Returns:
        `str`: In the largest unit that leaves at least 1, in powers of 1000.
    """
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def plan_lines(plan: Plan) -> list[str]:
    """
    The plan as lines of text.

    Args:
        plan ([`Plan`]): The plan.

    Returns:
        `list[str]`: What is read, what happens to the tensors, sizes, memory, warnings.
    """
    rows = [("base", _source_text(plan.base))]
    rows += [(f"task {task.label}", _source_text(task)) for task in plan.tasks]
    if plan.given is not None:
        rows.append(("merged model", _source_text(plan.given)))
    rows.append(("method", _method_text(plan)))
    rows.append(("merged", _count_text([part.name for part in plan.merged], _elements(plan.merged))))
    partial = [part for part in plan.merged if part.elements != math.prod(part.shape)]
    if partial:
        rows.append(("of these in part", ", ".join(f"{part.name} ({part.elements:,} elements)" for part in partial)))
    if plan.copied:
        rows.append(("base's values", _count_text([item.name for item in plan.copied], _elements(plan.copied))))
    rows += [("tied", f"{name} = {kept}") for name, kept in plan.aliases.items() if name in plan.base.tensors]
    for index, task in enumerate(plan.tasks):
        rows += _task_rows(plan, index, task.label)
    rows += _size_rows(plan)
    rows += [("warning", text) for text in plan.warnings]
    width = max(len(key) for key, _ in rows)
    return [f"{key:<{width}}  {text}" for key, text in rows]


def plan_dict(plan: Plan) -> dict[str, Any]:
    """
    The plan as plain values.

    Args:
        plan ([`Plan`]): The plan.

    Returns:
        `dict[str, Any]`: Configuration, sources, tensors, sizes in bytes, warnings.
    """
    extras = [*((item, False) for item in plan.extras), *((item, True) for item in plan.undecided)]
    return {
        "config": plan.config.to_dict(),
        "base": _source_dict(plan.base),
        "merged_model": None if plan.given is None else _source_dict(plan.given),
        "tasks": {
            task.label: _source_dict(task)
            | {
                "base_prefix": plan.renames[index][0],
                "task_prefix": plan.renames[index][1],
                "mask_bytes": plan.mask_bytes[index],
                "extra_bytes": plan.extra_bytes[index],
                "extras": [
                    _tensor_dict(item) | {"start": item.start, "reason": item.reason, "compared_first": compared}
                    for item, compared in extras
                    if item.task == index
                ],
                "shared": [item.name for item in plan.shared if item.task == index],
                "skipped": [{"name": name, "reason": reason} for task, name, reason in plan.skipped if task == index],
            }
            for index, task in enumerate(plan.tasks)
        },
        "merged": [
            _tensor_dict(part) | {"elements": part.elements, "task_names": list(part.task_names)}
            for part in plan.merged
        ],
        "copied": [_tensor_dict(item) for item in plan.copied],
        "aliases": plan.aliases,
        "bytes_read": plan.bytes_read,
        "bytes_written": plan.bytes_written,
        "result_bytes": plan.result_bytes,
        "base_bytes": plan.base.nbytes,
        "checkpoints_bytes": plan.checkpoints_bytes,
        "peak_memory": plan.peak_memory,
        "warnings": plan.warnings,
    }


def _tensor_dict(item: Part | Copied | Extra) -> dict[str, Any]:
    return {"name": item.name, "shape": list(item.shape), "dtype": _type_name(item.dtype)}


def _source_dict(source: Source) -> dict[str, Any]:
    return {
        "source": source.repo_id or source.spec,
        "revision": source.commit,
        "library": source.library,
        "architecture": source.architecture,
        "tensors": len(source.tensors),
        "bytes": source.nbytes,
    }


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _elements(items: tuple[Part, ...] | tuple[Copied, ...]) -> int:
    return sum(item.elements if isinstance(item, Part) else math.prod(item.shape) for item in items)


def _source_text(source: Source) -> str:
    place = source.spec if source.commit is None else f"{source.repo_id}@{source.commit[:12]}"
    types = sorted({_type_name(info.dtype) for info in source.tensors.values() if info.dtype.is_floating_point})
    about = [source.architecture or source.library, f"{len(source.tensors)} tensors", size_text(source.nbytes), *types]
    return f"{place}: {', '.join(about)}"


def _method_text(plan: Plan) -> str:
    config = plan.config
    text = f"{config.method} without {config.drop:.0%} of each task vector" if config.drop else config.method
    return f"{text}, masks, rescale {config.rescale}" if config.with_masks else f"{text}, one model"


def _count_text(names: list[str], elements: int) -> str:
    shown = ", ".join(names[:_SHOWN_NAMES]) + (", …" if len(names) > _SHOWN_NAMES else "")
    return f"{len(names)} tensors, {elements:,} elements: {shown}"


def _task_rows(plan: Plan, index: int, label: str) -> list[tuple[str, str]]:
    """What is special about one task, grouped by the reason."""
    rows = []
    groups: dict[str, list[Extra]] = defaultdict(list)
    for item in plan.extras:
        groups[f"kept: {item.reason}"].append(item)
    for item in plan.undecided:
        groups[f"kept if not the base's: {item.reason}"].append(item)
    for reason, items in groups.items():
        mine = [item for item in items if item.task == index]
        if mine:
            stored = size_text(sum(item.nbytes for item in mine))
            count = _count_text([item.name for item in mine], sum(item.nbytes // item.dtype.itemsize for item in mine))
            rows.append((f"  {label}", f"{reason}: {count} ({stored})"))
    shared = {item.name for item in plan.shared if item.task == index}
    if shared:
        rows.append((f"  {label}", f"{len(shared)} tensors are the base's"))
    absent = sum(
        part.task_names[index] is None and plan.task_tensor(index, part.name) not in shared for part in plan.merged
    )
    if absent:
        rows.append((f"  {label}", f"does not take part in {absent} merged tensors"))
    rows += [(f"  {label}", f"skipped {name}: {reason}") for task, name, reason in plan.skipped if task == index]
    return rows


def _size_rows(plan: Plan) -> list[tuple[str, str]]:
    count, base = len(plan.tasks), plan.base.nbytes
    noun = "checkpoint" if count == 1 else "checkpoints"
    share = plan.result_bytes / plan.checkpoints_bytes
    with_base = (plan.result_bytes + base) / (plan.checkpoints_bytes + base)
    masks = f" (root {size_text(plan.unified_bytes)}, each mask {size_text(max(plan.mask_bytes))})"
    state = f", of these {size_text(plan.state_bytes)} to add tasks exactly" if plan.config.keep_state else ""
    return [
        ("reads", f"{size_text(plan.bytes_read)} of tensors; {size_text(plan.header_bytes)} of headers so far"),
        ("writes", f"{size_text(plan.bytes_written)}{masks if plan.config.with_masks else ''}{state}"),
        (
            "result",
            f"{size_text(plan.result_bytes)} for {count} {noun} of {size_text(plan.checkpoints_bytes)} "
            f"({share:.0%}); with the base {size_text(plan.result_bytes + base)} for "
            f"{size_text(plan.checkpoints_bytes + base)} ({with_base:.0%})",
        ),
        ("memory", f"{size_text(plan.peak_memory)} of buffers beside the process itself"),
    ]
