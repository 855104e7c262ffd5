# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""MRConvNeXt (arXiv 2408.09453): ConvNeXt with every 7 x 7 depthwise convolution replaced by a two-sided MRConv.

A convolution runs over the map flattened row by row. How the paper flattens is not known; rows, seen from both sides,
are our choice. Shapes: image [B, channels, height, width], map [B, C, height, width], flat [B, C, L].
"""

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPoolingAndNoAttention,
    ImageClassifierOutputWithNoAttention,
)
from transformers.models.convnext.modeling_convnext import ConvNextDropPath, ConvNextLayerNorm
from transformers.utils import can_return_tuple
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_mrconv import MRConvConfig
from .configuration_mrconvnext import MRConvNextConfig
from .modeling_layers_mrconv import MRConvLayer, MRConvPreTrainedModel, refuse_unknown


class MRConvNextLayer(GradientCheckpointingLayer):
    """x + drop_path(s * W_2 GELU(W_1 LN(MRConv(x)))) with a factor s for each channel."""

    def __init__(self, config: MRConvNextConfig, convolution: MRConvConfig, index: int, drop_path: float):
        super().__init__()
        dim = convolution.hidden_size
        self.convolution = MRConvLayer(convolution, index)
        self.norm = nn.LayerNorm(dim, eps=config.layer_norm_eps)
        self.expand = nn.Linear(dim, 4 * dim)
        self.project = nn.Linear(4 * dim, dim)
        self.layer_scale = nn.Parameter(torch.full((dim,), config.layer_scale_init_value))
        self.drop_path = ConvNextDropPath(drop_path)

    def forward(self, flat: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(self.convolution(flat).transpose(1, 2))  # [B, L, C]
        tokens = self.project(F.gelu(self.expand(tokens))) * self.layer_scale
        return flat + self.drop_path(tokens.transpose(1, 2))


class MRConvNextStage(nn.Module):
    """Halve the map, except in the first stage, and pass it through the layers row by row."""

    def __init__(self, config: MRConvNextConfig, stage: int):
        super().__init__()
        dim, convolution = config.hidden_sizes[stage], config.stage_config(stage)
        self.downsampling = nn.Sequential()
        if stage:
            before = config.hidden_sizes[stage - 1]
            norm = ConvNextLayerNorm(before, eps=config.layer_norm_eps, data_format="channels_first")
            self.downsampling.extend([norm, nn.Conv2d(before, dim, 2, stride=2)])
        first, steps = sum(config.depths[:stage]), max(sum(config.depths) - 1, 1)
        self.layers = nn.ModuleList(
            MRConvNextLayer(config, convolution, index, config.drop_path_rate * index / steps)
            for index in range(first, first + config.depths[stage])
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        features = self.downsampling(features)
        flat = features.flatten(2)
        for layer in self.layers:
            flat = layer(flat)
        return flat.unflatten(2, features.shape[2:])


class MRConvNextPreTrainedModel(MRConvPreTrainedModel):
    """Loading, saving, merging and initialisation shared by the MRConvNeXt models."""

    # What the base class uses of a configuration, this one has too.
    config_class = MRConvNextConfig  # type: ignore[assignment]
    base_model_prefix = "model"
    main_input_name = "pixel_values"
    input_modalities = ["image"]
    _no_split_modules = ["MRConvNextLayer"]
    # Where gradient checkpointing with adapters starts the graph.
    _input_embed_layer = "patches"
    _can_record_outputs = {"hidden_states": OutputRecorder(MRConvNextStage)}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            init.trunc_normal_(module.weight, std=self.config.initializer_range)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, MRConvNextLayer):
            init.constant_(module.layer_scale, self.config.layer_scale_init_value)
        else:
            super()._init_weights(module)

    def change_rate(self, factor: float) -> Self:
        """Refused: an image is not sampled in time. Resize the images, or configure another `image_size`."""
        told = f"`change_rate({factor})`: images have no sampling rate. Resize them to `image_size`"
        raise ValueError(f"{told}, {self.config.image_size}, or give them as they are: other sizes are allowed.")


class MRConvNextModel(MRConvNextPreTrainedModel):
    """MRConvNeXt without a classifier: image in, map of the last stage and its mean out.

    Images may have another size than the configured one. Rows and columns that the strides do not divide are left out
    at the bottom and right. A kernel is as long as the flattened map of its stage at `config.image_size`: on a smaller
    map it is cropped, on a larger one it is zero beyond. Lags count along the rows, so at another *width* the lag of
    "one row up" points elsewhere; expect the best results at the width of the training."""

    def __init__(self, config: MRConvNextConfig):
        super().__init__(config)
        side, width = config.patch_size, config.hidden_sizes[0]
        self.patches = nn.Conv2d(config.num_channels, width, side, stride=side)
        self.patch_norm = ConvNextLayerNorm(width, eps=config.layer_norm_eps, data_format="channels_first")
        self.stages = nn.ModuleList(MRConvNextStage(config, stage) for stage in range(len(config.depths)))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_init()

    @capture_outputs(tie_last_hidden_states=False)
    def forward(self, pixel_values: torch.Tensor, **kwargs: Any) -> BaseModelOutputWithPoolingAndNoAttention:
        """
        Args:
            pixel_values (`torch.Tensor` of shape `(batch_size, num_channels, height, width)`):
                Normalised images of one size, each side at least `patch_size * 2 ** (stages - 1)` pixels.

        Returns:
            [`~transformers.modeling_outputs.BaseModelOutputWithPoolingAndNoAttention`]: `last_hidden_state` of shape
            `(batch_size, hidden_sizes[-1], map_height, map_width)`; `pooler_output` of shape `(batch_size,
            hidden_sizes[-1])`, its normalised mean; with `output_hidden_states=True` the maps before and after stages.

        Raises:
            ValueError: `pixel_values` has another shape, or images are too small.
            TypeError: `pixel_values` are no floating-point numbers, or an argument is unknown.

        Example:
            >>> import torch
            >>> from hf_ext import MRConvNextConfig, MRConvNextModel
            >>> model = MRConvNextModel(MRConvNextConfig(image_size=32, hidden_sizes=[8, 16], depths=[1, 1]))
            >>> model(torch.rand(1, 3, 32, 32)).last_hidden_state.shape
            torch.Size([1, 16, 4, 4])
        """
        config = self.config
        refuse_unknown(kwargs)
        if pixel_values.ndim != 4 or pixel_values.shape[1] != config.num_channels or pixel_values.shape[0] < 1:
            told = f"`pixel_values` has shape {tuple(pixel_values.shape)}"
            expected = f"(batch_size, {config.num_channels}, height, width)"
            raise ValueError(f"{told}; expected {expected}. Prepare images with MRConvNextImageProcessor.")
        if not pixel_values.is_floating_point():
            raise TypeError(f"`pixel_values` is {pixel_values.dtype}; give normalised floating-point images.")
        height, width = pixel_values.shape[2:]
        if min(config.stage_map(len(config.depths) - 1, height, width)) < 1:
            smallest = config.patch_size * 2 ** (len(config.depths) - 1)
            told = f"The images are {height} x {width} pixels; each side must be at least {smallest}"
            advice = f"MRConvNextImageProcessor(size={{'shortest_edge': {config.image_size}}})"
            raise ValueError(f"{told}. Resize them, for instance with {advice}.")
        features = self.patch_norm(self.patches(pixel_values.to(self.patches.weight.dtype)))
        for stage in self.stages:
            features = stage(features)
        pooled = self.norm(features.mean((2, 3)))
        return BaseModelOutputWithPoolingAndNoAttention(last_hidden_state=features, pooler_output=pooled)


class MRConvNextForImageClassification(MRConvNextPreTrainedModel):
    """MRConvNeXt with a linear classifier on the normalised mean of the last map."""

    def __init__(self, config: MRConvNextConfig):
        super().__init__(config)
        self.num_labels = config.num_labels or 0
        self.model = MRConvNextModel(config)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any
    ) -> ImageClassifierOutputWithNoAttention:
        """
        Args:
            pixel_values (`torch.Tensor` of shape `(batch_size, num_channels, height, width)`):
                Normalised images of one size.
            labels (`torch.LongTensor` of shape `(batch_size,)`, *optional*):
                Classes from 0; or as `config.problem_type` says, float targets of shape `(batch_size, num_labels)`.

        Returns:
            [`~transformers.modeling_outputs.ImageClassifierOutputWithNoAttention`]: `logits` of shape `(batch_size,
            num_labels)`; `loss` when labels are given; `hidden_states` when asked for.

        Raises:
            ValueError, TypeError: As in [`MRConvNextModel`]; or labels do not fit `config.problem_type`.

        Example:
            >>> import torch
            >>> from hf_ext import MRConvNextConfig, MRConvNextForImageClassification
            >>> config = MRConvNextConfig(image_size=32, hidden_sizes=[8, 16], depths=[1, 1], num_labels=10)
            >>> MRConvNextForImageClassification(config)(torch.rand(1, 3, 32, 32)).logits.shape
            torch.Size([1, 10])
        """
        outputs = self.model(pixel_values, **kwargs)
        logits = self.classifier(outputs.pooler_output)
        loss: torch.Tensor | None = None
        if labels is not None:
            labels = self.fit_labels(labels, logits)
            loss = self.loss_function(labels, logits.float(), self.config)
        return ImageClassifierOutputWithNoAttention(loss=loss, logits=logits, hidden_states=outputs.hidden_states)
