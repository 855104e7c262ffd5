"""Broken files: the errors that they raise in those who decode them, and those that are seen without decoding."""

import io
import struct
from typing import Any

import fsspec
from PIL import Image

from ..errors import BROKEN_ARCHIVE

# What Pillow makes of broken files; its error for a broken PNG is a SyntaxError, or that of the module struct.
UNREADABLE = (OSError, SyntaxError, struct.error, Image.DecompressionBombError)
# What a broken file or value makes of an example.
UNUSABLE = (*UNREADABLE, ValueError, TypeError)
# What decoders raise beside that for damaged files: of a TIFF, an AVIF, a sound.
UNDECODABLE = (*UNUSABLE, RuntimeError, LookupError, ArithmeticError, AttributeError, EOFError)
# The same of archives, and of kinds of files whose readers are not installed.
UNOPENABLE = (*UNDECODABLE, *BROKEN_ARCHIVE, ImportError)


def open_bytes(value: dict[str, Any]) -> io.BytesIO | str:
    """Bytes of an undecoded picture or sound of an archive, or the path of its file."""
    if value["bytes"]:
        return io.BytesIO(value["bytes"])
    path = str(value["path"])
    if "::" not in path:
        return path
    with fsspec.open(path, "rb") as file:
        return io.BytesIO(file.read())


def is_broken_picture(value: dict[str, Any] | None) -> bool:
    """True if the head of a picture cannot be read, or the end of a JPEG or PNG is missing."""
    if value is None:
        return True
    try:
        given = open_bytes(value)
        with open(given, "rb") if isinstance(given, str) else given as file:
            picture = Image.open(file)
            if picture.format == "PNG":
                picture.verify()
            if picture.format == "JPEG":
                file.seek(max(0, file.seek(0, 2) - 4096))
                # Cameras write more behind the end.
                return b"\xff\xd9" not in file.read()
    except UNDECODABLE:
        return True
    return False
