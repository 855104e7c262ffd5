"""The table of a merge: tensors of the tasks matched with those of the base, and the treatment of each.

A [`Row`] is a tensor of the base: merged, or kept as it is. What is left of a task, because the base has no such
tensor, because of its shape or kind, or because it was excluded, is an [`Own`]. Plan, engine, outputs and manifest
read this table; none of them looks at names again.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..errors import DataError
from ..hub.checkpoints import TensorInfo
from .configuration import MergeConfig
from .loading import find_label_rows, read_labels
from .methods.registry import find_depths, find_filters, find_value
from .name_matching import Matching, Names
from .sources import Source, type_name

# Treatments of a task's tensor that is not merged as a whole.
KEPT, SHARED, COMPARED, SKIPPED = "kept", "the base's", "kept if not the base's", "skipped"
TIED = "tied to another tensor in the base"
WHOLE_NUMBERS, COMPUTED, STATISTIC = "not floating-point", "computed buffer", "running statistic"
EXCLUDED = "excluded"
# Differences of a task that one model has no place for, by the reason for which they are not merged.
LOST = {
    TIED: "which the base ties to another tensor",
    WHOLE_NUMBERS: "no floating-point numbers that could be averaged",
    COMPUTED: "which the model may compute from its configuration",
}
SHOWN = 3
# Buffers that models compute from their configuration; newer versions do not save them.
_COMPUTED_BUFFERS = ("position_ids", "inv_freq", "original_inv_freq", "masked_bias", "relative_position_index")


@dataclass(frozen=True)
class Row:
    """A tensor of the base, which is in the root weights of the result."""

    name: str  # name in the base
    shape: tuple[int, ...]
    dtype: torch.dtype  # type in the result
    # its names in the tasks that take part, by their index, in order; empty if it is not merged
    members: dict[int, str] = field(default_factory=dict)
    # what a running statistic of one model is the mean of, with names and shares
    parts: tuple[tuple[Source, str, float], ...] = ()

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the result."""
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True)
class Own:
    """A tensor of a task that is not merged."""

    task: int  # index of the task
    name: str  # name in the task
    base_name: str  # name that it would have in the base
    shape: tuple[int, ...]
    dtype: torch.dtype
    rule: str  # `KEPT` with the task, `SHARED`: equal to the base's, `SKIPPED`, or `COMPARED` to find out
    reason: str = ""  # why

    @property
    def nbytes(self) -> int:
        """Bytes that are stored if it is kept."""
        return math.prod(self.shape) * self.dtype.itemsize


