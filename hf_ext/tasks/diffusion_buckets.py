"""Pictures of many shapes in a training that reads them as they are: sorted by shape, so that a batch has one.

Sizes are read from the heads of the files before the training begins, and kept in the cache of `datasets`, where the
next start finds them. The order of the examples is then a function of the sizes and the seed (`hf_ext.training.data`).
"""

import io
from dataclasses import dataclass
from typing import IO, Any

import datasets
import numpy as np
from datasets.utils.file_utils import xopen
from huggingface_hub.dataclasses import strict
from PIL import ExifTags, Image

from hf_ext.training.bad_examples import UNREADABLE

from ..errors import MissingColumn, UsageError
from .diffusion_data import Size, bucket_sizes, nearest_bucket

# Bytes at the end of a PNG in which words behind its pixels are looked for.
_TAIL = 2**18


@strict
@dataclass
class Buckets:
    """
    Shapes of about the same area that pictures are sorted into and cropped to.

    Args:
        max_ratio (`float`, defaults to 2.0): Largest ratio of the sides.
        step (`int`, defaults to 64): Number of pixels of which the sides are multiples.
    """

    max_ratio: float = 2.0
    step: int = 64

    def sizes(self, side: int | list[int]) -> list[Size]:
        """The shapes of about the area of a square."""
        if not isinstance(side, int):
            raise UsageError(f"buckets have the area of a square: give task.image_size as one side, not {side}.")
        return bucket_sizes(side, self.step, self.max_ratio)


def group_pictures(data: datasets.Dataset, column: str, buckets: list[Size]) -> np.ndarray:
    """The number of the bucket of each picture of a column; of those that cannot be read, the largest one's."""
    if column not in data.column_names:
        raise MissingColumn.of(column, data.column_names, "task.image_column")
    files = data.select_columns([column]).cast_column(column, datasets.Image(decode=False))
    # Each process of a launch reads them where the cache has none, which `datasets` fills with whole files.
    sizes = files.map(_read_sizes, batched=True, input_columns=[column], remove_columns=[column], desc="sizes")
    pairs = np.stack([sizes.with_format("numpy")[:][name] for name in ("height", "width")], axis=1)
    # The cache keeps failures too, but a file may have come back since.
    for index in np.flatnonzero(pairs[:, 0] == 0):
        pairs[index] = _read_size(files[int(index)][column])
    known, places = np.unique(pairs, axis=0, return_inverse=True)
    shapes = [(max(int(height), 1), max(int(width), 1)) for height, width in known]
    found = np.array([buckets.index(nearest_bucket(shape, buckets)) for shape in shapes])[places.reshape(-1)]
    # There neighbours of many batches can stand in.
    is_read = pairs[:, 0] > 0
    found[~is_read] = np.bincount(found[is_read], minlength=1).argmax()
    return found


def _read_sizes(files: list[dict[str, Any] | None]) -> dict[str, list[int]]:
    """Heights and widths of picture files, as they are shown."""
    sizes = [_read_size(file) for file in files]
    return {"height": [height for height, _ in sizes], "width": [width for _, width in sizes]}


def _read_size(file: dict[str, Any] | None) -> Size:
    try:
        content = (file or {})["bytes"]
        # Paths into archives and of the Hub too.
        opened = xopen((file or {})["path"], "rb") if content is None else io.BytesIO(content)
        with opened, Image.open(opened) as image:
            # As `datasets` turns them.
            turned = _read_exif(image, opened).get(ExifTags.Base.Orientation, 1) >= 5
            return (image.width, image.height) if turned else (image.height, image.width)
    except (*UNREADABLE, KeyError):
        # No size. The training counts it among its bad examples when it comes to it.
        return 0, 0


def _read_exif(image: Image.Image, opened: IO[bytes]) -> Image.Exif:
    """The EXIF data of a picture, without decoding it."""
    if image.format != "PNG" or "exif" in image.info:
        return image.getexif()
    # Of a PNG that has none in its head Pillow decodes the pixels to look behind them, 0.1 s for a photograph. Some
    # programs write it there, so where the end of the file may hold any, it does.
    place = opened.tell()
    opened.seek(max(0, opened.seek(0, io.SEEK_END) - _TAIL))
    tail = opened.read()
    opened.seek(place)
    may_have = any(mark in tail for mark in (b"eXIf", b"tEXt", b"zTXt", b"iTXt"))
    return image.getexif() if may_have else Image.Image.getexif(image)
