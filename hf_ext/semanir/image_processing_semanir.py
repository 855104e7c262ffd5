# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Image processor of SemanIR: pictures to tensors in [0, 1], and restored tensors back to pictures. No torchvision.

Pixels have the shape [height, width, channels]: grey, grey and alpha, RGB, or RGBA.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_utils import BatchFeature
from transformers.image_utils import ImageInput
from transformers.modeling_outputs import ImageSuperResolutionOutput
from transformers.processing_utils import ImagesKwargs, Unpack
from transformers.utils import logging

# Share of red, green and blue in the brightness of a pixel (ITU-R BT.601), as Pillow has it.
_LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)
# The most of a picture in [0, 1]: noise may exceed white and black a little.
_MOST = 4
# Beside an alpha so many times as large, so many pixels away, a pixel is hidden.
_FAINT, _REACH = 12, 2


def image_to_pixels(image: Image.Image) -> np.ndarray:
    """The pixels of a PIL image, upright as its EXIF data says: uint8, or uint16 for grey of 16 bits (mode `I;16`), of
    1 channel (grey), 2 (grey and alpha), 3 (RGB) or 4 (RGBA)."""
    read_as = str([tile.args for tile in getattr(image, "tile", ())[:1]])
    if image.mode[0] != "I" and any(depth in read_as for depth in (";16B", ";16L", ";16N")):
        logging.get_logger(__name__).warning(f"{image.format} of 16 bits: Pillow reads 8. Give hf_ext the file.")
    load_image(image)
    opened, image = image, ImageOps.exif_transpose(image)
    if (image.mode.startswith("I;16") and opened.format != "FITS") or (image.mode == "I" and opened.format == "PPM"):
        grey16 = spread_grey(np.asarray(image).astype(np.uint16)[..., None], opened)
        return add_alpha(grey16, image.info.get("transparency"))
    # Pillow clips these to 8 bits when it converts them, and of a FITS takes numbers below 0 for large ones.
    if image.mode[0] in "IF":
        raise ValueError(f"PIL mode {image.mode!r} has an unknown range: give an array of uint8, uint16 or floats.")
    grey = image.mode in ("1", "L", "LA", "La")
    if image.has_transparency_data:
        # "La" converts to "LA" only, and grey with a transparent value needs two steps.
        mode = "LA" if grey and image.mode in ("LA", "La") else "RGBA"
        pixels = np.asarray(image if image.mode == mode else image.convert(mode))
        return pixels[..., [0, 3]] if grey and mode == "RGBA" else pixels
    pixels = np.asarray(image.convert("L" if grey else "RGB"))
    return pixels[..., None] if grey else pixels


def load_image(image: Image.Image, say: Callable[[str], None] = lambda line: None) -> None:
    """Decodes a picture. `say` is called if its EXIF data are damaged, which then are empty."""
    if image.info.get("transparency") in range(16) and image.tell() == 0 and (tiles := getattr(image, "tile", None)):
        # Of a PNG of 2 or 4 bits Pillow spreads the pixels to 8, but not the value that is transparent.
        image.info["transparency"] *= {"L;2": 85, "L;4": 17}.get(str(tiles[0].args), 1)
    image.load()
    try:
        image.getexif()
    except Exception as error:
        say(f"its EXIF data are damaged and were left out: {error}")


def spread_grey(pixels: np.ndarray, image: Image.Image) -> np.ndarray:
    """Grey of 16 bits from black, 0, to white, 65535; Pillow gives that of a TIFF as it lies in the file."""
    if not image.mode.startswith("I;16") or not (tags := getattr(image, "tag_v2", image.info.get("tag_v2"))):
        return pixels
    # Bits and photometric interpretation: 12 bits come as 0 to 4095, and only of 8 bits Pillow turns white that is 0.
    top, white_is_zero = 2 ** tags.get(258, (16,))[0] - 1, tags.get(262) == 0
    if (top == 65535 and not white_is_zero) or pixels.max(initial=0) > top:
        return pixels
    spread = np.rint(np.arange(top + 1) * (65535 / top)).astype(np.uint16)
    return (65535 - spread if white_is_zero else spread)[pixels]


