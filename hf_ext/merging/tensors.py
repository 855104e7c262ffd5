"""The table of a merge: which tensor of a task is which of the base, and what happens to each. Made in one pass.

A [`Row`] is a tensor of the base: merged, or kept as it is. What is left of a task, because the base has no such
tensor, because of its shape or kind, or because it was excluded, is an [`Own`]. Plan, engine, outputs and manifest
read this table; none of them looks at names again.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hf_ext.hub.safetensors_headers import TensorInfo

from .configuration import MergeConfig
from .fitting import meta_model, refuse_little_overlap, refuse_other_tokens, vocabulary_size
from .sources import Source

# What happens to a tensor of a task that is not merged as a whole.
KEPT, SHARED, COMPARED, SKIPPED = "kept", "the base's", "kept if not the base's", "skipped"
TIED = "tied to another tensor in the base"
# Buffers that a model computes from its configuration; newer versions do not save them.
_COMPUTED_BUFFERS = ("position_ids", "inv_freq", "original_inv_freq", "masked_bias", "relative_position_index")
# A prefix that fewer names have is a layer, not a wrapper.
_PREFIX_SHARE = 1 / 3


@dataclass(frozen=True)
class Row:
    """A tensor of the base, which is in the root weights of the result."""

    name: str  # name in the base
    shape: tuple[int, ...]
    dtype: torch.dtype  # type in the result
    elements: int = 0  # leading elements that are merged: all, but for a resized vocabulary; 0 if it is not merged
    # name in each task, `None` where it does not take part; empty if it is not merged
    task_names: tuple[str | None, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes in the result."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Own:
    """A tensor of a task that is not merged, or the end of one whose leading elements are."""

    task: int  # index of the task
    name: str  # name in the task
    base_name: str  # name that it would have in the base
    shape: tuple[int, ...]  # shape of the whole tensor
    dtype: torch.dtype
    rule: str  # `KEPT` with the task, `SHARED`: equal to the base's, `SKIPPED`, or `COMPARED` to find out
    reason: str = ""  # why
    start: int = 0  # first element that is kept; more than 0 only for what a merged vocabulary leaves over

    @property
    def nbytes(self) -> int:
        """Bytes that are stored if it is kept."""
        return (math.prod(self.shape) - self.start) * self.dtype.itemsize


class Names:
    """
    The names of a task's tensors, or of an adapter's targets, beside the base's.

    By what they differ is found out: a base saved without its head is `encoder.…` where its fine-tune is
    `bert.encoder.…`.
    """

    def __init__(self, base: Mapping[str, TensorInfo], task: Collection[str]) -> None:
        pairs = [(first, second) for first in _wrappers(base) for second in _wrappers(task)]

        def agreement(pair: tuple[str, str]) -> tuple[int, int]:
            return sum(pair[0] + name.removeprefix(pair[1]) in base for name in task), -len(pair[0]) - len(pair[1])

        self.base_prefix, self.task_prefix = max(pairs, key=agreement)
        found: dict[str, str] = {}
        # a name that has the prefix goes before one that happens to fit without
        for name in sorted(task, key=lambda item: not item.startswith(self.task_prefix)):
            found.setdefault(self.in_base(name), name)
        self.pairs = {name: found[name] for name in base if name in found}

    def in_base(self, name: str) -> str:
        """The name that a tensor of the task has in the base."""
        return self.base_prefix + name.removeprefix(self.task_prefix)

    def in_task(self, name: str) -> str:
        """The name that a tensor of the base has in the task, or would have."""
        return self.task_prefix + name.removeprefix(self.base_prefix)


def _wrappers(names: Collection[str]) -> list[str]:
    """Prefixes that many of the names have, and none."""
    counts: Counter[str] = Counter()
    for name in names:
        parts = name.split(".")
        counts.update(".".join(parts[:depth]) + "." for depth in range(1, min(len(parts), 4)))
    return ["", *(prefix for prefix, count in counts.items() if count >= _PREFIX_SHARE * len(names))]


class Table:
    """Every tensor of a merge with what happens to it. Making it decides."""

    def __init__(self, config: MergeConfig, base: Source, tasks: Sequence[Source], aliases: dict[str, str]) -> None:
        self._config, self._base, self._tasks, self._aliases = config, base, tasks, aliases
        self.names = tuple(Names(base.tensors, task.tensors) for task in tasks)
        self.rows: list[Row] = []
        self.own: list[Own] = []
        self._excluded = [re.compile(pattern) for pattern in config.exclude]
        self._same_tokens: set[tuple[int, int]] = set()
        for index, names in enumerate(self.names):
            self._refuse_misfit(index, names)
        for name, info in base.tensors.items():
            if name not in aliases:
                self.rows.append(self._decide(name, info))
        for index, names in enumerate(self.names):
            self._decide_rest(index, names)
        if not any(row.task_names for row in self.rows):
            raise ValueError(
                f"nothing to merge: every floating-point tensor of {base.title} is excluded, kept raw, or of "
                "another shape in the tasks. Check base, tasks, exclude and small_raw."
            )

    def _refuse_misfit(self, index: int, names: Names) -> None:
        ours, theirs = self._base.tensors, self._tasks[index].tensors
        fitting = [
            name
            for name, own in names.pairs.items()
            if ours[name].dtype.is_floating_point
            and (ours[name].shape == theirs[own].shape or self._is_resized(index, name, own))
        ]
        refuse_little_overlap(self._base, self._tasks[index], names.pairs, fitting)

    def _decide(self, name: str, info: TensorInfo) -> Row:
        """Decides on one tensor of the base."""
        for index, task in enumerate(self._tasks):
            if name in task.same_as_base:
                own = self.names[index].in_task(name)
                self.own.append(Own(index, own, name, info.shape, info.dtype, SHARED))
        holders = {index: names.pairs[name] for index, names in enumerate(self.names) if name in names.pairs}
        reason, compared = self._raw_reason(name, info)
        if reason is not None:
            for index, own in holders.items():
                theirs = self._tasks[index].tensors[own]
                same_form = (info.shape, info.dtype) == (theirs.shape, theirs.dtype)
                self._keep(index, own, COMPARED if compared and same_form else KEPT, reason)
            holders = {}
        merged = {index: own for index, own in holders.items() if self._takes_part(index, name, own)}
        return self._merge(name, info, merged) if merged else Row(name, info.shape, info.dtype)

    def _raw_reason(self, name: str, info: TensorInfo) -> tuple[str | None, bool]:
        """Why a tensor of the base is not merged, if it is not, and whether a task may have it unchanged."""
        last = name.rpartition(".")[2]
        if not info.dtype.is_floating_point:
            return "not floating-point", True
        if self._is_excluded(name):
            return "excluded", False
        # no vote may change it
        if last.startswith("running_") or last == "num_batches_tracked":
            return "running statistic", False
        if _is_computed(name, info):
            return "computed buffer", True
        if 0 in info.shape:
            return "empty", True
        if self._config.small_raw and len(info.shape) <= 1:
            return "one-dimensional", False
        return None, False

    def _takes_part(self, index: int, name: str, own: str) -> bool:
        """Whether a task's tensor is merged; if not, it is kept."""
        ours, info = self._base.tensors[name], self._tasks[index].tensors[own]
        if self._is_excluded(own):
            reason = "excluded"
        elif not info.dtype.is_floating_point:
            reason = f"{info.dtype} in the task"
        elif info.shape == ours.shape:
            return True
        elif self._config.shape_policy == "error":
            raise ValueError(
                f"{name!r} is {list(ours.shape)} in the base and {list(info.shape)} in "
                f"{self._tasks[index].title}. Exclude it, or use shape_policy: extra, which keeps it per task."
            )
        elif self._config.shape_policy == "overlap" and self._is_resized(index, name, own):
            count = min(ours.shape[0], info.shape[0])
            if (index, count) not in self._same_tokens:
                refuse_other_tokens(self._base, self._tasks[index], count, name)
                self._same_tokens.add((index, count))
            return True
        else:
            reason = f"shape {list(info.shape)}, in the base {list(ours.shape)}"
        self._keep(index, own, KEPT, reason)
        return False

    def _merge(self, name: str, info: TensorInfo, merged: dict[int, str]) -> Row:
        shapes = {index: self._tasks[index].tensors[own].shape for index, own in merged.items()}
        elements = min(math.prod(shape) for shape in (info.shape, *shapes.values()))
        for index, own in merged.items():
            # also for nothing left over: it records that the task's shape is not the base's
            if shapes[index] != info.shape or math.prod(shapes[index]) != elements:
                self._keep(index, own, KEPT, "tokens beyond the common vocabulary", elements)
        dtype = getattr(torch, self._config.dtype) if self._config.dtype else info.dtype
        return Row(name, info.shape, dtype, elements, tuple(merged.get(index) for index in range(len(self._tasks))))

    def _decide_rest(self, index: int, names: Names) -> None:
        """Decides on the tensors of a task that the base does not have, or has under another name."""
        task = self._tasks[index]
        computed: set[str] | None = None
        for own, info in task.tensors.items():
            name = names.in_base(own)
            if name in self._aliases:
                self._keep(index, own, COMPARED, TIED)
            elif names.pairs.get(name) != own:
                if _is_computed(own, info):
                    computed = _unsaved_names(task) if computed is None else computed
                    if own in computed:
                        self._keep(index, own, SKIPPED, "computed by the model, which no longer saves it")
                        continue
                self._keep(index, own, KEPT, "not in the base")

    def _keep(self, index: int, name: str, rule: str, reason: str, start: int = 0) -> None:
        info = self._tasks[index].tensors[name]
        self.own.append(Own(index, name, self.names[index].in_base(name), info.shape, info.dtype, rule, reason, start))

    def _is_excluded(self, name: str) -> bool:
        return any(pattern.match(name) for pattern in self._excluded)

    def _is_resized(self, index: int, name: str, own: str) -> bool:
        """Whether a tensor has one row for each token, in both, and not equally many."""
        ours, info = self._base.tensors[name].shape, self._tasks[index].tensors[own].shape
        if not ours or not info or ours[1:] != info[1:] or ours[0] == info[0]:
            return False
        return (vocabulary_size(self._base.config), vocabulary_size(self._tasks[index].config)) == (ours[0], info[0])


