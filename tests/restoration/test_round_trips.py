"""Containers by modes, alpha and depth: past a network that changes nothing, every file comes back as it was."""

import itertools
import zlib

import numpngw
import numpy as np
import pytest
import torch
from PIL import Image, ImageOps, JpegImagePlugin

from hf_ext import released
from hf_ext.restoration.containers import is_lossless_webp
from hf_ext.restoration.encoding import DEFAULT, Encoding, encode_frames
from hf_ext.restoration.files import Frames, Picture, read_frames, read_image
from hf_ext.restoration.jobs import FORMATS, Job
from hf_ext.restoration.run import restore_files
from hf_ext.restoration.tiles import restore_image
from hf_ext.semanir import SemanIRForImageRestoration, SemanIRImageProcessor
from hf_ext.semanir.image_processing_semanir import from_unit, pixels_to_image, spread_colours
from tests.kit.pictures import chunk, encode, make_exif, noise
from tests.kit.restorers import tiny_restorer
from tests.restoration.tiff_testing import tiff

CHANNELS = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4}
# LA of 16 bits is read with 8, which is said; BMP as Pillow reads it has no alpha; a WebP is always RGB.
MODES = {"png": "L LA RGB RGBA", "bmp": "L RGB", "webp": "RGB RGBA", "moving.png": "L RGB RGBA"}
MODES |= {"tif": MODES["png"], "moving.webp": MODES["webp"], "moving.tif": MODES["moving.png"]}
ROWS = [(container, mode, 8) for container, modes in MODES.items() for mode in modes.split()]
ROWS += [(container, mode, 16) for container in ("png", "tif", "moving.tif") for mode in ("L", "RGB", "RGBA")]


def unchanging(channels: int = 3, scale: int = 1) -> SemanIRForImageRestoration:
    """A model whose correction is zero."""
    model = tiny_restorer(num_channels=channels, scale=scale, interpolated_base=scale > 1)
    with torch.no_grad():
        for parameter in model.reconstruction[-1].parameters():
            parameter.zero_()
    return model


@pytest.fixture(scope="module")
def models():
    return {channels: unchanging(channels) for channels in (1, 3)}


def pixels_of(mode: str, bits: int, seed: int = 0) -> np.ndarray:
    """Noise; of alpha a third is 0, with any colour below it, and a third is full."""
    dtype = np.uint8 if bits == 8 else np.uint16
    generator, top = np.random.default_rng(seed), np.iinfo(dtype).max
    pixels = generator.integers(0, top, (11, 9, CHANNELS[mode]), dtype=dtype, endpoint=True)
    if mode.endswith("A"):
        share = generator.integers(0, 3, (11, 9))
        pixels[..., -1] = np.where(share == 0, 0, np.where(share == 1, top, np.maximum(pixels[..., -1], 1)))
    return pixels


def write(path, parts: list[np.ndarray]) -> None:
    """By the libraries, not by ours."""
    if path.suffix == ".tif":
        path.write_bytes(tiff(*parts))
    elif parts[0].dtype == np.uint16:
        numpngw.write_png(str(path), parts[0])
    else:
        exact = {"lossless": True, "exact": True} if path.suffix == ".webp" else {}
        path.write_bytes(encode(parts[0], FORMATS[path.suffix], parts[1:], **exact))


