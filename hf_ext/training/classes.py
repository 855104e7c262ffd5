"""Classes by their names: data, task, checkpoint and an adapter's base may have other numbers for them."""

import contextlib
import functools
import itertools
import logging
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import datasets

from ..data.cells import class_name, is_number
from ..data.files import UNOPENABLE, first_files
from ..data.opening import class_names, find_files, find_splits, find_usual, open_source, relabel
from ..data.source import DataSource
from ..errors import DataError

logger = logging.getLogger(__name__)

# What a model is built for: all its weights are trained, an adapter on it is, or it is scored.
Use: TypeAlias = Literal["train", "adapt", "evaluate"]
# To the end of all tables might take hours, in every process.
_SECONDS = 10.0


def settle_classes(task: Any, stored: list[str], source: str | None, use: Use) -> None:
    """
    Decides by which names a task knows its classes, before its model is built: those in `task.label_names`, else those
    `stored` in the checkpoint, in the order of their numbers, if it has all that the data names, else those of the
    data, which `task.known_classes` has until then.
    """
    given, found = getattr(task, "label_names", []), task.known_classes
    found = _spell(found, given or stored)
    if given and found != given:
        advice = "correct the names there, or list other words for all classes in the order of their numbers"
        is_known = _share_names(found, given, "the training data", "task.label_names", advice)
        task.known_classes = given if is_known else found
    elif not given and stored and (use == "evaluate" or {*found} <= {*stored}):
        task.known_classes = stored
    names = _spell(given or task.known_classes, stored)
    if not stored or names == stored:
        return
    if use == "train":
        logger.warning("the classes of %s, %.200s, become %.200s, and are learned anew", source, stored, names)
    elif use == "adapt":
        told = f"the classes are {names!s:.200}, those of {source} {stored!s:.200}, and an adapter saves no names"
        advice = "use data with these classes, leave out task.label_names, or train the whole model without 'peft'"
        raise DataError(f"{told}: {advice}.")
    elif _share_names(names, stored, "task.label_names", source, "correct the names, or leave them out"):
        told = f"task.label_names is {names!s:.200}, and {source} has the order {stored!s:.200}"
        raise DataError(f"{told}: list them in this order, or leave them out.")


def match_classes(data: Any, task: Any, who: str = "the evaluation data") -> Any:
    """The same data, whose classes have the numbers that a task knows their names by; of other tasks as it is."""
    known: list[str] | None = getattr(task, "known_classes", None)
    written = [] if known is None else class_names((data.features or {}).get(task.label_column))
    if known is None or not written:
        return data
    # Classes without a name are called by their numbers.
    known = [*known, *map(str, range(len(known), task.num_labels))]
    found = _spell(written, known)
    advice = "use data with these classes, or list the data's names for them in task.label_names"
    by_name = found == known or _share_names(found, known, who, "the model", advice)
    if hasattr(task, "label_names") and number_classes(tuple(known))[1]:
        return relabel(data, task.label_column, found if by_name else known, datasets.Value("string"))
    if written == known or not by_name:
        return data
    times = Counter(known)
    names = [name if times[name] == 1 else f"{name} {number}" for number, name in enumerate(known)]
    numbers = [known.index(name) for name in found]
    return relabel(data, task.label_column, numbers, datasets.ClassLabel(names=names))


def _spell(found: list[str], known: list[str]) -> list[str]:
    """Names with the capitals that others have, where both are unique without them."""
    places = {name.casefold(): name for name in known}
    are_unique = len({*map(str.casefold, found)}) == len(found) and len(places) == len(known)
    return [places.get(name.casefold(), name) for name in found] if are_unique else found


def _share_names(found: list[str], known: list[str], who: str, whose: str | None, advice: str) -> bool:
    """True if classes are matched by their names, false if by their numbers, as all have others; refuses the rest."""
    times = Counter(known)
    strange = [name for name in found if times[name] != 1]
    if not strange:
        return True
    # ImageNet has two cranes: of all its classes, such names tell nothing.
    if len(found) == len(known) > len(times):
        return False
    if len(found) == len(known) and not {*map(str.casefold, found)} & {*map(str.casefold, known)}:
        logger.warning("%s has the classes %.200s: by their numbers, %.200s of %s", who, found, known, whose)
        return False
    raise DataError(f"{who} has the classes {strange!s:.200}, and {whose} knows {known!s:.200}: {advice}.")


@functools.lru_cache(maxsize=16)
def number_classes(names: tuple[str, ...]) -> tuple[dict[str, int], bool]:
    """The places of names, and true if a number in data is one of these names, and not a place."""
    # Tar files have the name 01 as a number.
    places = {str(int(name)): place for place, name in enumerate(names) if name.isdecimal()}
    are_numbers = any(is_number(name) and name != str(place) for place, name in enumerate(names))
    return places | {name: place for place, name in enumerate(names)}, are_numbers


def check_labels(data: datasets.Dataset, task: Any, source: DataSource | None = None) -> None:
    """Refuses labels that the first evaluation would refuse, before the first step."""
    kind = None if getattr(task, "known_classes", None) is None else data.features.get(task.label_column)
    if isinstance(kind, datasets.Value | datasets.ClassLabel):
        try:
            with name_unlabelled(source):
                for label in dict.fromkeys(data.with_format(None)[task.label_column][:]):
                    task.read_class(label)
        except DataError as error:
            raise DataError(f"the evaluation data: {error}") from error


@contextlib.contextmanager
def name_unlabelled(source: DataSource | None) -> Iterator[None]:
    """Adds the first table without a label to an error of a missing one; a picture or a recording is named there."""
    try:
        yield
    except ValueError as error:
        # From a loader process comes its text alone.
        found = re.search(r"column '([^']+)'(?= holds (?:None|nan|'')|; it has)", str(error))
        if source is None or found is None:
            raise
        place = _find_unlabelled(source, found[1])
        if place is None:
            raise
        raise DataError(f"{error} The first file without it: {place}.") from error


def _find_unlabelled(source: DataSource, column: str) -> str | None:
    """The first table without a label, as far as is read in ten seconds; none if no table has such a column."""
    end, found, is_known = time.monotonic() + _SECONDS, None, False
    for table in _list_tables(source):
        with contextlib.suppress(*UNOPENABLE):
            rows = open_source(table)
            # Pictures beside it are not decoded.
            rows = rows.select_columns(column) if column in (rows.features or ()) else rows
            for row in itertools.takewhile(lambda _: time.monotonic() < end, rows):
                is_known |= column in row
                value = row.get(column)
                # An error of a missing label is not one of -100.
                if found is None and class_name(value) is None and value != -100:
                    found = str(table.path)
                if found is not None:
                    break
        if (is_known and found is not None) or time.monotonic() >= end:
            break
    return found if is_known else None


def _list_tables(source: DataSource) -> Iterator[DataSource]:
    """The local tables of a source, each as a stream; of a folder those of its split, as far as their places tell."""
    for part in (*source.parts,) or (source,):
        places = find_files(part.path)
        if len(places) == 1 and (folder := Path(places[0])).is_dir():
            split = "train" if part.hold_out else part.split.partition("[")[0]
            places = [*map(str, find_splits(folder, find_usual(first_files(folder))).get(split, []))]
        for place in places:
            if place.lower().endswith((".csv", ".tsv", ".json", ".jsonl", ".parquet")):
                yield replace(part, path=place, split="train", hold_out=0.0, streaming=True)
