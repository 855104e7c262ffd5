"""Groups of examples that resemble one another: named by a column, by folders, or by the names of files."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow as pa

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
# The beginnings of file names are groups if so many examples are of one that has several, if there are so many groups,
# and if none has more than this share of all.
_IN_SEVERAL, _FEWEST, _LARGEST = 0.5, 8, 0.2


class Groups(NamedTuple):
    """The group of each example, what they are in words, and whether their name says that they are groups."""

    of: list[Any]
    told: str
    named: bool = True


def find_groups(data: datasets.Dataset, labels: list[Any]) -> list[Groups]:
    """
    Ways to group examples, the best first.

    Columns of persons come first, as sessions and devices are those of a person; then other columns, folders that are
    no classes, and names of files such as `patient3_slice7`.
    """
    # A class of one speaker stays in the training; where each has one, speakers are the classes.
    found = [groups for groups in name_groups(data) if _separable(groups.of, labels, any)]
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
    values = datasets.Value | datasets.ClassLabel
    names = [name for name, kind in data.features.items() if GROUPS.fullmatch(name) and isinstance(kind, values)]
    persons_first = sorted(names, key=lambda name: not PERSONS.fullmatch(name))
    # Of whom nothing is known, that is a group of its own.
    return [
        Groups(
            [index if value in (None, "") else (value,) for index, value in enumerate(data.with_format(None)[name])],
            f"examples of one {name}",
        )
        for name in persons_first
    ]


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