def restored(model, source, out, encoding=DEFAULT, **options):
    """The result of a picture, and what was said of it."""
    said: list[str] = []
    jobs = [Job(source.name, source, out, out.suffix)]
    report = restore_files(model, jobs, encoding=encoding, say=said.append, **options)
    assert not report.failed, report.failed
    return read_frames(out), said


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("container", "mode", "bits"), ROWS)
def test_what_a_network_leaves_unchanged_comes_back_exactly(container, mode, bits, channels, models, tmp_path):
    parts = [pixels_of(mode, bits, seed) for seed in range(3 if container.startswith("moving") else 1)]
    source = tmp_path / f"in.{container}"
    write(source, parts)
    for strength in (1.0, 0.0):
        frames, said = restored(models[channels], source, tmp_path / f"{strength}.{container}", strength=strength)
        assert said == [] and len(frames.pictures) == len(parts)
        for picture, wanted in zip(frames.pictures, parts, strict=True):
            found = picture.pixels
            assert found.dtype == wanted.dtype
            if container == "moving.webp" and mode == "RGBA":
                # Pillow's encoder of animations has no word for colours that cannot be seen.
                seen = wanted[..., -1] > 0
                np.testing.assert_array_equal(found[..., -1], wanted[..., -1])
                found, wanted = found[seen], wanted[seen]
            np.testing.assert_array_equal(found, wanted)
        if container.endswith("webp"):
            assert is_lossless_webp((tmp_path / f"{strength}.{container}").read_bytes())


