# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Image processor of SemanIR: pictures to tensors in [0, 1], and restored tensors back to pictures. No torchvision."""

from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_utils import BatchFeature
from transformers.image_utils import ImageInput
from transformers.modeling_outputs import ImageSuperResolutionOutput
from transformers.processing_utils import ImagesKwargs, Unpack


def _with_channels(image: Any) -> Any:
    """Grey arrays of height and width, which the base class refuses, with a channel in front."""
    return image[None] if isinstance(image, (np.ndarray, torch.Tensor)) and image.ndim == 2 else image


class SemanIRImageProcessorKwargs(ImagesKwargs, total=False):
    """
    size_divisor (`int`, *optional*):
        Pad height and width to multiples of this. The model pads by itself, so this only serves other tools.
    """

    size_divisor: int | None


class SemanIRImageProcessor(PilBackend):
    """
    Prepare images for [`SemanIRForImageRestoration`] and make images of what it returns.

    Images are neither resized nor normalised: values become [0, 1], channels come first. Images of one size make a
    batch as they are. Images of several sizes are padded at the bottom and right, reflected, to the largest height and
    width, so that they make one batch; give `target_sizes` to `post_process_image_restoration` to cut the padding off.
    Tokens of the padding are attended to like any other, so near them the result may differ a little from that of the
    image alone. Process images of different sizes one at a time to avoid that. An orientation that a PIL image notes
    in its EXIF data is not applied: `PIL.ImageOps.exif_transpose` does that.

    Args:
        do_convert_rgb (`bool`, *optional*, defaults to `True`):
            Whether to convert images to RGB; transparent ones are laid over white. Set it to `False` for models of
            one channel (grey images) or four.
        do_rescale (`bool`, *optional*, defaults to `True`):
            Whether to multiply by `rescale_factor`. Set it to `False` for float images that are in [0, 1] already.
        rescale_factor (`float`, *optional*, defaults to 1 / 255):
            Factor that brings the values to [0, 1]; 1 / 65535 for 16-bit arrays.
        do_pad (`bool`, *optional*, defaults to `True`):
            Whether to pad images of several sizes to the largest, and all to `size_divisor`.
        size_divisor (`int`, *optional*):
            Pad height and width to multiples of this.
    """

    valid_kwargs = SemanIRImageProcessorKwargs
    model_input_names = ["pixel_values"]

    do_convert_rgb = True
    do_rescale = True
    rescale_factor = 1 / 255
    do_pad = True
    size_divisor = None

    def __init__(self, **kwargs: Unpack[SemanIRImageProcessorKwargs]):
        # transformers declares the options of its own processors only; others are allowed all the same.
        super().__init__(**kwargs)  # type: ignore[misc]

    def preprocess(self, images: ImageInput, **kwargs: Unpack[SemanIRImageProcessorKwargs]) -> BatchFeature:
        """
        Prepare images for the model.

        Args:
            images (`ImageInput`): An image or a list: PIL images, or arrays or tensors with channels first or last.
            kwargs: Any option of the processor, for this call only, and `return_tensors` (`"pt"` or `"np"`).

        Returns:
            [`BatchFeature`]: `pixel_values` of shape `(batch_size, num_channels, height, width)`, values in [0, 1].

        Raises:
            ValueError: If there is no image; sizes differ and `do_pad` is off; a PIL image is 16-bit or float, or of
                palette indices or bits and not to be converted; or whole numbers exceed 1 after rescaling.
        """
        if isinstance(images, (list, tuple)) and not images:
            raise ValueError("`images` is empty; give at least one image.")
        if isinstance(images, (list, tuple)):
            return super().preprocess([_with_channels(image) for image in images], **kwargs)
        return super().preprocess(_with_channels(images), **kwargs)

    def process_image(self, image: Any, do_convert_rgb: bool | None = None, *args: Any, **kwargs: Any) -> np.ndarray:
        """Turn one image into an array of channels, height, width. See [`~SemanIRImageProcessor.preprocess`]."""
        # Pillow clips these modes to 8 bits when it converts them: the picture would come out white.
        if isinstance(image, Image.Image) and image.mode[0] in "IF":
            raise ValueError(
                f"The image has PIL mode {image.mode!r}, more than 8 bits a channel. Give numpy.asarray(image) with "
                "do_convert_rgb=False and the rescale_factor that brings it to [0, 1] (1 / 65535 for 16 bits)."
            )
        if isinstance(image, Image.Image) and image.mode in ("1", "P", "PA") and not do_convert_rgb:
            raise ValueError(
                f"The image has PIL mode {image.mode!r}, whose values are no brightness from 0 to 255. Convert it "
                "first, for instance with image.convert('L'), or set do_convert_rgb=True."
            )
        return super().process_image(image, do_convert_rgb, *args, **kwargs)

    # The base class names every option of every processor; like those of transformers, this names its own.
    def _preprocess(  # type: ignore[override]
        self,
        images: list[np.ndarray],
        do_rescale: bool,
        rescale_factor: float,
        do_pad: bool,
        size_divisor: int | None,
        return_tensors: str | None,
        **kwargs: Any,
    ) -> BatchFeature:
        if do_rescale:
            for image in images:
                # Floats may exceed white: noise is not always clipped.
                if np.issubdtype(image.dtype, np.integer) and image.max() * rescale_factor > 1 + 1e-6:
                    raise ValueError(
                        f"An image of {image.dtype} has values up to {image.max()}, which `rescale_factor` "
                        f"{rescale_factor:g} does not bring to [0, 1]; give 1 / 65535 for 16 bits."
                    )
            images = [self.rescale(image, rescale_factor) for image in images]
        sizes = sorted({image.shape[1:] for image in images})
        if do_pad:
            divisor = size_divisor or 1
            height, width = (-(-max(size[axis] for size in sizes) // divisor) * divisor for axis in (0, 1))
            margins = [((0, 0), (0, height - image.shape[1]), (0, width - image.shape[2])) for image in images]
            images = [np.pad(image, margin, mode="reflect") for image, margin in zip(images, margins, strict=True)]
        elif return_tensors is not None and len(sizes) > 1:
            raise ValueError(
                f"Images of sizes {sizes} do not make one batch. Set do_pad=True, or process each size by itself."
            )
        return BatchFeature(data={"pixel_values": images}, tensor_type=return_tensors)

    def post_process_image_restoration(
        self,
        outputs: ImageSuperResolutionOutput,
        target_sizes: list[tuple[int, int]] | torch.Tensor | None = None,
        output_type: str = "pil",
    ) -> list[Image.Image] | list[np.ndarray]:
        """
        Make 8-bit images of what [`SemanIRForImageRestoration`] returns: cut, clip to [0, 1], round.

        Args:
            outputs ([`~transformers.modeling_outputs.ImageSuperResolutionOutput`]): Output of the model.
            target_sizes (`list[tuple[int, int]]` or `torch.Tensor` of shape `(batch_size, 2)`, *optional*):
                Height and width of each restored image without padding: those of the input image times the model's
                scale. What lies below and to the right is cut off; nothing is resized.
            output_type (`str`, *optional*, defaults to `"pil"`):
                `"pil"`, or `"np"` for uint8 arrays of shape `(height, width, channels)`, or `(height, width)` for one
                channel.

        Returns:
            `list[PIL.Image.Image]` or `list[np.ndarray]`: One image for each of the batch.

        Raises:
            ValueError: If `outputs` holds no image, the target sizes do not fit, or `output_type` is neither.
        """
        if output_type not in ("pil", "np"):
            raise ValueError(f"`output_type` is {output_type!r}; allowed: 'pil', 'np'.")
        if outputs.reconstruction is None:
            raise ValueError("`outputs` has no `reconstruction`; give what SemanIRForImageRestoration returned.")
        batch = outputs.reconstruction
        height, width = batch.shape[-2:]
        sizes = [(height, width)] * len(batch) if target_sizes is None else [(int(h), int(w)) for h, w in target_sizes]
        if len(sizes) != len(batch):
            raise ValueError(f"`target_sizes` has {len(sizes)} sizes for {len(batch)} images; give one for each.")
        if any(not (0 < h <= height and 0 < w <= width) for h, w in sizes):
            raise ValueError(
                f"`target_sizes` is {sizes}; each must be from 1 x 1 to the restored size {height} x {width}. Give "
                "the input's height and width times the scale of the model."
            )
        pixels = (batch.detach().float().clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
        arrays = [image[:h, :w] for image, (h, w) in zip(pixels, sizes, strict=True)]
        arrays = [image[..., 0] if image.shape[-1] == 1 else image for image in arrays]
        return arrays if output_type == "np" else [Image.fromarray(np.ascontiguousarray(image)) for image in arrays]


__all__ = ["SemanIRImageProcessor"]
