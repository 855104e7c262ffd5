"""Held-out examples for data without splits, disjoint from the training examples and their groups."""

import hashlib
import io
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa

from ..errors import DataError
from .broken import is_broken_picture, open_bytes
from .labels import are_values
from .roles import GROUPS, PERSONS, TIME
from .sound_files import is_broken_sound
from .times import to_seconds

# Columns that name an example and are no part of it.
_NAMES = {"file", "file_name", "path", "__key__", "__url__", "first_row", "id", "index"}


def slice_split(split: str, count: int) -> range:
    """The numbers that a split such as `train[:80%]` takes of so many."""
    name = split.partition("[")[0]
    found = datasets.ReadInstruction.from_spec(split).to_absolute({name: count})
    if len(found) != 1:
        raise DataError(f"the split {split!r} has {len(found)} parts: name one slice.")
    return range(found[0].from_ or 0, count if found[0].to is None else found[0].to)


def hold_out(data: datasets.Dataset, share: float, seed: int, measures: bool) -> datasets.Dataset:
    """
    The examples that measure, or the others, which are trained on.

    Whether an example measures follows from a hash of what it holds, not from its place: sorted data are split as well
    as mixed ones. Of each class the same share is taken, of two examples or more at least one. Examples with equal
    inputs stay together, and so do those of one group: a column such as `speaker` names them, or folders that are no
    classes.

    Args:
        data (`Dataset`): All examples.
        share (`float`): The share that measures.
        seed (`int`): Another seed takes other examples.
        measures (`bool`): The examples that measure, not the others.

    Raises:
        DataError: If nothing would be left to measure on, or to train on.
    """
    chosen = choose(data, share, seed)
    if chosen.all() or not chosen.any():
        raise DataError(
            f"{len(data)} examples cannot be split into some to train on and some to measure on: they are fewer than "
            "two, or all equal or of one group. Remove hold_out and data.eval, or give separate evaluation data."
        )
    return data.select(np.flatnonzero(chosen == measures))


def choose(data: datasets.Dataset, share: float, seed: int) -> np.ndarray:
    """Boolean array of the held-out examples."""
    keys = hash_inputs(data)
    labels = read_labels(data)
    groups = find_groups(data, labels) or list(range(len(keys)))
    units = join_units(keys, groups)
    members: dict[int, list[int]] = defaultdict(list)
    for index, unit in enumerate(units):
        members[unit].append(index)
    # A unit of several classes counts for its first one.
    strata: dict[Any, list[int]] = defaultdict(list)
    for unit, indices in members.items():
        strata[labels[indices[0]]].append(unit)
    chosen, has_broken = np.zeros(len(keys), dtype=bool), _find_broken(data, labels)
    for found in strata.values():
        count = sum(len(members[unit]) for unit in found)
        wanted = min(max(1, round(share * count)), count - 1)
        taken = 0
        order = sorted(found, key=lambda unit: _draw(seed, min(keys[index] for index in members[unit])))
        # The last unit stays for the training.
        for unit in order[:-1]:
            if taken >= wanted:
                break
            # A training leaves broken files and gaps out and counts them; an evaluation would end.
            if has_broken(members[unit]):
                continue
            chosen[members[unit]] = True
            taken += len(members[unit])
    if not chosen.any() and len(members) > 1:
        # Each class has one unit: one of them measures all the same.
        whole = [unit for unit, indices in members.items() if not has_broken(indices)]
        unit = min(whole or members, key=lambda unit: _draw(seed, min(keys[index] for index in members[unit])))
        chosen[members[unit]] = True
    return chosen


def _find_broken(data: datasets.Dataset, labels: list[Any]) -> Callable[[list[int]], bool]:
    """Tells whether some of these examples have a broken file, or no class where others have one."""
    kinds = {name: kind for name, kind in data.features.items() if _is_file(kind)}
    # Sounds are kept as undecoded images.
    checks = {
        name: is_broken_picture if isinstance(kind, datasets.Image) and kind.decode else is_broken_sound
        for name, kind in kinds.items()
    }
    raw = data.select_columns(list(kinds))
    for name, kind in kinds.items():
        raw = raw.cast_column(name, type(kind)(decode=False))
    has_labels = any(label is not None for label in labels)

    def has_broken(indices: list[int]) -> bool:
        rows = (raw[index] for index in (indices if checks else ()))
        gaps = has_labels and any(labels[index] is None for index in indices)
        return gaps or any(check(row[name]) for row in rows for name, check in checks.items())

    return has_broken


