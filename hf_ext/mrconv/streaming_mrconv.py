# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""
Streaming of causal MRConv models, for transformers' generation and for chunks of any length.

Shapes: u [batch, channels, length], kernel [channels, taps], spectra [channels, frequencies].
"""

# A merged layer (poster eq. 7) is one long convolution, y[t] = sum_tau k[tau] u[t - tau] + b, over as many positions
# as the kernel has taps. In real time no position may wait for a long FFT: what FFTs save is made ready before it is
# wanted, in small pieces (partitions of non-uniform size: Gardner 1995, Garcia 2002; spread over time: Hurchalla
# 2010).
#
# - The head, taps 0 to 2 T - 1, T = `TILE`: within a tile of T positions by sums, an input at a time. As soon as a
#   tile is complete, one FFT gives what it adds to the two tiles after it.
# - A level has the taps from 2 S to 8 S - 1, for S = T, 4 T, 16 T and so on; its inputs come in blocks of S, its taps
#   in parts of S. X_m is the spectrum of the blocks m - 1 and m, of 2 S points, and K_p that of part p, padded:
#
#       what the level adds to the outputs of block m + 2 is the second half of irfft(sum_p K_p X_{m-p}).
#
#   Tap 2 S + p S + j of output i of block m + 2 meets input i - j + S of the pair whose spectrum is X_{m-p}: with 0
#   <= i, j < S that lies within the pair, and circular and linear convolution agree (overlap-save). Parts and levels
#   share no tap and leave none out, so the result is exact to rounding for any kernel.
#
# Block m is complete when block m + 1 begins, and its sum is wanted when block m + 2 begins: there are S positions of
# time. The work is shared out by groups of channels, so that no FFT is interrupted. Which group is due when depends on
# position, level and layer only: in one tile of `_SHARES` a level does that many tiles' share; levels take different
# tiles and places in a tile, layers different places. So a token has one group or none as long as layers and levels
# are no more than T, and the worst position grows with the logarithm of the kernel's length, as the mean. What they do
# not share out is the end of a tile: its last position has a short FFT, of 4 T points, in every layer.
#
# All streams share the spectra K_p: 2 numbers a tap and channel. A stream keeps the X_m, as many, and of each level
# five blocks. Both grow with the stream, block by block, up to 3 numbers a tap and channel, however long it is.
#
# A long chunk goes through the same levels, whole blocks at a time; a prompt through one FFT, which gives what it adds
# to later positions too. How we know: tests/mrconv/test_streaming_mrconv.py compares streams of every kernel length
# and chunking, with samples selected in between, with direct sums in float64 and float32, where memory that was not
# filled holds NaN; and it counts the work of each position. Fourier kernels have a recurrence too,
# a sliding DFT: measured nowhere faster, it drifts, and it serves one type of kernel only.

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from .kernels_mrconv import MergedKernel, keeps_state, precise
from .ops_mrconv import fft_size

# Positions that are computed one by one, and block of the first level of a stream.
TILE = 32
# How many times as long as those of the level before the blocks of a level are. Measured with 1,024 taps: 2 and 8 take
# longer, 2 for its FFTs and 8 for its products, which read the memory.
GROWTH = 4
# Sizes of FFTs with the head: for a tile and its reach, and for long chunks.
HEAD_FFTS = (4 * TILE, 32 * TILE)
# Positions of a long chunk that are computed at once.
_RUN = HEAD_FFTS[-1] - 2 * TILE
# Positions from which on a first chunk is computed by one FFT.
_PROMPT = 8 * TILE
# Channels of it that are computed at once: 1.3 to 2 times as fast as all, which do not fit a processor's cache.
_GROUP = 64
# Tiles whose share of the work a level does at once. With more of them the mean is lower, as FFTs are faster together
# and drive the model's weights from the cache less often, and the worst higher.
_SHARES = 16


class StreamingKernel:
    """A kernel [channels, taps] and bias prepared for streams, all of which share it: it never changes.

    The head, taps 0 to 2 TILE - 1, [2 TILE, channels], is summed directly. A level has the spectra of the taps from
    2 S to 2 GROWTH S - 1 in parts of S, each padded to an FFT of 2 S: [parts, channels, S + 1], for S = TILE, GROWTH
    TILE and so on."""

    @keeps_state
    def __init__(self, kernel: Tensor, bias: Tensor):
        self.kernel = kernel = precise(kernel.detach())
        self.bias = bias.detach().to(kernel.dtype)
        taps, block = kernel.shape[-1], TILE
        head = pad(kernel[:, : 2 * TILE], (0, max(2 * TILE - taps, 0)))
        self.head = head.t().contiguous()
        self.head_spectra = {size: torch.fft.rfft(head, n=size) for size in HEAD_FFTS}
        self.levels: list[Tensor] = []
        while taps > 2 * block:
            lags = kernel[:, 2 * block : 2 * GROWTH * block]
            parts = pad(lags, (0, -lags.shape[1] % block)).unflatten(1, (-1, block))
            self.levels.append(torch.fft.rfft(parts.transpose(0, 1), n=2 * block))
            block *= GROWTH

    def __deepcopy__(self, memo: dict[int, Any]) -> "StreamingKernel":
        return self

    def respond(self, u: Tensor) -> Tensor:
        """The share of inputs [batch, channels, n] through the head, at n + 2 TILE positions from the first on."""
        reach = u.shape[-1] + len(self.head)
        size = next(size for size in HEAD_FFTS if size >= reach)
        return torch.fft.irfft(torch.fft.rfft(u, n=size) * self.head_spectra[size], n=size)[..., :reach]


MergedKernel.stream_form = StreamingKernel


class Level:
    """The share of one level of taps in the outputs of a stream, prepared block by block.

    A tensor is filled place by place and never changed after that; what has not been filled is not read."""

    def __init__(self, kernel: StreamingKernel, index: int, batch: int):
        self.kernel, self.index = kernel, index
        _, self.channels, points = kernel.levels[index].shape
        self.block = points - 1
        self.tiles = self.block // TILE
        self.stride = min(_SHARES, self.tiles)
        # Inputs of block m, which is being filled, and of the two before it.
        self.input_m = kernel.bias.new_empty(batch, self.channels, self.block)
        self.input_m_minus_1 = self.input_m_minus_2 = kernel.bias.new_zeros(()).expand_as(self.input_m)
        # X_{m-1}, X_{m-2} and so on, the first of which is being filled. [batch, channels, block + 1]
        self.spectra: tuple[Tensor, ...] = ()
        # What is added to the outputs of block m and, being filled, of block m + 1; None where that is nothing.
        self.added_m: Tensor | None = None
        self.added_m_plus_1: Tensor | None = None

    def advance(self, u: Tensor, begin: int) -> Tensor:
        """The share added to the outputs at whole tiles from position `begin` on, whose inputs are `u`."""
        added = torch.zeros_like(u)
        # Blocks, from the one that has begun.
        for block in range(-(begin % self.block), u.shape[-1], self.block):
            first, stop = max(block, 0), min(block + self.block, u.shape[-1])
            if self.added_m is not None:
                added[..., first:stop] = self.added_m[..., first - block : stop - block]
            self.work(begin + first, begin + stop)
            self.store(u[..., first:stop], begin + first)
        return added

    def work(self, begin: int, stop: int) -> None:
        """Do what is due in the tiles from position `begin` to `stop`, all of one block."""
        if self.added_m_plus_1 is None:
            return
        first, end = self._channels_done(begin % self.block), self._channels_done((stop - 1) % self.block + 1)
        if first == end:
            return
        pair = torch.cat([self.input_m_minus_2[:, first:end], self.input_m_minus_1[:, first:end]], dim=-1)
        self.spectra[0][:, first:end] = torch.fft.rfft(pair)
        total = torch.zeros_like(self.spectra[0][:, first:end])
        for spectrum, taps in zip(self.spectra, self.kernel.levels[self.index], strict=False):
            total.addcmul_(spectrum[:, first:end], taps[first:end])
        self.added_m_plus_1[:, first:end] = torch.fft.irfft(total, n=2 * self.block)[..., self.block :]

    def _channels_done(self, place: int) -> int:
        """The number of channels to be done before a tile that begins at `place`."""
        done = (place // TILE + self.index % self.stride) // self.stride
        shares = self.tiles // self.stride
        # An even number: one long FFT costs as much as two.
        return self.channels if done == shares else self.channels * done // shares // 2 * 2

    def store(self, u: Tensor, begin: int) -> None:
        """Keep inputs, all of one block; the last ones of a block begin the next."""
        place = begin % self.block
        stop = place + u.shape[-1]
        self.input_m[..., place:stop] = u
        if stop < self.block:
            return
        self.input_m_minus_2, self.input_m_minus_1 = self.input_m_minus_1, self.input_m
        self.input_m = torch.empty_like(self.input_m)
        parts = self.kernel.levels[self.index]
        newest = parts.new_empty(len(self.input_m_minus_1), *parts.shape[1:])
        self.spectra = (newest, *self.spectra[: len(parts) - 1])
        self.added_m, self.added_m_plus_1 = self.added_m_plus_1, torch.empty_like(self.input_m)

    def replace(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace each tensor by what `change` makes of it."""
        for name, value in list(vars(self).items()):
            if isinstance(value, Tensor):
                setattr(self, name, change(value))
        self.spectra = tuple(change(spectrum) for spectrum in self.spectra)


