# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""
Exact streaming of one causal convolution with a kernel of any length: what the layers of [`MRConvCache`] hold.

A merged layer (poster eq. 7) is one long convolution, y[t] = sum_tau k[tau] u[t - tau] + b, over as many positions as
the kernel has taps. Position by position that is a relaxed convolution: as soon as the last U inputs are complete, U
being the largest power of two that divides the position, their part of the next U outputs is added to what is known
of these,

    y[i + s] += sum_{r < U} u[i - U + r] k[U + s - r],   0 <= s < U,

by one FFT of size 2 U. Every pair of an input and an output meets in exactly one tile, so the result is exact to
rounding for any kernel, whichever way it was parametrised, and costs O(log^2 L) operations per position (amortised;
the position that completes a tile of size U pays for it). Tiles below `TILE` are computed directly.

The state is one buffer of [batch, channels, period] numbers, period being the power of two that holds the kernel:
what is known of an output waits where its input will be stored, as the first is read when the second arrives. After
`period` positions the last tile spreads all inputs over the next period, and the buffer begins anew: memory is bounded
and a stream may be longer than the kernel, hence than `max_position_embeddings`.

A chunk of any length, a prompt too, splits into whole aligned tiles, each convolved with itself by FFT, and a rest
inside a tile. Against one FFT of the whole prompt that takes 1.0 to 2.5 times as long (measured, 1,000 to 30,000
positions), and leaves the state behind.

Fourier kernels have a recurrence too (sliding DFT: a complex number for each mode of each branch, updated by each
position). It is left out, as it is nowhere faster: 33 us a position against 31 for batch 1 and kernels of 1,024, 41
against 31 for 16,384, 423 against 110 for batch 8 (256 channels, 9 modes, float32, one CPU thread, processor's time);
it drifts, needs the same memory for past inputs, and serves one type of kernel only. What it would have is an even
cost: here the position that completes a tile waits for its FFT.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Shapes: u [batch, channels, length], kernel [channels, taps], spectra [channels, frequencies].

# Positions that are computed directly before the first FFT. Measured: 16 to 64 differ by less than the noise.
TILE = 32
# Spectra of FFTs up to this size are kept, some thousands of numbers a channel; a larger one serves a tile that comes
# once in thousands of positions, and is computed again.
KEPT_FFT = 4096


def _keeps_state(method: Callable[..., Any]) -> Callable[..., Any]:
    """Without gradients; and a state begun in `torch.inference_mode` can be continued outside of it."""
    return torch.inference_mode(False)(torch.no_grad()(method))


class StreamingKernel:
    """
    A kernel prepared for tiles. It is never changed, so streams share it, copies of streams too.

    Args:
        kernel (`torch.Tensor` of shape `[channels, taps]`):
            Causal kernel, lag 0 first.
        bias (`torch.Tensor` of shape `[channels]`):
            Added to the convolution.
    """

    @_keeps_state
    def __init__(self, kernel: Tensor, bias: Tensor):
        dtype = torch.promote_types(kernel.dtype, torch.float32)
        self.kernel = kernel.detach().to(dtype)
        self.bias = bias.detach().to(dtype)
        self.taps = kernel.shape[-1]
        self.period = max(TILE, 1 << (self.taps - 1).bit_length())
        head = torch.nn.functional.pad(self.kernel[:, :TILE], (0, max(TILE - self.taps, 0)))
        # [tile, channels]
        self.head = head.t().contiguous()
        self._spectra: dict[tuple[int, int], Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "StreamingKernel":
        return self

    def convolve(self, u: Tensor, size: int, *taps: int) -> list[Tensor]:
        """Circular convolutions of length `size` with the first so many taps, each `[batch, channels, size]`."""
        spectrum = torch.fft.rfft(u, n=size)
        kernels = [self._spectrum(min(count, self.taps), size) for count in taps]
        return [torch.fft.irfft(spectrum * kernel, n=size) for kernel in kernels]

    def _spectrum(self, taps: int, size: int) -> Tensor:
        spectrum = self._spectra.get((taps, size))
        if spectrum is None:
            spectrum = torch.fft.rfft(self.kernel[:, :taps], n=size)
            if size <= KEPT_FFT:
                self._spectra[taps, size] = spectrum
        return spectrum


@dataclass
class _Undo:
    """What one chunk overwrites, so that `crop` can take it back."""

    inputs: Tensor
    seen: int
    offset: int
    tile: Tensor
    begin: int
    history: Tensor
    allocated: int


class StreamingConvolution:
    """
    Causal convolution of one layer that goes on where the last chunk ended, exact to rounding.

    ```python
    stream = StreamingConvolution(StreamingKernel(kernel, bias))
    y = torch.cat([stream(chunk) for chunk in u.split([1000, 1, 1, 7], dim=-1)], dim=-1)
    ```

    Args:
        kernel ([`StreamingKernel`]):
            Kernel and bias; they stay the same for the whole stream.
        inputs (`torch.Tensor` of shape `[batch, channels, length]`):
            First inputs, from which batch size and device are taken.
    """

    @_keeps_state
    def __init__(self, kernel: StreamingKernel, inputs: Tensor):
        batch, channels = inputs.shape[:2]
        self.kernel = kernel
        self.seen = 0
        # Position within the period.
        self.offset = 0
        self.record_past = False
        self._past: list[_Undo] = []
        # Before the current tile, inputs; after it, what is known of outputs. [batch, channels, allocated]
        self.history = kernel.kernel.new_zeros(batch, channels, TILE)
        # The same for the current tile, laid out for single positions. [batch, tile, channels]
        self.tile = kernel.kernel.new_zeros(batch, TILE, channels)

    @property
    def batch_size(self) -> int:
        return self.tile.shape[0]

    @_keeps_state
    def __call__(self, u: Tensor) -> Tensor:
        """
        Convolve the next chunk.

        Args:
            u (`torch.Tensor` of shape `[batch, channels, length]`):
                Inputs that follow those of the last call; zero where a sample is padded.

        Returns:
            `torch.Tensor` of the shape and dtype of `u`: the outputs at these positions.

        Raises:
            ValueError: If batch, channels or device are not those of the stream.
        """
        expected = (self.batch_size, self.tile.shape[2])
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

    @_keeps_state
    def crop(self, tokens_to_remove: int) -> None:
        """
        Take back the last positions, as assisted generation does with rejected candidates.

        Args:
            tokens_to_remove (`int`):
                Zero or negative, as in transformers: -3 removes the last three positions.

        Raises:
            ValueError: If positions are to go that were not recorded since `record_past` was set or since the last
                `crop`, or the number is positive.
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

    @_keeps_state
    def select(self, indices: Tensor) -> None:
        """
        Keep the samples `indices` of the batch, in their order and as often as they occur.

        Args:
            indices (`torch.LongTensor` of shape `[new batch]`):
                Positions in the present batch.
        """
        indices = indices.to(self.tile.device)
        self.history = self.history.index_select(0, indices)
        self.tile = self.tile.index_select(0, indices)
        self._past.clear()
