"""Broken files: the errors of their decoders, and checks that need no decoding."""

import io
import os
import struct
from typing import Any

import fsspec
from PIL import Image

from ..errors import BROKEN_ARCHIVE

# Errors of Pillow for broken files; for a broken PNG it raises a SyntaxError or struct.error.
UNREADABLE = (OSError, SyntaxError, struct.error, Image.DecompressionBombError)
# Errors of an example with a broken file or value.
UNUSABLE = (*UNREADABLE, ValueError, TypeError)
# Further errors of decoders for damaged files: TIFF, AVIF, sounds.
UNDECODABLE = (*UNUSABLE, RuntimeError, LookupError, ArithmeticError, AttributeError, EOFError)
# The same of archives, and of kinds of files whose readers are not installed.
UNOPENABLE = (*UNDECODABLE, *BROKEN_ARCHIVE, ImportError)


def open_bytes(value: dict[str, Any]) -> io.BytesIO | str:
    """Bytes of an undecoded picture or sound of an archive, or the path of its file."""
    if value["bytes"]:
        return io.BytesIO(value["bytes"])
    path = str(value["path"])
    if "::" not in path or os.path.exists(path):
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
