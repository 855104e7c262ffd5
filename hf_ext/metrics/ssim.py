"""Structural similarity over the valid region, as a function and as an `evaluate` module.

Wang, Bovik, Sheikh and Simoncelli, "Image quality assessment: from error visibility to structural similarity", IEEE
Transactions on Image Processing 13(4), 2004, equation 13 with the paper's constants and its 11x11 Gaussian window.
"""

import numpy as np

from .images import Channel, ImageMetric, prepare_pair

WINDOW = 11
SIGMA = 1.5
# The paper's C1, of the luminances, and C2, of the contrasts.
LUMINANCE, CONTRAST = (0.01 * 255.0) ** 2, (0.03 * 255.0) ** 2


def _smooth(image: np.ndarray) -> np.ndarray:
    """Gaussian means of all windows that lie wholly inside: [height, width, c] to [height - 10, width - 10, c]."""
    offsets = np.arange(WINDOW) - WINDOW // 2
    weights = np.exp(-0.5 * np.square(offsets / SIGMA))
    weights /= weights.sum()
    height, width = (size - WINDOW + 1 for size in image.shape[:2])
    rows = sum(weight * image[start : start + height] for start, weight in enumerate(weights))
    means: np.ndarray = sum(weight * rows[:, start : start + width] for start, weight in enumerate(weights))
    return means


def ssim(
    prediction: np.ndarray,
    reference: np.ndarray,
    *,
    channel: Channel,
    border: int = 0,
    data_range: float | None = None,
) -> float:
    """
    Structural similarity of one image (equation 13 of the paper): 11x11 Gaussian window of standard deviation 1.5,
    population statistics, each channel on its own, averaged over the windows that lie wholly inside the image. Zero
    padding at the image's edge, which some published numbers contain, would raise the value. Arguments are those of
    [`psnr`], images of at least 11x11 after the crop; the value is from -1 to 1, where both are equal.
    """
    first, second = prepare_pair(prediction, reference, channel, border, data_range, least=WINDOW)
    mean_first, mean_second = _smooth(first), _smooth(second)
    variance_first = _smooth(first * first) - mean_first**2
    variance_second = _smooth(second * second) - mean_second**2
    covariance = _smooth(first * second) - mean_first * mean_second
    luminance = (2 * mean_first * mean_second + LUMINANCE) / (mean_first**2 + mean_second**2 + LUMINANCE)
    structure = (2 * covariance + CONTRAST) / (variance_first + variance_second + CONTRAST)
    return float(np.mean(luminance * structure))


class SSIM(ImageMetric):
    """[`ssim`] over a set of images. `compute` returns `ssim`, the mean of their values, and `ssim_per_image`."""

    summary = "Structural similarity of 8-bit images: 11x11 Gaussian window, valid region."
    score = staticmethod(ssim)
