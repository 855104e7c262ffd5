"""Surveys of pictures, alone and in pairs."""

import os
import re
import shlex
from collections import Counter
from functools import cache
from itertools import chain, combinations
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
from PIL import ExifTags, Image

from ..errors import DataError
from ..tasks.checks import is_scaled
from ..terminal import count_of
from .camera_pictures import CAMERA_SUFFIXES, IMAGE_SUFFIXES
from .files import UNDECODABLE, is_broken_picture, is_seen, list_files, open_bytes
from .found import Survey, keep_back, tell_test
from .opening import PAIRS, find_pairs, name_pair, open_source
from .roles import Hints
from .source import DataSource
from .splits import SPLIT_NAME, split_of
from .tables import option, shorten

# Number of examples to open.
EXAMPLES = 64


def choose(count: int) -> list[int]:
    return [int(index) for index in np.linspace(0, count - 1, min(EXAMPLES, count))]


def measure_pictures(survey: Survey, data: Any, column: str, chosen: list[int]) -> None:
    undecoded = data.select_columns([column]).cast_column(column, datasets.Image(decode=False))
    values = [undecoded[index][column] for index in chosen]
    headers = [header for value in values for header in _read_header(value)]
    tell_broken(survey, sum(map(is_broken_picture, values)), len(chosen), len(headers), "picture")
    _tell_modes(survey, headers)
    sizes = {header.size for header in headers}
    survey.kind, survey.columns = "pictures", [column]
    survey.square = len({*chain(*sizes)}) == 1
    survey.sides = sorted(min(size) for size in sizes)
    ends = dict.fromkeys(f"{width} x {height}" for width, height in (min(sizes, key=sorted), max(sizes, key=sorted)))
    survey.about = f"{count_of(len(data), 'picture')} of {' to '.join(ends)} pixels{', grey' if survey.gray else ''}"


class _Header(NamedTuple):
    size: tuple[int, int]
    mode: str
    # Of its bits Pillow keeps the upper half.
    halved: bool
    frames: int


def _read_header(value: dict[str, Any]) -> list[_Header]:
    """The header; none of what is missing, broken or too large, which is for `hf-ext data check` to find."""
    try:
        with Image.open(open_bytes(value)) as picture:
            # How Pillow's decoders call 16 bits in several channels, of which it keeps the upper 8.
            halved = picture.mode[0] not in "IF" and ";16" in str([tile.args for tile in getattr(picture, "tile", ())])
            # As it is turned when it is read.
            size = picture.size[::-1] if picture.getexif().get(ExifTags.Base.Orientation, 1) > 4 else picture.size
            return [_Header(size, picture.mode, halved, getattr(picture, "n_frames", 1))]
    except UNDECODABLE:
        return []


def _tell_modes(survey: Survey, headers: list[_Header]) -> None:
    modes = {header.mode for header in headers}
    survey.bits = 32 if modes & {"I", "F"} else 16 if any(mode[0] in "IF" for mode in modes) else 8
    survey.gray = all(mode[0] in "IF" or mode in ("1", "L", "LA") for mode in modes)
    if any(header.halved for header in headers):
        survey.notes.append("colours of 16 bits are read as 8")
    if any(header.frames > 1 for header in headers):
        survey.notes.append("of files with several frames or pages, the first is read")


def tell_broken(survey: Survey, broken: int, looked_at: int, read: int, what: str) -> None:
    if not read:
        raise DataError(f"{survey.train['path']}: none of {count_of(looked_at, what)} can be read.")
    survey.leave_out(broken, looked_at, "that were looked at cannot be read")


def look_at_pairs(place: Path, names: tuple[str, str]) -> Survey:
    """Pictures in two folders, of the same names."""
    train: dict[str, Any] = {"path": str(place), "split": "train"}
    train |= {"pairs": list(names)} if names != ("lq", "hq") else {}
    data = open_source(DataSource(**train))
    # Beside train_set, val_set.
    others = {one: SPLIT_NAME.fullmatch(one.name) for one in sorted(place.parent.iterdir()) if one.is_dir()}
    rests = {one: one.name[: word.start(1)] + one.name[word.end(1) :] for one, word in others.items() if word}
    folders = {split_of(one.name): one for one, rest in rests.items() if rest == rests.get(place)}
    beside = folders if folders.get("train") == place else {}
    if (other := beside.get("validation")) is not None and find_pairs(other, names):
        train.pop("split")
        kept: dict[str, Any] = {"train": train, "eval": {**train, "path": str(other)}}
        kept |= {"learned": len(data), "count": len(data)}
    else:
        kept = keep_back(train, data)
    survey = _measure_pairs(kept, data, (f"{names[0]}/", f"{names[1]}/"))
    if unread := sorted({part.name for part in place.iterdir() if part.is_dir() and is_seen(part.name)} - {*names}):
        survey.left_out.append(f"the folder{'s' if len(unread) > 1 else ''} {shorten(unread)} beside them")
    if (test := beside.get("test")) is not None:
        survey.left_out.append(tell_test(f"--data.eval.path {shlex.quote(str(test))}"))
    return survey


