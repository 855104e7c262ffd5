"""Held-out examples for data without splits, disjoint from the training examples and their groups, which resemble
one another: named by a column, by folders, or by the names of files."""

import hashlib
import html
import io
import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from datasets.data_files import SPLIT_KEYWORDS

from ..errors import DataError
from ..terminal import count_of
from .cells import are_values, to_seconds
from .files import is_broken_picture, is_broken_sound, open_bytes
from .roles import GROUPS, PERSONS, TIME
from .tables import LABEL

# The split that a word means in folders, files and cells, as `datasets` has it.
SPLIT_WORDS = {word: str(kind) for kind, words in SPLIT_KEYWORDS.items() for word in words}
# A name of which a word for a split is a part, as of train-00001 and GunPoint_TEST; the last word counts.
SPLIT_NAME = re.compile(rf"(?:.*[\W_\d])?({'|'.join(SPLIT_WORDS)})(?:[\W_\d].*)?", re.IGNORECASE)
# Hashes of an example; two examples are equal where one hash of theirs is.
Keys = tuple[bytes, ...]
# More examples are compared by `hf-ext data check` alone.
_MOST_COMPARED = 5_000
_FILE = datasets.Image | datasets.Audio
# Columns that name an example and are no part of it.
_NAMES = {"file", "file_name", "path", "__key__", "__url__", "first_row", "id", "index"}
# The beginnings of file names are groups if so many examples are of one that has several, if there are so many groups,
# and if none has more than this share of all.
_IN_SEVERAL, _FEWEST, _LARGEST = 0.5, 8, 0.2


def split_of(name: str) -> str | None:
    """The split that a name of a file without its ending, or of a folder, says."""
    found = SPLIT_NAME.fullmatch(name)
    return found and SPLIT_WORDS[found[1].lower()]


def slice_split(split: str, count: int) -> range:
    """The numbers that a split such as `train[:80%]` takes of so many."""
    name = split.partition("[")[0]
    found = datasets.ReadInstruction.from_spec(split).to_absolute({name: count})
    if len(found) != 1:
        raise DataError(f"the split {split!r} has {len(found)} parts: name one slice.")
    return range(found[0].from_ or 0, count if found[0].to is None else found[0].to)


def make_part(columns: dict[str, list[Any]], features: dict[str, Any], split: str) -> datasets.Dataset:
    """The part that a split takes of examples in memory; columns whose type is not given hold texts."""
    kinds = datasets.Features({name: features.get(name, datasets.Value("string")) for name in columns})
    name = datasets.NamedSplit(split.partition("[")[0])
    data = datasets.Dataset.from_dict(columns, features=kinds, split=name)
    return data.select(slice_split(split, len(data)))


def hold_out(data: datasets.Dataset, share: float, seed: int, measures: bool) -> datasets.Dataset:
    """
    The examples that measure, or the others, which are trained on; refuses to leave none on one side.

    A hash of what an example holds decides, not its place. Of each class the same share is taken, of two examples or
    more at least one. Examples with equal inputs, and those of one group, stay together.
    """
    chosen, _ = split_examples(data, share, seed)
    if chosen.all() or not chosen.any():
        told = f"{count_of(len(data), 'example')} cannot be split: fewer than two, or all equal or of one group"
        raise DataError(f"{told}. Remove hold_out and data.eval, or give separate evaluation data.")
    return data.select(np.flatnonzero(chosen == measures))


def split_examples(data: datasets.Dataset, share: float, seed: int) -> tuple[np.ndarray, list[str]]:
    """Boolean array of the held-out examples, and sentences on what was kept together, and what could not be."""
    if (kinds := read_splits(data)) is not None and "validation" in kinds:
        return kinds == "validation", ["the examples that a column calls validation measure"]
    labels, keys = read_labels(data), hash_inputs(data)
    units, told, grouped = _find_units(data, labels, keys)
    return _draw_units(_Units(data, keys, units, grouped, seed), share), told


