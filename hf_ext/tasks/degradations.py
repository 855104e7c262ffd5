"""Degradations of clean images, as the published numbers of image restoration are made. Never shipped with models.

Pure functions of numpy arrays `[height, width, channels]`; all randomness comes from a generator that is passed in.
Images are uint8, or floating with white at 1.
"""

import io
import math

import numpy as np
from PIL import Image

# Red, green, green and blue sites of the 2 x 2 cell, as (row, column): the channel order of a packed mosaic.
_RGGB = ((0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 2))


# Standard deviations after which a Gaussian is cut off.
BLUR_REACH = 4


def matlab_bicubic(image: np.ndarray, scale: float) -> np.ndarray:
    """
    Resizes an image as MATLAB's `imresize(image, scale, "bicubic")` does, which super-resolution numbers rest on.

    Output pixel `x` (from 0) lies at `u = (x + 1/2) / scale - 1/2` of the input and is the sum over input pixels `i`
    of `h(u - i)`, normalised. `h` is the cubic kernel of Keys with `a = -1/2`; where the image shrinks, it is `scale
    h(scale t)`, so wide that nothing aliases. Beyond its edge the image is mirrored, the edge pixel doubled.
    """
    _check(image)
    result = _filter(image, [_contributions(length, scale) for length in image.shape[:2]])
    if image.dtype == np.uint8:
        # MATLAB rounds halves up, numpy to even.
        return np.clip(np.floor(result + 0.5), 0, 255).astype(np.uint8)
    return result.astype(image.dtype)


