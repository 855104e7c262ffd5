"""Options without effect are refused, and bits that Pillow drops are told."""

import contextlib
import io
import pickle
import struct
import zlib
from pathlib import Path

import datasets
import numpy as np
import pytest
import tifffile
from numpngw import write_png
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo, putchunk

from hf_ext.restoration.encoding import encode_frames
from hf_ext.restoration.files import read_frames
from hf_ext.restoration.jobs import check_template, plan_jobs
from hf_ext.restoration.pipeline import ImageRestorationPipeline
from hf_ext.restoration.records import Records
from hf_ext.restoration.run import restore_files
from hf_ext.semanir import SemanIRImageProcessor
from hf_ext.semanir.image_processing_semanir import to_unit
from hf_ext.semanir.pipeline_semanir import ImageRestorationPipeline as PlainPipeline
from hf_ext.tasks.restoration import SemanIRTask
from tests.kit.command_line import run
from tests.kit.refusals import refused
from tests.kit.restorers import tiny_restorer
from tests.restoration.tiff_testing import grey_tiff


@pytest.mark.parametrize("ending", ["png", "tif"])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_bits_that_pillow_drops_are_told_once_where_they_are_lost(tmp_path, caplog, ending, dtype):
    pixels = np.full((8, 8, 3), np.iinfo(dtype).max // 3, dtype)
    path = tmp_path / f"a.{ending}"
    write_png(str(path), pixels) if ending == "png" else tifffile.imwrite(path, pixels, photometric="rgb")
    model = tiny_restorer()
    ways = {
        "a file here": lambda: ImageRestorationPipeline(model).preprocess(str(path)),
        "a file elsewhere": lambda: PlainPipeline(model).preprocess(str(path)),
        "an image": lambda: ImageRestorationPipeline(model).preprocess(Image.open(path)),
        "an image of the processor": lambda: SemanIRImageProcessor()(Image.open(path), return_tensors="pt"),
    }
    for name, read in ways.items():
        caplog.clear()
        read()
        told = [record for record in caplog.records if "16 bits" in record.getMessage()]
        assert len(told) == (dtype is np.uint16 and name != "a file here"), name


def test_a_name_of_nothing_stops_no_other_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ["a.png", "b .png ", "c\u2028.png", "d\x0b.png"]
    for name in names:
        Image.new("L", (8, 8)).save(name, "PNG")
    Path("lines").write_text("\n".join([*names, "absent.png", "", "no*.png"]), encoding="utf-8")
    Path("zeros").write_text("\0".join([*names, "absent.png", ""]), encoding="utf-8")
    Path("holiday1").mkdir()
    plan = plan_jobs(["a.png", "holiday*"], "out")
    assert len(plan.jobs) == 1 and "holiday*/**/*" in plan.refused["holiday*"]
    for given in (["@lines"], ["@zeros"], [*names, "absent.png", "no*.png"]):
        plan = plan_jobs(given, "out")
        assert [str(job.source) for job in plan.jobs] == names
        assert [*plan.refused] == ["absent.png", "no*.png"][: 1 + ("@zeros" not in given)]


@pytest.mark.parametrize(
    "name", ["{stem.upper}", "{stem[0]}", "{0}", "{}", "{ext}", "a", "{stem", "{stem}/a", "{stem:{foo}}"]
)
def test_a_template_has_stem_and_ext_alone(name):
    with refused(ValueError, "{stem}"):
        check_template(name)


@pytest.mark.parametrize("words", [["--format", "webp"], ["--name", "{stem}_one"], ["--format", "webp", "--compare"]])
def test_results_beside_their_pictures_are_found_again(tmp_path, words):
    model, photos = tmp_path / "model", tmp_path / "photos"
    tiny_restorer().save_pretrained(model)
    photos.mkdir()
    for name in "ab":
        Image.new("L", (8, 8), 90).save(photos / f"{name}.png")
    again = ["restore", model, photos, "--out", photos, *words]
    run(*again)
    records = Records(photos, "", {})
    found = {path.name for path in photos.iterdir() if records.is_result(path)}
    assert found == {path.name for path in photos.iterdir()} - {"a.png", "b.png", "comparison.html", records.file.name}
    assert not any(map(Records(tmp_path, "", {}).is_result, photos.iterdir()))
    results = str(photos / ("*_one.png" if "{stem}_one" in words else "*.webp"))
    told = run("restore", model, results, "--out", photos, "--name", "{stem}_b", code=2).stderr
    assert "only results of earlier runs found in" in told and "name them, or give another folder" in told
    if "{stem}_one" in words:
        # One that was cut off is no picture of its own.
        (photos / "a_one.png").write_bytes((photos / "a_one.png").read_bytes()[:60])
        assert run(*again).stdout.startswith("1 restored")
    (photos / "b.webp").unlink(missing_ok=True)
    (photos / "b_one.png").unlink(missing_ok=True)
    Image.new("L", (8, 8), 9).save(photos / "c.png")
    assert run(*again).stdout.startswith(f"2 restored to {photos}")
    other = ["--name", "{stem}_two", *(["--compare"] if "--compare" in words else [])]
    assert run("restore", model, photos, "--out", photos, *other).stdout.startswith(f"3 restored to {photos}")
    if "--compare" in words:
        page = photos / "comparison.html"
        page.write_text("mine")
        Image.new("L", (8, 8), 5).save(photos / "d.png")
        assert "comparison.html" in run(*again, code=1).stderr and page.read_text() == "mine"


@pytest.mark.parametrize("orientation", [1, 2, 6])
@pytest.mark.parametrize("ending", ["png", "tif", "jpg"])
def test_a_mosaic_that_would_be_turned_is_refused(tmp_path, orientation, ending):
    model = tiny_restorer(num_channels=4, num_channels_out=3, scale=2, upsampler="pixelshuffle")
    path = tmp_path / f"a.{ending}"
    exif = Image.Exif()
    exif[274] = orientation
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 12), np.uint8)).save(path, exif=exif)
    for kind in (ImageRestorationPipeline, PlainPipeline):
        with Image.open(path) as image:
            for given in (str(path), image):
                with refused(ValueError, "orientation") if orientation > 1 else contextlib.nullcontext():
                    assert kind(model)(given).size == (12, 8)
    jobs = plan_jobs([str(path)], tmp_path / "out").jobs
    assert bool(restore_files(model, jobs).failed) == (orientation > 1)


