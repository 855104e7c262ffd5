"""Descriptions of files: a table with a row of each, a text beside each, or the folders that texts lie in."""

import contextlib
import csv
import glob
import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import chain, compress
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pandas as pd
from transformers.utils import logging

from ..errors import DataError
from ..terminal import count_of
from .cells import class_name
from .files import is_seen, list_files
from .roles import GROUPS
from .source import DataSource
from .splits import SPLIT_NAME, SPLIT_WORDS, make_part, slice_split, split_of
from .tables import LABEL, is_utf8, option, read_table, read_text, shorten

logger = logging.get_logger(__name__)

# Names that `datasets` reads. Other tables are recognised by their content.
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
TABLES = (".csv", ".tsv", ".jsonl")
# Columns of names of files that `datasets` reads.
_FILES = re.compile(r"(.+_)?file_names?")
# Names of splits that `datasets` sees, and words for splits within others, as of trainset beside testset.
_SEEN = re.compile(rf"(?:.*[-._ \d])?({'|'.join(SPLIT_WORDS)})(?:[-._ \d].*)?")
_WORDS = "|".join(sorted(SPLIT_WORDS, key=len, reverse=True))
_ATTACHED = re.compile(rf"(.*?)({_WORDS})((?!e[dre]|able).*)", re.IGNORECASE)


def find_about(place: Path, files: list[Path]) -> Path | None:
    """The table in a folder, or beside it under its name, that has a row of each of its files; refuses several."""
    found = [place / name for name in METADATA if (place / name).is_file()]
    if not found:
        usual = Counter(file.suffix.lower() for file in files).most_common(1)[0][0]
        beside = sorted([*place.iterdir(), *place.parent.glob(f"{glob.escape(place.name)}.*")])
        tables = [file for file in beside if file.suffix.lower() in TABLES and file.is_file() and is_seen(file.name)]
        known = {folder: _index(folder, files) for folder in {table.parent for table in tables}}
        # Beside tables, one with the columns that most have is one of them.
        heads = Counter(_read_lines(file)[0] for file in files[:20] if usual in TABLES).most_common(1)
        common = heads[0][0] if heads and heads[0][1] > 1 else None
        found = [file for file in tables if _names_one(file, known[file.parent], usual, common)]
    if len(found) > 1:
        raise DataError(f"{found[0]} and {found[1].name} both describe the files: remove one of them.")
    return found[0] if found else None


def _index(folder: Path, files: list[Path]) -> dict[str, Path | None]:
    """Files by the names that a table may use for them; None where several are called so, but for whole paths."""
    paths = {file.relative_to(folder): file for file in files}
    known: dict[str, Path | None] = {}
    for path, file in paths.items():
        names = {path.as_posix(), path.with_suffix("").as_posix(), path.name, path.stem}
        # Systems write an umlaut as one sign or as two.
        for name in names | {unicodedata.normalize("NFC", name).casefold() for name in names}:
            known[name] = None if name in known else file
    # A table may have lost the zeros of 001.
    plain = {str(int(path.stem)): file for path, file in paths.items() if path.stem.isdecimal()}
    plain = plain if len(plain) == len(paths) else {}
    return plain | known | {path.as_posix(): file for path, file in paths.items()}


def _spell(cells: Iterable[Any], known: dict[str, Path | None]) -> str:
    """The first name in an index that writings of a cell mean, in Windows' way or with folders of another machine."""
    first, *_ = names = [class_name(cell) or "" for cell in cells]
    parts = [name.strip().replace("\\", "/").removeprefix("./").split("/") for name in names]
    ends = ["/".join(each[start:]) for each in parts for start in range(len(each))]
    spelled = [each for end in ends for each in (end, unicodedata.normalize("NFC", end).casefold())]
    return next((each for each in spelled if each in known), first)


def _read_lines(table: Path) -> list[str]:
    with table.open("rb") as file:
        head = file.read(1 << 12)
    # UTF-16 has a zero beside each letter.
    return head.replace(b"\0", b"").decode("utf-8", errors="replace").splitlines()[:5] or [""]


