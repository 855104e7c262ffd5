# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Pictures in files: read with a bound before anything is decoded, written whole with their metadata.

Pillow does the work but for colour PNGs of 16 bits, of which it would drop eight.
"""

import io
import os
import struct
import tempfile
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageFile, UnidentifiedImageError
from transformers.utils import logging

from .image_processing_semanir import image_to_pixels, pixels_to_image

logger = logging.get_logger(__name__)

# EXIF tags: the orientation, which is applied to the pixels, and the size, which may have changed.
_ORIENTATION, _EXIF_FOLDER, _EXIF_WIDTH, _EXIF_HEIGHT = 0x0112, 0x8769, 0xA002, 0xA003
_GPS_FOLDER = 0x8825

# What Pillow makes of a file name's end, and what is said when it writes.
FORMATS = {
    ".png": "PNG",
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".webp": "WEBP",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".bmp": "BMP",
}
_OPTIONS: dict[str, dict[str, object]] = {
    "JPEG": {"quality": 95, "subsampling": 0},
    "WEBP": {"quality": 95, "method": 4},
    "TIFF": {"compression": "tiff_deflate"},
}
_DEEP = ("PNG", "TIFF")


class Picture(NamedTuple):
    """
    A picture and what lay beside it in its file.

    Args:
        pixels (`np.ndarray` of shape `(height, width, channels)`): uint8 or uint16, upright; see [`image_to_pixels`].
        exif (`PIL.Image.Exif`): Without the orientation.
        icc_profile (`bytes`, *optional*): The colour profile, if it is one of these pixels.
        dpi (`tuple[float, float]`, *optional*): Resolution.
    """

    pixels: np.ndarray
    exif: Image.Exif | None = None
    icc_profile: bytes | None = None
    dpi: tuple[float, float] | None = None


@contextmanager
def _bounded(max_pixels: int) -> Iterator[None]:
    """Pillow's own bound, which is another number, is set to ours meanwhile."""
    before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, max_pixels
    try:
        with warnings.catch_warnings():
            # Above the bound it warns, above twice the bound it refuses; `read_image` refuses both.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            # Of damaged metadata; the pixels decide.
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


def read_image(source: str | Path | bytes, max_megapixels: float = 200.0) -> Picture:
    """
    Read a picture.

    Args:
        source (`str`, `Path` or `bytes`): A file, or what is in it.
        max_megapixels (`float`, *optional*, defaults to 200): Larger pictures are refused before they are decoded.

    Returns:
        [`Picture`]: 16 bits for grey PNG and TIFF, and colour PNG with or without alpha. Of 16 bits in other files,
        and in PNGs of grey and alpha, Pillow gives 8. CMYK and the like become RGB.

    Raises:
        ValueError: If it is no picture, is broken or cut off, is larger than allowed, or moves (several frames).
        OSError: If the file cannot be read.
    """
    name = "the picture" if isinstance(source, bytes) else str(source)
    try:
        with _bounded(max(1, int(max_megapixels * 1e6))), _opened(source) as image:
            width, height = image.size
            if width * height > max_megapixels * 1e6:
                raise ValueError(_too_large(name, f"{width} x {height} pixels", max_megapixels))
            # A phone's JPEG of several pictures (MPO) shows its first.
            frames = getattr(image, "n_frames", 1)
            if frames > 1 and image.format not in ("MPO", "JPEG"):
                raise ValueError(f"{name} has {frames} frames or pages; give each as a file of its own.")
            return _picture(image, source)
    except Image.DecompressionBombError as error:
        raise ValueError(_too_large(name, "more than twice as many pixels", max_megapixels)) from error
    except UnidentifiedImageError as error:
        size = len(source) if isinstance(source, bytes) else os.path.getsize(source)
        what = f"is no picture that Pillow knows ({size} bytes)" if size else "is empty"
        raise ValueError(f"{name} {what}.") from error
    except (SyntaxError, EOFError, struct.error, zlib.error, IndexError, OverflowError) as error:
        # What Pillow's decoders let through of broken files.
        raise ValueError(f"{name} is broken: {error}") from error
    except OSError as error:
        # The system's own errors have a number; those of decoders have none.
        if error.errno is not None:
            raise
        raise ValueError(f"{name} is broken or cut off: {error}") from error


def _too_large(name: str, size: str, bound: float) -> str:
    return f"{name} has {size}; at most {bound:g} megapixels are decoded. Raise max-megapixels to allow it."


def _opened(source: str | Path | bytes) -> ImageFile.ImageFile:
    return Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)


def _picture(image: ImageFile.ImageFile, source: str | Path | bytes) -> Picture:
    raw = image.tile[0].args if image.tile else None
    deep = image.format == "PNG" and raw in ("RGB;16B", "RGBA;16B")
    if isinstance(raw, str) and "16" in raw and not deep and not image.mode.startswith("I;16"):
        logger.warning(f"{image.format} of 16 bits in several channels ({raw}): Pillow reads the upper 8 of them.")
    grey = image.mode in ("1", "L", "LA", "La") or image.mode.startswith("I;16")
    # A profile of other colours, such as CMYK, says nothing about the RGB that comes out.
    fits = grey or image.mode in ("RGB", "RGBA", "RGBX", "P", "PA")
    icc_profile, dpi = image.info.get("icc_profile"), image.info.get("dpi")
    exif = image.getexif()
    pixels = image_to_pixels(image)
    if deep and isinstance(raw, str):
        # Read as if bytes were the other way round, the lower ones come out where the upper ones do.
        with _opened(source) as again:
            again.tile = [again.tile[0]._replace(args=raw.replace("16B", "16L"))]
            again.info.pop("transparency", None)
            lower = np.asarray(again) if exif.get(_ORIENTATION, 1) == 1 else image_to_pixels(again)
        if pixels.shape == lower.shape:
            pixels = pixels.astype(np.uint16) * 256 + lower
    exif.pop(_ORIENTATION, None)
    return Picture(pixels, exif, icc_profile if fits else None, dpi)


