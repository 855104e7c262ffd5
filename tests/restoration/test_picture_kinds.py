"""Every mode in every container that Pillow writes is read as what it was, and written so that it can be read."""

import io
import itertools
import struct

import numpy as np
import pytest
import tifffile
from numpngw import write_png
from PIL import Image, ImageCms, ImageOps
from PIL.TiffImagePlugin import IFDRational

from hf_ext.errors import DataError
from hf_ext.restoration.camera import UnreadableError
from hf_ext.restoration.files import Picture, read_frames, read_image, read_tiff
from hf_ext.semanir.image_processing_semanir import image_to_pixels
from tests.kit.pictures import PROFILE, encode, noise, write_image
from tests.kit.refusals import refused
from tests.restoration.tiff_testing import grey_tiff, tiff

MODES = ["1", "L", "P", "PA", "LA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I", "F"]
MODES += ["I;16", "I;16B"]
# Pillow writes these and reads them not, or (EPS) by another program.
NOT_READ = ("EPS", "PALM", "PDF")
# How far a container may be from what went into it, on average over all values: its loss, or its palette.
LOSS = {"AVIF": 3, "JPEG": 3, "MPO": 3, "WEBP": 4, "GIF": 8, "BLP": 12}
# Of 16 and 32 bits Pillow writes something else into these; and a GIF's pixel is transparent or not.
SHALLOW = ("AVIF", "GIF", "WEBP")


def picture_of(mode: str) -> Image.Image:
    """Smooth colours, smooth alpha."""
    grey = Image.linear_gradient("L").resize((32, 32))
    parts = (grey, grey.rotate(180), grey.transpose(Image.Transpose.ROTATE_90), grey.rotate(90))
    colours = Image.merge("RGBA", parts)
    if mode.startswith("I;16"):
        deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
        return deep if mode == "I;16" else deep.convert("I").convert("I;16B")
    if mode in ("P", "PA"):
        return colours.convert("RGB").quantize(200).convert(mode)
    if mode == "RGBX":
        return Image.frombytes("RGBX", colours.size, colours.tobytes())
    if mode == "LAB":
        spaces = (ImageCms.createProfile(name) for name in ("sRGB", "LAB"))
        return ImageCms.profileToProfile(colours.convert("RGB"), *spaces, outputMode="LAB")
    direct = mode in ("LA", "RGBA", "RGBa", "1", "L", "F", "I")
    return (colours if direct else colours.convert("RGB")).convert(mode)


def colours_of(image: Image.Image) -> np.ndarray:
    """Red, green, blue and alpha of 0 to 255, worked out by Pillow alone, or the grey values of 16 bits."""
    if image.mode.startswith("I"):
        grey = np.asarray(image).astype(np.float64)[..., None] / 257
        return np.concatenate([grey, grey, grey, np.full_like(grey, 255)], axis=-1)
    plain = image.convert("RGB") if image.mode in ("LAB", "CMYK", "YCbCr", "HSV", "RGBX") else image
    return np.asarray(plain.convert("RGBA")).astype(np.float64)


def as_colours(pixels: np.ndarray) -> np.ndarray:
    """Pixels that were read, in the same way."""
    values = pixels / (np.iinfo(pixels.dtype).max / 255)
    alpha = values[..., -1:] if values.shape[-1] % 2 == 0 else np.full_like(values[..., :1], 255)
    own = values[..., :-1] if values.shape[-1] % 2 == 0 else values
    return np.concatenate([np.repeat(own, 3, axis=-1) if own.shape[-1] == 1 else own, alpha], axis=-1)


def assert_same_colours(pixels: np.ndarray, wanted: np.ndarray, loss: float, what: str) -> None:
    got = as_colours(pixels)
    assert got.shape == wanted.shape, what
    # What is transparent has no colour.
    difference = np.abs(got - wanted) * np.concatenate([wanted[..., [3] * 3] / 255, np.ones_like(wanted[..., 3:])], -1)
    # Two ways from YCbCr to RGB round differently.
    assert difference.mean() <= loss or difference.max() <= 1, (what, difference.mean(), difference.max())


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_what_we_write_is_read(dtype, channels, tmp_path):
    assert_writes(Picture(noise(9, 7, channels, dtype=dtype)), tmp_path, "")


