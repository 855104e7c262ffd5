"""The plan of a merge as a table for the terminal, and as plain values for JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from hf_ext.emr.arithmetic import find_kernels

from .plan import Plan
from .sources import Source, describe_label, size_text
from .tensors import COMPARED, KEPT, SHOWN_NAMES, SKIPPED, Own, type_name


def plan_lines(plan: Plan) -> list[str]:
    """The lines of a plan: sources, treatment of the tensors, sizes, memory, warnings."""
    rows = [(describe_label(source.label).replace("'", ""), _source_text(source)) for source in plan.sources]
    rows.append(("method", _method_text(plan)))
    for key, items in (("merged", plan.merged_rows), ("base's values", plan.copied_rows)):
        rows += [(key, _count_text({row.name: row.elements for row in items}))] if items else []
    rows += [("tied", f"{name} = {kept}") for name, kept in plan.matching.aliases.items() if name in plan.base.tensors]
    for index, task in enumerate(plan.tasks):
        rows += [(f"  {task.label}", text) for text in _task_texts(plan, index)]
    rows += _size_rows(plan)
    rows += [("warning", text) for text in plan.warnings]
    width = max(len(key) for key, _ in rows)
    return [f"{key:<{width}}  {text}" for key, text in rows]


def plan_values(plan: Plan) -> dict[str, Any]:
    """The same as plain values: configuration, sources, names of the tensors by their treatment, bytes, warnings."""
    numbers = ("bytes_read", "bytes_written", "result_bytes", "checkpoints_bytes", "peak_memory")
    return {
        "config": plan.config.to_dict() | plan.config.arguments,
        "base": _source_values(plan.base),
        "tasks": {task.label: _source_values(task) | _task_values(plan, i) for i, task in enumerate(plan.tasks)},
        "merged": [row.name for row in plan.merged_rows],
        "copied": [row.name for row in plan.copied_rows],
        **{name: getattr(plan, name) for name in numbers},
        "warnings": plan.warnings,
    }


def _stored(plan: Plan, index: int) -> list[Own]:
    """The tensors stored for a task, as far as headers tell; certain ones first."""
    return plan.own_tensors(KEPT, task=index) + plan.own_tensors(COMPARED, task=index)


def _task_values(plan: Plan, index: int) -> dict[str, Any]:
    about = {"extras": _stored(plan, index), "skipped": plan.own_tensors(SKIPPED, task=index)}
    return {key: [{"name": item.name, "reason": item.reason} for item in items] for key, items in about.items()}


def _source_values(source: Source) -> dict[str, Any]:
    about = {"library": source.library, "architecture": source.architecture, "bytes": source.nbytes}
    return {"source": source.repo_id or source.spec, "revision": source.commit, **about}


def _source_text(source: Source) -> str:
    place = source.spec if source.commit is None else f"{source.repo_id}@{source.commit[:12]}"
    types = sorted({type_name(info.dtype) for info in source.tensors.values() if info.dtype.is_floating_point})
    about = [source.architecture or source.library, f"{len(source.tensors)} tensors", size_text(source.nbytes), *types]
    return f"{place}: {', '.join(about)}"


def _method_text(plan: Plan) -> str:
    config = plan.config
    text = f"{config.method} without {config.drop:.0%} of each task vector" if config.drop else config.method
    if config.merge_method.deltas:
        return f"{text}, signs and a scale for each tensor, no unified model"
    return f"{text}, masks, rescale {config.rescale}" if config.with_masks else f"{text}, one model"


def _count_text(elements: Mapping[str, int]) -> str:
    shown = ", ".join([*elements][:SHOWN_NAMES]) + (", …" if len(elements) > SHOWN_NAMES else "")
    return f"{len(elements)} tensors, {sum(elements.values()):,} elements: {shown}"


def _task_texts(plan: Plan, index: int) -> list[str]:
    """The tensors of one task that are treated specially, grouped by the reason."""
    texts = []
    groups: dict[str, list[Own]] = defaultdict(list)
    for item in _stored(plan, index):
        # one model has no place for what is a task's alone
        rule = item.rule if plan.config.with_masks else "left out"
        groups[f"{rule}: {item.reason}"].append(item)
    for reason, items in groups.items():
        count = _count_text({item.name: item.nbytes // item.dtype.itemsize for item in items})
        texts.append(f"{reason}: {count} ({size_text(sum(item.nbytes for item in items))})")
    absent = sum(index not in row.members for row in plan.merged_rows)
    if absent:
        texts.append(f"does not take part in {absent} merged tensors")
    return texts + [f"skipped {item.name}: {item.reason}" for item in plan.own_tensors(SKIPPED, task=index)]


def _size_rows(plan: Plan) -> list[tuple[str, str]]:
    count, base = len(plan.tasks), plan.base.nbytes
    noun = "checkpoint" if count == 1 else "checkpoints"
    share = plan.result_bytes / plan.checkpoints_bytes
    with_base = (plan.result_bytes + base) / (plan.checkpoints_bytes + base)
    masks = f" (root {size_text(plan.unified_bytes)}, each mask {size_text(max(plan.mask_bytes))})"
    rows = [
        ("reads", f"{size_text(plan.bytes_read)} of tensors; {size_text(plan.header_bytes)} of headers so far"),
        ("writes", f"{size_text(plan.bytes_written)}{masks if plan.config.with_masks else ''}"),
        (
            "result",
            f"{size_text(plan.result_bytes)} for {count} {noun} of {size_text(plan.checkpoints_bytes)} "
            f"({share:.0%}); with the base {size_text(plan.result_bytes + base)} for "
            f"{size_text(plan.checkpoints_bytes + base)} ({with_base:.0%})",
        ),
        ("memory", f"{size_text(plan.peak_memory)} of buffers beside the process itself"),
    ]
    # to ask takes a second; what is not measured needs no kernels
    if plan.config.is_measured and find_kernels("cpu").run_files is None:
        rows.append(("speed", "plain torch; with numba a merge is 3 times faster: pip install 'hf-ext[fast]'"))
    return rows
