"""What stands beside the pixels of a file: it comes back, or one line says that it does not."""

import io
import struct

import numpy as np
import pytest
from PIL import Image

from hf_ext.errors import DataError, UsageError
from hf_ext.restoration.encoding import Encoding, encode_frames
from hf_ext.restoration.files import Frames, Picture, read_frames, read_image
from tests.kit.pictures import PROFILE, chunk, encode, make_exif, noise, write_image
from tests.kit.refusals import refused
from tests.restoration.tiff_testing import tiff

XMP = b"<x:xmpmeta><rdf:Description tiff:Orientation=%s6%s xmp:Rating='3'/></x:xmpmeta>"
# The header says of which colours it is; no reader here looks further.
GREY_PROFILE = PROFILE[:16] + b"GRAY" + PROFILE[20:]


def written(data: bytes, format: str) -> tuple[Frames, Image.Image, list[str]]:
    """The file in another format: as we read it, as Pillow does, and what was said."""
    said: list[str] = []
    result = encode_frames(read_frames(data), format, say=said.append)
    image = Image.open(io.BytesIO(result))
    image.load()
    return read_frames(result), image, said


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize(
    "keyword", ["Raw profile type exif", "Raw profile type APP1", "tiff:Orientation", "exif:Orientation"]
)
def test_a_png_is_turned_once(keyword, dtype):
    pixels = noise(5, 9, 3, dtype=dtype)
    raw = make_exif({0x0112: 6}).tobytes()
    text = f"\nexif\n{len(raw):8}\n{raw.hex()}\n" if keyword.startswith("Raw") else "6"
    png = encode_frames(Frames([Picture(pixels)]), "PNG")
    png = png[:33] + chunk(b"tEXt", f"{keyword}\0{text}".encode()) + png[33:]
    frames, image, said = written(png, "PNG")
    seen = np.rot90(pixels, -1) if keyword.endswith("exif") else pixels
    np.testing.assert_array_equal(frames.pictures[0].pixels, seen)
    assert image.getexif().get(0x0112, 1) == 1 and keyword not in image.info
    assert len(said) == (keyword == "Raw profile type APP1")


@pytest.mark.parametrize("angle", range(1, 9))
@pytest.mark.parametrize("format", ["PNG", "WEBP"])
def test_every_frame_of_an_animation_is_turned(format, angle):
    first, *more = (noise(5, 9, 3, seed=seed) for seed in range(3))
    options = {"exif": make_exif({0x0112: angle}), "lossless": True}
    data, still = encode(first, format, more, **options), encode(more[1], format, **options)
    frames = read_frames(data)
    np.testing.assert_array_equal(frames.pictures[2].pixels, read_frames(still).pictures[0].pixels)
    assert all(0x0112 not in picture.exif and picture.exif[0x010F] == "maker" for picture in frames.pictures)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("channels", [2, 4])
@pytest.mark.parametrize("soft", [False, True])
def test_transparency_of_a_gif_is_hard_and_stays(soft, channels, count):
    parts = [noise(40, 6, channels, seed=seed) for seed in range(count)]
    for pixels in parts:
        pixels[..., -1] = pixels[..., -1] if soft else np.where(pixels[..., -1] < 128, 0, 255)
        # A single clear pixel in one half, a single opaque one in the other.
        pixels[:20, :, -1], pixels[0, 0, -1], pixels[20:, :, -1] = 255, 0, 0 if not soft else pixels[20:, :, -1]
    said: list[str] = []
    frames = Frames([Picture(pixels) for pixels in parts], [40.0] * count if count > 1 else None)
    read = read_frames(encode_frames(frames, "GIF", say=said.append))
    for picture, pixels in zip(read.pictures, parts, strict=True):
        np.testing.assert_array_equal(picture.pixels[..., -1], np.where(pixels[..., -1] < 128, 0, 255))
    assert len(said) == soft


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("channels", [2, 3, 4])
# So many colours, clear pixels among them or not.
@pytest.mark.parametrize(("colours", "clear"), [(3, True), (200, True), (255, True), (256, False), (256, True)])
def test_colours_of_a_gif_are_kept_or_it_is_said(colours, clear, channels, count):
    random, parts, said = np.random.default_rng(0), [], []
    for _ in range(count):
        values = random.permutation(2 ** (8 * min(channels - 1, 2)) if channels != 3 else 2**24)[:colours]
        # The bytes of a number are the channels of a colour; each is there once at least.
        places = np.append(np.arange(colours), random.integers(0, colours, 20 * 20 - colours)).reshape(20, 20)
        pixels = (values[places][..., None] >> np.array([0, 8, 16])[: channels - 1 + channels % 2]).astype(np.uint8)
        alpha = np.full((20, 20, 1), 255, np.uint8)
        alpha[19] = 0 if clear else 255
        parts.append(pixels if channels % 2 else np.concatenate([pixels, alpha], axis=-1))
    frames = Frames([Picture(pixels) for pixels in parts], [40.0] * count if count > 1 else None)
    read = read_frames(encode_frames(frames, "GIF", say=said.append))
    assert len(said) == (channels != 3 and clear and colours == 256)
    for picture, pixels in zip(read.pictures, parts if not said else [], strict=not said):
        shown = pixels[..., -1] > 0 if channels % 2 == 0 else np.ones((20, 20), bool)
        wanted = Image.fromarray(pixels[..., 0] if channels == 2 else pixels[..., :3]).convert("RGB")
        got = Image.fromarray(picture.pixels.squeeze()).convert("RGB")
        np.testing.assert_array_equal(np.asarray(got)[shown], np.asarray(wanted)[shown])


