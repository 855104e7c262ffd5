"""Matching of a task's tensors to those of the base, and a check that the two fit together.

Plan and table of a merge and the extraction of a LoRA ask here; nobody else compares names.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from ..errors import DataError
from ..hub.checkpoints import TensorInfo
from . import loading
from .companions import UnreadableError, compare_tokens, count_tokens
from .sources import Source

# Names inside a PeftModel: of what an adapter wraps, and of the adapter that has no other name.
_INSIDE = re.compile(r"(^|\.)(base_layer|original_module|modules_to_save|default)(\.|$)")
# A prefix that fewer names have is a layer, not a wrapper.
_PREFIX_SHARE = 1 / 3


class Names:
    """The names of a task's tensors beside the base's, whose prefix may differ: a base saved without its head has
    `encoder.…` where its fine-tune has `bert.encoder.…`. `in_file` has each with the name in the task's file."""

    def __init__(self, base: Collection[str], task: Mapping[str, str]) -> None:
        def agreement(pair: tuple[str, str]) -> tuple[int, int]:
            return sum(pair[0] + name.removeprefix(pair[1]) in base for name in task), -len(pair[0]) - len(pair[1])

        self.base_prefix, self.task_prefix = max(product(_wrappers(base), _wrappers(task)), key=agreement)
        self.in_file, found = task, dict[str, str]()
        # a name that has the prefix goes before one that happens to fit without
        for name in sorted(task, key=lambda item: not item.startswith(self.task_prefix)):
            found.setdefault(self.in_base(name), name)
        self.pairs = {name: found[name] for name in base if name in found}

    def infos(self, base: Source, task: Source) -> dict[str, tuple[TensorInfo, TensorInfo]]:
        """Type and shape of each pair, by the name in the base."""
        return {name: (base.tensors[name], task.tensors[self.in_file[own]]) for name, own in self.pairs.items()}

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


@dataclass(frozen=True)
class Matching:
    """Base and tasks side by side: all that the table of a merge asks of names."""

    names: tuple[Names, ...]  # of each task
    # of each task: tensors with a row for each token where it has other tokens than the base, with the first of these
    vocabularies: tuple[dict[str, str], ...]
    aliases: dict[str, str]  # other names of tensors of the base, by the class or by its file
    given: dict[str, str]  # names of the base's tensors in the model of method `"given"`
    warnings: list[str]  # doubts that a task is a fine-tune of the base


def match_names(base: Source, tasks: Sequence[Source], *, given: Source | None = None, masks: bool = True) -> Matching:
    """Finds which tensor of a task is which of the base, and refuses a task that is no fine-tune of it. `given` is the
    model of that method; with `masks` a task keeps its own. All sources keep the names of their files."""
    names = tuple(match_fine_tune(base, task) for task in tasks)
    both, taken, warnings = list(zip(tasks, names, strict=True)), dict[int, str](), list[str]()
    aliases, unknown = _find_tied_names(base, both)
    known = (None, "", base.repo_id, base.spec, base.spec.partition("@")[0], base.config.get("_name_or_path"))
    for task, own in both:
        origin = task.config.get("base_model_name_or_path") or task.config.get("_name_or_path")
        if base.repo_id and isinstance(origin, str) and origin not in known and not Path(origin).is_absolute():
            warnings.append(
                f"{task.title} was made from {origin!r} by its configuration, not from {base.repo_id!r}: check it"
            )
        differing = [] if base.library == "peft" else loading.compare_settings(base.config, task.config)
        for key, expected, found in differing:
            told = f"{task.title} has {key} {found!r}, the base {expected!r}"
            # Heads of another size and another base of positions give the same numbers another meaning. One model of
            # both would be wrong; with masks each task is computed by its own configuration.
            if not masks and loading.MEANINGS.fullmatch(key.rpartition(".")[2]):
                raise DataError(
                    f"{told}: their weights have different meanings, so that a single merged model would be wrong. "
                    "Leave the task out, or choose a method with masks."
                )
            warnings.append(f"{told}: the merged model mixes them")
        if own.task_prefix != own.base_prefix and _same_class(base, task):
            prefixes = f"its tensors {own.task_prefix}*, the base {own.base_prefix}*"
            warnings.append(f"{task.title} names {prefixes}: both are treated as the same")
    warnings += unknown
    vocabularies = tuple(_compare_vocabularies(base, task, own, taken, warnings, masks) for task, own in both)
    in_given = {} if given is None else _match_given(base, given, warnings)
    return Matching(names, vocabularies, aliases, in_given, warnings)


