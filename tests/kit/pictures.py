"""Picture files that outsiders send."""

import io
import struct
import zlib
from typing import Any

from PIL import Image


def encode(picture: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    """The bytes of a picture file."""
    file = io.BytesIO()
    picture.save(file, format, **options)
    return file.getvalue()


def claim(width: int, height: int) -> bytes:
    """A PNG of one pixel whose header claims another size."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 4)) + chunk(b"IEND", b"")
