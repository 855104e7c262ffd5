# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""
Streaming of causal MRConv models, for transformers' generation and for chunks of any length: [`MRConvCache`].
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from .streaming_convolution_mrconv import StreamingConvolution, StreamingKernel


class _WithoutBackward(torch.autograd.Function):
    """Passes the result on; says why there is no gradient, where one is asked for."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, u: Tensor) -> Tensor:
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError("A streamed convolution has no gradient: call the model without a cache (use_cache=False).")


class _Layer:
    """A layer of the cache: a stream that begins with the first inputs."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        self.stream: StreamingConvolution | None = None
        self.record_past = False

    def get_seq_length(self) -> int:
        return 0 if self.stream is None else self.stream.seen

    def get_max_length(self) -> int:
        # No maximum: old positions leave the kernel's reach.
        return -1

    def activate_past_recording(self) -> None:
        self.record_past = True

    def reset(self) -> None:
        self.stream = None

    def crop(self, tokens_to_remove: int) -> None:
        if self.stream is not None:
            self.stream.crop(tokens_to_remove)

    def select(self, indices: Tensor) -> None:
        if self.stream is not None:
            self.stream.select(indices)


class MRConvCache(Cache):
    r"""
    State of a causal MRConv model between calls: generation keeps one under `past_key_values`, and
    `model(chunk, past_key_values=cache)` streams chunks of any length.

    A stream goes on with the kernel that its layer had at the first call: weights that change in between take effect
    in a new cache, or after `reset()`. Merged kernels and their spectra belong to the model, all caches share them.
    The state is float32, or float64 for float64 weights, of at most
    [batch, channels, power of two from the kernel's length]. A stream may become longer than
    `max_position_embeddings`: a position depends on that many positions before it.

    Args:
        config ([`MRConvConfig`]):
            Configuration of the model, for the number of its layers.

    Example:

    ```python
    >>> cache = MRConvCache(model.config)
    >>> first = model(input_ids[:, :100], past_key_values=cache).logits
    >>> second = model(input_ids[:, 100:], past_key_values=cache).logits  # as if all had been given at once
    ```
    """

    def __init__(self, config: PreTrainedConfig):
        layers: list[Any] = [_Layer() for _ in range(config.num_hidden_layers)]
        super().__init__(layers=layers)

    def convolve(self, layer_index: int, u: Tensor, kernel: Callable[[], StreamingKernel]) -> Tensor:
        """
        Convolve the next chunk of a layer with its merged kernel and add its bias.

        Args:
            layer_index (`int`):
                The layer, from 0.
            u (`torch.Tensor` of shape `[batch, channels, length]`):
                Inputs that follow those of the last call, zero where a sample is padded.
            kernel (`Callable`):
                Gives the layer's [`~streaming_convolution_mrconv.StreamingKernel`]; called at the first chunk only.

        Returns:
            `torch.Tensor` of the shape and dtype of `u`. Its backward pass raises a `RuntimeError`.

        Raises:
            ValueError: If the cache has no such layer, or `u` does not go on where the stream ended, and what
                `kernel` raises.
        """
        if layer_index >= len(self.layers):
            raise ValueError(
                f"This cache is for {len(self.layers)} layers; layer {layer_index} has none. Make one with "
                "`MRConvCache(model.config)` after a change of `config.num_hidden_layers`."
            )
        layer: Any = self.layers[layer_index]
        if layer.stream is None:
            layer.stream = StreamingConvolution(kernel(), u)
        layer.stream.record_past = layer.record_past
        result: Tensor = layer.stream(u)
        if torch.is_grad_enabled() and u.requires_grad:
            result = _WithoutBackward.apply(result, u)
        return result

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions that the layer has seen, padding included."""
        layer: Any = self.layers[layer_idx]
        return layer.get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of a mask over all positions, those of the next chunk included."""
        return self.get_seq_length(layer_idx) + query_length, 0

    @property
    def batch_size(self) -> int:
        """Samples in the batch; -1 before the first call."""
        layer: Any = self.layers[0]
        return -1 if layer.stream is None else layer.stream.batch_size

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Put the samples `beam_idx` in the places of the batch, as beam search does."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the samples `indices` (`torch.LongTensor` of shape `[new batch]`)."""
        layers: list[Any] = self.layers
        for layer in layers:
            layer.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sample `repeats` times, copies side by side."""
        if self.batch_size > 0:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))