def read_splits(data: datasets.Dataset) -> np.ndarray | None:
    """The split that a column of words says of each example, if it says train and others; refuses a column `split`
    that says no train, or some of whose cells say none. Of another name its cells are such words alone."""
    usual = ("split", "set", "subset", "partition")
    names = (name for name in data.column_names if not LABEL.fullmatch(name))
    for column in sorted(names, key=lambda name: name.lower() not in usual):
        kind = getattr(data.features[column], "feature", data.features[column])
        if "string" not in str(getattr(kind, "dtype", None)):
            continue
        is_usual, column_cells = column.lower() in usual, data.with_format(None)[column]
        # Of other names the first cells tell enough of most.
        for count in (99, len(data))[is_usual:]:
            # A series may have a cell for each step.
            cells = [[*{*cell}] if isinstance(cell, list) else [cell] for cell in column_cells[:count]]
            words = {str(cell).strip().lower() for each in cells for cell in each if cell}
            if not is_usual and not words <= SPLIT_WORDS.keys():
                break
        kinds = [{split_of(str(cell).strip()) for cell in each} for each in cells]
        known = {word for each in kinds for word in each if word is not None}
        if not known or (len(known) == 1 and all(kind == known for kind in kinds)):
            continue
        # Such as `train/bus` and `car`: classes, in a column that is not called `split`.
        is_clear = "train" in known and all(kind and None not in kind for kind in kinds)
        is_meant = {"train"} < known and words <= SPLIT_WORDS.keys() if not is_usual else is_clear
        if column.lower() != "split" and not is_meant:
            continue
        away = "rename" if is_usual else "leave out"
        advice = f"allowed are train, validation, test: correct the cells, or {away} the column if it names no splits"
        for row, (each, kind) in enumerate(zip(cells, kinds, strict=True), 1):
            told = f"the column {column!r}, row {row}"
            if None in kind:
                bad = next(cell for cell in each if split_of(str(cell).strip()) is None)
                raise DataError(f"{told}, holds {'nothing' if bad is None else repr(bad)[:60]}; {advice}.")
            if len(kind) != 1:
                several = f"holds {', '.join(sorted(filter(None, kind))) or 'nothing'} for the steps of one series"
                raise DataError(f"{told}, {several}: save train.csv and test.csv, or {away} the column.")
        if "train" not in known:
            told = f"holds {' and '.join(sorted(known))}, and no train: rename it, or name examples to train on."
            raise DataError(f"the column {column!r} {told}")
        return np.array([*chain(*kinds)])
    return None


def set_tests_apart(data: datasets.Dataset) -> tuple[datasets.Dataset, datasets.Dataset]:
    """The examples that a training may read, or choose by, and those that a column calls test."""
    kinds = read_splits(data)
    tests = np.zeros(len(data), dtype=bool) if kinds is None else kinds == "test"
    return (data.select(np.flatnonzero(~tests)) if tests.any() else data), data.select(np.flatnonzero(tests))


def _find_units(data: datasets.Dataset, labels: list[Any], keys: list[Keys]) -> tuple[list[int], list[str], bool]:
    """The number of the unit of each example, all of whose examples are on one side; what that keeps or cannot; and
    whether units are groups."""
    for groups in find_groups(data, labels):
        units = join_units(keys, groups.of)
        # What may be no group must leave something to split.
        if groups.named or 2 * max(Counter(units).values()) <= len(units):
            return units, [f"{groups.told} stay together"], True
    lost = [groups for groups in name_groups(data) if len({*groups.of}) < len(groups.of)]
    told = [f"{groups.told} may be on both sides, as each class has one alone" for groups in lost]
    return join_units(keys, list(range(len(keys)))), told, False


def compare_splits(learned: datasets.Dataset, measured: datasets.Dataset) -> list[str]:
    """Warnings of evaluation examples that equal training examples, and of speakers and others of both."""
    told, count = [], len(learned) + len(measured)
    if 0 < count <= _MOST_COMPARED and (shared := count_shared(learned, measured)):
        told.append(f"also in the training: {shared:,} of {count_of(len(measured), 'evaluation example')}")
    beside = {groups.told: {*groups.of} for groups in name_groups(learned)}
    for groups in name_groups(measured):
        known = sum(isinstance(of, tuple) and of in beside.get(groups.told, ()) for of in groups.of)
        if known:
            told.append(f"{groups.told} are in both, with {known:,} of {count_of(len(measured), 'measured example')}")
    warnings = [f"WARNING: {line}, which makes the scores too good" for line in told]
    if count > _MOST_COMPARED:
        warnings.append(f"the parts have more than {_MOST_COMPARED:,} examples: `hf-ext data check` compares them")
    return warnings


