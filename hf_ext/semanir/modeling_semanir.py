# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""SemanIR image restoration models (Ren et al., NeurIPS 2024, arXiv 2405.20008).

Each stage builds a key-semantic dictionary from its input once; all its layers attend through it. Blocks are residual
post-norm (x + LN(f(x))), attention is cosine with a continuous position bias.
Shapes: batch B, images and feature maps [B, C, height, width], windows [W, N, C] of N tokens.
"""

import math
from numbers import Integral
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, ImageSuperResolutionOutput
from transformers.utils import can_return_tuple, logging
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_semanir import SemanIRConfig
from .ops_semanir import (
    ATTENTION,
    Dictionary,
    UnknownAttentionError,
    build_dictionary,
    key_semantic_attention,
    merge_windows,
    partition_windows,
    relative_coordinates,
)
from .pipeline_semanir import ImageRestorationPipeline

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

    def forward(self, windows: Tensor) -> Tensor:
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

    def forward(self, windows: Tensor, dictionary: Dictionary) -> Tensor:
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

    def forward(self, windows: Tensor, dictionary: Dictionary) -> Tensor:
        windows = windows + self.attention_norm(self.attention(windows, dictionary))
        return windows + self.mlp_norm(self.mlp(windows))


class SemanIRStage(nn.Module):
    """F_out = Conv(layers(F_in; D)) + F_in with D = Dict(F_in), or two dictionaries where layers alternate windows."""

    def __init__(self, config: SemanIRConfig, index: int, dim: int, depth: int, num_heads: int):
        super().__init__()
        self.config = config
        self.num_heads = num_heads
        self.shifted = {
            "none": [False] * depth,
            "stage": [index % 2 == 1] * depth,
            "layer": [layer % 2 == 1 for layer in range(depth)],
        }[config.shift_policy]
        self.layers = nn.ModuleList(SemanIRLayer(config, dim, num_heads) for _ in range(depth))
        self.convolution = nn.Conv2d(dim, dim, 3, padding=1)

    def dictionaries(self, tokens: Tensor, top_k: int) -> dict[bool, Dictionary]:
        """D of each partition into windows that the layers use, shifted or not, from F_in [B, height, width, C]."""
        config = self.config
        options = top_k, config.similarity, config.include_self
        return {moved: build_dictionary(tokens, config.window_size, moved, *options) for moved in set(self.shifted)}

    def forward(self, features: Tensor, top_k: int) -> Tensor:
        tokens = features.permute(0, 2, 3, 1)
        size = (tokens.shape[1], tokens.shape[2])
        dictionaries = self.dictionaries(tokens, top_k)
        for layer, shifted in zip(self.layers, self.shifted, strict=True):
            dictionary = dictionaries[shifted]
            windows = layer(partition_windows(tokens, dictionary.window, dictionary.shift), dictionary)
            tokens = merge_windows(windows, size, dictionary.window, dictionary.shift)
        return self.convolution(tokens.permute(0, 3, 1, 2)) + features


class SemanIRChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of a feature map [B, C, height, width]."""

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class SemanIRColumn(nn.Module):
    """Columnar body: stages at one resolution, a convolution and the long skip from the extractor."""

    def __init__(self, config: SemanIRConfig):
        super().__init__()
        self.out_dim = config.embed_dim
        self.first_norm = SemanIRChannelNorm(config.embed_dim)
        stages = enumerate(zip(config.depths, config.num_heads, strict=True))
        self.stages = nn.ModuleList(SemanIRStage(config, index, config.embed_dim, *sizes) for index, sizes in stages)
        self.last_norm = SemanIRChannelNorm(config.embed_dim)
        self.convolution = nn.Conv2d(config.embed_dim, config.embed_dim, 3, padding=1)

    def forward(self, extracted: Tensor, top_k: int) -> Tensor:
        features = self.first_norm(extracted)
        for stage in self.stages:
            features = stage(features, top_k)
        return self.convolution(self.last_norm(features)) + extracted


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
        stages = enumerate(zip(widths, config.depths, config.num_heads, strict=True))
        self.down_stages = nn.ModuleList(SemanIRStage(config, level, *sizes) for level, sizes in stages)
        # Half the resolution and twice the channels, and back.
        strided = config.downsampling == "strided"
        self.downsamples = nn.ModuleList(
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
            if strided
            else nn.Sequential(nn.Conv2d(width, width // 2, 3, padding=1, bias=False), nn.PixelUnshuffle(2))
            for width in widths[:-1]
        )
        self.upsamples, self.reductions, self.up_stages = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for level in reversed(range(levels - 1)):
            source = level if level else top
            widen = nn.Conv2d(widths[level + 1], 2 * widths[level + 1], 3, padding=1, bias=strided)
            self.upsamples.append(nn.Sequential(widen, nn.PixelShuffle(2)))
            reduced = nn.Conv2d(2 * widths[level], widths[level], 1, bias=False) if source == level else nn.Identity()
            self.reductions.append(reduced)
            order, heads = 2 * levels - 2 - level, config.num_heads[source]
            self.up_stages.append(SemanIRStage(config, order, widths[source], config.depths[level], heads))
        depth, heads = config.refinement_depth, config.num_heads[top]
        self.refinement = SemanIRStage(config, 2 * levels - 1, self.out_dim, depth, heads) if depth else None
        self.last_norm = SemanIRChannelNorm(self.out_dim)

    def forward(self, extracted: Tensor, top_k: int) -> Tensor:
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


def bilinear_demosaick(mosaic: Tensor) -> Tensor:
    """Colours of a Bayer mosaic by linear interpolation: what the network corrects when it demosaicks. The mosaic [B,
    4, height, width] is packed as (red, green, green, blue), the second right of the first, the third below it; the
    RGB image has twice the height and width."""
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
    """Convolution to the correction of an image. Starts small: the first restored image is nearly the input."""


class SemanIRReconstruction(nn.Sequential):
    """Features to image: one convolution, or an upsampling head."""

    def __init__(self, config: SemanIRConfig, dim: int):
        channels = config.num_channels_out or config.num_channels
        # Of a side of the image by one of the features.
        factor = config.scale * config.stem_scale
        corrects = config.scale == 1 or config.demosaicks or config.interpolated_base
        last = SemanIRCorrection if corrects else nn.Conv2d
        modules: list[nn.Module]
        if factor == 1:
            modules = [last(dim, channels, 3, padding=1)]
        elif config.scale == 1 or config.upsampler == "direct":
            modules = [last(dim, channels * factor**2, 3, padding=1), nn.PixelShuffle(factor)]
        else:
            modules = [nn.Conv2d(dim, _HEAD_CHANNELS, 3, padding=1), nn.LeakyReLU()]
            for step in {2: (2,), 3: (3,), 4: (2, 2), 6: (3, 2), 8: (2, 2, 2)}[factor]:
                widen = nn.Conv2d(_HEAD_CHANNELS, _HEAD_CHANNELS * step**2, 3, padding=1)
                modules += [widen, nn.PixelShuffle(step)]
            modules.append(last(_HEAD_CHANNELS, channels, 3, padding=1))
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
    # Where gradient checkpointing with adapters starts the graph.
    _input_embed_layer = "extractor"
    # The loss is a mean over the batch: Trainer has to divide by the steps that it accumulates.
    accepts_loss_kwargs = False
    _can_record_outputs = {"hidden_states": OutputRecorder(SemanIRStage)}
    _memory_budget: int | None = 512 * 2**20

    @property
    def memory_budget(self) -> int | None:
        """`int`, *optional*: Bytes of temporary memory of a call without gradients, 512 MiB unless set, on a processor
        no more than its cache; not saved.

        Where hf_ext is imported, a larger image is computed part by part, exactly, and only feature maps are held in
        full: one at the finest resolution, and in a U the skips. `None`: always at once, as with gradients, with
        `output_hidden_states`, where a module inside has a hook, and while the model is compiled or exported."""
        return cast("SemanIRPreTrainedModel", self.base_model)._memory_budget

    @memory_budget.setter
    def memory_budget(self, value: int | None) -> None:
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"`memory_budget` is {value!r}; give a number of bytes from 1 up, or None for no bound.")
        cast("SemanIRPreTrainedModel", self.base_model)._memory_budget = value

    def compile(self, *args: Any, dynamic: bool | None = False, **kwargs: Any) -> None:
        """Compile the model in place, as `torch.nn.Module.compile` does, with a graph for each size of images. With
        `dynamic=None` or `True` it is one graph of many sizes, for inference: torch 2.13 cannot order the strides of
        its gradients and raises an `InductorError`."""
        super().compile(*args, dynamic=dynamic, **kwargs)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        # transformers searches this file for its own attention interface, which has no dictionary.
        return True

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Check a name for `attn_implementation`, as transformers does, against those of key-semantic attention."""
        name = requested_attention or "auto"
        if name not in ("auto", *ATTENTION):
            raise UnknownAttentionError("attn_implementation", name)
        return name

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init.trunc_normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, SemanIRCorrection):
            init.trunc_normal_(module.weight, std=self.config.initializer_range / 10)
        elif isinstance(module, nn.Conv2d):
            init.kaiming_uniform_(module.weight, a=math.sqrt(5))
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
        elif isinstance(module, SemanIRAttention):
            init.constant_(module.log_temperature, math.log(10))
        elif isinstance(module, SemanIRModel):
            # Loading builds the model without memory, where this buffer has no value.
            init.copy_(module.image_mean, module.image_mean_tensor())
        if isinstance(bias := getattr(module, "bias", None), Tensor):
            init.zeros_(bias)


def _padded_length(length: int, window_size: int, levels: int) -> int:
    """Smallest length, from `length` up, that windows tile at every level; a level below the window is one window."""
    step = 2 ** (levels - 1)
    if length > window_size * step:
        # Even the coarsest level is longer than a window. This line alone stands in a graph of many sizes, and divides
        # positive numbers, of which all programs have the same quotient.
        step *= window_size
        return (length + step - 1) // step * step
    padded = (length + step - 1) // step * step
    while any(side > window_size and side % window_size for side in (padded >> level for level in range(levels))):
        padded += step
    return padded


def _pad(images: Tensor, size: tuple[int, int], reflectable: int) -> Tensor:
    """Pad bottom and right: reflected where the image is long enough, as from `reflectable` up, else by its border."""
    height, width = images.shape[-2:]
    for padding, length in (((0, 0, 0, size[0] - height), height), ((0, size[1] - width, 0, 0), width)):
        # A graph must not depend on the need for padding.
        if torch.compiler.is_compiling() or any(padding):
            reflected = length >= reflectable or max(padding) < length
            images = F.pad(images, padding, mode="reflect" if reflected else "replicate")
    return images


def _cut(images: Tensor, height: int, width: int) -> Tensor:
    """The upper left part."""
    if torch.compiler.is_exporting():
        # The strides of a slice tell whether anything was cut off: the graph would be for such sizes only.
        rows, columns = (torch.arange(side, device=images.device) for side in (height, width))
        return images.index_select(2, rows).index_select(3, columns)
    return images[..., :height, :width]


class SemanIRModel(SemanIRPreTrainedModel):
    """SemanIR without a reconstruction head: image in, features of the body out."""

    image_mean: Tensor

    def __init__(self, config: SemanIRConfig):
        super().__init__(config)
        self.register_buffer("image_mean", self.image_mean_tensor(), persistent=False)
        self.extractor = nn.Conv2d(config.num_channels * config.stem_scale**2, config.embed_dim, 3, padding=1)
        u_shaped = config.architecture == "u-shaped"
        self.body = SemanIRUShape(config) if u_shaped else SemanIRColumn(config)
        self.post_init()

    def image_mean_tensor(self) -> Tensor:
        """Mean of the input channels as the configuration has it: float32 of shape `(channels, 1, 1)`."""
        mean = self.config.image_mean or [0.0] * self.config.num_channels
        return torch.tensor(mean, dtype=torch.float32)[:, None, None]

    def _check_top_k(self, top_k: int | None) -> int:
        """k of a call: the configured one if none is given."""
        if top_k is None:
            return self.config.top_k
        if not isinstance(top_k, Integral) or top_k < 1:
            raise ValueError(f"`top_k` is {top_k!r}; give a whole number from 1 up, or None for {self.config.top_k}.")
        smallest, largest = self.config.top_k_range
        if not smallest <= top_k <= largest:
            told = f"`top_k` is {top_k}, but the model is trained with {smallest} to {largest}"
            logger.warning_once(f"{told}: quality may suffer.")
        return top_k

    def find_runner(self, maps: Tensor, output_hidden_states: bool) -> Any:
        """The runner that computes a call with this input part by part; None if it is computed at once."""
        # hf_ext.fast.semanir_strips puts its own function here; a checkpoint's copy has none.
        return None

    @capture_outputs(tie_last_hidden_states=False)
    def forward(self, pixel_values: Tensor, top_k: int | None = None, **kwargs: Any) -> BaseModelOutput:
        """
        Args:
            pixel_values (`torch.Tensor` of shape `(batch_size, num_channels, height, width)`):
                Images in [0, 1], of any size from 1 x 1. Padded at the bottom and right to whole windows.
            top_k (`int`, *optional*): Keys per token, at least 1; `config.top_k` when not given. Attention is dense if
                a window has no more tokens. A value outside the range of `config.train_top_k` logs a warning.

        Returns:
            [`~transformers.modeling_outputs.BaseModelOutput`]: `last_hidden_state` of shape `(batch_size, dim,
            padded_height / stem_scale, padded_width / stem_scale)`; with `output_hidden_states=True` the input of the
            first stage and the output of each, as feature maps.

        Raises:
            ValueError: `pixel_values` has another shape, or `top_k` is below 1.
            TypeError: `pixel_values` are no floating-point numbers.

        Example:
            >>> import torch
            >>> from hf_ext import SemanIRConfig, SemanIRModel
            >>> model = SemanIRModel(SemanIRConfig(embed_dim=16, depths=[2], num_heads=[2], window_size=8, top_k=16))
            >>> model(torch.rand(1, 3, 20, 30)).last_hidden_state.shape
            torch.Size([1, 16, 24, 32])
        """
        config = self.config
        if pixel_values.ndim != 4 or pixel_values.shape[1] != config.num_channels or not pixel_values.numel():
            told = f"`pixel_values` has shape {tuple(pixel_values.shape)}"
            expected = f"(batch_size, {config.num_channels}, height, width), each at least 1"
            advice = "SemanIRImageProcessor prepares such images; the pipeline takes grey, colours and mosaics too"
            raise ValueError(f"{told}; expected {expected}. {advice}.")
        if not pixel_values.is_floating_point():
            raise TypeError(f"`pixel_values` is {pixel_values.dtype}; give floating-point images in [0, 1].")
        top_k = self._check_top_k(top_k)
        stem = config.stem_scale
        height, width = (
            stem * _padded_length((side + stem - 1) // stem, config.window_size, config.levels)
            for side in pixel_values.shape[-2:]
        )
        images = pixel_values - self.image_mean.to(pixel_values.dtype)
        images = _pad(images, (height, width), config.multiple_of).to(self.extractor.weight.dtype)
        if stem > 1:
            images = F.pixel_unshuffle(images, stem)
        # Tokens are read channels last; convolutions keep that layout.
        images = images.contiguous(memory_format=torch.channels_last)
        states = bool(kwargs.get("output_hidden_states", config.output_hidden_states))
        if (runner := self.find_runner(images, states)) is not None:
            return BaseModelOutput(last_hidden_state=runner.extract(self, images, top_k))
        return BaseModelOutput(last_hidden_state=self.body(self.extractor(images), top_k))


class SemanIRForImageRestoration(SemanIRPreTrainedModel):
    """SemanIR with a reconstruction head: super-resolution, or restoration as a correction of the input; for a packed
    Bayer mosaic (`config.demosaicks`), a correction of bilinear demosaicking.

    The fastest of several equivalent implementations computes the attention. `attn_implementation` of
    `from_pretrained`, or `set_attn_implementation`, chooses one: `"auto"`, `"eager"`, `"sdpa"`, `"native"` (CPU,
    numba) or `"triton"` (GPU). The last two, and images over `memory_budget`, need hf_ext.

    `torch.export` and `torch.onnx.export` make one graph for any batch and any size in which both sides are longer
    than `window_size * 2 ** (levels - 1)`, given an example of at least two such images and `dynamic_shapes` of
    `{"pixel_values": {0: Dim("batch", min=1), 2: Dim.DYNAMIC, 3: Dim.DYNAMIC}}`. A smaller image has other windows,
    hence another graph: export it at its own size, or mirror it until it is large enough and crop the result."""

    def __init__(self, config: SemanIRConfig):
        super().__init__(config)
        self.model = SemanIRModel(config)
        self.reconstruction = SemanIRReconstruction(config, self.model.body.out_dim)
        self.post_init()

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As [`~transformers.PreTrainedModel.save_pretrained`]; `config.json` also names the pipeline."""
        before = self.config.__dict__.pop("custom_pipelines", None)
        # The import above makes the file of its class ship with the weights.
        found = f"{ImageRestorationPipeline.__module__.rpartition('.')[2]}.{ImageRestorationPipeline.__name__}"
        entry = {"impl": found, "pt": ["AutoModelForImageToImage"], "type": "image"}
        self.config.custom_pipelines = {"image-restoration": entry}
        try:
            super().save_pretrained(*args, **kwargs)
        finally:
            del self.config.custom_pipelines
            if before is not None:
                self.config.custom_pipelines = before

    def restoration_loss(self, reconstruction: Tensor, labels: Tensor) -> Tensor:
        """Mean absolute error, or mean sqrt(error^2 + epsilon^2) for Charbonnier, in float32 at least."""
        if labels.shape != reconstruction.shape:
            told = f"`labels` has shape {tuple(labels.shape)}; the restored images have {tuple(reconstruction.shape)}"
            raise ValueError(f"{told}. Give clean images of the input size times the scale ({self.config.scale}).")
        precise = torch.promote_types(reconstruction.dtype, torch.float32)
        error = reconstruction.to(precise) - labels.to(precise)
        if self.config.reconstruction_loss == "charbonnier":
            return (error.square() + _CHARBONNIER_EPSILON**2).sqrt().mean()
        return error.abs().mean()

    def _base(self, pixel_values: Tensor) -> Tensor | None:
        """The image that is corrected. In the precision of the input: eight bits of bfloat16 would be visible."""
        if self.config.demosaicks:
            return bilinear_demosaick(pixel_values)
        if self.config.num_channels != self.config.num_channels_out:
            return None
        if self.config.scale == 1:
            return pixel_values
        if self.config.interpolated_base:
            return F.interpolate(pixel_values, scale_factor=float(self.config.scale), mode="bicubic")
        # Made anew: the buffer is the model's, which may have given its memory back.
        return self.model.image_mean_tensor().to(pixel_values.device, self.dtype)

    @can_return_tuple
    def forward(
        self, pixel_values: Tensor, labels: Tensor | None = None, top_k: int | None = None, **kwargs: Any
    ) -> ImageSuperResolutionOutput:
        """
        Args:
            pixel_values (`torch.Tensor` of shape `(batch_size, num_channels, height, width)`):
                Degraded images in [0, 1], of any size from 1 x 1.
            labels (`torch.Tensor`, *optional*):
                Clean images in [0, 1], of shape `(batch_size, num_channels_out, height * scale, width * scale)`.
            top_k (`int`, *optional*): Keys per token, at least 1; `config.top_k` when not given.

        Returns:
            [`~transformers.modeling_outputs.ImageSuperResolutionOutput`]: `reconstruction` of the shape of `labels`,
            not clipped; `loss` when labels are given; `hidden_states` when asked for.

        Raises:
            ValueError: As in [`SemanIRModel`]; or `labels` have another shape than the restored images.
            TypeError: As in [`SemanIRModel`].

        Example:
            >>> import torch
            >>> from hf_ext import SemanIRConfig, SemanIRForImageRestoration
            >>> config = SemanIRConfig(embed_dim=16, depths=[2], num_heads=[2], window_size=8, top_k=16, scale=2)
            >>> SemanIRForImageRestoration(config)(torch.rand(1, 3, 20, 30)).reconstruction.shape
            torch.Size([1, 3, 40, 60])
        """
        outputs = self.model(pixel_values, top_k, **kwargs)
        features = outputs.last_hidden_state
        runner = self.model.find_runner(features, outputs.hidden_states is not None)
        reconstruction = self.reconstruction(features) if runner is None else runner.reconstruct(self, features)
        height, width = (side * self.config.scale for side in pixel_values.shape[-2:])
        reconstruction = _cut(reconstruction, height, width)
        if (base := self._base(pixel_values)) is not None:
            reconstruction = base + reconstruction
        loss = None if labels is None else self.restoration_loss(reconstruction, labels)
        states = outputs.hidden_states
        return ImageSuperResolutionOutput(loss=loss, reconstruction=reconstruction, hidden_states=states)
