"""Content of picture files that Pillow does not report: chunks of PNG, kinds of JPEG and WebP, more than 8 bits."""

import io
import re
import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

import numpy as np
from PIL import Image, ImageFile, JpegImagePlugin

from hf_ext.semanir.image_processing_semanir import add_alpha, image_to_pixels

from .camera import Source, cicp_chunk, read_bytes, seekable

# Colour chunks of a PNG; without them viewers show other colours.
_COLOUR_CHUNKS = (b"cHRM", b"gAMA", b"sRGB", b"cICP", b"mDCV", b"cLLI")
# Texts, such as the prompt of a drawn picture. Some repeat the orientation, which is applied; EXIF data and XMP travel
# as such.
_TEXT_CHUNKS = (b"tEXt", b"zTXt", b"iTXt")
_OF_THE_FILE = (
    b"XML:com.adobe.xmp\0", b"Raw profile type ", b"tiff:Orientation\0", b"exif:Orientation\0",
)  # fmt: skip
# What else is read or written anew, or says when and with how many bits the file before was written.
# The last line: what macOS, GIMP and ImageMagick add to theirs.
_SILENT_CHUNKS = {
    b"IHDR", b"PLTE", b"IDAT", b"tRNS", b"iCCP", b"eXIf", b"pHYs", b"acTL", b"fcTL", b"fdAT", b"tIME", b"sBIT",
    b"iDOT", b"bKGD", b"vpAg", b"orNT",
}  # fmt: skip
# Segments of a JPEG with content that is not read, by number and beginning; others are read, or makers' data.
_LOST_SEGMENTS = {
    b"APP11": "APP11",
    b"APP1http://ns.adobe.com/xmp/extension/\0": "XMP extension",
    b"APP2urn:iso:std:iso:ts:21496": "gain map",
}
# A marker of a JPEG that does not stand for a byte among the pixels.
_MARKER = re.compile(rb"\xff+([^\x00\xd0-\xd7\xff])")
# What the chunks gAMA and cHRM say of sRGB.
_GAMMA, _SRGB = (45455).to_bytes(4), (31270, 32900, 64000, 33000, 30000, 60000, 15000, 6000)
# Behind the signature of 8 bytes and the header of 25, other chunks may stand.
PNG_HEADER = 33


def colour_chunks(image: ImageFile.ImageFile, say: Callable[[str], None]) -> bytes:
    """The chunks of a PNG for colours and texts, as raw bytes; `say` is called with what is damaged."""
    if image.format != "PNG" or image.fp is None:
        return b""
    place, found, before_pixels, others = image.fp.tell(), bytearray(), True, set[str]()
    image.fp.seek(PNG_HEADER)
    for kind, length in _chunks(image.fp):
        before_pixels = before_pixels and kind != b"IDAT"
        if kind not in _SILENT_CHUNKS.union(_TEXT_CHUNKS, _COLOUR_CHUNKS):
            others.add(kind.decode("latin-1"))
        # None of the colours' chunks is longer than the 32 bytes of cHRM.
        if kind in _TEXT_CHUNKS or (kind in _COLOUR_CHUNKS and length <= 32 and before_pixels):
            content, checksum = image.fp.read(length), image.fp.read(4)
            if checksum != zlib.crc32(kind + content).to_bytes(4):
                # Behind the pixels readers pass over it; before them it would spoil the result.
                say("a damaged text of the PNG was left out")
            elif not content.startswith(_OF_THE_FILE):
                found += length.to_bytes(4) + kind + content + checksum
    if others:
        say(f"chunks of the PNG were left out: {', '.join(sorted(others))}")
    image.fp.seek(place)
    return bytes(found)


def _chunks(file: IO[bytes]) -> Iterator[tuple[bytes, int]]:
    """The kind and length of each chunk of a PNG; what is in it may be read, or is passed over."""
    while len(head := file.read(8)) == 8 and head[4:] != b"IEND":
        kind, length, begin = head[4:], int.from_bytes(head[:4]), file.tell()
        yield kind, length
        file.seek(begin + length + 4)


def insert_chunks(png: bytes, chunks: bytes) -> bytes:
    return png[:PNG_HEADER] + chunks + png[PNG_HEADER:]


