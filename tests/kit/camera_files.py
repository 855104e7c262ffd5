"""Files of phones and cameras, made for tests."""

from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image


def write_heic(path: Path, image: Image.Image, **options) -> Path:
    pillow_heif = pytest.importorskip("pillow_heif", reason="the extra `images` is not installed")
    pillow_heif.from_pillow(image).save(path, quality=-1, **options)
    return path


def write_dng(path: Path, orientation: int = 1) -> Path:
    """A DNG of one colour, as a camera has it: a mosaic of 16 bits, a matrix of colours, the light that it saw."""
    mosaic = np.full((64, 96), 8000, np.uint16)
    mosaic[0::2, 0::2], mosaic[1::2, 1::2] = 16000, 4000
    # Colours of the XYZ space are those of the camera.
    matrix = tuple(part for row in np.eye(3, dtype=int) for value in row for part in (int(value), 1))
    tags = [
        *[(271, 2, 0, "maker"), (272, 2, 0, "model"), (274, 3, 1, orientation)],
        *[(33421, 3, 2, (2, 2)), (33422, 1, 4, bytes([0, 1, 1, 2])), (50706, 1, 4, bytes([1, 4, 0, 0]))],
        *[(50707, 1, 4, bytes([1, 1, 0, 0])), (50708, 2, 0, "maker model"), (50717, 4, 1, 65535)],
        *[(50721, 10, 9, matrix), (50728, 5, 3, (1, 1, 1, 1, 1, 1)), (50778, 3, 1, 21)],
    ]
    tifffile.imwrite(path, mosaic, photometric="cfa", extratags=[(*tag, True) for tag in tags])
    return path
