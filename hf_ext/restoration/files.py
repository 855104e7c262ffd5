"""Pictures in files, read with a bound before anything is decoded, with their metadata."""

import io
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tifffile
from PIL import Image, ImageFile, TiffTags, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from hf_ext.semanir.image_processing_semanir import image_to_pixels, load_image, pixels_to_image

from ..errors import DataError, UsageError
from ..terminal import log_level
from . import camera
from .camera import DECODER_ERRORS, XMP, Frames, Picture, Source, UnreadableError, read_bytes, resolution_of
from .containers import (
    are_other_places,
    bits_of,
    coded_colours,
    colour_chunks,
    divide_by_alpha,
    is_lossless_webp,
    jpeg_subsampling,
    lost_of_jpeg,
    profile_of,
    read_deep,
)
from .encoding import FOLDERS, INTEROPERABILITY, IPTC, KEPT_TAGS, descriptive_tags, to_8_bits
from .jobs import FORMATS

# Formats whose frames follow one another in time; in those of the second kind the first picture is the whole (a
# phone's JPEG of several, the layers of a drawing). Several pictures in any other format are pages.
_MOVING, _FIRST = ("GIF", "PNG", "WEBP", "AVIF", "FLI"), ("MPO", "JPEG", "PSD")
# Modes of Pillow whose values RGB does not hold exactly.
_OTHER_COLOURS = ("CMYK", "YCbCr", "LAB", "HSV")
# A TIFF's tags, and how many channels the colours have by the second; others have one.
_ICC_PROFILE, _PHOTOMETRIC, _SAMPLES, _SUBFILE, _REDUCED, _MASK = 34675, 262, 277, 254, 1, 4
_ORIENTATION = 274
# Tags from here on are those of programs, such as GeoTIFF's.
_PRIVATE = 32768
# The curves of the colours, their white and their primaries.
_LIGHT = {301, 318, 319}
# Which of the places that sRGB has the last two hold, and how many numbers these are.
_PLACES = {318: (0, 2), 319: (2, 6)}
# Those of Photoshop and of cameras for printers, which say nothing about the pixels and are in most files of theirs.
_USUAL = {34377, 50341}
_COLOURS = {2: 3, 5: 4, 6: 3, 8: 3, 9: 3, 10: 3}
# Signatures of a TIFF and a BigTIFF.
SIGNATURES = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
# Tags, and what they say: RGB, planes, and alpha with and without which the colours were multiplied.
_BITS, _PLANAR, _EXTRA_SAMPLES, _SIGN, _DEPTH = 258, 284, 338, 339, 32997
_RGB, _SEPARATE, _MULTIPLIED, _PLAIN = 2, 2, 1, 2


def read_image(source: Source, max_megapixels: float = 200.0, advice: str = "Raise max-megapixels") -> Picture:
    """
    Read a picture; larger ones are refused before they are decoded, with that `advice`.

    PNG, TIFF and PGM in grey and RGB, HEIC above 8 bits and RAW have 16 bits; of those in other files Pillow gives 8.
    CMYK, LAB and the like become RGB. [`read_frames`] tells of losses.
    """
    return read_frames(source, max_megapixels, advice, several=False).pictures[0]


def read_8_bits(source: Source) -> Image.Image:
    """[`read_image`] as a picture of Pillow with 8 bits, which classifiers take."""
    return pixels_to_image(to_8_bits(read_image(source, advice="Save it smaller").pixels))


class _Limits(NamedTuple):
    """Bounds that are tested before anything is decoded: the megapixels, and one picture or more."""

    megapixels: float
    several: bool
    advice: str

    def check(self, width: int, height: int | None = None, count: int = 1) -> None:
        """Refuses a picture, the frames of an animation, or so many pixels of pages together."""
        if width * (height or 1) * count > self.megapixels * 1e6:
            size = f"{width} pixels on its pages" if height is None else f"{width} x {height} pixels"
            raise UnreadableError(self.too_large(f"{count} frames of {size}" if count > 1 else size))

    def check_count(self, count: int) -> None:
        if count > 1 and not self.several:
            raise UnreadableError(f"has {count} frames or pages; save each as its own file.")

    def too_large(self, size: str) -> str:
        return f"has {size}; the limit is {self.megapixels:g} megapixels. {self.advice}."


