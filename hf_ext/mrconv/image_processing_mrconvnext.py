# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Image processor of MRConvNeXt: resize, cut out the centre, normalise as ImageNet. No torchvision."""

from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_utils import BatchFeature
from transformers.image_transforms import get_resize_output_image_size
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, ImageInput, SizeDict
from transformers.models.convnext.image_processing_pil_convnext import (
    ConvNextImageProcessorKwargs as MRConvNextImageProcessorKwargs,  # transformers wants a processor's own name.
)
from transformers.models.convnext.image_processing_pil_convnext import ConvNextImageProcessorPil
from transformers.processing_utils import Unpack
from transformers.utils import logging

logger = logging.get_logger(__name__)


def _with_channels(image: Any) -> Any:
    """Grey arrays of height and width, which the base class refuses, with a channel in front; no bfloat16, which NumPy
    does not have."""
    if isinstance(image, torch.Tensor) and image.dtype == torch.bfloat16:
        image = image.float()
    return image[None] if isinstance(image, (np.ndarray, torch.Tensor)) and image.ndim == 2 else image


class MRConvNextImageProcessor(ConvNextImageProcessorPil):
    """
    Prepare images for [`MRConvNextForImageClassification`]: RGB, resize, centre crop, [0, 1], normalise.

    The shorter side becomes `size["shortest_edge"] / crop_pct` pixels, and a square of `size["shortest_edge"]` is cut
    from the centre, so images of all sizes make one batch. `crop_pct=1.0` keeps the whole shorter side. The EXIF
    orientation of a PIL image is not applied; use `PIL.ImageOps.exif_transpose`.

    Args:
        do_convert_rgb (`bool`, *optional*, defaults to `True`): Convert images to RGB; transparent ones get a white
            background. If it is `False` and `image_mean` has one value, PIL images are converted to grey.
        do_resize (`bool`, *optional*, defaults to `True`):
            Resize and cut out the centre. Without it, the images of a batch must have one size.
        size (`dict[str, int]`, *optional*, defaults to `{"shortest_edge": 224}`):
            Side of the resulting square in pixels: the `image_size` of the model.
        crop_pct (`float`, *optional*, defaults to 0.875):
            Share of the shorter side that is kept, above 0 and at most 1.
        resample, do_rescale, rescale_factor, do_normalize, image_mean, image_std:
            As in every image processor of transformers; bicubic, and mean and spread of ImageNet.

    Example:
        >>> from PIL import Image
        >>> from hf_ext import MRConvNextImageProcessor
        >>> MRConvNextImageProcessor()(Image.new("RGB", (300, 200)), return_tensors="pt").pixel_values.shape
        torch.Size([1, 3, 224, 224])
    """

    do_convert_rgb = True
    size = {"shortest_edge": 224}
    crop_pct = 0.875
    image_mean = IMAGENET_DEFAULT_MEAN
    image_std = IMAGENET_DEFAULT_STD

    def preprocess(self, images: ImageInput, **kwargs: Unpack[MRConvNextImageProcessorKwargs]) -> BatchFeature:
        """
        Prepare images for the model.

        Args:
            images (`ImageInput`): An image or a list: PIL images, or arrays or tensors with channels first or last.
            kwargs: Any option of the processor, for this call only, and `return_tensors` (`"pt"` or `"np"`).

        Returns:
            [`BatchFeature`]: `pixel_values` of shape `(batch_size, num_channels, height, width)`, float32.

        Raises:
            ValueError: No image is given, sizes do not make one batch, or values are not in the expected range.
        """
        images = [_with_channels(image) for image in (images if isinstance(images, (list, tuple)) else [images])]
        if not images:
            raise ValueError("`images` is empty; give at least one image.")
        return super().preprocess(images, **kwargs)

    def process_image(self, image: Any, do_convert_rgb: bool | None = None, *args: Any, **kwargs: Any) -> np.ndarray:
        """Turn one image into an array of channels, height, width. See [`~MRConvNextImageProcessor.preprocess`]."""
        # Pillow clips these modes to 8 bits when it converts them: the picture would come out white.
        if isinstance(image, Image.Image) and image.mode[0] in "IF":
            raise ValueError(
                f"The image has PIL mode {image.mode!r}, more than 8 bits a channel. Give numpy.asarray(image) with "
                "do_convert_rgb=False and the rescale_factor that brings it to [0, 1] (1 / 65535 for 16 bits)."
            )
        # Pipelines open every picture as RGB, and a model of grey ones has one mean.
        if isinstance(image, Image.Image) and not do_convert_rgb and np.size(self.image_mean) == 1:
            image = image.convert("L")
        return super().process_image(image, do_convert_rgb, *args, **kwargs)

    def _preprocess(self, images: list[np.ndarray], **options: Any) -> BatchFeature:  # type: ignore[override]
        factor = options["rescale_factor"]
        for image in images:
            low, high = (image.min(), image.max()) if image.size else (np.nan, np.nan)
            if not np.isfinite([low, high]).all():
                raise ValueError(f"An image of shape {image.shape} has no pixels, or some that are NaN or infinite.")
            if not options["do_rescale"]:
                continue
            what = f"An image of {image.dtype} has values from {low} up to {high}, which `rescale_factor` {factor:g}"
            if image.dtype.kind in "iu" and (low < 0 or high * factor > 1 + 1e-6):
                raise ValueError(f"{what} does not bring to [0, 1]; give 1 / 65535 for 16 bits.")
            if image.dtype.kind in "bf" and 0 < high <= 1 > factor:
                logger.warning_once(f"{what} makes nearly black; give do_rescale=False for values within [0, 1].")
        return super()._preprocess(images, **options)

    def resize(  # type: ignore[override]
        self, image: np.ndarray, size: SizeDict, resample: Any, crop_pct: float = 0.875, **kwargs: Any
    ) -> np.ndarray:
        """Resize so that the square in the centre is `crop_pct` of the shorter side, and cut it out."""
        # The base class squeezes images into squares of 384 pixels and more, and rounds floats to 256 levels.
        if not size.shortest_edge or size.shortest_edge < 1:
            raise ValueError(f"`size` is {size}; give {{'shortest_edge': pixels}}, at least 1.")
        if not 0 < crop_pct <= 1:
            raise ValueError(f"`crop_pct` is {crop_pct}; it must be above 0 and at most 1.")
        side = size.shortest_edge
        height, width = get_resize_output_image_size(
            image, int(side / crop_pct), default_to_square=False, input_data_format="channels_first"
        )
        if image.dtype == np.uint8:
            resized = PilBackend.resize(self, image, SizeDict(height=height, width=width), resample)
        else:
            channels = [Image.fromarray(channel.astype(np.float32)) for channel in image]
            resized = np.stack([np.asarray(channel.resize((width, height), resample)) for channel in channels])
        return self.center_crop(resized, SizeDict(height=side, width=side))
