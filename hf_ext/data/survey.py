"""What somebody's data are: kind, sizes, classes, and which of them are kept back to measure."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
from PIL import Image

from hf_ext.extras import import_extra

from .broken import UNDECODABLE
from .opening import SourceError, find_files, open_source
from .sequence_files import SUFFIXES, read_file
from .source import DataSource
from .splits import choose

# Files whose names are looked at, and examples that are opened.
_NAMES, _EXAMPLES = 10_000, 64
# Of each class this share is held out, and of all at most about so many.
_KEPT, _MOST_KEPT = 0.1, 1000
# A number above this, and above the number of examples, is no class.
_MOST_CLASSES = 1000


@dataclass
class Survey:
    """What was found. Lengths are samples of a sound, bytes of a text, rows of a series."""

    kind: str
    train: dict[str, Any]
    eval: dict[str, Any] | None
    count: int
    about: str
    classes: list[str] = field(default_factory=list)
    # whether the data give the classes' names with their numbers, as folders do
    named: bool = False
    # of pictures: the shorter sides, the smallest first; whether all have one size; whether they have no colour
    sides: list[int] = field(default_factory=list)
    equal: bool = False
    gray: bool = False
    # how many times the pictures of hq/ are as large as those of lq/
    scale: int = 1
    rate: int = 0
    lengths: list[int] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    # a label for each row of a series
    rows_have_labels: bool = False

    def longest(self, limit: int) -> int:
        """A length that 95 of 100 examples do not exceed, and no more than a limit."""
        return min(limit, int(np.ceil(np.quantile(self.lengths, 0.95))))


def look_at(path: str) -> Survey:
    """
    Looks at a folder or a file of this machine.

    Raises:
        ValueError: If there is no such thing, or nothing in it that our trainings read.
    """
    # One bar is enough of a training; here none is.
    datasets.disable_progress_bars()
    try:
        return _look_at_files(path, find_files(path))
    finally:
        datasets.enable_progress_bars()


def _look_at_files(path: str, found: list[str]) -> Survey:
    """Pairs, series, or what a training reads as examples."""
    if not found:
        raise ValueError(
            f"no data at {path}: name a folder or a file of this machine. A data set of the Hub goes into "
            "data.train.path of a recipe that is written without --data."
        )
    places = [Path(one) for one in found]
    place = places[0]
    pairs = next(
        (part for part in (place / "train", place) if (part / "lq").is_dir() and (part / "hq").is_dir()), None
    )
    if pairs is not None:
        return _look_at_pairs(pairs)
    below = (file for part in places for file in ([part] if part.is_file() else part.rglob("*")))
    endings = Counter(file.suffix.lower() for file in islice((file for file in below if file.is_file()), _NAMES))
    if not endings:
        raise ValueError(f"{path} is empty: put pictures, sounds, texts or tables there.")
    most = endings.most_common(1)[0][0]
    if most in SUFFIXES and (series := _look_at_series(path, places, most)) is not None:
        return series
    return _look_at_examples(path)


def _look_at_examples(path: str) -> Survey:
    """Pictures, sounds and texts, as a training reads them."""
    data = open_source(DataSource(path, split="train"))
    features = data.features
    pictures = [name for name, kind in features.items() if isinstance(kind, datasets.Image) and kind.decode]
    sounds = [name for name, kind in features.items() if isinstance(kind, datasets.Image | datasets.Audio)]
    words = {name for name, kind in features.items() if isinstance(kind, datasets.Value) and "string" in kind.dtype}
    texts = [name for name in features if name in words]
    labels = _labels(data)
    kept = _keep_back({"path": path, "split": "train"}, data)
    survey = Survey("", *kept, count=len(data), about="", classes=_class_names(data, labels, path))
    survey.named = isinstance(features.get("label"), datasets.ClassLabel)
    chosen = [int(index) for index in np.linspace(0, len(data) - 1, min(_EXAMPLES, len(data)))]
    if pictures:
        _measure_pictures(survey, data, pictures[0], chosen)
    elif sounds:
        _measure_sounds(survey, data, sounds[0], chosen)
    elif texts := [name for name in texts if name != "label"]:
        _measure_texts(survey, data, texts, chosen)
    else:
        raise ValueError(
            f"{path} has the columns {', '.join(features)}: no picture, sound or text. Series of numbers are CSV, "
            "TSV, parquet or NumPy files whose rows are positions."
        )
    if survey.classes:
        survey.about += f"; {len(survey.classes)} classes: {_shorten(survey.classes)}"
    return survey


def _measure_pictures(survey: Survey, data: Any, column: str, chosen: list[int]) -> None:
    headers = [header for header in _read_headers(data, column, chosen) if header is not None]
    if not headers:
        raise ValueError(f"none of {len(chosen)} pictures that were looked at can be read: are they pictures?")
    sizes, gray = {header.size for header in headers}, all(header.gray for header in headers)
    survey.kind, survey.columns, survey.gray = "pictures", [column], gray
    survey.equal, survey.sides = len(sizes) == 1, sorted(min(size) for size in sizes)
    smallest, largest = min(sizes, key=min), max(sizes, key=min)
    span = _size(smallest) if smallest == largest else f"{_size(smallest)} to {_size(largest)}"
    survey.about = f"{survey.count:,} pictures of {span} pixels{', grey' if gray else ''}"


class _Header(NamedTuple):
    """What a picture says of itself before it is decoded."""

    size: tuple[int, int]
    gray: bool


def _read_headers(data: Any, column: str, chosen: list[int]) -> list[_Header | None]:
    """Of chosen pictures; None for what is missing, broken or too large, which is for `hf-ext data check` to find."""
    undecoded = data.select_columns([column]).cast_column(column, datasets.Image(decode=False))
    headers: list[_Header | None] = []
    for index in chosen:
        value = undecoded[index][column]
        try:
            with Image.open(io.BytesIO(value["bytes"]) if value["bytes"] else value["path"]) as picture:
                headers.append(_Header(picture.size, picture.mode in ("1", "L", "LA")))
        except UNDECODABLE:
            headers.append(None)
    return headers


def _measure_sounds(survey: Survey, data: Any, column: str, chosen: list[int]) -> None:
    soundfile = import_extra("soundfile")
    rates, seconds = Counter[int](), list[float]()
    for index in chosen:
        value = data[index][column]
        if value is None:
            continue
        try:
            about = soundfile.info(io.BytesIO(value["bytes"]) if value["bytes"] else value["path"])
        except soundfile.SoundFileError:
            continue
        rates[about.samplerate] += 1
        seconds.append(about.frames / about.samplerate)
    if not seconds:
        raise ValueError(f"none of {len(chosen)} sounds that were looked at can be read: are they sound files?")
    survey.kind, survey.columns, survey.rate = "sounds", [column], rates.most_common(1)[0][0]
    survey.lengths = [max(1, round(survey.rate * length)) for length in seconds]
    survey.about = f"{survey.count:,} sounds at {survey.rate} Hz, {min(seconds):.2f} to {max(seconds):.2f} s"


def _measure_texts(survey: Survey, data: Any, columns: list[str], chosen: list[int]) -> None:
    rows = [data[index] for index in chosen]
    lengths = {name: [len((row[name] or "").encode()) for row in rows] for name in columns}
    column = max(columns, key=lambda name: sum(lengths[name]))
    survey.kind, survey.columns, survey.lengths = "texts", [column], [max(1, length) for length in lengths[column]]
    survey.about = f"{survey.count:,} texts of {min(lengths[column])} to {max(lengths[column])} bytes"
    others = [name for name in data.features if name != column]
    if others and "label" not in others:
        survey.about += f" in the column {column}; classes would be in a column `label`, not in {_shorten(others)}"


def _look_at_series(path: str, places: list[Path], ending: str) -> Survey | None:
    """Files whose rows are positions; None where rows are examples of something else."""
    below = {file for place in places for file in ([place] if place.is_file() else place.rglob(f"*{ending}"))}
    files = sorted(file for file in below if file.suffix.lower() == ending)
    try:
        tables = [read_file(files[int(i)]) for i in np.linspace(0, len(files) - 1, min(_EXAMPLES, len(files)))]
    except ValueError:
        # Parquet with pictures, for instance.
        return None
    first = tables[0]
    texts = [name for name, values in first.items() if values.dtype == object]
    numbers = [name for name in first if name not in texts and name != "label" and not _says_when(name)]
    if not numbers or any(name != "label" and not _says_when(name) for name in texts):
        return None
    alone = len(files) == 1
    train: dict[str, Any] = {"path": path, "split": "train[:80%]" if alone else "train", "rows": "positions"}
    kept: dict[str, Any] | None = {**train, "split": "train[80%:]"}
    data = open_source(DataSource(**{**train, "split": "train"}))
    if not alone:
        train, kept = _keep_back(train, data)
    survey = Survey("series", train, kept, count=len(files), about="", columns=numbers)
    survey.lengths = [len(next(iter(table.values()))) for table in tables]
    survey.rows_have_labels = "label" in first
    if survey.rows_have_labels:
        survey.classes = _name_classes([value for table in tables for value in table["label"]], path)
    elif "label" in data.features:
        survey.classes = _name_classes(list(data["label"]), path)
    rows = f"{min(survey.lengths):,} to {max(survey.lengths):,}" if len(tables) > 1 else f"{survey.lengths[0]:,}"
    survey.about = f"{len(files):,} file{'' if alone else 's'} of {rows} rows with the numbers {_shorten(numbers)}"
    if survey.classes:
        survey.about += f"; {len(survey.classes)} classes: {_shorten(survey.classes)}"
    return survey


def _says_when(name: str) -> bool:
    return name.lower() == "ds" or name.lower().startswith(("time", "date"))


def _name_classes(labels: list[Any], path: str) -> list[str]:
    """Names of classes; of numbers all up to the largest. An empty cell and -100, which is ignored, are none."""
    found = {value for value in labels if value is not None and value not in ("", -100) and value == value}
    if any(isinstance(value, str) for value in found):
        return sorted(map(str, found))
    values = [value for value in found if not 0 <= value < max(_MOST_CLASSES, len(labels)) or value % 1]
    if values:
        raise ValueError(
            f"{path}: the column `label` holds {min(values)} and the like, no classes. Classes are names or numbers "
            "from 0 on, each of some use; for values start from the recipe of mrconv-regression: hf-ext recipes "
            "mrconv/sensors."
        )
    return [str(number) for number in range(int(max(found, default=-1)) + 1)]


def _look_at_pairs(place: Path) -> Survey:
    """Pictures in `lq/` and, of the same names, in `hq/`."""
    data = open_source(DataSource(str(place)))
    chosen = [int(index) for index in np.linspace(0, len(data) - 1, min(_EXAMPLES, len(data)))]
    small, large = (_read_headers(data, column, chosen) for column in ("lq", "hq"))
    read = [(lq, hq) for lq, hq in zip(small, large, strict=True) if lq is not None and hq is not None]
    if not read:
        raise ValueError(f"none of {len(chosen)} pairs that were looked at can be read: are they pictures?")
    other = place.parent / "validation"
    train: dict[str, Any] = {"path": str(place)}
    kept: dict[str, Any] | None = {"path": str(other)}
    if not (place.name == "train" and (other / "lq").is_dir() and (other / "hq").is_dir()):
        train, kept = _keep_back({**train, "split": "train"}, data)
    survey = Survey("pairs", train, kept, count=len(data), about="")
    survey.scale = max(1, round(read[0][1].size[0] / read[0][0].size[0]))
    survey.sides, survey.gray = sorted(min(lq.size) for lq, _ in read), read[0][1].gray
    larger = f", those of hq/ {survey.scale} times as large" if survey.scale > 1 else ""
    survey.about = f"{len(data):,} pairs of pictures, the smallest with {survey.sides[0]} pixels{larger}"
    return survey


def _other_split(train: dict[str, Any]) -> dict[str, Any] | None:
    """The part of the data that is for validation, where there is one. That for the test waits for the end."""
    return {**train, "split": "validation"} if _has_split(train, "validation") else None


def _has_split(train: dict[str, Any], split: str) -> bool:
    if not Path(train["path"]).expanduser().is_dir():
        return False
    try:
        open_source(DataSource(**{**train, "split": split}))
    except SourceError:
        return False
    return True


def _labels(data: Any) -> list[Any] | None:
    """The classes of all examples."""
    return list(data["label"]) if "label" in data.features else None


def _class_names(data: Any, labels: list[Any] | None, path: str) -> list[str]:
    kind = data.features.get("label")
    if labels is None or not isinstance(kind, datasets.ClassLabel | datasets.Value):
        return []
    return list(kind.names) if isinstance(kind, datasets.ClassLabel) else _name_classes(labels, path)


def _keep_back(train: dict[str, Any], data: Any) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """What is trained on and what measures: a split of its own, or a share that is held out."""
    other = _other_split(train)
    if other is not None:
        return train, other
    # Of many examples no more than enough, in a round number.
    share = float(f"{min(_KEPT, _MOST_KEPT / max(1, len(data))):.1g}")
    learned = {**train, "hold_out": share, "hold_out_seed": 0}
    if not 0 < choose(data, share, 0).sum() < len(data):
        return train, None
    return learned, {**learned, "split": "validation"}


def _size(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"


def _shorten(names: list[str]) -> str:
    return ", ".join(names[:6]) + (", …" if len(names) > 6 else "")