@pytest.mark.parametrize("source", ["JPEG", "MPO", "TIFF"])
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_captions_travel(source, format):
    """IPTC data, which a JPEG has in a segment of its own, and all others in a tag."""
    iptc = b"\x1c\x02\x78\0\x07a title"
    block = b"Photoshop 3.0\08BIM\x04\x04\0\0" + struct.pack(">I", len(iptc)) + iptc
    beside = {"extra": b"\xff\xed" + struct.pack(">H", len(block) + 2) + block}
    data = encode(noise(5, 9, 3), source, **({"tiffinfo": {33723: iptc}} if source == "TIFF" else beside))
    frames, image, said = written(data, format)
    assert frames.pictures[0].exif[33723] == iptc and not said
    if format == "JPEG":
        assert image.info["photoshop"] == {0x0404: iptc} and 33723 not in image.getexif()


@pytest.mark.parametrize(("format", "left_out"), [("MPO", 2), ("JPEG", 0), ("ICO", 1), ("PNG", 0)])
def test_further_pictures_of_a_file_are_said(format, left_out):
    more = tuple(noise(32, 32, 3, seed=seed) for seed in (1, 2)) if format == "MPO" else ()
    options = {"sizes": [(16, 16), (32, 32)]} if format == "ICO" else {}
    frames = read_frames(encode(noise(32, 32, 3), format, more, **options))
    assert len(frames.pictures) == 1 and [str(left_out) in line for line in frames.lost] == [True] * bool(left_out)


def test_descriptions_of_how_pixels_lie_pixels_that_are_not_square_and_names_of_other_formats_are_said(tmp_path):
    shapes = {
        '{"shape": [5, 9, 3]}': 0,
        '{"shape": [5, 9, 3], "lens": "a"}': 1,
        "ImageJ=1.11a\nunit=um": 1,
        "a cat": 0,
    }
    for text, said in shapes.items():
        frames = read_frames(encode(noise(5, 9, 3), "TIFF", tiffinfo={270: text}))
        assert len(frames.lost) == said, text
        assert ((frames.pictures[0].exif or {}).get(270) == text) == (text == "a cat")
    png, jpeg = (encode(noise(5, 9, 3), format) for format in ("PNG", "JPEG"))
    for down in (1, 2):
        assert len(read_frames(png[:33] + chunk(b"pHYs", struct.pack(">IIB", 1, down, 0)) + png[33:]).lost) == down - 1
        # The density without a unit, behind "JFIF", its end and its version.
        assert len(read_frames(jpeg[:13] + struct.pack(">BHH", 0, 1, down) + jpeg[18:]).lost) == down - 1
    names = {"a.jpg": "PNG", "a.PNG": "JPEG", "a.webp": "TIFF", "b.jpg": "MPO", "a.ppm": "PPM"}
    for name, format in names.items():
        (tmp_path / name).write_bytes(encode(noise(5, 9, 3), format))
        assert len(read_frames(tmp_path / name).lost) == (format not in ("MPO", "PPM")), name


def test_channels_that_are_not_read_are_said():
    for photometric, extra, channels, lines in (
        ("rgb", ["unspecified"], 3, 1),
        ("rgb", ["unspecified", "unspecified"], 3, 1),
        ("rgb", ["unassalpha", "unspecified"], 4, 1),
        ("rgb", ["unassalpha"], 4, 0),
        ("minisblack", ["unspecified"], 1, 1),
        ("minisblack", ["unassalpha"], 2, 0),
        ("separated", [], 3, 1),
        ("separated", ["unspecified"], 3, 2),
    ):
        count = {"rgb": 3, "minisblack": 1, "separated": 4}[photometric] + len(extra)
        frames, _, said = written(tiff(noise(6, 7, count), photometric=photometric, extrasamples=extra), "PNG")
        assert frames.pictures[0].pixels.shape == (6, 7, channels), (photometric, extra)
        assert len(said) == lines and ("left out" in "".join(said)) == ("unspecified" in extra), (photometric, extra)