@pytest.mark.parametrize("ending", ["gif", "webp", "tif", "png"])
def test_of_several_frames_none_is_taken_in_silence(tmp_path, ending):
    path, frames = tmp_path / f"a.{ending}", [Image.new("RGB", (8, 8), (value, 9, 9)) for value in (10, 200)]
    frames[0].save(path, save_all=True, append_images=frames[1:])
    for kind in (ImageRestorationPipeline, PlainPipeline):
        with refused(ValueError, "2 frames or pages"):
            kind(tiny_restorer())(str(path))


def test_a_drawing_with_layers_is_read_as_the_whole(tmp_path):
    layer = struct.pack(">4iHhI", 0, 0, 8, 8, 1, 0, 2) + b"8BIMnorm\xff\0\0\0" + struct.pack(">I12x", 12)
    layers = struct.pack(">h", 2) + 2 * layer + 2 * bytes(2 + 64)
    head = b"8BPS" + struct.pack(">H6xH2I2H", 1, 1, 8, 8, 8, 1) + bytes(8)
    info = struct.pack(">I", len(layers)) + layers
    (tmp_path / "a.psd").write_bytes(head + struct.pack(">I", len(info)) + info + bytes(2) + bytes([90]) * 64)
    for kind in (ImageRestorationPipeline, PlainPipeline):
        with Image.open(tmp_path / "a.psd") as image:
            assert image.n_frames == 2 and kind(tiny_restorer())(str(tmp_path / "a.psd")).size == image.size


@pytest.mark.parametrize(
    "given",
    [{"data_format": "channels_last"}, {"do_center_crop": True, "crop_size": 4}, {"do_normalize": True}]
    + [{"do_resize": True, "size": {"height": 4, "width": 4}}, {"size_divisor": 48}],
)
def test_an_option_that_the_processor_would_not_follow_is_refused(given):
    with refused(ValueError, next(iter(given))):
        SemanIRImageProcessor()(Image.new("RGB", (24, 24)), return_tensors="pt", **given)
    if "size_divisor" in given:
        with refused(ValueError, "size_divisor=None"):
            SemanIRImageProcessor(**given)(Image.new("RGB", (24, 24)), return_tensors="pt", size_divisor=None)