def _choose_inputs(data: datasets.Dataset) -> list[list[str]]:
    """
    The columns by whose content examples are equal, in sets: examples are equal where they agree on one set.

    A number of the row, a date, a comment or another caption makes no other example of the same picture or text. So
    files count alone, of pairs the clean ones, since a clean picture may have several bad ones; then numbers in lists,
    without their times; then each text for itself; else all columns but labels and names.
    """
    kinds = data.features
    files = [name for name, kind in kinds.items() if _is_file(kind)]
    if files:
        return [["hq"] if "hq" in files else files]
    columns = sorted({*data.column_names} - {*_NAMES, "label", "labels"}) or data.column_names
    lists = [name for name in columns if _is_list(kinds[name])]
    if series := [name for name in lists if not TIME.fullmatch(name)] or lists:
        return [series]
    texts = {
        name: [value for value in data.with_format(None)[name] if value]
        for name in columns
        if getattr(kinds[name], "dtype", "") in ("string", "large_string")
    }
    return [[name] for name in _choose_texts(texts)] or [columns]


def _choose_texts(texts: dict[str, list[str]]) -> list[str]:
    """Those columns of texts that may be inputs; each step leaves some, or changes nothing."""

    def is_prose(name: str) -> bool:
        # Other scripts have no blanks.
        return 2 * sum(" " in value.strip() or not value.isascii() for value in texts[name]) > len(texts[name])

    def mean_length(name: str) -> float:
        return sum(map(len, texts[name])) / max(1, len(texts[name]))

    # A date with a time has a blank, too.
    names = [name for name, found in texts.items() if to_seconds(pd.Series(found[:100])) is None] or [*texts]
    # What has few values, such as a prompt or a topic, would join most examples.
    names = [name for name in names if len({*texts[name]}) > 0.1 * len(texts[name])] or names
    if prose := [name for name in names if is_prose(name)]:
        most = max(map(mean_length, prose))
        return [name for name in prose if mean_length(name) >= 0.5 * most]
    return names


def _is_list(kind: Any) -> bool:
    return not isinstance(kind, datasets.Value | datasets.ClassLabel | dict)


def hash_inputs(data: datasets.Dataset) -> list[tuple[bytes, ...]]:
    """Keys of each example; two examples are equal where one key of theirs is."""
    chosen = _choose_inputs(data)
    columns = [name for names in chosen for name in names]
    raw = data.select_columns(columns).with_format("arrow")
    sizes = _sizes(raw, columns)
    keys: list[tuple[bytes, ...]] = []
    for table in raw.iter(batch_size=256):
        for index, row in enumerate(table.to_pylist(), len(keys)):
            # An example without a text is like no other.
            keys.append(tuple(_hash_row(row, names, sizes, index) for names in chosen))
    return keys


def _hash_row(row: dict[str, Any], names: list[str], sizes: dict[int, int], index: int) -> bytes:
    digest = hashlib.sha256("\0".join(names).encode())
    for name in names:
        _add(digest, row[name], sizes)
    if all(row[name] in (None, "") for name in names):
        digest.update(str(index).encode())
    return digest.digest()


def _sizes(raw: Any, columns: list[str]) -> dict[int, int]:
    """Number of named files of each size: a file whose size no other has is never read."""
    features = raw.features  # a copy of all, made each time
    files = [name for name in columns if _is_file(features[name])]
    count: dict[int, int] = defaultdict(int)
    for name in files:
        for table in raw.select_columns([name]).iter(batch_size=4096):
            column = table[name].combine_chunks()
            for path, held in zip(column.field("path").to_pylist(), column.field("bytes").is_valid(), strict=True):
                if not held.as_py() and path is not None and Path(path).is_file():
                    count[Path(path).stat().st_size] += 1
    return count


