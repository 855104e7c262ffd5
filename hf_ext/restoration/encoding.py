"""The bytes of picture files, by Pillow; those of 16 bits, of which it drops eight, by numpngw and tifffile."""

import io
import re
import struct
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import tifffile
from numpngw import write_png
from PIL import Image
from PIL.PngImagePlugin import putchunk
from PIL.TiffImagePlugin import ImageFileDirectory_v2
from transformers.utils import logging

from hf_ext.semanir.image_processing_semanir import pixels_to_image

from ..errors import UsageError
from .camera import DECODER_ERRORS, XMP, Frames, Picture
from .containers import has_other_light, has_texts, insert_chunks

logger = logging.get_logger(__name__)

# What each format has a place for, beside grey or RGB of 8 bits. A GIF's alpha is 0 or 255; a JPEG or WebP has a place
# for XMP alone, a PNG a chunk, a TIFF a tag.
_KEEPS: dict[str, tuple[str, ...]] = {
    "PNG": ("alpha", "16 bits", "frames", "profile", "tags", "chunks"),
    "TIFF": ("alpha", "16 bits", "pages", "profile", "tags"),
    "WEBP": ("alpha", "frames", "profile", "tags", "xmp"),
    "JPEG": ("profile", "tags", "xmp", "comment"),
    "GIF": ("alpha", "frames", "comment"),
    "BMP": (),
}
# Pixels of a side, and pixels an inch, that a format has a number for; others store any.
_LONGEST_SIDE = {"JPEG": 65500, "WEBP": 16383, "GIF": 65535}
_LARGEST_DPI = {"GIF": 0, "JPEG": 65535, "PNG": 5e7, "BMP": 5e7}

# Folders of tags, and those of size inside the first: the size may have changed.
_EXIF_FOLDER, _GPS_FOLDER, _EXIF_WIDTH, _EXIF_HEIGHT = 0x8769, 0x8825, 0xA002, 0xA003
FOLDERS = (_EXIF_FOLDER, _GPS_FOLDER)

# Types of entries of a TIFF.
_LONG, _FRACTIONS, _DOUBLE = 4, (5, 10), 12
# What the camera's maker put there, in a form of their own; in RAW files it may be long.
_MAKER_NOTE = 0x927C
# A folder in the first one, which says that the colours are those of Adobe RGB.
INTEROPERABILITY = 0xA005
# As IPTC has texts on a picture; in a JPEG they lie in a segment of Photoshop.
IPTC = 33723
# The tags that travel: names of document and page, description, maker, model, software, date, artist, host, XMP,
# ratings, copyright, IPTC, and title, comment, author, keywords and subject as Windows has them. All others say how
# the pixels lay in the file that was read (in a TIFF these are in the same directory) and would spoil another.
_DESCRIPTIVE = (269, 270, 271, 272, 285, 305, 306, 315, 316, XMP, 18246, 18249, 33432, IPTC, *range(40091, 40096))

KEPT_TAGS = {*_DESCRIPTIVE, *FOLDERS}

# Descriptions in which tifffile, ImageJ and microscopes say how pixels lie; of a larger picture readers believe them.
# Of one that tells nothing but a shape nothing is lost.
_SHAPE = re.compile(r'\{"shape": \[[\d, ]*\]\}')
_OF_THE_PIXELS = re.compile(r'\{"shape": \[|ImageJ=|(<\?xml[^>]*>)?\s*(<!--.*-->)?\s*<OME ')

# What XMP says of other parts of the file that was read: gain maps, videos, and the rest of a long XMP.
_OTHER_PARTS = rb"hdrgm:Version|xmpNote:HasExtendedXMP|\w*Camera:(?:MotionPhoto|MicroVideo)\w*|\w*Container:Directory"
_XMP_OF_PARTS = re.compile(
    rb"\s(?:%b)\s*=\s*(?:\"[^\"]*\"|'[^']*')|<(%b)[\s>].*?</\1\s*>" % (_OTHER_PARTS, _OTHER_PARTS), re.DOTALL
)

