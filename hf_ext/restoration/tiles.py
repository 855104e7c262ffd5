"""Restore one image of any size and kind with a SemanIR model: whole or in tiles, eight times over, in any precision.

Images have the shape [height, width, channels], floats in [0, 1]. Image and result stay on the CPU; what the model
works on is moved to its device.
"""

import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import reduce
from numbers import Integral, Real
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from accelerate.utils import get_max_memory
from accelerate.utils.memory import should_reduce_batch_size
from transformers.utils import logging

import hf_ext.fast.semanir  # noqa: F401 (it enters itself where pictures are restored)
from hf_ext.semanir.image_processing_semanir import as_picture, from_unit, restore_picture, to_unit
from hf_ext.semanir.modeling_semanir import SemanIRForImageRestoration

from ..errors import DataError, UsageError
from .damage import choose_strength, estimate_damage

logger = logging.get_logger(__name__)

Progress = Callable[[int, int], None]

# Number of feature maps of the first width that the model keeps beside its memory budget: a columnar and a U-shaped
# model of three levels, 48 wide, took 257 and 397 bytes a pixel, images and results included.
_MAPS = 2


def restore_image(
    model: SemanIRForImageRestoration,
    image: np.ndarray,
    *,
    tile: int | str | None = None,
    self_ensemble: bool = False,
    top_k: int | None = None,
    strength: float | str | None = None,
    wrap: bool = False,
    progress: Progress | None = None,
) -> np.ndarray:
    """
    Restore one image of any size and kind, as the command, the pipeline and the evaluation of a training do.

    By default the whole image is restored at once: the model bounds its temporary memory (`memory_budget`), and the
    result is exact. Tiles need still less memory. They lie on the grid of the attention windows and overlap by four
    windows, or two of the coarsest level of a U. The outer half of the overlap is discarded, the rest is blended with
    raised cosines. So there is no seam: only effects that reach further than the overlap differ from the whole image.

    Args:
        model ([`SemanIRForImageRestoration`]): The model, on any device, in any precision. A part where half precision
            overflows is restored again in float32, with a warning.
        image (`np.ndarray` of shape `(height, width, channels)`): Floats in [0, 1], which noise may exceed, or uint8
            or uint16; the result has the same type and channels. bool is black and white, of which uint8 comes out. 1
            channel is grey, 2 are grey and alpha, 3 are RGB, 4 are RGBA, or the input of a model of four channels. A
            colour model restores a grey image as a grey colour image; a grey model restores each colour separately.
            For a model that demosaicks, 1 channel is an RGGB Bayer mosaic, and 4 channels of floats are a packed
            mosaic.
        tile (`int` or `str`, *optional*): Side of a tile in pixels of the image, a multiple of
            `config.multiple_of` that is at least twice the overlap; or `"auto"`: tiles only if the whole
            image would need more than half of the free memory, and smaller ones where they do not fit.
        self_ensemble (`bool`, *optional*, defaults to `False`): Restore all eight flips and turns of the image and
            average them: a little better, eight times the work.
        top_k (`int`, *optional*): Keys per token; the model's own number if not given.
        strength (`float` or `str`, *optional*): Share of the change, 0 to 1, as a weighted mean of image and result,
            for models that keep the size. By default the model's `restoration_strength` in `config.json` (the released
            `photo` has one), or else 1. `"auto"` is [`~damage.choose_strength`] of the noise and JPEG quality that
            [`~damage.estimate_damage`] finds: less, down to 0, for an image that is nearly clean. It does not detect
            blur, compression by WebP, or JPEG before a resize.
        wrap (`bool`, *optional*, defaults to `False`): Treat opposite edges as neighbours, so that a texture repeated
            side by side has no seam. The image is surrounded by copies of itself, as wide as tiles overlap.
        progress (`Callable[[int, int], None]`, *optional*): Called with the number of finished pixels and of all
            pixels; each of the eight passes of a self-ensemble counts an eighth.

    Returns:
        `np.ndarray` of shape `(height * scale, width * scale, channels)`: For floats float32, not clipped; else of the
        dtype of the image. Alpha is kept, and resized bicubically if the model enlarges.

    Raises:
        UsageError: If image or options cannot be used: another shape, values that are NaN or infinite, a `strength`
            that is neither in [0, 1] nor `"auto"`, a `tile` that does not fit the model.
        ValueError: If the image has channels that the model does not take.
        TypeError: If the image is no array of uint8, uint16 or floats.
        DataError: If the model returns infinite values or NaN in float32 as well.

    Example:
        >>> import numpy as np
        >>> from hf_ext import SemanIRConfig, SemanIRForImageRestoration, restore_image
        >>> config = SemanIRConfig(embed_dim=16, depths=[2], num_heads=[2], window_size=8, top_k=16, scale=2)
        >>> restored = restore_image(SemanIRForImageRestoration(config), np.zeros((20, 30, 4), np.uint8))
        >>> restored.shape, restored.dtype
        ((40, 60, 4), dtype('uint8'))
    """
    image = as_picture(image, UsageError)
    whole_numbers = image.dtype.kind == "u"
    config = model.config
    strength = check_options(model, tile=tile, self_ensemble=self_ensemble, strength=strength, wrap=wrap)
    margin = tile_overlap(model) if wrap else 0
    surrounded = np.pad(image, ((margin, margin), (margin, margin), (0, 0)), mode="wrap") if wrap else image
    work = _Work(model, tile, self_ensemble, top_k, progress, surrounded.shape[0] * surrounded.shape[1])
    restored = restore_picture(surrounded, config, work.restore)
    if wrap:
        first, height, width = (size * config.scale for size in (margin, *image.shape[:2]))
        restored = restored[first : first + height, first : first + width]
    if strength != 1:
        share = choose_strength(estimate_damage(image)) if isinstance(strength, str) else strength
        given = to_unit(image)
        restored = given + np.float32(share) * (restored - given)
    return from_unit(restored, image.dtype) if whole_numbers else restored