def count_shared(learned: datasets.Dataset, measured: datasets.Dataset) -> int:
    """The number of examples to measure with that have the inputs of one that is trained on."""
    known = {key for keys in hash_inputs(learned, measured) for key in keys}
    return sum(not known.isdisjoint(keys) for keys in hash_inputs(measured, learned))


class _Units:
    """Units of examples by class, in an order that a hash of their content decides, and those that measure."""

    def __init__(self, data: datasets.Dataset, keys: list[Keys], units: list[int], mix: bool, seed: int) -> None:
        labels = read_labels(data)
        self.has_broken = _find_broken(data, labels)
        self.members: dict[int, list[int]] = defaultdict(list)
        for index, unit in enumerate(units):
            self.members[unit].append(index)
        # A group counts for each of its classes, in which a gap is none; equal examples count for their first one.
        groups = self.members.items() if mix else ()
        known = {unit: Counter(label for row in rows if (label := labels[row]) is not None) for unit, rows in groups}
        self.mixed = any(len(counts) > 1 for counts in known.values())
        self.labels, self.known = labels, known if self.mixed else {}

        def draw(unit: int) -> bytes:
            first = min(keys[row] for row in self.members[unit])
            return hashlib.sha256(f"{seed} ".encode() + b"".join(first)).digest()

        self.places = {unit: place for place, unit in enumerate(sorted(self.members, key=draw))}
        self.orders: dict[Any, list[int]] = defaultdict(list)
        for unit in self.places:
            for label in self.count(unit):
                self.orders[label].append(unit)
        self.chosen, self.held = set[int](), Counter[Any]()

    def count(self, unit: int) -> dict[Any, int]:
        """The number of examples that a unit has of each class."""
        rows = self.members[unit]
        return self.known.get(unit) or {self.labels[rows[0]]: len(rows)}

    def take(self, unit: int) -> None:
        self.chosen.add(unit)
        self.held.update(self.count(unit))

    def is_free(self, unit: int, alone: bool = False) -> bool:
        """True if a unit may measure: another of each of its classes stays for the training, and broken files and
        gaps, which it leaves out and counts; an evaluation would end. `alone` gives classes up that it alone has."""
        for label in self.count(unit):
            if alone and len(self.orders[label]) == 1:
                continue
            others = (other for other in reversed(self.orders[label]) if other != unit and other not in self.chosen)
            last = next(others, None)
            if last is None or (self.places[last] < self.places[unit] and self.has_broken(self.members[last])):
                return False
        return unit not in self.chosen and not self.has_broken(self.members[unit])