def read_frames(
    source: Source, max_megapixels: float = 200.0, advice: str = "Raise max-megapixels", *, several: bool = True
) -> Frames:
    """Read all frames of an animation or pages of a document; without `several` more than one is refused."""
    if not (isinstance(max_megapixels, Real) and 0 < max_megapixels < float("inf")):
        raise UsageError(f"`max_megapixels` is {max_megapixels!r}; give a number above 0, such as 200.")
    limits = _Limits(max_megapixels, several, advice)
    try:
        return _read_any(source, limits)
    except DECODER_ERRORS as error:
        # The system's own errors have a number; those of decoders have none.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        kind, fault = DataError, f"is broken: {error}"
        if isinstance(error, UnreadableError):
            kind, fault = type(error), str(error)
        elif isinstance(error, Image.DecompressionBombError):
            fault = limits.too_large("more than twice as many pixels")
        elif isinstance(error, UnidentifiedImageError):
            size = len(source) if isinstance(source, bytes) else os.path.getsize(source)
            fault = f"is not a picture that Pillow can read ({size} bytes)." if size else "is empty."
        elif isinstance(error, OSError):
            fault = f"is damaged or incomplete: {error}"
        # The reader of this kind of file does not know its name.
        raise kind(f"{'the picture' if isinstance(source, bytes) else source} {fault}") from error


def require_unturned(source: Source) -> None:
    """Refuses a mosaic that its EXIF data turn, which would change the places of its colours."""
    turned = False
    with suppress(*DECODER_ERRORS), camera.open_picture(source) as image:
        turned = image.getexif().get(_ORIENTATION, 1) != 1
    if turned:
        raise DataError("the EXIF data of this mosaic turn it; remove the orientation, and turn the result.")


def _read_any(source: Source, limits: _Limits) -> Frames:
    """The frames or pages of a file, by the library that reads its kind."""
    ending = "" if isinstance(source, bytes) else Path(source).suffix.lower()
    if ending in camera.RAW_ENDINGS:
        return camera.read_raw(source, limits.check)
    head = read_bytes(source, 64)
    if camera.is_heif(head):
        return camera.read_heif(source, limits.check)
    try:
        with camera.open_picture(source, max(1, int(limits.megapixels * 1e6))) as image:
            if camera.is_raw(image):
                return camera.read_raw(source, limits.check)
            pages, masks, pixels = _list_pages(image)
            limits.check_count(len(pages))
            if len(pages) == 1 or image.format in _MOVING:
                limits.check(*image.size, len(pages))
            else:
                limits.check(pixels)
            frames = _frames(image, source, pages)
            # The format of the result goes by the name, with loss or not.
            found = "JPEG" if image.format == "MPO" else image.format
            lost = [*frames.lost, *([f"masks of pages were left out: {masks}"] if masks else [])]
            if FORMATS.get(ending, found) != found:
                lost.insert(0, f"the file is a {found}, although its name ends with {ending}")
            return frames._replace(lost=tuple(lost))
    except (UnidentifiedImageError, KeyError, SyntaxError):
        # Of a TIFF, colours of a page (a syntax error of Pillow) or a compression (a key) may be unknown.
        if head[:4] not in SIGNATURES:
            raise
    frames = read_tiff(source, limits.check)
    limits.check_count(len(frames.pictures))
    return frames


def _list_pages(image: ImageFile.ImageFile) -> tuple[Sequence[int], int, int]:
    """The frames or pages that are pictures, how many are masks of others, and the pixels of the pictures."""
    numbers: Iterable[int] = count()
    if image.format != "TIFF":
        numbers = range(1 if image.format in _FIRST else getattr(image, "n_frames", 1))
        if len(numbers) == 1 or image.format in _MOVING:
            # No list: ninety bytes may name two billion frames.
            return numbers, 0, len(numbers) * image.width * image.height
    pages, masks, pixels = list[int](), 0, 0
    for number in numbers:
        try:
            image.seek(number)
        except EOFError:
            break
        except SyntaxError:
            # Pillow has no mode for a mask, and none for what it does not know.
            if not (isinstance(image, TiffImageFile) and image.tag_v2.get(_SUBFILE, 0) & _MASK):
                raise
            masks += 1
        else:
            if is_misread(image):
                raise UnidentifiedImageError
            pages.append(number)
            pixels += image.width * image.height
    image.seek(0)
    return pages, masks, pixels