def test_what_a_tiff_or_png_tells_is_kept_or_told(tmp_path):
    geo = [(33550, "d", 3, (1.0, 1.0, 0.0), False), (42113, "s", 0, "0", False), (65000, "s", 0, "mine", False)]
    usual = [(tag, "B", 4, b"8BIM", False) for tag in (34377, 50341)]
    tifffile.imwrite(tmp_path / "b.tif", np.zeros((8, 8), np.uint8), extratags=usual)
    assert not read_frames(tmp_path / "b.tif").lost
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((8, 8), np.uint8), extratags=[*geo, *usual], subfiletype=1)
    lost = " ".join(read_frames(tmp_path / "a.tif").lost)
    assert all(word in lost for word in ("33550 (ModelPixelScale", "42113", "65000", "smaller copy"))
    texts, names = PngInfo(), ("Software", "Creation Time", "Source")
    for name in names:
        texts.add_text(name, f"of {name}")
    Image.new("L", (8, 8)).save(tmp_path / "a.png", pnginfo=texts)
    report = restore_files(tiny_restorer(), plan_jobs([str(tmp_path / "a.png")], tmp_path / "out").jobs)
    with Image.open(report.restored[0]) as image:
        assert [image.info[name] for name in names] == [f"of {name}" for name in names]


@pytest.mark.parametrize("loops", [True, False])
def test_an_animated_avif_is_played_as_often_as_before(tmp_path, loops, monkeypatch):
    # Other tests may have had pillow-heif open all that begins like a HEIF.
    monkeypatch.setattr(Image, "ID", [name for name in Image.ID if name != "HEIF"])
    path, frames = tmp_path / "a.avif", [Image.new("RGB", (16, 16), (value, 9, 9)) for value in (10, 200)]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=100)
    held = bytearray(path.read_bytes())
    held[held.index(b"elst") + 7] = loops
    path.write_bytes(held)
    assert read_frames(path).plays == (0 if loops else 1)
    # One that begins like a HEIF is read by what it holds.
    for brand in (b"mif1", b"msf1"):
        path.write_bytes(held[:8] + brand + held[12:])
        assert len(read_frames(path).pictures) == 2


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_colours_below_transparency_count_for_no_score(mode):
    task, alpha, pixels = SemanIRTask(), Image.new("L", (16, 16), 255), []
    alpha.paste(0, (0, 0, 8, 16))
    for hidden in ("black", "gray"):
        image = Image.linear_gradient("L").resize((16, 16)).convert(mode[:-1])
        image.paste(hidden, (0, 0, 8, 16))
        image.putalpha(alpha)
        pixels.append(task._pixels(image, "gaussian_noise"))
    assert np.array_equal(*pixels) and pixels[0][:, :8].min() == 255