def check_options(
    model: SemanIRForImageRestoration,
    *,
    tile: int | str | None = None,
    self_ensemble: bool = False,
    strength: float | str | None = None,
    wrap: bool = False,
    **others: Any,
) -> float | str:
    """Refuses options of [`restore_image`] that make no sense, or not for this model; returns the strength."""
    config, overlap = model.config, tile_overlap(model)
    if config.demosaicks and (self_ensemble or wrap):
        option = "self_ensemble" if self_ensemble else "wrap"
        raise UsageError(f"`{option}` would change the order of a mosaic's colours: leave it out.")
    step = config.multiple_of
    if tile not in (None, "auto") and (not isinstance(tile, Integral) or int(tile) % step or int(tile) < 2 * overlap):
        which = f"{step} (this model's windows) from {2 * overlap} up"
        raise UsageError(f"`tile` is {tile!r}; give a multiple of {which}, 'auto', or None for the whole image.")
    chosen: Any = getattr(config, "restoration_strength", None) if strength is None else strength
    if chosen is None:
        return 1.0
    if chosen != "auto" and not (isinstance(chosen, Real) and 0 <= float(chosen) <= 1):
        raise UsageError(f"`strength` is {chosen!r}; give 0 (the image) to 1 (the result of the model), or 'auto'.")
    if chosen != 1 and config.scale != 1:
        kind = "demosaicks" if config.demosaicks else "enlarges it"
        raise UsageError(f"`strength` {chosen} needs a model that keeps the image size and kind; this one {kind}.")
    return cast(float | str, chosen)


def tile_overlap(model: SemanIRForImageRestoration) -> int:
    """Pixels that neighbouring tiles share: a multiple of the model's windows."""
    config = model.config
    return max(config.tile_overlap, 4 * config.window_size * config.stem_scale)


