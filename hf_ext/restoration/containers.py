# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""What PNG, JPEG and WebP files say of how their pixels are coded, beyond what Pillow hands on."""

import struct
from collections.abc import Iterator

from PIL import ImageFile, JpegImagePlugin

# Chunks of a PNG that say which light its values stand for: without them viewers show other colours.
_COLOUR_CHUNKS = (b"cHRM", b"gAMA", b"sRGB", b"cICP", b"mDCV", b"cLLI")
# Behind the signature of 8 bytes and the header of 25, other chunks may stand.
PNG_HEADER = 33


def colour_chunks(image: ImageFile.ImageFile) -> bytes:
    """The chunks of a PNG that say which light its values stand for, as they lie in the file; of others nothing."""
    if image.format != "PNG" or image.fp is None:
        return b""
    place, found = image.fp.tell(), b""
    image.fp.seek(PNG_HEADER)
    while len(head := image.fp.read(8)) == 8 and head[4:] != b"IDAT":
        length = struct.unpack(">I", head[:4])[0]
        # Content and checksum. None of these chunks is longer than the 32 bytes of cHRM.
        if head[4:] in _COLOUR_CHUNKS and length <= 32:
            found += head + image.fp.read(length + 4)
        else:
            image.fp.seek(length + 4, 1)
    image.fp.seek(place)
    return found


def insert_chunks(png: bytes, chunks: bytes) -> bytes:
    """A PNG with chunks behind its header."""
    return png[:PNG_HEADER] + chunks + png[PNG_HEADER:]


def has_other_light(chunks: bytes) -> bool:
    """Whether colour chunks say anything but sRGB, whose values a file without them has too."""
    place = 0
    while place < len(chunks):
        length, kind = struct.unpack(">I4s", chunks[place : place + 8])
        content = chunks[place + 8 : place + 8 + length]
        # A power of 1 / 2.2 in units of 1 / 100,000, and the primaries and curve of sRGB.
        if (kind == b"gAMA" and content != (45455).to_bytes(4)) or (kind == b"cICP" and content[:2] != b"\x01\x0d"):
            return True
        place += length + 12
    return False


def jpeg_subsampling(image: ImageFile.ImageFile) -> int:
    """How a JPEG halves its colours, as Pillow numbers it: 0 is not at all, which is said of other files too."""
    if not isinstance(image, JpegImagePlugin.JpegImageFile):
        return 0
    return max(0, JpegImagePlugin.get_sampling(image))


def is_lossless_webp(data: bytes) -> bool:
    """Whether all pictures in a WebP file are coded without loss."""
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
