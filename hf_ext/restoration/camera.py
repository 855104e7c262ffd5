"""Opening of picture files: by Pillow, HEIC by pillow-heif and RAW by rawpy (LibRaw), where they are installed."""

import io
import os
import struct
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageFile
from PIL.TiffImagePlugin import TiffImageFile

from ..errors import DataError

Source = str | Path | bytes

# Ends of the names of RAW files. Many are TIFFs whose first picture is a thumbnail, which Pillow would take for all.
# fmt: off
RAW_ENDINGS = frozenset((
    ".3fr", ".arw", ".cr2", ".cr3", ".crw", ".dcr", ".dng", ".erf", ".fff", ".iiq", ".kdc", ".mef", ".mos", ".mrw",
    ".nef", ".nrw", ".orf", ".pef", ".raf", ".raw", ".rw2", ".rwl", ".sr2", ".srf", ".srw", ".x3f",
))
# fmt: on
# Signatures of HEIF files, in bytes 5 to 12.
_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
_SUBFILE, _ORIENTATION, _SUBDIRECTORIES, DNG_VERSION, XMP = 254, 274, 330, 50706, 700
# Pillow's decoders raise nearly anything for broken files: NotImplementedError (DDS) is a RuntimeError, as AVIF's are.
DECODER_ERRORS = (
    OSError, ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RuntimeError, SyntaxError, EOFError,
    AssertionError, NameError, struct.error, zlib.error, Image.DecompressionBombError,
)  # fmt: skip
# What is said of pictures in a file beside the one that is read.
FURTHER = "further pictures, sizes, layers or maps in the file were left out: {}"
# Command that installs the libraries.
EXTRA = 'pip install "hf-ext[images]"'


class Picture(NamedTuple):
    """A picture and what lay beside it in its file."""

    # uint8 or uint16, upright; see [`image_to_pixels`].
    pixels: np.ndarray
    # Without the orientation. What describes the picture is written, nothing else.
    exif: Image.Exif | None = None
    icc_profile: bytes | None = None
    dpi: tuple[float, float] | None = None
    # Chunks of a PNG that say which light its values stand for, and texts; see [`colour_chunks`].
    colour_chunks: bytes = b""


class Frames(NamedTuple):
    """Content of a file: one picture, the frames of an animation, or pages."""

    # At least one. The frames of an animation have one size and the same channels.
    pictures: list[Picture]
    # How long each frame is shown, in milliseconds; None for pages.
    durations: list[float] | None = None
    # How often an animation runs; 0 is for ever.
    plays: int = 1
    # Whether the first picture of an animated PNG is none of the frames, but for programs that know no animation.
    still: bool = False
    # Whether it was a WebP without loss, and how a JPEG halved its colours, as Pillow numbers it: 0 is not at all, -1
    # in a way without a number.
    lossless: bool = False
    subsampling: int = 0
    # Lines about what was lost when the file was read.
    lost: tuple[str, ...] = ()
    # Of a JPEG or GIF.
    comment: bytes = b""


class UnreadableError(DataError):
    """A file that cannot be read; the message continues after the file's name."""


class MissingLibraryError(UnreadableError):
    """A file needs a library that is not installed; the message names the extra that brings it."""


def is_heif(head: bytes) -> bool:
    """Tells by the first 64 bytes a file that pillow-heif reads; an AVIF may begin like one."""
    return head[4:8] == b"ftyp" and head[8:12] in _HEIF_BRANDS and b"avi" not in head[: int.from_bytes(head[:4])]


def is_raw(image: Image.Image) -> bool:
    """Tells a camera's RAW file, which Pillow opens as a TIFF of its thumbnail."""
    if not isinstance(image, TiffImageFile):
        return False
    tags = image.tag_v2
    small = isinstance(tags.get(_SUBFILE), int) and tags[_SUBFILE] & 1
    return DNG_VERSION in tags or bool(small and _SUBDIRECTORIES in tags)


def read_heif(source: Source, check: Callable[[int, int], None]) -> Frames:
    """The main picture of a HEIF file, with 16 bits where it has more than 8."""
    try:
        import pillow_heif
    except ImportError as error:
        raise MissingLibraryError(f"is HEIC, which needs {EXTRA} (pillow-heif)") from error
    try:
        file = pillow_heif.open_heif(seekable(source), convert_hdr_to_8bit=False)
        check(*file.size)
        # It is decoded here.
        pixels = np.asarray(file)
    except UnreadableError:
        raise
    except DECODER_ERRORS as error:
        raise UnreadableError(f"is broken: {str(error).strip()}") from error
    pixels = spread_bits(pixels[..., None] if pixels.ndim == 2 else pixels, file.info["bit_depth"])
    exif, dpi = _exif_of(file.info.get("exif"))
    if xmp := file.info.get("xmp"):
        exif = Image.Exif() if exif is None else exif
        exif[XMP] = xmp
    maps = len(file.info.get("depth_images", ())) + sum(map(len, file.info.get("aux", {}).values()))
    lost = (FURTHER.format(more),) if (more := len(file) - 1 + maps) else ()
    profile, told = file.info.get("icc_profile"), file.info.get("nclx_profile") or {}
    chunks = cicp_chunk(*(int(told.get(name, 2)) for name in ("color_primaries", "transfer_characteristics")))
    picture = Picture(np.ascontiguousarray(pixels), exif, profile, dpi, b"" if profile else chunks)
    return Frames([picture], lost=lost)


