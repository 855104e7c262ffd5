"""Shared by PSNR, PSNR-B and SSIM: the checks on a pair of images, rounding to 8 bits, the border and the channel.

The order is the usual one for image restoration: clip and round to 8 bits, crop the border, take the channel.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, get_args

import datasets
import evaluate
import numpy as np
from PIL import Image, ImageOps

Channel = Literal["gray", "rgb", "y"]

INPUTS_DESCRIPTION = """
Args:
    predictions, references (`list` of `PIL.Image.Image` or `numpy.ndarray`): Restored and clean images of equal
        sizes: PIL images of mode "RGB" or "L", or uint8 arrays `[height, width, 3]` or `[height, width]`.
    channel (`str`): "rgb": all three channels; "y": the luma of an RGB image (ITU-R BT.601); "gray": a single-channel
        image. Of one colour picture "rgb" and "y" give values that lie a decibel or more apart.
    border (`int`, *optional*, defaults to 0): Pixels to leave out on each side; for super-resolution, usually scale.

Example:
    >>> import evaluate
    >>> from PIL import Image
    >>> from hf_ext.metrics import metric_path
    >>> metric = evaluate.load(metric_path("psnr"))
    >>> restored, clean = Image.open("restored.png"), Image.open("clean.png")
    >>> metric.compute(predictions=[restored], references=[clean], channel="rgb")
    {'psnr': 31.27, 'psnr_per_image': [31.27]}