def assert_writes(picture: Picture, folder, what: str) -> None:
    """Both formats without loss give every pixel again, to us, to Pillow and to tifffile, metadata and all."""
    for ending in (".png", ".tif"):
        path = write_image(folder / f"out{ending}", picture)
        again = read_image(path)
        np.testing.assert_array_equal(again.pixels, picture.pixels, err_msg=what)
        assert again.pixels.dtype == picture.pixels.dtype, what
        if ending == ".tif" and picture.pixels.dtype == np.uint16 and picture.pixels.shape[-1] == 2:
            # Pillow does not know it.
            continue
        with Image.open(path) as image:
            image.load()
            assert image.size == picture.pixels.shape[1::-1], what
            # numpngw would add its own texts.
            assert ending != ".png" or not image.text, what
    written = tifffile.imread(path)
    np.testing.assert_array_equal(written.reshape(picture.pixels.shape), picture.pixels, err_msg=what)


# Pillow will do without IM.
@pytest.mark.filterwarnings("ignore:IM image format:DeprecationWarning")
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_in_every_container(mode, tmp_path):
    """And in every compression of TIFF."""
    Image.init()
    image, read, written = picture_of(mode), [], set()
    # Those of Pillow itself: another library may have added its own in this process.
    ways = [(name, None) for name, save in sorted(Image.SAVE.items()) if save.__module__.startswith("PIL.")]
    ways += [("TIFF", way) for way in ("tiff_lzw", "tiff_deflate", "packbits", "jpeg", "group4", "group3")]
    for container, compression in ways:
        try:
            data = encode(image, container, **({"compression": compression} if compression else {}))
        except (OSError, ValueError, KeyError, RuntimeError):
            # Pillow does not write this mode into it.
            continue
        what = f"{mode} in {container} {compression or ''}".strip()
        if container in NOT_READ:
            with pytest.raises(ValueError):
                read_image(data)
            continue
        with Image.open(io.BytesIO(data)) as opened:
            opened.load()
            inside = opened.mode
            deep, soft = mode in ("I", "F", "I;16", "I;16B"), what in ("LA in GIF", "RGBA in GIF")
            shallow = (deep and container in SHALLOW) or soft
            wanted = colours_of(opened if shallow or opened.size != image.size else image)
        if inside == "F" or (inside == "I" and container != "PPM"):
            with refused(UnreadableError, inside, "PIL"):
                read_image(data)
            continue
        read.append(container)
        picture = read_image(data)
        if container in ("BMP", "DIB") or (container == "PPM" and mode == "RGBA"):
            # They have no alpha.
            wanted[..., 3] = 255
        assert_same_colours(picture.pixels, wanted, 8 if compression == "jpeg" else LOSS.get(container, 0), what)
        # Once for each depth and kind of metadata: writing knows nothing of the container.
        beside = (picture.pixels.dtype, picture.pixels.shape[-1], *(part is None for part in picture[1:]))
        if beside not in written:
            assert_writes(picture, tmp_path, what)
        written.add(beside)
    assert "TIFF" in read or mode in ("HSV", "RGBa", "I", "F")
    assert read or mode == "F"


# How a TIFF of several channels can lie in its file.
LAYOUTS = [
    {"byteorder": order, "bigtiff": big, "compression": compression, "tile": tile, "predictor": predictor}
    for order, big, compression, tile, predictor in itertools.product(
        "<>", (False, True), (None, "adobe_deflate", "lzma"), (None, (16, 16)), (None, 2)
    )
    if compression or not predictor
]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("planar", [False, True])
def test_a_tiff_is_read_however_it_lies(planar, channels, dtype):
    pixels = noise(17, 19, channels, dtype=dtype)
    for layout in LAYOUTS:
        read = read_image(tiff(pixels, planar=planar, **layout)).pixels
        assert read.dtype == dtype, layout
        np.testing.assert_array_equal(read, pixels, err_msg=str(layout))


