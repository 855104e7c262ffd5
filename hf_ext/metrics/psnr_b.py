"""PSNR-B, which also counts the blocking of JPEG, with a stated channel and border: function and `evaluate` module.

Yim and Bovik, "Quality assessment of deblocked images", IEEE Transactions on Image Processing 20(1), 2011.
"""

import numpy as np

from .images import Channel, ImageMetric, luma, prepare_pair

BLOCK = 8


def psnr_b(
    prediction: np.ndarray,
    reference: np.ndarray,
    *,
    channel: Channel,
    border: int = 0,
    data_range: float | None = None,
) -> float:
    """
    Peak signal-to-noise ratio of one image whose blocking counts as error: `10 log10(255² / (MSE + BEF))`. The
    blocking effect factor looks at the prediction alone: `BEF = eta (D_B - D_C)` where `D_B`, the mean squared
    difference of neighbouring pixels on two sides of an 8 x 8 block boundary, exceeds `D_C`, that of all other
    neighbours; otherwise 0. `eta = log2(8) / log2(min(height, width))`. With `channel="rgb"` the error is that of all
    three channels and the blocking that of the luma, as published colour numbers have it. Arguments are those of
    [`psnr`]: images of at least 9x9, whose blocks start at the upper left corner, and a border of a multiple of 8. The
    value is in decibels, infinite where both images are equal and without blocking.
    """
    first, second = prepare_pair(prediction, reference, channel, border, data_range, least=BLOCK + 1)
    if border % BLOCK:
        raise ValueError(f"border must be a multiple of {BLOCK} for PSNR-B, whose blocks it would cut, got {border}")
    seen = (luma(first) if channel == "rgb" else first)[:, :, 0]
    error = np.mean(np.square(first - second)) + _blocking(seen)
    return float("inf") if error == 0 else float(10.0 * np.log10(255.0**2 / error))


def _blocking(image: np.ndarray) -> float:
    sums, counts = np.zeros(2), np.zeros(2)
    for axis in (0, 1):
        squares = np.square(np.diff(image, axis=axis))
        # Pairs of columns, or rows, 8k - 1 and 8k lie in two blocks.
        across = (np.arange(squares.shape[axis]) + 1) % BLOCK == 0
        for kind, chosen in enumerate((across, ~across)):
            part = np.compress(chosen, squares, axis=axis)
            sums[kind] += part.sum()
            counts[kind] += part.size
    at_blocks, elsewhere = sums / counts
    return float(np.log2(BLOCK) / np.log2(min(image.shape)) * max(at_blocks - elsewhere, 0.0))


class PsnrB(ImageMetric):
    """[`psnr_b`] over a set of images. `compute` returns `psnr_b`, the mean in decibels, and `psnr_b_per_image`."""

    summary = "Peak signal-to-noise ratio of 8-bit images with the blocking of JPEG counted as error, in decibels."
    score = staticmethod(psnr_b)
