"""Pictures as they are published: their pixels, without the notes and profiles that cameras and programs write."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from PIL import Image, UnidentifiedImageError

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Chunks of PNG that say how the pixels look and move. All others are notes: texts, EXIF with place
# and camera, times, and profiles of colours, which name screens and hold texts.
_SHOWN = (b"IHDR PLTE IDAT IEND tRNS gAMA cHRM sRGB cICP mDCV cLLI sBIT bKGD hIST pHYs sPLT acTL fcTL fdAT").split()
_ORIENTATION = 0x0112


def strip_picture(path: Path) -> None:
    """
    Takes the notes out of a PNG file, and what follows its end.

    Args:
        path (`Path`): The file; it is written only where it has notes.

    Raises:
        ValueError: The file is no whole PNG, or a note says that the picture is to be turned.
    """
    content = path.read_bytes()
    chunks = list(_chunks(content))
    if not content.startswith(_SIGNATURE) or not chunks or chunks[-1][:4] != b"IEND":
        raise ValueError(
            f"{path.name}: not a complete PNG, so its metadata cannot be removed; save the picture as PNG again"
        )
    stripped = _SIGNATURE + b"".join(
        len(chunk[4:-4]).to_bytes(4, "big") + chunk for chunk in chunks if chunk[:4] in _SHOWN
    )
    if stripped == content:
        return
    try:
        with Image.open(path) as picture:
            turned = picture.getexif().get(_ORIENTATION, 1) != 1
    except (UnidentifiedImageError, OSError, ValueError) as error:
        raise ValueError(f"{path.name}: not a readable PNG ({error}); save the picture again") from error
    if turned:
        raise ValueError(f"{path.name}: its metadata contain a rotation and are not published; save it upright")
    path.write_bytes(stripped)


def _chunks(content: bytes) -> Iterator[bytes]:
    """Chunks up to the end of the picture, from the kind to the checksum; nothing of one that is cut off."""
    place = len(_SIGNATURE)
    while place + 12 <= len(content):
        end = place + 12 + int.from_bytes(content[place : place + 4], "big")
        if end > len(content):
            return
        yield content[place + 4 : end]
        if content[place + 4 : place + 8] == b"IEND":
            return
        place = end
