"""The plan of a merge, made from headers and small files: treatment of each tensor, and costs; its table and JSON."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..emr.arithmetic import SUMS, find_kernels
from ..emr.artifact import mask_bytes
from ..errors import DataError, UsageError
from .companions import join_companions
from .configuration import MergeConfig, load_config
from .name_matching import Matching, match_names
from .sources import Source, describe_label, open_weights, read_adapters, size_text, type_name
from .tensors import COMPARED, KEPT, LOST, SHARED, SHOWN, SKIPPED, TIED, WHOLE_NUMBERS, Own, Row, Table, name_some

_COMPARED_AT_ONCE = 2**18
# Elements of a tensor that tell most trained weights from constants.
_FIRST = 2**10


@dataclass(frozen=True)
class Sizes:
    """Bytes of a merge, as headers tell them."""

    read: int  # all tensors of the checkpoints; some methods read them several times
    checkpoints: int  # the tasks' checkpoints, which the result stands in for
    unified: int  # the root weights
    masks: tuple[int, ...]  # each task's mask, or its signs
    extras: tuple[int, ...]  # each task's own tensors; those that are yet to be compared count
    result: int  # the result's weights: root, masks, tensors and sums of the tasks; without a copy of the base
    written: int  # the same with the copy
    memory: int  # all I/O buffers, beside the process itself; with methods of whole tensors the largest of these


@dataclass(frozen=True)
class Plan(AbstractContextManager["Plan", None]):
    """Plan of a merge. Made by [`make_plan`]; use it as a context manager, or call [`~Plan.close`]."""

    config: MergeConfig  # the configuration
    base: Source  # the base, opened
    tasks: tuple[Source, ...]  # the tasks, opened, in the order of the configuration
    rows: tuple[Row, ...]  # the tensors of the base, in its order
    own: tuple[Own, ...]  # the tensors of the tasks that are not merged
    matching: Matching  # names of the base, of the tasks and of the merged model side by side
    merged_model: Source | None  # the one of method `"given"`, opened
    statistics: tuple[Source, ...]  # those of the tasks' data, opened, where the method wants them
    warnings: list[str]  # warnings for the user
    companions: Mapping[str, Path]  # files beside the weights of the root
    # weights in folders of their own, of modules that are merged by themselves, by their names in the model
    modules: Mapping[str, MergeConfig]

    @cached_property
    def merged_rows(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.members)

    @cached_property
    def copied_rows(self) -> tuple[Row, ...]:
        """Tensors that keep the base's values, and running statistics of one model."""
        return tuple(row for row in self.rows if not row.members)

    def own_tensors(self, *rules: str, task: int | None = None) -> list[Own]:
        """Tensors of the tasks, or of one, that are not merged and for which one of these rules holds."""
        return [item for rule in rules for item in self.own if item.rule == rule and task in (None, item.task)]

    @cached_property
    def sizes(self) -> Sizes:
        config, count, method = self.config, len(self.tasks), self.config.merge_method
        unified = 0 if method.deltas else sum(row.nbytes for row in self.rows)
        masks, extras = [0] * count, [0] * count
        for row in self.merged_rows:
            for task in row.members:
                masks[task] += (method.deltas or 1) * mask_bytes(row.elements)
        for item in self.own_tensors(KEPT, COMPARED):
            extras[item.task] += item.nbytes
        sums = 8 * len(SUMS) * len(self.merged_rows) * count
        result = unified + (sum(masks) + sum(extras) + sums if config.with_masks else 0)
        copy = sum(info.nbytes for info in self.base.tensors.values()) if config.include_base else 0
        memory = config.memory_bytes
        if method.whole:
            # the base, the task vectors and what the method makes of them, in float32
            memory += 4 * (count + 3) * max(row.elements for row in self.merged_rows)
            # statistics come one by one, and are added up in float64
            known = [math.prod(info.shape) for source in self.statistics for info in source.tensors.values()]
            memory += 40 * max(known, default=0)
        read, checkpoints = (sum(source.nbytes for source in held) for held in (self.sources, self.tasks))
        return Sizes(read, checkpoints, unified, tuple(masks), tuple(extras), result, result + copy, memory)

    @property
    def size_warnings(self) -> list[str]:
        """Warnings of a result that saves no space."""
        planes, size = self.config.merge_method.deltas or 1, self.sizes.result + self.base.nbytes
        one_bit = size - self.sizes.unified - sum(self.sizes.masks) * (planes - 1) // planes
        return warn_of_size(size, self.sizes.checkpoints, one_bit) if self.config.with_masks else []

    @property
    def header_bytes(self) -> int:
        """Bytes of weights files that were read so far."""
        return sum(source.checkpoint.bytes_read for source in self.sources)

    @property
    def sources(self) -> tuple[Source, ...]:
        """Every checkpoint that is read."""
        merged = () if self.merged_model is None else (self.merged_model,)
        return (self.base, *self.tasks, *merged, *self.statistics)

    def close(self) -> None:
        for source in self.sources:
            source.close()

    def __exit__(self, *exception: object) -> None:
        self.close()


