"""Pictures of noise, and picture files that outsiders send."""

import io
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageCms

from hf_ext.restoration.encoding import Frames, Picture, encode_frames
from hf_ext.restoration.jobs import FORMATS
from hf_ext.semanir.image_processing_semanir import pixels_to_image

PROFILE = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def noise(*shape: int, dtype: type = np.uint8, seed: int = 0) -> np.ndarray:
    """Whole numbers of all the values of a dtype."""
    return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, shape, dtype=dtype, endpoint=True)


def encode(
    picture: Image.Image | np.ndarray,
    format: str = "PNG",
    more: Sequence[Image.Image | np.ndarray] = (),
    **options: Any,
) -> bytes:
    """The bytes of a picture file that Pillow writes; of several frames or pages where there are more."""
    first, *others = (one if isinstance(one, Image.Image) else pixels_to_image(one) for one in (picture, *more))
    file = io.BytesIO()
    first.save(file, format, **({"save_all": True, "append_images": others, "duration": 40} if more else {}) | options)
    return file.getvalue()


def write_image(path: Path, content: Picture | Frames) -> Path:
    """Writes a picture, or all frames or pages, in the format of the name."""
    frames = content if isinstance(content, Frames) else Frames([content])
    path.write_bytes(encode_frames(frames, FORMATS[path.suffix]))
    return path


def make_exif(tags: dict[int, Any] | None = None, folder: dict[int, Any] | None = None) -> Image.Exif:
    """EXIF data of a maker with further tags, and with tags of the camera's settings."""
    exif = Image.Exif()
    for tag, value in {0x010F: "maker", **(tags or {})}.items():
        exif[tag] = value
    if folder:
        exif.get_ifd(0x8769).update(folder)
        exif[0x8769] = 0
    return exif


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + zlib.crc32(kind + content).to_bytes(4)


def claim(width: int, height: int) -> bytes:
    """A PNG of one pixel whose header claims another size."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 4)) + chunk(b"IEND", b"")


_WHITE = Image.new("L", (8, 8), 255)
# Bodies that a stranger may send as a picture; True for those that are one.
SENT = {
    "nine megapixels in few bytes": (encode(Image.new("L", (3000, 3000)), compress_level=9), False),
    "a claim of 4 gigapixels": (claim(65500, 65500), False),
    "a claim that the file does not hold": (claim(100, 100), False),
    "one by 60,000": (encode(Image.new("RGB", (1, 60000))), False),
    "an animation": (encode(_WHITE, "GIF", save_all=True, append_images=[Image.new("L", (8, 8))]), False),
    "16 bits": (encode(Image.fromarray(np.zeros((9, 11), np.uint16))), True),
    "CMYK": (encode(Image.new("CMYK", (16, 12)), "JPEG"), True),
    "transparency": (encode(Image.new("RGBA", (16, 12), (9, 8, 7, 6))), True),
    "cut off": (encode(Image.new("RGB", (64, 64), (9, 8, 7)), "BMP")[:900], False),
    "no picture": (b"no picture", False),
    "a page": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", False),
}
