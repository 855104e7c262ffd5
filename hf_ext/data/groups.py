"""Groups of examples that resemble one another: named by a column, by folders, or by the names of files."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa

from .times import to_seconds

# Columns that say from whom or where an example comes. Examples of one speaker resemble one another: a model that has
# heard one of them knows the others, so that they stay together, and the number of a speaker is no input.
_PERSONS = (
    "speaker|spk|subject|subj|patient|person|user|participant|animal|client|customer|author|writer|reader|singer|child"
    "|student|driver|donor|volunteer|player|worker|mouse|sprecher(in)?|proband(in)?|nutzer(in)?|kunden?|autor(in)?"
    "|locuteur|sujet|utilisateur|auteur|hablante|paciente|sujeto|usuario|cliente|paziente|utente"
)
_OTHERS = (
    "group|session|recording|device|machine|household|family|hospital|site|lot|batch|thread|conversation|dialogue"
    "|document|doc|article|video|clip|movie|song|slide|plate|case|visit|trial|fold"
)
PERSONS, GROUPS = (
    re.compile(rf"({names})s?([ _-]?(id|no|nr|number|nummer|name|code|key|uuid))?", re.IGNORECASE)
    for names in (_PERSONS, f"{_PERSONS}|{_OTHERS}")
)
# Other numbers that name something: order_id, userId, pid, Kundennummer.
_IDS = re.compile(r"(?i:.*[\W_](id|nr|no|uuid|number)|.*nummer|[a-z]{1,2}id)|.*[a-z]Id|.*ID")
# A column of any other name, or the beginnings of file names, name groups if so many examples are of one that has
# several, if there are so many groups, and if none has more than this share of all.
_IN_SEVERAL, _FEWEST, _LARGEST = 0.5, 8, 0.2
# Series that share steps: their words, the most steps that are compared, and the fewest that tell something.
OVERLAP, _MOST_STEPS, _LEAST_PART = "series that share steps, as windows of one recording do,", 5_000_000, 4
_BASE, _NOTHING = 6364136223846793005, 2**64 - 1


class Groups(NamedTuple):
    """The group of each example, what they are in words, and whether their name says that they are groups."""

    of: list[Any]
    told: str
    named: bool = True


def find_groups(data: datasets.Dataset, labels: list[Any], inputs: set[str]) -> list[Groups]:
    """
    Ways to group examples, the best first.

    Columns of persons come first, as sessions and devices are those of a person; then other columns, folders that are
    no classes, and names of files such as `patient3_slice7`. Columns that a model reads are no groups.
    """
    # A class of one speaker stays in the training; where each has one, speakers are the classes.
    named = name_groups(data)
    others = [Groups(of, f"examples of one {name}", False) for name, of in _other_columns(data, inputs).items()]
    others = [groups for groups in others if _recurs(groups.of)]
    found = [*named, *sorted(others, key=lambda groups: -len({*groups.of}))]
    found = [groups for groups in found if _separable(groups.of, labels, any)]
    windows = (_find_windows(data, name) for name in sorted(inputs))
    found += [Groups(of, OVERLAP, False) for of in windows if of is not None]
    if (paths := find_paths(data)) is not None:
        # Folders of patients, say, whose classes stand in a metadata.csv. Folders that are the classes separate
        # nothing.
        folders = [path.parent for path in paths]
        if _separable(folders, labels, all):
            found.append(Groups(folders, f"files of one folder, such as {folders[0].name},"))
        found += [groups for groups in [_group_by_names(paths, labels)] if groups is not None]
    return found


def name_groups(data: datasets.Dataset) -> list[Groups]:
    """The groups of each column whose name says that it has some: persons first."""
    names = [name for name, kind in data.features.items() if GROUPS.fullmatch(name) and _is_value(kind)]
    persons_first = sorted(names, key=lambda name: not PERSONS.fullmatch(name))
    return [Groups(_values(data, name), f"examples of one {name}") for name in persons_first]


def _values(data: datasets.Dataset, name: str) -> list[Any]:
    # Of whom nothing is known, that is a group of its own.
    cells = data.with_format(None)[name]
    return [index if value in (None, "") else (value,) for index, value in enumerate(cells)]


def _is_value(kind: Any) -> bool:
    return isinstance(kind, datasets.Value | datasets.ClassLabel)


def _other_columns(data: datasets.Dataset, inputs: set[str]) -> dict[str, list[Any]]:
    """Columns of texts that are no dates, and of numbers that are called as a number of something."""
    found = {}
    for name, kind in data.features.items():
        if name in inputs or name in ("label", "labels") or not _is_value(kind) or GROUPS.fullmatch(name):
            continue
        texts = getattr(kind, "dtype", "") in ("string", "large_string")
        if (
            texts
            and to_seconds(pd.Series([cell for cell in data.with_format(None)[name][:100] if cell])) is None
            or "int" in getattr(kind, "dtype", "")
            and _IDS.fullmatch(name)
        ):
            found[name] = _values(data, name)
    return found


def _find_windows(data: datasets.Dataset, name: str) -> list[int] | None:
    """
    Groups of series that share steps, as windows that were cut from one recording; none where no two do.

    Of all parts of a quarter of a series' length, those are kept whose hash is the least among their neighbours: the
    same in each series that holds them, so that two series that share half of their steps share a kept part.
    """
    kind = getattr(data.features[name], "feature", None)
    if not isinstance(kind, datasets.Value) or "float" not in kind.dtype:
        return None
    held = data.with_format("arrow").select_columns([name])[:][name].combine_chunks()
    if len(held.flatten()) > _MOST_STEPS:
        return None
    kept = [_keep_parts(np.asarray(series.values.to_numpy(zero_copy_only=False))) for series in held]
    groups = join_units(kept, list(range(len(kept))))
    return groups if len({*groups}) < len(groups) else None


def _keep_parts(series: np.ndarray) -> tuple[int, ...]:
    size = min(64, max(_LEAST_PART, len(series) // 4))
    if len(series) < 2 * size:
        return ()
    # A polynomial of the bits of the numbers, modulo 2 ** 64.
    powers = np.array([pow(_BASE, place, 2**64) for place in range(size)], dtype=np.uint64)
    parts = np.lib.stride_tricks.sliding_window_view(series.astype(np.float64), size)
    hashes = (np.ascontiguousarray(parts).view(np.uint64) * powers).sum(-1)
    # What stands still, or repeats a few numbers, is like much else.
    hashes[(np.diff(np.sort(parts, axis=-1), axis=-1) != 0).sum(-1) < size // 2] = _NOTHING
    least = np.lib.stride_tricks.sliding_window_view(hashes, size).min(-1)
    return tuple(int(one) for one in np.unique(least) if one != _NOTHING)


def join_units(keys: list[tuple[Any, ...]], groups: list[Any]) -> list[int]:
    """The number of the unit of each example: those of one group are in one, and those of equal inputs."""
    parent = list(range(len(keys)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    first: dict[Any, int] = {}
    for index, (own, group) in enumerate(zip(keys, groups, strict=True)):
        for name in (*own, ("group", group)):
            if name in first:
                parent[root(index)] = root(first[name])
            else:
                first[name] = index
    return [root(index) for index in range(len(keys))]


def _recurs(groups: list[Any]) -> bool:
    """True if most examples are of a group of several, and groups are many and small."""
    sizes = Counter(groups).values()
    several = sum(size for size in sizes if size > 1)
    return len(sizes) >= _FEWEST and several >= _IN_SEVERAL * len(groups) and max(sizes) <= _LARGEST * len(groups)


def _group_by_names(paths: list[Path], labels: list[Any]) -> Groups | None:
    """
    Groups by the beginnings of file names, the shortest that name some: `patient3` of `patient3_slice7`, the day of
    `IMG_20240131_101502`. A beginning holds a number; `cat` of `cat_7` is a kind of thing.
    """
    words = [re.findall(r"[^\W_]+", path.stem) for path in paths]
    for count in range(1, max(map(len, words), default=0)):
        groups = [(*of[:count],) if len(of) > count else path for of, path in zip(words, paths, strict=True)]
        starts = [group for group in groups if isinstance(group, tuple)]
        numbered = sum(any(map(str.isdigit, "".join(group))) for group in starts)
        if numbered >= 0.8 * len(starts) and _recurs(groups) and _separable(groups, labels, all):
            first, *_ = (of for of, size in Counter(groups).items() if size > 1)
            alike = [path.name for path, of in zip(paths, groups, strict=True) if of == first]
            return Groups(groups, f"files such as {alike[0]} and {alike[1]}", False)
    return None


def _separable(groups: list[Any], labels: list[Any], some: Callable[[Iterable[bool]], bool]) -> bool:
    """True if each class, or any, has two groups or more, and some group has two examples or more."""
    found: dict[Any, set[Any]] = defaultdict(set)
    labelled = any(label is not None for label in labels)
    for group, label in zip(groups, labels, strict=True):
        if label is not None or not labelled:
            found[label].add(group)
    return len(set(groups)) < len(groups) and some(len(of) > 1 for of in found.values())


def find_paths(data: datasets.Dataset) -> list[Path] | None:
    """The files of the examples, where each has one."""
    raw = data.with_format("arrow")
    for name, kind in data.features.items():
        if isinstance(kind, datasets.Image | datasets.Audio) or name == "file":
            column = raw.select_columns([name])[:][name].combine_chunks()
            # A column of a table may be called file, and hold texts.
            if not pa.types.is_struct(column.type):
                continue
            paths = column.field("path").to_pylist()
            return [Path(path) for path in paths] if paths and None not in paths else None
    return None