def make_plan(
    config: MergeConfig | Mapping[str, Any] | str | Path,
    *,
    token: str | bool | None = None,
    endpoint: str | None = None,
) -> Plan:
    """
    Opens the checkpoints of a merge by their headers and decides what happens to each tensor.

    Args:
        config ([`MergeConfig`], `Mapping`, `str` or `Path`): The configuration, or the path of its YAML file.
        token (`str` or `bool`, *optional*): Token of the Hub, as in `huggingface_hub`.
        endpoint (`str`, *optional*): Address of the Hub. Defaults to `HF_ENDPOINT`.

    Returns:
        [`Plan`]: The plan, with the checkpoints open.

    Raises:
        ValueError: Something cannot be read or does not fit together; the message says what to do.
    """
    config = load_config(config)
    specs = {"base": config.base, **config.tasks}
    specs |= {} if config.merged is None else {"merged": config.merged}
    specs |= {f"statistics of {task}": config.statistics[task] for task in config.tasks if config.statistics}
    with ExitStack() as stack:

        def open_one(label: str) -> Source:
            return stack.enter_context(open_weights(label, specs[label], token=token, endpoint=endpoint))

        with ThreadPoolExecutor(8) as pool:
            opened = dict(zip(specs, pool.map(open_one, specs), strict=True))
        base, tasks = read_adapters(config.adapters, opened["base"], [opened[task] for task in config.tasks])
        model = opened.get("merged")
        statistics = tuple(opened[label] for label in specs if label.startswith("statistics of "))
        if base.library == "peft":
            # the base of the adapters has no other owner
            config = dataclasses.replace(config, include_base=config.with_masks)
        matching = match_names(base, tasks, given=model, masks=config.with_masks)
        for task, names in zip(tasks, matching.names, strict=True):
            task.rename(names.in_file)
        table = Table(config, base, tasks, matching)
        if model is not None:
            model.rename(matching.given)
            table.check_given(model)
        if statistics:
            table.check_statistics(statistics)
        told = [text for source in (base, *tasks) for text in source.warnings]
        warnings = [*matching.warnings, *told, *table.warnings]
        companions, modules = base.companions.files, dict[str, MergeConfig]()
        if not config.with_masks:
            own = {task.title: task.companions for task in tasks}
            companions, differing, told = join_companions(base.companions, own)
            modules = {name: _plan_module(config, base, tasks, name) for name in differing}
            by_itself = "the module of each model is merged by itself, by the same method"
            warnings += [*told, *(f"{name}: {by_itself}" for name in modules)]
        rows, others = tuple(table.rows), tuple(table.own)
        plan = Plan(config, base, tasks, rows, others, matching, model, statistics, warnings, companions, modules)
        stack.pop_all()
    warnings += plan.size_warnings
    return plan


def _plan_module(config: MergeConfig, base: Source, tasks: tuple[Source, ...], name: str) -> MergeConfig:
    """The merge of a module with weights in a folder of its own; what does not fit is refused before it begins."""
    if config.statistics or config.merged is not None:
        raise DataError(
            f"{name} holds weights of a module of its own that differ, and method {config.method!r} needs more than "
            "weights to merge them. Choose another method, or one with masks, where each task keeps its module."
        )
    places: dict[str, Any] = {source.label: str(source.companions.modules[name].parent) for source in (base, *tasks)}
    # in one file, as its library reads it
    alone: dict[str, Any] = {"exclude": [], "measure": False, "max_shard_size": "1000TB"}
    module = dataclasses.replace(config, base=places.pop("base"), tasks=places, **alone)
    make_plan(module).close()
    return module


def warn_of_size(size: int, models: int, one_bit: int) -> list[str]:
    """Tells of an artifact and base that are as large as the models; `one_bit` is what 1-bit deltas need."""
    if size < models:
        return []
    advice = f" Method onebit needs {size_text(one_bit)}." if one_bit < models else ""
    return [
        f"the artifact and the base, from which its tasks are restored, take {size_text(size)}, the "
        f"checkpoints themselves {size_text(models)}: this saves no space.{advice}"
    ]


def resolve_plan(plan: Plan) -> Plan:
    """Compares what headers cannot decide: buffers, tied tensors, and constants with infinity."""
    plan = _carry_constants(plan)
    for name, kept in plan.matching.aliases.items():
        if name in plan.base.tensors and not _equal(plan.base, name, plan.base, kept):
            raise UsageError(
                f"{plan.base.title}: {name!r} and {kept!r} differ, but its model ties them. Save the base with "
                "save_pretrained, or set tie_word_embeddings to false in its config.json if they are separate."
            )
    decided = [dataclasses.replace(item, rule=_compare(plan, item)) for item in plan.own_tensors(COMPARED)]
    # the compared tensors come last, in the order of their comparison
    own = (*(item for item in plan.own if item.rule != COMPARED), *decided)
    warnings = [*plan.warnings, *([] if plan.config.with_masks else _tell_lost(plan, decided))]
    return dataclasses.replace(plan, own=own, warnings=warnings)


