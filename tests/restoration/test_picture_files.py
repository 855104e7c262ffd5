"""Picture files: read within a bound, at their depth, with their metadata; written whole; broken ones are named."""

import io
import struct
import warnings

import numpy as np
import pytest
import tifffile
from PIL import Image
from PIL.TiffImagePlugin import IFDRational

from hf_ext.errors import DataError, UsageError
from hf_ext.restoration.camera import MissingLibraryError, UnreadableError, is_raw
from hf_ext.restoration.encoding import descriptive_tags, encode_frames, require_place
from hf_ext.restoration.files import Frames, Picture, read_frames, read_image
from hf_ext.restoration.jobs import FORMATS
from hf_ext.semanir.image_processing_semanir import image_to_pixels
from tests.kit.camera_files import write_dng, write_heic
from tests.kit.pictures import PROFILE, encode, make_exif, noise, write_image
from tests.kit.refusals import refused


@pytest.mark.parametrize("ending", FORMATS)
def test_metadata_is_kept_and_the_orientation_applied(ending, tmp_path):
    options = {"exif": make_exif({0x0112: 6}, {0xA002: 20}), "icc_profile": PROFILE, "dpi": (72, 72)}
    picture = read_image(encode(Image.new("RGB", (20, 10), (200, 100, 50)), "JPEG", **options))
    assert picture.pixels.shape == (20, 10, 3)
    enlarged = picture._replace(pixels=picture.pixels.repeat(2, 0).repeat(2, 1))
    with Image.open(write_image(tmp_path / f"out{ending}", enlarged)) as image:
        assert image.size == (20, 40)
        if ending in (".bmp", ".gif"):
            return
        assert image.info["icc_profile"] == PROFILE
        exif = image.getexif()
        assert (exif[0x010F], exif.get(0x0112, 1), exif.get_ifd(0x8769)[0xA002]) == ("maker", 1, 20)