# Bytes that one marker of a JPEG holds: of tags with the six that stand before them, of XMP without the 29.
_LONGEST_EXIF, _LONGEST_XMP = 65533, 65504
_PHOTOSHOP = b"Photoshop 3.0\0008BIM\x04\x04\0\0"


class Encoding(NamedTuple):
    """Choices of writing that a format leaves open."""

    # Of JPEG and WebP, 1 to 100; 95, or WebP without loss where the input was such, if not given.
    quality: int | None = None
    # WebP without loss.
    lossless: bool = False
    # Colour behind transparent pixels in JPEG and BMP, which have no alpha.
    background: tuple[int, int, int] = (255, 255, 255)


DEFAULT = Encoding()


def encode_frames(
    frames: Frames, format: str, encoding: Encoding = DEFAULT, say: Callable[[str], None] = logger.warning
) -> bytes:
    """
    The bytes of a file with all frames or pages. Still PNGs and TIFFs keep 16 bits, all else has 8. GIF has 256
    colours. WebP has no loss where the input had none. JPEG and BMP have no alpha: the picture is composed on
    `encoding.background`. Of EXIF data that are too long for a JPEG, the maker's note or all are left out. `say`
    is called with what a format cannot hold.
    """
    require_place(frames, format)
    if format == "JPEG" and len(frames.comment) > _LONGEST_EXIF:
        say(f"a JPEG can store {_LONGEST_EXIF:,} bytes of comment, the picture has {len(frames.comment):,}: left out")
        frames = frames._replace(comment=b"")
    first, count = frames.pictures[0], len(frames.pictures)
    for line in [*frames.lost, *_not_stored(frames, format)]:
        say(line)
    space = (first.icc_profile or b"")[16:20]
    # A profile is written if it is one of the colours that are written. A WebP is always RGB.
    on_colour = format == "JPEG" and len(set(encoding.background)) > 1 and to_8_bits(first.pixels[..., 1:]) < 255
    grey = first.pixels.shape[-1] <= 2 - np.any(on_colour) and format != "WEBP"
    if space in (b"CMYK", b"Lab ") or (space == b"GRAY" and not grey):
        say(f"the colour profile is of {space.decode().strip()}, which {format} does not have here: it was dropped")
        first = first._replace(icc_profile=None)
    if first.dpi and max(first.dpi) > _LARGEST_DPI.get(format, np.inf):
        say(f"{format} cannot store the resolution {round(first.dpi[0])} x {round(first.dpi[1])} an inch: left out")
        first = first._replace(dpi=None)
    first = _with_xmp_chunk(first) if format == "PNG" else first
    deep = first.pixels.dtype == np.uint16
    if deep and ("16 bits" not in _KEEPS[format] or (count > 1 and format == "PNG")):
        say(f"{format} has 8 bits per channel: the 16 bits of the picture were rounded")
    try:
        if format == "TIFF":
            return _tiff([first, *frames.pictures[1:]])
        if count == 1 and deep and format == "PNG":
            return _deep_png(first)
        # Of many frames it is said once.
        said = cache(say)
        images = [_shallow_image(picture, format, encoding, said) for picture in frames.pictures]
        if format == "GIF" and any(image.getcolors() is None for image in images):
            say("GIF has 256 colours: those of the picture were rounded to them")
        options = {**_coding_options(frames, format, encoding), **_metadata_options(first, format, say)}
        if count > 1:
            options.update(_animation_options(frames, format, images))
        file = io.BytesIO()
        images[0].save(file, format, **options)
        return insert_chunks(file.getvalue(), first.colour_chunks) if format == "PNG" else file.getvalue()
    except (OSError, RuntimeError, ValueError, ArithmeticError, struct.error) as error:
        height, width = first.pixels.shape[:2]
        raise UsageError(f"{format} cannot store a picture of {width} x {height} pixels: {error}") from error