def lacks_memory(error: Exception) -> bool:
    """Tells that memory is full: Python's, a GPU's, or a CPU's, of which torch says it by a RuntimeError."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or should_reduce_batch_size(error)


class Span(NamedTuple):
    """One tile along one axis: its pixels, and how much each restored pixel counts, [(stop - start) * scale]."""

    start: int
    stop: int
    weights: np.ndarray


def tile_spans(length: int, tile: int, overlap: int, scale: int = 1) -> list[Span]:
    """Cut an axis into tiles that share `overlap` pixels, and whose weights add up to 1 everywhere."""
    # Over the middle half of an overlap, m pixels, a tile's weights rise as sin^2(pi (i + 1/2) / 2m), a raised cosine,
    # and its neighbour's fall as cos^2 of the same, so that both add up to 1. Nearer to a tile's border, where it
    # lacks its surroundings, they are 0.
    count = max(1, math.ceil((length - overlap) / (tile - overlap)))
    shared = overlap * scale
    unused = shared // 4
    places = np.arange(shared - 2 * unused) + 0.5
    rise = np.pad(np.sin(np.pi * places / (2 * max(1, len(places)))) ** 2, unused, constant_values=(0, 1))
    spans = []
    for number in range(count):
        start = number * (tile - overlap)
        stop = min(start + tile, length)
        weights = np.ones((stop - start) * scale)
        if number > 0:
            weights[:shared] = rise
        if number < count - 1:
            weights[len(weights) - shared :] = 1 - rise
        spans.append(Span(start, stop, weights.astype(np.float32)))
    return spans


@contextmanager
def _in_float32(model: SemanIRForImageRestoration) -> Iterator[None]:
    """The model in float32 without autocast, and back."""
    dtype = model.dtype
    model.float()
    try:
        with torch.autocast(model.device.type, enabled=False):
            yield
    finally:
        cast(torch.nn.Module, model).to(dtype)


@dataclass
class _Work:
    """The passes over one image."""

    model: SemanIRForImageRestoration
    tile: int | str | None
    self_ensemble: bool
    top_k: int | None
    progress: Progress | None
    # Of the whole image, all and those that are done.
    pixels: int
    done: float = 0.0
    precise: bool = False

    def restore(self, images: np.ndarray) -> np.ndarray:
        """All passes over each image [n, height, width, channels]."""
        self.config, self.overlap = self.model.config, tile_overlap(self.model)
        self.turns = 8 if self.self_ensemble else 1
        self.passes = self.turns * len(images)
        return np.stack([self._restore_one(image) for image in images])

    def _restore_one(self, image: np.ndarray) -> np.ndarray:
        side = self._automatic_tile(image) if isinstance(self.tile, str) else self.tile
        while True:
            done = self.done
            try:
                turns = (self._restore_turned(image, number, side) for number in range(self.turns))
                return reduce(operator.add, turns) / np.float32(self.turns)
            except RuntimeError as error:
                smaller = self._tile_below(side or max(image.shape[:2]))
                if not lacks_memory(error) or self.tile != "auto" or smaller == side:
                    raise
                logger.warning(f"Memory of {self.model.device} is full: continuing with tiles of {smaller} pixels.")
                side, self.done = smaller, done

    def _restore_turned(self, image: np.ndarray, number: int, side: int | None) -> np.ndarray:
        """One pass over one of the eight flips and turns, and back."""
        mirror = -1 if number >= 4 else 1
        restored = self._restore_tiles(np.rot90(image[:, ::mirror], number % 4), side)
        return np.rot90(restored, -(number % 4))[:, ::mirror]

    def _restore_tiles(self, image: np.ndarray, side: int | None) -> np.ndarray:
        """One pass, in tiles of that side or whole."""
        height, width = image.shape[:2]
        if side is None or (height <= side and width <= side):
            return self._run(image, self.pixels)
        scale, overlap = self.config.scale, self.overlap
        result = np.zeros((height * scale, width * scale, self.config.num_channels_out), np.float32)
        rows, columns = (tile_spans(length, side, overlap, scale) for length in (height, width))
        for row in rows:
            for column in columns:
                tile = image[row.start : row.stop, column.start : column.stop]
                part = self._run(tile, self.pixels / (len(rows) * len(columns)))
                part *= row.weights[:, None, None] * column.weights[:, None]
                place = result[row.start * scale : row.stop * scale, column.start * scale : column.stop * scale]
                place += part
        return result

    def _run(self, image: np.ndarray, counted: float) -> np.ndarray:
        """One call of the model, in float32 from the first one on that overflowed in half precision."""
        pixel_values = torch.from_numpy(image.transpose(2, 0, 1).copy())[None].to(self.model.device)
        while True:
            with torch.no_grad(), _in_float32(self.model) if self.precise else nullcontext():
                output = self.model(pixel_values=pixel_values, top_k=self.top_k).reconstruction
            restored: np.ndarray = output[0].float().permute(1, 2, 0).contiguous().cpu().numpy()
            if np.isfinite(restored).all():
                break
            half = self.model.dtype != torch.float32 or torch.is_autocast_enabled(self.model.device.type)
            if self.precise or not half:
                raise DataError("the model gives infinite values or NaN in float32 too: damaged or untrained weights.")
            logger.warning(f"{self.model.dtype} overflowed: restoring again in float32. bfloat16 does not overflow.")
            self.precise = True
        self.done += counted / self.passes
        if self.progress is not None:
            self.progress(min(self.pixels, round(self.done)), self.pixels)
        return restored

    def _automatic_tile(self, image: np.ndarray) -> int | None:
        """The largest tile that needs at most half of the free memory; None if the whole image does."""
        device, memory = self.model.device, get_max_memory()
        free = int(memory[device.type if device.type in memory else device.index or 0])
        allowed = free / 2 - (self.model.memory_budget or 0)
        height, width = image.shape[:2]
        pixels = max(0.0, allowed) / _bytes_per_pixel(self.model)
        if height * width <= pixels:
            return None
        step = self.config.multiple_of
        return max(self._tile_below(0), int(math.sqrt(pixels)) // step * step)

    def _tile_below(self, side: int) -> int:
        """About half of a side, on the grid, not below the smallest tile."""
        step, overlap = self.config.multiple_of, self.overlap
        return max(2 * overlap, side // 2 // step * step)


def bytes_needed(model: SemanIRForImageRestoration, height: int, width: int) -> float:
    """Estimate of the memory that an image of this size needs, restored as a whole."""
    # Temporary buffers of a layer are a few times what is held, and end at their budget.
    held = height * width * _bytes_per_pixel(model)
    return held + min(3 * held, model.memory_budget or math.inf)


def _bytes_per_pixel(model: SemanIRForImageRestoration) -> float:
    """Estimate of what the model holds for a pixel of its input, beside its budget of temporary buffers."""
    config = model.config
    # Of a token, which stands for `stem_scale` pixels of a side.
    token = _MAPS * config.embed_dim * model.dtype.itemsize + 2 * config.window_size**2 / 8
    result = 2 * 4 * config.scale**2 * config.num_channels_out
    return float(token / config.stem_scale**2 + result)
