# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Properties of PNG, JPEG and WebP files that Pillow does not report."""

import struct
import zlib
from collections.abc import Callable, Iterator

from PIL import ImageFile, JpegImagePlugin

# Colour chunks of a PNG; without them viewers show other colours.
_COLOUR_CHUNKS = (b"cHRM", b"gAMA", b"sRGB", b"cICP", b"mDCV", b"cLLI")
# Texts, such as the prompt of a drawn picture. Some repeat the orientation, which is applied, or tell of the file;
# EXIF data and XMP travel as such.
_TEXT_CHUNKS = (b"tEXt", b"zTXt", b"iTXt")
_OF_THE_FILE = (
    b"XML:com.adobe.xmp\0", b"Software\0", b"Creation Time\0", b"Raw profile type ", b"tiff:Orientation\0",
    b"exif:Orientation\0",
)  # fmt: skip
# Behind the signature of 8 bytes and the header of 25, other chunks may stand.
PNG_HEADER = 33


def colour_chunks(image: ImageFile.ImageFile, say: Callable[[str], None]) -> bytes:
    """The chunks of a PNG for colours and texts, as raw bytes; `say` is called with what is damaged."""
    if image.format != "PNG" or image.fp is None:
        return b""
    place, found, before_pixels = image.fp.tell(), bytearray(), True
    image.fp.seek(PNG_HEADER)
    while len(head := image.fp.read(8)) == 8 and head[4:] != b"IEND":
        length, kind = struct.unpack(">I4s", head)
        before_pixels = before_pixels and kind != b"IDAT"
        # None of the colours' chunks is longer than the 32 bytes of cHRM.
        if not (kind in _TEXT_CHUNKS or (kind in _COLOUR_CHUNKS and length <= 32 and before_pixels)):
            image.fp.seek(length + 4, 1)
            continue
        content, checksum = image.fp.read(length), image.fp.read(4)
        if checksum != zlib.crc32(kind + content).to_bytes(4):
            # Behind the pixels readers pass over it; before them it would spoil the result.
            say("a damaged text of the PNG was left out")
        elif not content.startswith(_OF_THE_FILE):
            found += head + content + checksum
    image.fp.seek(place)
    return bytes(found)


def insert_chunks(png: bytes, chunks: bytes) -> bytes:
    """A PNG with chunks behind its header."""
    return png[:PNG_HEADER] + chunks + png[PNG_HEADER:]


def has_other_light(chunks: bytes) -> bool:
    """Tells colour chunks of anything but sRGB, whose values a file without them has too."""
    # A power of 1 / 2.2 in units of 1 / 100,000, and the primaries and curve of sRGB.
    return any(
        (kind == b"gAMA" and content != (45455).to_bytes(4)) or (kind == b"cICP" and content[:2] != b"\x01\x0d")
        for kind, content in _read_chunks(chunks)
    )


def has_texts(chunks: bytes) -> bool:
    """Tells chunks of a PNG that hold texts."""
    return any(kind in _TEXT_CHUNKS for kind, _ in _read_chunks(chunks))


def _read_chunks(chunks: bytes) -> Iterator[tuple[bytes, bytes]]:
    place = 0
    while place < len(chunks):
        length, kind = struct.unpack(">I4s", chunks[place : place + 8])
        yield kind, chunks[place + 8 : place + 8 + length]
        place += length + 12


def jpeg_subsampling(image: ImageFile.ImageFile) -> int:
    """The chroma subsampling of a JPEG as Pillow numbers it: 0 is none, -1 one without a number."""
    if not isinstance(image, JpegImagePlugin.JpegImageFile) or image.layers != 3:
        return 0
    return JpegImagePlugin.get_sampling(image)


def is_lossless_webp(data: bytes) -> bool:
    """Tells that all pictures in a WebP file are coded without loss."""
    kinds = {kind for kind in _webp_chunks(data, 12) if kind in (b"VP8 ", b"VP8L")}
    return kinds == {b"VP8L"}


def _webp_chunks(data: bytes, place: int) -> Iterator[bytes]:
    """The kinds of the chunks of a RIFF container, those inside the frames of an animation included."""
    while place + 8 <= len(data):
        kind, length = struct.unpack("<4sI", data[place : place + 8])
        yield kind
        if kind == b"ANMF":
            # Place, size, duration and flags of a frame; its chunks follow.
            yield from _webp_chunks(data[place + 8 : place + 8 + length], 16)
        place += 8 + length + length % 2