@pytest.mark.parametrize(("source", "quote"), [("JPEG", b'"'), ("WEBP", b"'"), ("TIFF", b'"'), ("PNG", b"'")])
@pytest.mark.parametrize("format", ["JPEG", "WEBP", "TIFF", "PNG", "PNG of 16 bits", "PNG of 2 frames"])
def test_xmp_travels_upright(source, format, quote):
    format, _, kind = format.partition(" of ")
    xmp = XMP % (quote, quote)
    if source == "TIFF":
        data = encode(noise(5, 9, 3), source, tiffinfo={700: xmp})
    elif source == "PNG":
        png = encode(noise(5, 9, 3), source)
        data = png[:33] + chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp) + png[33:]
    else:
        data = encode(noise(5, 9, 3), source, xmp=xmp)
    read, said = read_frames(data), []
    more = {"16 bits": [noise(5, 9, 3, dtype=np.uint16)], "2 frames": [noise(5, 9, 3), noise(5, 9, 3, seed=1)]}
    pictures = [read.pictures[0]._replace(pixels=pixels) for pixels in more.get(kind, [read.pictures[0].pixels])]
    read = read._replace(pictures=pictures, durations=[40.0] * 2 if len(pictures) > 1 else None)
    result = encode_frames(read, format, say=said.append)
    assert read_frames(result).pictures[0].exif[700] == xmp.replace(b"6", b"1") and not said
    image = Image.open(io.BytesIO(result))
    assert 700 in read.pictures[0].exif, "what was given is not changed"
    if format != "TIFF":
        assert image.info["xmp"] == xmp.replace(b"6", b"1") and 700 not in image.getexif()


@pytest.mark.parametrize(("source", "comment"), [("JPEG", b"hello"), ("GIF", b"hello"), ("GIF", b"x" * 70_000)])
@pytest.mark.parametrize("format", ["JPEG", "GIF", "PNG", "WEBP", "TIFF", "BMP"])
def test_a_comment_travels_or_is_said(source, comment, format):
    _, image, said = written(encode(noise(5, 9, 1), source, comment=comment), format)
    kept = format == "GIF" or (format == "JPEG" and len(comment) == 5)
    assert (image.info.get("comment") == comment, len(said)) == (kept, 1 - kept)


PROFILES = [
    *((channels, format, GREY_PROFILE, True) for channels, format in ((1, "PNG"), (2, "TIFF"), (1, "JPEG"))),
    *((channels, format, GREY_PROFILE, False) for channels, format in ((1, "WEBP"), (3, "PNG"), (4, "TIFF"))),
    (3, "JPEG", PROFILE[:16] + b"CMYK" + PROFILE[20:], False),
    (3, "WEBP", PROFILE, True),
    (1, "PNG", PROFILE, True),
    (3, "BMP", PROFILE, False),
    (3, "GIF", PROFILE, False),
]


@pytest.mark.parametrize(("channels", "format", "profile", "stays"), PROFILES)
def test_a_profile_is_written_only_with_its_colours_and_what_has_no_place_is_said(channels, format, profile, stays):
    said: list[str] = []
    # Neither has a place for tags.
    exif = make_exif() if format in ("BMP", "GIF") else None
    data = encode_frames(Frames([Picture(noise(5, 9, channels), exif, profile)]), format, say=said.append)
    assert read_frames(data).pictures[0].icc_profile == (profile if stays else None)
    assert len(said) == (not stays) + (exif is not None)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize(
    ("channels", "alpha", "background", "stays"),
    [
        *((1, None, background, True) for background in ((255, 136, 0), (9, 9, 9))),
        *((2, alpha, (255, 136, 0), alpha == 1) for alpha in (0, 0.5, 1)),
        *((2, alpha, (9, 9, 9), True) for alpha in (0, 0.5, 1)),
    ],
)
def test_a_grey_profile_is_written_into_a_grey_jpeg_alone(channels, alpha, background, stays, dtype):
    pixels, said = noise(5, 9, channels, dtype=dtype), []
    if alpha is not None:
        pixels[..., 1] = alpha * np.iinfo(dtype).max
    frames = Frames([Picture(pixels, None, GREY_PROFILE)])
    with Image.open(io.BytesIO(encode_frames(frames, "JPEG", Encoding(background=background), said.append))) as image:
        assert (image.mode, image.info.get("icc_profile")) == (("L", GREY_PROFILE) if stays else ("RGB", None))
    assert sum("GRAY" in line for line in said) == (not stays)


