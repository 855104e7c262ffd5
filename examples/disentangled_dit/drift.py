"""Content drift: how much images change when only a control is varied, with seed and class fixed.

Measures the claim of arXiv 2411.03177 that a size condition should change detail and not content. The paper reports a
perceptual distance; here are distances that need no network but a classifier. Coarse and fine parts of images are told
apart by a cosine transform.
"""

from functools import lru_cache
from itertools import combinations

import numpy as np


def content_drift(
    images: np.ndarray, predictions: np.ndarray | None = None, *, cutoff: float = 0.125
) -> dict[str, float]:
    """
    Means over all pairs of settings and all images [settings, images, height, width, channels], which differ in the
    setting alone: `pixel_distance`, the root mean square difference (0 to 1); `content_distance`, that of the slow
    parts, up to `cutoff` cycles per pixel; `detail_distance`, of the rest; and with `predictions` [settings, images]
    `agreement`, the share of pairs in which a classifier sees the same class.
    """
    values = _as_unit(images)
    slow, fast = split_frequencies(values, cutoff)
    pairs = list(combinations(range(len(values)), 2))
    parts = {"pixel_distance": values, "content_distance": slow, "detail_distance": fast}
    result = {
        name: float(np.mean([np.sqrt(np.mean((part[one] - part[two]) ** 2, axis=(1, 2, 3))) for one, two in pairs]))
        for name, part in parts.items()
    }
    if predictions is not None:
        result["agreement"] = float(np.mean([predictions[first] == predictions[second] for first, second in pairs]))
    return result


def _as_unit(images: np.ndarray) -> np.ndarray:
    """Images with values from 0 to 1."""
    return images / 255.0 if images.dtype == np.uint8 else images.astype(np.float64)


@lru_cache(maxsize=8)
def _cosines(size: int) -> np.ndarray:
    """The orthonormal cosine transform (DCT-II) as a matrix [frequency, position]."""
    frequencies, positions = np.arange(size)[:, None], np.arange(size)[None]
    matrix: np.ndarray = np.sqrt(2 / size) * np.cos(np.pi * (positions + 0.5) * frequencies / size)
    matrix[0] /= np.sqrt(2)
    return matrix


def split_frequencies(images: np.ndarray, cutoff: float) -> tuple[np.ndarray, np.ndarray]:
    """
    Slow and fast part of images [..., height, width, channels], whose sum they are; `cutoff` is the highest frequency
    of the slow part, in cycles per pixel. The cosine transform continues an image by its mirror image, so that borders
    are no fine detail, as they would be for a Fourier transform. Both parts are orthogonal: their energies add up.
    """
    height, width = images.shape[-3:-1]
    rows, columns = _cosines(height), _cosines(width)
    coefficients = np.einsum("fh,...hwc,gw->...fgc", rows, images, columns, optimize=True)
    frequencies = np.hypot(np.arange(height)[:, None] / (2 * height), np.arange(width)[None] / (2 * width))
    kept = coefficients * (frequencies <= cutoff)[:, :, None]
    slow = np.einsum("fh,...fgc,gw->...hwc", rows, kept, columns, optimize=True)
    return slow, images - slow


def high_frequency_energy(images: np.ndarray, cutoff: float = 0.25) -> np.ndarray:
    """Mean square [...] of the fast part of each image; an image that was enlarged twice has none above 0.25."""
    energies: np.ndarray = np.mean(np.square(split_frequencies(_as_unit(images), cutoff)[1]), axis=(-3, -2, -1))
    return energies