@pytest.mark.parametrize(("format", "most"), [("JPEG", 65500), ("WEBP", 16383), ("GIF", 65535), ("PNG", None)])
def test_a_picture_that_is_too_wide_for_a_format_is_refused_before_it_is_enlarged(format, most):
    for width in (most or 70_000, (most or 70_000) + 1):
        for scale, shape in ((1, (1, width, 1)), (2, (-(-width // 2), 1, 1))):
            frames = Frames([Picture(np.zeros(shape, np.uint8))])
            if most and scale * max(shape) > most:
                with refused(UsageError, format, f"{scale * shape[1]} x {scale * shape[0]} pixels", most):
                    require_place(frames, format, scale)
            else:
                require_place(frames, format, scale)
        if not most or width == most:
            assert read_image(encode_frames(Frames([Picture(np.zeros((1, width, 1), np.uint8))]), format)) is not None


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
    xmp = {"xmp": b"<x/>"} if format == "WEBP" else {}
    file = encode(pixels, format, exif=b"Exif\0\0" + data, lossless=True, **xmp)
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


LONG = [(900, 65_505, 6, "XMP"), (70_000, 65_504, 6, "the maker's note"), (70_000, 70_000, 6, "note and XMP")]


@pytest.mark.parametrize(
    ("note", "xmp", "artist", "left_out"), [*LONG, (70_000, 900, 70_000, "all tags"), (0, 0, 70_000, "all tags")]
)
def test_what_is_too_long_for_a_jpeg_is_left_out(note, xmp, artist, left_out, caplog):
    picture = Picture(noise(16, 24, 3), described(note, xmp, artist), PROFILE)
    data = encode_frames(Frames([picture]), "JPEG")
    said = len(caplog.messages)
    assert said == 1 + ("and" in left_out) and all("a JPEG can store" in message for message in caplog.messages)
    without_note = "note" in left_out or "all" in left_out
    maker = None if "all" in left_out else "maker"
    assert kept(data) == (0 if without_note else note, 0 if "XMP" in left_out else xmp, maker)
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
    encode(noise(8, 8, 3), "JPEG", exif=b"Exif\0\0" + bytes(65_527))
    with refused(ValueError, "EXIF"):
        encode(noise(8, 8, 3), "JPEG", exif=b"Exif\0\0" + bytes(65_528))


def test_broken_files_are_named(tmp_path):
    png, jpeg, avif = (encode(noise(64, 64, 3), kind) for kind in ("PNG", "JPEG", "AVIF"))
    # The pictures begin behind this mark.
    start = avif.index(b"mdat") + 4
    dds = b"DDS " + struct.pack("<7I44x2I4s5I4I4x", 124, 4103, 8, 8, 0, 0, 0, 32, 4, b"WHAT", *[0] * 9)
    path = tmp_path / "a.png"
    for data, fact in (
        (avif[:start] + bytes(40) + avif[start + 40 :], "is broken"),
        (dds, "is broken: Unimplemented pixel format"),
        (b"not a picture at all\n" * 20, "is not a picture that Pillow can read"),
        (b"", "is empty"),
        (png[: len(png) // 2], "is damaged or incomplete"),
        (jpeg[: len(jpeg) // 2], "is damaged or incomplete"),
        (png[:60] + b"\0" * 40 + png[100:], "is damaged or incomplete"),
        (encode(noise(8, 8, 3), "GIF", [noise(8, 8, 3, seed=1)]), "has 2 frames or pages"),
    ):
        path.write_bytes(data)
        for given, name in ((path, "a.png"), (data, "the picture")):
            with refused(ValueError, name, fact):
                read_image(given)
    with pytest.raises(FileNotFoundError):
        read_image(tmp_path / "nowhere.png")
    with pytest.raises(IsADirectoryError):
        read_image(tmp_path)


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


@pytest.mark.parametrize(("tag", "kind", "message"), [(256, 4, "broken: Missing dim"), (259, 3, "a TIFF.* 11 is")])
def test_a_tiff_whose_second_page_is_broken_is_named(tag, kind, message):
    data = bytearray(encode(Image.new("L", (8, 8)), "TIFF", [Image.new("L", (8, 8), 255)]))
    place = data.rindex(struct.pack("<HHI", tag, kind, 1))
    # No width; an unknown compression.
    data[place : place + 10] = struct.pack("<HHIH", 60000 if tag == 256 else tag, kind, 1, 11)
    with pytest.raises(ValueError, match=f"the picture is {message}"):
        read_frames(bytes(data))


def smooth(height: int = 48, width: int = 64) -> np.ndarray:
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows * 5, columns * 3, 255 - rows - columns], axis=-1).astype(np.uint8)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
def test_heic_is_read_with_its_tags_and_upright(mode, tmp_path):
    image = Image.fromarray(smooth()).convert(mode)
    path = write_heic(tmp_path / "a.heic", image, exif=make_exif().tobytes())
    picture = read_image(path)
    wanted = np.asarray(image).reshape(48, 64, -1)
    assert picture.pixels.dtype == np.uint8 and picture.exif[0x010F] == "maker"
    assert np.abs(picture.pixels.astype(int) - wanted).max() <= 12
    turned = read_image(write_heic(tmp_path / "b.heic", image, exif=make_exif({0x0112: 6}).tobytes()))
    assert np.abs(turned.pixels.astype(int) - np.rot90(wanted, -1)).max() <= 12
    assert 0x0112 not in turned.exif
    # Its bytes are enough, and all of it counts as one picture.
    np.testing.assert_array_equal(read_frames(path.read_bytes()).pictures[0].pixels, picture.pixels)


# Alpha, which is kept; maps of depth and brightness, by which phones name such a picture.
@pytest.mark.parametrize(
    ("kind", "lost"),
    [(b"mpeg:hevc:2015:auxid:1", 0), (b"mpeg:hevc:2015:auxid:2", 1), (b"com:apple:photo:aux:map", 1)],
)
def test_maps_beside_a_heic_are_told(kind, lost, tmp_path):
    path = write_heic(tmp_path / "a.heic", Image.fromarray(noise(48, 64, 4)))
    data = path.read_bytes()
    assert data.count(b"mpeg:hevc:2015:auxid:1") == 1
    frames = read_frames(data.replace(b"mpeg:hevc:2015:auxid:1", kind[:22]))
    assert ["1" in line for line in frames.lost] == [True] * lost
    assert frames.pictures[0].pixels.shape == (48, 64, 4 - lost)


def test_heic_of_10_bits_is_read_with_16(tmp_path):
    pillow_heif = pytest.importorskip("pillow_heif", reason="the extra `images` is not installed")
    wanted = smooth().astype(np.uint16) * 257
    file = pillow_heif.from_bytes("RGB;16", (64, 48), wanted.tobytes())
    file.save(tmp_path / "a.heic", quality=-1)
    pixels = read_image(tmp_path / "a.heic").pixels
    assert pixels.dtype == np.uint16 and np.abs(pixels.astype(int) - wanted).mean() < 600


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
    assert (picture.pixels.shape, picture.pixels.dtype) == ((64, 96, 3), np.uint16)
    # One colour, red above all.
    middle = picture.pixels[8:-8, 8:-8].reshape(-1, 3).astype(int)
    assert (middle.max(0) - middle.min(0)).max() < 300 and middle[0, 0] > 2 * middle[0, 1]
    assert picture.exif[0x010F] == "maker"
    turned = read_image(write_dng(tmp_path / "b.dng", orientation=6))
    assert turned.pixels.shape == (96, 64, 3) and 0x0112 not in turned.exif
    # By its bytes alone, as of standard input, or under the name of a TIFF, a DNG of one picture is the same.
    data = (tmp_path / "b.dng").read_bytes()
    (tmp_path / "b.tif").write_bytes(data)
    for source in (data, tmp_path / "b.tif"):
        np.testing.assert_array_equal(read_image(source).pixels, turned.pixels)
        with refused(DataError, "0.003 megapixels"):
            read_image(source, 0.003)


def test_the_thumbnail_of_a_raw_is_never_taken_for_it(tmp_path, hide_library):
    """As cameras write it: a small picture first, the mosaic in a directory below."""
    hide_library("rawpy")
    path = tmp_path / "a.NEF"
    with tifffile.TiffWriter(path) as writer:
        writer.write(smooth(6, 8), photometric="rgb", subfiletype=1, subifds=1)
        writer.write(np.zeros((64, 96), np.uint16), photometric="minisblack")
    with Image.open(path) as image:
        assert is_raw(image)
    for source in (path, path.read_bytes()):
        with refused(MissingLibraryError, "RAW"):
            read_image(source)