def _match_loaded(base: Source, task: Source) -> Names:
    """The names of a task beside the base's, both as transformers reads them. A task whose file has other names, of
    another version or of a tensor that its class ties, gets those of the base's file."""
    _refuse_other_model(base, task)
    names = Names(base.tensors, {name: name for name in task.tensors})
    paired = set(names.pairs.values())
    # of an unmatched tensor of the task, or with a row for each token
    shapes = {info.shape for name, info in task.tensors.items() if name not in paired}
    shapes |= {(size,) for size in task.vocabularies}
    lacking = [info.shape for name, info in base.tensors.items() if name not in names.pairs]
    renamed = any(shape in shapes or shape[:1] in shapes for shape in lacking)
    if task.library != "transformers" or not renamed:
        return names
    try:
        ours, theirs = (loading.find_loaded_names(source.tensors, source.config) for source in (base, task))
    except ValueError:
        # Tensors that do not fit are refused, or kept with a warning.
        return names
    loaded = Names(ours, theirs)
    if len(loaded.pairs) <= len(names.pairs):
        return names
    new: dict[str, str] = {}
    for own, name in loaded.pairs.items():
        # Of names for one tensor of the base's file the first counts.
        new.setdefault(loaded.in_task(ours[own]), theirs[name])
    taken = {*loaded.pairs.values(), *(name for name, stored in theirs.items() if stored in new.values())}
    return Names(base.tensors, new | {name: stored for name, stored in theirs.items() if name not in taken})


def _match_given(base: Source, model: Source, warnings: list[str]) -> dict[str, str]:
    """The names in a merged model, which has the base's tokens, of the base's tensors."""
    names = _match_loaded(base, model)
    for name, why in _compare_vocabularies(base, model, names, {}, warnings, False).items():
        raise DataError(f"{name!r}: {model.title} has another vocabulary ({why}); give one with the base's tokens.")
    return {name: names.in_file[own] for name, own in names.pairs.items()}


def _compare_vocabularies(
    base: Source, task: Source, names: Names, taken: dict[int, str], warnings: list[str], masks: bool
) -> dict[str, str]:
    """Tensors with a row for each token, where these are other tokens than the base's, with the first difference."""
    infos = names.infos(base, task)
    rows = _find_token_rows((base.vocabularies, task.vocabularies), infos)
    sizes = {name: f"{theirs} tokens, the base {ours}" for name, (ours, theirs) in rows.items() if ours != theirs}
    if sizes or base.library == "peft":
        return sizes
    files = base.companions.files, task.companions.files
    try:
        difference = compare_tokens(*files, taken)
    except UnreadableError as error:
        warnings.append(f"{task.title} and the base: the tokenizers were not compared: {error}")
        return {}
    if not difference:
        return {}
    # a size that is the default of its class is in no file, and takes seconds to find
    resolved = [loading.resolve_settings(source.config) for source in (base, task)]
    ours, theirs = map(loading.find_vocabularies, resolved)
    rows |= _find_token_rows((ours, theirs), infos)
    unknown = resolved[0] is base.config and resolved[1] is task.config
    if rows or not (unknown or ours or theirs):
        return dict.fromkeys(rows, difference)
    counted = frozenset([max(map(count_tokens, files))])
    rows = _find_token_rows((counted, counted), infos)
    if not rows:
        told = f"{task.title} has another vocabulary ({difference}), and no tensor has vocab_size rows by config.json"
        # the class may have them in a head that is not shared
        places = None if unknown else base.places
        lengths = {(size,) for size in ours}
        shared: Collection[str] = () if places is None else Names(places, names.pairs).pairs
        if not masks and (places is None or any(places[name].shape[:1] in lengths for name in shared)):
            raise DataError(f"{told}. Correct it, so that they are found, or choose a method with masks.")
        warnings.append(f"{told}: all are merged as they stand")
    return dict.fromkeys(rows, difference)


def _find_token_rows(
    known: tuple[Collection[int], Collection[int]], infos: Mapping[str, tuple[TensorInfo, TensorInfo]]
) -> dict[str, tuple[int, int]]:
    """Tensors with a row for each token, by two sets of sizes or the one that tells, and their rows."""
    shapes = {name: (ours.shape, own.shape) for name, (ours, own) in infos.items()}
    return {
        name: (first[0], second[0])
        for name, (first, second) in shapes.items()
        if any(known) and first and second and first[1:] == second[1:]
        if all(not sizes or shape[0] in sizes for sizes, shape in zip(known, (first, second), strict=True))
    }


def _find_tied_names(base: Source, tasks: Sequence[tuple[Source, Names]]) -> tuple[dict[str, str], list[str]]:
    """Tensors that are one and the same in the model: as the file says, and as the class of transformers ties them,
    which is asked only where a checkpoint holds two tensors that it could tie; and a warning if it is not known."""
    # what huggingface_hub and transformers write for a tensor that was left out: its name and the one that was kept
    tied = {name: kept for name, kept in base.metadata.items() if kept in base.tensors and name not in base.tensors}
    model, warnings, rows = None, list[str](), {(size,) for size in base.vocabularies}
    every = [base.tensors.values(), *([task.tensors[own] for own in names.in_file.values()] for task, names in tasks)]
    shapes = [[info.shape for info in held if info.shape[:1] in rows] for held in every]
    # models tie tensors of one shape with a row for each token
    if base.library == "transformers" and any(len(set(found)) < len(found) for found in shapes):
        try:
            model, why = base.outline, "its class is none of transformers"
        except ValueError as error:
            why = str(error)
        if model is None:
            warnings.append(f"{base.title}: {why}; only what its file says about tied tensors is known")
    stored = base.tensors
    for names in () if model is None else loading.find_tied(model):
        kept = next((name for name in names if name in stored), None)
        if kept is not None:
            others = (name for name in names if name != kept)
            tied |= {name: kept for name in others if name not in stored or stored[name].shape == stored[kept].shape}
    return tied, warnings