@pytest.mark.parametrize("planar", [False, True])
@pytest.mark.parametrize("channels", [2, 4])
def test_premultiplied_colours_of_16_bits_are_divided_by_their_alpha(channels, planar):
    pixels = noise(9, 7, channels, dtype=np.uint16)
    pixels[..., :-1] = pixels[..., :-1] % (pixels[..., -1:].astype(np.int64) + 1)
    read = read_image(tiff(pixels, planar=planar, extrasamples=["assocalpha"])).pixels
    wanted = np.rint(pixels[..., :-1] * (65535 / np.maximum(pixels[..., -1:], 1)))
    np.testing.assert_array_equal(read[..., :-1], wanted)
    np.testing.assert_array_equal(read[..., -1], pixels[..., -1])
    # Of what is beside colour and not alpha nothing is kept, and it is said.
    frames = read_frames(tiff(pixels, planar=planar, extrasamples=["unspecified"]))
    np.testing.assert_array_equal(frames.pictures[0].pixels, pixels[..., :-1])
    assert len(frames.lost) == 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pixels_of_16_bits_are_turned_upright(orientation):
    """As Pillow turns the upper 8 of them."""
    pixels = noise(9, 7, 3, dtype=np.uint16)
    tag = [(274, 3, 1, orientation, True)]
    small = Image.open(io.BytesIO(tiff((pixels >> 8).astype(np.uint8), extratags=tag)))
    wanted = np.asarray(ImageOps.exif_transpose(small))
    for planar in (False, True):
        picture = read_image(tiff(pixels, planar=planar, extratags=tag))
        np.testing.assert_array_equal(picture.pixels >> 8, wanted)
        assert 0x0112 not in picture.exif


# What has no grey or colour of a known range, or no compression that is known.
OTHERS = [
    ((4, 9, 7), np.uint16, {"photometric": "separated", "planarconfig": "separate"}),
    *(((9, 7, 3), dtype, {"photometric": "rgb"}) for dtype in (np.float32, np.uint32)),
    *(((9, 7), dtype, {}) for dtype in (np.float64, np.int8, np.complex64)),
    ((9, 7, 3), np.uint16, {"photometric": "cielab"}),
    ((3, 16, 16), np.uint8, {"volumetric": True, "tile": (16, 16, 16), "photometric": "minisblack"}),
]


@pytest.mark.parametrize(("shape", "dtype", "layout"), OTHERS)
def test_a_tiff_of_other_colours_is_refused(shape, dtype, layout):
    file = io.BytesIO()
    tifffile.imwrite(file, np.ones(shape, dtype), **layout)
    with refused(UnreadableError):
        read_image(file.getvalue())


def test_a_page_that_pillow_does_not_know_is_read_with_the_others():
    pages = [noise(9, 7, channels, dtype=dtype) for channels, dtype in [(3, np.uint8), (2, np.uint16), (1, np.uint8)]]
    data = tiff(*pages)
    for read, page in zip(read_frames(data).pictures, pages, strict=True):
        np.testing.assert_array_equal(read.pixels, page)
    with refused(DataError, "3"):
        read_image(data)
    with refused(DataError, "189"):
        read_frames(data, max_megapixels=1e-4)


def test_bits_that_are_not_read_are_said():
    """Of more than 8, of which Pillow gives 8."""
    values = noise(9, 7, 3, dtype=np.uint16).astype(">u2")
    # 16 bits for all three colours.
    bmp = b"BM" + struct.pack("<IIIIiiHHIIiiII", 62, 0, 54, 40, 2, 1, 1, 16, 0, 8, 0, 0, 0, 0) + b"\0" * 8
    for data, bits in (
        (tiff(noise(9, 7, 4, dtype=np.uint16), photometric="separated", extrasamples=None), 16),
        (bmp, 8),
        (b"P6 7 9 65535\n" + values.tobytes(), 16),
        (b"P6 7 9 1000\n" + (values % 1001).tobytes(), 10),
        (b"P6 7 9 255\n" + bytes(189), 8),
        (encode(noise(9, 7, 3), "SGI", bpc=2), 16),
        (encode(noise(9, 7, 3), "JPEG2000"), 8),
    ):
        frames = read_frames(data)
        assert frames.pictures[0].pixels.dtype == np.uint8
        lines = [line for line in frames.lost if "bits" in line]
        wanted = (1, True) if bits > 8 else (0, False)
        assert (len(lines), f" {bits} bits" in "".join(lines)) == wanted, data[:20]