def _draw_units(found: _Units, share: float) -> np.ndarray:
    sizes, count = {unit: len(rows) for unit, rows in found.members.items()}, sum(map(len, found.members.values()))
    orders = sorted(found.orders.items(), key=lambda item: (found.places[item[1][0]], str(item[0])))
    counts = {label: sum(found.count(unit)[label] for unit in order) for label, order in orders}

    def has_room(unit: int, times: int) -> bool:
        """True if, with half of the unit, no more is held out than so many times the share."""
        return found.held.total() + sizes[unit] / 2 <= times * share * count

    # One of each of more than a hundred small classes would be most of the data: then only some classes measure.
    least, spare = len(orders) <= 100 + 2 * share * count, 0.0
    wanted = {label: min(max(1, round(share * own)), own - 1) for label, own in counts.items()}
    for label, order in orders:
        exact, before = share * counts[label] + spare, found.held.total()
        aim = wanted[label] if least else min(round(exact), counts[label] - 1)
        for unit in order:
            if (found.held[label] if least else found.held.total() - before) >= aim:
                break
            lacks = sum(min(own, max(0, wanted[name] - found.held[name])) for name, own in found.count(unit).items())
            # Of a group of several classes at least half must be wanted.
            is_fit = len(found.count(unit)) == 1 or not least or 2 * lacks >= sizes[unit]
            if is_fit and (not found.mixed or has_room(unit, 2)) and found.is_free(unit):
                found.take(unit)
        spare = 0.0 if least else exact - (found.held.total() - before)
    for label, order in orders if found.mixed and least else ():
        # A class that none of these has: the smallest.
        for unit in sorted(order, key=lambda unit: sizes[unit]):
            if not found.held[label] and has_room(unit, 2) and found.is_free(unit):
                found.take(unit)
    if found.mixed and found.held.total() < share * count / 2:
        # Most groups have a class alone: those with the fewest such classes measure.
        lone = {unit: sum(len(found.orders[label]) == 1 for label in found.count(unit)) for unit in sizes}
        for unit in sorted(found.places, key=lambda unit: lone[unit]):
            if has_room(unit, 1) and found.is_free(unit, alone=True):
                found.take(unit)
    if not found.chosen and len(sizes) > 1:
        # Each class has one unit: one of them measures all the same.
        whole = [unit for unit, rows in found.members.items() if not found.has_broken(rows)]
        found.take(min(whole or sizes, key=lambda unit: (sizes[unit] * found.mixed, found.places[unit])))
    chosen = np.zeros(count, dtype=bool)
    chosen[[index for unit in found.chosen for index in found.members[unit]]] = True
    return chosen


def _find_broken(data: datasets.Dataset, labels: list[Any]) -> Callable[[list[int]], bool]:
    """Tells whether some of these examples have a broken file, no text or number, or no class where others do."""
    features = data.features
    kinds = {name: kind for name, kind in features.items() if isinstance(kind, _FILE)}
    # Sounds are kept as undecoded images.
    pictures = {name for name, kind in kinds.items() if isinstance(kind, datasets.Image) and kind.decode}
    raw = data.select_columns(list(kinds))
    for name, kind in kinds.items():
        raw = raw.cast_column(name, type(kind)(decode=False))
    has_labels = any(label is not None for label in labels)
    inputs = [*chain(*_choose_inputs(data))]
    texts: list[Any] = [*_texts(data, inputs).values()]
    if lists := [name for name in inputs if isinstance(features[name], datasets.List)]:
        texts.append(find_usable(data, lists))

    def is_broken(index: int) -> bool:
        if (has_labels and labels[index] is None) or (texts and not any(cells[index] for cells in texts)):
            return True
        files = raw[index] if kinds else {}
        return any((is_broken_picture if name in pictures else is_broken_sound)(files[name]) for name in kinds)

    return lambda indices: any(map(is_broken, indices))


def find_usable(data: datasets.Dataset, names: list[str]) -> np.ndarray:
    """True for the rows whose lists hold a number and none that is infinite in float32; NaN is no number."""
    parts = [np.zeros(0, dtype=bool)]
    for table in data.with_format("arrow").select_columns(names).iter(batch_size=256):
        found, large = np.zeros((2, len(table)), dtype=bool)
        for cells in (table[name].combine_chunks() for name in names):
            rows = np.arange(len(table))
            # Lists of lists are series of several channels.
            while hasattr(cells.type, "value_field"):
                rows, cells = rows[pc.list_parent_indices(cells).to_numpy()], pc.list_flatten(cells)
            is_number = pa.types.is_floating(cells.type) or pa.types.is_integer(cells.type)
            values = (cells if is_number else cells.is_valid()).to_numpy(zero_copy_only=False).astype(np.float64)
            found[rows[~np.isnan(values)]] = True
            large[rows[np.abs(values) > np.finfo(np.float32).max]] = True
        parts.append(found & ~large)
    return np.concatenate(parts)