ANIMATED = {"GIF": ".gif", "PNG": ".png", "WEBP": ".webp"}


def frames_of(*shades: int, channels: int = 3, size: tuple[int, int] = (12, 16)) -> list[np.ndarray]:
    """A square that wanders over a flat ground; beside it all is transparent if there is alpha."""
    pictures = []
    for number, shade in enumerate(shades):
        pixels = np.full((*size, channels), 40, np.uint8)
        pixels[2 + number : 8 + number, 3:9] = shade
        if channels % 2 == 0:
            pixels[..., -1] = 0
            pixels[2 + number : 8 + number, 3:9, -1] = 255
        pictures.append(pixels)
    return pictures


@pytest.mark.parametrize("plays", [0, 1, 2, 5])
@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("format", ANIMATED)
def test_an_animation_keeps_its_frames_times_and_plays(format, channels, plays, tmp_path):
    pixels = frames_of(250, 180, 90, channels=channels)
    frames = Frames([Picture(part) for part in pixels], [40.0, 120.0, 300.0], plays)
    path = write_image(tmp_path / f"a{ANIMATED[format]}", frames)
    read = read_frames(path)
    assert read.durations == frames.durations and read.plays == plays
    assert len(read.pictures) == 3
    with refused(DataError, "3 frames"):
        read_image(path)


@pytest.mark.parametrize("format", [*ANIMATED, "PNG with a still"])
def test_times_and_plays_of_animations_that_pillow_wrote_are_read(format, tmp_path):
    format, _, still = format.partition(" ")
    first, *more = frames_of(250, 180, 90, 20)
    times, options = [50, 60, 70, 80][bool(still) :], {"default_image": True} if still else {}
    frames = read_frames(encode(first, format, more, duration=times, loop=3, lossless=True, **options))
    assert frames.still == bool(still) and len(frames.pictures) == 4 and frames.durations[-len(times) :] == times
    assert frames.plays == (4 if format == "GIF" else 3)
    # And written again they are the same animation.
    again = read_frames(write_image(tmp_path / "b.png", frames))
    assert (again.durations[-len(times) :], again.plays, again.still) == (times, frames.plays, frames.still)
    for first, second in zip(again.pictures, frames.pictures, strict=True):
        np.testing.assert_array_equal(first.pixels, second.pixels)


def test_pages_keep_their_size_depth_and_description(tmp_path):
    one, two, three = (make_exif({270: text}, {0xA434: f"lens of the {text}"}) for text in ("one", "two", "three"))
    pages = [Picture(frames_of(250)[0], one, None, (300, 300)), Picture(noise(9, 7, 3, dtype=np.uint16), two)]
    pages.append(Picture(frames_of(90, channels=1)[0], three, None, (72, 72)))
    read = read_frames(write_image(tmp_path / "a.tif", Frames(pages)))
    assert read.durations is None
    for page, wanted in zip(read.pictures, pages, strict=True):
        np.testing.assert_array_equal(page.pixels, wanted.pixels)
        assert page.exif[270] == wanted.exif[270]
        assert page.exif.get_ifd(0x8769)[0xA434] == wanted.exif.get_ifd(0x8769)[0xA434]
        assert page.dpi == wanted.dpi


def test_what_a_format_cannot_hold_is_said():
    pictures = [Picture(pixels) for pixels in frames_of(9, 99)]
    frames, pages = (Frames(pictures, [10.0, 10.0]), "2 frames"), (Frames(pictures), "2 pages")
    cases = [(format, *frames) for format in ("JPEG", "BMP", "TIFF")]
    for format, several, said in [*cases, *((format, *pages) for format in ("JPEG", "PNG", "GIF"))]:
        with refused(UsageError, format, said):
            encode_frames(several, format)


def test_all_frames_together_are_bounded_before_they_are_decoded(tmp_path, monkeypatch):
    frames = [Picture(pixels) for pixels in frames_of(9, 99, 199, size=(100, 100))]
    moving = write_image(tmp_path / "a.gif", Frames(frames, [10.0] * 3))
    pages = write_image(tmp_path / "a.tif", Frames(frames))
    assert len(read_frames(moving, 0.03).pictures) == len(read_frames(pages, 0.03).pictures) == 3
    with refused(DataError, "3 frames", "100 x 100 pixels", "0.025 megapixels"):
        read_frames(moving, 0.025)
    with refused(DataError, "30000 pixels", "0.025 megapixels"):
        read_frames(pages, 0.025)