def _frames(image: ImageFile.ImageFile, source: Source, pages: Sequence[int]) -> Frames:
    pictures, durations, losses = list[Picture](), list[float](), dict[str, None]()
    lossless, subsampling = image.format == "WEBP" and is_lossless_webp(read_bytes(source)), jpeg_subsampling(image)
    comment: bytes = image.info.get("comment", b"") if image.format in ("JPEG", "MPO", "GIF") else b""
    for number in pages:
        if number:
            # Pillow would keep that of the page before where this one has none.
            image.info.pop("dpi", None)
            image.seek(number)
        picture, lost = _picture(image, source, number)
        # Pillow's tags are those of the page where the file is.
        pictures.append(picture._replace(exif=descriptive_tags(picture, lost.append)))
        losses.update(dict.fromkeys(lost))
        # Some formats know it when the frame is decoded.
        durations.append(float(image.info.get("duration") or 0))
    frames = Frames(pictures, lossless=lossless, subsampling=subsampling, lost=tuple(losses), comment=comment)
    if len(pages) == 1 or image.format not in _MOVING:
        return frames
    plays = image.info.get("loop", 1)
    if image.format == "AVIF":
        # Pillow does not tell. The last bit of the flags of the edit list says that it is played without an end.
        _, known, edits = read_bytes(source).partition(b"elst")
        plays = 0 if known and len(edits) > 3 and edits[3] & 1 else 1
    if image.format == "GIF" and image.info.get("loop"):
        # It says how often it is played again.
        plays += 1
    still = bool(getattr(image, "default_image", False))
    return frames._replace(pictures=_alike(pictures), durations=durations, plays=plays, still=still)


def _losses(image: ImageFile.ImageFile, channels: int) -> list[str]:
    """Lines about what was not read of the frame or page where the file is, of which so many channels were."""
    lost = []
    more = (getattr(image, "n_frames", 1) if image.format in _FIRST else len(image.info.get("sizes", "1"))) - 1
    if more > 0:
        lost.append(camera.FURTHER.format(more))
    if image.mode in _OTHER_COLOURS:
        profile = ", and its colour profile was dropped" if image.info.get("icc_profile") else ""
        lost.append(f"{image.mode} was converted to RGB{profile}")
    if isinstance(image, TiffImageFile):
        colours = _COLOURS.get(image.tag_v2.get(_PHOTOMETRIC, 1), 1)
        extra = image.tag_v2.get(_SAMPLES, 1) - colours - (channels % 2 == 0)
        if extra > 0:
            lost.append(f"channels beside colour and alpha were left out: {extra}")
        lost += _lost_tags(dict(image.tag_v2), image.tag_v2.get(_SUBFILE, 0))
    # Of a TIFF or EXIF data whose unit is none.
    tags, inches = image.getexif(), image.info.get("dpi")
    sides = (tags.get(282), tags.get(283)) if tags.get(296) == 1 and not inches else image.info.get("aspect", (0, 0))
    lost += camera.tell_shape(*(image.info["jfif_density"] if image.info.get("jfif_unit") == 0 else sides))
    raw = "Raw profile type "
    profiles = [name[len(raw) :] for name in map(str, image.info) if name.startswith(raw) and name != f"{raw}exif"]
    if profiles:
        lost.append(f"raw profiles were left out: {', '.join(profiles)}")
    return lost


def _lost_tags(values: Mapping[int, Any], subfile: int) -> list[str]:
    """Lines about tags of a page of a TIFF that are not written, and about its kind."""
    tags = {tag for tag, value in values.items() if tag not in _PLACES or _is_other_light(value, *_PLACES[tag])}
    lost, private = [], sorted(tags - KEPT_TAGS - _USUAL - {_ICC_PROFILE} - (set(range(_PRIVATE)) - _LIGHT))
    if private:
        told = ", ".join(f"{tag} ({TiffTags.lookup(tag).name})" for tag in private)
        lost.append(f"tags of the TIFF were left out: {told.replace(' (unknown)', '')}")
    if subfile & _REDUCED:
        lost.append("a page that was marked as a smaller copy of another became a page like others")
    return lost


def _is_other_light(value: Any, first: int, count: int) -> bool:
    """Tells white or primaries of a TIFF other than those of sRGB; tifffile gives two numbers for one."""
    with suppress(TypeError, ValueError, ZeroDivisionError):
        if len(value) == 2 * count:
            value = [above / below for above, below in zip(value[::2], value[1::2], strict=True)]
        return len(value) != count or are_other_places([float(part) * 100_000 for part in value], first)
    return True