def _names_one(table: Path, known: dict[str, Path | None], usual: str, common: str | None) -> bool:
    """True if a first row of a table names a file. Beside tables, names that are numbers may be their values."""
    lines = _read_lines(table)
    cells = [] if lines[0] == common else re.split(r'[,;\t|"]', "\t".join(lines))
    values = r"[-+.\d\s]*" if usual in (*TABLES, ".parquet") else r"\s*"
    meant = (_spell([cell], known) for cell in cells if not re.fullmatch(values, cell))
    return any(name in known and known[name] != table for name in meant)


def match_rows(
    table: Path, files: list[Path], label: str, beside: Iterable[Path]
) -> tuple[list[Path], pd.DataFrame] | None:
    """
    Those files that a table names, in the order of its rows, and its other columns; None where it names none. Rows of
    files `beside` them may be of another split.

    The names are in the column that names the most files. A column of classes is called `label`, whatever its name.
    Files without a row are left out with a warning; rows without a file, and several of one, are refused.
    """
    frame, written = (read_table(table, True, label=label, raw=raw).frame for raw in (False, True))
    known = _index(table.parent, [*dict.fromkeys([*files, *beside])])
    nested = [name for name in frame if frame[name].map(lambda cell: isinstance(cell, list | dict | np.ndarray)).any()]
    if held := {label, "label"} & {*nested}:
        raise DataError(f"{table}: the column {held.pop()} holds lists, but a class is one text or one number.")
    if nested:
        logger.warning(f"{table}: {shorten(nested)} hold lists, and are left out.")
        frame = frame.drop(columns=nested)
    named = {
        name: [_spell(cells, known) for cells in zip(written[name], frame[name], strict=True)]
        for name in frame
        if name not in (label, "label")
    }
    best = max(named, key=lambda name: sum(cell in known for cell in named[name]), default="")
    names = named.get(best, [])
    if known.keys().isdisjoint(names):
        return None
    if absent := [name for name in names if known.get(name) is None]:
        told = "of several folders" if absent[0] in known else "not found"
        told = f"{count_of(len(absent), 'file')} {told}, such as {absent[0]!r}"
        raise DataError(f"{table}, column {best}: {told}: name their folders, add them, or remove the rows.")
    chosen = [file for name in names if (file := known[name]) is not None]
    (often, count), *_ = Counter(chosen).most_common(1)
    if count > 1:
        raise DataError(f"{table} has {count} rows for {often.name} in its column {best}: keep one row per file.")
    own = pd.Index(chosen).isin(files)
    chosen, frame = [*compress(chosen, own)], frame[own].drop(columns=best)
    classes = [*filter(LABEL.fullmatch, frame)] if label not in frame else []
    if len(classes) > 1:
        raise DataError(f"{table}: {shorten(classes)} may each be the class: say {option('label', classes[0])}.")
    if len(chosen) < len(files):
        logger.warning(f"left out: {len(files) - len(chosen):,} of {count_of(len(files), 'file')}, not in {table}.")
    return chosen, frame.rename(columns=dict.fromkeys(classes, "label"))