def _grey_file(kind: str, orientation: int | None) -> bytes:
    """A ramp: grey of 12 bits, grey whose white is 0, or of a PNG of few bits with a transparent value."""
    ramp, tags = np.arange(256).reshape(16, 16), {} if orientation is None else {274: orientation}
    if kind.startswith("tif"):
        bits, photometric = {"tif12": (12, 1), "tif16 white": (16, 0), "tif16": (16, 1)}[kind]
        return grey_tiff(ramp * (2**bits // 256), bits=bits, photometric=photometric, tags=tags)
    bits, file = int(kind.removeprefix("png")), io.BytesIO()
    values = (ramp % 2**bits).astype(np.uint8)
    rows = np.packbits(np.unpackbits(values[..., None], axis=-1)[..., -bits:].reshape(16, -1), axis=-1)
    head = struct.pack(">II5B", 16, 16, bits, 0, 0, 0, 0)
    chunks = {b"IHDR": head, b"tRNS": b"\0\1", b"IDAT": zlib.compress(np.pad(rows, ((0, 0), (1, 0))).tobytes())}
    if orientation:
        exif = Image.Exif()
        exif[274] = orientation
        chunks = {b"IHDR": head, b"eXIf": exif.tobytes().removeprefix(b"Exif\0\0"), **chunks}
    file.write(b"\x89PNG\r\n\x1a\n")
    for name, content in {**chunks, b"IEND": b""}.items():
        putchunk(file, name, content)
    return file.getvalue()


@pytest.mark.parametrize("orientation", [None, 1, 6])
@pytest.mark.parametrize("kind", ["tif12", "tif16", "tif16 white", "png2", "png4"])
def test_a_copy_of_an_opened_picture_is_read_as_its_file(kind, orientation):
    data = _grey_file(kind, orientation)
    held = {"path": None, "bytes": data}
    pipe, wanted = ImageRestorationPipeline(tiny_restorer()), read_frames(data).pictures[0].pixels
    on_white = np.where(wanted[..., 1:] == 0, 255, wanted[..., :1]) if wanted.shape[-1] == 2 else wanted
    ways = {
        "opened": lambda: Image.open(io.BytesIO(data)),
        "copied": lambda: ImageOps.exif_transpose(Image.open(io.BytesIO(data))),
        "pickled": lambda: pickle.loads(pickle.dumps(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))),
        "cropped": lambda: ImageOps.exif_transpose(Image.open(io.BytesIO(data))).crop((0, 0, 16, 16)),
        "of a data set": lambda: datasets.Image().decode_example(held),
    }
    for name, read in ways.items():
        image = read()
        image.load()
        assert np.array_equal(pipe.preprocess(read())["pixels"], wanted), name
        assert np.array_equal(pipe.preprocess(image)["pixels"], wanted), name
        trained = SemanIRTask(), SemanIRTask()
        for task, given in zip(trained, (read(), image), strict=True):
            task.config.num_channels = task.config.num_channels_out = 1
            pixels = task._pixels(ImageOps.exif_transpose(given), "gaussian_noise")
            np.testing.assert_allclose(to_unit(pixels), to_unit(on_white), atol=1e-6, err_msg=name)


@pytest.mark.parametrize("format", ["TIFF", "JPEG", "PNG", "WEBP", "deep PNG", "pages of a TIFF"])
@pytest.mark.parametrize("order", ["<", ">"])
def test_what_goes_by_the_order_of_bytes_keeps_it(tmp_path, format, order):
    note = b"UNICODE\0" + "Grüße".encode("utf-16-le" if order == "<" else "utf-16-be")
    exif = Image.Exif()
    exif.endian, exif[271] = order, "Canon"
    exif.get_ifd(0x8769).update({0x9286: note, 0x927C: struct.pack(f"{order}HI", 1, 2), 0x9204: 0.5})
    Image.linear_gradient("L").convert("RGB").save(tmp_path / "a.jpg", exif=exif)
    frames = read_frames(tmp_path / "a.jpg")
    if format == "deep PNG":
        frames = frames._replace(
            pictures=[frames.pictures[0]._replace(pixels=frames.pictures[0].pixels * np.uint16(257))]
        )
    frames = frames._replace(pictures=frames.pictures * (2 if "pages" in format else 1))
    with Image.open(io.BytesIO(encode_frames(frames, format.split()[-1]))) as image:
        image.seek(getattr(image, "n_frames", 1) - 1)
        read = image.getexif()
        found = read.get_ifd(0x8769)
        assert (read.endian, found[0x9286], found[0x927C]) == (order, note, struct.pack(f"{order}HI", 1, 2))
        assert (read[271], found[0x9204]) == ("Canon", 0.5)
        if format not in ("JPEG", "WEBP"):
            assert np.array_equal(np.asarray(image), read_frames(tmp_path / "a.jpg").pictures[0].pixels)


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("zero", [0, 32768])
def test_a_fits_is_read_as_it_is_or_refused(tmp_path, bits, zero):
    cards = {"SIMPLE": "T", "BITPIX": bits, "NAXIS": 2, "NAXIS1": 16, "NAXIS2": 16, "BZERO": zero}
    head = "".join(f"{name:8}= {value:>20}".ljust(80) for name, value in cards.items()) + "END"
    values = np.arange(256).reshape(16, 16).astype(f">i{bits // 8}" if bits > 8 else np.uint8)
    path = tmp_path / "a.fits"
    path.write_bytes(head.ljust(2880).encode() + values[::-1].tobytes().ljust(2880, b"\0"))
    task, model = SemanIRTask(), tiny_restorer()
    ways = [
        lambda: read_frames(path).pictures[0].pixels,
        lambda: PlainPipeline(model).preprocess(Image.open(path))["pixels"],
        lambda: task._pixels(Image.open(path), "gaussian_noise"),
    ]
    for number, read in enumerate(ways[: 2 if bits == 32 else 3]):
        with (
            refused(ValueError, "FITS" if (bits, number) == (16, 0) else "mode")
            if bits > 8
            else contextlib.nullcontext()
        ):
            assert np.array_equal(read()[..., 0], values)


@pytest.mark.parametrize(
    ("format", "bits"), [("JPEG2000", 10), ("JPEG2000", 12), ("JPEG2000", 16), ("HEIF", 10), ("HEIF", 12)]
)
def test_white_of_any_bits_is_white(format, bits, monkeypatch):
    ramp = np.linspace(0, 2**bits - 1, 64).round().astype(np.int64)
    values, file = np.tile(ramp, (64, 1)), io.BytesIO()
    if format == "HEIF":
        heif = pytest.importorskip("pillow_heif")
        monkeypatch.setattr(heif.options, "SAVE_HDR_TO_12_BIT", bits == 12)
        deep = np.repeat((values << (16 - bits)).astype(np.uint16)[..., None], 3, axis=-1)
        coded = heif.from_bytes(mode="RGB;16", size=(64, 64), data=deep.tobytes())
        coded.save(file, quality=-1, matrix_coefficients=0, chroma=444)
    else:
        # Of the same code, with other bits in its header, the middle is at another value.
        coded = Image.fromarray((values - 2 ** (bits - 1) + 32768).astype(np.uint16))
        coded.save(file, "JPEG2000", irreversible=False, no_jp2=True)
        file.getbuffer()[file.getvalue().index(b"\xff\x4f\xff\x51") + 42] = bits - 1
    pixels = read_frames(file.getvalue()).pictures[0].pixels
    wanted = np.rint(values * (65535 / (2**bits - 1)))
    assert np.abs(pixels - wanted[..., None]).max() <= (0 if format == "JPEG2000" else 65535 / 2**bits)
    assert (pixels.min(), pixels.max()) == (0, 65535)


@pytest.mark.parametrize("orientation", [None, 1, 3, 6])
@pytest.mark.parametrize("kind", ["jpg", "png", "tif", "webp", "planes", "deep tif", "no unit", "planes, no unit"])
def test_the_resolution_turns_with_the_picture(tmp_path, kind, orientation):
    path = tmp_path / f"a.{kind if len(kind) <= 4 else 'tif'}"
    exif = Image.Exif()
    exif.update({282: 204.0, 283: 98.0, 296: 2} | ({274: orientation} if orientation else {}))
    if kind in ("jpg", "png", "tif", "webp"):
        Image.new("RGB", (12, 8)).save(path, dpi=(204, 98), exif=exif)
    else:
        pixels = np.zeros((8, 12, 3), np.uint8 if kind == "no unit" else np.uint16)
        layout = {"planarconfig": "separate"} if "planes" in kind else {}
        pixels = np.moveaxis(pixels, -1, 0) if layout else pixels
        tags = [(274, 3, 1, orientation, True)] if orientation else []
        unit = 1 if "unit" in kind else 2
        tifffile.imwrite(
            path, pixels, photometric="rgb", resolution=(204, 98), resolutionunit=unit, extratags=tags, **layout
        )
    picture, lost = read_frames(path).pictures[0], read_frames(path).lost
    if "unit" in kind:
        assert (picture.dpi, lost) == (None, ("its pixels are not square, which was left out: 204 : 98",))
        return
    turned = orientation == 6
    assert picture.pixels.shape[:2] == ((12, 8) if turned else (8, 12)) and not lost
    np.testing.assert_allclose([*map(float, picture.dpi)], (98, 204) if turned else (204, 98), rtol=1e-3)


def test_a_raw_file_keeps_its_resolution(tmp_path):
    pytest.importorskip("rawpy")
    black = {
        tag: (tag, kind, count, value, True)
        for tag, kind, count, value in (
            (50706, 1, 4, b"\1\4\0\0"),
            (50707, 1, 4, b"\1\1\0\0"),
            (274, 3, 1, 6),
            (50778, 3, 1, 21),
            (33421, 3, 2, (2, 2)),
            (33422, 1, 4, b"\0\1\1\2"),
            (50721, 10, 9, (1, 1, 0, 1, 0, 1, 0, 1, 1, 1, 0, 1, 0, 1, 0, 1, 1, 1)),
        )
    }
    cells = np.full((128, 160), 3000, np.uint16)
    tifffile.imwrite(
        tmp_path / "a.dng",
        cells,
        photometric=32803,
        extratags=[*black.values()],
        resolution=(300, 200),
        resolutionunit=2,
        metadata=None,
    )
    picture = read_frames(tmp_path / "a.dng").pictures[0]
    assert picture.pixels.shape[0] > picture.pixels.shape[1] and picture.dpi == (200, 300)
