"""HEIC and RAW where their libraries are installed; without them the file is named, and what to install."""

import io

import numpy as np
import pytest
import tifffile
from PIL import Image

from hf_ext.errors import DataError
from hf_ext.restoration.camera import MissingLibraryError, UnreadableError, is_raw
from hf_ext.restoration.files import read_frames, read_image
from tests.kit.camera_files import write_dng, write_heic
from tests.kit.pictures import make_exif
from tests.kit.refusals import refused


def smooth(height: int = 48, width: int = 64) -> np.ndarray:
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows * 5, columns * 3, 255 - rows - columns], axis=-1).astype(np.uint8)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
def test_heic_is_read_with_its_tags_and_upright(mode, tmp_path):
    image = Image.fromarray(smooth()).convert(mode)
    path = write_heic(tmp_path / "a.heic", image, exif=make_exif().tobytes())
    picture = read_image(path)
    wanted = np.asarray(image).reshape(48, 64, -1)
    assert picture.pixels.dtype == np.uint8
    assert np.abs(picture.pixels.astype(int) - wanted).max() <= 12
    assert picture.exif[0x010F] == "maker"
    turned = read_image(write_heic(tmp_path / "b.heic", image, exif=make_exif({0x0112: 6}).tobytes()))
    assert np.abs(turned.pixels.astype(int) - np.rot90(wanted, -1)).max() <= 12
    assert 0x0112 not in turned.exif
    # Its bytes are enough, and all of it counts as one picture.
    np.testing.assert_array_equal(read_frames(path.read_bytes()).pictures[0].pixels, picture.pixels)


def test_heic_of_10_bits_is_read_with_16(tmp_path):
    pillow_heif = pytest.importorskip("pillow_heif", reason="the extra `images` is not installed")
    wanted = smooth().astype(np.uint16) * 257
    file = pillow_heif.from_bytes("RGB;16", (64, 48), wanted.tobytes())
    file.save(tmp_path / "a.heic", quality=-1)
    pixels = read_image(tmp_path / "a.heic").pixels
    assert pixels.dtype == np.uint16
    assert np.abs(pixels.astype(int) - wanted).mean() < 600


@pytest.mark.parametrize("library", ["pillow_heif", "rawpy"])
def test_what_is_large_or_broken_is_named(library, tmp_path):
    pytest.importorskip(library, reason="the extra `images` is not installed")
    if library == "rawpy":
        path, size = write_dng(tmp_path / "a.dng"), "96 x 64 pixels"
        broken = {"a.nef": b"no RAW file at all" * 9, "b.cr2": b"", "c.dng": path.read_bytes()[:90]}
    else:
        path, size = write_heic(tmp_path / "a.heic", Image.fromarray(smooth())), "64 x 48 pixels"
        broken = {f"{length}.heic": path.read_bytes()[:length] for length in (100, 400, path.stat().st_size - 50)}
    with refused(DataError, path.name, size, "0.003 megapixels"):
        read_image(path, 0.003)
    for name, data in broken.items():
        (tmp_path / name).write_bytes(data)
        with refused(UnreadableError, name):
            read_image(tmp_path / name)


def test_raw_is_developed_with_16_bits(tmp_path):
    pytest.importorskip("rawpy", reason="the extra `images` is not installed")
    picture = read_image(write_dng(tmp_path / "a.dng"))
    assert picture.pixels.shape == (64, 96, 3)
    assert picture.pixels.dtype == np.uint16
    # One colour, red above all.
    middle = picture.pixels[8:-8, 8:-8].reshape(-1, 3).astype(int)
    assert (middle.max(0) - middle.min(0)).max() < 300
    assert middle[0, 0] > 2 * middle[0, 1]
    assert picture.exif[0x010F] == "maker"
    turned = read_image(write_dng(tmp_path / "b.dng", orientation=6))
    assert turned.pixels.shape == (96, 64, 3)
    assert 0x0112 not in turned.exif


def thumbnail_of_a_raw() -> bytes:
    """As cameras write it: a small picture first, the mosaic in a directory below."""
    file = io.BytesIO()
    with tifffile.TiffWriter(file) as writer:
        writer.write(smooth(6, 8), photometric="rgb", subfiletype=1, subifds=1)
        writer.write(np.zeros((64, 96), np.uint16), photometric="minisblack")
    return file.getvalue()


def test_the_thumbnail_of_a_raw_is_never_taken_for_it(tmp_path, hide_library):
    hide_library("rawpy")
    with Image.open(io.BytesIO(thumbnail_of_a_raw())) as image:
        assert is_raw(image)
    path = tmp_path / "a.NEF"
    path.write_bytes(thumbnail_of_a_raw())
    for source in (path, thumbnail_of_a_raw()):
        with refused(MissingLibraryError, "RAW"):
            read_image(source)
