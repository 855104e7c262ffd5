# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""SemanIR image restoration models (Ren et al., NeurIPS 2024, arXiv 2405.20008).

Each stage builds a key-semantic dictionary from its input once; all its layers attend through it. Blocks are residual
post-norm (x + LN(f(x))), attention is cosine with a continuous position bias.
Shapes: batch B, image [B, channels, height, width], tokens [B, height, width, C], windows W of N tokens.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, ImageSuperResolutionOutput
from transformers.utils import can_return_tuple, logging
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_semanir import SemanIRConfig
from .ops_semanir import (
    Dictionary,
    build_dictionary,
    key_semantic_attention,
    merge_windows,
    partition_windows,
    relative_coordinates,
)

logger = logging.get_logger(__name__)

_CHARBONNIER_EPSILON = 1e-3
_HEAD_CHANNELS = 64


class SemanIRPositionBias(nn.Module):
    """Continuous position bias: B(i - j) = 16 sigmoid(MLP(t))."""

    def __init__(self, window_size: int, num_heads: int):
        super().__init__()
        self.window_size = window_size
        self.hidden = nn.Linear(2, 512)
        self.heads = nn.Linear(512, num_heads, bias=False)

    def forward(self) -> torch.Tensor:
        # The table is a function of the window size alone: computed here, there is no buffer to lose or cast.
        dtype = self.hidden.weight.dtype
        precise = torch.promote_types(dtype, torch.float32)
        coordinates = relative_coordinates(self.window_size, precise, self.hidden.weight.device).to(dtype)
        return 16 * self.heads(F.relu(self.hidden(coordinates))).sigmoid().T  # [heads, (2w - 1)^2]


class SemanIRAttention(nn.Module):
    """Key-semantic attention of one layer; the projections are its own, the dictionary is the stage's."""

    def __init__(self, config: SemanIRConfig, dim: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.log_temperature = nn.Parameter(torch.full((num_heads,), math.log(10)))
        self.position_bias = SemanIRPositionBias(config.window_size, num_heads)
        self.projection = nn.Linear(dim, dim)

    def forward(self, tokens: torch.Tensor, dictionary: Dictionary) -> torch.Tensor:
        size = (tokens.shape[1], tokens.shape[2])
        windows = partition_windows(tokens, dictionary.window, dictionary.shift)  # [W, N, C]
        heads = self.query_key_value(windows).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)  # [W, heads, N, C / heads]
        temperature = self.log_temperature.clamp(max=math.log(100)).exp()
        attended = key_semantic_attention(query, key, value, temperature, self.position_bias(), dictionary)
        attended = self.projection(attended.transpose(1, 2).flatten(2))
        return merge_windows(attended, size, dictionary.window, dictionary.shift)


class SemanIRLayer(GradientCheckpointingLayer):
    """y = x + LN(attention(x; D)), z = y + LN(MLP(y))."""

    def __init__(self, config: SemanIRConfig, dim: int, num_heads: int):
        super().__init__()
        hidden = int(dim * config.mlp_ratio)
        self.attention = SemanIRAttention(config, dim, num_heads)
        self.attention_norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
        self.mlp_norm = nn.LayerNorm(dim)

    def forward(self, tokens: torch.Tensor, dictionary: Dictionary) -> torch.Tensor:
        tokens = tokens + self.attention_norm(self.attention(tokens, dictionary))
        return tokens + self.mlp_norm(self.mlp(tokens))


class SemanIRStage(nn.Module):
    """F_out = Conv(layers(F_in; D)) + F_in with D = Dict(F_in), or two dictionaries where layers alternate windows."""

    def __init__(self, config: SemanIRConfig, index: int, dim: int, depth: int, num_heads: int):
        super().__init__()
        self.config = config
        self.shifted = {
            "none": [False] * depth,
            "stage": [index % 2 == 1] * depth,
            "layer": [layer % 2 == 1 for layer in range(depth)],
        }[config.shift_policy]
        self.layers = nn.ModuleList(SemanIRLayer(config, dim, num_heads) for _ in range(depth))
        self.convolution = nn.Conv2d(dim, dim, 3, padding=1)

    def forward(self, features: torch.Tensor, top_k: int) -> torch.Tensor:
        tokens = features.permute(0, 2, 3, 1)
        config = self.config
        dictionaries = {
            shifted: build_dictionary(
                tokens, config.window_size, shifted, top_k, config.similarity, config.include_self
            )
            for shifted in set(self.shifted)
        }
        for layer, shifted in zip(self.layers, self.shifted, strict=True):
            tokens = layer(tokens, dictionaries[shifted])
        return self.convolution(tokens.permute(0, 3, 1, 2)) + features


class SemanIRChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of a feature map [B, C, height, width]."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return super().forward(features.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class SemanIRColumn(nn.Module):
    """Columnar body: stages at one resolution, a convolution and the long skip from the extractor."""

    def __init__(self, config: SemanIRConfig):
        super().__init__()
        self.out_dim = config.embed_dim
        self.first_norm = SemanIRChannelNorm(config.embed_dim)
        self.stages = nn.ModuleList(
            SemanIRStage(config, index, config.embed_dim, depth, heads)
            for index, (depth, heads) in enumerate(zip(config.depths, config.num_heads, strict=True))
        )
        self.last_norm = SemanIRChannelNorm(config.embed_dim)
        self.convolution = nn.Conv2d(config.embed_dim, config.embed_dim, 3, padding=1)

    def forward(self, extracted: torch.Tensor, top_k: int) -> torch.Tensor:
        features = self.first_norm(extracted)
        for stage in self.stages:
            features = stage(features, top_k)
        return self.convolution(self.last_norm(features)) + extracted


def _downsample(dim: int, downsampling: str) -> nn.Module:
    """Half the resolution, twice the channels."""
    if downsampling == "strided":
        return nn.Conv2d(dim, 2 * dim, 3, stride=2, padding=1)
    return nn.Sequential(nn.Conv2d(dim, dim // 2, 3, padding=1, bias=False), nn.PixelUnshuffle(2))


def _upsample(dim: int, downsampling: str) -> nn.Module:
    """Twice the resolution, half the channels."""
    convolution = nn.Conv2d(dim, 2 * dim, 3, padding=1, bias=downsampling == "strided")
    return nn.Sequential(convolution, nn.PixelShuffle(2))


class SemanIRUShape(nn.Module):
    """U-shaped body: stages down, a bottleneck, stages up with concatenated skips, and a refinement stage."""

    def __init__(self, config: SemanIRConfig):
        super().__init__()
        levels = len(config.depths)
        widths = [config.embed_dim * 2**level for level in range(levels)]
        # Without reduction the stages at full resolution after the last concatenation have the second level's width.
        top = 0 if config.reduce_top_skip else 1
        self.out_dim = widths[top]
        self.first_norm = SemanIRChannelNorm(config.embed_dim)
        self.down_stages = nn.ModuleList(
            SemanIRStage(config, level, widths[level], config.depths[level], config.num_heads[level])
            for level in range(levels)
        )
        self.downsamples = nn.ModuleList(_downsample(width, config.downsampling) for width in widths[:-1])
        self.upsamples = nn.ModuleList()
        self.reductions = nn.ModuleList()
        self.up_stages = nn.ModuleList()
        for level in reversed(range(levels - 1)):
            source = level if level else top
            self.upsamples.append(_upsample(widths[level + 1], config.downsampling))
            reduced = nn.Conv2d(2 * widths[level], widths[level], 1, bias=False) if source == level else nn.Identity()
            self.reductions.append(reduced)
            index = 2 * levels - 2 - level
            stage = SemanIRStage(config, index, widths[source], config.depths[level], config.num_heads[source])
            self.up_stages.append(stage)
        depth, heads = config.refinement_depth, config.num_heads[top]
        self.refinement = SemanIRStage(config, 2 * levels - 1, self.out_dim, depth, heads) if depth else None
        self.last_norm = SemanIRChannelNorm(self.out_dim)

    def forward(self, extracted: torch.Tensor, top_k: int) -> torch.Tensor:
        features = self.first_norm(extracted)
        skips = []
        for stage, downsample in zip(self.down_stages, self.downsamples, strict=False):
            features = stage(features, top_k)
            skips.append(features)
            features = downsample(features)
        features = self.down_stages[-1](features, top_k)
        for upsample, reduction, stage in zip(self.upsamples, self.reductions, self.up_stages, strict=True):
            features = reduction(torch.cat([upsample(features), skips.pop()], dim=1))
            features = stage(features, top_k)
        if self.refinement is not None:
            features = self.refinement(features, top_k)
        return self.last_norm(features)


class SemanIRCorrection(nn.Conv2d):
    """Convolution to an image without upscaling. Starts small: the first restored image is nearly the input."""


class SemanIRReconstruction(nn.Sequential):
    """Features to image: one convolution, or an upsampling head."""

    def __init__(self, config: SemanIRConfig, dim: int):
        scale, channels = config.scale, config.num_channels_out or config.num_channels
        modules: list[nn.Module]
        if scale == 1:
            modules = [SemanIRCorrection(dim, channels, 3, padding=1)]
        elif config.upsampler == "direct":
            modules = [nn.Conv2d(dim, channels * scale**2, 3, padding=1), nn.PixelShuffle(scale)]
        else:
            modules = [nn.Conv2d(dim, _HEAD_CHANNELS, 3, padding=1), nn.LeakyReLU()]
            for step in {2: (2,), 3: (3,), 4: (2, 2)}[scale]:
                widen = nn.Conv2d(_HEAD_CHANNELS, _HEAD_CHANNELS * step**2, 3, padding=1)
                modules += [widen, nn.PixelShuffle(step)]
            modules.append(nn.Conv2d(_HEAD_CHANNELS, channels, 3, padding=1))
        super().__init__(*modules)


class SemanIRPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation shared by the SemanIR models."""

    config_class = SemanIRConfig
    base_model_prefix = "model"
    main_input_name = "pixel_values"
    input_modalities = ["image"]
    supports_gradient_checkpointing = True
    # The layers of a stage share its dictionary, so they stay on one device.
    _no_split_modules = ["SemanIRStage"]
    _can_record_outputs = {"hidden_states": OutputRecorder(SemanIRStage)}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init.trunc_normal_(module.weight, std=self.config.initializer_range)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Conv2d):
            if isinstance(module, SemanIRCorrection):
                init.trunc_normal_(module.weight, std=self.config.initializer_range / 10)
            else:
                init.kaiming_uniform_(module.weight, a=math.sqrt(5))
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, SemanIRAttention):
            init.constant_(module.log_temperature, math.log(10))
        elif isinstance(module, SemanIRModel):
            # Loading builds the model without memory, where this buffer has no value.
            init.copy_(module.image_mean, module.image_mean_tensor())


def _padded_length(length: int, window_size: int, levels: int) -> int:
    """Smallest length, from `length` up, that windows tile at every level; a level below the window is one window."""
    step = 2 ** (levels - 1)
    padded = math.ceil(length / step) * step
    while any(side > window_size and side % window_size for side in (padded >> level for level in range(levels))):
        padded += step
    return padded


def _pad(images: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Pad bottom and right: reflected where the image is long enough for that, repeating its border elsewhere."""
    height, width = images.shape[-2:]
    for padding, length in (((0, 0, 0, size[0] - height), height), ((0, size[1] - width, 0, 0), width)):
        if any(padding):
            images = F.pad(images, padding, mode="reflect" if max(padding) < length else "replicate")
    return images


class SemanIRModel(SemanIRPreTrainedModel):
    """
    SemanIR without a reconstruction head: image in, features of the body out.

    Args:
        config ([`SemanIRConfig`]): The model configuration.
    """

    image_mean: torch.Tensor

    def __init__(self, config: SemanIRConfig):
        super().__init__(config)
        self.register_buffer("image_mean", self.image_mean_tensor(), persistent=False)
        self.extractor = nn.Conv2d(config.num_channels, config.embed_dim, 3, padding=1)
        u_shaped = config.architecture == "u-shaped"
        self.levels = len(config.depths) if u_shaped else 1
        self.body = SemanIRUShape(config) if u_shaped else SemanIRColumn(config)
        self.post_init()

    def image_mean_tensor(self) -> torch.Tensor:
        """Mean of the input channels as the configuration has it: float32 of shape `(channels, 1, 1)`."""
        mean = self.config.image_mean or [0.0] * self.config.num_channels
        return torch.tensor(mean, dtype=torch.float32)[:, None, None]

    def get_input_embeddings(self) -> nn.Module:
        """Return the first convolution, where gradient checkpointing with adapters starts the graph."""
        return self.extractor

    def _checked_top_k(self, top_k: int | None) -> int:
        """k of a call: the configured one if none is given."""
        if top_k is None:
            return self.config.top_k
        if top_k < 1:
            raise ValueError(f"`top_k` is {top_k}; give at least 1, or None for the configured {self.config.top_k}.")
        smallest, largest = self.config.top_k_range
        if not smallest <= top_k <= largest:
            logger.warning_once(
                f"`top_k` is {top_k}, but the model is trained with {smallest} to {largest}: quality may suffer."
            )
        return top_k

    @capture_outputs(tie_last_hidden_states=False)
    def forward(self, pixel_values: torch.Tensor, top_k: int | None = None, **kwargs: Any) -> BaseModelOutput:
        """
        Args:
            pixel_values (`torch.Tensor` of shape `(batch_size, num_channels, height, width)`):
                Images in [0, 1], of any size from 1 x 1. Padded at the bottom and right to whole windows.
            top_k (`int`, *optional*):
                Keys per token, at least 1; `config.top_k` when not given. From the tokens of a window on, dense.
                Outside the range that `config.train_top_k` says was trained, a warning is logged.

        Returns:
            [`~transformers.modeling_outputs.BaseModelOutput`]: `last_hidden_state` of shape `(batch_size, dim,
            padded_height, padded_width)`; with `output_hidden_states=True` the input of the first stage and the
            output of each, as feature maps.

        Raises:
            ValueError: If `pixel_values` is not a batch of images with the configured channels, or `top_k` is below 1.
            TypeError: If `pixel_values` holds integers.
        """
        config = self.config
        if pixel_values.ndim != 4 or pixel_values.shape[1] != config.num_channels or not pixel_values.numel():
            raise ValueError(
                f"`pixel_values` has shape {tuple(pixel_values.shape)}; expected (batch_size, {config.num_channels}, "
                "height, width), each at least 1. Prepare images with SemanIRImageProcessor."
            )
        if not pixel_values.is_floating_point():
            raise TypeError(f"`pixel_values` is {pixel_values.dtype}; give floating-point images in [0, 1].")
        top_k = self._checked_top_k(top_k)
        height, width = (_padded_length(side, config.window_size, self.levels) for side in pixel_values.shape[-2:])
        images = pixel_values - self.image_mean.to(pixel_values.dtype)
        images = _pad(images, (height, width)).to(self.extractor.weight.dtype)
        # Tokens are read channels last; convolutions keep that layout.
        extracted = self.extractor(images.contiguous(memory_format=torch.channels_last))
        return BaseModelOutput(last_hidden_state=self.body(extracted, top_k))


class SemanIRForImageRestoration(SemanIRPreTrainedModel):
    """
    SemanIR with the head that makes an image: super-resolution, or restoration as a correction of the input.

    Args:
        config ([`SemanIRConfig`]): The model configuration.
    """

    def __init__(self, config: SemanIRConfig):
        super().__init__(config)
        self.model = SemanIRModel(config)
        self.reconstruction = SemanIRReconstruction(config, self.model.body.out_dim)
        self.post_init()

    def restoration_loss(self, reconstruction: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """
        Mean absolute error, or mean sqrt(error^2 + epsilon^2) for Charbonnier; in float32 at least.

        Args:
            reconstruction (`torch.Tensor` of shape `(batch_size, num_channels_out, height, width)`): The output.
            labels (`torch.Tensor` of the same shape): Clean images in [0, 1].

        Returns:
            `torch.Tensor`: A scalar.

        Raises:
            ValueError: If the shapes differ.
        """
        if labels.shape != reconstruction.shape:
            raise ValueError(
                f"`labels` has shape {tuple(labels.shape)}; the restored images have {tuple(reconstruction.shape)}. "
                f"Give clean images of the input size times the scale ({self.config.scale})."
            )
        precise = torch.promote_types(reconstruction.dtype, torch.float32)
        error = reconstruction.to(precise) - labels.to(precise)
        if self.config.reconstruction_loss == "charbonnier":
            return (error.square() + _CHARBONNIER_EPSILON**2).sqrt().mean()
        return error.abs().mean()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor,
        labels: torch.Tensor | None = None,
        top_k: int | None = None,
        **kwargs: Any,
    ) -> ImageSuperResolutionOutput:
        """
        Args:
            pixel_values (`torch.Tensor` of shape `(batch_size, num_channels, height, width)`):
                Degraded images in [0, 1], of any size from 1 x 1.
            labels (`torch.Tensor`, *optional*):
                Clean images in [0, 1], of shape `(batch_size, num_channels_out, height * scale, width * scale)`.
            top_k (`int`, *optional*):
                Keys per token, at least 1; `config.top_k` when not given.

        Returns:
            [`~transformers.modeling_outputs.ImageSuperResolutionOutput`]: `reconstruction` of the shape of `labels`,
            not clipped; `loss` when labels are given; `hidden_states` when asked for.

        Raises:
            ValueError: If an input has the wrong shape, or `top_k` is below 1.

        Example:

        ```python
        >>> import torch
        >>> from hf_ext.semanir import SemanIRConfig, SemanIRForImageRestoration

        >>> config = SemanIRConfig(embed_dim=16, depths=[2], num_heads=[2], window_size=8, top_k=16)
        >>> model = SemanIRForImageRestoration(config)
        >>> model(torch.rand(1, 3, 20, 30)).reconstruction.shape
        torch.Size([1, 3, 20, 30])
        ```
        """
        outputs = self.model(pixel_values, top_k, **kwargs)
        config = self.config
        height, width = (side * config.scale for side in pixel_values.shape[-2:])
        reconstruction = self.reconstruction(outputs.last_hidden_state)[..., :height, :width]
        if config.num_channels == config.num_channels_out:
            # The input keeps its precision: eight bits of bfloat16 would be visible in the image.
            base = pixel_values if config.scale == 1 else self.model.image_mean.to(reconstruction.dtype)
            reconstruction = base + reconstruction
        loss = None if labels is None else self.restoration_loss(reconstruction, labels)
        return ImageSuperResolutionOutput(
            loss=loss, reconstruction=reconstruction, hidden_states=outputs.hidden_states
        )


__all__ = ["SemanIRForImageRestoration", "SemanIRModel", "SemanIRPreTrainedModel"]
