"""Coarse and fine parts of images, and the energy of the fine part, by the cosine transform."""

from functools import lru_cache

import numpy as np


def as_unit_images(images: np.ndarray, name: str = "images") -> np.ndarray:
    """Images with values from 0 to 1."""
    if not isinstance(images, np.ndarray) or not (
        images.dtype == np.uint8 or np.issubdtype(images.dtype, np.floating)
    ):
        what = f"an array of {images.dtype}" if isinstance(images, np.ndarray) else type(images).__name__
        raise TypeError(f"{name} must be a numpy array of uint8 or floating values, got {what}")
    if images.ndim < 3 or 0 in images.shape:
        raise ValueError(f"{name} must have the shape [..., height, width, channels], got {images.shape}")
    if images.dtype == np.uint8:
        return images / 255.0
    values = images.astype(np.float64)
    # Written so that NaN fails too.
    if not (values.min() >= 0 and values.max() <= 1):
        raise ValueError(f"{name} must have values from 0 to 1, got {values.min():.4g} to {values.max():.4g}")
    return values


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
    if not 0 < cutoff <= 0.5:
        raise ValueError(f"cutoff must be over 0 and at most 0.5 cycles per pixel, got {cutoff}")
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
    energies: np.ndarray = np.mean(np.square(split_frequencies(as_unit_images(images), cutoff)[1]), axis=(-3, -2, -1))
    return energies