def _is_computed(name: str, info: TensorInfo) -> bool:
    """Whether a buffer follows from the configuration: positions, rotary frequencies, causal masks."""
    causal_mask = name.endswith("attn.bias") and len(info.shape) == 4
    return name.rpartition(".")[2] in _COMPUTED_BUFFERS or causal_mask


def _unsaved_names(task: Source) -> set[str]:
    """Buffers of a task's file that its class has no place for."""
    try:
        model = meta_model(task.config)
    except ValueError:
        return set()
    return set() if model is None else set(task.tensors) - set(model.state_dict())


def narrowing_warnings(tasks: Sequence[Source], merged: Iterable[Row]) -> list[str]:
    """Tells of tasks that are restored from merged tensors in a type which does not hold their weights exactly."""
    narrowed: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}
    for row in merged:
        for task, name in zip(tasks, row.task_names, strict=True):
            own = None if name is None else task.tensors[name].dtype
            if own is not None and torch.promote_types(own, row.dtype) != row.dtype:
                labels = narrowed.setdefault((own, row.dtype), [])
                labels += [task.label] if task.label not in labels else []
    return [
        f"{', '.join(labels)}: stored in {type_name(own)}, merged, restored and exported in {type_name(kept)}, which "
        "does not hold all of it. Set dtype to float32 to keep it."
        for (own, kept), labels in narrowed.items()
    ]


def type_name(dtype: torch.dtype) -> str:
    """The name of a type as people write it."""
    return str(dtype).removeprefix("torch.")
