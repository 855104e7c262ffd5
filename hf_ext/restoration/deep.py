# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""16 bits out of PNG and TIFF: Pillow's images have 8 bits in several channels, and grey as it lies in the file."""

import re
import sys
from typing import Any

import numpy as np
import tifffile
from PIL import Image, ImageFile
from PIL.TiffImagePlugin import TiffImageFile
from transformers.utils import logging

from hf_ext.semanir.image_processing_semanir import image_to_pixels

from .camera import DECODER_ERRORS, Source, UnreadableError, seekable

logger = logging.get_logger(__name__)

# How Pillow's decoders call 16 bits in several channels: the channels, and which byte of a value comes first.
_DEEP = re.compile(r"(RGB|RGBA|RGBa|RGBX+|LA|CMYKX*);16[BLN]")
_READ = ("RGB", "RGBA", "RGBa", "RGBX")
# TIFF tags.
_BITS, _PHOTOMETRIC, _ORIENTATION, _PLANAR, _EXTRA_SAMPLES = 258, 262, 274, 284, 338


def read_deep(image: ImageFile.ImageFile, source: Source, page: int) -> np.ndarray | None:
    """All 16 bits of a picture in colour."""
    if isinstance(image, TiffImageFile) and _has_deep_planes(image):
        return _upright_planes(image, source, page)
    kind = _DEEP.fullmatch(_raw_mode(image))
    if kind is None or image.format not in ("PNG", "TIFF") or image.mode.startswith("I;16"):
        return None
    # Pillow puts the frames of an animation together, and makes alpha of a colour that stands for transparency.
    made_up = image.format == "PNG" and (getattr(image, "is_animated", False) or "transparency" in image.info)
    if kind[1] in _READ and not made_up:
        return _both_halves(source, page)
    logger.warning(f"{image.format} of 16 bits in several channels ({kind[0]}): Pillow reads the upper 8 bits only.")
    return None


def spread_grey(pixels: np.ndarray, image: Image.Image) -> np.ndarray:
    """Grey of 16 bits from black, 0, to white, 65535; Pillow gives that of a TIFF as it lies in the file."""
    if not isinstance(image, TiffImageFile) or not image.mode.startswith("I;16"):
        return pixels
    # 12 bits come as 0 to 4095, and only of 8 bits Pillow turns white that is 0.
    top, white_is_zero = 2 ** image.tag_v2.get(_BITS, (16,))[0] - 1, image.tag_v2.get(_PHOTOMETRIC) == 0
    if top == 65535 and not white_is_zero:
        return pixels
    spread = np.rint(np.arange(top + 1) * (65535 / top)).astype(np.uint16)
    return (65535 - spread if white_is_zero else spread)[pixels]


def _raw_mode(image: ImageFile.ImageFile) -> str:
    """Pillow's raw mode for the values in the file, such as RGB;16B."""
    arguments: Any = image.tile[0].args if image.tile else None
    first = arguments[0] if isinstance(arguments, tuple) and arguments else arguments
    return first if isinstance(first, str) else ""


def _both_halves(source: Source, page: int) -> np.ndarray:
    """All 16 bits of a picture in RGB or RGBA."""
    # Pillow's images have 8 bits in several channels, and its decoders hand out the upper byte of each value. Told
    # that the bytes lie the other way round, they take the lower byte for the upper one: two readings give both. The
    # tests compare the result with what tifffile reads, for each order of bytes, compression and layout.
    halves = []
    for swapped in (False, True):
        with Image.open(seekable(source)) as image:
            image.seek(page)
            raw = _raw_mode(image)
            # Colours that were multiplied with alpha are divided by it below, with all their bits.
            wanted = raw.replace("RGBa", "RGBA")
            if swapped:
                native = "B" if sys.byteorder == "little" else "L"
                wanted = wanted[:-1] + {"B": "L", "L": "B", "N": native}[wanted[-1]]
            for index, tile in enumerate(image.tile):
                arguments = (wanted, *tile.args[1:]) if isinstance(tile.args, tuple) else wanted
                image.tile[index] = tile._replace(args=arguments)
            halves.append(image_to_pixels(image))
    pixels = halves[0].astype(np.uint16) * 256 + halves[1]
    if "RGBa" not in raw:
        return pixels
    alpha = pixels[..., 3:].astype(np.float64)
    colours = pixels[..., :3] * (65535 / np.maximum(alpha, 1))
    return np.concatenate([np.rint(colours.clip(0, 65535)), alpha], axis=-1).astype(np.uint16)


def _has_deep_planes(image: TiffImageFile) -> bool:
    """Tells that a TIFF has planes of 16 bits, of which Pillow reads halves or nothing that makes sense."""
    bits = image.tag_v2.get(_BITS, (1,))
    return isinstance(bits, tuple) and len(bits) > 1 and max(bits) > 8 and image.tag_v2.get(_PLANAR) == 2


def _upright_planes(image: TiffImageFile, source: Source, page: int) -> np.ndarray:
    """The pixels of a TIFF page whose colours lie in planes of 16 bits, by tifffile."""
    if image.tag_v2.get(_PHOTOMETRIC) != 2:
        raise UnreadableError("has 16 bits in planes that are not RGB; save it with interleaved channels.")
    try:
        with tifffile.TiffFile(seekable(source)) as file:
            planes = file.pages[page].asarray()
    except (tifffile.TiffFileError, *DECODER_ERRORS) as error:
        raise UnreadableError(f"has 16 bits in planes that tifffile cannot read: {error}") from error
    alpha = image.tag_v2.get(_EXTRA_SAMPLES, ())[:1] == (2,)
    pixels = np.moveaxis(planes, 0, -1)[..., : 4 if alpha else 3].astype(np.uint16)
    orientation = image.tag_v2.get(_ORIENTATION, 1)
    # From 5 up rows and columns change places; then each may be read backwards.
    pixels = pixels.swapaxes(0, 1) if orientation >= 5 else pixels
    rows, columns = {2: (1, -1), 3: (-1, -1), 4: (-1, 1), 6: (1, -1), 7: (-1, -1), 8: (-1, 1)}.get(orientation, (1, 1))
    return np.ascontiguousarray(pixels[::rows, ::columns])