def _refuse_other_model(base: Source, task: Source) -> None:
    """Refuses a task whose configuration tells another kind of model than the base, and a PeftModel that was saved
    with its adapters inside. Those that belong to the model itself are in the base too, by names of their own."""
    if base.wrapped:
        raise DataError(
            f"{base.title} has names of a wrapped model, such as {base.wrapped!r}, which its class would not load. "
            "Save it without, accelerator.unwrap_model(model).save_pretrained(FOLDER), and give that folder."
        )
    native = any(map(_INSIDE.search, base.tensors))
    for source in (base, task):
        inside = [name for name in source.tensors if source.library != "peft" and _INSIDE.search(name)]
        if inside and (not native or any(".default" in name for name in inside) or not _may_wrap(source)):
            raise DataError(
                f"{source.title} is a PeftModel whose adapters are not merged into its weights ({inside[0]!r}). Merge "
                "them, model.merge_and_unload().save_pretrained(FOLDER), and give that folder."
            )
    if base.config and task.config and base.library != task.library:
        raise DataError(f"{task.title} is a {task.library} model, {base.title} a {base.library} model.")
    for key in loading.KINDS:
        expected, found = base.config.get(key), task.config.get(key)
        # Of a model of several parts, such as CLIP, one may have been fine-tuned and saved alone.
        parts = [part.get(key) for part in base.config.values() if isinstance(part, dict)]
        if expected is not None and found is not None and found not in (expected, *parts):
            raise DataError(
                f"{task.title} has {key} {found!r}, {base.title} has {expected!r}: they cannot come from "
                "one model. Give the model that the task was fine-tuned from as base, or leave the task out."
            )


def _may_wrap(source: Source) -> bool:
    """True if a class has layers of its own that are named as those of an adapter, or is unknown."""
    places = {} if "_class_name" in source.config else source.places
    return places is None or any(map(_INSIDE.search, places))


def _same_class(base: Source, task: Source) -> bool:
    """True for two of one class: names of these differ only where a program changed them."""
    return bool(task.config.get("architectures") == base.config.get("architectures"))


def _unwrap(base: Source, task: Source, names: Names) -> Names:
    """The names without those of a wrapper, which the class of both would not load; of the base they are refused."""
    ours, theirs = names.base_prefix, names.task_prefix
    if ours == theirs or not _same_class(base, task):
        return names
    if ours.endswith(theirs) and (places := base.places) and not places.keys() & names.pairs.keys():
        base.wrapped = next(iter(names.pairs))
        _refuse_other_model(base, task)
    elif theirs.endswith(ours) and (places := task.places) and not places.keys() & names.pairs.values():
        task.wrapped = next(iter(names.pairs.values()))
        names = Names(base.tensors, {names.in_base(name): own for name, own in names.in_file.items()})
    return names


def match_fine_tune(base: Source, task: Source) -> Names:
    """The names of a task; refuses one that shares too few tensors with the base to be a fine-tune of it."""
    names = _unwrap(base, task, _match_loaded(base, task))
    tensors = {name: task.tensors[own] for name, own in names.in_file.items()}
    counts = [sum(info.dtype.is_floating_point for info in held.values()) for held in (base.tensors, tensors)]
    numbers = {name: two for name, two in names.infos(base, task).items() if two[0].dtype.is_floating_point}
    tokens = _find_token_rows((base.vocabularies, task.vocabularies), numbers)
    others = {name: two for name, two in numbers.items() if two[0].shape != two[1].shape and name not in tokens}
    fitting = len(numbers) - len(others)
    if 2 * fitting >= min(counts) and fitting:
        return names
    examples = [f"{names.pairs[name]!r} {[*own.shape]} ({[*ours.shape]})" for name, (ours, own) in others.items()]
    examples += [f"{name!r} (not there)" for name in tensors if name not in set(names.pairs.values())]
    raise DataError(
        f"{task.title} is no fine-tune of {base.title}: of {counts[1]} floating-point tensors (base: {counts[0]}) "
        f"only {fitting} have the same name and shape. Others, with their shape in the base: "
        f"{', '.join(examples[:3])}. Give the model that the task was fine-tuned from as base, or leave the task out."
    )