def require_place(frames: Frames, format: str, scale: int = 1) -> None:
    """Refuses pages, an animation or sides, which will be so many times as long, for which a format has no place."""
    height, width = (scale * max(picture.pixels.shape[axis] for picture in frames.pictures) for axis in (0, 1))
    if max(height, width) > (most := _LONGEST_SIDE.get(format, np.inf)):
        raise UsageError(f"{format} cannot store a picture of {width} x {height} pixels: a side may have {most}.")
    count, pages = len(frames.pictures), frames.durations is None
    if count > 1 and ("pages" if pages else "frames") not in _KEEPS[format]:
        what = f"{count} pages. Write a .tif, or save each page as its own file."
        animation = f"an animation of {count} frames. Write a .gif, .png or .webp."
        raise UsageError(f"{format} cannot store {what if pages else animation}")


def _not_stored(frames: Frames, format: str) -> list[str]:
    first = frames.pictures[0]
    other_light = not first.icc_profile and has_other_light(first.colour_chunks)
    # What there is, the place that it needs, and the words where a format has none.
    parts = [
        (other_light, "chunks", "the gamma or colour space of the picture: colours may look different"),
        (first.icc_profile, "profile", "the colour profile: colours may look different"),
        (descriptive_tags(first) is not None, "tags", "EXIF data and XMP: they were left out"),
        (has_texts(first.colour_chunks), "chunks", "the texts of the PNG: they were left out"),
        (frames.comment, "comment", "the comment: it was left out"),
    ]
    lines = [f"{format} cannot store {what}" for there, place, what in parts if there and place not in _KEEPS[format]]
    if format == "JPEG" and frames.subsampling < 0:
        lines.append("the way in which the JPEG halved its colours cannot be written: they are no longer halved")
    return lines


def _coding_options(frames: Frames, format: str, encoding: Encoding) -> dict[str, Any]:
    quality = encoding.quality or 95
    comment = {"comment": frames.comment} if frames.comment and "comment" in _KEEPS[format] else {}
    if format == "JPEG":
        return {"quality": quality, "subsampling": max(0, frames.subsampling), **comment}
    if format != "WEBP":
        return comment
    if encoding.lossless or (frames.lossless and encoding.quality is None):
        # Exact: with the colours below full transparency too.
        return {"lossless": True, "exact": True, "quality": 75, "method": 4}
    return {"quality": quality, "method": 4}


def to_8_bits(pixels: np.ndarray) -> np.ndarray:
    """Pixels of uint8; those of uint16 are scaled and rounded."""
    return np.rint(pixels / np.float32(257)).astype(np.uint8) if pixels.dtype == np.uint16 else pixels


def _shallow_image(picture: Picture, format: str, encoding: Encoding, say: Callable[[str], None]) -> Image.Image:
    pixels = to_8_bits(picture.pixels)
    if pixels.shape[-1] % 2 or (format != "GIF" and "alpha" in _KEEPS[format]):
        return pixels_to_image(pixels)
    colours, alpha = pixels[..., :-1], pixels[..., -1:]
    if format == "GIF":
        if ((alpha > 0) & (alpha < 255)).any():
            say("GIF has no half transparency: alpha from 128 on became opaque, below it transparent")
        # With one clear colour, which is 0. Of more than 256 Pillow makes fewer.
        colours = np.broadcast_to(colours, (*colours.shape[:2], 3))
        pixels = np.where(alpha < 128, 0, np.concatenate([colours, np.full_like(alpha, 255)], axis=-1))
        image = pixels_to_image(pixels)
        if (counted := image.getcolors(256)) is None:
            return image
        found = np.array(sorted(colour for _, colour in counted), np.uint8).view(">u4")[:, 0]
        places = np.searchsorted(found, np.ascontiguousarray(pixels).view(">u4")[..., 0])
        image = Image.fromarray(places.astype(np.uint8))
        image.putpalette(found.view(np.uint8).reshape(-1, 4)[:, :3].tobytes())
        image.info.update({} if found[0] else {"transparency": 0})
        return image
    if (alpha == 255).all():
        return pixels_to_image(colours)
    background = np.array(encoding.background, np.float32)
    if colours.shape[-1] == 1 and len(set(encoding.background)) == 1:
        background = background[:1]
    say(f"{format} has no transparency: composed on #{bytes(encoding.background).hex()} (--background)")
    share = alpha.astype(np.float32) / 255
    return pixels_to_image(np.rint(colours * share + background * (1 - share)).astype(np.uint8))


