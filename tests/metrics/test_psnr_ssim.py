"""PSNR, SSIM and PSNR-B against scikit-image, against values worked out by hand, and as `evaluate` modules."""

import io
import json
import math
import os
import sys
from pathlib import Path

import evaluate
import numpy as np
import pytest
from PIL import Image
from skimage import data
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from hf_ext.metrics import PSNR, SSIM, PsnrB, metric_path
from hf_ext.metrics.images import luma
from hf_ext.metrics.psnr import psnr
from hf_ext.metrics.psnr_b import psnr_b
from hf_ext.metrics.ssim import ssim
from hf_ext.tasks.degradations import jpeg
from tests.kit import warm_python
from tests.kit.refusals import refused


def photograph_and_noisy(shape: tuple[int, int] = (61, 47)) -> tuple[np.ndarray, np.ndarray]:
    clean = data.astronaut()[: shape[0], 100 : 100 + shape[1]]
    noise = np.random.default_rng(0).normal(0.0, 20.0, clean.shape)
    return clean, np.clip(np.rint(clean + noise), 0, 255).astype(np.uint8)


def skimage_ssim(prediction: np.ndarray, reference: np.ndarray, channel_axis: int | None) -> float:
    # scikit-image averages over the windows that lie wholly inside, which is the valid region.
    options = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False, "data_range": 255.0}
    pair = (prediction.astype(np.float64), reference.astype(np.float64))
    return float(structural_similarity(*pair, channel_axis=channel_axis, **options))


@pytest.mark.parametrize(("channel", "border"), [("rgb", 0), ("rgb", 4), ("gray", 0), ("gray", 3)])
def test_colour_and_gray_agree_with_scikit_image(channel, border):
    clean, noisy = photograph_and_noisy()
    if channel == "gray":
        clean, noisy = clean[:, :, 1], noisy[:, :, 1]
    inside = (slice(border, clean.shape[0] - border), slice(border, clean.shape[1] - border))
    expected = peak_signal_noise_ratio(clean[inside], noisy[inside], data_range=255)
    assert psnr(noisy, clean, channel=channel, border=border) == pytest.approx(expected, abs=1e-10)
    expected = skimage_ssim(noisy[inside], clean[inside], channel_axis=2 if channel == "rgb" else None)
    for shape in (clean.shape, (*clean.shape[:2], -1)):
        pair = noisy.reshape(shape), clean.reshape(shape)
        assert ssim(*pair, channel=channel, border=border) == pytest.approx(expected, abs=1e-10)


def test_luma_agrees_with_scikit_image():
    from skimage.color import rgb2ycbcr

    clean, noisy = photograph_and_noisy()
    luma_clean, luma_noisy = rgb2ycbcr(clean)[:, :, 0], rgb2ycbcr(noisy)[:, :, 0]
    np.testing.assert_allclose(luma(clean.astype(np.float64))[:, :, 0], luma_clean, atol=1e-9)
    expected = peak_signal_noise_ratio(luma_clean, luma_noisy, data_range=255)
    assert psnr(noisy, clean, channel="y") == pytest.approx(expected, abs=1e-9)
    assert ssim(noisy, clean, channel="y") == pytest.approx(skimage_ssim(luma_noisy, luma_clean, None), abs=1e-9)


def test_scores_of_constant_errors_and_equal_images_are_those_of_their_formulas():
    clean = np.full((12, 13, 3), 100, dtype=np.uint8)
    assert psnr(clean + 5, clean, channel="rgb") == pytest.approx(20 * math.log10(255 / 5), abs=1e-12)
    # The luma of grey g is 16 + 219 g / 255.
    expected = 20 * math.log10(255 / (5 * 219 / 255))
    assert psnr(clean + 5, clean, channel="y") == pytest.approx(expected, abs=1e-9)
    # The SSIM of constant images is its luminance term.
    first, second = np.full((11, 11), 100, dtype=np.uint8), np.full((11, 11), 150, dtype=np.uint8)
    constant = (0.01 * 255) ** 2
    expected = (2 * 100 * 150 + constant) / (100**2 + 150**2 + constant)
    assert ssim(first, second, channel="gray") == pytest.approx(expected, abs=1e-9)
    # Equal images, and a border that is left out.
    clean, _ = photograph_and_noisy()
    spoiled = clean.copy()
    assert psnr(clean, clean, channel="rgb") == math.inf and ssim(clean, clean, channel="rgb") == pytest.approx(1.0)
    spoiled[:2], spoiled[:, -2:] = 255 - spoiled[:2], 255 - spoiled[:, -2:]
    assert psnr(spoiled, clean, channel="rgb", border=2) == math.inf
    assert psnr(spoiled, clean, channel="rgb", border=1) < 40