# It is no trained weight but a constant, such as an attention mask under any name. It is looked for before the merge
# because no task may have a 1-bit mask for it: infinity - infinity is NaN where it is restored.
def _carry_constants(plan: Plan) -> Plan:
    """Takes out of the merge what has the same bits in base and tasks, with NaN or infinity, and says so."""
    rows, own, constants = list(plan.rows), list(plan.own), list[str]()
    for place, row in enumerate(plan.rows):
        held = [part[:2] for part in row.parts] or [(plan.tasks[index], name) for index, name in row.members.items()]
        if held and _is_constant(plan.base, row.name, held):
            constants.append(row.name)
            rows[place] = Row(row.name, row.shape, plan.base.tensors[row.name].dtype)
            for index, name in row.members.items():
                own.append(Own(index, name, row.name, row.shape, plan.tasks[index].tensors[name].dtype, SHARED))
    if not constants:
        return plan
    said = f"{name_some(constants)}: NaN or infinity, the same in base and tasks; carried over unchanged"
    return dataclasses.replace(plan, rows=tuple(rows), own=tuple(own), warnings=[*plan.warnings, said])


def _is_constant(base: Source, name: str, tasks: Sequence[tuple[Source, str]]) -> bool:
    """True for NaN or infinity that is the same everywhere; of trained weights little is read."""

    def same(elements: float = math.inf) -> bool:
        return all(_equal(base, name, task, own, elements) for task, own in tasks)

    return same(_FIRST) and not all(bool(block.float().isfinite().all()) for block in _read(base, name)) and same()


def _tell_lost(plan: Plan, own: Iterable[Own]) -> list[str]:
    """Warnings about tensors that one model cannot have; what it does not compute by itself is refused."""
    warnings: list[str] = []
    kept: dict[tuple[int, str], list[str]] = defaultdict(list)
    for item in own:
        if item.rule == KEPT:
            kept[item.task, item.reason].append(item.name)
    found = [(task, reason) for task in range(len(plan.tasks)) for reason in LOST if (task, reason) in kept]
    for task, reason in found:
        text = f"{plan.tasks[task].title} has its own {name_some(kept[task, reason])}, {LOST[reason]}"
        if reason in (TIED, WHOLE_NUMBERS) and not plan.config.allow_missing:
            raise DataError(
                f"{text}. Choose a method with masks, or set allow_missing (--allow-missing), with which the merged "
                "model gets the base's."
            )
        warnings.append(f"{text}: the merged model gets the base's")
    pairs = ((row.name, row.parts[0], part) for row in plan.rows for part in row.parts[1:])
    if averaged := [*dict.fromkeys(name for name, one, other in pairs if not _equal(*one[:2], *other[:2]))]:
        told = "statistics of data, which differ: the merged model gets their mean; compute them again on data"
        warnings.append(f"{name_some(averaged)}: {told}")
    return warnings


def _compare(plan: Plan, item: Own) -> str:
    """The treatment of a task's tensor that is stored unless it equals another one."""
    task = plan.tasks[item.task]
    if item.reason == TIED:
        own = plan.matching.names[item.task].in_task(plan.matching.aliases[item.base_name])
        # an equal one is tied again when the model is built
        return SKIPPED if own in task.tensors and _equal(task, item.name, task, own) else KEPT
    return SHARED if _equal(task, item.name, plan.base, item.base_name) else KEPT


def _equal(first: Source, first_name: str, second: Source, second_name: str, elements: float = math.inf) -> bool:
    """True if two tensors, or so many leading elements of them, are equal byte for byte; they are read in blocks."""
    ours, theirs = first.tensors[first_name], second.tensors[second_name]
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return False
    pairs = zip(_read(first, first_name, elements), _read(second, second_name, elements), strict=True)
    return all(one.view(torch.uint8).equal(other.view(torch.uint8)) for one, other in pairs)


def _read(source: Source, name: str, elements: float = math.inf) -> Iterator[torch.Tensor]:
    """The blocks of a tensor, or of so many leading elements of it."""
    info = source.tensors[name]
    count = int(min(elements, math.prod(info.shape)))
    for start in range(0, count, _COMPARED_AT_ONCE):
        block = torch.empty(min(_COMPARED_AT_ONCE, count - start), dtype=info.dtype)
        source.read_into(name, start, start + len(block), block)
        yield block


