# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Streaming of causal MRConv models for transformers' generation and for chunks of any length: [`MRConvCache`].

Shapes: u [batch, channels, length], kernel [channels, taps], spectra [channels, frequencies].
"""

# A merged layer (poster eq. 7) is one long convolution, y[t] = sum_tau k[tau] u[t - tau] + b, over as many positions
# as the kernel has taps. Position by position that is a relaxed convolution: as soon as the last U inputs are
# complete, U being the largest power of two that divides the position, their part of the next U outputs is added to
# what is known of these,
#
#     y[i + s] += sum_{r < U} u[i - U + r] k[U + s - r],   0 <= s < U,
#
# by one FFT of size 2 U. Every pair of an input and an output meets in exactly one tile, so the result is exact to
# rounding for any kernel, whichever way it was parametrised, and costs O(log^2 L) operations per position (amortised;
# the position that completes a tile of size U pays for it). Tiles below `TILE` are computed directly.
#
# The state is one buffer of [batch, channels, period] numbers, period being the power of two that holds the kernel:
# what is known of an output waits where its input will be stored, as the first is read when the second arrives. After
# `period` positions the last tile spreads all inputs over the next period, and the buffer begins anew: memory is
# bounded and a stream may be longer than the kernel, hence than `max_position_embeddings`.
#
# A chunk of any length, a prompt too, splits into whole aligned tiles, each convolved with itself by FFT, and a rest
# inside a tile. Against one FFT of the whole prompt that takes 1.0 to 2.5 times as long (measured, 1,000 to 30,000
# positions), and leaves the state behind. How we know: tests/mrconv/test_streaming_mrconv.py compares streams of every
# kernel length and chunking with the convolution of the whole input in float64, and generation with and without a
# cache. Fourier kernels have a recurrence too, a sliding DFT: measured nowhere faster, it drifts, and it serves one
# type of kernel only.

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from .kernels_mrconv import TILE, StreamingKernel, keeps_state


class _Undo(NamedTuple):
    """What one chunk overwrites, so that `crop` can take it back."""

    inputs: Tensor
    seen: int
    offset: int
    tile: Tensor
    begin: int
    history: Tensor
    allocated: int


class StreamingConvolution(CacheLayerMixin):
    """
    A layer of the cache: its causal convolution, which goes on where the last chunk ended. The kernel stays the same
    for the whole stream; batch size and device are those of the first inputs.
    """

    is_croppable = True
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.record_past = False
        self.reset()

    def reset(self) -> None:
        for name in ("kernel", "history", "tile"):
            vars(self).pop(name, None)
        self.is_initialized, self.seen = False, 0
        # Position within the period.
        self.offset = 0
        self._past: list[_Undo] = []

    @keeps_state
    def lazy_initialization(self, u: Tensor, kernel: StreamingKernel) -> None:  # type: ignore[override]
        """Begin the stream of a kernel with its first inputs."""
        batch, channels = u.shape[:2]
        self.kernel = kernel
        # Before the current tile, inputs; after it, what is known of outputs. [batch, channels, allocated]
        self.history = kernel.kernel.new_zeros(batch, channels, TILE)
        # The same for the current tile, laid out for single positions. [batch, tile, channels]
        self.tile = kernel.kernel.new_zeros(batch, TILE, channels)
        self.is_initialized = True

    @keeps_state
    def update(self, u: Tensor, kernel: Callable[[], StreamingKernel]) -> Tensor:  # type: ignore[override]
        """
        The outputs at the next positions, [batch, channels, length], in the dtype of `u`, which is zero where padded.
        """
        if not self.is_initialized:
            self.lazy_initialization(u, kernel())
        expected = (self.tile.shape[0], self.tile.shape[2])
        if tuple(u.shape[:2]) != expected or u.device != self.tile.device:
            raise ValueError(
                f"This cache holds [batch, channels] = {list(expected)} on {self.tile.device}; got inputs of shape "
                f"{list(u.shape)} on {u.device}. Start a new cache, or select its samples with `batch_select_indices`."
            )
        inputs = u.to(self.tile.dtype)
        if self.record_past:
            self._past.append(self._undo(inputs))
        return self._advance(inputs).to(u.dtype)

    def _advance(self, u: Tensor) -> Tensor:
        outputs, done, length = [], 0, u.shape[-1]
        while done < length:
            inside, left = self.offset % TILE, length - done
            if inside or left < TILE:
                size = min(left, TILE - inside)
                outputs.append(self._advance_in_tile(u[..., done : done + size]))
            else:
                # The largest tile that may start here, or the largest power of two that is left.
                aligned = self.offset & -self.offset or self.kernel.period
                size = min(aligned, self.kernel.period, 1 << (left.bit_length() - 1))
                outputs.append(self._advance_by_tile(u[..., done : done + size]))
            done += size
        self.seen += length
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def _advance_in_tile(self, u: Tensor) -> Tensor:
        """Positions of the current tile: they are added to the rest of it at once."""
        begin = self.offset % TILE
        end = begin + u.shape[-1]
        by_position = u.transpose(1, 2)
        if u.shape[-1] == 1:
            self.tile[:, begin:].addcmul_(by_position, self.kernel.head[: TILE - begin])
        else:
            (response,) = self.kernel.convolve(u, 2 * TILE, TILE)
            self.tile[:, begin:] += response[..., : TILE - begin].transpose(1, 2)
        outputs = self.tile[:, begin:end] + self.kernel.bias
        self.tile[:, begin:end] = by_position
        self.offset += u.shape[-1]
        if end == TILE:
            self._store_tile(self.offset - TILE)
            self._spread()
            self._load_tile()
        return outputs.transpose(1, 2)

    def _advance_by_tile(self, u: Tensor) -> Tensor:
        """A whole tile, of a size that divides its position: it is convolved with itself, then spread."""
        begin, size = self.offset, u.shape[-1]
        end = begin + size
        self._store_tile(begin)
        self._reserve(end)
        # The tile that ends here is this one, unless it completes a larger one: one transform serves both purposes.
        spreads = end & -end == size
        # Where no tap reaches further than its size, one response holds both.
        taps = (size, 2 * size) if spreads and size < self.kernel.period else (size,)
        responses = self.kernel.convolve(u, 2 * size, *taps)
        known = self.history[..., begin:end]
        outputs = (known + responses[0][..., :size]).add_(self.kernel.bias[:, None])
        known.copy_(u)
        self.offset = end
        self._spread(responses[-1][..., size:] if spreads else None)
        self._load_tile()
        return outputs

    def _spread(self, response: Tensor | None = None) -> None:
        """Adds the tile that ends here to as many outputs, as all its inputs are known."""
        end, period = self.offset, self.kernel.period
        size = end & -end
        if response is None:
            (response,) = self.kernel.convolve(self.history[..., end - size : end], 2 * size, 2 * size)
            response = response[..., size:]
        if end == period:
            self.history.copy_(response)
            self.offset = 0
        else:
            self._reserve(end + size)
            self.history[..., end : end + size] += response

    def _reserve(self, length: int) -> None:
        allocated = self.history.shape[-1]
        if length > allocated:
            grown = 1 << (length - 1).bit_length()
            self.history = torch.nn.functional.pad(self.history, (0, grown - allocated))

    def _store_tile(self, begin: int) -> None:
        self.history[..., begin : begin + TILE] = self.tile.transpose(1, 2)

    def _load_tile(self) -> None:
        self.tile.copy_(self.history[..., self.offset : self.offset + TILE].transpose(1, 2))

    def _undo(self, inputs: Tensor) -> _Undo:
        begin, end = self.offset // TILE * TILE, self.offset + inputs.shape[-1]
        # The highest bit of the position that the chunk changes is the size of its largest tile.
        largest = 1 << (self.offset ^ end).bit_length() >> 1
        reach = begin if largest < TILE else (end // largest + 1) * largest
        if end >= self.kernel.period:
            begin, reach = 0, self.kernel.period
        allocated = self.history.shape[-1]
        history = self.history[..., begin:reach].clone()
        return _Undo(inputs, self.seen, self.offset, self.tile.clone(), begin, history, allocated)

    @keeps_state
    def crop(self, tokens_to_remove: int) -> None:
        """
        Take back the last positions, as assisted generation does with rejected candidates: -3 removes three. Only
        positions that were recorded since `record_past` was set, or since the last `crop`, can go.
        """
        remove, recorded = -tokens_to_remove, sum(past.inputs.shape[-1] for past in self._past)
        if not 0 <= remove <= recorded:
            raise ValueError(
                f"`crop({tokens_to_remove})`: the last {recorded} positions can be taken back: "
                f"allowed are -{recorded} to 0. Call `activate_past_recording()` before what may have to go."
            )
        while remove > 0:
            past = self._past.pop()
            self.seen, self.offset, self.tile = past.seen, past.offset, past.tile
            self.history = self.history[..., : past.allocated].contiguous()
            self.history[..., past.begin : past.begin + past.history.shape[-1]] = past.history
            length = past.inputs.shape[-1]
            if length > remove:
                self._advance(past.inputs[..., : length - remove])
            remove -= min(length, remove)
        self._past.clear()

    @keeps_state
    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the samples `indices` of the batch, in their order and as often as they occur."""
        if self.is_initialized:
            indices = indices.to(self.tile.device)
            self.history, self.tile = self.history.index_select(0, indices), self.tile.index_select(0, indices)
            self._past.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    @property
    def batch_size(self) -> int:
        """Samples in the batch; an unknown attribute before the stream has begun, which is what `Cache` looks for."""
        return self.tile.shape[0]

    def activate_past_recording(self) -> None:
        self.record_past = True

    def get_seq_length(self) -> int:
        """Positions that the layer has seen, padding included."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        # No maximum: old positions leave the kernel's reach.
        return -1


class _WithoutBackward(torch.autograd.Function):
    """Passes the result on; says why there is no gradient, where one is asked for."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, u: Tensor) -> Tensor:
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError("A streamed convolution has no gradient: call the model without a cache (use_cache=False).")


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
        config ([`MRConvConfig`]): Configuration of the model, for the number of its layers.

    Example:

    ```python
    >>> cache = MRConvCache(model.config)
    >>> first = model(input_ids[:, :100], past_key_values=cache).logits
    >>> second = model(input_ids[:, 100:], past_key_values=cache).logits  # as if all had been given at once
    ```
    """

    def __init__(self, config: PreTrainedConfig):
        super().__init__(layers=[StreamingConvolution() for _ in range(config.num_hidden_layers)])

    def convolve(self, layer_index: int, u: Tensor, kernel: Callable[[], StreamingKernel]) -> Tensor:
        """
        Convolve the next chunk of a layer with its merged kernel and add its bias.

        `kernel` gives the layer's [`~kernels_mrconv.StreamingKernel`] and is called at the first chunk only; `u`,
        [batch, channels, length], is zero where a sample is padded. The backward pass of the result raises a
        `RuntimeError`.
        """
        if layer_index >= len(self.layers):
            raise ValueError(
                f"This cache is for {len(self.layers)} layers; layer {layer_index} has none. Make one with "
                "`MRConvCache(model.config)` after a change of `config.num_hidden_layers`."
            )
        layer: Any = self.layers[layer_index]
        result: Tensor = layer.update(u, kernel)
        if torch.is_grad_enabled() and u.requires_grad:
            result = _WithoutBackward.apply(result, u)
        return result