class Table:
    """Every tensor of a merge with its treatment, decided on construction."""

    def __init__(self, config: MergeConfig, base: Source, tasks: Sequence[Source], matching: Matching) -> None:
        self._config, self._base, self._tasks = config, base, tasks
        self._matching = matching
        self.rows: list[Row] = []
        self.own: list[Own] = []
        self._other_tokens: list[str] = []
        self._lacking: dict[str, tuple[int, ...]] = {}  # in no task
        self._excluded = [re.compile(pattern) for pattern in config.exclude]
        self._depths = find_depths(base.tensors)
        for name, info in base.tensors.items():
            if name not in matching.aliases:
                self.rows.append(self._decide(name, info))
        for index, names in enumerate(matching.names):
            self._decide_rest(index, names)
        if not any(row.members for row in self.rows):
            raise DataError(
                f"nothing to merge: every floating-point tensor of {base.title} is excluded, or of another shape in "
                "the tasks. Check base, tasks and exclude."
            )

    @property
    def warnings(self) -> list[str]:
        """Warnings about parts of the tasks that the result lacks or changes."""
        warnings = [*self._narrowing_warnings(), *self._option_warnings(), *self._other_tokens]
        return warnings if self._config.with_masks else [*warnings, *self._one_model_warnings()]

    def _narrowing_warnings(self) -> list[str]:
        """Warnings about tasks whose weights the type of the result does not hold exactly."""
        narrowed: dict[str, dict[str, None]] = defaultdict(dict)
        for row in self.rows:
            held = [(self._tasks[index], name) for index, name in row.members.items()]
            for task, name in held or [part[:2] for part in row.parts if row.dtype.is_floating_point]:
                own = task.tensors[name].dtype
                if torch.promote_types(own, row.dtype) != row.dtype:
                    types = f"stored in {type_name(own)}, the result is in {type_name(row.dtype)}"
                    narrowed[types][task.label] = None
        advice = "which does not hold all of it. Set dtype to float32 to keep it."
        return [f"{', '.join(labels)}: {types}, {advice}" for types, labels in narrowed.items()]

    def _option_warnings(self) -> list[str]:
        """Warnings about patterns that fit no tensor, and options that some tasks or tensors take the default of."""
        names = [name for source in (self._base, *self._tasks) for name in source.tensors]
        patterns = [pattern.pattern for pattern in self._excluded if not any(map(pattern.match, names))]
        filters = dict.fromkeys(find_filters(self._config.arguments))
        warnings = [f"exclude: {pattern!r} is the beginning of no tensor's name" for pattern in patterns]
        unused = [part for part in filters if not any(part in name for name in names)]
        warnings += [f"the filter {part!r} is in no tensor's name" for part in unused]
        merged = [row.name for row in self.rows if row.members]
        for name, setting in self._config.options.items():
            by_task = setting if isinstance(setting, dict) else dict.fromkeys(self._config.tasks, setting)
            others = [task for task in self._config.tasks if task not in by_task]
            others += [row for row in merged if any(find_value(own, row, 0.0) is None for own in by_task.values())]
            default = self._config.merge_method.options[name].default
            warnings += [f"{name} is not given for {name_some(others)}: there it is {default}"] if others else []
        return warnings

    def _one_model_warnings(self) -> list[str]:
        """Warnings about tensors of some tasks only, which a single model cannot contain."""
        warnings = []
        self._refuse_other_labels()
        for index, task in enumerate(self._tasks):
            own, held = [item for item in self.own if item.task == index], self._matching.names[index].pairs
            lost = [item for item in own if item.rule == KEPT and item.reason != EXCLUDED and item.nbytes]
            known = {item.base_name for item in own if item.reason == EXCLUDED}
            apart = [row for row in self.rows if index not in row.members]
            others = [row.name for row in apart if row.members or (row.parts and row.name not in held)]
            absent = [name for name in others if name not in known]
            unfit = [item.base_name for item in lost if item.base_name in self._base.tensors]
            unfit = [*absent, *(name for name in unfit if name not in absent)]
            # under a longer name, as a wrapper of its module gives it
            parts = [(item.shape, item.base_name.split(".")) for item in lost]
            shorter = [(shape, ".".join(own for own in name if own != part)) for shape, name in parts for part in name]
            unfit += [name for shape, name in shorter if self._lacking.get(name) == shape]
            # in another form in the same layer: experts that are stacked, or one by one
            learned = [item for item in lost if item.dtype.is_floating_point and not is_computed(item.base_name, item)]
            layers = {layer for item in learned for layer in find_layers(item.base_name)}
            lacking = [name for name in self._lacking if not is_computed(name, self._base.tensors[name])]
            unfit += [name for name in lacking if name not in unfit and layers & find_layers(name)]
            unfit = [name for name in unfit if not _is_statistic(name)]
            if lost:
                names = name_some([item.name for item in lost])
                warnings.append(f"{task.title}: the merged model cannot contain {names}; they are left out")
            if unfit and not self._config.allow_missing:
                raise DataError(
                    f"{task.title} lacks {name_some(unfit)}, or has them in another shape or type, and method "
                    f"{self._config.method!r} would merge them without it. Load and save all models with one version "
                    "of transformers if they differ in form, exclude them (the base's are kept), choose a method with "
                    "masks, or set allow_missing (--allow-missing)."
                )
            if absent:
                warnings.append(f"{task.title} lacks {', '.join(absent)}: these are merged from the other tasks")
        if self._lacking:
            warnings.append(f"no task has {name_some([*self._lacking])}: the merged model gets the base's")
        return warnings

    def _refuse_other_labels(self) -> None:
        """Refuses to mix rows of a head that mean other classes in one task than in the base, or in another task."""
        first, expected = self._base, dict[str, str]()
        for index, source in enumerate((self._base, *self._tasks), -1):
            found = read_labels(source.config)
            if found and not expected:
                first, expected = source, found
            other = [key for key in expected if found.get(key, expected[key]).casefold() != expected[key].casefold()]
            if not other:
                continue
            rows = find_label_rows(source.tensors, source.config, len(found))
            mixed = [row.name for row in self.rows if row.members.get(index) in (rows or ())]
            if mixed or rows == []:
                key, where = other[0], name_some(mixed) or "a head that was not found"
                raise DataError(
                    f"{source.title} has other classes (class {key} is {found[key]!r}, in {first.title} "
                    f"{expected[key]!r}), and method {self._config.method!r} would mix their rows in {where}. Exclude "
                    "them (the base's are kept), use the same order of classes, or choose a method with masks."
                )

    def check_given(self, model: Source) -> None:
        """Refuses a model of method `"given"` that lacks a merged tensor."""
        for row in self.rows:
            found = model.tensors.get(row.name)
            if row.members and (found is None or found.shape != row.shape or not found.dtype.is_floating_point):
                raise DataError(
                    f"{model.title} has no floating-point {row.name!r} of shape {list(row.shape)}; give a model that "
                    "was merged from these tasks, or exclude the tensor."
                )

    def check_statistics(self, files: Sequence[Source]) -> None:
        """Refuses statistics of another kind, and those without a merged tensor of their task in its shape."""
        method = self._config.merge_method
        grams = method.statistics == "gram"
        known = [row.members for row in self.rows if row.members]
        if grams:
            known = [members for members in known if any(name in files[i].tensors for i, name in members.items())]
        for index, (task, file) in enumerate(zip(self._tasks, files, strict=True)):
            advice = f"make it with hf-ext emr statistics {task.spec} --kind {method.statistics}"
            if file.metadata.get("kind") != method.statistics:
                raise ValueError(
                    f"{file.title} hold kind {file.metadata.get('kind')!r}, method {method.name!r} needs "
                    f"{method.statistics!r}: {advice}."
                )
            for name in (members[index] for members in known if index in members):
                shape, found = task.tensors[name].shape, file.tensors[name].shape if name in file.tensors else None
                if grams:
                    shape = (shape[0 if inputs_first(file, name) else -1],) * 2 if len(shape) == 2 else ()
                if found != shape:
                    told = "missing" if found is None else list(found)
                    raise ValueError(
                        f"{file.title}: {name!r} must be {list(shape)} and is {told}; {advice}, or exclude it."
                    )
        if not known:
            raise ValueError(f"no merged tensor has a gram in {files[0].title}: they are of another model.")

    def _decide(self, name: str, info: TensorInfo) -> Row:
        holders = {index: names.pairs[name] for index, names in enumerate(self._matching.names) if name in names.pairs}
        reason, merged = self._raw_reason(name, info), dict[int, str]()
        averaged = reason == STATISTIC and not self._config.with_masks
        for index, own in holders.items():
            if reason is not None and not averaged:
                # a task may have it unchanged, but for statistics
                unlike = reason == EXCLUDED or (reason == STATISTIC and info.dtype.is_floating_point)
                self._keep(index, own, KEPT if unlike else COMPARED, reason)
            elif self._takes_part(index, name, own):
                merged[index] = own
        if (averaged or reason is None) and not holders:
            self._lacking[name] = info.shape
        dtype = getattr(torch, self._config.dtype) if merged and self._config.dtype else info.dtype
        if averaged and merged:
            wider = info.dtype.is_floating_point and torch.promote_types(info.dtype, dtype) == dtype
            tasks = [self._tasks[index] for index in merged]
            shares = self._config.find_shares(name, self._depths[name], [task.label for task in tasks])
            held = zip((self._base, *tasks), (name, *merged.values()), shares, strict=False)
            return Row(name, info.shape, dtype if wider else info.dtype, parts=tuple(part for part in held if part[2]))
        return Row(name, info.shape, dtype, merged)

    def _raw_reason(self, name: str, info: TensorInfo) -> str | None:
        """The reason why a tensor of the base is not merged, if there is one."""
        if self._is_excluded(name):
            return EXCLUDED
        if _is_statistic(name):
            return STATISTIC
        if is_computed(name, info):
            return COMPUTED
        if not info.dtype.is_floating_point:
            return WHOLE_NUMBERS
        return "empty" if 0 in info.shape else None

    def _takes_part(self, index: int, name: str, own: str) -> bool:
        """True if a task's tensor is merged; otherwise it is kept."""
        ours, task = self._base.tensors[name], self._tasks[index]
        info, other_tokens = task.tensors[own], self._matching.vocabularies[index].get(name)
        if self._is_excluded(own):
            reason = EXCLUDED
        elif _is_statistic(name) and info.numbers == ours.numbers and info.dtype.is_complex <= ours.dtype.is_complex:
            return True
        elif ours.dtype.is_floating_point and not info.dtype.is_floating_point:
            reason = f"{info.dtype} in the task"
        elif other_tokens is not None:
            # there must be a place for rows of other tokens than the base's
            reason = f"another vocabulary ({other_tokens})"
            if not self._config.with_masks:
                raise DataError(
                    f"{name!r}: {task.title} has {reason}, and method {self._config.method!r} makes one model, which "
                    "has the base's tokenizer. Choose a method with masks, where each task keeps its own; or exclude "
                    "the tensor, so that the base's is kept; or give all models one vocabulary first, as mergekit "
                    "does."
                )
            self._other_tokens.append(f"{name!r}: {task.title} has {reason}: it keeps its own")
        elif info.shape == ours.shape:
            return True
        else:
            reason = f"shape {list(info.shape)}, in the base {list(ours.shape)}"
        self._keep(index, own, KEPT, reason)
        return False

    def _decide_rest(self, index: int, names: Names) -> None:
        """Decides on the tensors of a task that the base does not have, or has under another name."""
        task, aliases = self._tasks[index], self._matching.aliases
        rest = {own: names.in_base(own) for own in task.tensors}
        rest = {own: name for own, name in rest.items() if name in aliases or names.pairs.get(name) != own}
        computed = {own for own in rest if is_computed(own, task.tensors[own])}
        places = task.places if computed else None
        for own, name in rest.items():
            if name in aliases:
                self._keep(index, own, COMPARED, TIED)
            elif own in computed and places is not None and own not in places:
                self._keep(index, own, SKIPPED, "computed by the model, which no longer saves it")
            else:
                self._keep(index, own, KEPT, "not in the base")

    def _keep(self, index: int, name: str, rule: str, reason: str) -> None:
        info, base_name = self._tasks[index].tensors[name], self._matching.names[index].in_base(name)
        self.own.append(Own(index, name, base_name, info.shape, info.dtype, rule, reason))

    def _is_excluded(self, name: str) -> bool:
        return any(pattern.match(name) for pattern in self._excluded)


def find_layers(name: str) -> set[str]:
    """The numbered layers that a tensor is in."""
    parents = (name[:at] for at, letter in enumerate(name) if letter == ".")
    return {parent for parent in parents if parent.rpartition(".")[2].isdigit()}


def _is_statistic(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last.startswith("running_") or last == "num_batches_tracked"


def is_computed(name: str, info: TensorInfo | Own | torch.Tensor) -> bool:
    """True if a buffer follows from the configuration: positions, rotary frequencies, masks, which may be infinite."""
    last = name.rpartition(".")[2]
    # one mask for all heads; a bias of each head is learned
    causal_mask = name.endswith("attn.bias") and info.shape == (1, 1, *2 * info.shape[-1:])
    float_mask = info.dtype.is_floating_point and last.endswith("mask")
    return last in _COMPUTED_BUFFERS or last.endswith("_cached") or float_mask or causal_mask


def inputs_first(file: Source, name: str) -> bool:
    """True if the rows of a linear layer's weight are its inputs."""
    try:
        return name in list(json.loads(file.metadata.get("inputs_first", "[]")))
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{file.title}: `inputs_first` of the metadata is no list of names; make it again.") from error


def name_some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more tensors" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