def other_kinds() -> dict[str, tuple[str, list[Image.Image], dict, int]]:
    """Ending, pictures of Pillow, options of writing, and how many things are said of the result."""
    colours, alpha = [[pixels_of(mode, 8, seed) for seed in range(3)] for mode in ("RGB", "RGBA")]
    hard = [pixels * [1, 1, 1, 0] // 64 * 85 + [0, 0, 0, 255] * (pixels[..., 3:] > 99) for pixels in alpha]
    rgb, rgba = Image.fromarray(colours[0]), Image.fromarray(hard[0].astype(np.uint8))
    grey = Image.fromarray(colours[0][..., 0])
    few = [Image.fromarray(pixels // 64 * 85).convert("RGB").quantize(64) for pixels in colours]
    kinds = {
        "palette": ("png", few[:1], {}, 0),
        "palette with alpha": ("png", few[:1], {"transparency": bytes(range(64))}, 0),
        "palette with one transparent colour": ("png", few[:1], {"transparency": 3}, 0),
        "grey with one transparent value": ("png", [grey], {"transparency": 7}, 0),
        "colours with one transparent": ("png", [rgb], {"transparency": tuple(colours[0][0, 0].tolist())}, 0),
        "one bit": ("png", [grey.convert("1")], {}, 0),
        "one bit by fax": ("tif", [grey.convert("1")], {"compression": "group4"}, 0),
        "CMYK": ("tif", [rgb.convert("CMYK")], {}, 1),
        "YCbCr": ("tif", [rgb.convert("YCbCr")], {}, 1),
        "moving palette": ("gif", few, {}, 0),
        "moving with holes": ("gif", [Image.fromarray(part.astype(np.uint8)) for part in hard], {"disposal": 2}, 0),
        "picture before its frames": ("png", [rgb, *map(Image.fromarray, colours[1:])], {"default_image": True}, 0),
        "pages of other kinds": ("tif", [grey, rgb.resize((5, 7)), grey.convert("1"), rgba], {}, 0),
    }
    for orientation, ending in itertools.product(range(1, 9), ("png", "tif", "webp")):
        options = {"exif": make_exif({0x0112: orientation}), **({"lossless": True} if ending == "webp" else {})}
        kinds[f"{ending} held {orientation}"] = (ending, [rgb], options, 0)
    return kinds


@pytest.mark.parametrize("kind", other_kinds())
def test_other_kinds_come_back_as_pillow_shows_them(kind, models, tmp_path):
    ending, images, options, said_of_it = other_kinds()[kind]
    source, out = tmp_path / f"a.{ending}", tmp_path / f"b.{ending}"
    source.write_bytes(encode(images[0], FORMATS[source.suffix], images[1:], **options))
    frames, said = restored(models[3], source, out)
    assert len(said) == said_of_it and len(frames.pictures) == len(images)
    with Image.open(source) as shown:
        for number, picture in enumerate(frames.pictures):
            shown.seek(number)
            wanted = np.asarray(ImageOps.exif_transpose(shown).convert("RGBA"))
            found = np.asarray(pixels_to_image(picture.pixels).convert("RGBA"))
            np.testing.assert_array_equal(found[..., 3], wanted[..., 3])
            np.testing.assert_array_equal(found[found[..., 3] > 0], wanted[found[..., 3] > 0])


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
def test_jpegs_of_all_modes_and_phones_come_back_nearly(mode, models, tmp_path):
    """The first of a phone's several pictures is the picture."""
    first, second = (Image.fromarray(np.full((24, 17, 3), shade, np.uint8)).convert(mode) for shade in (90, 200))
    for format, more in (("JPEG", []), ("MPO", [second])):
        (tmp_path / "a.jpg").write_bytes(encode(first, format, more))
        frames, said = restored(models[3], tmp_path / "a.jpg", tmp_path / f"{format}.jpg")
        assert len(frames.pictures) == 1
        assert len(said) == (mode == "CMYK") + (format == "MPO")
        assert np.abs(frames.pictures[0].pixels.astype(int) - 90).max() <= 3


def test_webp_has_a_loss_where_the_input_had_or_a_quality_is_asked_for(models, tmp_path):
    for was_lossless, other in ((False, Encoding(lossless=True)), (True, Encoding(quality=90))):
        Image.fromarray(pixels_of("RGB", 8)).save(tmp_path / "in.webp", quality=90, lossless=was_lossless)
        for encoding in (DEFAULT, other):
            restored(models[3], tmp_path / "in.webp", tmp_path / "out.webp", encoding)
            assert is_lossless_webp((tmp_path / "out.webp").read_bytes()) is (was_lossless == (encoding == DEFAULT))
            (tmp_path / "out.webp").unlink()


CHUNKS = [
    (chunk(b"gAMA", (100_000).to_bytes(4)) + chunk(b"cHRM", bytes(range(32))), True),
    (chunk(b"cICP", b"\x09\x10\x00\x01"), True),
    (chunk(b"sRGB", b"\0") + chunk(b"gAMA", (45455).to_bytes(4)), False),
]


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(("chunks", "other"), CHUNKS)
def test_chunks_of_colour_are_kept_and_said_where_they_cannot_be(chunks, other, bits, models, tmp_path):
    write(tmp_path / "in.png", [pixels_of("RGB", bits)])
    data = (tmp_path / "in.png").read_bytes()
    (tmp_path / "in.png").write_bytes(data[:33] + chunks + chunk(b"zzZz", b"a\0b") + data[33:])
    frames, said = restored(models[3], tmp_path / "in.png", tmp_path / "out.png")
    written = (tmp_path / "out.png").read_bytes()
    assert written.count(chunks) == 1 and written.index(chunks) < written.index(b"IDAT")
    assert said == ["in.png: chunks of the PNG were left out: zzZz"]
    np.testing.assert_array_equal(frames.pictures[0].pixels, pixels_of("RGB", bits))
    _, said = restored(models[3], tmp_path / "in.png", tmp_path / "out.bmp")
    # That of 16 bits names its program, too.
    assert len(said) == 1 + other + 2 * (bits == 16)


@pytest.mark.parametrize("bits", [8, 16])
def test_texts_of_a_png_are_kept_and_said_where_they_cannot_be(bits, models, tmp_path):
    write(tmp_path / "in.png", [pixels_of("RGB", bits)])
    data = (tmp_path / "in.png").read_bytes()
    texts = chunk(b"tEXt", b"parameters\0a cat, steps: 20") + chunk(b"zTXt", b"more\0\0" + zlib.compress(b"x" * 99))
    xmp = chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0<x tiff:Orientation='6'/>")
    late = chunk(b"tEXt", b"late\0behind the pixels" + bytes(2 << 20))
    # Readers pass over what is damaged there; in front of the pixels they would not.
    damaged = chunk(b"tEXt", b"lost\0in between")[:-1] + b"\0"
    (tmp_path / "in.png").write_bytes(data[:33] + texts + xmp + data[33:-12] + late + damaged + data[-12:])
    _, said = restored(models[3], tmp_path / "in.png", tmp_path / "out.png")
    written = (tmp_path / "out.png").read_bytes()
    assert written.count(texts) == written.count(late) == written.count(b"XML:com.adobe.xmp") == 1
    assert ["damaged" in line for line in said] == [True]
    assert b"in between" not in written
    with Image.open(tmp_path / "out.png") as image:
        assert image.text.items() >= {"parameters": "a cat, steps: 20", "more": "x" * 99}.items()
    _, said = restored(models[3], tmp_path / "in.png", tmp_path / "out.jpg")
    assert any("texts" in text for text in said) and len(said) == 2 + (bits == 16)


@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_a_jpeg_keeps_its_subsampling_and_gets_the_quality_asked_for(subsampling, models, tmp_path):
    Image.fromarray(pixels_of("RGB", 8)).save(tmp_path / "in.jpg", subsampling=subsampling)
    sizes = []
    for quality in (None, 40):
        out = tmp_path / f"{quality}.jpg"
        restored(models[3], tmp_path / "in.jpg", out, Encoding(quality=quality))
        with Image.open(out) as image:
            assert JpegImagePlugin.get_sampling(image) == subsampling
            sizes.append(sum(image.quantization[0]))
    assert sizes[1] > 3 * sizes[0]


@pytest.mark.parametrize("mode", ["LA", "RGBA"])
@pytest.mark.parametrize("format", ["JPEG", "BMP"])
@pytest.mark.parametrize("background", [(255, 255, 255), (16, 32, 48)])
def test_transparency_is_composed_where_there_is_none(format, mode, background):
    pixels, said = np.repeat(np.repeat(pixels_of(mode, 8)[:1, :3], 16, 0), 16, 1), []
    pixels[:, :16, -1], pixels[:, 16:32, -1], pixels[:, 32:, -1] = 0, 255, 102
    data = encode_frames(Frames([Picture(pixels)]), format, Encoding(quality=100, background=background), said.append)
    found = read_image(data).pixels.astype(int)
    colours, alpha = pixels[..., :-1].astype(float), pixels[..., -1:] / 255
    wanted = colours * alpha + np.array(background) * (1 - alpha)
    wanted = wanted if found.shape[-1] == 3 else wanted[..., :1]
    assert np.abs(found - wanted).max() <= (2 if format == "JPEG" else 0.5)
    assert len(said) == 1
    # Where nothing is transparent nothing is said.
    pixels[..., -1] = 255
    encode_frames(Frames([Picture(pixels)]), format, Encoding(background=background), said.append)
    assert len(said) == 1


@pytest.mark.parametrize("way", ["restore_image", "processor"])
@pytest.mark.parametrize("scale", [1, 2])
def test_hidden_colours_do_not_reach_the_network(way, scale):
    rows, columns = np.mgrid[:24, :31]
    inside = ((rows - 11) ** 2 + (columns - 14) ** 2 < 70)[..., None]
    # A white disc on hidden black.
    model, pixels = unchanging(scale=scale), np.concatenate([np.where(inside, 255, 0)] * 4, axis=-1).astype(np.uint8)
    if way == "processor":
        processor, image = SemanIRImageProcessor(), Image.fromarray(pixels)
        with torch.no_grad():
            outputs = model(**processor(image, return_tensors="pt"))
        found = processor.post_process_image_restoration(outputs, images=image, output_type="np")[0]
    else:
        found = restore_image(model, pixels)
    seen = found[..., -1] > 0
    assert found[seen][:, :3].min() == 255
    if scale == 1:
        np.testing.assert_array_equal(found, pixels)
    else:
        # In floats: of 8 bits Pillow clips rows before it makes columns of them.
        alpha = Image.fromarray(pixels[..., -1].astype(np.float32)).resize((62, 48), Image.Resampling.BICUBIC)
        assert np.abs(found[..., -1] - np.asarray(alpha).clip(0, 255)).max() <= 0.51


def paint_disc(side: int, soft: float, hidden: int) -> np.ndarray:
    """White on black of little alpha, as floats; the edge is so many 128ths of a side wide."""
    rows, columns = np.mgrid[:side, :side] + 0.5
    alpha = np.clip((side / 3 - np.hypot(rows - side / 2, columns - side / 2)) * 64 / side / soft + 0.5, 0, 1)
    return np.stack([*[alpha > hidden / 255] * 3, np.maximum(alpha, hidden / 255)], axis=-1).astype(np.float32)


@pytest.fixture(scope="module")
def enlarger() -> SemanIRForImageRestoration:
    return SemanIRForImageRestoration.from_pretrained(released("super-resolution-x2")).eval()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("soft", [1, 4])
@pytest.mark.parametrize("hidden", [0, 1, 2, 3, 6, 16])
def test_colours_that_can_hardly_be_seen_darken_no_edge(enlarger, hidden, soft, dtype):
    """Nearly as near to the same drawing of twice the size as Pillow, which weighs colours by alpha."""
    given, wanted, top = paint_disc(48, soft, hidden), paint_disc(96, soft, hidden), np.iinfo(dtype).max
    weighed = np.concatenate([given[..., :3] * given[..., 3:], given[..., 3:]], axis=-1)
    planes = [Image.fromarray(np.ascontiguousarray(plane)) for plane in np.moveaxis(weighed, -1, 0)]
    pillow = np.stack([plane.resize((96, 96), Image.Resampling.BICUBIC) for plane in planes], axis=-1).clip(0, 1)
    found = restore_image(enlarger, np.rint(given * top).astype(dtype)) / top
    found[..., :3] *= found[..., 3:]
    wanted[..., :3] *= wanted[..., 3:]
    for light in (0, 1):
        errors = [(picture[..., :3] + light * (1 - picture[..., 3:]))[..., 0] for picture in (found, pillow, wanted)]
        ours, theirs = (255 * np.sqrt(np.mean((picture - errors[2]) ** 2)) for picture in errors[:2])
        assert ours < theirs + 0.2 + hidden / 25, light


ROWS_48, COLUMNS_48 = np.mgrid[:48, :48]
FROM_MIDDLE = np.hypot(ROWS_48 - 23.5, COLUMNS_48 - 23.5)
# Alpha, and how much of a level may change over black.
SOFT_ALPHA = {
    "opaque": (np.full((48, 48), 255), 0),
    "half": (np.full((48, 48), 128), 0),
    "faint everywhere": (np.full((48, 48), 5), 0),
    "panes": (np.array([255, 128, 64, 22])[COLUMNS_48 // 12], 0),
    "faint panes": (np.array([20, 10, 5, 2])[ROWS_48 // 12], 0),
    "hard edge": (255 * (FROM_MIDDLE < 16), 0),
    "faint, far from others": (np.where(FROM_MIDDLE < 8, 255, 9 * (FROM_MIDDLE > 16)), 0),
    "smooth edge": (255 * np.clip(16.5 - FROM_MIDDLE, 0.1, 1), 0),
    "brush": (255 * np.exp(-((FROM_MIDDLE / 14) ** 2)), 0),
    "ramp": (255 * np.clip((20 - FROM_MIDDLE) / 8, 0, 1), 3),
}


@pytest.mark.parametrize("kind", SOFT_ALPHA)
def test_colours_that_can_be_seen_are_enlarged_as_they_are(kind, enlarger):
    (alpha, allowed), colours = SOFT_ALPHA[kind], noise(48, 48, 3) // 8 + 100
    alpha = np.rint(alpha).astype(np.uint8)[..., None]
    found = restore_image(enlarger, np.concatenate([colours, alpha], axis=-1))
    wanted = restore_image(enlarger, spread_colours(colours / np.float32(255), alpha > 0))
    seen = np.abs(found[..., :3] - from_unit(wanted).astype(float)) * found[..., 3:] / 255
    assert seen.max() <= allowed
