# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""TIFFs of kinds that Pillow does not know or reads wrongly, by tifffile, which knows fewer compressions."""

import io
import logging
import warnings
from collections.abc import Callable

import numpy as np
import tifffile
from PIL import Image
from PIL.TiffImagePlugin import TiffImageFile

from ..terminal import log_level
from .camera import DECODER_ERRORS, Frames, Picture, Source, UnreadableError, read_bytes, resolution_of
from .containers import divide_by_alpha
from .encoding import descriptive_tags

# Those of a TIFF and a BigTIFF.
SIGNATURES = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
# Tags, and what they say: RGB, planes, and alpha with and without which the colours were multiplied.
_BITS, _PHOTOMETRIC, _PLANAR, _EXTRA_SAMPLES, _SIGN, _DEPTH = 258, 262, 284, 338, 339, 32997
_RGB, _SEPARATE, _MULTIPLIED, _PLAIN = 2, 2, 1, 2


def is_misread(image: Image.Image) -> bool:
    """Tells a page of a TIFF that Pillow opens and would read wrongly."""
    if not isinstance(image, TiffImageFile):
        return False
    if image.tag_v2.get(_PLANAR) != _SEPARATE:
        # Of a volume it reads the first picture, and negative numbers of 8 bits as large ones.
        signed = image.mode == "L" and 2 in image.tag_v2.get(_SIGN, ())
        return signed or bool(image.tag_v2.get(_DEPTH, 1) != 1)
    # Of planes it reads those of RGB with 8 bits; it takes two planes for one that is twice as long, halves values of
    # 16 bits, and loses alpha that colours were multiplied with.
    colours, bits = image.tag_v2.get(_PHOTOMETRIC), image.tag_v2.get(_BITS, (1,))
    right = max(bits) <= 8 and (colours not in (0, 1, _RGB) or _MULTIPLIED not in image.tag_v2.get(_EXTRA_SAMPLES, ()))
    return len(bits) > 1 and not (right and colours not in (0, 1))


def read_tiff(source: Source, check: Callable[[int], None]) -> Frames:
    """All pages of a TIFF; `check` is called with their pixels before one is decoded."""
    data, pictures, lost = io.BytesIO(read_bytes(source)), list[Picture](), list[str]()
    try:
        # Both libraries tell of damaged tags; the pixels decide.
        with (
            log_level("tifffile", logging.CRITICAL),
            warnings.catch_warnings(action="ignore", category=UserWarning),
            tifffile.TiffFile(data) as file,
        ):
            # Where a page leads back to an earlier one, they have no end.
            pages: dict[int, tifffile.TiffPage] = {}
            for page in file.pages:
                if page.offset in pages:
                    break
                pages[page.offset] = page.aspage()
            shown = [page for page in pages.values() if not page.is_mask]
            check(sum(page.imagewidth * page.imagelength for page in shown))
            pictures += [_read_page(page, data, lost.append) for page in shown]
    except UnreadableError:
        raise
    except (tifffile.TiffFileError, *DECODER_ERRORS) as error:
        raise UnreadableError(f"is a TIFF that neither Pillow nor tifffile can read: {error}") from error
    if not pictures:
        raise UnreadableError("is a TIFF without a picture")
    if masks := len(pages) - len(pictures):
        lost.append(f"masks of pages were left out: {masks}")
    return Frames(pictures, lost=tuple(dict.fromkeys(lost)))


def _read_page(page: tifffile.TiffPage, data: io.BytesIO, say: Callable[[str], None]) -> Picture:
    """A page; `say` is called with lines about what was lost of it."""
    (pixels, others), exif = _upright_pixels(page), Image.Exif()
    if others:
        say(f"channels beside colour and alpha were left out: {others}")
    if page.parent.byteorder == "<" or not page.parent.is_bigtiff:
        exif.endian, exif.bigtiff = page.parent.byteorder, page.parent.is_bigtiff
        exif.load_from_fp(data, page.offset)
    else:
        say("EXIF data were not read: Pillow knows none of a BigTIFF whose high bytes come first")
    dpi = resolution_of({282: page.resolution[0], 283: page.resolution[1], 296: page.resolutionunit})
    picture = Picture(pixels, exif, page.iccprofile, dpi)
    return picture._replace(exif=descriptive_tags(picture, say))


def _upright_pixels(page: tifffile.TiffPage) -> tuple[np.ndarray, int]:
    """The pixels of a page in grey or RGB, perhaps with alpha, and how many other channels were left out."""
    bits, colours = page.bitspersample, 3 if page.photometric == _RGB else 1
    if page.photometric not in (0, 1, _RGB) or page.sampleformat != 1 or bits > 16:
        kind = f"{getattr(page.photometric, 'name', page.photometric)} of {page.dtype or f'{bits} bits'}"
        raise UnreadableError(f"has colours of the kind {kind}: convert it to grey or RGB of 8 or 16 bits.")
    if page.axes not in ("YX", "YXS", "SYX"):
        raise UnreadableError(f"has more than two dimensions ({page.axes}): save each picture as a page.")
    values = page.asarray()
    values = np.moveaxis(values, 0, -1) if page.axes == "SYX" else values.reshape(*values.shape[:2], -1)
    extra = page.extrasamples[:1]
    alpha = extra in ((_MULTIPLIED,), (_PLAIN,))
    channels = colours + alpha
    # Black is 0, and white all that the bits hold.
    top = 255 if bits <= 8 else 65535
    pixels = values[..., :channels].astype(np.uint8 if bits <= 8 else np.uint16)
    if bits not in (8, 16):
        pixels = np.rint(pixels * (top / (2**bits - 1))).astype(pixels.dtype)
    if page.photometric == 0:
        pixels[..., :colours] = top - pixels[..., :colours]
    if extra == (_MULTIPLIED,):
        pixels = divide_by_alpha(pixels)
    orientation = page.tags.valueof(274, 1)
    # From 5 up rows and columns change places; then each may be read backwards.
    pixels = pixels.swapaxes(0, 1) if orientation >= 5 else pixels
    rows, columns = {2: (1, -1), 3: (-1, -1), 4: (-1, 1), 6: (1, -1), 7: (-1, -1), 8: (-1, 1)}.get(orientation, (1, 1))
    return np.ascontiguousarray(pixels[::rows, ::columns]), values.shape[-1] - channels
