"""Content drift: how much images change when only a control is varied, with seed and class fixed.

Measures the claim of arXiv 2411.03177 that a size condition should change detail and not content. The paper reports a
perceptual distance; here are distances that need no network but a classifier.
"""

from itertools import combinations

import numpy as np

from .frequencies import as_unit_images, split_frequencies


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
            What counts as content: frequencies up to this one, in cycles per pixel.

    Returns:
        `dict[str, float]`: `pixel_distance`, root mean square difference of the images of a pair (0 to 1);
        `content_distance`, the same of their slow parts; `detail_distance`, of the rest; and with `predictions`
        `agreement`, the share of pairs in which the classifier sees the same class.
    """
    values = as_unit_images(images)
    if values.ndim != 5 or len(values) < 2:
        raise ValueError(
            f"images must have the shape [settings, images, height, width, channels] with at least 2 settings, got "
            f"{images.shape}"
        )
    if predictions is not None and predictions.shape != values.shape[:2]:
        raise ValueError(f"predictions must have the shape {values.shape[:2]} of the images, got {predictions.shape}")
    slow, fast = split_frequencies(values, cutoff)
    pairs = list(combinations(range(len(values)), 2))
    parts = {"pixel_distance": values, "content_distance": slow, "detail_distance": fast}
    result = {
        name: float(np.mean([_distances(part[first], part[second]) for first, second in pairs]))
        for name, part in parts.items()
    }
    if predictions is not None:
        result["agreement"] = float(np.mean([predictions[first] == predictions[second] for first, second in pairs]))
    return result


def _distances(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Root mean square difference of each image of [images, height, width, channels]."""
    distances: np.ndarray = np.sqrt(np.mean(np.square(first - second), axis=(1, 2, 3)))
    return distances