class StreamingConvolution(CacheLayerMixin):
    """
    A layer of the cache: its causal convolution, which goes on where the last chunk ended. The kernel stays the same
    for the whole stream; batch size and device are those of the first inputs.

    Args:
        phase (`float`, *optional*, defaults to 0.0):
            From 0 to 1, less than 1: when in a tile it works, so that the layers of a model take turns.
    """

    supports_early_init = False

    def __init__(self, phase: float = 0.0) -> None:
        super().__init__()
        self.phase = phase
        self.reset()

    def reset(self) -> None:
        for name in ("kernel", "tile"):
            vars(self).pop(name, None)
        self.is_initialized, self.interrupted, self.seen = False, False, 0
        # The layer whose kernel this is; unknown to a copy.
        self.owner: weakref.ref[Any] | None = None
        self.levels: list[Level] = []
        # What a long first chunk adds to the next outputs, tile by tile.
        self.tail: list[Tensor] = []

    def get_seq_length(self) -> int:
        """Positions that the layer has seen, padding included."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        # No maximum: old positions leave the kernel's reach.
        return -1

    @keeps_state
    def lazy_initialization(self, u: Tensor, kernel: StreamingKernel) -> None:
        """Begin the stream of a kernel with its first inputs."""
        batch, channels = u.shape[:2]
        self.kernel = kernel
        # Of the current tile inputs, and after these what is known of outputs, as far as the head reaches.
        self.tile = kernel.bias.new_zeros(batch, 3 * TILE, channels)
        self.levels = [Level(kernel, index, batch) for index in range(len(kernel.levels))]
        # Where in a tile each level works.
        self.work_places = [int(TILE * (index + self.phase) / len(self.levels)) for index in range(len(self.levels))]
        self.is_initialized = True

    @keeps_state
    def update(self, u: Tensor, kernel: Callable[[], StreamingKernel]) -> Tensor:
        """The outputs at the next positions, [batch, channels, length], in the dtype of `u`, zero where padded."""
        if not u.numel():
            raise ValueError(f"A chunk needs a sample and a position at least; got inputs of shape {list(u.shape)}.")
        if not self.is_initialized:
            self.lazy_initialization(u, kernel())
        owner = getattr(kernel, "__self__", None)
        if owner is not None:
            self.owner = self.owner or weakref.ref(owner)
            if self.owner() is not owner:
                advice = "start a new one, or `reset()` it, or use a `copy.deepcopy` of it where both models are equal"
                raise ValueError(f"This cache belongs to another model and contains its kernels: {advice}.")
        held = [self.tile.shape[0], self.tile.shape[2]]
        if list(u.shape[:2]) != held or u.device != self.tile.device:
            raise ValueError(
                f"This cache holds [batch, channels] = {held} on {self.tile.device}; got inputs of shape "
                f"{list(u.shape)} on {u.device}. Start a new cache, or select samples with `batch_select_indices`."
            )
        if self.interrupted:
            raise ValueError("An earlier call was interrupted in its work: start a new cache, or `reset()` this one.")
        if self.tile.is_inference():
            # Of a copy that was made in inference mode, or a cache read in it: its tensors may not be written.
            self._replace(torch.clone)
        self.interrupted = True
        outputs = self._advance(u.to(self.tile.dtype)).to(u.dtype)
        self.interrupted = False
        return outputs

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "owner": None}

    def _replace(self, change: Callable[[Tensor], Tensor]) -> None:
        self.tile = change(self.tile)
        self.tail = [change(tile) for tile in self.tail]
        for level in self.levels:
            level.replace(change)

    def _advance(self, u: Tensor) -> Tensor:
        length = u.shape[-1]
        outputs = [] if self.seen or length < _PROMPT else [self._begin(u)]
        done = outputs[0].shape[-1] if outputs else 0
        while done < length:
            inside, left = self.seen % TILE, length - done
            if inside or left < TILE:
                size = min(left, TILE - inside)
                outputs.append(self._advance_in_tile(u[..., done : done + size]))
            else:
                size = min(left // TILE * TILE, _RUN)
                outputs.append(self._advance_tiles(u[..., done : done + size]))
            done += size
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def _begin(self, u: Tensor) -> Tensor:
        """Whole tiles of a first chunk: the FFT stands for levels of short blocks, which begin after it with zeros."""
        self.seen = whole = u.shape[-1] // TILE * TILE
        longer = [level for level in self.levels if GROWTH * level.block > whole]
        for level in self.levels[: len(self.levels) - len(longer)]:
            level.input_m = torch.zeros_like(level.input_m)
        taps = self.kernel.kernel[:, : 2 * longer[0].block if longer else None]
        reach = whole - -taps.shape[-1] // TILE * TILE
        size, responses = fft_size(reach), []
        for part, lags in zip(u[..., :whole].split(_GROUP, dim=1), taps.split(_GROUP), strict=True):
            spectrum = torch.fft.rfft(part, n=size).mul_(torch.fft.rfft(lags, n=size))
            responses.append(torch.fft.irfft(spectrum, n=size))
        # Each piece is a tensor of its own, which is freed when its tiles have been used.
        pieces = zip(*[response[..., whole:reach].split(_RUN, dim=-1) for response in responses], strict=True)
        self.tail = [tile for piece in pieces for tile in torch.cat(piece, dim=1).split(TILE, dim=-1)]
        outputs = torch.cat([response[..., :whole] for response in responses], dim=1).add_(self.kernel.bias[:, None])
        for level in longer:
            outputs += level.advance(u[..., :whole], 0)
        return outputs

    def _advance_in_tile(self, u: Tensor) -> Tensor:
        """Positions of one tile: they are added to the rest of it at once."""
        place = self.seen % TILE
        stop, tile = place + u.shape[-1], self.seen - place
        by_position = u.transpose(1, 2)
        if place == 0:
            places = [(level.added_m, tile % level.block) for level in self.levels]
            known = [sums[..., first : first + TILE] for sums, first in places if sums is not None] + self.tail[:1]
            self.tail = self.tail[1:]
            if known:
                self.tile[:, :TILE] += sum(known[1:], known[0]).transpose(1, 2)
        if u.shape[-1] == 1:
            self.tile[:, place:TILE].addcmul_(by_position, self.kernel.head[: TILE - place])
        else:
            self.tile[:, place:TILE] += self.kernel.respond(u)[..., : TILE - place].transpose(1, 2)
        outputs = self.tile[:, place:stop] + self.kernel.bias
        self.tile[:, place:stop] = by_position
        for work_place, level in zip(self.work_places, self.levels, strict=True):
            if place <= work_place < stop:
                level.work(tile, tile + TILE)
        self.seen += u.shape[-1]
        if stop == TILE:
            inputs = self.tile[:, :TILE].transpose(1, 2).contiguous()
            for level in self.levels:
                level.store(inputs, tile)
            self.tile = pad(self.tile[:, TILE:], (0, 0, 0, TILE))
            self.tile[:, : 2 * TILE] += self.kernel.respond(inputs)[..., TILE:].transpose(1, 2)
        return outputs.transpose(1, 2)

    def _advance_tiles(self, u: Tensor) -> Tensor:
        """Whole tiles, each level by itself: as long chunks are computed."""
        response = self.kernel.respond(u)
        response[..., : 2 * TILE] += self.tile[:, : 2 * TILE].transpose(1, 2)
        for part, known in zip(response[..., : u.shape[-1]].split(TILE, dim=-1), self.tail, strict=False):
            part += known
        self.tail = self.tail[u.shape[-1] // TILE :]
        outputs, rest = response.split([u.shape[-1], 2 * TILE], dim=-1)
        for level in self.levels:
            outputs = outputs + level.advance(u, self.seen)
        self.tile = pad(rest.transpose(1, 2), (0, 0, 0, TILE))
        self.seen += u.shape[-1]
        return outputs + self.kernel.bias[:, None]

    @keeps_state
    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the samples `indices` of the batch, in their order and as often as they occur; or those of a mask."""
        if self.is_initialized:
            before = torch.arange(self.batch_size, device=self.tile.device)
            chosen = before[indices]
            # Beams often keep their order; else each token copies the whole state.
            if not torch.equal(chosen, before):
                self._replace(lambda tensor: tensor.index_select(0, chosen))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sample of the batch."""
        if self.is_initialized:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: what the last positions have added to those to come cannot be taken back."""
        raise ValueError(f"`crop({tokens_to_remove})`: a stream takes no position back. Keep a copy of the cache.")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    @property
    def batch_size(self) -> int:
        """Samples in the batch; an unknown attribute before the stream has begun, which is what `Cache` looks for."""
        return self.tile.shape[0]


