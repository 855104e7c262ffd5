"""The plan of a merge, made from headers alone: what happens to each tensor, and what it costs."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from .adapters import resolve_adapters
from .configuration import MergeConfig, load_config
from .matching import (
    base_name,
    choose_prefixes,
    described,
    provenance_warnings,
    refuse_other_model,
    refuse_quantised,
    task_name,
    tied_names,
)
from .plan_table import plan_dict, plan_lines
from .sources import Source, open_weights
from .tensor_rules import TIED, Copied, Extra, Part, Shared, SortedTensors, narrowing_warnings

_COMPARED_AT_ONCE = 2**18
_OPENED_AT_ONCE = 8
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
    def state_bytes(self) -> int:
        """Bytes of what `keep_state` adds: sum, highest and lowest weight of each element, two bits for each task."""
        if not self.config.keep_state:
            return 0
        elements = sum(part.elements * (4 + 2 * self.common_type(part).itemsize) for part in self.merged)
        return elements + 2 * sum(self.mask_bytes)

    @property
    def bytes_written(self) -> int:
        """Bytes of weights that the merge will write."""
        return self.result_bytes + self.state_bytes + (self.base_bytes if self.config.include_base else 0)

    @property
    def base_bytes(self) -> int:
        """Bytes of a copy of the base."""
        return sum(info.nbytes for info in self.base.tensors.values())

    def common_type(self, part: Part) -> torch.dtype:
        """
        The type that holds a tensor of all tasks exactly.

        Args:
            part ([`Part`]): A merged tensor.

        Returns:
            `torch.dtype`: The type.
        """
        named = zip(self.tasks, part.task_names, strict=True)
        found = {task.tensors[name].dtype for task, name in named if name is not None}
        return found.pop() if len(found) == 1 else torch.float32

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
        """
        The name that a tensor of the base has in a task, if it is there.

        Args:
            index (`int`): Index of the task.
            name (`str`): Name in the base.

        Returns:
            `str`: Name in the task.
        """
        return task_name(name, self.renames[index])

    def lines(self) -> list[str]:
        """
        The plan for the terminal.

        Returns:
            `list[str]`: Lines of a table.
        """
        return plan_lines(self)

    def to_dict(self) -> dict[str, Any]:
        """
        The plan as plain values, for JSON.

        Returns:
            `dict[str, Any]`: Configuration, sources, tensors, sizes in bytes, warnings.
        """
        return plan_dict(self)

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


def make_plan(
    config: MergeConfig | dict[str, Any] | str | Path,
    *,
    token: str | bool | None = None,
    endpoint: str | None = None,
) -> Plan:
    """
    Opens the checkpoints of a merge by their headers and decides what happens to each tensor.

    Args:
        config ([`MergeConfig`], `dict`, `str` or `Path`): The configuration, or the path of its YAML file.
        token (`str` or `bool`, *optional*): Token of the Hub, as in `huggingface_hub`.
        endpoint (`str`, *optional*): Address of the Hub. Defaults to `HF_ENDPOINT`.

    Returns:
        [`Plan`]: The plan, with the checkpoints open.

    Raises:
        ValueError: Something cannot be read or does not fit together; the message says what to do.
    """
    config = load_config(config)
    specs = [("base", config.base), *config.tasks.items()]
    if config.merged is not None:
        specs.append(("merged", config.merged))
    with ThreadPoolExecutor(_OPENED_AT_ONCE) as pool:
        futures = [pool.submit(open_weights, label, spec, token=token, endpoint=endpoint) for label, spec in specs]
    opened = [future.result() for future in futures if future.exception() is None]
    try:
        for future in futures:
            future.result()
        count = len(config.tasks) + 1
        given = opened[count] if config.merged is not None else None
        return _plan(config, opened[0], tuple(opened[1:count]), given)
    except BaseException:
        for source in opened:
            source.close()
        raise


def _plan(config: MergeConfig, base: Source, tasks: tuple[Source, ...], given: Source | None) -> Plan:
    for source in (base, *tasks):
        refuse_quantised(source)
    base, tasks, warnings = resolve_adapters(config, base, tasks)
    if base.library == "peft":
        # nobody else has the base of adapters
        config = replace(config, include_base=config.with_masks)
    for task in tasks:
        refuse_other_model(base, task)
    warnings += [warning for task in tasks for warning in provenance_warnings(base, task)]
    warnings += [
        f"{described(source)} holds float64, which is treated as float32"
        for source in (base, *tasks)
        if source.has_float64
    ]
    aliases = tied_names(base, tasks, warnings)
    renames = tuple(choose_prefixes(base.tensors, task.tensors) for task in tasks)
    tensors = SortedTensors(config, base, tasks, renames, aliases)
    warnings += narrowing_warnings(tasks, tensors.merged)
    return Plan(
        config=config,
        base=base,
        tasks=tasks,
        merged=tuple(tensors.merged),
        copied=tuple(tensors.copied),
        extras=tuple(tensors.extras),
        undecided=tuple(tensors.undecided),
        shared=tuple(tensors.shared),
        skipped=tuple(tensors.skipped),
        renames=renames,
        aliases=aliases,
        given=given,
        given_names={} if given is None else _names_in(given, base, tensors.merged),
        warnings=warnings,
    )


def _names_in(given: Source, base: Source, merged: list[Part]) -> dict[str, str]:
    """Names of the merged tensors in the model of method `"given"`."""
    refuse_quantised(given)
    refuse_other_model(base, given)
    prefixes = choose_prefixes(base.tensors, given.tensors)
    names = {part.name: task_name(part.name, prefixes) for part in merged}
    for part in merged:
        info = given.tensors.get(names[part.name])
        if info is None or info.shape != part.shape or not info.dtype.is_floating_point:
            found = "missing" if info is None else f"{info.dtype} {list(info.shape)}"
            raise ValueError(
                f"{described(given)}: {part.name!r} must be floating-point {list(part.shape)} and is {found}; give a "
                "model that was merged from these tasks, or exclude the tensor."
            )
    return names


def resolve_plan(plan: Plan) -> tuple[tuple[Extra, ...], tuple[Shared, ...]]:
    """
    Compares what headers cannot decide: buffers, and tensors that the base ties.

    Args:
        plan ([`Plan`]): The plan.

    Returns:
        `tuple[tuple[Extra, ...], tuple[Shared, ...]]`: All that is stored per task, and all that equals the base.

    Raises:
        ValueError: The base holds a tied tensor twice, with different values.
    """
    for name, kept in plan.aliases.items():
        if name in plan.base.tensors and not _equal(plan.base, name, plan.base, kept):
            raise ValueError(
                f"{described(plan.base)}: {name!r} and {kept!r} differ, but its model ties them. Save the base with "
                "save_pretrained, or set tie_word_embeddings to false in its config.json if they are separate."
            )
    extras, shared = list(plan.extras), list(plan.shared)
    for item in plan.undecided:
        task = plan.tasks[item.task]
        name = base_name(item.name, plan.renames[item.task])
        if item.reason == TIED:
            own = task_name(plan.aliases[name], plan.renames[item.task])
            # an equal one is tied again when the model is built
            if own not in task.tensors or not _equal(task, item.name, task, own):
                extras.append(item)
        elif _equal(task, item.name, plan.base, name):
            shared.append(Shared(item.task, item.name))
        else:
            extras.append(item)
    return tuple(extras), tuple(shared)


def _equal(first: Source, first_name: str, second: Source, second_name: str) -> bool:
    """Whether two tensors are equal byte for byte, read in blocks."""
    ours, theirs = first.tensors[first_name], second.tensors[second_name]
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return False
    elements = math.prod(ours.shape)
    for start in range(0, elements, _COMPARED_AT_ONCE):
        stop = min(start + _COMPARED_AT_ONCE, elements)
        blocks = [torch.empty(stop - start, dtype=ours.dtype) for _ in range(2)]
        first.read_into(first_name, start, stop, blocks[0])
        second.read_into(second_name, start, stop, blocks[1])
        if not blocks[0].view(torch.uint8).equal(blocks[1].view(torch.uint8)):
            return False
    return True


def _nbytes(item: Part | Copied) -> int:
    return math.prod(item.shape) * item.dtype.itemsize


def _mask_bytes(elements: int) -> int:
    return math.ceil(math.ceil(elements / 8) / _MASK_ALIGNMENT) * _MASK_ALIGNMENT
