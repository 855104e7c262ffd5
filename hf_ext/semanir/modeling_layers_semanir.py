# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Layers, stages and bodies of SemanIR (arXiv 2405.20008), and the heads that make images.

Each stage builds a key-semantic dictionary from its input once; all its layers attend through it. Blocks are residual
post-norm (x + LN(f(x))), attention is cosine with a continuous position bias.
Every part takes `memory`: with a number of bytes, temporary tensors keep to it and feature maps are overwritten.
Shapes: batch B, feature maps [B, C, height, width], windows [W, N, C] of N tokens.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .configuration_semanir import SemanIRConfig
from .modeling_strips_semanir import by_rows, by_windows
from .ops_semanir import Dictionary, build_dictionary, key_semantic_attention, relative_coordinates

Extractor = Callable[[torch.Tensor], torch.Tensor]
_HEAD_CHANNELS = 64


class SemanIRPositionBias(nn.Module):
    """Continuous position bias: B(i - j) = 16 sigmoid(MLP(t))."""

    def __init__(self, window_size: int, num_heads: int):
        super().__init__()
        self.window_size = window_size
        self.hidden = nn.Linear(2, 512)
        self.heads = nn.Linear(512, num_heads, bias=False)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        # The table is a function of the window size alone: computed here, there is no buffer to lose or cast. Device
        # and precision are those of the windows: a layer's weights may still lie on disk when its own call begins.
        precise = torch.promote_types(windows.dtype, torch.float32)
        coordinates = relative_coordinates(self.window_size, precise, windows.device).to(windows.dtype)
        return 16 * self.heads(F.relu(self.hidden(coordinates))).sigmoid().T  # [heads, (2w - 1)^2]


class SemanIRAttention(nn.Module):
    """Key-semantic attention of one layer; the projections are its own, the dictionary is the stage's."""

    def __init__(self, config: SemanIRConfig, dim: int, num_heads: int):
        super().__init__()
        self.config = config
        self.num_heads = num_heads
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.log_temperature = nn.Parameter(torch.full((num_heads,), math.log(10)))
        self.position_bias = SemanIRPositionBias(config.window_size, num_heads)
        self.projection = nn.Linear(dim, dim)

    def forward(self, windows: torch.Tensor, dictionary: Dictionary) -> torch.Tensor:
        heads = self.query_key_value(windows).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)  # [W, heads, N, C / heads]
        temperature = self.log_temperature.clamp(max=math.log(100)).exp()
        table = self.position_bias(windows)
        # Set by transformers: `attn_implementation=` at loading, or `set_attn_implementation`.
        implementation = self.config._attn_implementation
        attended = key_semantic_attention(query, key, value, temperature, table, dictionary, implementation)
        return self.projection(attended.transpose(1, 2).flatten(2))


