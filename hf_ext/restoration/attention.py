# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Drawings of the key-semantic neighbours of a patch in SemanIR."""

from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from hf_ext.semanir.image_processing_semanir import to_unit
from hf_ext.semanir.modeling_semanir import SemanIRForImageRestoration, SemanIRStage
from hf_ext.semanir.ops_semanir import Dictionary, build_dictionary, partition_windows

from ..errors import UsageError
from ..figures import new_figure, picture_of
from .comparison import show_colours

_KEYS, _WINDOW, _PATCH = "#00d7ff", "#ffc800", "#ff2828"
# Largest part of the picture around the patch that the network gets.
_LARGEST = 768


class Neighbours(NamedTuple):
    """The keys of one token."""

    # Top, left, bottom, right in pixels.
    window: tuple[int, int, int, int]
    # Place in the window, in tokens.
    patch: tuple[int, int]
    # For each k, which tokens of the window it attends to.
    keys: dict[int, np.ndarray]
    similarity: np.ndarray
    # Pixels of a token's side.
    cell: int


def find_neighbours(
    model: SemanIRForImageRestoration, image: np.ndarray, at: tuple[int, int], stage: int, top_k: list[int]
) -> Neighbours:
    """
    The key-semantic neighbours of the token at a pixel (column, row) of an image in [0, 1], from the dictionary that
    the model builds of a stage's input. If the stage attends in two partitions, the one with the token nearer to the
    middle of its window is used.
    """
    stages = [module for module in model.modules() if isinstance(module, SemanIRStage)]
    if not 1 <= stage <= len(stages):
        raise UsageError(f"stage {stage} does not exist; the model has stages 1 to {len(stages)}.")
    if min(top_k, default=0) < 1:
        raise UsageError(f"top-k is {top_k}; give whole numbers of at least 1.")
    chosen, inputs = _stage_inputs(model, image, stage)
    cell = inputs[0].shape[-1] // inputs[1].shape[-1] * model.config.stem_scale
    tokens = inputs[1].permute(0, 2, 3, 1)
    row, column = at[1] // cell, at[0] // cell
    config = model.config

    def build(shifted: bool, k: int) -> Dictionary:
        return build_dictionary(tokens, config.window_size, shifted, k, config.similarity, config.include_self)

    def place(shifted: bool) -> tuple[Dictionary, int, int, float]:
        """The partition, its window with the token, the token's number in it and its distance from the middle."""
        found = build(shifted, 1)
        (high, wide), (down, right) = found.window, found.shift
        moved = (row - down) % tokens.shape[1], (column - right) % tokens.shape[2]
        inside = moved[0] % high, moved[1] % wide
        number = moved[0] // high * (tokens.shape[2] // wide) + moved[1] // wide
        away = max(abs(2 * inside[0] + 1 - high) / high, abs(2 * inside[1] + 1 - wide) / wide)
        return found, number, inside[0] * wide + inside[1], away

    shifted = min(set(chosen.shifted), key=lambda choice: place(choice)[3])
    partition, number, token, _ = place(shifted)
    high, wide = partition.window
    top = (number // (tokens.shape[2] // wide)) * high + partition.shift[0]
    left = (number % (tokens.shape[2] // wide)) * wide + partition.shift[1]
    keys = {k: _keys_of(build(shifted, k), number, token) for k in top_k}
    window = partition_windows(tokens, partition.window, partition.shift)[number].float()
    if config.similarity == "cosine":
        window = torch.nn.functional.normalize(window, dim=-1)
    similarity = (window @ window[token]).reshape(high, wide).cpu().numpy()
    box = (top * cell, left * cell, (top + high) * cell, (left + wide) * cell)
    return Neighbours(box, divmod(token, wide), keys, similarity, cell)


def _stage_inputs(
    model: SemanIRForImageRestoration, image: np.ndarray, stage: int
) -> tuple[SemanIRStage, tuple[torch.Tensor, torch.Tensor]]:
    """The stage, and the inputs of the first stage and of that one; stages are counted as they run."""
    ran: list[tuple[SemanIRStage, torch.Tensor]] = []
    handles = [
        module.register_forward_pre_hook(lambda module, given: ran.append((module, given[0].detach().clone())))
        for module in model.modules()
        if isinstance(module, SemanIRStage)
    ]
    pixel_values = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1), dtype=np.float32))[None]
    try:
        with torch.no_grad():
            model(pixel_values=pixel_values.to(model.device))
    finally:
        for handle in handles:
            handle.remove()
    return ran[stage - 1][0], (ran[0][1], ran[stage - 1][1])


def _keys_of(dictionary: Dictionary, window: int, token: int) -> np.ndarray:
    """Tokens of its window to which a token attends."""
    count = dictionary.window[0] * dictionary.window[1]
    if dictionary.bits is None:
        return np.ones(dictionary.window, bool)
    packed = dictionary.bits[window, token].cpu().numpy()
    return np.unpackbits(packed, bitorder="little")[:count].astype(bool).reshape(dictionary.window)


