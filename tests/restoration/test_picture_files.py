"""Picture files: read within a bound, at their depth, with their metadata; written whole; broken ones are named."""

import io
import struct
import warnings

import numpy as np
import pytest
from PIL import Image
from PIL.TiffImagePlugin import IFDRational

from hf_ext.errors import DataError, UsageError
from hf_ext.restoration.encoding import descriptive_tags, encode_frames
from hf_ext.restoration.files import Frames, Picture, read_frames, read_image
from hf_ext.restoration.jobs import FORMATS
from hf_ext.semanir.image_processing_semanir import image_to_pixels
from tests.kit.pictures import PROFILE, encode, make_exif, noise, write_image
from tests.kit.refusals import refused


@pytest.mark.parametrize("ending", FORMATS)
def test_metadata_is_kept_and_the_orientation_applied(ending, tmp_path):
    source = tmp_path / "source.jpg"
    Image.new("RGB", (20, 10), (200, 100, 50)).save(
        source, exif=make_exif({0x0112: 6}, {0xA002: 20}), icc_profile=PROFILE, dpi=(72, 72)
    )
    picture = read_image(source)
    assert picture.pixels.shape == (20, 10, 3)
    enlarged = picture._replace(pixels=picture.pixels.repeat(2, 0).repeat(2, 1))
    with Image.open(write_image(tmp_path / f"out{ending}", enlarged)) as image:
        assert image.size == (20, 40)
        if ending in (".bmp", ".gif"):
            return
        assert image.info["icc_profile"] == PROFILE
        exif = image.getexif()
        assert (exif[0x010F], exif.get(0x0112, 1), exif.get_ifd(0x8769)[0xA002]) == ("maker", 1, 20)


@pytest.mark.parametrize("format", ["JPEG", "WEBP", "GIF"])
def test_a_picture_that_is_too_wide_for_a_format_is_refused(format):
    with refused(UsageError, format, "70000 x 1 pixels"):
        encode_frames(Frames([Picture(np.zeros((1, 70000, 3), np.uint8))]), format)


@pytest.mark.parametrize(("format", "most"), [("GIF", 0), ("JPEG", 65535), ("PNG", 5e7), ("TIFF", 4e9)])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_resolution_is_kept_or_said(format, most, dtype):
    for dpi in (300, 70_000, 2_540_000, 1_000_000_000):
        said, picture = [], Picture(noise(4, 4, 3, dtype=dtype), dpi=(IFDRational(dpi), 2.0))
        read = read_image(encode_frames(Frames([picture]), format, say=said.append)).dpi
        assert read == (pytest.approx((dpi, 2), rel=0.01) if dpi <= most else None)
        assert sum("resolution" in line for line in said) == (dpi > most)


@pytest.mark.parametrize("format", ["PNG", "WEBP"])
@pytest.mark.parametrize("data", [b"garbage!", b"M", b"II*\0\x08\0\0\0\xff\xff", b"MM\0*\0\0\0"])
def test_damaged_exif_data_never_cost_the_picture(format, data):
    pixels = noise(5, 9, 3)
    file = encode(
        pixels, format, exif=b"Exif\0\0" + data, lossless=True, **{"xmp": b"<x/>"} if format == "WEBP" else {}
    )
    (picture,), *_, lost, _ = read_frames(file)
    np.testing.assert_array_equal(picture.pixels, pixels)
    np.testing.assert_array_equal(image_to_pixels(Image.open(io.BytesIO(file))), pixels)
    assert 0x010F not in (picture.exif or {}) and len(lost) == (data[:2] != b"II")


def described(note: int, xmp: int, artist: int = 6) -> Image.Exif:
    """EXIF data with a maker's note, XMP and an artist's name of so many bytes; 0 is none."""
    tags = {0x013B: "a" * artist, **({700: b"x" * xmp} if xmp else {})}
    return make_exif(tags, {0xA002: 20, **({0x927C: b"n" * note} if note else {})})


def kept(data: bytes) -> tuple[int, int, str | None]:
    """Lengths of note and XMP of a file, and the name of its maker."""
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        exif = image.getexif()
        xmp = image.info.get("xmp") or exif.get(700, b"")
        return len(exif.get_ifd(0x8769).get(0x927C, b"")), len(xmp), exif.get(0x010F)


@pytest.mark.parametrize(
    ("note", "xmp", "artist", "left_out"),
    [
        (900, 65_505, 6, "XMP"),
        (70_000, 65_504, 6, "the maker's note"),
        (70_000, 70_000, 6, "the maker's note and XMP"),
        (70_000, 900, 70_000, "all tags"),
        (0, 0, 70_000, "all tags"),
    ],
)
def test_what_is_too_long_for_a_jpeg_is_left_out(note, xmp, artist, left_out, caplog):
    picture = Picture(noise(16, 24, 3), described(note, xmp, artist), PROFILE)
    data = encode_frames(Frames([picture]), "JPEG")
    said = len(caplog.messages)
    assert said == 1 + ("and" in left_out) and all("a JPEG can store" in message for message in caplog.messages)
    without_note = "note" in left_out or "all" in left_out
    assert kept(data) == (
        0 if without_note else note,
        0 if "XMP" in left_out else xmp,
        None if "all" in left_out else "maker",
    )
    with Image.open(io.BytesIO(data)) as image:
        assert image.info["icc_profile"] == PROFILE
    assert (0x927C in picture.exif.get_ifd(0x8769), 700 in picture.exif) == (note > 0, xmp > 0), "given tags stay"
    # The others hold them all.
    for format in ("PNG", "WEBP", "TIFF"):
        assert kept(encode_frames(Frames([picture]), format)) == (note, xmp, "maker")
    deep = picture._replace(pixels=noise(16, 24, 3, dtype=np.uint16))
    assert kept(encode_frames(Frames([deep]), "PNG")) == (note, xmp, "maker")
    assert len(caplog.messages) == said