class SemanIRLayer(GradientCheckpointingLayer):
    """y = x + LN(attention(x; D)), z = y + LN(MLP(y)), in windows."""

    def __init__(self, config: SemanIRConfig, dim: int, num_heads: int):
        super().__init__()
        hidden = int(dim * config.mlp_ratio)
        self.attention = SemanIRAttention(config, dim, num_heads)
        self.attention_norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
        self.mlp_norm = nn.LayerNorm(dim)

    def forward(self, windows: torch.Tensor, dictionary: Dictionary) -> torch.Tensor:
        windows = windows + self.attention_norm(self.attention(windows, dictionary))
        return windows + self.mlp_norm(self.mlp(windows))


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
        # Values of a layer for one token that live at the same time: projections and their normalised copies with
        # logits, bias and mask; or the MLP's.
        attending = 12 * dim + 3 * num_heads * config.window_size**2
        self.temporary_channels = max(attending, 4 * dim + 2 * int(dim * config.mlp_ratio))
        self.convolution = nn.Conv2d(dim, dim, 3, padding=1)

    def forward(self, features: torch.Tensor, top_k: int, memory: int | None = None) -> torch.Tensor:
        tokens = features.permute(0, 2, 3, 1)
        config = self.config
        dictionaries = {
            shifted: build_dictionary(
                tokens, config.window_size, shifted, top_k, config.similarity, config.include_self
            )
            for shifted in set(self.shifted)
        }
        for number, (layer, shifted) in enumerate(zip(self.layers, self.shifted, strict=True)):
            # The first layer writes to a map of its own: the stage's input is added at the end.
            tokens = by_windows(
                layer, tokens, dictionaries[shifted], memory, self.temporary_channels, in_place=number > 0
            )

        def close(tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
            return self.convolution(tokens) + features

        maps = tokens.permute(0, 3, 1, 2), features
        return by_rows(close, *maps, memory=memory, channels=4 * features.shape[1], halo=1, into=features)


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

    def forward(
        self, images: torch.Tensor, extractor: Extractor, top_k: int, memory: int | None = None
    ) -> torch.Tensor:
        channels = 4 * self.out_dim
        extracted = by_rows(extractor, images, memory=memory, channels=channels, halo=1)
        features = by_rows(self.first_norm, extracted, memory=memory, channels=channels, into=extracted)
        if memory is not None:
            del extracted
        for stage in self.stages:
            features = stage(features, top_k, memory)

        def close(features: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
            # Where memory is short, the long skip is extracted once more instead of being kept.
            skip = extracted if memory is None else extractor(images)
            return self.convolution(self.last_norm(features)) + skip

        return by_rows(close, features, images, memory=memory, channels=2 * channels, halo=1)


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

    def forward(
        self, images: torch.Tensor, extractor: Extractor, top_k: int, memory: int | None = None
    ) -> torch.Tensor:
        width = self.first_norm.normalized_shape[0]
        features = by_rows(extractor, images, memory=memory, channels=4 * width, halo=1)
        features = by_rows(self.first_norm, features, memory=memory, channels=4 * width, into=features)
        skips = []
        for stage, downsample in zip(self.down_stages, self.downsamples, strict=False):
            features = stage(features, top_k, memory)
            skips.append(features)
            rows, channels = features.shape[-2] // 2, 8 * features.shape[1]
            features = by_rows(downsample, features, memory=memory, channels=channels, rows=rows, halo=1)
        features = self.down_stages[-1](features, top_k, memory)
        for upsample, reduction, stage in zip(self.upsamples, self.reductions, self.up_stages, strict=True):
            features = self._join(features, skips.pop(), upsample, reduction, memory)
            features = stage(features, top_k, memory)
        if self.refinement is not None:
            features = self.refinement(features, top_k, memory)
        return by_rows(self.last_norm, features, memory=memory, channels=4 * self.out_dim, into=features)

    def _join(
        self, features: torch.Tensor, skip: torch.Tensor, upsample: nn.Module, reduction: nn.Module, memory: int | None
    ) -> torch.Tensor:
        """Features of the level below and the skip of this level. The skip is overwritten if their sum is as wide."""

        def join(features: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
            return reduction(torch.cat([upsample(features), skip], dim=1))

        into = None if isinstance(reduction, nn.Identity) else skip
        return by_rows(join, features, skip, memory=memory, channels=16 * features.shape[1], halo=1, into=into)


def bilinear_demosaick(mosaic: torch.Tensor) -> torch.Tensor:
    """
    Colours of a Bayer mosaic by linear interpolation: what the network corrects when it demosaicks.

    Args:
        mosaic (`torch.Tensor` of shape `(B, 4, height, width)`): RGGB mosaic packed as (red, green, green, blue), the
            second channel right of the first and the third below it.

    Returns:
        `torch.Tensor` of shape `(B, 3, 2 * height, 2 * width)`: RGB image.
    """
    planes = torch.zeros_like(mosaic)[:, None].repeat(1, 3, 1, 1, 1)  # [B, colour, place in the 2 x 2 cell, ...]
    for place, colour in enumerate((0, 1, 1, 2)):
        planes[:, colour, place] = mosaic[:, place]
    # Reflected at the border, a sample meets its own colour again.
    sparse = F.pad(F.pixel_shuffle(planes, 2).squeeze(2), (1, 1, 1, 1), mode="reflect")
    green = torch.tensor([[0.0, 0.25, 0.0], [0.25, 1.0, 0.25], [0.0, 0.25, 0.0]])
    other = torch.tensor([[0.25, 0.5, 0.25], [0.5, 1.0, 0.5], [0.25, 0.5, 0.25]])
    kernel = torch.stack([other, green, other])[:, None].to(mosaic)
    return F.conv2d(sparse, kernel, groups=3)


class SemanIRCorrection(nn.Conv2d):
    """Convolution to what is added to an image. Starts small: the first restored image is nearly the input."""


class SemanIRReconstruction(nn.Sequential):
    """Features to image: one convolution, or an upsampling head."""

    def __init__(self, config: SemanIRConfig, dim: int):
        scale, channels = config.scale, config.num_channels_out or config.num_channels
        # What is added to an image starts small.
        last = SemanIRCorrection if scale == 1 or config.demosaicks else nn.Conv2d
        modules: list[nn.Module]
        if scale == 1:
            modules = [last(dim, channels, 3, padding=1)]
        elif config.upsampler == "direct":
            modules = [last(dim, channels * scale**2, 3, padding=1), nn.PixelShuffle(scale)]
        else:
            modules = [nn.Conv2d(dim, _HEAD_CHANNELS, 3, padding=1), nn.LeakyReLU()]
            for step in {2: (2,), 3: (3,), 4: (2, 2)}[scale]:
                widen = nn.Conv2d(_HEAD_CHANNELS, _HEAD_CHANNELS * step**2, 3, padding=1)
                modules += [widen, nn.PixelShuffle(step)]
            modules.append(last(_HEAD_CHANNELS, channels, 3, padding=1))
        super().__init__(*modules)
        # Values of all convolutions and shuffles for one pixel of the features, were none freed.
        self.temporary_channels = 4 * dim + 4 * _HEAD_CHANNELS * (1 + scale**2)
        # In rows of the features: three convolutions at their resolution or above, or one.
        self.halo = 1 if scale == 1 or config.upsampler == "direct" else 3


__all__ = [
    "SemanIRAttention",
    "SemanIRChannelNorm",
    "SemanIRColumn",
    "SemanIRCorrection",
    "SemanIRLayer",
    "SemanIRPositionBias",
    "SemanIRReconstruction",
    "SemanIRStage",
    "SemanIRUShape",
    "bilinear_demosaick",
]