def _filter(image: np.ndarray, taps: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """The image, in float64, of which each row and then each column is a sum of others: weights and sources of both,
    [output, taps]. Beyond its edge it is mirrored, the edge pixel doubled."""
    result = image.astype(np.float64)
    for axis, (weights, sources) in enumerate(taps):
        lines, length = np.moveaxis(result, axis, 0), image.shape[axis]
        sources = sources % (2 * length)
        sources = np.where(sources < length, sources, 2 * length - 1 - sources)
        # One tap at a time: a dense matrix would multiply by zeros, a gather would copy the image for every tap.
        total = np.zeros((len(sources), *lines.shape[1:]))
        for tap in range(sources.shape[1]):
            total += weights[:, tap].reshape(-1, *[1] * (lines.ndim - 1)) * lines[sources[:, tap]]
        result = np.moveaxis(total, 0, axis)
    return result


def _contributions(length: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Weights and source pixels of every output pixel along one axis, both [ceil(length * scale), taps]."""
    shrinking = min(scale, 1.0)
    width = 4.0 / shrinking
    # 1e-9: a factor such as 1 / 3 is not exact, and 9 * (1 / 3) pixels are no four.
    places = (np.arange(math.ceil(length * scale - 1e-9)) + 0.5) / scale - 0.5
    sources = np.floor(places - width / 2)[:, None].astype(np.int64) + np.arange(math.ceil(width) + 2)
    weights = _cubic((places[:, None] - sources) * shrinking)
    return weights / weights.sum(axis=1, keepdims=True), sources


def _cubic(distance: np.ndarray) -> np.ndarray:
    """Keys' kernel with a = -1/2."""
    x = np.abs(distance)
    near, far = (1.5 * x - 2.5) * x**2 + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x <= 1, near, np.where(x <= 2, far, 0.0))


def blur(image: np.ndarray, sigma: float) -> np.ndarray:
    """
    Blurs an image with a Gaussian of this standard deviation in pixels, cut off at BLUR_REACH of them. Beyond its edge
    the image is mirrored, the edge pixel doubled. uint8 is rounded.
    """
    _check(image)
    reach = math.ceil(BLUR_REACH * sigma)
    if reach == 0:
        return image
    offsets = np.arange(-reach, reach + 1)
    weights = np.exp(-0.5 * (offsets / sigma) ** 2)[None]
    taps = [(weights / weights.sum(), np.arange(length)[:, None] + offsets) for length in image.shape[:2]]
    result = _filter(image, taps)
    return np.rint(result).astype(np.uint8) if image.dtype == np.uint8 else result.astype(image.dtype)


def resize_and_back(image: np.ndarray, factor: float) -> np.ndarray:
    """Resizes a uint8 image by a factor and back to its size, as pictures that were passed on: Pillow's bicubic."""
    _check(image, eight_bits=True)
    height, width = image.shape[:2]
    picture = Image.fromarray(image[..., 0] if image.shape[2] == 1 else np.ascontiguousarray(image))
    smaller = picture.resize((max(1, round(width * factor)), max(1, round(height * factor))), Image.Resampling.BICUBIC)
    return np.asarray(smaller.resize((width, height), Image.Resampling.BICUBIC)).reshape(image.shape)


def gaussian_noise(image: np.ndarray, sigma: float, generator: np.random.Generator) -> np.ndarray:
    """Adds white Gaussian noise, independent for each channel. The result is neither clipped nor rounded."""
    clean = unit_range(image)
    return clean + np.float32(sigma / 255) * generator.standard_normal(clean.shape, dtype=np.float32)


def jpeg(image: np.ndarray, quality: int) -> np.ndarray:
    """
    Compresses an image as JPEG and decodes it again, with Pillow's libjpeg. Colour is stored with half the chroma
    resolution in both directions (4:2:0), as the published colour numbers have it; grey has no chroma.
    """
    _check(image, eight_bits=True)
    buffer = io.BytesIO()
    picture = Image.fromarray(image[..., 0] if image.shape[2] == 1 else np.ascontiguousarray(image))
    picture.save(buffer, "JPEG", quality=int(quality), subsampling="4:2:0")
    return np.asarray(Image.open(buffer)).reshape(image.shape)


def matlab_luma(image: np.ndarray) -> np.ndarray:
    """
    Y of a colour image as MATLAB's `rgb2ycbcr` makes it of 8 bits, which published numbers of grey JPEG rest on: `16 +
    (65.481 R + 128.553 G + 24.966 B) / 255`, rounded, from 16 (black) to 235 (white). Computed in whole numbers: the
    coefficients are 0.219 times 299, 587 and 114, and 0.219 / 255 is 73 / 85000. Halves are rounded up.
    """
    _check(image, eight_bits=True)
    weighted = image.astype(np.int64) @ np.array([[299], [587], [114]])
    return (16 + (73 * weighted + 42500) // 85000).astype(np.uint8)


def mosaic(image: np.ndarray) -> np.ndarray:
    """Picture of a sensor behind an RGGB Bayer filter: one colour per pixel, packed to [h / 2, w / 2, 4]."""
    return np.stack([image[row::2, column::2, channel] for row, column, channel in _RGGB], axis=-1)


def unpack_mosaic(packed: np.ndarray) -> np.ndarray:
    """The inverse of [`mosaic`] where there is one: an RGB image that is black where nothing was measured."""
    image = np.zeros((2 * packed.shape[0], 2 * packed.shape[1], 3), packed.dtype)
    for index, (row, column, channel) in enumerate(_RGGB):
        image[row::2, column::2, channel] = packed[..., index]
    return image


def unit_range(image: np.ndarray) -> np.ndarray:
    """An image as float32 with white at 1."""
    _check(image)
    return image.astype(np.float32) / 255 if image.dtype == np.uint8 else image.astype(np.float32)


def _check(image: np.ndarray, eight_bits: bool = False) -> None:
    """Refuses values whose range is unknown; strengths are checked where the settings are read."""
    if image.dtype != np.uint8 and (eight_bits or not np.issubdtype(image.dtype, np.floating)):
        allowed = "uint8" if eight_bits else "uint8, or floats with white at 1"
        raise TypeError(f"the image has {image.dtype}; {allowed} is needed.")