def has_other_light(chunks: bytes) -> bool:
    """Tells colour chunks of anything but sRGB, whose values a file without them has too."""
    file = io.BytesIO(chunks)
    found = {kind: file.read(length) for kind, length in _chunks(file)}
    # Numbers for the primaries and curve of sRGB; chunks that follow count where those before are not there.
    if b"cICP" in found or b"sRGB" in found:
        return found.get(b"cICP", b"\x01\x0d")[:2] != b"\x01\x0d"
    # A power of 1 / 2.2.
    places = struct.unpack(">8I", found[b"cHRM"]) if len(found.get(b"cHRM", b"")) == 32 else _SRGB
    return found.get(b"gAMA", _GAMMA) != _GAMMA or are_other_places(places)


def are_other_places(places: Sequence[float], first: int = 0) -> bool:
    """Tells places of white, red, green and blue, from the first on and in units of 1 / 100,000, that sRGB has not."""
    return any(abs(place - usual) > 100 for place, usual in zip(places, _SRGB[first:], strict=False))


def profile_of(image: ImageFile.ImageFile, source: Source) -> bytes | None:
    """The colour profile in a JPEG 2000 or BMP, of which Pillow hands out none."""
    data = read_bytes(source) if image.format in ("JPEG2000", "BMP") else b""
    if image.format == "JPEG2000" and (box := re.search(rb"(.{4})colr\x02", data, re.DOTALL)):
        return data[box.end() + 2 : box.start() + int.from_bytes(box[1])]
    # The fifth form of a BMP's header, and the mark of a profile in the file.
    if image.format == "BMP" and data[14:18] == (124).to_bytes(4, "little") and data[70:74] == b"DEBM":
        place, length = struct.unpack_from("<II", data, 126)
        return data[14 + place : 14 + place + length]
    return None


def coded_colours(image: ImageFile.ImageFile, source: Source) -> bytes:
    """The colour space of an AVIF, as a chunk of a PNG."""
    box = re.search(rb"colrnclx(.{4})", read_bytes(source), re.DOTALL) if image.format == "AVIF" else None
    return cicp_chunk(*struct.unpack(">HH", box[1])) if box and not image.info.get("icc_profile") else b""


def has_texts(chunks: bytes) -> bool:
    """Tells chunks of a PNG that hold texts."""
    return any(kind in _TEXT_CHUNKS for kind, _ in _chunks(io.BytesIO(chunks)))


def lost_of_jpeg(image: ImageFile.ImageFile, source: Source) -> list[str]:
    """Lines about segments of a JPEG that are not read, and about what lies behind its only picture."""
    if not isinstance(image, JpegImagePlugin.JpegImageFile):
        return []
    kinds = {
        told
        for name, content in image.applist
        for begin, told in _LOST_SEGMENTS.items()
        if (name.encode() + content).startswith(begin)
    }
    lines = [f"segments of the JPEG were left out: {', '.join(sorted(kinds))}"] if kinds else []
    data, place, behind = read_bytes(source), 2, b""
    while image.format == "JPEG" and (mark := _MARKER.search(data, place)):
        place = mark.end() + int.from_bytes(data[mark.end() : mark.end() + 2])
        if mark[1] == b"\xd9":
            behind = data[mark.end() :]
            break
    told = "what lies behind the picture in the JPEG, such as a video or gain map, was left out"
    # Not the numbers that phones of Samsung write there.
    has_content = b"\xff\xd8\xff" in behind or b"ftyp" in behind
    return [*lines, *([f"{told}: {len(behind):,} bytes"] if has_content else [])]


def jpeg_subsampling(image: ImageFile.ImageFile) -> int:
    """The chroma subsampling of a JPEG as Pillow numbers it: 0 is none, -1 one without a number."""
    if not isinstance(image, JpegImagePlugin.JpegImageFile) or image.layers != 3:
        return 0
    return JpegImagePlugin.get_sampling(image)


def is_lossless_webp(data: bytes) -> bool:
    """Tells that all pictures in a WebP file are coded without loss."""
    return {kind for kind in _webp_chunks(data, 12) if kind in (b"VP8 ", b"VP8L")} == {b"VP8L"}