def _choose_inputs(data: datasets.Dataset) -> list[list[str]]:
    """The columns by whose content examples are equal, in sets: examples are equal where they agree on one set."""
    # A number of the row, a date, a comment or another caption makes no other example of the same picture or text. So
    # files count alone, of pairs the clean ones, since a clean picture may have several bad ones; then numbers in
    # lists, without their times; then each text for itself; else all columns but labels and names.
    kinds = data.features
    files = [name for name, kind in kinds.items() if isinstance(kind, _FILE)]
    if files:
        return [["hq"] if "hq" in files else files]
    columns = sorted({*data.column_names} - {*_NAMES, "label", "labels"}) or data.column_names
    plain = datasets.Value | datasets.ClassLabel | dict
    lists = [name for name in columns if not isinstance(kinds[name], plain)]
    if series := [name for name in lists if not TIME.fullmatch(name)] or lists:
        return [series]
    texts = {name: [cell for cell in cells if cell] for name, cells in _texts(data, columns).items()}
    return [[name] for name in _choose_texts(texts)] or [columns]


def _texts(data: datasets.Dataset, names: list[str]) -> dict[str, list[Any]]:
    """The cells of these columns that hold texts, read at once: a look at one column copies what is known of all."""
    kinds = data.features
    kept = [name for name in names if getattr(kinds[name], "dtype", "") in ("string", "large_string")]
    cells = data.select_columns(kept).with_format(None)[:] if kept else {}
    return {name: cells[name] for name in kept}


def _choose_texts(texts: dict[str, list[str]]) -> list[str]:
    """Those columns of texts that may be inputs; each step leaves some, or changes nothing."""
    # A date with a time has a blank, too.
    names = [name for name, found in texts.items() if to_seconds(pd.Series(found[:100])) is None] or [*texts]
    # What has few values, such as a prompt or a topic, would join most examples.
    names = [name for name in names if len({*texts[name]}) > 0.1 * len(texts[name])] or names
    # Other scripts have no blanks.
    spaced = {name: sum(" " in cell.strip() or not cell.isascii() for cell in texts[name]) for name in names}
    lengths = {name: np.mean([*map(len, texts[name])]) for name in names if 2 * spaced[name] > len(texts[name])}
    return [name for name, length in lengths.items() if length >= 0.5 * max(lengths.values())] or names


def hash_inputs(data: datasets.Dataset, *beside: datasets.Dataset) -> list[Keys]:
    """Keys of each example; two examples are equal where one key of theirs is, also those of data beside them."""
    chosen, sizes = _choose_inputs(data), _sizes([data, *beside])
    raw = data.select_columns([*chain(*chosen)]).with_format("arrow")
    rows = enumerate(row for table in raw.iter(batch_size=256) for row in table.to_pylist())
    return [tuple(_hash_row(row, names, sizes, index) for names in chosen) for index, row in rows]


def _hash_row(row: dict[str, Any], names: list[str], sizes: Counter[int], index: int) -> bytes:
    digest = hashlib.sha256("\0".join(names).encode())
    for name in names:
        _add(digest, row[name], sizes)
    # An example without a text is like no other.
    digest.update(str(index).encode() if all(row[name] in (None, "") for name in names) else b"")
    return digest.digest()


def _sizes(data: list[datasets.Dataset]) -> Counter[int]:
    """Number of named files of each size: a file whose size no other has is never read."""
    count = Counter[int]()
    for part in data:
        for name in (name for name, kind in part.features.items() if isinstance(kind, _FILE)):
            for table in part.with_format("arrow").select_columns([name]).iter(batch_size=4096):
                column = table[name].combine_chunks()
                paths = column.field("path").filter(column.field("bytes").is_null()).to_pylist()
                count.update(os.path.getsize(path) for path in paths if path and os.path.isfile(path))
    return count


