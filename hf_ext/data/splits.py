"""Held-out examples for data without splits, disjoint from the training examples and their groups."""

import hashlib
import html
import io
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from datasets.data_files import SPLIT_KEYWORDS

from ..errors import DataError
from ..terminal import count_of
from .broken import is_broken_picture, open_bytes
from .groups import find_groups, join_units, name_groups
from .labels import are_values
from .roles import TIME
from .sound_files import is_broken_sound
from .times import to_seconds

# The split that a word means in folders, files and cells, as `datasets` has it.
SPLIT_WORDS = {word: str(kind) for kind, words in SPLIT_KEYWORDS.items() for word in words}
# Columns that may say which split an example is of.
_SPLITS = ("split", "set", "subset", "partition")
# Hashes of an example; two examples are equal where one hash of theirs is.
Keys = tuple[bytes, ...]
# More examples are compared by `hf-ext data check` alone.
_MOST_COMPARED = 5_000
# Columns that name an example and are no part of it.
_NAMES = {"file", "file_name", "path", "__key__", "__url__", "first_row", "id", "index"}


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
    The examples that measure, or the others, which are trained on.

    Whether an example measures follows from a hash of what it holds, not from its place: sorted data are split as well
    as mixed ones. Of each class the same share is taken, of two examples or more at least one. Examples with equal
    inputs stay together, as [`hash_inputs`] sees them, and so do those of one group, as [`find_groups`] finds it. A
    column called `split` decides by itself.

    Raises:
        DataError: If nothing would be left to measure on, or to train on.
    """
    chosen, _ = split_examples(data, share, seed)
    if chosen.all() or not chosen.any():
        raise DataError(
            f"{count_of(len(data), 'example')} cannot be split into training and evaluation: fewer than two, or "
            "all equal or of one group. Remove hold_out and data.eval, or give separate evaluation data."
        )
    return data.select(np.flatnonzero(chosen == measures))


def split_examples(data: datasets.Dataset, share: float, seed: int) -> tuple[np.ndarray, list[str]]:
    """Boolean array of the held-out examples, and sentences on what was kept together, and what could not be."""
    labels, column = read_labels(data), _find_split_column(data)
    if column is not None:
        own = np.array([not _is_training(cell) for cell in data.with_format(None)[column]])
        return own, [f"the column {column} says which examples measure"]
    keys = hash_inputs(data)
    units, told = _find_units(data, labels, keys)
    return _draw_units(data, labels, keys, units, share, seed), told


def _find_units(data: datasets.Dataset, labels: list[Any], keys: list[Keys]) -> tuple[list[int], list[str]]:
    """The number of the unit of each example, all of whose examples are on one side; and what that keeps or cannot."""
    for groups in find_groups(data, labels):
        units = join_units(keys, groups.of)
        # What may be no group must leave something to split.
        if groups.named or 2 * max(Counter(units).values()) <= len(units):
            return units, [f"{groups.told} stay together"]
    lost = [groups for groups in name_groups(data) if len({*groups.of}) < len(groups.of)]
    told = [f"{groups.told} may be on both sides, as each class has one alone" for groups in lost]
    return join_units(keys, list(range(len(keys)))), told


def _find_split_column(data: datasets.Dataset) -> str | None:
    """A column whose cells are names of splits, of which one is the training."""
    for name in (name for name in data.column_names if name.lower() in _SPLITS):
        cells = {str(cell).strip().casefold() for cell in data.with_format(None)[name]}
        if len(cells) > 1 and cells <= SPLIT_WORDS.keys() and any(map(_is_training, cells)):
            return name
    return None


def _is_training(cell: Any) -> bool:
    return SPLIT_WORDS.get(str(cell).strip().casefold()) == "train"


def compare_splits(learned: datasets.Dataset, measured: datasets.Dataset) -> list[str]:
    """Warnings of evaluation examples that equal training examples, and of speakers and others of both."""
    told = []
    if 0 < len(learned) + len(measured) <= _MOST_COMPARED and (shared := count_shared(learned, measured)):
        told.append(f"also in the training: {shared:,} of {count_of(len(measured), 'evaluation example')}")
    beside = {groups.told: {*groups.of} for groups in name_groups(learned)}
    for groups in name_groups(measured):
        known = sum(isinstance(of, tuple) and of in beside.get(groups.told, ()) for of in groups.of)
        if known:
            told.append(f"{groups.told} are in both, with {known:,} of {count_of(len(measured), 'measured example')}")
    warnings = [f"WARNING: {line}, which makes the scores too good" for line in told]
    if len(learned) + len(measured) > _MOST_COMPARED:
        warnings.append(f"the parts have more than {_MOST_COMPARED:,} examples: `hf-ext data check` compares them")
    return warnings


def count_shared(learned: datasets.Dataset, measured: datasets.Dataset) -> int:
    """The number of examples to measure with that have the inputs of one that is trained on."""
    known = {key for keys in hash_inputs(learned, measured) for key in keys}
    return sum(not known.isdisjoint(keys) for keys in hash_inputs(measured, learned))


def _draw_units(
    data: datasets.Dataset, labels: list[Any], keys: list[Keys], units: list[int], share: float, seed: int
) -> np.ndarray:
    members: dict[int, list[int]] = defaultdict(list)
    for index, unit in enumerate(units):
        members[unit].append(index)
    # A unit of several classes counts for its first one.
    strata: dict[Any, list[int]] = defaultdict(list)
    for unit, indices in members.items():
        strata[labels[indices[0]]].append(unit)
    chosen, has_broken = np.zeros(len(keys), dtype=bool), _find_broken(data, labels)

    def draw(unit: int) -> bytes:
        return hashlib.sha256(f"{seed} ".encode() + b"".join(min(keys[index] for index in members[unit]))).digest()

    orders = [sorted(found, key=draw) for found in strata.values()]
    # One of each of more than a hundred small classes would be most of the data: then only some classes measure.
    least, spare = 1, 0.0
    if len(orders) > 100 + 2 * share * len(keys):
        least, orders = 0, sorted(orders, key=lambda order: draw(order[0]))
    for order in orders:
        count = sum(len(members[unit]) for unit in order)
        exact = share * count + spare
        wanted = min(max(least, round(exact)), count - 1)
        taken = 0
        # The last unit stays for the training.
        for unit in order[:-1]:
            if taken >= wanted:
                break
            # A training leaves broken files and gaps out and counts them; an evaluation would end.
            if has_broken(members[unit]):
                continue
            chosen[members[unit]] = True
            taken += len(members[unit])
        spare = 0.0 if least else exact - taken
    if not chosen.any() and len(members) > 1:
        # Each class has one unit: one of them measures all the same.
        whole = [unit for unit, indices in members.items() if not has_broken(indices)]
        chosen[members[min(whole or members, key=draw)]] = True
    return chosen


def _find_broken(data: datasets.Dataset, labels: list[Any]) -> Callable[[list[int]], bool]:
    """Tells whether some of these examples have a broken file, no text or number, or no class where others do."""
    kinds = {name: kind for name, kind in data.features.items() if _is_file(kind)}
    # Sounds are kept as undecoded images.
    pictures = {name for name, kind in kinds.items() if isinstance(kind, datasets.Image) and kind.decode}
    checks = {name: is_broken_picture if name in pictures else is_broken_sound for name in kinds}
    raw = data.select_columns(list(kinds))
    for name, kind in kinds.items():
        raw = raw.cast_column(name, type(kind)(decode=False))
    has_labels = any(label is not None for label in labels)
    inputs = [name for names in _choose_inputs(data) for name in names]
    texts = [data.with_format(None)[name][:] for name in inputs if name in _texts(data)]
    if lists := [name for name in inputs if isinstance(data.features[name], datasets.List)]:
        texts.append(find_usable(data, lists))

    def has_broken(indices: list[int]) -> bool:
        rows = (raw[index] for index in (indices if checks else ()))
        gaps = has_labels and any(labels[index] is None for index in indices)
        gaps = gaps or (bool(texts) and any(not any(cells[index] for cells in texts) for index in indices))
        return gaps or any(check(row[name]) for row in rows for name, check in checks.items())

    return has_broken


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
    plain = datasets.Value | datasets.ClassLabel | dict
    lists = [name for name in columns if not isinstance(kinds[name], plain)]
    if series := [name for name in lists if not TIME.fullmatch(name)] or lists:
        return [series]
    texts = {name: [cell for cell in data.with_format(None)[name] if cell] for name in columns if name in _texts(data)}
    return [[name] for name in _choose_texts(texts)] or [columns]


def _texts(data: datasets.Dataset) -> set[str]:
    """The columns of texts."""
    return {name for name, kind in data.features.items() if getattr(kind, "dtype", "") in ("string", "large_string")}


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


def hash_inputs(data: datasets.Dataset, *beside: datasets.Dataset) -> list[Keys]:
    """Keys of each example; two examples are equal where one key of theirs is, also those of data beside them."""
    chosen = _choose_inputs(data)
    columns = [name for names in chosen for name in names]
    raw = data.select_columns(columns).with_format("arrow")
    sizes = _sizes([data, *beside])
    keys: list[Keys] = []
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


def _sizes(data: list[datasets.Dataset]) -> dict[int, int]:
    """Number of named files of each size: a file whose size no other has is never read."""
    count: dict[int, int] = defaultdict(int)
    for part in data:
        raw = part.with_format("arrow")
        for name in (name for name, kind in part.features.items() if _is_file(kind)):
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