def open_described(
    folder: Path, source: DataSource, endings: set[str], column: str, kind: Any
) -> datasets.Dataset | None:
    """Opens a folder of files and a table or texts of each, else None; without classes, folders are some."""
    below = [*list_files(folder)]
    part = find_part(folder, source.split, below)
    files = [file for file in part.files if file.suffix.lower() in endings]
    texts = {file.with_suffix("") for file in part.files if file.suffix == ".txt"}
    alone = [file for file in files if file.with_suffix("") not in texts]
    place = part.places[0]
    table, beside = find_table(place, (file for file in list_files(place) if file.suffix.lower() in endings))
    if files and table is not None and table.name in METADATA and _is_usual(table):
        # `datasets` leaves others out in silence, as after an interrupted call.
        with contextlib.suppress(DataError):
            frame = read_table(table, True, raw=True).frame
            cells = (cell for name in filter(_FILES.fullmatch, frame) for cell in frame[name])
            named = {Path(str(file)).name for cell in cells for file in np.ravel(cell)}
            if named and (unnamed := sum(file.name not in named for file in files)):
                logger.warning(f"left out: {unnamed:,} of {count_of(len(files), 'file')}, not in {table}.")
        return None
    if not files:
        return None
    if table is not None:
        if (found := match_rows(table, files, source.column_of("label"), beside)) is None:
            return None
        files, frame = found
        columns: dict[str, list[Any]] = {name: [*map(class_name, frame[name])] for name in frame}
        if column in columns:
            raise DataError(f"{table} has a column {column!r}, as the files themselves are called: rename it.")
    elif alone[:1] == files[:1] and 2 * len(alone) > len(files):
        return None
    elif alone:
        told = f"{len(alone):,} of {count_of(len(files), 'file')}"
        raise DataError(f"{told} without a caption, such as {alone[0]}: add its text as a .txt file beside it.")
    else:
        columns = {"text": [read_text(file.with_suffix(".txt")) for file in files]}
    labels = {"label", source.column_of("label")}
    named = labels & columns.keys()
    # One folder for all, such as images, is no class.
    several = len({file.parent.name for file in below if file.suffix.lower() in endings}) > 1
    if not named and several and all(file.parent != place for file in files):
        columns["label"] = [file.parent.name for file in files]
    require_part(folder, part, source.split)
    for name in named if table is not None else ():
        # A few fractions again and again may be names.
        values = frame[name].dropna()
        if pd.api.types.is_float_dtype(values) and (values % 1 != 0).any() and 2 * values.nunique() > len(values):
            raise DataError(f"{table}: the column {name} has fractions such as {values.iloc[0]}: name the classes.")
    classes = {name: datasets.ClassLabel(names=sorted({*columns[name]} - {None})) for name in labels & columns.keys()}
    columns = {column: [str(file.resolve()) for file in files], **columns}
    return make_part(columns, {**classes, column: kind}, source.split)


def _is_usual(table: Path) -> bool:
    """True for a metadata file that `datasets` reads: a CSV has commas, UTF-8, and a column of its names of files."""
    first, *rows = csv.reader(_read_lines(table))
    places = [place for place, name in enumerate(first) if _FILES.fullmatch(name.strip('\ufeff" '))]
    usual = any(os.path.isfile(table.parent / row[place]) for row in rows for place in places if place < len(row))
    return table.suffix != ".csv" or (usual and is_utf8(table))


def open_text_folders(folder: Path, source: DataSource) -> datasets.Dataset | None:
    """Opens texts in a folder for each class, each `.txt` an example; of others None: each line is one then."""
    part = find_part(folder, source.split, list_files(folder))
    place, below = part.places[0], part.files
    # Others are notes beside them.
    files = [file for file in below if file.suffix.lower() == ".txt" and file.parent != place]
    names = sorted({file.parent.name for file in files})
    splits = place == folder and {*names} & SPLIT_WORDS.keys()
    if len(names) < 2 or splits or 2 * len(files) <= len(below):
        return None
    require_part(folder, part, source.split)
    word = source.split.partition("[")[0]
    if word == "train" and len(files) == len(names) and any("\n" in read_text(file) for file in files):
        told = f"{place}: a file is an example, and each class has one, such as {files[0].relative_to(place)}"
        raise DataError(f"{told}: write each text into a file, or all into a table with the columns text and label.")
    kept = [files[index] for index in slice_split(source.split, len(files))]
    columns = {"text": [*map(read_text, kept)], "label": [file.parent.name for file in kept]}
    return make_part(columns, {"label": datasets.ClassLabel(names=names)}, word)


class Part(NamedTuple):
    """The files of a split, the folders that hold it, whether names say so, and the files that belong to no split."""

    files: list[Path]
    places: list[Path]
    named: bool = False
    rest: list[Path] = []