"""


def to_uint8_values(image: np.ndarray, data_range: float | None, name: str) -> np.ndarray:
    """Clips and rounds an image to 256 levels; `data_range` is what means white, uint8 images need none."""
    if not isinstance(image, np.ndarray):
        raise TypeError(f"{name} must be a numpy array, got {type(image).__name__}: convert it with numpy.asarray")
    if image.ndim not in (2, 3) or image.size == 0:
        raise ValueError(f"{name} must have the shape [height, width] or [height, width, channels], got {image.shape}")
    if image.dtype == np.uint8:
        if data_range not in (None, 255):
            raise ValueError(f"{name} is uint8, so data_range must be 255 or left out, got {data_range}")
        values = image.astype(np.float64)
    elif np.issubdtype(image.dtype, np.floating):
        if data_range is None or not np.isfinite(data_range) or data_range <= 0:
            raise ValueError(f"{name} is {image.dtype}: data_range must say what is white, 1 or 255, got {data_range}")
        if not np.isfinite(image).all():
            raise ValueError(f"{name} has NaN or infinite values: {np.count_nonzero(~np.isfinite(image))} of them")
        values = np.rint(np.clip(image.astype(np.float64) / data_range, 0.0, 1.0) * 255.0)
    else:
        raise TypeError(f"{name} must hold uint8 or floating values, got {image.dtype}: convert it explicitly")
    return values if image.ndim == 3 else values[:, :, None]


def luma(image: np.ndarray) -> np.ndarray:
    """`Y = 16 + 65.481 R + 128.553 G + 24.966 B`, R, G and B from 0 to 1: ITU-R BT.601 from 16 to 235, not rounded."""
    weighted: np.ndarray = image @ np.array([[65.481], [128.553], [24.966]])
    return 16.0 + weighted / 255.0


def prepare_pair(
    prediction: np.ndarray, reference: np.ndarray, channel: Channel, border: int, data_range: float | None, least: int
) -> tuple[np.ndarray, np.ndarray]:
    """Values from 0 to 255 of two images as they are compared, float64 [height, width, channels]; the border must
    leave at least so many pixels on each side."""
    if channel not in get_args(Channel):
        raise ValueError(f"channel must be one of {', '.join(get_args(Channel))}, got {channel!r}")
    if isinstance(border, bool) or not isinstance(border, (int, np.integer)):
        raise TypeError(f"border must be a whole number of pixels, got {border!r}")
    pair = (to_uint8_values(prediction, data_range, "prediction"), to_uint8_values(reference, data_range, "reference"))
    shape = pair[1].shape
    if pair[0].shape != shape:
        raise ValueError(f"both images must have the same shape, got {prediction.shape} and {reference.shape}")
    white = 255.0 if data_range is None else data_range
    if reference.min() < 0 or reference.max() > white:
        raise ValueError(f"reference: values from {reference.min()} to {reference.max()}, data_range is 0 to {white}")
    expected = 1 if channel == "gray" else 3
    if shape[2] != expected:
        raise ValueError(f"channel={channel!r} needs images with {expected} channel(s), got {shape[2]}")
    if border < 0 or min(shape[:2]) - 2 * border < least:
        raise ValueError(f"need {least}x{least} pixels, border >= 0, got {shape[0]}x{shape[1]} with border {border}")
    inside = (slice(border, shape[0] - border), slice(border, shape[1] - border))
    first, second = (luma(image[inside]) if channel == "y" else image[inside] for image in pair)
    return first, second


def check_images(images: Sequence[Any] | None, name: str) -> None:
    """
    Refuses what `evaluate` would turn into other pixels without a word: arrays of other types than uint8 are cast
    (65535 becomes 255, 256 becomes 0), palette indices would be taken for grey levels.
    """
    for index, image in enumerate(images if images is not None else ()):
        if isinstance(image, Image.Image):
            if image.mode not in ("RGB", "L"):
                raise ValueError(f"{name}[{index}] is a PIL image of mode {image.mode}: convert it to RGB or L")
        elif not isinstance(image, np.ndarray) or image.dtype != np.uint8:
            what = f"an array of {image.dtype}" if isinstance(image, np.ndarray) else type(image).__name__
            raise TypeError(f"{name}[{index}] must be a PIL image or a uint8 array, got {what}")
        elif image.ndim not in (2, 3) or image.shape[2:] not in ((), (3,)) or 0 in image.shape:
            raise ValueError(f"{name}[{index}] must be [height, width] or [height, width, 3], got {image.shape}")


class ImageMetric(evaluate.Metric, ABC):
    """A metric of image pairs whose value over a set is the mean of the images' values. It is abstract, which is also
    how `evaluate.load` tells it from the metric in the script that imports it."""

    # One sentence for `evaluate`; each metric sets its own.
    summary: str

    @staticmethod
    @abstractmethod
    def score(prediction: np.ndarray, reference: np.ndarray, *, channel: Channel, border: int) -> float:
        """The value of one pair of uint8 images."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=self.summary,
            citation="",
            inputs_description=INPUTS_DESCRIPTION,
            features=datasets.Features({"predictions": datasets.Image(), "references": datasets.Image()}),
        )

    def add_batch(self, *, predictions: Any = None, references: Any = None, **kwargs: Any) -> None:
        """Adds images and their references."""
        check_images(predictions, "predictions")
        check_images(references, "references")
        # Of a PIL image `evaluate` would compress a JPEG once more, or read its file again; a copy has no file.
        predictions, references = (
            [ImageOps.exif_transpose(x) if isinstance(x, Image.Image) else x for x in images]
            for images in (predictions, references)
        )
        super().add_batch(predictions=predictions, references=references, **kwargs)

    def add(self, *, prediction: Any = None, reference: Any = None, **kwargs: Any) -> None:
        """Adds one image and its reference."""
        self.add_batch(predictions=[prediction], references=[reference], **kwargs)

    def _compute(self, predictions: Any, references: Any, *, channel: Any = None, border: int = 0) -> dict[str, Any]:
        if not len(predictions):
            raise ValueError(f"{self.name} needs at least one pair of images, got none")
        if channel is None:
            kinds = "'rgb' (all three of a colour image), 'y' (its luma) or 'gray' (an image of one channel)"
            raise ValueError(f"{self.name} needs a channel, as values differ: give channel={kinds}.")
        pairs = zip(map(np.asarray, predictions), map(np.asarray, references), strict=True)
        values = [self.score(*pair, channel=channel, border=border) for pair in pairs]
        return {self.name: float(np.mean(values)), f"{self.name}_per_image": values}
