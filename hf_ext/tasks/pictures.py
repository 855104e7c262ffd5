"""Pictures of examples, for all tasks that take some."""

from typing import Any

import numpy as np
from PIL import Image

import hf_ext.restoration.opened  # noqa: F401 (it enters itself: pictures of data sets are read by Pillow)
from hf_ext.restoration.encoding import to_8_bits
from hf_ext.semanir.image_processing_semanir import spread_grey

from ..errors import DataError
from .checks import column


def require_picture(value: Any, column: str) -> Image.Image:
    """The picture in a column of an example; a row without one is an example that cannot be used."""
    if not isinstance(value, Image.Image):
        held = "" if value is None else f", but a value of type {type(value).__name__}"
        raise DataError(f"column {column!r} contains no picture{held}.")
    return value


def picture_of(example: dict[str, Any], name: str, option: str, advice: str = "") -> Image.Image:
    return require_picture(column(example, name, option, advice), name)


def deep_grey(picture: Image.Image) -> np.ndarray | None:
    """Grey of 16 bits as uint16 `[height, width]`, from black at 0 to white at 65535; `None` for 8 bits."""
    if picture.mode[0] not in "IF":
        return None
    values = np.asarray(picture)
    low, high = values.min(), values.max()
    # Of a FITS, Pillow takes numbers below 0 for large ones.
    if picture.mode == "F" or low < 0 or high > 65535 or picture.format == "FITS":
        told = f"a picture has PIL mode {picture.mode!r} and values from {low:g} to {high:g}"
        raise DataError(f"{told}, and only whole numbers from 0 to 65535 are scaled: convert it to 8 bits.")
    # On white, as what is transparent in 8 bits.
    spread, clear = spread_grey(values.astype(np.uint16), picture), picture.info.get("transparency")
    return spread if clear is None else np.where(values == clear, np.uint16(65535), spread)


def put_on_white(picture: Image.Image) -> Image.Image:
    """A picture without transparency: on white, as most viewers show it; the colours that it hides are anything."""
    if not picture.has_transparency_data:
        return picture
    return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture.convert("RGBA"))


def in_colours(picture: Image.Image, mode: str) -> Image.Image:
    """A picture of 8 bits, of mode `"L"` or `"RGB"`; whole numbers of 16 bits are scaled, others refused."""
    # Pillow clips 16 bits to 8 when it converts them: the picture would come out white.
    deep = deep_grey(picture)
    return (put_on_white(picture) if deep is None else Image.fromarray(to_8_bits(deep))).convert(mode)