def sort_files(folder: Path, files: Iterable[Path], word: str = "train") -> dict[Path, tuple[str, Path]]:
    """
    The split of each file below a folder that has one, and the folder or file that is called so, at any depth: folders
    count first, as for `datasets`. `word` is a split, too. Files alone count where all are called by one, or where two
    names differ in it. Refuses a split within another.
    """
    below = [*files]
    words, found = {word.casefold(): word} | SPLIT_WORDS, dict[Path, tuple[str, Path]]()
    parents = {file.parent for file in below}
    texts = parents - {file.parent for file in below if file.suffix.lower() != ".txt"}
    # GunPoint_TRAIN beside GunPoint_TEST are splits, and test_tube is none.
    for whole in (True, False):
        for parent in parents:
            above = [place for place in (parent, *parent.parents) if folder in place.parents]
            # A class of texts in a folder of a split may be called train, beside others.
            if parent in texts and any(place.name.casefold() in words for place in above[1:]):
                others = (place.name.casefold() for place in parents if place.parent == parent.parent)
                above = above[1:] if any(other not in words for other in others) else above
            kinds = {place: (words.get(place.name.casefold()) if whole else split_of(place.name)) for place in above}
            # The outermost comes last.
            named = {kind: place for place, kind in kinds.items() if kind is not None}
            if len(named) > 1 and (whole or "train" in named):
                told = f"{' and '.join(place.name for place in named.values())} are words for two splits"
                raise DataError(f"{parent}: {told}, one within the other: move the inner folder out, or rename it.")
            if named:
                found[parent] = next(iter(named.items()))
        # A class may be called Test.
        small = whole and any(place.name in words for _, place in found.values())
        if small or ({"train"} < {kind for kind, _ in found.values()} and (whole or not _lack_words(below, found))):
            return {file: found[file.parent] for file in below if file.parent in found}
        found.clear()
    rests = defaultdict[str, set[str]](set)
    for file in below:
        if (name := SPLIT_NAME.fullmatch(file.stem)) is not None:
            found[file] = SPLIT_WORDS[name[1].lower()], file
            rests[re.sub(r"\d", "", name[0][: name.start(1)] + name[0][name.end(1) :])].add(found[file][0])
    clear = len(found) == len(below) or any({"train"} < kinds for kinds in rests.values())
    return found if clear and {"train"} < {kind for kind, _ in found.values()} else {}


def refuse_hidden_splits(folder: Path, below: list[Path], source: DataSource) -> None:
    """Refuses names that say splits, and columns, to people, and not to `datasets`, which would join these files."""
    tables, card = source.rows == "examples", folder / "README.md"
    named = {place for _, place in sort_files(folder, below).values() if tables or place.is_dir()}
    wrong = {place for place in named if len(named) > 1 and not _SEEN.fullmatch(_stem(place))}
    alike = defaultdict[tuple[Path, str], dict[str, Path]](dict)
    for place in {*below, *chain(*(file.parents for file in below))} - {folder, *folder.parents}:
        if not split_of(stem := _stem(place)) and (name := _ATTACHED.fullmatch(stem)) is not None:
            rest = re.sub(r"\d", "", f"{name[1]}/{name[3]}").lower()
            alike[place.parent, rest][SPLIT_WORDS[name[2].lower()]] = place
    wrong |= {place for found in alike.values() if {"train"} < found.keys() for place in found.values()}
    # The card of a data set may name the files of each split.
    if wrong and not (card.is_file() and "data_files:" in read_text(card)):
        names = [place.name for place in sorted(wrong)[:5]]
        advice = ", ".join(f"{place.name} to {_spell_split(place)}" for place in sorted(wrong)[:5])
        told = f"splits are called in small letters, apart by - _ or a dot: rename {advice}."
        raise DataError(f"{folder} has {', '.join(names)}, which would be joined for training: {told}")
    parts = {
        part.name
        for file in below
        if file.suffix in (*TABLES, ".parquet")
        for part in file.relative_to(folder).parents
        if tables
    }
    for column in sorted(part.partition("=")[0] for part in parts if "=" in part):
        if LABEL.fullmatch(column) or GROUPS.fullmatch(column):
            told = f"the names of folders hold the column {column}, which is not read: write it into the tables."
            raise DataError(f"{folder}: {told}")