def look_at_columns(path: str, train: dict[str, Any], data: Any, pictures: list[str], hints: Hints) -> Survey:
    """Pictures in two columns, which become inputs and targets."""
    if (pair := name_pair(pictures, hints.pairs)) is None and hints.pairs:
        told = f"that contain pictures with equal names; its columns of pictures are {shorten(pictures) or 'none'}"
        raise DataError(f"{path} has no folders {' and '.join(hints.pairs)} {told}.")
    if pair is None:
        told = f"say --pairs {','.join(pictures[:2])} if the second is the first without its faults"
        raise DataError(f"{path} has pictures in {shorten(pictures)}: {told}, or {option('inputs', pictures[0])}.")
    names = {old: new for old, new in zip(pair, ("lq", "hq"), strict=True) if old != new}
    train |= {"rename_columns": train.get("rename_columns", {}) | names} if names else {}
    data = data.rename_columns(names)
    survey = _measure_pairs(keep_back(train, data), data, pair)
    survey.left_out += [f"{name} (no input)" for name in data.column_names if name not in ("lq", "hq", "label")]
    return survey


def _measure_pairs(kept: dict[str, Any], data: Any, names: tuple[str, str]) -> Survey:
    """Survey of the columns lq and hq, which are called otherwise for people."""
    raw = data.cast_column("lq", datasets.Image(decode=False)).cast_column("hq", datasets.Image(decode=False))
    rows = [(row["lq"], row["hq"]) for row in (raw[index] for index in choose(len(data)))]
    broken = sum(any(map(is_broken_picture, row)) for row in rows)
    read = [(*lq, *hq) for lq, hq in (map(_read_header, row) for row in rows) if lq and hq]
    survey = Survey("pairs", **kept, about="")
    tell_broken(survey, broken, len(rows), len(read), "pair")
    survey.scale = max(1, read[0][1].size[0] // read[0][0].size[0])
    wrong = [(*hq.size, *lq.size) for lq, hq in read if not is_scaled(lq.size, hq.size, survey.scale)]
    if wrong or survey.scale > 4:
        found = "{} x {} pixels for {} x {}".format(*(wrong or [(*read[0][1].size, *read[0][0].size)])[0])
        told = f"must be as large as those of {names[0]}, or all 2, 3, 4 times, with less than 2, 3, 4 pixels more"
        told = f"{told}, which are cut off; found {found}."
        raise DataError(f"{survey.train['path']}: the pictures of {names[1]} {told}")
    _tell_modes(survey, [header for pair in read for header in pair])
    survey.sides = sorted(min(lq.size) for lq, _ in read)
    larger = f", those of {names[1]} {survey.scale} times as large" if survey.scale > 1 else ""
    survey.about = f"{count_of(len(data), 'pair')} of pictures, the smallest with {survey.sides[0]} pixels{larger}"
    survey.roles = [f"{names[0]} becomes {names[1]}"]
    return survey


def refuse_hidden_pairs(place: Path) -> list[str]:
    """
    Refuses folders of pairs that are not read as such: of usual names, or of unknown ones with equal pictures but for
    their faults; the inputs would be learned as targets. Notes where the names of files alone are alike.
    """
    kinds = IMAGE_SUFFIXES | CAMERA_SUFFIXES
    found = {one.name: [*list_files(one)] for one in sorted(place.glob("*")) if one.is_dir() and is_seen(one.name)}
    sides = {name: {f.stem: f for f in files if f.suffix.lower() in kinds} for name, files in found.items()}
    sides = {name: files for name, files in sides.items() if files}
    if len(sides) == 2 and (pair := name_pair(sides)) and {*map(str.lower, pair)} != {"a", "b"}:
        told = "give each picture the name of its target, or rename the folders if they hold no pairs"
        raise DataError(
            f"{place} has the two folders {pair[0]}/ and {pair[1]}/, but no pictures of equal names in both: {told}."
        )
    shrink, notes = cache(_shrink), list[str]()
    splits = Counter(map(split_of, sides))
    # More are classes. Of several splits only one is learned.
    for one, two in combinations(sides if len(sides) <= 16 else (), 2):
        split = split_of(one)
        if split != split_of(two) or ("train" in splits and split != "train"):
            continue
        if not (alike := _name_alike(sides[one], sides[two])):
            continue
        # Of three or more, as months and bands are, pictures that are alike say little without the names.
        sure = splits[split] == 2 or _name_sides(one, two)
        rename = "" if alike[0][0].stem == alike[0][1].stem else "give each picture the name of its target and "
        told = f"if {two}/ has the targets of {one}/, or the reverse, {rename}say --pairs {one},{two}"
        # Pictures of a fixed camera, or of aligned faces, are as like the others as their own.
        small = [[shrink(file) for file in pair] for pair in alike[:8]]
        own, beside = ([small[n][0] @ small[n - by][1] for n in range(len(small))] for by in (0, 1))
        same = np.median(own) > max(0.8, 0.75 + 0.25 * np.median(beside))
        if same and sure:
            advice = "; rename the files, or give one of the folders, if they are no pairs"
            raise DataError(f"{place} has the same pictures in {one}/ and {two}/: {told}{advice}.")
        if same or sure:
            notes.append(f"WARNING: {one}/ and {two}/ have files of like names, but are read as no pairs: {told}")
    return notes[:1]


def _name_sides(*names: str) -> bool:
    """Tells if words of two names are a usual pair; letters, and low and high, are other things too."""
    one, two = ({*re.split(r"[\W\d_]+", name.lower())} for name in names)
    return (name_pair(one ^ two) or "a")[0] not in ("a", "low")


def _name_alike(ones: dict[str, Path], others: dict[str, Path]) -> list[tuple[Path, Path]]:
    """Pairs of files of like names in two folders, if half of the larger are: 0001x2 of 0001, and 1_0_0.8 of 1."""
    alike = [(ones[name], others[name]) for name in ones if name in others]
    for many, few in ((ones, others), (others, ones)):
        starts = {name: start[0] for name in many if (start := re.match(r".*?\d+", name)) and start[0] in few}
        if len(starts) == len(many) > len(alike):
            alike = [(many[name], few[start]) for name, start in starts.items()]
    return [] if len(alike) < 2 or 2 * len(alike) < max(len(ones), len(others)) else alike


def _shrink(file: Path) -> np.ndarray:
    """A picture, small and grey, with mean 0 and length 1; all 0 where it cannot be read or has one colour."""
    try:
        image = Image.open(file)
        # A JPEG is decoded at a part of its size.
        image.draft("L", (64, 64))
        small = np.asarray(image.convert("L").resize((32, 32)), np.float64).ravel()
    except UNDECODABLE:
        return np.zeros(32 * 32)
    small = small - small.mean()
    return small / (np.linalg.norm(small) or 1.0)


def refuse_mixed_pairs(path: str, files: list[Path]) -> None:
    """Refuses 1_noisy.png beside 1_clean.png, also in folders: the noisy ones would be learned as targets."""
    names = [str(file).partition("::")[0] for file in files]
    # The folders above say nothing.
    start = os.path.commonprefix(names).rfind("/") + 1
    names = [name[start:] for name in names]
    for pair in PAIRS:
        sides = [_find_rests(names, word, other) for word, other in (pair, pair[::-1])]
        both = sorted(sides[0].keys() & sides[1].keys())
        # Letters, and words of a few, say little.
        if len(pair[0]) > 1 and len(both) > 1 and 4 * len(both) >= len(names):
            first, second = (side[both[0]] for side in sides)
            told = f"put them into two folders, {pair[0]}/ and {pair[1]}/, under equal names; rename them if none are."
            raise DataError(f"{path} has pairs of pictures, such as {first} and {second}: {told}")


def _find_rests(names: list[str], word: str, other: str) -> dict[str, str]:
    """The names that have a word, and not the other of a pair, by what is left of them without it."""
    found = dict[str, str]()
    for name in names:
        plain = os.path.splitext(name)[0].lower()
        words = {*re.split(r"[\W\d_]+", plain)}
        # Tides are low and high, too.
        alone = word not in ("low", "high") or word in (re.sub(r"[\W\d_]+", "", part) for part in plain.split("/"))
        if word in words and other not in words and alone:
            found[re.sub(rf"(?<![^\W\d_]){word}(?![^\W\d_])", "", plain)] = name
    return found