def test_a_jpeg_is_filled_with_tags_to_the_last_byte(caplog):
    """Tags lie at even places: the first length that is too long is by two larger than the last that is not."""
    room = 65_532 - len(described(900, 0).tobytes()) + 900
    for note in (room, room + 2):
        picture = Picture(noise(16, 24, 3), described(note, 0))
        assert len(descriptive_tags(picture).tobytes()) == 65_532 - room + note
        assert kept(encode_frames(Frames([picture]), "JPEG")) == (note if note == room else 0, 0, "maker")
        assert len(caplog.messages) == (note > room)
    # Pillow writes no more, whatever we think.
    file = io.BytesIO()
    Image.new("L", (8, 8)).save(file, "JPEG", exif=b"Exif\0\0" + bytes(65_527))
    with refused(ValueError, "EXIF"):
        Image.new("L", (8, 8)).save(io.BytesIO(), "JPEG", exif=b"Exif\0\0" + bytes(65_528))


def broken_files() -> dict[str, tuple[bytes, str]]:
    png, jpeg = (encode_frames(Frames([Picture(noise(64, 64, 3))]), kind) for kind in ("PNG", "JPEG"))
    black, white = (Image.new("L", (8, 8), shade) for shade in (0, 255))
    avif = bytearray(encode(Image.fromarray(noise(64, 64, 3)), "AVIF"))
    # The pictures begin behind this mark.
    start = avif.index(b"mdat") + 4
    avif[start : start + 40] = bytes(40)
    dds = b"DDS " + struct.pack("<7I44x2I4s5I4I4x", 124, 4103, 8, 8, 0, 0, 0, 32, 4, b"WHAT", *[0] * 9)
    return {
        "damaged AVIF": (bytes(avif), "is broken"),
        "DDS of an unknown kind": (dds, "is broken: Unimplemented pixel format"),
        "text": (b"not a picture at all\n" * 20, "is not a picture that Pillow can read"),
        "empty": (b"", "is empty"),
        "half a PNG": (png[: len(png) // 2], "is damaged or incomplete"),
        "half a JPEG": (jpeg[: len(jpeg) // 2], "is damaged or incomplete"),
        "damaged PNG": (png[:60] + b"\0" * 40 + png[100:], "is damaged or incomplete"),
        "moving": (encode(black, "GIF", [white]), "has 2 frames or pages"),
    }


@pytest.mark.parametrize("kind", broken_files())
def test_broken_files_are_named(kind, tmp_path):
    data, message = broken_files()[kind]
    path = tmp_path / "a.png"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"a.png.*{message}"):
        read_image(path)
    with pytest.raises(ValueError, match=f"the picture.*{message}"):
        read_image(data)


def test_a_bomb_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    path, cut_off = tmp_path / "bomb.png", tmp_path / "cut.png"
    Image.new("1", (1000, 900)).save(path)
    # Whoever decodes this one finds that it is broken.
    cut_off.write_bytes(path.read_bytes()[:60])
    with refused(DataError, "damaged"):
        read_image(cut_off, 0.9)
    for most in (0.899, 0.05, 0.001):
        with refused(DataError, "megapixels", "limit"):
            read_image(cut_off, most)
    for most in (None, 0, -1, float("nan"), float("inf"), "200"):
        with refused(UsageError, "max_megapixels", most):
            read_image(cut_off, most)
    # More pixels than Pillow reads without a word.
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500_000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_image(path, 0.9).pixels.shape == (900, 1000, 1)
    assert Image.MAX_IMAGE_PIXELS == 500_000


def test_a_file_that_is_not_there_or_readable_says_so(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_image(tmp_path / "nowhere.png")
    with pytest.raises(IsADirectoryError):
        read_image(tmp_path)


@pytest.mark.parametrize(("tag", "kind", "message"), [(256, 4, "broken: Missing dim"), (259, 3, "a TIFF.* 11 is")])
def test_a_tiff_whose_second_page_is_broken_is_named(tag, kind, message):
    data = bytearray(encode(Image.new("L", (8, 8)), "TIFF", [Image.new("L", (8, 8), 255)]))
    place = data.rindex(struct.pack("<HHI", tag, kind, 1))
    # No width; an unknown compression.
    data[place : place + 10] = struct.pack("<HHIH", 60000 if tag == 256 else tag, kind, 1, 11)
    with pytest.raises(ValueError, match=f"the picture is {message}"):
        read_frames(bytes(data))