@pytest.mark.parametrize("top", [300, 65535])
def test_a_pgm_of_16_bits_is_read_with_them(top):
    values = np.linspace(0, top, 30).astype(">u2").reshape(5, 6, 1)
    data = b"P5 6 5 %d\n" % top + values.tobytes()
    np.testing.assert_allclose(read_image(data).pixels, values * (65535 / top), atol=1)
    np.testing.assert_array_equal(image_to_pixels(Image.open(io.BytesIO(data))), read_image(data).pixels)


@pytest.mark.parametrize(("bits", "channels"), [(1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (8, 3), (16, 3)])
@pytest.mark.parametrize("place", [0, -1])
def test_a_colour_that_stands_for_transparency_is_alpha_at_every_depth(bits, channels, place):
    values = np.random.default_rng(0).integers(0, 2**bits, (6, 7, channels), np.uint16 if bits == 16 else np.uint8)
    values[0, 1] = 2**bits - 1 - values[0, 0]
    file, key, top = io.BytesIO(), values[place, place], np.iinfo(values.dtype).max
    depth, clear = (bits, int(key[0])) if channels == 1 else (None, tuple(map(int, key)))
    write_png(file, values[..., 0] if channels == 1 else values, bitdepth=depth, transparent=clear)
    wanted = np.concatenate([values * (top // (2**bits - 1)), top * (values != key).any(-1, keepdims=True)], axis=-1)
    np.testing.assert_array_equal(read_image(file.getvalue()).pixels, wanted)
    if bits < 16 or channels == 1:
        np.testing.assert_array_equal(image_to_pixels(Image.open(file)), wanted)


# How grey of more than 8 bits can lie in a TIFF that Pillow reads: bits, photometric interpretation, order of bytes.
@pytest.mark.parametrize(("bits", "photometric", "order"), [(12, 1, "<"), (16, 0, "<"), (16, 1, "<"), (16, 1, ">")])
@pytest.mark.parametrize("compression", [1, 8])
def test_grey_of_a_tiff_goes_from_black_to_white(compression, bits, photometric, order, tmp_path):
    top = 2**bits - 1
    values = np.random.default_rng(0).integers(0, top + 1, (2, 5, 7))
    values[:, 0, :2] = 0, top
    wanted = np.rint(values * (65535 / top))
    wanted = 65535 - wanted if photometric == 0 else wanted
    form = {"bits": bits, "photometric": photometric, "order": order, "compression": compression}
    for count in (1, 2):
        pictures = read_frames(grey_tiff(*values[:count], **form)).pictures
        np.testing.assert_array_equal([picture.pixels[..., 0] for picture in pictures], wanted[:count])
    opened = Image.open(io.BytesIO(grey_tiff(*values, **form)))
    np.testing.assert_array_equal(image_to_pixels(opened)[..., 0], wanted[0])
    assert_writes(pictures[1], tmp_path, "")
    # Both are the white of the file.
    assert pictures[0].pixels[0, :2, 0].tolist() == ([65535, 0] if photometric == 0 else [0, 65535])


# Tags that say how pixels lie in the file they were read from, and one that nobody knows.
LAYOUT_TAGS = {254: 1, 258: 4, 262: 0, 266: 2, 277: 9, 278: 3, 284: 2, 317: 3, 320: (*range(768),), 338: 0, 65000: 7}


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("ending", [".tif", ".png", ".jpg", ".webp"])
def test_only_descriptive_tags_travel(ending, dtype, tmp_path):
    exif = Image.Exif()
    # How pixels lie is no description.
    for tag, value in {**LAYOUT_TAGS, 270: '{"shape": [16, 24, 3]}'}.items():
        exif[tag] = value
    exif[315], exif[33432] = "J\xf6rg M\xfcller", "\xa9 2024"
    exif.get_ifd(0x8769)[0xA434] = "J\xf6rg's lens"
    exif.get_ifd(0x8825)[2] = (52.0, 31.0, 12.5)
    pixels = np.full((16, 24, 3), (200, 100, 50), dtype) * dtype(np.iinfo(dtype).max // 255)
    path = write_image(tmp_path / f"a{ending}", Picture(pixels, exif, PROFILE, (300, 300)))
    read = read_image(path)
    assert np.abs(as_colours(read.pixels) - as_colours(pixels)).max() <= 3
    # What a TIFF has of its own is right.
    assert not {tag for tag, value in LAYOUT_TAGS.items() if read.exif.get(tag) == value} - {317}
    assert (read.exif[315], read.exif[33432]) == ("J\xf6rg M\xfcller", "\xa9 2024") and 270 not in read.exif
    assert read.exif.get_ifd(0x8769)[0xA434] == "J\xf6rg's lens" and read.icc_profile == PROFILE
    assert [float(part) for part in read.exif.get_ifd(0x8825)[2]] == [52.0, 31.0, 12.5]
    assert read.dpi[0] == pytest.approx(300, abs=0.1)
    assert exif[262] == 0, "what was given is not changed"


def test_a_tiff_has_strips_its_tags_and_the_orientation_of_its_xmp(tmp_path):
    exif = Image.Exif()
    exif[700] = b'<rdf:Description tiff:Orientation="6"/>'
    pixels = noise(700, 300, 3, dtype=np.uint16)
    path = write_image(tmp_path / "a.tif", Picture(pixels, exif, dpi=(72, 72)))
    with tifffile.TiffFile(path) as file:
        page = file.pages[0]
        assert (len(page.dataoffsets), page.predictor) == (5, 2)
        assert page.tags[700].value == b'<rdf:Description tiff:Orientation="1"/>'
        np.testing.assert_array_equal(page.asarray(), pixels)
    assert path.stat().st_size < pixels.nbytes * 1.01
    assert read_image(write_image(tmp_path / "b.tif", Picture(pixels))).dpi is None


# Values that a damaged or careless file may have in place of a text, of bytes or of a number.
ODD = (3, -3, 70000, 2**40, 1.5, IFDRational(1, 3), IFDRational(0, 0), "text", "", b"", b"x", (1, 2), (1.5, 2.0))


@pytest.mark.filterwarnings("ignore:Metadata Warning")
@pytest.mark.parametrize("value", [*ODD, ("a", "b"), (b"a", b"b"), (), float("nan"), ({"no": "date"},)], ids=repr)
@pytest.mark.parametrize("tag", [306, 700, 18246, 33723, 40091])
def test_a_tag_of_another_kind_never_costs_the_picture(tag, value, tmp_path):
    exif = Image.Exif()
    exif[tag] = value
    pixels = noise(4, 5, 3)
    tags = []
    for ending in (".tif", ".png"):
        read = read_image(write_image(tmp_path / f"a{ending}", Picture(pixels, exif)))
        np.testing.assert_array_equal(read.pixels, pixels)
        tags.append(repr((read.exif or {}).get(tag)))
    assert tags[0] == tags[1]


@pytest.mark.parametrize("pages", [1, 3])
def test_pages_that_lead_back_to_an_earlier_one_end(tmp_path, pages):
    tifffile.imwrite(tmp_path / "a.tiff", np.zeros((pages, 8, 9), np.uint8), photometric="minisblack")
    data = bytearray((tmp_path / "a.tiff").read_bytes())
    with tifffile.TiffFile(tmp_path / "a.tiff") as file:
        first, last = file.pages[0].offset, file.pages[pages - 1].aspage()
        end = last.offset + 2 + 12 * len(last.tags)
    data[end : end + 4] = first.to_bytes(4, "little")
    assert len(read_tiff(bytes(data), lambda pixels: None)[0]) == pages