def _alike(pictures: list[Picture]) -> list[Picture]:
    """Frames with the channels that the richest of them has, and its depth."""
    alpha = any(picture.pixels.shape[-1] % 2 == 0 for picture in pictures)
    colours = max((picture.pixels.shape[-1] + 1) // 2 * 2 - 1 for picture in pictures)
    alike = []
    for picture in pictures:
        pixels, white = picture.pixels, np.full_like(picture.pixels[..., :1], np.iinfo(picture.pixels.dtype).max)
        own, clear = (pixels[..., :-1], pixels[..., -1:]) if pixels.shape[-1] % 2 == 0 else (pixels, white)
        parts = [np.repeat(own, colours // own.shape[-1], axis=-1), *([clear] if alpha else [])]
        alike.append(picture._replace(pixels=np.concatenate(parts, axis=-1)))
    return alike


def _picture(image: ImageFile.ImageFile, source: Source, page: int) -> tuple[Picture, list[str]]:
    """A frame or page, and lines about what was not read of it."""
    if image.mode == "F" or (image.mode == "I" and image.format != "PPM"):
        raise UnreadableError(f"has PIL mode {image.mode!r}, whose range is unknown: convert it to 8 or 16 bits.")
    if image.format == "FITS" and image.mode != "L":
        raise UnreadableError("is a FITS of 16 bits, of which Pillow misreads half the values: convert it to a TIFF.")
    # A profile of other colours, such as CMYK, says nothing about the RGB that comes out.
    # Pillow turns a TIFF when it is loaded, and forgets its orientation.
    turned = image.tag_v2.get(_ORIENTATION, 1) if isinstance(image, TiffImageFile) else None
    fits = image.mode.startswith("I;16") or image.mode in ("1", "L", "LA", "La", "RGB", "RGBA", "RGBX", "P", "PA")
    icc_profile = image.tag_v2.get(_ICC_PROFILE) if isinstance(image, TiffImageFile) else image.info.get("icc_profile")
    icc_profile = icc_profile or profile_of(image, source)
    lost = list[str]()
    # Of the file, with its first picture: each reading goes through all.
    chunks = colour_chunks(image, lost.append) + coded_colours(image, source) if page == 0 else b""
    pixels = read_deep(image, source, page)
    bits = bits_of(image, source) if pixels is None else 16
    if pixels is None and bits > 8 and image.mode[0] != "I":
        lost.append(f"{image.format} of {bits} bits: 8 of them were read")
    if pixels is None or image.format == "PNG":
        load_image(image, lost.append)
    exif = image.getexif()
    for folder in (*FOLDERS, INTEROPERABILITY):
        # Pillow reads it when it is asked for, and the file may be closed by then. Of damage `descriptive_tags` tells.
        with suppress(*DECODER_ERRORS):
            exif.get_ifd(folder)
    pixels = image_to_pixels(image) if pixels is None else pixels
    if image.format == "JPEG2000":
        pixels = camera.spread_bits(pixels, bits)
    dpi = resolution_of({**exif, _ORIENTATION: turned or exif.get(_ORIENTATION, 1)}, image.info.get("dpi"))
    if XMP not in exif and image.info.get("xmp"):
        # Where other files than a TIFF have it.
        exif[XMP] = image.info["xmp"]
    if IPTC not in exif and image.format in ("JPEG", "MPO") and (iptc := image.info.get("photoshop", {}).get(0x0404)):
        exif[IPTC] = iptc
    lost += [*_losses(image, pixels.shape[-1]), *lost_of_jpeg(image, source)]
    return Picture(pixels, exif, icc_profile if fits else None, dpi, chunks), lost


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


# Kinds that Pillow does not know or reads wrongly are read by tifffile, which alone knows fewer compressions.
def read_tiff(source: Source, check: Callable[..., None]) -> Frames:
    """All pages of a TIFF, or a DNG of one; `check` is called with their pixels before one is decoded."""
    data, pictures, lost = io.BytesIO(read_bytes(source)), list[Picture](), list[str]()
    try:
        # Both libraries tell of damaged tags; the pixels decide.
        quiet = warnings.catch_warnings(action="ignore", category=UserWarning)
        with log_level("tifffile", logging.CRITICAL), quiet, tifffile.TiffFile(data) as file:
            # Where a page leads back to an earlier one, they have no end.
            pages: dict[int, tifffile.TiffPage] = {}
            for page in file.pages:
                if page.offset in pages:
                    break
                pages[page.offset] = page.aspage()
            shown = [page for page in pages.values() if not page.is_mask]
            if any(camera.DNG_VERSION in page.tags for page in shown):
                return camera.read_raw(source, check)
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
    for line in _lost_tags({tag.code: tag.value for tag in page.tags}, page.subfiletype):
        say(line)
    if others:
        say(f"channels beside colour and alpha were left out: {others}")
    if page.parent.byteorder == "<" or not page.parent.is_bigtiff:
        exif.endian, exif.bigtiff = page.parent.byteorder, page.parent.is_bigtiff
        exif.load_from_fp(data, page.offset)
    else:
        say("EXIF data were not read: Pillow knows none of a BigTIFF whose high bytes come first")
    tags = {282: page.resolution[0], 283: page.resolution[1], 296: page.resolutionunit}
    dpi = resolution_of({**tags, _ORIENTATION: page.tags.valueof(_ORIENTATION, 1)})
    for line in camera.tell_shape(*page.resolution) if page.resolutionunit == 1 else ():
        say(line)
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
