"""Likeness of pictures: copies that were saved anew, resized, brightened, mirrored or turned."""

import os
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
from PIL import Image

from .broken import UNDECODABLE, open_bytes
from .groups import join_units

# More pictures, or pictures of more bytes, are compared by their files alone, and so is one of more pixels.
MOST_COMPARED, _MOST_BYTES, _MOST_PIXELS = 5_000, 2_000_000_000, 4_000_000
# Side of a thumbnail, and the least correlation of two that are one picture. Of 18 parts of photographs, copies have
# 0.999 in the median; of 1,797 handwritten digits, 0.6 % have another digit above the bound.
_SIDE, _ALIKE = 16, 0.99
# Halves of a thumbnail, whose squares add up to 1, are nearly equal if they differ by less.
_UNCLEAR = 0.5


def find_alike(data: list[datasets.Dataset], column: str) -> list[int] | None:
    """
    The number of the picture that each example shows, counted over all data sets; copies have the same. `None` where
    there are more than [`MOST_COMPARED`], or 2 GB of files.

    Two grey thumbnails of 16 x 16 are one picture if their correlation, which knows no brightness and contrast, is
    above a bound. Each is turned and mirrored until its left, its upper and its upper right half are the brighter
    ones, so that all eight ways to turn a picture give the same; where two halves are nearly equal, a copy may come
    out otherwise, and all eight are compared. What is not decoded is like nothing.
    """
    count = sum(map(len, data))
    if count == 0:
        return []
    if count > MOST_COMPARED or sum(_weigh(part, column) for part in data) > _MOST_BYTES:
        return None
    read = np.concatenate([_read_thumbnails(part, column) for part in data]).reshape(-1, _SIDE, _SIDE)
    ways = [_turn(thumbnail) for thumbnail in read]
    upright = np.stack([found[0] for found in ways]).reshape(count, -1)
    owners = np.repeat(np.arange(count), [len(found) for found in ways])
    turned = np.stack([way for found in ways for way in found]).reshape(len(owners), -1)
    shown: list[set[int]] = [{index} for index in range(count)]
    for first in range(0, len(owners), 1024):
        rows, others = np.nonzero(turned[first : first + 1024] @ upright.T > _ALIKE)
        for owner, other in zip(owners[first + rows].tolist(), others.tolist(), strict=True):
            shown[owner].add(other)
    return join_units([tuple(one) for one in shown], list(range(count)))


def _turn(pixels: np.ndarray) -> list[np.ndarray]:
    """The thumbnail turned so that its left, upper and upper right half are brighter; all ways if that is unclear."""
    half, unclear = _SIDE // 2, False
    for turn, part in (
        (lambda held: held[:, ::-1], np.s_[:, :half]),
        (lambda held: held[::-1], np.s_[:half]),
        (np.transpose, np.triu_indices(_SIDE, 1)),
    ):
        lead = pixels[part].sum() - turn(pixels)[part].sum()
        unclear |= abs(lead) < _UNCLEAR
        pixels = turn(pixels) if lead < 0 else pixels
    if not unclear:
        return [pixels]
    quarters = [np.rot90(pixels, count) for count in range(4)]
    return [*quarters, *(quarter.T for quarter in quarters)]


def _weigh(data: datasets.Dataset, column: str) -> int:
    """The bytes of all files."""
    files = data.with_format("arrow").select_columns([column])[:][column].combine_chunks()
    sizes = pc.binary_length(files.field("bytes")).to_pylist()
    return sum(
        (os.path.getsize(path) if path and os.path.isfile(path) else 0) if size is None else size
        for path, size in zip(files.field("path").to_pylist(), sizes, strict=True)
    )


def _read_thumbnails(data: datasets.Dataset, column: str) -> np.ndarray:
    """Thumbnails `[examples, 256]`, float32, of mean 0 and length 1; zeros of what is blank or cannot be read."""
    raw = data.select_columns([column]).cast_column(column, datasets.Image(decode=False))
    # `datasets` keeps the result, so that a training reads each picture once more at its first start alone.
    kinds = datasets.Features({"thumbnail": datasets.List(datasets.Value("float32"))})
    made = raw.map(
        _make_thumbnail,
        input_columns=[column],
        remove_columns=[column],
        features=kinds,
        # A folder of `save_to_disk` is the user's, and stays as it is.
        keep_in_memory=not any(_is_cached(Path(file["filename"])) for file in raw.cache_files),
        desc="comparing pictures",
    )
    return np.array(made.with_format(None)["thumbnail"][:], dtype=np.float32).reshape(len(data), _SIDE**2)


def _is_cached(file: Path) -> bool:
    return file.resolve().is_relative_to(Path(datasets.config.HF_DATASETS_CACHE).resolve())


def _make_thumbnail(value: dict[str, Any] | None) -> dict[str, np.ndarray]:
    nothing = np.zeros(_SIDE**2, dtype=np.float32)
    try:
        with Image.open(open_bytes(value or {})) as picture:
            picture.draft("L", (4 * _SIDE, 4 * _SIDE))
            if picture.width * picture.height > _MOST_PIXELS:
                return {"thumbnail": nothing}
            grey = picture.convert("RGB").convert("L") if picture.mode in ("P", "PA") else picture.convert("L")
            pixels = np.asarray(grey.resize((_SIDE, _SIDE), Image.Resampling.BOX), dtype=np.float32)
    except UNDECODABLE:
        return {"thumbnail": nothing}
    if pixels.std() < 2:
        return {"thumbnail": nothing}
    pixels -= pixels.mean()
    return {"thumbnail": (pixels / np.linalg.norm(pixels)).ravel()}
