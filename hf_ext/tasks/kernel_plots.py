"""Pictures of MRConv: weights of the branches by depth and resolution, kernels before and after merging."""

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig

from hf_ext.figures import new_figure, picture_of, save_figure
from hf_ext.hub.checkpoints import split_revision
from hf_ext.mrconv.modeling_layers_mrconv import MRConvPreTrainedModel

from ..errors import DataError, UsageError

# More kernels than this do not fit side by side.
_MOST_LAYERS = 6


def load_model(source: str) -> MRConvPreTrainedModel:
    """Loads a checkpoint in the class that it was saved from."""
    name, revision = split_revision(source)
    config = AutoConfig.from_pretrained(name, revision=revision)
    architecture = (config.architectures or [""])[0]
    found = getattr(import_module("hf_ext.mrconv"), architecture, None)
    if not (isinstance(found, type) and issubclass(found, MRConvPreTrainedModel)):
        raise DataError(f"{source} is a {config.model_type} model ({architecture or 'no class named'}), not MRConv.")
    model: MRConvPreTrainedModel = found.from_pretrained(name, revision=revision)
    return model


def branch_weights(model: MRConvPreTrainedModel) -> np.ndarray:
    """The weight of each resolution in each layer: ‖alpha‖² / D, the mean of alpha² over the D channels."""
    if model.config.reparameterized:
        raise DataError("the model is merged and has no branches: plot a checkpoint saved before `reparameterize()`.")
    rows = [layer.alpha.detach().float().square().mean(1).cpu().numpy() for layer in model.convolutions()]
    table = np.full((len(rows), max(map(len, rows))), np.nan)
    for row, values in zip(table, rows, strict=True):
        row[: len(values)] = values
    return table


def plot_kernels(model: MRConvPreTrainedModel, path: str | Path, channel: int = 0) -> Path:
    """
    Draws a PNG: ‖alpha‖² / D of each layer and resolution, and of up to six layers one channel's kernels, as each
    branch contributes to the layer (alpha_i s_i k_i), with their sum, the merged kernel.
    """
    weights = branch_weights(model)
    layers = model.convolutions()
    shown = sorted({round(index) for index in np.linspace(0, len(layers) - 1, _MOST_LAYERS)})
    channels = min(len(layers[index].alpha[0]) for index in shown)
    if not 0 <= channel < channels:
        raise UsageError(f"channel {channel} does not exist: the layers have {channels} channels, counted from 0.")
    figure = new_figure(3.1 * max(2, len(shown)), 8.4)
    parts: Any = figure.subfigures(2, 1, height_ratios=(1, 2))
    top, bottom = parts
    _draw_weights(top, weights)
    bottom.suptitle(f"kernels of channel {channel}: branches as they contribute, and merged")
    axes = bottom.subplots(2, len(shown), squeeze=False, sharex="col", sharey="col")
    with torch.no_grad():
        for column, index in enumerate(shown):
            _draw_layer(axes[:, column], layers[index], index, channel)
    return save_figure(figure, path)


def _draw_weights(figure: Any, weights: np.ndarray) -> None:
    heat, lines = figure.subplots(1, 2)
    image = heat.imshow(weights, aspect="auto", cmap="viridis", vmin=0)
    heat.set(title="‖α‖² / D", xlabel="resolution i (kernel length ∝ 2^i)", ylabel="layer")
    heat.set_yticks(range(len(weights)), range(1, len(weights) + 1))
    heat.set_xticks(range(weights.shape[1]))
    figure.colorbar(image, ax=heat)
    shades = np.linspace(0, 0.85, len(weights))
    from matplotlib import colormaps

    for index, (row, shade) in enumerate(zip(weights, shades, strict=True), start=1):
        lines.plot(row, marker="o", markersize=3, color=colormaps["plasma"](shade), label=f"layer {index}")
    lines.set(title="the same, by depth", xlabel="resolution i", ylim=(0, 1.15 * np.nanmax(weights)))
    lines.set_xticks(range(weights.shape[1]))
    lines.grid(alpha=0.3)
    if len(weights) <= 8:
        lines.legend(fontsize=7, loc="lower left", ncols=2)


def _draw_layer(axes: Any, layer: Any, index: int, channel: int) -> None:
    """Branches above, their sum below; lags grow to the right, those of a backward kernel are negative."""
    parts, merged = contributions(layer, channel)
    above, below = axes
    # The longest first, so that the short ones are seen in front of it.
    for number, (lags, values) in reversed(list(enumerate(parts))):
        above.plot(lags, values, linewidth=0.9, label=f"i = {number}")
    below.plot(*merged, linewidth=0.9, color="black")
    above.set_title(f"layer {index + 1}, branches", fontsize=9)
    below.set_title(f"layer {index + 1}, merged", fontsize=9)
    _mark_lags(below)
    above.grid(alpha=0.3)
    if index == 0 and len(parts) <= 10:
        above.legend(fontsize=6, loc="upper right", ncols=2)


def draw_merged(model: MRConvPreTrainedModel, channels: int = 4) -> Image.Image:
    """Draws merged kernels: of up to six layers the first few channels, of models that are merged and others."""
    layers = model.convolutions()
    shown = sorted({round(index) for index in np.linspace(0, len(layers) - 1, _MOST_LAYERS)})
    figure = new_figure(3.1 * max(2, len(shown)), 3)
    for axis, index in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        with torch.no_grad():
            kernel, ahead, _ = layers[index].merged()
        for channel in range(min(channels, len(kernel))):
            axis.plot(*_two_sided(kernel[channel], None if ahead is None else ahead[channel]), linewidth=0.9)
        axis.set_title(f"layer {index + 1}, {min(channels, len(kernel))} of {len(kernel)} channels", fontsize=9)
        _mark_lags(axis)
    return picture_of(figure)


def _mark_lags(axis: Any) -> None:
    """Linear near the present, where all kernels overlap, and logarithmic beyond."""
    axis.set_xscale("symlog", linthresh=16)
    axis.set_xlabel("lag in samples")
    axis.grid(alpha=0.3)


def contributions(
    layer: Any, channel: int
) -> tuple[list[tuple[np.ndarray, np.ndarray]], tuple[np.ndarray, np.ndarray]]:
    """Lags and values alpha_i s_i k_i of one channel's kernels, and of their sum; lags below 0 look ahead."""
    merged, ahead, _ = layer.merged()
    kernels, backward = layer.branch_kernels()
    scale, _ = layer.branch_scales()
    wings = [None] * len(kernels) if backward is None else backward
    parts = [
        _two_sided(kernel[channel] * factor[channel], None if wing is None else wing[channel] * factor[channel])
        for kernel, wing, factor in zip(kernels, wings, scale, strict=True)
    ]
    return parts, _two_sided(merged[channel], None if ahead is None else ahead[channel])


def _two_sided(kernel: torch.Tensor, ahead: torch.Tensor | None) -> tuple[np.ndarray, np.ndarray]:
    """Lags and values, the latest input first."""
    values = kernel.detach().float().cpu().numpy()
    if ahead is None:
        return np.arange(len(values)), values
    wing = ahead.detach().float().cpu().numpy()[::-1]
    return np.arange(-len(wing), len(values)), np.concatenate([wing, values])