def _is_file(feature: Any) -> bool:
    return isinstance(feature, datasets.Image | datasets.Audio)


def _add(digest: Any, value: Any, sizes: dict[int, int]) -> None:
    """Adds a value to a hash: of a file what is in it, wherever it lies."""
    if not (isinstance(value, dict) and value.keys() == {"bytes", "path"}):
        digest.update(repr(value).encode())
    elif isinstance(held := open_bytes(value), io.BytesIO):
        digest.update(held.getbuffer())
    elif Path(held).is_file():
        size = Path(held).stat().st_size
        digest.update(str(size).encode())
        if sizes.get(size, 2) > 1:
            digest.update(Path(held).read_bytes())
    digest.update(b"\0")


def read_labels(data: datasets.Dataset) -> list[Any]:
    """The class of each example; the same for all where they have none, or values, or one for each position."""
    nothing = [None] * len(data)
    kind = data.features.get("label")
    if not isinstance(kind, datasets.Value | datasets.ClassLabel):
        return nothing
    found = data.with_format(None)["label"][:]
    return nothing if not isinstance(kind, datasets.ClassLabel) and are_values(found) else found


def find_groups(data: datasets.Dataset, labels: list[Any]) -> list[Any] | None:
    """The group of each example, where a column or the folders of files name groups of which a class has several."""
    # A class of one speaker stays in the training; where each has one, speakers are the classes.
    for groups in _named_groups(data).values():
        if _separable(groups, labels, any):
            return groups
    paths = _paths(data)
    if paths is None:
        return None
    # Folders of patients, say, whose classes stand in a metadata.csv. Folders that are the classes separate nothing.
    groups = [path.parent for path in paths]
    return groups if _separable(groups, labels, all) else None


def lost_groups(data: datasets.Dataset) -> list[str]:
    """The columns that name groups of several examples, where a split cannot keep them together."""
    labels = read_labels(data)
    if find_groups(data, labels) is not None:
        return []
    return [name for name, groups in _named_groups(data).items() if len({*groups}) < len(groups)]


def _named_groups(data: datasets.Dataset) -> dict[str, list[Any]]:
    """The groups of each column that names some: persons first, as sessions and devices are those of a person."""
    names = [
        name
        for name, kind in data.features.items()
        if GROUPS.fullmatch(name) and isinstance(kind, datasets.Value | datasets.ClassLabel)
    ]
    return {
        # Of whom nothing is known, that is a group of its own.
        name: [index if value in (None, "") else (value,) for index, value in enumerate(data.with_format(None)[name])]
        for name in sorted(names, key=lambda name: not PERSONS.fullmatch(name))
    }


def _separable(groups: list[Any], labels: list[Any], some: Callable[[Iterable[bool]], bool]) -> bool:
    """True if each class, or any, has two groups or more, and some group has two examples or more."""
    found: dict[Any, set[Any]] = defaultdict(set)
    labelled = any(label is not None for label in labels)
    for group, label in zip(groups, labels, strict=True):
        if label is not None or not labelled:
            found[label].add(group)
    return len(set(groups)) < len(groups) and some(len(of) > 1 for of in found.values())


def _paths(data: datasets.Dataset) -> list[Path] | None:
    """The files of the examples, where each has one."""
    raw = data.with_format("arrow")
    for name, kind in data.features.items():
        if _is_file(kind) or name == "file":
            column = raw.select_columns([name])[:][name].combine_chunks()
            # A column of a table may be called file, and hold texts.
            if not pa.types.is_struct(column.type):
                continue
            paths = column.field("path").to_pylist()
            return [Path(path) for path in paths] if paths and None not in paths else None
    return None


def join_units(keys: list[tuple[bytes, ...]], groups: list[Any]) -> list[int]:
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


def _draw(seed: int, keys: tuple[bytes, ...]) -> bytes:
    return hashlib.sha256(f"{seed} ".encode() + b"".join(keys)).digest()
