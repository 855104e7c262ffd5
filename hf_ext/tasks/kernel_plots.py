"""Pictures of MRConv: kernels before and after merging."""

from importlib import import_module
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig

from hf_ext.figures import new_figure, picture_of
from hf_ext.hub.checkpoints import split_revision
from hf_ext.mrconv.modeling_layers_mrconv import MRConvPreTrainedModel

from ..errors import DataError

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


def draw_merged(model: MRConvPreTrainedModel, channels: int = 4) -> Image.Image:
    """Draws merged kernels: of up to six layers the first few channels, of models that are merged and others."""
    layers = model.convolutions()
    shown = sorted({round(index) for index in np.linspace(0, len(layers) - 1, _MOST_LAYERS)})
    figure = new_figure(3.1 * max(2, len(shown)), 3)
    for axis, index in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        with torch.no_grad():
            kernel, ahead, _ = layers[index].merged()
        for channel in range(min(channels, len(kernel))):
            axis.plot(*two_sided(kernel[channel], None if ahead is None else ahead[channel]), linewidth=0.9)
        axis.set_title(f"layer {index + 1}, {min(channels, len(kernel))} of {len(kernel)} channels", fontsize=9)
        _mark_lags(axis)
    return picture_of(figure)


def _mark_lags(axis: Any) -> None:
    """Linear near the present, where all kernels overlap, and logarithmic beyond."""
    axis.set_xscale("symlog", linthresh=16)
    axis.set_xlabel("lag in samples")
    axis.grid(alpha=0.3)


def two_sided(kernel: torch.Tensor, ahead: torch.Tensor | None) -> tuple[np.ndarray, np.ndarray]:
    """Lags and values, the latest input first."""
    values = kernel.detach().float().cpu().numpy()
    if ahead is None:
        return np.arange(len(values)), values
    wing = ahead.detach().float().cpu().numpy()[::-1]
    return np.arange(-len(wing), len(values)), np.concatenate([wing, values])