class _WithoutBackward(torch.autograd.Function):
    """Passes the result on; says why there is no gradient, where one is asked for."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, trained: Tensor) -> Tensor:
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError("A streamed convolution has no gradient: call the model without a cache (use_cache=False).")


class MRConvCache(Cache):
    r"""
    State of a causal MRConv model between calls: generation keeps one under `cache`, and
    `model(chunk, cache=cache)` streams chunks of any length.

    A stream keeps the kernel that its layer had at the first call: changed weights take effect in a new cache, or
    after `reset()`. All caches share the kernels and their spectra, which the first one prepares. The state is
    float32, or float64 for float64 weights: about three numbers per tap, channel and sample once the stream is as long
    as the kernel. A stream may exceed `max_position_embeddings`; a position depends on that many positions before it.
    In beam search, a token that changes the order of the beams copies the state.

    Args:
        config ([`MRConvConfig`]): Configuration of the model, for the number of its layers.

    Example:
        >>> import torch
        >>> from hf_ext import MRConvCache, MRConvConfig, MRConvForCausalLM
        >>> model = MRConvForCausalLM(MRConvConfig(vocab_size=100, hidden_size=16, num_hidden_layers=2)).eval()
        >>> tokens, cache = torch.randint(100, (1, 120)), MRConvCache(model.config)
        >>> parts = [model(part, cache=cache).logits for part in tokens.split(50, dim=1)]
        >>> torch.allclose(torch.cat(parts, dim=1), model(tokens).logits, atol=1e-4)
        True
    """

    def __init__(self, config: PreTrainedConfig):
        depth = config.num_hidden_layers
        super().__init__(layers=[StreamingConvolution(index / depth) for index in range(depth)])

    def convolve(
        self, layer_index: int, u: Tensor, kernel: Callable[[], StreamingKernel], parameters: Callable[[], Any] = tuple
    ) -> Tensor:
        """Convolve the next chunk of a layer with its merged kernel and add its bias.

        `kernel` gives the layer's [`StreamingKernel`] and is called at the first chunk only; `u`,
        [batch, channels, length], is zero where a sample is padded. Where it or one of the `parameters` that make the
        kernel asks for a gradient, the backward pass of the result raises a `RuntimeError`."""
        layer: Any = self.layers[layer_index]
        result = layer.update(u, kernel)
        trained = [value for value in (u, *parameters()) if value.requires_grad] if torch.is_grad_enabled() else []
        return _WithoutBackward.apply(result, trained[0]) if trained else result
