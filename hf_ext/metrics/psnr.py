"""Peak signal-to-noise ratio with a stated channel and border, as a function and as an `evaluate` module."""

import numpy as np

from .images import Channel, ImageMetric, prepare_pair


def psnr(
    prediction: np.ndarray,
    reference: np.ndarray,
    *,
    channel: Channel,
    border: int = 0,
    data_range: float | None = None,
) -> float:
    """
    Peak signal-to-noise ratio of one image: `10 log10(255² / mean squared error)`, the error being taken over all
    pixels and channels that remain after clipping and rounding to 8 bits, cropping, and taking the channel.

    Args:
        prediction (`numpy.ndarray` of shape `[height, width]` or `[height, width, channels]`, uint8 or floating):
            The restored image; values outside `[0, data_range]` are clipped.
        reference (`numpy.ndarray` of the same shape): The clean image.
        channel (`str`): `"rgb"`: three channels; `"y"`: the luma `16 + 65.481 R + 128.553 G + 24.966 B` (ITU-R BT.601,
            R, G and B from 0 to 1; the peak stays 255) of an RGB image; `"gray"`: a single-channel image.
        border (`int`, *optional*, defaults to 0): Pixels to leave out on each side.
        data_range (`float`, *optional*): The value that means white; required for floating images.

    Returns:
        `float`: Decibels; infinite where both images are equal.

    Raises:
        ValueError: Images of different shapes, a channel that they do not have, or no `data_range` for floats.
        TypeError: An image is no array of uint8 or floats.

    Example:
        >>> import numpy as np
        >>> from hf_ext.metrics.psnr import psnr
        >>> clean = np.zeros((8, 8, 3), np.uint8)
        >>> round(psnr(clean + np.uint8(10), clean, channel="rgb"), 2)
        28.13
    """
    first, second = prepare_pair(prediction, reference, channel, border, data_range, least=1)
    error = np.mean(np.square(first - second))
    return float("inf") if error == 0 else float(10.0 * np.log10(255.0**2 / error))


class PSNR(ImageMetric):
    """
    [`psnr`] over a set of images. `compute` returns `psnr`, the mean of the images' values in decibels, and
    `psnr_per_image`. An image that equals its reference has an infinite value and makes the mean infinite:
    `psnr_per_image` shows which one it was.
    """

    summary = "Peak signal-to-noise ratio of 8-bit images, in decibels."
    score = staticmethod(psnr)
