# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Image processor of MRConvNeXt: resize, cut out the centre, normalise as ImageNet. No torchvision."""

from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_utils import BatchFeature
from transformers.image_transforms import get_resize_output_image_size
from transformers.image_utils import (
    IMAGENET_DEFAULT_MEAN,
    IMAGENET_DEFAULT_STD,
    ChannelDimension,
    ImageInput,
    PILImageResampling,
    SizeDict,
)
from transformers.processing_utils import ImagesKwargs, Unpack


def _with_channels(image: Any) -> Any:
    """Grey arrays of height and width, which the base class refuses, with a channel in front."""
    return image[None] if isinstance(image, (np.ndarray, torch.Tensor)) and image.ndim == 2 else image


class MRConvNextImageProcessorKwargs(ImagesKwargs, total=False):
    """crop_pct (`float`, *optional*): Share of the resized image's shorter side that the centre crop keeps."""

    crop_pct: float


class MRConvNextImageProcessor(PilBackend):
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
        resample (`PILImageResampling`, *optional*, defaults to bicubic): Filter of the resizing.
        do_rescale (`bool`, *optional*, defaults to `True`):
            Multiply by `rescale_factor`. Set it to `False` for float images in [0, 1].
        rescale_factor (`float`, *optional*, defaults to 1 / 255): Factor that brings the values to [0, 1].
        do_normalize (`bool`, *optional*, defaults to `True`):
            Subtract `image_mean` and divide by `image_std`.
        image_mean, image_std (`list[float]`, *optional*, default to those of ImageNet):
            Mean and standard deviation of each channel.

    Example:
        >>> from PIL import Image
        >>> from hf_ext import MRConvNextImageProcessor
        >>> MRConvNextImageProcessor()(Image.new("RGB", (300, 200)), return_tensors="pt").pixel_values.shape
        torch.Size([1, 3, 224, 224])
    """

    valid_kwargs = MRConvNextImageProcessorKwargs
    model_input_names = ["pixel_values"]

    do_convert_rgb = True
    do_resize = True
    size = {"shortest_edge": 224}
    default_to_square = False
    crop_pct = 0.875
    resample = PILImageResampling.BICUBIC
    do_rescale = True
    rescale_factor = 1 / 255
    do_normalize = True
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
        if not isinstance(images, (list, tuple)):
            images = _with_channels(images)
        elif images:
            images = [_with_channels(image) for image in images]
        else:
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

    # The base class names every option of every processor; like those of transformers, this names its own.
    def _preprocess(  # type: ignore[override]
        self,
        images: list[np.ndarray],
        do_resize: bool,
        size: SizeDict,
        crop_pct: float,
        resample: PILImageResampling,
        do_rescale: bool,
        rescale_factor: float,
        do_normalize: bool,
        image_mean: list[float],
        image_std: list[float],
        return_tensors: str | None,
        **kwargs: Any,
    ) -> BatchFeature:
        if do_rescale:
            for image in images:
                if np.issubdtype(image.dtype, np.integer) and image.max() * rescale_factor > 1 + 1e-6:
                    raise ValueError(
                        f"An image of {image.dtype} has values up to {image.max()}, which `rescale_factor` "
                        f"{rescale_factor:g} does not bring to [0, 1]; give 1 / 65535 for 16 bits."
                    )
        if do_resize:
            images = [self._centre(image, size, crop_pct, resample) for image in images]
        sizes = sorted({image.shape[1:] for image in images})
        if return_tensors is not None and len(sizes) > 1:
            raise ValueError(
                f"Images of sizes {sizes} do not make one batch. Set do_resize=True, or process each size by itself."
            )
        if do_rescale:
            images = [self.rescale(image, rescale_factor) for image in images]
        if do_normalize:
            images = [self.normalize(image, image_mean, image_std) for image in images]
        return BatchFeature(data={"pixel_values": images}, tensor_type=return_tensors)

    def _centre(self, image: np.ndarray, size: SizeDict, crop_pct: float, resample: Any) -> np.ndarray:
        """Resize so that the square in the centre is `crop_pct` of the shorter side, and cut it out."""
        if not size.shortest_edge or size.shortest_edge < 1:
            raise ValueError(f"`size` is {size}; give {{'shortest_edge': pixels}}, at least 1.")
        if not 0 < crop_pct <= 1:
            raise ValueError(f"`crop_pct` is {crop_pct}; it must be above 0 and at most 1.")
        side = size.shortest_edge
        height, width = get_resize_output_image_size(
            image, int(side / crop_pct), default_to_square=False, input_data_format=ChannelDimension.FIRST
        )
        square = SizeDict(height=side, width=side)
        if image.dtype == np.uint8:
            return self.center_crop(self.resize(image, SizeDict(height=height, width=width), resample), square)
        # The base class would round these to 256 levels.
        channels = [Image.fromarray(channel.astype(np.float32)).resize((width, height), resample) for channel in image]
        return self.center_crop(np.stack([np.asarray(channel) for channel in channels]), square)