def _add(digest: Any, value: Any, sizes: Counter[int]) -> None:
    """Adds a value to a hash: of a file what is in it, wherever it lies."""
    if isinstance(value, str):
        # Neither blanks nor case, quotes and other signs make another text, unless it has no words.
        plain = unicodedata.normalize("NFKC", html.unescape(value)).casefold()
        digest.update((" ".join(re.findall(r"\w+", plain)) or value).encode())
    elif not (isinstance(value, dict) and value.keys() == {"bytes", "path"}):
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
    """The class of each example; none where they have values, or one for each position."""
    nothing = [None] * len(data)
    kind = data.features.get("label")
    if not isinstance(kind, datasets.Value | datasets.ClassLabel):
        return nothing
    found = data.with_format(None)["label"][:]
    if isinstance(kind, datasets.ClassLabel):
        return [None if number is None or number < 0 else kind.names[number] for number in found]
    return nothing if are_values(found) else found


class Groups(NamedTuple):
    """The group of each example, what they are in words, and whether their name says that they are groups."""

    of: list[Any]
    told: str
    named: bool = True


def find_groups(data: datasets.Dataset, labels: list[Any]) -> list[Groups]:
    """Ways to group examples, the best first: by columns, by folders that are no classes, by the names of files."""
    # A class of one speaker stays in the training; where each has one, speakers are the classes.
    found = [groups for groups in name_groups(data) if _separable(groups.of, labels, any)]
    if (paths := find_paths(data)) is not None:
        # Folders of patients, say, whose classes stand in a metadata.csv; of classes they separate nothing.
        folders = [path.parent for path in paths]
        if _separable(folders, labels, all):
            found.append(Groups(folders, f"files of one folder, such as {folders[0].name},"))
        found += filter(None, [_group_by_names(paths, labels)])
    return found


def name_groups(data: datasets.Dataset) -> list[Groups]:
    """The groups of each column whose name says that it has some: persons first."""
    values = datasets.Value | datasets.ClassLabel
    names = [name for name, kind in data.features.items() if GROUPS.fullmatch(name) and isinstance(kind, values)]
    found = []
    for name in sorted(names, key=lambda name: not PERSONS.fullmatch(name)):
        # Of whom nothing is known, that is a group of its own.
        cells = enumerate(data.with_format(None)[name])
        groups = [index if value in (None, "") else (value,) for index, value in cells]
        found.append(Groups(groups, f"examples of one {name}"))
    return found


def join_units(keys: list[tuple[Any, ...]], groups: list[Any]) -> list[int]:
    """The number of the unit of each example: those of one group are in one, and those of equal inputs."""
    parent, first = list(range(len(keys))), dict[Any, int]()

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    for index, (own, group) in enumerate(zip(keys, groups, strict=True)):
        for name in (*own, ("group", group)):
            parent[root(index)] = root(first.setdefault(name, index))
    return [root(index) for index in range(len(keys))]


def _group_by_names(paths: list[Path], labels: list[Any]) -> Groups | None:
    """Groups by the shortest beginnings of file names, with a number, as `patient3` of `patient3_slice7`."""
    words = [re.findall(r"[^\W_]+", path.stem) for path in paths]
    for count in range(1, max(map(len, words), default=0)):
        # A name that ends there is the original of those in its folder that add a word, such as _flip.
        parts = [(path.parent, *of[:count]) for of, path in zip(words, paths, strict=True)]
        longer = {part for of, part in zip(words, parts, strict=True) if len(of) > count}
        groups = [part[1:] if part in longer else path for part, path in zip(parts, paths, strict=True)]
        starts = [group for group in groups if isinstance(group, tuple)]
        numbered = sum(any(map(str.isdigit, "".join(group))) for group in starts)
        sizes = Counter(groups)
        several = sum(size for size in sizes.values() if size > 1)
        recurs = several >= _IN_SEVERAL * len(groups) and max(sizes.values()) <= _LARGEST * len(groups)
        recurs = recurs and len(sizes) >= _FEWEST
        if numbered >= 0.8 * len(starts) and recurs and _separable(groups, labels, all):
            first = next(of for of, size in sizes.items() if size > 1)
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
    for name in (name for name, kind in data.features.items() if isinstance(kind, _FILE) or name == "file"):
        column = data.with_format("arrow").select_columns([name])[:][name].combine_chunks()
        # A column of a table may be called file, and hold texts.
        if pa.types.is_struct(column.type):
            paths = column.field("path").to_pylist()
            return [*map(Path, paths)] if paths and None not in paths else None
    return None
