"""Tasks that are peft adapters: refused with advice, read as full weights, or merged among themselves.

Among themselves: (IA)³ from a base of ones; LoRA only where all tasks have one and the same A, from a base with B = 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .configuration import MergeConfig
from .lora import BIAS, DeltaSource, is_adapter_part, lora_modules, refuse_variants
from .matching import described, provenance_warnings
from .plan_table import size_text
from .sources import Source

# Settings that must agree for adapters to be merged among themselves.
_COMMON = ("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out")


def resolve_adapters(
    config: MergeConfig, base: Source, tasks: tuple[Source, ...]
) -> tuple[Source, tuple[Source, ...], list[str]]:
    """Puts in the place of adapters what is merged for them."""
    if base.library == "peft":
        raise ValueError(f"{described(base)} is an adapter; give the model that it belongs to as base.")
    adapters = [task for task in tasks if task.library == "peft"]
    if not adapters:
        return base, tasks, []
    if config.adapters == "refuse":
        raise ValueError(_advice(base, adapters))
    warnings = [warning for task in adapters for warning in provenance_warnings(base, task)]
    if config.adapters == "delta":
        return base, tuple(DeltaSource(task, base) if task.library == "peft" else task for task in tasks), warnings
    if len(adapters) < len(tasks):
        others = [task.label for task in tasks if task.library != "peft"]
        raise ValueError(f"adapters: adapter merges adapters only, and {others} are none; use adapters: delta.")
    return _common_base(base, tasks), tasks, warnings


class BaseAdapter(Source):
    """
    The adapter that changes nothing, as the base of adapters that are merged among themselves: ones for (IA)³; for
    LoRA the common A, and B = 0.

    Args:
        base ([`Source`]): The base model, for its name only.
        tasks (`tuple[Source, ...]`): The adapters; they must stay open.
    """

    def __init__(self, base: Source, tasks: tuple[Source, ...]) -> None:
        first = tasks[0]
        super().__init__("base", base.spec, first.checkpoint, first.place)
        self._holders = {name: task for task in reversed(tasks) for name in task.tensors if is_adapter_part(name)}
        self.tensors = {
            name: self._holders[name].tensors[name] for task in tasks for name in task.tensors if name in self._holders
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    def read_into(self, name: str, start: int, stop: int, out: torch.Tensor) -> None:
        """As [`Source.read_into`]."""
        if name.endswith(".lora_A.weight"):
            self._holders[name].read_into(name, start, stop, out)
        else:
            out.fill_(1.0 if name.endswith("ia3_l") else 0.0)

    def location(self, name: str) -> None:
        """As [`Source.location`]: the elements lie nowhere."""

    def will_need(self, name: str, start: int, stop: int) -> None:
        """As [`Source.will_need`]; there is nothing to fetch."""

    def identity(self, *, hash_files: bool = False) -> dict[str, Any]:
        """As [`Source.identity`]; it has no files of its own."""
        return {"source": self.spec, "revision": None, "files": {}}

    def fingerprint(self) -> dict[str, Any]:
        """As [`Source.fingerprint`]; the tasks' say all."""
        return self.identity()

    def close(self) -> None:
        """Nothing to close: the files are the tasks'."""


def _common_base(base: Source, tasks: tuple[Source, ...]) -> Source:
    """The base of the adapters, after what speaks against merging them has been refused."""
    for task in tasks:
        if task.config.get("peft_type") != "IA3":
            refuse_variants(task)
        for key in _COMMON:
            ours, theirs = tasks[0].config.get(key), task.config.get(key)
            if ours != theirs:
                raise ValueError(
                    f"{described(task)} has {key} {theirs!r} and {described(tasks[0])} has {ours!r}: their weights do "
                    "not mean the same. Use adapters: delta, which merges the full weights that LoRA gives."
                )
        odd = [name for name in task.tensors if ".lora_embedding_" in name or name.endswith(BIAS)]
        if odd:
            raise ValueError(f"{described(task)}: {odd[0]} is not merged among adapters; use adapters: delta.")
    virtual = BaseAdapter(base, tasks)
    for task in tasks:
        common = frozenset(name for name in task.tensors if name.endswith(".lora_A.weight"))
        for name in common:
            _require_common(virtual, task, name)
        task.same_as_base = common
        task.tensors = {name: info for name, info in task.tensors.items() if name not in common}
    base.close()
    return virtual


def _require_common(virtual: BaseAdapter, task: Source, name: str) -> None:
    same_form = virtual.tensors[name].shape == task.tensors[name].shape
    if not same_form or not virtual.read(name).equal(task.read(name)):
        raise ValueError(
            f"{described(task)}: {name} is not the same as in the other tasks, so that the signs of lora_B cannot be "
            "compared. Use adapters: delta, which merges the full weights, or keep the adapters as they are."
        )


def _advice(base: Source, adapters: Sequence[Source]) -> str:
    """Why adapters are better kept, in numbers."""
    names = ", ".join(repr(task.label) for task in adapters)
    lines = [f"{names} are peft adapters, and adapters: refuse is set."]
    for task in adapters:
        if task.config.get("peft_type") != "LORA":
            continue
        shapes = [
            (task.tensors[second].shape, task.tensors[first].shape) for first, second in lora_modules(task).values()
        ]
        matrices = [(b[0], math.prod(a[1:]), a[0]) for b, a in shapes]
        mask = sum(rows * columns for rows, columns, _ in matrices) // 8
        rows, columns, rank = max(matrices, key=lambda item: item[0] * item[1])
        bits = 8 * next(iter(task.tensors.values())).dtype.itemsize
        even = rows * columns / (bits * (rows + columns))
        lines.append(
            f"{task.label!r}: the adapter is {size_text(task.nbytes)} and exact, a mask of what it changes "
            f"{size_text(mask)}; for its largest matrix, {rows} by {columns}, a mask is smaller above rank "
            f"{even:.0f}, and this one has rank {rank}."
        )
    lines.append(
        "Keep the adapters as they are; or set adapters: delta to merge the full weights that LoRA gives; or "
        "adapters: adapter for (IA)³, and for LoRA whose lora_A is the same in all tasks."
    )
    return " ".join(lines)
