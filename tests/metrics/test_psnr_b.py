"""PSNR-B against values worked out by hand, against PSNR where nothing is blocky, and as a metric object."""

import math

import numpy as np
import pytest
from skimage import data

from hf_ext.metrics import PsnrB
from hf_ext.metrics.images import luma
from hf_ext.metrics.psnr import psnr
from hf_ext.metrics.psnr_b import psnr_b
from hf_ext.tasks.degradations import jpeg
from tests.kit.refusals import refused


def test_a_step_at_the_block_boundary_has_the_value_of_the_formula():
    # Two blocks side by side, 10 levels apart, over a flat 105: error 25 everywhere.
    blocky = np.full((16, 16), 100, np.uint8)
    blocky[:, 8:] = 110
    clean = np.full((16, 16), 105, np.uint8)
    # Of the 32 pairs across a boundary, 16 in each direction, half differ by 10; of the others none.
    factor = 3 / 4 * (16 * 100 / 32)
    assert psnr_b(blocky, clean, channel="gray") == pytest.approx(10 * math.log10(255**2 / (25 + factor)), abs=1e-12)


def test_the_blocking_is_that_of_the_prediction_and_on_the_grid():
    smooth = np.tile(np.arange(100, 124, dtype=np.uint8), (17, 1))
    for prediction in (smooth, np.roll(smooth, 3, axis=1)[:, 4:]):
        reference = np.full_like(prediction, 110)
        assert psnr_b(prediction, reference, channel="gray") == psnr(prediction, reference, channel="gray")
    blocky = np.full((16, 24), 100, np.uint8)
    blocky[:, 8:16] = 140
    flat = np.full_like(blocky, 120)
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


def test_what_would_cut_blocks_is_refused():
    image = np.zeros((40, 40), np.uint8)
    with refused(ValueError, "multiple", "border"):
        psnr_b(image, image, channel="gray", border=4)
    with refused(ValueError, "9x9"):
        psnr_b(image, image, channel="gray", border=16)


def test_a_metric_object_gives_the_mean_and_each_value(tmp_path):
    clean = data.astronaut()[40:104, 180:252]
    compressed = [jpeg(clean, quality) for quality in (10, 40)]
    values = [psnr_b(image, clean, channel="rgb") for image in compressed]
    result = PsnrB(cache_dir=str(tmp_path)).compute(predictions=compressed, references=[clean] * 2, channel="rgb")
    assert result == {"psnr_b": np.mean(values), "psnr_b_per_image": values}
