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
    Means over all pairs of settings and all images.

    Args:
        images (`numpy.ndarray` of shape `[settings, images, height, width, channels]`):
            uint8, or floating values from 0 to 1. Images of one index differ in nothing but the setting.
        predictions (`numpy.ndarray` of shape `[settings, images]`, integer, *optional*):
            The class that a classifier sees in each image.
        cutoff (`float`, *optional*, defaults to 0.125):
            Content are frequencies up to this one, in cycles per pixel.

    Returns:
        `dict[str, float]`: `pixel_distance`, root mean square difference of the images of a pair (0 to 1);
        `content_distance`, the same of their slow parts; `detail_distance`, of the rest; and with `predictions`
        `agreement`, the share of pairs in which the classifier sees the same class.
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
    Splits images into what varies slowly and what varies fast over space. The cosine transform continues an image by
    its mirror image, so that borders are no fine detail, as they would be for a Fourier transform. Both parts are
    orthogonal: their energies add up to the image's.

    Args:
        images (`numpy.ndarray` of shape `[..., height, width, channels]`, floating): The images.
        cutoff (`float`): Highest frequency of the slow part, in cycles per pixel, over 0 and at most 0.5: distance
            from the origin of the frequency plane.

    Returns:
        `tuple[numpy.ndarray, numpy.ndarray]` of the images' shape: Slow and fast part; their sum is the images.
    """
    height, width = images.shape[-3:-1]
    rows, columns = _cosines(height), _cosines(width)
    coefficients = np.einsum("fh,...hwc,gw->...fgc", rows, images, columns, optimize=True)
    frequencies = np.hypot(np.arange(height)[:, None] / (2 * height), np.arange(width)[None] / (2 * width))
    kept = coefficients * (frequencies <= cutoff)[:, :, None]
    slow = np.einsum("fh,...fgc,gw->...hwc", rows, kept, columns, optimize=True)
    return slow, images - slow


def high_frequency_energy(images: np.ndarray, cutoff: float = 0.25) -> np.ndarray:
    """
    Mean square of the part of each image that [`split_frequencies`] calls fast: how much fine detail it has.

    Args:
        images (`numpy.ndarray` of shape `[..., height, width, channels]`, uint8, or floating from 0 to 1): The images.
        cutoff (`float`, *optional*, defaults to 0.25):
            In cycles per pixel. What an image enlarged twice can hold lies at 0.25 and below.

    Returns:
        `numpy.ndarray` of shape `[...]`: The energies, of values from 0 to 1.
    """
    energies: np.ndarray = np.mean(np.square(split_frequencies(_as_unit(images), cutoff)[1]), axis=(-3, -2, -1))
    return energies