@pytest.mark.parametrize("white", [1.0, 255.0])
@pytest.mark.parametrize("metric", [psnr, ssim])
def test_floating_images_are_clipped_and_rounded_to_8_bits_first(metric, white):
    clean, noisy = photograph_and_noisy()
    # Less than half a level away from the stored value, and beyond white: rounding and clipping undo both.
    shifted = noisy + np.random.default_rng(1).uniform(-0.49, 0.49, noisy.shape)
    shifted[noisy == 255] = 300.0
    value = metric(shifted / 255 * white, clean / 255 * white, channel="rgb", data_range=white)
    assert value == metric(noisy, clean, channel="rgb")
    single = [(image / 255 * white).astype(np.float32) for image in (noisy, clean)]
    assert metric(*single, channel="rgb", data_range=white) == value


IMAGE = np.zeros((16, 16, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("prediction", "reference", "options", "error", "message"),
    [
        (IMAGE, IMAGE[:15], {}, ValueError, "same shape"),
        (IMAGE, IMAGE, {"channel": "Y"}, ValueError, "channel must be one of gray, rgb, y"),
        (IMAGE, IMAGE, {"channel": "gray"}, ValueError, "needs images with 1 channel"),
        (IMAGE[:, :, 0], IMAGE[:, :, 0], {"channel": "y"}, ValueError, "needs images with 3 channel"),
        (IMAGE, IMAGE, {"border": 8}, ValueError, "got 16x16 with border 8"),
        (IMAGE, IMAGE, {"border": 1.0}, TypeError, "whole number"),
        (IMAGE, IMAGE, {"data_range": 1.0}, ValueError, "data_range must be 255"),
        (IMAGE.astype(float), IMAGE.astype(float), {}, ValueError, "data_range must say"),
        (IMAGE.astype(float), IMAGE + 200.0, {"data_range": 1.0}, ValueError, "values from 200.0 to 200.0"),
        (IMAGE + np.nan, IMAGE, {"data_range": 255}, ValueError, "NaN"),
        (IMAGE.astype(np.uint16), IMAGE, {}, TypeError, "uint8 or floating"),
        (IMAGE.tolist(), IMAGE, {}, TypeError, "numpy array, got list"),
        (IMAGE[0, 0], IMAGE[0, 0], {}, ValueError, r"\[height, width\]"),
    ],
)
@pytest.mark.parametrize("metric", [psnr, ssim])
def test_what_makes_no_sense_is_refused(metric, prediction, reference, options, error, message):
    with pytest.raises(error, match=message):
        metric(prediction, reference, **{"channel": "rgb", **options})


def test_borders_that_leave_no_window_or_cut_blocks_are_refused():
    for metric, side, border, *facts in ((ssim, 16, 3, "11x11"), (psnr_b, 40, 4, "multiple"), (psnr_b, 40, 16, "9x9")):
        image = np.zeros((side, side), np.uint8)
        with refused(ValueError, "border", *facts):
            metric(image, image, channel="gray", border=border)


def test_a_step_at_the_block_boundary_has_the_value_of_the_formula():
    # Two blocks side by side, 10 levels apart, over a flat 105: error 25 everywhere.
    blocky, clean = np.full((16, 16), 100, np.uint8), np.full((16, 16), 105, np.uint8)
    blocky[:, 8:] = 110
    # Of the 32 pairs across a boundary, 16 in each direction, half differ by 10; of the others none.
    factor = 3 / 4 * (16 * 100 / 32)
    assert psnr_b(blocky, clean, channel="gray") == pytest.approx(10 * math.log10(255**2 / (25 + factor)), abs=1e-12)


def test_the_blocking_is_that_of_the_prediction_and_on_the_grid():
    smooth = np.tile(np.arange(100, 124, dtype=np.uint8), (17, 1))
    for prediction in (smooth, np.roll(smooth, 3, axis=1)[:, 4:]):
        reference = np.full_like(prediction, 110)
        assert psnr_b(prediction, reference, channel="gray") == psnr(prediction, reference, channel="gray")
    blocky, flat = np.full((16, 24), 100, np.uint8), np.full((16, 24), 120, np.uint8)
    blocky[:, 8:16] = 140
    assert psnr_b(blocky, flat, channel="gray") < psnr(blocky, flat, channel="gray")
    assert psnr_b(flat, blocky, channel="gray") == psnr(flat, blocky, channel="gray")
    assert psnr_b(smooth, smooth, channel="gray") == math.inf


def test_colour_has_the_error_of_its_channels_and_the_blocking_of_its_luma():
    clean = data.astronaut()[40:104, 180:252]
    compressed = jpeg(clean, 10)
    seen = luma(compressed.astype(np.float64))[..., 0]
    sums, counts = {True: 0.0, False: 0.0}, {True: 0, False: 0}
    for image in (seen, seen.T):
        for column in range(image.shape[1] - 1):
            sums[column % 8 == 7] += np.sum((image[:, column + 1] - image[:, column]) ** 2)
            counts[column % 8 == 7] += len(image)
    factor = math.log2(8) / math.log2(64) * (sums[True] / counts[True] - sums[False] / counts[False])
    error = np.mean((compressed.astype(np.float64) - clean) ** 2)
    assert factor > 0
    expected = 10 * math.log10(255**2 / (error + factor))
    assert psnr_b(compressed, clean, channel="rgb") == pytest.approx(expected, abs=1e-9)
    assert psnr_b(compressed / 255, clean / 255, channel="rgb", data_range=1.0) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("kind", "function"), [(PSNR, psnr), (SSIM, ssim), (PsnrB, psnr_b)])