def add_alpha(pixels: np.ndarray, clear: Any) -> np.ndarray:
    """Pixels of 16 bits of which those of one colour, if there is one, are transparent."""
    if clear is None:
        return pixels
    alpha = np.where((pixels == clear).all(axis=-1, keepdims=True), 0, 65535)
    return np.concatenate([pixels, alpha.astype(np.uint16)], axis=-1)


def to_plain_numbers(pixels: np.ndarray) -> np.ndarray:
    """An array in the byte order of the machine; uint8 of bool, white at 255, and of what else is from 0 to 255."""
    if pixels.dtype == bool:
        return np.where(pixels, np.uint8(255), np.uint8(0))
    plain = pixels.astype(pixels.dtype.newbyteorder("="), copy=False)
    other = plain.size and plain.dtype.kind in "iu" and plain.dtype not in (np.uint8, np.uint16)
    return plain.astype(np.uint8) if other and plain.min() >= 0 and plain.max() <= 255 else plain


def pixels_to_image(pixels: np.ndarray) -> Image.Image:
    """A PIL image of whole-numbered pixels, uint8 of 1 to 4 channels or uint16 of one: undoes `image_to_pixels`."""
    channels = pixels.shape[-1]
    if pixels.dtype != np.uint8 and channels > 1:
        raise ValueError(f"Pillow has no {pixels.dtype} images with {channels} channels. Use output_type='np'.")
    if not 1 <= channels <= 4:
        raise ValueError(f"A picture has 1 to 4 channels, got {channels}. Use output_type='np'.")
    return Image.fromarray(np.ascontiguousarray(pixels[..., 0] if channels == 1 else pixels))


def to_unit(pixels: np.ndarray) -> np.ndarray:
    """Pixels in [0, 1] as float32: of uint8, uint16, or floats that are in [0, 1] already."""
    if pixels.dtype in (np.uint8, np.uint16):
        return pixels.astype(np.float32) / np.float32(np.iinfo(pixels.dtype).max)
    _check_range(pixels)
    return pixels.astype(np.float32)


def _check_range(pixels: np.ndarray) -> None:
    if pixels.dtype.kind == "f" and pixels.size and (largest := max(pixels.max(), -pixels.min())) > _MOST:
        raise ValueError(f"An image of floats has values up to {largest:g}; give uint8, or floats in [0, 1].")


def from_unit(pixels: np.ndarray, dtype: Any = np.uint8) -> np.ndarray:
    """Floats as whole numbers of uint8 or uint16: clipped to [0, 1], rounded."""
    return np.rint(pixels.clip(0, 1) * np.float32(np.iinfo(dtype).max)).astype(dtype)