def cicp_chunk(primaries: int, transfer: int) -> bytes:
    """The chunk of a PNG for a colour space by its numbers in ITU-T H.273; none of sRGB, BT.709 and unknown ones."""
    if primaries in (1, 2) and transfer in (1, 2, 6, 13):
        return b""
    content = b"cICP" + bytes((primaries, transfer, 0, 1))
    return (4).to_bytes(4) + content + zlib.crc32(content).to_bytes(4)


def spread_bits(pixels: np.ndarray, bits: int) -> np.ndarray:
    """Values of 16 bits whose upper ones are all that the file has, as decoders put them, with white at 65535."""
    if pixels.dtype == np.uint8 or bits >= 16:
        return pixels
    return np.rint((pixels >> (16 - bits)) * (65535 / (2**bits - 1))).astype(np.uint16)


def read_raw(source: Source, check: Callable[[int, int], None]) -> Frames:
    """A camera's RAW file as sRGB of 16 bits, with the camera's white balance and LibRaw's own brightness."""
    try:
        import rawpy
    except ImportError as error:
        raise MissingLibraryError(f"is a camera's RAW file, which needs {EXTRA} (rawpy)") from error
    try:
        with rawpy.imread(seekable(source)) as file:
            check(file.sizes.width, file.sizes.height)
            # The curve of sRGB: a slope of 12.92 near black, a power of 2.4 above.
            pixels = file.postprocess(use_camera_wb=True, output_bps=16, gamma=(2.4, 12.92))
    except rawpy.LibRawError as error:
        said = error.args[0] if error.args else ""
        reason = said.decode(errors="replace") if isinstance(said, bytes) else said
        raise UnreadableError(f"is not a RAW file that LibRaw can read: {reason}") from error
    exif, dpi = _exif_of(read_bytes(source))
    return Frames([Picture(pixels, exif, dpi=dpi)])


def read_bytes(source: Source, count: int | None = None) -> bytes:
    """The content of a picture file, or so many bytes of its beginning."""
    if isinstance(source, bytes):
        return source[:count]
    with open(source, "rb") as file:
        return file.read(count)


def seekable(source: Source) -> Any:
    """A picture file as libraries take it."""
    return io.BytesIO(source) if isinstance(source, bytes) else os.fspath(source)


# The bounds of the pictures that are open in all threads, below them Pillow's own, which is of the whole process.
_BOUNDS: list[int | None] = []
_LOCK = threading.Lock()


def _bound(max_pixels: int | None, opens: bool) -> None:
    """Sets Pillow's bound to the widest of the pictures that are open, or to what it was before the first."""
    with _LOCK:
        if opens:
            _BOUNDS.extend([max_pixels] if _BOUNDS else [Image.MAX_IMAGE_PIXELS, max_pixels])
        else:
            _BOUNDS.reverse()
            _BOUNDS.remove(max_pixels)
            _BOUNDS.reverse()
        own, *ours = _BOUNDS
        Image.MAX_IMAGE_PIXELS = own if not ours else None if None in ours else max(map(int, filter(None, ours)))
        if not ours:
            _BOUNDS.clear()


@contextmanager
def open_picture(source: Source, max_pixels: int | None = None) -> Iterator[ImageFile.ImageFile]:
    """A picture of Pillow, whose own bound, which is another number, is set to ours meanwhile; None is none."""
    _bound(max_pixels, opens=True)
    try:
        with warnings.catch_warnings():
            # Above the bound it warns, above twice the bound it refuses; `read_image` refuses both.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            # Of damaged metadata; the pixels decide.
            warnings.simplefilter("ignore", UserWarning)
            with Image.open(seekable(source)) as image:
                yield image
    finally:
        _bound(max_pixels, opens=False)


def resolution_of(tags: Mapping[int, Any], dpi: tuple[float, float] | None = None) -> tuple[float, float] | None:
    """Pixels an inch of the upright picture, by the tags if nothing else in the file says them; what is not above 1
    says nothing."""
    try:
        inches = 0.0 if dpi else {2: 1.0, 3: 2.54}[tags.get(296, 2)]
        dpi = dpi or (inches * float(tags[282]), inches * float(tags[283]))
        # From 5 up rows and columns change places.
        dpi = dpi[::-1] if tags.get(_ORIENTATION, 1) >= 5 else dpi
    except (LookupError, TypeError, ValueError, ArithmeticError):
        return None
    return dpi if all(1 < side < float("inf") for side in dpi) else None


def tell_shape(x: Any, y: Any) -> list[str]:
    """A line about pixels that are not square, of a file that says their shape alone."""
    try:
        x, y = float(x), float(y)
    except (TypeError, ValueError, ArithmeticError):
        return []
    return [f"its pixels are not square, which was left out: {x:g} : {y:g}"] if 0 < x != y > 0 else []


def _exif_of(data: bytes | None) -> tuple[Image.Exif | None, tuple[float, float] | None]:
    """The tags in EXIF data or in a file that is built like a TIFF, if there are any, and pixels an inch; not the
    orientation."""
    exif = Image.Exif()
    try:
        exif.load(data or b"")
    except DECODER_ERRORS:
        return None, None
    dpi = resolution_of(exif)
    exif.pop(_ORIENTATION, None)
    return exif if len(exif) else None, dpi