def test_a_metric_object_gives_the_mean_and_each_value(kind, function, tmp_path):
    pairs = [photograph_and_noisy((30, 20)), photograph_and_noisy((21, 40))]
    metric, name = kind(cache_dir=str(tmp_path)), function.__name__
    values = [function(noisy, clean, channel="y") for clean, noisy in pairs]
    references, predictions = [clean for clean, _ in pairs], [noisy for _, noisy in pairs]
    result = metric.compute(predictions=predictions, references=references, channel="y")
    assert result == {name: np.mean(values), f"{name}_per_image": values}
    # Pixels count that a picture has, not those of the file that it was; a JPEG is compressed no second time.
    Image.fromarray(noisy := predictions[0]).save(tmp_path / "a.jpg")
    drawn = [Image.open(tmp_path / "a.jpg"), Image.open(io.BytesIO((tmp_path / "a.jpg").read_bytes()))]
    for picture, pixels in zip(drawn, (noisy, references[0]), strict=True):
        picture.paste(Image.fromarray(pixels))
    metric.add(prediction=drawn[0], reference=drawn[1])
    metric.add_batch(predictions=predictions[1:], references=references[1:])
    assert metric.compute(channel="y") == result
    if kind is PSNR:
        # One equal pair makes the mean infinite, and can be found.
        found = metric.compute(predictions=[predictions[0], references[1]], references=references, channel="y")
        assert found == {"psnr": math.inf, "psnr_per_image": [values[0], math.inf]}


@pytest.mark.parametrize("name", ["psnr", "ssim", "psnr_b"])
def test_the_usual_call_without_a_channel_says_what_is_missing(name, tmp_path):
    clean, noisy = photograph_and_noisy()
    metric = evaluate.load(metric_path(name), cache_dir=str(tmp_path))
    with refused(ValueError, name, "rgb", "y"):
        metric.compute(predictions=[noisy], references=[clean])
    # The call that its description shows; a call that was refused holds its file, for which the next waits a second.
    metric = evaluate.load(metric_path(name), cache_dir=str(tmp_path / "other"))
    assert 'channel="rgb")' in metric.inputs_description
    assert math.isfinite(metric.compute(predictions=[noisy], references=[clean], channel="rgb")[name])
    assert Path(metric_path(name)).is_absolute()
    with refused(ValueError, "psnr, psnr_b, ssim", "lpips"):
        metric_path("lpips")


@pytest.mark.parametrize(
    ("image", "error", "message"),
    [
        (IMAGE.astype(np.uint16), TypeError, "an array of uint16"),
        (IMAGE / 255.0, TypeError, "an array of float64"),
        ("picture.png", TypeError, "got str"),
        (IMAGE[:, :, :1], ValueError, r"\[height, width, 3\]"),
        (Image.new("RGBA", (16, 16)), ValueError, "mode RGBA"),
    ],
)
def test_a_metric_object_refuses_what_evaluate_would_change(tmp_path, image, error, message):
    metric = PSNR(cache_dir=str(tmp_path))
    for images in ({"predictions": [IMAGE], "references": [image]}, {"predictions": [image], "references": [IMAGE]}):
        with pytest.raises(error, match=message):
            metric.compute(**images, channel="rgb")


LOAD_PROGRAM = """
import json, socket, sys

def refuse(*args, **kwargs):
    raise AssertionError(f"the network was used: {args}")

socket.socket.connect = socket.getaddrinfo = refuse
import evaluate
import numpy as np

first, second = np.random.default_rng(0).integers(256, size=(2, 6, 16, 16, 3), dtype=np.uint8)
pair = {"predictions": list(first), "references": list(second), "channel": "rgb"}
result = evaluate.combine([evaluate.load(path) for path in sys.argv[1:]]).compute(**pair)
assert "hf_ext" not in sys.modules
print(json.dumps(result))
"""


@pytest.mark.slow
def test_evaluate_loads_the_scripts_without_a_network(tmp_path):
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", LOAD_PROGRAM, *map(metric_path, ("psnr", "ssim", "psnr_b"))]
    done = warm_python.run(command, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"psnr", "ssim", "psnr_b"} <= found.keys()
    first, second = np.random.default_rng(0).integers(256, size=(2, 6, 16, 16, 3), dtype=np.uint8)
    expected = np.mean([psnr(*pair, channel="rgb") for pair in zip(first, second, strict=True)])
    assert found["psnr"] == pytest.approx(expected, rel=1e-9)
