"""The plan of a merge, made from headers alone: what happens to each tensor, and what it costs."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
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
from .plan_table import Plan
from .sources import Source, open_weights
from .tensor_rules import TIED, Extra, Part, Shared, SortedTensors, narrowing_warnings

_COMPARED_AT_ONCE = 2**18
_OPENED_AT_ONCE = 8


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
    """Compares what headers cannot decide: buffers, and tensors that the base ties."""
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
