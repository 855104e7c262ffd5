# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""SemanIR image restoration models (Ren et al., NeurIPS 2024, arXiv 2405.20008).

The layers are in `modeling_layers_semanir`. Shapes: batch B, images and feature maps [B, channels, height, width].
"""

import math
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutput, ImageSuperResolutionOutput
from transformers.utils import can_return_tuple, logging
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_semanir import CUSTOM_PIPELINES, SemanIRConfig
from .modeling_layers_semanir import (
    SemanIRAttention,
    SemanIRColumn,
    SemanIRCorrection,
    SemanIRReconstruction,
    SemanIRStage,
    SemanIRUShape,
    bilinear_demosaick,
)
from .modeling_strips_semanir import by_rows
from .ops_semanir import ATTENTION, UnknownAttentionError

if TYPE_CHECKING:
    # Never run. transformers finds the files that belong to this one by their import lines, and copies and downloads
    # them with it: by this line the pipeline travels with every restorer, though it is the one that imports this file.
    from .pipeline_semanir import ImageRestorationPipeline  # noqa: F401

logger = logging.get_logger(__name__)

_CHARBONNIER_EPSILON = 1e-3
_MEMORY_BUDGET = 512 * 2**20
# Temporary values of a layer for one token, in units of its width: below this no image needs to be cut.
_LAYER_MAPS = 16


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
    _memory_budget: int | None = _MEMORY_BUDGET

    @property
    def memory_budget(self) -> int | None:
        """
        `int`, *optional*: Bytes of temporary memory of a call without gradients, 512 MiB unless set; it is not saved.

        A larger image is computed part by part, exactly, and only feature maps are held in full: two at the finest
        resolution, and in a U the skips of the levels above. `None`: always at once. So it is with gradients, with
        `output_hidden_states`, where a module inside has a hook, and while the model is compiled or exported.
        """
        return cast("SemanIRPreTrainedModel", self.base_model)._memory_budget

    @memory_budget.setter
    def memory_budget(self, value: int | None) -> None:
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"`memory_budget` is {value!r}; give a number of bytes from 1 up, or None for no bound.")
        cast("SemanIRPreTrainedModel", self.base_model)._memory_budget = value

    def compile(self, *args: Any, dynamic: bool | None = False, **kwargs: Any) -> None:
        """
        Compile the model in place, as `torch.nn.Module.compile` does, with a graph for each size of images.

        Args:
            dynamic (`bool`, *optional*, defaults to `False`):
                `None` or `True` ask for one graph of many sizes. It serves inference; torch 2.13 cannot order the
                strides of its gradients and raises an `InductorError`.
            args, kwargs: As `torch.compile` takes them.
        """
        super().compile(*args, dynamic=dynamic, **kwargs)

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
    if length > window_size * step:
        # Even the coarsest level is longer than a window. This line alone stands in a graph of many sizes, and divides
        # positive numbers, of which all programs have the same quotient.
        step *= window_size
        return (length + step - 1) // step * step
    padded = (length + step - 1) // step * step
    while any(side > window_size and side % window_size for side in (padded >> level for level in range(levels))):
        padded += step
    return padded


def _pad(images: torch.Tensor, size: tuple[int, int], reflectable: int) -> torch.Tensor:
    """Pad bottom and right: reflected where the image is long enough for that, as from `reflectable` up it is, and
    repeating its border elsewhere."""
    height, width = images.shape[-2:]
    for padding, length in (((0, 0, 0, size[0] - height), height), ((0, size[1] - width, 0, 0), width)):
        # A graph must not depend on whether there is anything to pad.
        if torch.compiler.is_compiling() or any(padding):
            reflected = length >= reflectable or max(padding) < length
            images = F.pad(images, padding, mode="reflect" if reflected else "replicate")
    return images


def _cut(images: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The upper left part."""
    if torch.compiler.is_exporting():
        # The strides of a slice tell whether anything was cut off: the graph would be for such sizes only.
        rows, columns = (torch.arange(side, device=images.device) for side in (height, width))
        return images.index_select(2, rows).index_select(3, columns)
    return images[..., :height, :width]


