"""What happens to each tensor of a merge: merged, copied from the base, or kept by a task (section 2 of the rules)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_ext.hub.safetensors_headers import TensorInfo

from .configuration import MergeConfig
from .matching import (
    base_name,
    described,
    is_computed_buffer,
    is_running_statistic,
    meta_model,
    partners,
    refuse_little_overlap,
    refuse_other_tokens,
    task_name,
    vocabulary_size,
)
from .sources import Source

TIED = "tied to another tensor in the base"


@dataclass(frozen=True)
class Part:
    """
    A tensor that is merged.

    Args:
        name (`str`): Name in the base.
        shape (`tuple[int, ...]`): Shape in the base.
        dtype (`torch.dtype`): Type of the result.
        elements (`int`): Leading elements that are merged: all, but for a resized vocabulary.
        task_names (`tuple[str | None, ...]`): Name in each task; `None` where it does not take part.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    elements: int
    task_names: tuple[str | None, ...]


@dataclass(frozen=True)
class Copied:
    """
    A tensor of the base that goes to the result's root weights as it is.

    Args:
        name (`str`): Name in the base.
        shape (`tuple[int, ...]`): Shape.
        dtype (`torch.dtype`): Type.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Extra:
    """
    A tensor, or the end of one, that is stored for one task as it is.

    Args:
        task (`int`): Index of the task.
        name (`str`): Name in the task.
        shape (`tuple[int, ...]`): Shape of the whole tensor.
        dtype (`torch.dtype`): Type.
        start (`int`): First element that is stored; more than 0 only for what a merged vocabulary leaves over.
        reason (`str`): Why.
    """

    task: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    reason: str

    @property
    def nbytes(self) -> int:
        """Bytes that are stored."""
        return (math.prod(self.shape) - self.start) * self.dtype.itemsize


@dataclass(frozen=True)
class Shared:
    """
    A tensor of a task that equals the base's.

    Args:
        task (`int`): Index of the task.
        name (`str`): Name in the task.
    """

    task: int
    name: str


class SortedTensors:
    """
    The tensors of a merge, sorted by what happens to them. Making it sorts them.

    Args:
        config ([`MergeConfig`]): The configuration.
        base ([`Source`]): The base.
        tasks (`tuple[Source, ...]`): The tasks.
        renames (`tuple[tuple[str, str], ...]`): Prefix of the base and of the task, for each task.
        aliases (`dict[str, str]`): Other names of tensors of the base.

    Raises:
        ValueError: A task does not fit the base, or the configuration forbids what it would take.
    """

    def __init__(
        self,
        config: MergeConfig,
        base: Source,
        tasks: tuple[Source, ...],
        renames: tuple[tuple[str, str], ...],
        aliases: dict[str, str],
    ) -> None:
        self.merged: list[Part] = []
        self.copied: list[Copied] = []
        self.extras: list[Extra] = []
        self.undecided: list[Extra] = []
        self.shared: list[Shared] = []
        self.skipped: list[tuple[int, str, str]] = []
        self._config = config
        self._base = base
        self._tasks = tasks
        self._renames = renames
        self._aliases = aliases
        self._excluded = [re.compile(pattern) for pattern in config.exclude]
        self._same_tokens: set[tuple[int, int]] = set()
        self._pairs = [partners(base.tensors, task.tensors, names) for task, names in zip(tasks, renames, strict=True)]
        for index in range(len(tasks)):
            self._refuse_misfit(index)
        for name, info in base.tensors.items():
            if name not in aliases:
                self._sort(name, info)
        for index in range(len(tasks)):
            self._sort_rest(index)
        if not self.merged:
            raise ValueError(
                f"nothing to merge: every floating-point tensor of {described(base)} is excluded, kept raw, or of "
                "another shape in the tasks. Check base, tasks, exclude and small_raw."
            )

    def _refuse_misfit(self, index: int) -> None:
        task = self._tasks[index]
        fitting = [
            name
            for name, theirs in self._pairs[index].items()
            if self._base.tensors[name].dtype.is_floating_point
            and (self._base.tensors[name].shape == task.tensors[theirs].shape or self._is_resized(index, name, theirs))
        ]
        refuse_little_overlap(self._base, task, self._pairs[index], fitting)

    def _sort(self, name: str, info: TensorInfo) -> None:
        """Decides on one tensor of the base."""
        holders = [pairs.get(name) for pairs in self._pairs]
        for index, task in enumerate(self._tasks):
            if name in task.same_as_base:
                self.shared.append(Shared(index, task_name(name, self._renames[index])))
        reason, compared = self._raw_reason(name, info)
        if reason is None:
            taking_part = {
                index: theirs
                for index, theirs in enumerate(holders)
                if theirs is not None and self._takes_part(index, name, theirs)
            }
        else:
            taking_part = {}
            for index, theirs in enumerate(holders):
                if theirs is not None:
                    self._keep(index, theirs, reason, compared=compared and self._same_form(index, name, theirs))
        if taking_part:
            self._merge(name, info, taking_part)
        else:
            self.copied.append(Copied(name, info.shape, info.dtype))

    def _raw_reason(self, name: str, info: TensorInfo) -> tuple[str | None, bool]:
        """Why a tensor of the base is not merged, if it is not, and whether a task may have it unchanged."""
        if not info.dtype.is_floating_point:
            return "not floating-point", True
        if self._is_excluded(name):
            return "excluded", False
        if is_running_statistic(name):
            return "running statistic", False
        if is_computed_buffer(name, info):
            return "computed buffer", True
        if 0 in info.shape:
            return "empty", True
        if self._config.small_raw and len(info.shape) <= 1:
            return "one-dimensional", False
        return None, False

    def _takes_part(self, index: int, name: str, theirs: str) -> bool:
        """Whether a task's tensor is merged; if not, it is kept."""
        ours, info = self._base.tensors[name], self._tasks[index].tensors[theirs]
        if self._is_excluded(theirs):
            reason = "excluded"
        elif not info.dtype.is_floating_point:
            reason = f"{info.dtype} in the task"
        elif info.shape == ours.shape:
            return True
        elif self._config.shape_policy == "error":
            raise ValueError(
                f"{name!r} is {list(ours.shape)} in the base and {list(info.shape)} in "
                f"{described(self._tasks[index])}. Exclude it, or use shape_policy: extra, which keeps it per task."
            )
        elif self._config.shape_policy == "overlap" and self._is_resized(index, name, theirs):
            self._require_same_tokens(index, name, min(ours.shape[0], info.shape[0]))
            return True
        else:
            reason = f"shape {list(info.shape)}, in the base {list(ours.shape)}"
        self._keep(index, theirs, reason)
        return False

    def _merge(self, name: str, info: TensorInfo, taking_part: dict[int, str]) -> None:
        shapes = {index: self._tasks[index].tensors[theirs].shape for index, theirs in taking_part.items()}
        elements = min(math.prod(shape) for shape in (info.shape, *shapes.values()))
        dtype = getattr(torch, self._config.dtype) if self._config.dtype else info.dtype
        names = tuple(taking_part.get(index) for index in range(len(self._tasks)))
        self.merged.append(Part(name, info.shape, dtype, elements, names))
        for index, theirs in taking_part.items():
            # also for nothing left over: it records that the task's shape is not the base's
            if shapes[index] != info.shape or math.prod(shapes[index]) != elements:
                task_dtype = self._tasks[index].tensors[theirs].dtype
                reason = "tokens beyond the common vocabulary"
                self.extras.append(Extra(index, theirs, shapes[index], task_dtype, elements, reason))

    def _sort_rest(self, index: int) -> None:
        """Decides on the tensors of a task that the base does not have, or has under another name."""
        task, pairs = self._tasks[index], self._pairs[index]
        computed: set[str] | None = None
        for theirs, info in task.tensors.items():
            name = base_name(theirs, self._renames[index])
            if name in self._aliases:
                self._keep(index, theirs, TIED, compared=True)
            elif pairs.get(name) != theirs:
                if is_computed_buffer(theirs, info):
                    computed = self._unsaved_names(task) if computed is None else computed
                    if theirs in computed:
                        self.skipped.append((index, theirs, "computed by the model, which no longer saves it"))
                        continue
                self._keep(index, theirs, "not in the base")

    def _unsaved_names(self, task: Source) -> set[str]:
        """Buffers of a task's file that its class has no place for."""
        try:
            model = meta_model(task.config)
        except ValueError:
            return set()
        return set() if model is None else set(task.tensors) - set(model.state_dict())

    def _keep(self, index: int, name: str, reason: str, compared: bool = False) -> None:
        info = self._tasks[index].tensors[name]
        (self.undecided if compared else self.extras).append(Extra(index, name, info.shape, info.dtype, 0, reason))

    def _same_form(self, index: int, name: str, theirs: str) -> bool:
        ours, info = self._base.tensors[name], self._tasks[index].tensors[theirs]
        return (ours.shape, ours.dtype) == (info.shape, info.dtype)

    def _is_excluded(self, name: str) -> bool:
        return any(pattern.match(name) for pattern in self._excluded)

    def _is_resized(self, index: int, name: str, theirs: str) -> bool:
        """Whether a tensor has one row for each token, in both, and not equally many."""
        ours, info = self._base.tensors[name].shape, self._tasks[index].tensors[theirs].shape
        if not ours or not info or ours[1:] != info[1:] or ours[0] == info[0]:
            return False
        sizes = vocabulary_size(self._base.config), vocabulary_size(self._tasks[index].config)
        return sizes == (ours[0], info[0])

    def _require_same_tokens(self, index: int, name: str, count: int) -> None:
        if (index, count) not in self._same_tokens:
            refuse_other_tokens(self._base, self._tasks[index], count, name)
            self._same_tokens.add((index, count))


def narrowing_warnings(tasks: Sequence[Source], merged: Sequence[Part]) -> list[str]:
    """Tells of tasks that are restored in a type which does not hold their weights exactly."""
    narrowed: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}
    for part in merged:
        for task, name in zip(tasks, part.task_names, strict=True):
            own = None if name is None else task.tensors[name].dtype
            if own is not None and torch.promote_types(own, part.dtype) != part.dtype:
                labels = narrowed.setdefault((own, part.dtype), [])
                labels += [task.label] if task.label not in labels else []
    return [
        f"{', '.join(labels)}: stored in {_short(own)}, merged, restored and exported in {_short(kept)}, which does "
        "not hold all of it. Set dtype to float32 to keep it."
        for (own, kept), labels in narrowed.items()
    ]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