def plan_lines(plan: Plan) -> list[str]:
    """The lines of a plan: sources, treatment of the tensors, sizes, memory, warnings."""
    rows = [(describe_label(source.label).replace("'", ""), _source_text(source)) for source in plan.sources]
    config = plan.config
    method = f"{config.method} without {config.drop:.0%} of each task vector" if config.drop else config.method
    kind = f"masks, rescale {config.rescale}" if config.with_masks else "one model"
    kind = "signs and a scale for each tensor, no unified model" if config.merge_method.deltas else kind
    rows.append(("method", f"{method}, {kind}"))
    averaged, same = ([row for row in plan.copied_rows if bool(row.parts) == kind] for kind in (True, False))
    for key, items in (("merged", plan.merged_rows), ("averaged", averaged), ("base's values", same)):
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

    def about(source: Source) -> dict[str, Any]:
        place = {"source": source.repo_id or source.spec, "revision": source.commit}
        return {**place, "library": source.library, "architecture": source.architecture, "bytes": source.nbytes}

    def own(*rules: str, task: int) -> list[dict[str, str]]:
        return [{"name": item.name, "reason": item.reason} for item in plan.own_tensors(*rules, task=task)]

    return {
        "config": plan.config.to_dict() | plan.config.arguments,
        "base": about(plan.base),
        "tasks": {
            task.label: about(task) | {"extras": own(KEPT, COMPARED, task=index), "skipped": own(SKIPPED, task=index)}
            for index, task in enumerate(plan.tasks)
        },
        "merged": [row.name for row in plan.merged_rows],
        "averaged": [row.name for row in plan.copied_rows if row.parts],
        "copied": [row.name for row in plan.copied_rows if not row.parts],
        "bytes_read": plan.sizes.read,
        "bytes_written": plan.sizes.written,
        "result_bytes": plan.sizes.result,
        "checkpoints_bytes": plan.sizes.checkpoints,
        "peak_memory": plan.sizes.memory,
        "warnings": plan.warnings,
    }


def _source_text(source: Source) -> str:
    place = source.spec if source.commit is None else f"{source.repo_id}@{source.commit[:12]}"
    types = sorted({type_name(info.dtype) for info in source.tensors.values() if info.dtype.is_floating_point})
    about = [source.architecture or source.library, f"{len(source.tensors)} tensors", size_text(source.nbytes), *types]
    return f"{place}: {', '.join(about)}"


def _count_text(elements: Mapping[str, int]) -> str:
    shown = ", ".join([*elements][:SHOWN]) + (", …" if len(elements) > SHOWN else "")
    return f"{len(elements)} tensors, {sum(elements.values()):,} elements: {shown}"


def _task_texts(plan: Plan, index: int) -> list[str]:
    """The tensors of one task that are treated specially, grouped by the reason."""
    groups: dict[str, list[Own]] = defaultdict(list)
    for item in plan.own_tensors(KEPT, COMPARED, task=index):
        # one model has no place for what is a task's alone
        rule = item.rule if plan.config.with_masks else "left out"
        groups[f"{rule}: {item.reason}"].append(item)
    texts = []
    for reason, items in groups.items():
        count = _count_text({item.name: item.nbytes // item.dtype.itemsize for item in items})
        texts.append(f"{reason}: {count} ({size_text(sum(item.nbytes for item in items))})")
    if absent := sum(index not in row.members for row in plan.merged_rows):
        texts.append(f"does not take part in {absent} merged tensors")
    return texts + [f"skipped {item.name}: {item.reason}" for item in plan.own_tensors(SKIPPED, task=index)]


def _size_rows(plan: Plan) -> list[tuple[str, str]]:
    sizes, base, count = plan.sizes, plan.base.nbytes, len(plan.tasks)
    noun = "checkpoint" if count == 1 else "checkpoints"
    result, with_base = (
        f"{size_text(sizes.result + more)} for {what}{size_text(sizes.checkpoints + more)} "
        f"({(sizes.result + more) / (sizes.checkpoints + more):.0%})"
        for more, what in ((0, f"{count} {noun} of "), (base, ""))
    )
    masks = f" (root {size_text(sizes.unified)}, each mask {size_text(max(sizes.masks))})"
    rows = [
        ("reads", f"{size_text(sizes.read)} of tensors; {size_text(plan.header_bytes)} of headers so far"),
        ("writes", f"{size_text(sizes.written)}{masks if plan.config.with_masks else ''}"),
        ("result", f"{result}; with the base {with_base}"),
        ("memory", f"{size_text(sizes.memory)} of buffers beside the process itself"),
    ]
    # to ask takes a second; what is not measured needs no kernels
    if plan.config.is_measured and find_kernels("cpu").run_files is None:
        rows.append(("speed", "plain torch; with numba a merge is 3 times faster: pip install 'hf-ext[fast]'"))
    return rows