def write_image(path: str | Path, picture: Picture, *, overwrite: bool = False, format: str | None = None) -> Path:
    """
    Write a picture; the file appears when it is whole.

    Args:
        path (`str` or `Path`): The file. Its end says the format; see `FORMATS`.
        picture ([`Picture`]): Pixels, and the metadata to keep.
        overwrite (`bool`, *optional*, defaults to `False`): Whether a file of that name may be replaced.
        format (`str`, *optional*): Pillow's name of the format, where the file's end does not say it.

    Returns:
        `Path`: The file. PNGs keep 16 bits, TIFFs do in grey; other formats have 8. JPEG and BMP lose alpha.

    Raises:
        FileExistsError: If the file exists and may not be replaced.
        ValueError: If the format is unknown.
    """
    path = Path(path)
    data = encode_image(picture, format or image_format(path))
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists, and was not to be overwritten.")
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        # As any new file: what mkstemp made is the owner's alone.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def image_format(path: Path) -> str:
    """
    The format that a file's end stands for.

    Args:
        path (`Path`): The file.

    Returns:
        `str`: Pillow's name of the format.

    Raises:
        ValueError: If it is none of `FORMATS`.
    """
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{path} ends with {path.suffix!r}; pictures are written as {', '.join(FORMATS)}.")
    return FORMATS[path.suffix.lower()]


def encode_image(picture: Picture, format: str) -> bytes:
    """
    The bytes of a file.

    Args:
        picture ([`Picture`]): The picture.
        format (`str`): Pillow's name of the format.

    Returns:
        `bytes`: The file.

    Raises:
        ValueError: If the format cannot hold a picture of this size.
    """
    pixels = picture.pixels
    deep, channels = pixels.dtype == np.uint16, pixels.shape[-1]
    exif = picture.exif
    if exif is not None and _EXIF_FOLDER in exif:
        folder = exif.get_ifd(_EXIF_FOLDER)
        for tag, length in ((_EXIF_WIDTH, pixels.shape[1]), (_EXIF_HEIGHT, pixels.shape[0])):
            if tag in folder:
                folder[tag] = length
    if deep and channels > 1 and format == "PNG":
        return _deep_png(picture)
    if deep and (channels > 1 or format not in _DEEP):
        pixels = np.rint(pixels / np.float32(257)).astype(np.uint8)
    if channels % 2 == 0 and format in ("JPEG", "BMP"):
        pixels = pixels[..., :-1]
    options = dict(_OPTIONS.get(format, {}))
    if picture.icc_profile and format != "BMP":
        options["icc_profile"] = picture.icc_profile
    if picture.dpi and format != "WEBP":
        options["dpi"] = picture.dpi
    if exif and format != "BMP":
        options["exif"] = exif
        if format == "TIFF" and (_EXIF_FOLDER in exif or _GPS_FOLDER in exif):
            # Pillow cannot write a compressed TIFF with a folder of tags inside the tags.
            del options["compression"]
    file = io.BytesIO()
    try:
        pixels_to_image(pixels).save(file, format, **options)
    except (OSError, RuntimeError, struct.error) as error:
        raise ValueError(
            f"{format} cannot hold a picture of {pixels.shape[1]} x {pixels.shape[0]} pixels: {error}"
        ) from error
    return file.getvalue()


def _deep_png(picture: Picture) -> bytes:
    """A PNG of 16 bits in several channels, which Pillow does not write."""
    height, width, channels = picture.pixels.shape
    rows = np.ascontiguousarray(picture.pixels.astype(">u2")).view(np.uint8).reshape(height, -1)
    # Each byte as its difference to that of the pixel before, PNG's filter 1, which halves the size of photographs.
    lines = np.ones((height, 1 + rows.shape[1]), np.uint8)
    lines[:, 1:] = rows
    lines[:, 1 + 2 * channels :] -= rows[:, : -2 * channels]
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, {2: 4, 3: 2, 4: 6}[channels], 0, 0, 0))]
    if picture.icc_profile:
        chunks.append((b"iCCP", b"ICC profile\0\0" + zlib.compress(picture.icc_profile)))
    if picture.dpi:
        chunks.append((b"pHYs", struct.pack(">IIB", *(round(value / 0.0254) for value in picture.dpi), 1)))
    if picture.exif:
        chunks.append((b"eXIf", picture.exif.tobytes().removeprefix(b"Exif\0\0")))
    chunks += [(b"IDAT", zlib.compress(lines.tobytes(), 6)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


__all__ = ["Picture", "encode_image", "image_format", "read_image", "write_image"]