def _metadata_options(picture: Picture, format: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Pillow's options for what stands beside the pixels."""
    if "tags" not in _KEEPS[format]:
        return {"dpi": picture.dpi} if picture.dpi else {}
    exif = _tags_to_write(picture)
    xmp = exif.pop(XMP) if exif and "xmp" in _KEEPS[format] and isinstance(exif.get(XMP), bytes) else None
    options: dict[str, Any] = {}
    if format == "JPEG":
        iptc = exif.pop(IPTC) if exif and isinstance(exif.get(IPTC), bytes) else b""
        if iptc and len(iptc) < _LONGEST_XMP:
            block = _PHOTOSHOP + struct.pack(">I", len(iptc)) + iptc + bytes(len(iptc) % 2)
            options["extra"] = b"\xff\xed" + struct.pack(">H", len(block) + 2) + block
        elif iptc:
            say(f"a JPEG can store {_LONGEST_XMP:,} bytes of IPTC data, and the picture has {len(iptc):,}: left out")
        exif = exif and _fitting_tags(exif, say)
        if xmp and len(xmp) > _LONGEST_XMP:
            say(f"a JPEG can store {_LONGEST_XMP:,} bytes of XMP, and the picture has {len(xmp):,}: left out XMP")
            xmp = None
    if picture.dpi and format == "WEBP":
        # It has no other place for the resolution, in pixels an inch.
        exif = Image.Exif() if exif is None else exif
        exif.update({282: float(picture.dpi[0]), 283: float(picture.dpi[1]), 296: 2})
    options |= {"icc_profile": picture.icc_profile, "dpi": picture.dpi, "exif": exif, "xmp": xmp}
    return {name: value for name, value in options.items() if value}


def _animation_options(frames: Frames, format: str, images: list[Image.Image]) -> dict[str, Any]:
    """Pillow's options for what stands beside the first frame."""
    assert frames.durations is not None
    # Pillow cuts those of a GIF.
    durations = [10 * int(time / 10 + 0.5) for time in frames.durations] if format == "GIF" else frames.durations
    options: dict[str, Any] = {"save_all": True, "append_images": images[1:], "duration": durations}
    if format == "PNG":
        # Pillow counts the durations of an animated PNG without the picture that stands before it.
        options |= {"default_image": frames.still, "duration": durations[frames.still :]}
    if format != "GIF":
        return {**options, "loop": frames.plays}
    if frames.pictures[0].pixels.shape[-1] % 2 == 0:
        # Each frame goes before the next is drawn: else what is transparent in it would show the one before.
        options["disposal"] = 2
    # A GIF without a number plays once; with one, it is how often it is played again, and 0 is for ever.
    if frames.plays != 1:
        options["loop"] = max(0, frames.plays - 1)
    return options


def descriptive_tags(picture: Picture, say: Callable[[str], None] = logger.warning) -> Image.Exif | None:
    """The tags of a picture that may be written into another file; `say` is called with what may not."""
    if picture.exif is None:
        return None
    kept = Image.Exif()
    # Comments in UTF-16 and makers' notes are copied as they are, and go by the order of bytes.
    kept.endian = picture.exif.endian
    try:
        for tag in _DESCRIPTIVE:
            if picture.exif.get(tag) is None:
                continue
            text = str(picture.exif[tag])
            if not _OF_THE_PIXELS.match(text):
                kept[tag] = picture.exif[tag]
            elif not _SHAPE.fullmatch(text):
                say(f"a description of how the pixels lie in the file (tag {tag}) was left out")
        if isinstance(kept.get(XMP), bytes):
            # The pixels stand upright by now.
            kept[XMP] = _XMP_OF_PARTS.sub(b"", kept[XMP])
            kept[XMP] = re.sub(rb"(tiff:Orientation(?:\s*=\s*[\"']|>\s*))\d", rb"\g<1>1", kept[XMP])
        sides = {_EXIF_WIDTH: picture.pixels.shape[1], _EXIF_HEIGHT: picture.pixels.shape[0]}
        for folder in FOLDERS:
            tags = dict(picture.exif.get_ifd(folder))
            # Where a file was read, its place.
            inner = tags.pop(INTEROPERABILITY, None)
            if folder == _EXIF_FOLDER and not isinstance(inner, dict):
                inner = picture.exif.get_ifd(INTEROPERABILITY)
            tags |= {INTEROPERABILITY: inner} if inner else {}
            tags.update({tag: side for tag, side in sides.items() if tag in tags})
            if tags:
                kept.get_ifd(folder).update(tags)
                kept[folder] = 0
        return kept if len(kept) and kept.tobytes() else None
    except DECODER_ERRORS as error:
        say(f"its EXIF data are damaged and were left out: {error}")
        return None


def _tags_to_write(picture: Picture) -> Image.Exif | None:
    if (exif := descriptive_tags(picture)) is None:
        return None
    for folder in (exif.get_ifd(folder) for folder in FOLDERS if folder in exif):
        folder.update({tag: _Text(value) for tag, value in folder.items() if isinstance(value, str)})
    return _with_bytes(exif)


def _with_xmp_chunk(picture: Picture) -> Picture:
    """The picture with its XMP in the chunk where readers of a PNG look for it, and no longer among the tags."""
    exif, chunk = descriptive_tags(picture), io.BytesIO()
    if exif is None or not isinstance(exif.get(XMP), bytes):
        return picture
    putchunk(chunk, b"iTXt", b"XML:com.adobe.xmp" + bytes(5) + exif.pop(XMP))
    return picture._replace(exif=exif, colour_chunks=picture.colour_chunks + chunk.getvalue())


def _with_bytes(exif: Image.Exif) -> Image.Exif:
    """Tags with text as bytes, which Pillow reads as Latin-1 but writes as ASCII."""
    for tag, value in exif.items():
        exif[tag] = value.encode("latin-1", "replace") if isinstance(value, str) else value
    return exif


class _Text(str):
    """Text of a tag in a folder, which as bytes would lose its type."""

    def encode(self, *args: Any) -> bytes:
        return super().encode("latin-1", "replace")


def _fitting_tags(exif: Image.Exif, say: Callable[[str], None]) -> Image.Exif | None:
    """As many of the tags as a JPEG holds: without the maker's note where they are too long, or none."""
    size = len(exif.tobytes())
    if size <= _LONGEST_EXIF:
        return exif
    if _EXIF_FOLDER in exif:
        exif.get_ifd(_EXIF_FOLDER).pop(_MAKER_NOTE, None)
    fits = len(exif.tobytes()) <= _LONGEST_EXIF
    what = "the maker's note" if fits else "all"
    say(f"a JPEG can store {_LONGEST_EXIF:,} bytes of EXIF data, and the picture has {size:,}: left out {what}")
    return exif if fits else None


def _tiff(pictures: list[Picture]) -> bytes:
    file, exifs = io.BytesIO(), [_tags_to_write(picture) for picture in pictures]
    endian = next((exif.endian for exif in exifs if exif is not None and _EXIF_FOLDER in exif), None)
    with tifffile.TiffWriter(file, byteorder=">" if endian == ">" else "<") as writer:
        for picture, exif in zip(pictures, exifs, strict=True):
            channels = picture.pixels.shape[-1]
            writer.write(
                picture.pixels if channels > 1 else picture.pixels[..., 0],
                photometric="minisblack" if channels <= 2 else "rgb",
                planarconfig="contig" if channels > 1 else None,
                # Alpha that colours were not multiplied with.
                extrasamples=["unassalpha"] if channels % 2 == 0 else None,
                compression="zlib",
                # Each value as its difference to the pixel before, which halves the size of photographs.
                predictor=True,
                resolution=picture.dpi,
                resolutionunit="inch" if picture.dpi else None,
                iccprofile=picture.icc_profile,
                extratags=[] if exif is None else _tiff_tags(exif),
                metadata=None,
                software=False,
            )
    for number, exif in enumerate(exifs):
        for folder in FOLDERS:
            if exif is not None and folder in exif:
                _add_folder(file, number, folder, exif.get_ifd(folder))
    return file.getvalue()


def _tiff_tags(exif: Image.Exif) -> list[tuple[int, int, int, Any, bool]]:
    """Descriptive tags as tifffile takes them, of the types that Pillow gives them; see `_add_folder`."""
    # Pillow converts a value that does not fit its tag, such as a number for a text; tifffile refuses it.
    fitting, found = Image.Exif(), []
    fitting.load(exif.tobytes())
    for tag, value in _with_bytes(fitting).items():
        directory = ImageFileDirectory_v2()
        directory[tag] = value
        kind, values = directory.tagtype[tag], value if isinstance(value, bytes | tuple) else (value,)
        if kind in _FRACTIONS:
            kind, values = _DOUBLE, tuple(map(float, values))
        found.append((tag - 1, _LONG, 1, 0, False) if tag in FOLDERS else (tag, kind, len(values), values, False))
    return found


def _add_folder(file: io.BytesIO, number: int, folder: int, tags: dict[int, Any]) -> None:
    """Writes a folder of tags behind the pages of a TIFF, and its place into its page."""
    # tifffile writes no such folders and refuses their tags. So the page has an entry of the number below, which no
    # descriptive tag has and which keeps the order of the entries; here it gets its own number and its value. An entry
    # is the tag, the type, the count and the value, in 2, 2, 4 and 4 bytes.
    file.seek(0)
    with tifffile.TiffFile(file) as written:
        entry, endian = written.pages[number].aspage().tags[folder - 1].offset, written.byteorder
    directory = ImageFileDirectory_v2(prefix=b"II" if endian == "<" else b"MM")
    directory.update(tags)
    place = file.seek(0, io.SEEK_END)
    place += file.write(b"\0" * (place % 2))
    file.write(directory.tobytes(place))
    file.seek(entry)
    file.write(struct.pack(f"{endian}HHII", folder, _LONG, 1, place))


def _deep_png(picture: Picture) -> bytes:
    """A PNG of 16 bits, which Pillow does not write of several channels."""
    file = io.BytesIO()
    write_png(
        file,
        picture.pixels,
        # Each value as its difference to the pixel before, which halves the size of photographs.
        filter_type=1,
        phys=(*(round(value / 0.0254) for value in picture.dpi), 1) if picture.dpi else None,
        iccp=("ICC profile", picture.icc_profile) if picture.icc_profile else None,
        # It would write both, the second with its own name.
        text_list=[("Creation Time", None), ("Software", None)],
    )
    exif, chunks = _tags_to_write(picture), io.BytesIO()
    if exif is not None:
        # numpngw writes no EXIF data.
        putchunk(chunks, b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0"))
    return insert_chunks(file.getvalue(), picture.colour_chunks + chunks.getvalue())