def _stem(place: Path) -> str:
    """The name of a folder, as v1.0_train, or that of a file without its ending."""
    return place.name if place.is_dir() else place.stem


def _spell_split(place: Path) -> str:
    """A name of a split that `datasets` sees."""
    plain = re.sub(r"[^\w.\- ]", "_", place.name.lower())
    if _SEEN.fullmatch(plain if place.is_dir() else Path(plain).stem):
        return plain
    # CycleGAN's trainA holds one of several kinds.
    return _ATTACHED.sub(
        lambda found: (
            f"{found[1] and found[1] + '_'}{found[2].lower()}{found[3] and '/_'[len(found[3]) > 1] + found[3]}"
        ),
        place.name,
    )


def has_class_train(folder: Path, files: Iterable[Path]) -> bool:
    """True if one folder called train holds files as two or more beside it, of which none has a word for a split."""
    usual = Counter((file.parent, file.suffix.lower()) for file in files)
    trains = {parent for parent, _ in usual if "train" in parent.relative_to(folder).parts}
    if len(trains) != 1 or (train := trains.pop()).name != "train":
        return False
    kinds = {ending for parent, ending in usual if parent == train}
    beside = {parent for parent, ending in usual if parent.parent == train.parent and ending in kinds} - {train}
    return len(beside) > 1 and all(split_of(parent.name) is None for parent, _ in usual if parent != train)


def _lack_words(files: list[Path], found: dict[Path, tuple[str, Path]]) -> bool:
    """True if a folder of such files beside those of splits has no word for one: walk_test beside running."""
    usual = Counter(file.suffix.lower() for file in files if file.parent in found).most_common(1)[0][0]
    beside = {place.parent for _, place in found.values()}
    others = {file.parent for file in files if file.parent not in found and file.suffix.lower() == usual}
    return any(beside & {*other.parents} for other in others)


def find_part(folder: Path, split: str, files: Iterable[Path]) -> Part:
    """The part of the files below a folder that a split has: all of them where no name says what belongs to it."""
    below, word = sorted(files), split.partition("[")[0]
    wanted = SPLIT_WORDS.get(word, word)
    found = sort_files(folder, below, word)
    places = {named for kind, named in found.values() if kind == wanted}
    if not places:
        if found and wanted == "train":
            other = next(iter(found.values()))[1].relative_to(folder)
            told = "another split, and no folder 'train': move the training files into one."
            raise DataError(f"{folder} has the folder {str(other)!r}, {told}")
        return Part(below, [folder])
    own = [file for file in below if file in found and found[file][0] == wanted]
    rest = [file for file in below if file not in found]
    return Part(own, [folder] if places <= {*own} else sorted(places), True, rest)


def find_table(place: Path, files: Iterable[Path]) -> tuple[Path | None, list[Path]]:
    """The table of the files below a place, and those that it may name, as its first rows may be of another split."""
    below = sorted(file for file in files if place in file.parents)
    found = sort_files(place, below)
    named = [file for file in below if file in found] or below
    return find_about(place, named) if named else None, named


def require_part(folder: Path, part: Part, split: str) -> Path:
    """The folder of a split; refuses one that has none, or several."""
    word = split.partition("[")[0]
    if not part.named and SPLIT_WORDS.get(word) != "train":
        raise DataError(f"{folder} has no folder {word!r}: create it, or give another split.")
    if len(part.places) > 1:
        told = " and ".join(str(place.relative_to(folder)) for place in part.places[:2])
        raise DataError(f"{folder} has several folders of the split {word!r}, {told}: move their files into one.")
    return part.places[0]
