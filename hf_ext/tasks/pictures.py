"""Pictures of examples, for all tasks that take some."""

from typing import Any

import numpy as np
from PIL import Image

from hf_ext.restoration.deep import spread_grey
from hf_ext.restoration.encoding import to_8_bits

from ..errors import DataError


def require_picture(value: Any, column: str) -> Image.Image:
    """The picture in a column of an example; a row without one is an example that cannot be used."""
    if not isinstance(value, Image.Image):
        held = "" if value is None else f", but a value of type {type(value).__name__}"
        raise DataError(f"column {column!r} holds no picture{held}.")
    return value


def in_colours(picture: Image.Image, mode: str) -> Image.Image:
    """
    A picture of 8 bits, of mode `"L"` or `"RGB"`; whole numbers of 16 bits are scaled.

    Raises:
        ValueError: If the picture has floats, or whole numbers outside 16 bits.
    """
    # Pillow clips these modes to 8 bits when it converts them: the picture would come out white.
    if picture.mode[0] in "IF":
        values = np.asarray(picture)
        low, high = values.min(), values.max()
        if picture.mode == "F" or low < 0 or high > 65535:
            raise DataError(
                f"a picture has PIL mode {picture.mode!r} and values from {low:g} to {high:g}, and only whole numbers "
                "from 0 to 65535 are scaled to 8 bits: convert it to 8 bits."
            )
        picture = Image.fromarray(to_8_bits(spread_grey(values.astype(np.uint16), picture)))
    return picture.convert(mode)