def explain(
    model: SemanIRForImageRestoration,
    pixels: np.ndarray,
    at: tuple[int, int] | None = None,
    stage: int = 1,
    top_k: list[int] | None = None,
) -> Image.Image:
    """
    Draw the key-semantic neighbours of a patch on the picture, for several k.

    The picture with the patch's window; the window's tokens by similarity to the patch; and for each k the window with
    the chosen keys bright and outlined. Of a large picture the network sees 768 x 768 pixels around the patch.
    """
    config = model.config
    if config.num_channels not in (1, 3):
        raise UsageError(f"the model has {config.num_channels} channels; explain supports 1 (grey) or 3 (RGB).")
    height, width = pixels.shape[:2]
    at = at or (width // 2, height // 2)
    if not (0 <= at[0] < width and 0 <= at[1] < height):
        raise UsageError(f"there is no pixel {at[0]},{at[1]}; the picture has {width} x {height}, counted from 0.")
    step = config.descriptor.multiple_of
    # On the grid of windows, so that the patch's window is the one that it has in the whole picture.
    corner = [
        max(0, min(place - _LARGEST // 2, side - _LARGEST)) // step * step
        for place, side in zip(at, (width, height), strict=True)
    ]
    part = pixels[corner[1] : corner[1] + _LARGEST + step, corner[0] : corner[0] + _LARGEST + step]
    colours = show_colours(part)
    image = to_unit(
        colours if config.num_channels == 3 else np.asarray(Image.fromarray(colours).convert("L"))[..., None]
    )
    counts = top_k or sorted({max(1, config.window_size**2 // share) for share in (16, 8, 4, 2)})
    found = find_neighbours(model, image, (at[0] - corner[0], at[1] - corner[1]), stage, counts)
    top, left, bottom, right = found.window
    moved = Neighbours((top + corner[1], left + corner[0], bottom + corner[1], right + corner[0]), *found[1:])
    return _draw(show_colours(pixels), moved, stage)


def _draw(picture: np.ndarray, found: Neighbours, stage: int) -> Image.Image:
    """The overview, the similarity and a panel for each k, three to a row."""
    count, rows = found.similarity.size, -(-(2 + len(found.keys)) // 3)
    figure = new_figure(10.2, 3.6 * rows)
    axes = figure.subplots(rows, 3, squeeze=False).ravel()
    for axis in axes:
        axis.set_axis_off()
    top, left, bottom, right = found.window
    axes[0].set_title("picture, window and patch")
    axes[0].imshow(picture)
    _frame(axes[0], (left, top), right - left, bottom - top, _WINDOW)
    axes[0].plot(left + (found.patch[1] + 0.5) * found.cell, top + (found.patch[0] + 0.5) * found.cell, "o", c=_PATCH)
    # By rank, since one outlier would hide the others.
    axes[1].set_title(f"rank of similarity to the patch, stage {stage}")
    ranks = found.similarity.ravel().argsort().argsort().reshape(found.similarity.shape)
    _draw_window(axes[1], ranks, np.zeros(ranks.shape, bool), found)
    for axis, (k, keys) in zip(axes[2:], found.keys.items(), strict=False):
        title = f"k = {k}" + (f" of {count}" if k < count else ": the whole window")
        axis.set_title(title + (f", {keys.sum()} keys" if keys.sum() != min(k, count) else ""))
        _draw_window(axis, _mark_keys(picture, found, keys), keys, found)
    return picture_of(figure)


def _mark_keys(picture: np.ndarray, found: Neighbours, keys: np.ndarray) -> np.ndarray:
    """The window's pixels, those of other tokens grey and pale."""
    top, left, bottom, right = found.window
    # A window may reach into the padding, which repeats the border.
    rows = np.arange(top, bottom).clip(0, picture.shape[0] - 1)
    columns = np.arange(left, right).clip(0, picture.shape[1] - 1)
    window = picture[rows][:, columns].astype(np.float32)
    mask = keys.repeat(found.cell, 0).repeat(found.cell, 1)[..., None]
    pale = 0.35 * window.mean(-1, keepdims=True) + 0.1 * 255
    return np.where(mask, window, pale).astype(np.uint8)


def _draw_window(axis: Any, pixels: np.ndarray, keys: np.ndarray, found: Neighbours) -> None:
    """Draws a window with outlines around the keys and around the patch; one token is one unit."""
    high, wide = keys.shape
    axis.imshow(pixels, cmap="magma", extent=(0, wide, high, 0), interpolation="nearest")
    rows, columns = np.nonzero(np.diff(keys, axis=0))
    axis.hlines(rows + 1, columns, columns + 1, _KEYS)
    rows, columns = np.nonzero(np.diff(keys, axis=1))
    axis.vlines(columns + 1, rows, rows + 1, _KEYS)
    _frame(axis, (0, 0), wide, high, _WINDOW)
    _frame(axis, (found.patch[1], found.patch[0]), 1, 1, _PATCH)


def _frame(axis: Any, corner: tuple[int, int], width: int, height: int, colour: str) -> None:
    from matplotlib.patches import Rectangle

    axis.add_patch(Rectangle(corner, width, height, fill=False, edgecolor=colour, linewidth=2))
