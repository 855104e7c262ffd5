"""What a merge will do and what it costs, with a table for the terminal and JSON. `plan` makes it."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch

from .configuration import MergeConfig
from .matching import task_name
from .sources import Source
from .tensor_rules import Copied, Extra, Part, Shared

_SHOWN_NAMES = 3
# A mask's tensors start at multiples of this.
_MASK_ALIGNMENT = 64
_SUMS_BYTES = 8 * 10


@dataclass(frozen=True)
class Plan:
    """
    What a merge will do. Made by [`make_plan`]; use it as a context manager, or call [`~Plan.close`].

    Attributes:
        config ([`MergeConfig`]): The configuration.
        base ([`Source`]): The base, opened.
        tasks (`tuple[Source, ...]`): The tasks, opened, in the order of the configuration.
        merged (`tuple[Part, ...]`): Tensors that are merged, in the order of the base.
        copied (`tuple[Copied, ...]`): Tensors that keep the base's values, in the order of the base.
        extras (`tuple[Extra, ...]`): Tensors stored per task.
        undecided (`tuple[Extra, ...]`): Stored per task unless they equal the base's: [`resolve_plan`] compares.
        shared (`tuple[Shared, ...]`): Tensors that are known to equal the base's.
        skipped (`tuple[tuple[int, str, str], ...]`): Task, name and reason of what is not stored at all.
        renames (`tuple[tuple[str, str], ...]`): Prefix of the base and of the task, for each task.
        aliases (`dict[str, str]`): Other names of merged or copied tensors, by the names of the base.
        given ([`Source`] or `None`): The merged model of method `"given"`, opened.
        given_names (`dict[str, str]`): Names in it, by the names of the base.
        warnings (`list[str]`): What the user should look at.
    """

    config: MergeConfig
    base: Source
    tasks: tuple[Source, ...]
    merged: tuple[Part, ...]
    copied: tuple[Copied, ...]
    extras: tuple[Extra, ...]
    undecided: tuple[Extra, ...]
    shared: tuple[Shared, ...]
    skipped: tuple[tuple[int, str, str], ...]
    renames: tuple[tuple[str, str], ...]
    aliases: dict[str, str]
    given: Source | None = None
    given_names: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors that the merge will read, at most."""
        parts = sum(
            part.elements
            * (
                self.base.tensors[part.name].dtype.itemsize
                + sum(
                    task.tensors[name].dtype.itemsize
                    for task, name in zip(self.tasks, part.task_names, strict=True)
                    if name is not None
                )
            )
            for part in self.merged
        )
        given = 0 if self.given is None else sum(self.given.tensors[name].nbytes for name in self.given_names.values())
        compared = 2 * sum(item.nbytes for item in self.undecided)
        tails = sum(
            (math.prod(part.shape) - part.elements) * self.base.tensors[part.name].dtype.itemsize
            for part in self.merged
        )
        copies = sum(_nbytes(item) for item in self.copied) + sum(item.nbytes for item in self.extras)
        return parts + tails + given + compared + copies + (self.base_bytes if self.config.include_base else 0)

    @property
    def unified_bytes(self) -> int:
        """Bytes of the root weights."""
        return sum(map(_nbytes, self.merged)) + sum(map(_nbytes, self.copied))

    @property
    def mask_bytes(self) -> tuple[int, ...]:
        """Bytes of each task's mask."""
        return tuple(
            sum(_mask_bytes(part.elements) for part in self.merged if part.task_names[index] is not None)
            for index in range(len(self.tasks))
        )

    @property
    def extra_bytes(self) -> tuple[int, ...]:
        """Bytes of each task's own tensors, at most: the undecided ones count."""
        return tuple(
            sum(item.nbytes for item in (*self.extras, *self.undecided) if item.task == index)
            for index in range(len(self.tasks))
        )

    @property
    def result_bytes(self) -> int:
        """Bytes of the result's weights: root, masks, tensors and sums of the tasks; without a copy of the base."""
        if not self.config.with_masks:
            return self.unified_bytes
        sums = _SUMS_BYTES * len(self.merged) * len(self.tasks)
        return self.unified_bytes + sum(self.mask_bytes) + sum(self.extra_bytes) + sums

    @property
    def bytes_written(self) -> int:
        """Bytes of weights that the merge will write."""
        return self.result_bytes + (self.base_bytes if self.config.include_base else 0)

    @property
    def base_bytes(self) -> int:
        """Bytes of a copy of the base."""
        return sum(info.nbytes for info in self.base.tensors.values())

    @property
    def checkpoints_bytes(self) -> int:
        """Bytes of the tasks' checkpoints, which the result stands in for."""
        return sum(task.nbytes for task in self.tasks)

    @property
    def peak_memory(self) -> int:
        """Bytes of all I/O buffers, beside the process itself."""
        return self.config.memory_bytes

    @property
    def header_bytes(self) -> int:
        """Bytes of weights files that were read so far."""
        return sum(source.bytes_read for source in self._sources)

    def task_tensor(self, index: int, name: str) -> str:
        """The name that a tensor of the base has in a task, if it is there."""
        return task_name(name, self.renames[index])

    def lines(self) -> list[str]:
        """What is read, what happens to the tensors, sizes, memory, warnings: lines of a table."""
        rows = [("base", _source_text(self.base))]
        rows += [(f"task {task.label}", _source_text(task)) for task in self.tasks]
        if self.given is not None:
            rows.append(("merged model", _source_text(self.given)))
        rows.append(("method", _method_text(self)))
        rows.append(("merged", _count_text([part.name for part in self.merged], _elements(self.merged))))
        partial = [part for part in self.merged if part.elements != math.prod(part.shape)]
        if partial:
            rows.append(
                ("of these in part", ", ".join(f"{part.name} ({part.elements:,} elements)" for part in partial))
            )
        if self.copied:
            rows.append(("base's values", _count_text([item.name for item in self.copied], _elements(self.copied))))
        rows += [("tied", f"{name} = {kept}") for name, kept in self.aliases.items() if name in self.base.tensors]
        for index, task in enumerate(self.tasks):
            rows += _task_rows(self, index, task.label)
        rows += _size_rows(self)
        rows += [("warning", text) for text in self.warnings]
        width = max(len(key) for key, _ in rows)
        return [f"{key:<{width}}  {text}" for key, text in rows]

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        extras = [*((item, False) for item in self.extras), *((item, True) for item in self.undecided)]
        return {
            "config": self.config.to_dict(),
            "base": _source_dict(self.base),
            "merged_model": None if self.given is None else _source_dict(self.given),
            "tasks": {
                task.label: _source_dict(task)
                | {
                    "base_prefix": self.renames[index][0],
                    "task_prefix": self.renames[index][1],
                    "mask_bytes": self.mask_bytes[index],
                    "extra_bytes": self.extra_bytes[index],
                    "extras": [
                        _tensor_dict(item) | {"start": item.start, "reason": item.reason, "compared_first": compared}
                        for item, compared in extras
                        if item.task == index
                    ],
                    "shared": [item.name for item in self.shared if item.task == index],
                    "skipped": [
                        {"name": name, "reason": reason} for task, name, reason in self.skipped if task == index
                    ],
                }
                for index, task in enumerate(self.tasks)
            },
            "merged": [
                _tensor_dict(part) | {"elements": part.elements, "task_names": list(part.task_names)}
                for part in self.merged
            ],
            "copied": [_tensor_dict(item) for item in self.copied],
            "aliases": self.aliases,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "result_bytes": self.result_bytes,
            "base_bytes": self.base.nbytes,
            "checkpoints_bytes": self.checkpoints_bytes,
            "peak_memory": self.peak_memory,
            "warnings": self.warnings,
        }

    @property
    def _sources(self) -> tuple[Source, ...]:
        return (self.base, *self.tasks) if self.given is None else (self.base, *self.tasks, self.given)

    def close(self) -> None:
        """Closes the checkpoints."""
        for source in self._sources:
            source.close()

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def size_text(count: int) -> str:
    """A number of bytes for people."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


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
    return [
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


def _nbytes(item: Part | Copied) -> int:
    return math.prod(item.shape) * item.dtype.itemsize


def _mask_bytes(elements: int) -> int:
    return math.ceil(math.ceil(elements / 8) / _MASK_ALIGNMENT) * _MASK_ALIGNMENT