def spread_colours(colours: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Colours [H, W, C], with those of pixels that are not `seen` [H, W, 1] replaced by the colours nearby that are.
    What lies below full transparency is any colour, mostly black; a network would draw it into the edges."""
    if seen.all() or not seen.any():
        return colours
    # Each cell of 2 x 2 pixels has the mean of its seen pixels; empty cells are filled from coarser ones.
    height, width = seen.shape[:2]
    odd = [(0, height % 2), (0, width % 2), (0, 0)]
    cells = [np.pad(part, odd).reshape((height + 1) // 2, 2, (width + 1) // 2, 2, -1) for part in (colours, seen)]
    counts = cells[1].sum((1, 3), dtype=np.float32)
    means = (cells[0] * cells[1]).sum((1, 3), dtype=np.float32) / np.maximum(counts, 1)
    coarse = spread_colours(means, counts > 0).repeat(2, 0).repeat(2, 1)[:height, :width]
    if np.issubdtype(colours.dtype, np.integer):
        coarse = np.rint(coarse)
    return np.where(seen, colours, coarse.astype(colours.dtype))


def find_hidden(alpha: np.ndarray) -> np.ndarray:
    """Pixels [H, W] that cannot be seen, or next to nothing of them beside their neighbours."""
    own = torch.from_numpy(alpha.astype(np.float32))[None]
    near = torch.nn.functional.max_pool2d(own, 2 * _REACH + 1, 1, _REACH)
    return ((own <= 0) | (_FAINT * own < near))[0].numpy()


def take_colours(pixels: np.ndarray) -> np.ndarray:
    """Pixels without alpha; colours of those that are hidden are filled from their neighbours."""
    if pixels.shape[-1] % 2:
        return pixels
    colours, alpha = pixels[..., :-1], pixels[..., -1:]
    filled, hidden = spread_colours(colours, alpha > 0), find_hidden(alpha[..., 0])[..., None]
    strong = alpha >= alpha.max() / _FAINT
    return np.where(hidden, spread_colours(colours, strong), filled) if (alpha * hidden).any() else filled


def as_picture(image: Any, wrong: type[ValueError] = ValueError) -> np.ndarray:
    """An array [height, width, channels] of numbers that `to_unit` takes; another shape or NaN raises `wrong`."""
    got = image.dtype if isinstance(image, np.ndarray) else type(image).__name__
    if isinstance(got, str) or not (got.kind in "bf" or got.newbyteorder("=") in (np.uint8, np.uint16)):
        raise TypeError(f"`image` is {got}; give an array of uint8 or uint16, or of floats in [0, 1].")
    pixels = to_plain_numbers(image)
    if pixels.ndim != 3 or not pixels.size:
        raise wrong(f"`image` has shape {pixels.shape}; expected (height, width, channels), each at least 1.")
    if pixels.dtype.kind == "f" and not np.isfinite(pixels).all():
        raise wrong("`image` contains infinite values or NaN, which cannot be restored.")
    return pixels


def restore_picture(pixels: np.ndarray, config: Any, restore: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Take a picture [h, w, 1 to 4], see `to_unit`, past a network and give the result, in floats, what the picture
    had: the one way of pixels into a model. `restore` restores images [n, h, w, config.num_channels].

    A colour model restores grey as three equal channels, a grey model each colour by itself. For a model that
    demosaicks, one channel is an RGGB Bayer mosaic, four of floats are a mosaic that is packed already."""
    picture = to_unit(pixels)
    height, width, channels = picture.shape
    taken = config.num_channels
    if channels == taken and not (config.demosaicks and np.issubdtype(pixels.dtype, np.integer)):
        return restore(picture[None])[0]
    if config.demosaicks and channels == 1:
        # The four sites of each 2 x 2 cell as channels. An odd side is reflected, which keeps the pattern.
        mosaic = np.pad(picture[..., 0], [(0, height % 2), (0, width % 2)], mode="reflect")
        packed = np.stack([mosaic[row::2, column::2] for row in (0, 1) for column in (0, 1)], axis=-1)
        return restore(packed[None])[0, :height, :width]
    colours = take_colours(picture)
    if (colours.shape[-1], taken) in ((taken, taken), (1, 3)):
        restored = restore(np.repeat(colours, taken // colours.shape[-1], axis=-1)[None])[0]
    elif (colours.shape[-1], taken) == (3, 1):
        restored = np.moveaxis(restore(np.moveaxis(colours, -1, 0)[..., None])[..., 0], 0, -1)
    else:
        wanted = "1 channel (a mosaic) or 4 (packed)" if config.demosaicks else "1 to 4" if taken in (1, 3) else taken
        raise ValueError(f"the picture has {channels} channels; this model takes {wanted}, as the last axis.")
    return match_picture(restored, picture)


def match_picture(restored: np.ndarray, picture: np.ndarray) -> np.ndarray:
    """Give restored colours [H, W, 1 or 3] what the picture [h, w, 1 to 4], in [0, 1], had beside them: grey stays
    grey, alpha is kept and enlarged by itself. Hidden colours are the picture's again, by their part in a pixel."""
    if picture.shape[-1] <= 2 and restored.shape[-1] == 3:
        restored = (restored @ _LUMA)[..., None]
    if picture.shape[-1] % 2:
        return restored
    own, alpha, hidden = picture[..., :-1], picture[..., -1], find_hidden(picture[..., -1])
    part, size = hidden.astype(np.float32)[..., None], restored.shape[:2]
    if size != alpha.shape:
        planes = (Image.fromarray(plane) for plane in (alpha, alpha * hidden))
        alpha, faint = (np.asarray(plane.resize(size[::-1], Image.Resampling.BICUBIC)).clip(0, 1) for plane in planes)
        part = (faint / np.maximum(alpha, 1e-6)).clip(0, 1)[..., None]
        rows, columns = (np.arange(new) * old // new for new, old in zip(size, hidden.shape, strict=True))
        own = spread_colours(own, picture[..., -1:] > 0)[rows][:, columns]
    restored = part * own + (1 - part) * restored if part.any() else restored
    return np.concatenate([restored, alpha[..., None]], axis=-1)


def _padded_size(sizes: list[tuple[int, ...]], divisor: int | None) -> list[int]:
    """Height and width of a batch: the largest, up to a multiple."""
    return [-(-max(side) // (divisor or 1)) * (divisor or 1) for side in zip(*sizes, strict=True)]


def _load_inputs(image: Any) -> Any:
    """Files as pictures with all that they have, tensors as arrays, grey with a channel in front; in lists too."""
    if isinstance(image, (list, tuple)):
        return [_load_inputs(one) for one in image]
    if isinstance(image, (str, os.PathLike)) and os.path.isfile(image):
        # transformers makes RGB of 8 bits of it.
        with Image.open(image) as opened:
            load_image(opened)
            return opened
    if isinstance(image, torch.Tensor):
        # numpy has no bfloat16.
        image = (image.float() if image.dtype == torch.bfloat16 else image).detach().cpu().numpy()
    if not isinstance(image, np.ndarray):
        return image
    image = to_plain_numbers(image)
    return image[None] if image.ndim == 2 else image


class SemanIRImageProcessorKwargs(ImagesKwargs, total=False):
    """size_divisor (`int`, *optional*): Pad height and width to multiples of this, for other tools than the model."""

    size_divisor: int | None


class SemanIRImageProcessor(PilBackend):
    """
    Prepare images for [`SemanIRForImageRestoration`], and turn its outputs into images.

    Images are neither resized nor normalised: values become [0, 1], channels come first, and the EXIF orientation of a
    PIL image is applied. Images of several sizes are padded by reflection, at the bottom and right, to the largest
    height and width of the batch. The model attends to the padding, so near it the result may differ a little from
    that of the image alone. To avoid that, process images of different sizes one at a time.

    Transparency does not go through the model. Pass the images to `post_process_image_restoration` too: its results
    then have their size, alpha, grey and 16 bits.

    Args:
        do_convert_rgb (`bool`, *optional*, defaults to `True`):
            Give grey images three equal channels. Set it to `False` for models of one channel, or four.
        do_rescale (`bool`, *optional*, defaults to `True`):
            Multiply by `rescale_factor`. Set it to `False` for float images in [0, 1].
        rescale_factor (`float`, *optional*, defaults to 1 / 255):
            Factor that brings the values to [0, 1]. The default is 1 / 65535 for uint16.
        do_pad (`bool`, *optional*, defaults to `True`):
            Pad images of several sizes to the largest, and all to `size_divisor`.
        size_divisor (`int`, *optional*): Pad height and width to multiples of this.

    Example:
        >>> from PIL import Image
        >>> from hf_ext import SemanIRConfig, SemanIRForImageRestoration, SemanIRImageProcessor
        >>> config = SemanIRConfig(embed_dim=16, depths=[2], num_heads=[2], window_size=8, top_k=16)
        >>> model, processor = SemanIRForImageRestoration(config), SemanIRImageProcessor()
        >>> image = Image.new("RGBA", (30, 20))
        >>> outputs = model(**processor(image, return_tensors="pt"))
        >>> processor.post_process_image_restoration(outputs, images=image)[0].mode
        'RGBA'
    """

    valid_kwargs = SemanIRImageProcessorKwargs
    model_input_names = ["pixel_values"]

    do_convert_rgb = True
    do_rescale = True
    rescale_factor = 1 / 255
    do_pad = True
    size_divisor = None

    def preprocess(self, images: ImageInput, **kwargs: Unpack[SemanIRImageProcessorKwargs]) -> BatchFeature:
        """
        Prepare images for the model.

        Args:
            images (`ImageInput`): An image or a list: files, PIL images, or arrays or tensors of height and width, or
                with 1 to 4 channels (grey, grey and alpha, RGB, RGBA) first or last; of (3, 200, 3) they are first,
                with a warning. uint8, uint16, or other numbers from 0 to 255; bool is black and white.
            kwargs: Any option of the processor but `size_divisor`, for this call only, `return_tensors` (`"pt"` or
                `"np"`), and `input_data_format` (`"channels_first"` or `"channels_last"`).

        Returns:
            [`BatchFeature`]: `pixel_values` of shape `(batch_size, num_channels, height, width)`, values in [0, 1].

        Raises:
            ValueError: No image is given, images do not make one batch, an array has another shape, or values are
                not finite, or not in [0, 1] in the end.
        """
        if isinstance(images, (list, tuple)) and not images:
            raise ValueError("`images` is empty; give at least one image.")
        if (divisor := kwargs.get("size_divisor", self.size_divisor)) != self.size_divisor:
            raise ValueError(f"`size_divisor` is of the processor: SemanIRImageProcessor(size_divisor={divisor}).")
        return super().preprocess(_load_inputs(images), **kwargs)

    def process_image(
        self, image: Any, do_convert_rgb: bool | None = None, input_data_format: Any = None, **kwargs: Any
    ) -> np.ndarray:
        """Turn one image into an array of channels, height, width. See [`~SemanIRImageProcessor.preprocess`]."""
        pixels = self._read(image, input_data_format)
        # Four channels of an array may be a packed mosaic; no model takes alpha.
        if isinstance(image, Image.Image) or do_convert_rgb or pixels.shape[-1] == 2:
            pixels = take_colours(pixels)
        pixels = np.moveaxis(pixels, -1, 0)
        return np.repeat(pixels, 3, axis=0) if do_convert_rgb and len(pixels) == 1 else pixels

    def _read(self, image: Any, input_data_format: Any) -> np.ndarray:
        """Pixels [height, width, channels] of an image, alpha and all."""
        if isinstance(image, Image.Image):
            return image_to_pixels(image)
        ends = {image.shape[0], image.shape[-1]} if image.ndim == 3 and image.size else set()
        if ends.isdisjoint((1, 2, 3, 4)):
            raise ValueError(f"An image has shape {image.shape}; give (height, width), or 1 to 4 channels at an end.")
        if input_data_format is None and ends.isdisjoint((1, 3, 4)):
            # transformers knows no grey with alpha.
            input_data_format = "channels_last" if image.shape[-1] == 2 else "channels_first"
        return np.moveaxis(super().process_image(image, False, input_data_format), 0, -1)

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
        unused = [name for name in ("do_resize", "do_center_crop", "do_normalize") if kwargs.get(name)]
        if unused or kwargs.get("data_format") not in (None, "channels_first"):
            given = ", ".join(unused) or f"data_format={kwargs['data_format']}"
            raise ValueError(f"{given} is not for this processor: the model takes images as they are, channels first.")
        if not all(np.isfinite(image).all() for image in images):
            raise ValueError("An image contains infinite values or NaN, which cannot be restored.")
        if do_rescale:
            images = [self._rescale_image(image, rescale_factor) for image in images]
        for image in images:
            _check_range(image)
        sizes = sorted({image.shape[1:] for image in images})
        if do_pad:
            height, width = _padded_size(sizes, size_divisor)
            margins = [((0, 0), (0, height - image.shape[1]), (0, width - image.shape[2])) for image in images]
            images = [np.pad(image, margin, mode="reflect") for image, margin in zip(images, margins, strict=True)]
        elif return_tensors is not None and len(sizes) > 1:
            raise ValueError(f"Images of sizes {sizes} form no batch. Set do_pad=True, or process each size alone.")
        return BatchFeature(data={"pixel_values": images}, tensor_type=return_tensors)

    def _rescale_image(self, image: np.ndarray, factor: float) -> np.ndarray:
        usual, top = factor == type(self).rescale_factor, float(np.abs(image).max())
        if image.dtype == np.uint16 and usual:
            factor = 1 / 65535
        # Multiplied once more, a picture would be black. Noise may exceed white, which is no whole number then.
        if usual and image.dtype.kind == "f" and (0 < top <= 1 or (top <= _MOST and (image % 1).any())):
            raise ValueError(f"An image of {image.dtype} is in [0, 1] already; set do_rescale=False.")
        # Floats may exceed white: noise is not always clipped.
        if image.dtype.kind in "iu" and (top * factor > 1 + 1e-6 or image.min() < 0):
            told = f"An image of {image.dtype} has values from {image.min()} to {image.max()}, which `rescale_factor`"
            raise ValueError(f"{told} {factor:g} does not bring to [0, 1]; give uint8, uint16, or a factor that does.")
        return self.rescale(image, factor)

    def post_process_image_restoration(
        self,
        outputs: ImageSuperResolutionOutput,
        target_sizes: list[tuple[int, int]] | torch.Tensor | None = None,
        output_type: str = "pil",
        images: ImageInput | None = None,
        input_data_format: str | None = None,
    ) -> list[Image.Image] | list[np.ndarray]:
        """
        Make images of what [`SemanIRForImageRestoration`] returns: cut, clip to [0, 1], round.

        Args:
            outputs ([`~transformers.modeling_outputs.ImageSuperResolutionOutput`]): Output of the model.
            target_sizes (`list[tuple[int, int]]` or `torch.Tensor` of shape `(batch_size, 2)`, *optional*):
                Height and width of each restored image without padding: those of the input image times the model's
                scale. What lies below and to the right is cut off; nothing is resized. `images` makes it needless.
            output_type (`str`, *optional*, defaults to `"pil"`): `"pil"`, or `"np"` for arrays of shape `(height,
                width, channels)`, or `(height, width)` for one channel; uint8, or uint16 where `images` has 16 bits.
            images (`ImageInput`, *optional*): The inputs of the processor. The restored images have their size times
                the model's scale, their alpha channel (resized bicubically if the model enlarges), 16 bits and grey.
            input_data_format (`str`, *optional*): That of `images`, as the processor was given it.

        Returns:
            `list[PIL.Image.Image]` or `list[np.ndarray]`: One image for each of the batch.

        Raises:
            ValueError: The output type is unknown, `outputs` has no images, or sizes or images are not one for each.
        """
        if output_type not in ("pil", "np"):
            raise ValueError(f"`output_type` is {output_type!r}; allowed: 'pil', 'np'.")
        if outputs.reconstruction is None:
            raise ValueError("`outputs` has no `reconstruction`; give what SemanIRForImageRestoration returned.")
        batch = outputs.reconstruction.detach().float().permute(0, 2, 3, 1).cpu().numpy()
        pictures = None if images is None else self._pictures(images, input_data_format)
        # Height and width of each image of the batch without its padding.
        height, width = batch.shape[1:3]
        for name, what, given in (("target_sizes", "sizes", target_sizes), ("images", "images", pictures)):
            if given is not None and len(given) != len(batch):
                raise ValueError(f"`{name}` has {len(given)} {what} for {len(batch)} images; give one for each.")
        sizes = [(height, width)] * len(batch)
        if target_sizes is not None:
            sizes = [(int(h), int(w)) for h, w in target_sizes]
        elif pictures is not None:
            padded = _padded_size([picture.shape[:2] for picture in pictures], self.size_divisor)
            scale = height // padded[0]
            if (padded[0] * scale, padded[1] * scale) != (height, width):
                told = f"The restored {height} x {width} is no multiple of the {padded[0]} x {padded[1]} of `images`"
                raise ValueError(f"{told}. Give the images that the model was given, or `target_sizes`.")
            sizes = [(picture.shape[0] * scale, picture.shape[1] * scale) for picture in pictures]
        if any(not (0 < h <= height and 0 < w <= width) for h, w in sizes):
            raise ValueError(f"`target_sizes` is {sizes}; give input sizes x scale, to the size {height} x {width}.")
        results = [image[:h, :w] for image, (h, w) in zip(batch, sizes, strict=True)]
        dtypes: list[Any] = [np.uint8] * len(results)
        if pictures is not None:
            results = [match_picture(image, to_unit(own)) for image, own in zip(results, pictures, strict=True)]
            dtypes = [np.uint16 if picture.dtype == np.uint16 else np.uint8 for picture in pictures]
        results = [from_unit(image, dtype) for image, dtype in zip(results, dtypes, strict=True)]
        if output_type == "pil":
            return [pixels_to_image(image) for image in results]
        return [image[..., 0] if image.shape[-1] == 1 else image for image in results]

    def _pictures(self, images: ImageInput, input_data_format: str | None) -> list[np.ndarray]:
        """The given images as pixels that `to_unit` takes, alpha and all."""
        flat: Any = self._prepare_images_structure(_load_inputs(images))
        pictures = [self._read(image, input_data_format) for image in flat]
        # Other floats were from 0 to 255, or the processor would have refused them.
        return [one / 255 if one.dtype.kind == "f" and one.max() > _MOST else one for one in pictures]