def _is_observed(module: nn.Module) -> bool:
    """Whether someone else's hook wants to see what the module gets and gives."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return any(getattr(hook, "__module__", None) != capture_outputs.__module__ for hook in hooks)


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

    def memory_of_call(self, tokens: int, output_hidden_states: bool) -> int | None:
        """
        Bytes of temporary memory that a call must keep to.

        Args:
            tokens (`int`): Pixels of the feature maps at the finest resolution, over the batch.
            output_hidden_states (`bool`): Whether the call returns the stages' outputs.

        Returns:
            `int` or `None`: `memory_budget`; `None` if everything fits into it or nothing may be cut.
        """
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return None
        if torch.is_grad_enabled() or output_hidden_states or self._memory_budget is None:
            return None
        if tokens * _LAYER_MAPS * self.body.out_dim * self.extractor.weight.element_size() <= self._memory_budget:
            return None
        return None if any(map(_is_observed, self.modules())) else self._memory_budget

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
        height, width = (_padded_length(side, config.window_size, config.levels) for side in pixel_values.shape[-2:])
        images = pixel_values - self.image_mean.to(pixel_values.dtype)
        images = _pad(images, (height, width), config.descriptor.multiple_of).to(self.extractor.weight.dtype)
        # Tokens are read channels last; convolutions keep that layout.
        images = images.contiguous(memory_format=torch.channels_last)
        states = bool(kwargs.get("output_hidden_states", config.output_hidden_states))
        memory = self.memory_of_call(images.shape[0] * height * width, states)

        def extract(images: torch.Tensor) -> torch.Tensor:
            # A function: accelerate moves what a module is given, and a module would be moved without its weights.
            return self.extractor(images)

        return BaseModelOutput(last_hidden_state=self.body(images, extract, top_k, memory))


class SemanIRForImageRestoration(SemanIRPreTrainedModel):
    """
    SemanIR with the head that makes an image: super-resolution, or restoration as a correction of the input; for a
    packed Bayer mosaic (`config.demosaicks`), a correction of bilinear demosaicking.

    Attention is computed by the fastest of several ways that give the same. `attn_implementation` of `from_pretrained`
    or `set_attn_implementation` chooses one: `"auto"`, `"eager"`, `"sdpa"`, `"native"` (CPU, numba),
    `"flex_attention"` or `"triton"` (GPU). Images whose temporary tensors exceed `memory_budget` bytes are computed
    part by part when no gradient is needed, with the same result.

    `torch.export` and `torch.onnx.export` make one graph for any batch and any size in which both sides are longer
    than `window_size * 2 ** (levels - 1)`, given an example of at least two such images and `dynamic_shapes` of
    `{"pixel_values": {0: Dim("batch", min=1), 2: Dim.DYNAMIC, 3: Dim.DYNAMIC}}`. A smaller image has other windows,
    hence another graph: export it at its own size, or mirror it until it is large enough and cut off the result.

    Args:
        config ([`SemanIRConfig`]): The model configuration.
    """

    def __init__(self, config: SemanIRConfig):
        super().__init__(config)
        self.model = SemanIRModel(config)
        self.reconstruction = SemanIRReconstruction(config, self.model.body.out_dim)
        self.post_init()

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As [`~transformers.PreTrainedModel.save_pretrained`]; `config.json` also names the pipeline."""
        before = self.config.__dict__.pop("custom_pipelines", None)
        self.config.custom_pipelines = {task: dict(entry) for task, entry in CUSTOM_PIPELINES.items()}
        try:
            super().save_pretrained(*args, **kwargs)
        finally:
            del self.config.custom_pipelines
            if before is not None:
                self.config.custom_pipelines = before

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

    def _base(self, pixel_values: torch.Tensor) -> torch.Tensor | None:
        """What the network corrects. In the precision of the input: eight bits of bfloat16 would be visible."""
        if self.config.demosaicks:
            return bilinear_demosaick(pixel_values)
        if self.config.num_channels != self.config.num_channels_out:
            return None
        if self.config.scale == 1:
            return pixel_values
        # Made anew: the buffer is the model's, which may have given its memory back.
        return self.model.image_mean_tensor().to(pixel_values.device, self.dtype)

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
        features = outputs.last_hidden_state
        memory = self.model.memory_of_call(features.numel() // features.shape[1], outputs.hidden_states is not None)
        head = self.reconstruction
        reconstruction = by_rows(head, features, memory=memory, channels=head.temporary_channels, halo=head.halo)
        height, width = (side * self.config.scale for side in pixel_values.shape[-2:])
        reconstruction = _cut(reconstruction, height, width)
        base = self._base(pixel_values)
        if base is not None:
            reconstruction = base + reconstruction
        loss = None if labels is None else self.restoration_loss(reconstruction, labels)
        return ImageSuperResolutionOutput(
            loss=loss, reconstruction=reconstruction, hidden_states=outputs.hidden_states
        )


__all__ = ["SemanIRForImageRestoration", "SemanIRModel", "SemanIRPreTrainedModel"]