def _webp_chunks(data: bytes, place: int) -> Iterator[bytes]:
    """The kinds of the chunks of a RIFF container, those inside the frames of an animation included."""
    while place + 8 <= len(data):
        kind, length = struct.unpack("<4sI", data[place : place + 8])
        yield kind
        if kind == b"ANMF":
            # Place, size, duration and flags of a frame; its chunks follow.
            yield from _webp_chunks(data[place + 8 : place + 8 + length], 16)
        place += 8 + length + length % 2


# How Pillow's decoders call 16 bits in several channels: the channels, and which byte of a value comes first.
_DEEP = re.compile(r"(RGB|RGBA|RGBa|RGBX+|LA|CMYKX*);16[BLN]")
# Where other formats say the bits of a value: the head of SGI, the marker SIZ of JPEG 2000, the box av1C of AVIF.
_DEPTHS: dict[str | None, tuple[re.Pattern[bytes], Callable[[int], int]]] = {
    "SGI": (re.compile(rb"\x01\xda.(.)", re.DOTALL), lambda size: 8 * size),
    "JPEG2000": (re.compile(rb"\xff\x4f\xff\x51.{38}(.)", re.DOTALL), lambda depth: depth % 128 + 1),
    "AVIF": (re.compile(rb"av1C..(.)", re.DOTALL), lambda flags: 8 + 2 * (flags >> 6 & 1) + 2 * (flags >> 5 & 1)),
}


def read_deep(image: ImageFile.ImageFile, source: Source, page: int) -> np.ndarray | None:
    """All 16 bits of a picture in colour, of which Pillow has 8."""
    kind = _DEEP.fullmatch(_raw_mode(image))
    if kind is None or image.format not in ("PNG", "TIFF") or image.mode.startswith("I;16"):
        return None
    # The frames of an animated PNG are put together by Pillow.
    if image.format == "PNG" and getattr(image, "is_animated", False):
        return None
    if kind[1] in ("RGB", "RGBA", "RGBa", "RGBX"):
        return add_alpha(_both_halves(source, page), image.info.get("transparency"))
    if kind[1] != "LA":
        return None
    # Grey with alpha. A pixel has four bytes, as one of RGBA of 8 bits has, and filters and interlacing go by bytes:
    # the same file with another depth and kind of colours in its header is such a picture. The tests read what was
    # written.
    data = bytearray(read_bytes(source))
    data[24:26] = 8, 6
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4)
    with Image.open(io.BytesIO(data)) as image:
        return np.ascontiguousarray(image_to_pixels(image)).view(">u2").astype(np.uint16)


def bits_of(image: ImageFile.ImageFile, source: Source) -> int:
    """Bits of a value in the file, if more than 8; asked before the picture is loaded."""
    bits = 8
    if image.format == "PPM" and image.tile[0].codec_name.startswith("ppm"):
        arguments: Any = image.tile[0].args
        # The largest value.
        bits = arguments[1].bit_length()
    elif image.format in _DEPTHS:
        mark, count = _DEPTHS[image.format]
        found = mark.search(read_bytes(source))
        bits = count(found[1][0]) if found else 8
    elif _DEEP.fullmatch(_raw_mode(image)):
        bits = 16
    return bits


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
            # A colour that stands for transparency has 16 bits too.
            image.info.pop("transparency", None)
            raw = _raw_mode(image)
            # Colours that were multiplied with alpha are divided by it below, with all their bits.
            wanted = raw.replace("RGBa", "RGBA")
            if swapped:
                native = "B" if sys.byteorder == "little" else "L"
                wanted = wanted[:-1] + {"B": "L", "L": "B", "N": native}[wanted[-1]]
            for index, tile in enumerate(image.tile):
                arguments = (wanted, *tile.args[1:]) if isinstance(tile.args, tuple) else wanted
                image.tile[index] = tile._replace(args=arguments)
            image.load()
            halves.append(image_to_pixels(image))
    pixels = halves[0].astype(np.uint16) * 256 + halves[1]
    return divide_by_alpha(pixels) if "RGBa" in raw else pixels


def divide_by_alpha(pixels: np.ndarray) -> np.ndarray:
    """Colours that were multiplied with alpha, which is the last channel, as they were before."""
    top, alpha = np.iinfo(pixels.dtype).max, pixels[..., -1:].astype(np.float64)
    colours = pixels[..., :-1] * (top / np.maximum(alpha, 1))
    return np.concatenate([np.rint(colours.clip(0, top)), alpha], axis=-1).astype(pixels.dtype)
