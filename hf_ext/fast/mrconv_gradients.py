# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""
MRConv's convolutions with gradients written by hand: same values as `ops_mrconv`, less time and memory.

Importing this module enters both in `ops_mrconv.FAST`. Autograd would keep every spectrum, and every branch of a
layer in training. Here a call saves its input and the kernels, computes the rest again in the backward pass, and
works on a few channels at a time, so that no other array is as large.

The layer. With kernels k_i, input u, and sums over all C valid positions of the batch,

    y = sum_i s_i (k_i * u) + t        s_i = alpha_i w_i / sqrt(Q_i / C - mean_i^2 + eps)      mean_i = A_i / C
    A_i = sum (k_i * u)                t = sum_i (alpha_i b_i - s_i mean_i)
    Q_i = sum (k_i * u)^2

so that A_i and Q_i are all that is needed of a branch, and one convolution, with m = sum_i s_i k_i, gives y. Neither
sum needs the branch itself:

- A_i = sum_j k_i[j] S[j], S[j] being the sum of all inputs that lie j or more positions before the end.
- The energy of the whole response k_i * u, which runs on beyond both ends, is sum_d R_u[d] R_i[d], with the
  autocorrelations of u and of k_i (Parseval). Q_i is that less what lies beyond the ends; as many inputs next to the
  end as the kernel has taps make it. A kernel longer than about half of u is cheaper to convolve, and then Q_i is
  taken of its output.

Backward, from g = dL/dy. With r[j] the correlation of g with u at lag j, one FFT for all branches,

    dL/dt = sum g      dL/ds_i = sum_j k_i[j] r[j]      dL/dm = r      dL/du = m correlated with g + ...

The first two go through the formulas of s and t by autograd, on N numbers a channel, to dL/dA_i and dL/dQ_i, and to
alpha, w, b. Then, the sums being linear and quadratic in u and in k_i,

    dA_i/dk_i[j] = S[j]                      dA_i/du[t] = sum of k_i over all lags that stay before the end
    dQ_i/dk_i = 2 R_u * k_i - edges          dQ_i/du = 2 R_i * u - edges

where the edges are the energy of a small convolution, whose gradient is again a convolution and a correlation. The
parts of dL/du that are filters of u or g are added as spectra and transformed back once.

How we know: gradcheck in float64, all gradients against N branches through `torch.nn.BatchNorm1d` and against sums
written lag by lag, at random lengths, kernels and valid positions (tests/mrconv/test_ops_mrconv.py).

Large means. What the mean of the input gives at the output of a branch is a constant, which the normalization takes
off again. Where the mean is large, the variance is the small difference of a large square and a large squared mean,
and the digits of float32 that both have in common are lost. How many those are is known as soon as the sums are:
mean^2 / var. Channels that lose more than two digits of seven are computed again in float64, forward and backward;
the others pay nothing. It is the same function of the same numbers, rounded less, so that there is nothing to derive;
tests compare it with float64. Processes that share statistics decide by their own samples: where mean^2 <= 100 var in
all of them, it holds of the joined batch, whose variance is at least the mean of theirs. The numbers are looked at on
a CPU only: that would hold up another device, and some have no float64.

Shapes: u [batch, channels, length], kernels [channels, taps], n is the FFT size, spectra [..., n // 2 + 1]. A wing is
a kernel of the future, for negative lags.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_ext.mrconv.ops_mrconv import FAST, SumOverProcesses, fft_size, kernel_spectrum

# Points of the real FFTs that run together: what caches hold, or enough to fill a GPU without filling its memory.
_POINTS_CPU = 2**21
_POINTS_GPU = 2**26


def channel_chunks(u: Tensor, n: int) -> Iterator[slice]:
    """Channels that are worked on together. Large arrays made and dropped cost more than the FFTs between them."""
    points = _POINTS_CPU if u.device.type == "cpu" else _POINTS_GPU
    size = max(1, points // (n * len(u)))
    return (slice(first, min(first + size, u.shape[1])) for first in range(0, u.shape[1], size))


def correlation(conjugate: Tensor, spectrum: Tensor, n: int) -> Tensor:
    """Gradient of a two-sided kernel, [channels, n]: conj(U) G summed over the batch. Overwrites the second one."""
    return torch.fft.irfft(torch.view_as_complex(torch.view_as_real(spectrum.mul_(conjugate)).sum(0)), n=n)


def response(spectrum: Tensor, kernel: Tensor, n: int, length: int) -> Tensor:
    """The first outputs of a convolution."""
    return torch.fft.irfft(spectrum * kernel, n=n)[..., :length]


def _exact(values: Tensor) -> Tensor:
    """float64, where a device has it: the variance is a small difference of large sums."""
    return values if values.device.type == "mps" else values.double()


def _energy(values: Tensor) -> Tensor:
    return _exact(torch.linalg.vector_norm(values, dim=-1)).square().sum(0)


def _power(spectrum: Tensor) -> Tensor:
    """|X|^2, without the square root and the care for overflow that `abs` takes."""
    return torch.view_as_real(spectrum).square().sum(-1)


def _gather(values: Tensor, index: Tensor) -> Tensor:
    """values[b, :, index[b, t]], zero where the index lies outside."""
    size = values.shape[-1]
    places = index.clamp(0, size - 1)[:, None].expand(-1, values.shape[1], -1)
    return values.expand(len(index), -1, -1).gather(2, places) * ((index >= 0) & (index < size))[:, None]


class Edge(NamedTuple):
    """One end of the valid positions, the last or the first of them; `position` None stands for that of the buffer."""

    last: bool
    position: Tensor | None

    def inputs(self, u: Tensor, count: int) -> Tensor:
        """Inputs in the order of their distance from the edge, [batch, channels, count]."""
        if self.position is None:
            return u[..., u.shape[-1] - count :].flip(-1) if self.last else u[..., :count]
        steps = torch.arange(count, device=u.device)
        return _gather(u, self.position[:, None] + (-1 - steps if self.last else steps))

    def add_(self, u: Tensor, values: Tensor) -> None:
        """Add values in the order of their distance from the edge to a buffer in the order of time."""
        if self.position is None:
            count = values.shape[-1]
            part, values = (u[..., -count:], values.flip(-1)) if self.last else (u[..., :count], values)
            part += values
            return
        time = torch.arange(u.shape[-1], device=u.device)
        first = self.position[:, None]
        u += _gather(values, first - 1 - time if self.last else time - first)


class Signal(NamedTuple):
    """Some channels of the input, and their spectrum. Positions start, ..., stop - 1 are valid; u is zero outside."""

    u: Tensor
    spectrum: Tensor
    n: int
    start: Tensor | None
    stop: Tensor | None

    @property
    def valid(self) -> Tensor | None:
        return valid_positions(self.u, self.start, self.stop)

    def edges(self, kernel: Tensor, wing: Tensor | None) -> list[tuple[int, Edge, Tensor]]:
        """
        Kernels whose causal response to the inputs at an edge, counted from there, is what lies beyond the edge, last
        output first: sum_{j >= s} w[j] e[j - s] with w the lags that cross the edge.
        """
        edges = [(0, Edge(True, self.stop), kernel[:, 1:])]
        if wing is not None:
            edges.append((1, Edge(False, self.start), wing))
        return [(side, edge, lags.flip(1)) for side, edge, lags in edges if lags.shape[1] > 0]

    def is_formed(self, kernel: Tensor, wing: Tensor | None) -> bool:
        """Whether the output of the branch is formed: three transforms of size n beat six of each edge."""
        reach = kernel.shape[1] - 1 + (0 if wing is None else wing.shape[1])
        return 4 * reach >= self.n


def valid_positions(u: Tensor, start: Tensor | None, stop: Tensor | None) -> Tensor | None:
    """Whether a position of a sample is valid, [batch, 1, length]; None: all are."""
    if start is None and stop is None:
        return None
    time = torch.arange(u.shape[2], device=u.device)
    valid = torch.ones(len(u), u.shape[2], dtype=torch.bool, device=u.device)
    if start is not None:
        valid &= time >= start[:, None]
    if stop is not None:
        valid &= time < stop[:, None]
    return valid[:, None]


def _input_sums(signal: Signal, last: bool) -> Tensor:
    """Sum of all inputs that lie at a distance of t or more from the edge: [channels, length]."""
    position, u = signal.stop if last else signal.start, signal.u
    if position is None:
        # Reversed after the sum, not before.
        inputs = Edge(last, None).inputs(u.sum(0), u.shape[2])
    else:
        inputs = Edge(last, position).inputs(u, u.shape[2]).sum(0)
    return running_sums(_exact(inputs).flip(1)).flip(1)


def running_sums(values: Tensor) -> Tensor:
    """
    Sum of all values up to t: [channels, length].

    CUDA has no deterministic `cumsum` and refuses it in deterministic mode. There each entry is first the sum of one
    value; adding the entry that lies 1, 2, 4, ... before makes it one of 2, 4, 8, ... values, after log2(length) steps
    of all up to it.
    """
    if values.device.type == "cpu" or not torch.are_deterministic_algorithms_enabled():
        return values.cumsum(1)
    return doubled_sums(values)


def doubled_sums(values: Tensor) -> Tensor:
    """What [`running_sums`] is on a GPU in deterministic mode."""
    step = 1
    while step < values.shape[1]:
        values = torch.cat([values[:, :step], values[:, step:] + values[:, :-step]], dim=1)
        step *= 2
    return values


def _autocorrelation(signal: Signal, branches: list[tuple[Tensor, Tensor | None]]) -> Tensor:
    """Autocorrelation of u, summed over the batch, at as many lags as those branches have that are not formed."""
    spans = [_span(*branch) for branch in branches if not signal.is_formed(*branch)]
    if not spans:
        return _exact(signal.u.new_zeros(signal.u.shape[1], 0))
    power = torch.view_as_real(signal.spectrum).square().sum(0).sum(-1)
    return torch.fft.irfft(_exact(power), n=signal.n)[:, : max(spans)]


def _span(kernel: Tensor, wing: Tensor | None) -> int:
    return kernel.shape[1] + (0 if wing is None else wing.shape[1])


def _symmetric(lags: Tensor, n: int) -> Tensor:
    """Spectrum, real, of a symmetric sequence of which the lags 0, 1, ... are given."""
    return 2 * torch.fft.rfft(lags, n=n).real - lags[:, :1]


def branch_sums(signal: Signal, kernels: list[Tensor], wings: list[Tensor] | list[None]) -> tuple[Tensor, Tensor]:
    """Sum and squared sum of each branch over batch and valid positions, [N, channels], in float64."""
    branches = list(zip(kernels, wings, strict=True))
    before, after = _input_sums(signal, True), None if wings[0] is None else _input_sums(signal, False)
    lags = _autocorrelation(signal, branches)
    totals, squares = [], []
    for kernel, wing in branches:
        total = (kernel * before[:, : kernel.shape[1]]).sum(1)
        if wing is not None and after is not None:
            total = total + (wing * after[:, 1 : 1 + wing.shape[1]]).sum(1)
        totals.append(total)
        form = _formed_square if signal.is_formed(kernel, wing) else _parseval_square
        squares.append(form(signal, kernel, wing, total, lags))
    return torch.stack(totals), torch.stack(squares)


def _formed_square(signal: Signal, kernel: Tensor, wing: Tensor | None, total: Tensor, lags: Tensor) -> Tensor:
    """Of the outputs themselves, around their mean: then the variance suffers no cancellation."""
    y = response(signal.spectrum, kernel_spectrum(kernel, wing, signal.n), signal.n, signal.u.shape[2])
    valid = signal.valid
    count = y.shape[0] * y.shape[2] if valid is None else valid.sum().clamp_min(1)
    y = y.sub_((total / count).to(y.dtype)[:, None])
    y = y if valid is None else y.mul_(valid)
    return _energy(y) + total.square() / count


def _parseval_square(signal: Signal, kernel: Tensor, wing: Tensor | None, total: Tensor, lags: Tensor) -> Tensor:
    """Energy of the whole response, sum_d R[d] c[d], less what lies beyond the edges."""
    both = _exact(kernel if wing is None else torch.cat([wing.flip(1), kernel], dim=1))
    span = both.shape[1]
    n = fft_size(2 * span)
    own = torch.fft.irfft(_power(torch.fft.rfft(both, n=n)), n=n)[:, :span]
    square = 2 * (own * lags[:, :span]).sum(1) - own[:, 0] * lags[:, 0]
    for _, edge, crossing in signal.edges(kernel, wing):
        count = crossing.shape[1]
        n = fft_size(2 * count)
        beyond = torch.fft.rfft(edge.inputs(signal.u, count), n=n)
        square = square - _energy(response(beyond, torch.fft.rfft(crossing, n=n), n, count))
    return square


class SumGradients:
    """Gradients of [`branch_sums`] for one chunk of channels."""

    def __init__(
        self,
        signal: Signal,
        kernels: list[Tensor],
        wings: list[Tensor] | list[None],
        g_total: Tensor,
        g_square: Tensor,
    ):
        self.signal, self.branches = signal, list(zip(kernels, wings, strict=True))
        self.g_total, self.g_square = g_total, g_square
        before, after = _input_sums(signal, True), None if wings[0] is None else _input_sums(signal, False)
        self.kernels = [g[:, None] * before[:, : k.shape[1]] for g, k in zip(g_total, kernels, strict=True)]
        self.wings = [
            None if wing is None or after is None else g[:, None] * after[:, 1 : 1 + wing.shape[1]]
            for g, wing in zip(g_total, wings, strict=True)
        ]

    def _add_to_kernel(self, index: int, gradient: Tensor) -> None:
        """`gradient` is that of lags from -taps of the wing up."""
        kernel, wing = self.kernels[index], self.wings[index]
        taps = 0 if wing is None else wing.shape[1]
        kernel += gradient[:, taps:]
        if wing is not None:
            wing += gradient[:, :taps].flip(1)

    @property
    def kernel_gradients(self) -> list[Tensor]:
        """Those of the kernels of the past, then those of the wings."""
        return [*self.kernels, *(wing for wing in self.wings if wing is not None)]

    def add_merged_(self, lags: Tensor, scale: Tensor) -> None:
        """Add what comes through the merged kernel sum_i scale_i k_i, of whose lags, [channels, n], it is given."""
        for kernel, wing, factor in zip(self.kernels, self.wings, scale.to(lags.dtype)[..., None], strict=True):
            kernel += factor * lags[:, : kernel.shape[1]]
            if wing is not None:
                wing += factor * lags[:, lags.shape[1] - wing.shape[1] :].flip(1)

    def add_spectra_(self, g_spectrum: Tensor, conjugate: Tensor) -> None:
        """Add to the gradient of u what can be added as a spectrum. `conjugate`: of the spectrum of u."""
        signal, n = self.signal, self.signal.n
        lags = _autocorrelation(signal, self.branches)
        g_lags = torch.zeros_like(lags)
        for index, (kernel, wing) in enumerate(self.branches):
            if not signal.is_formed(kernel, wing):
                self._add_parseval(index, lags, g_lags)
                continue
            factors = kernel_spectrum(kernel, wing, n)
            y = response(signal.spectrum, factors, n, signal.u.shape[2])
            y = y.mul_((2 * self.g_square[index]).to(y.dtype)[:, None])
            g_y = torch.fft.rfft(y if signal.valid is None else y.mul_(signal.valid), n=n)
            g_spectrum.addcmul_(g_y, factors.conj_physical_())
            gradient = correlation(conjugate, g_y, n)
            taps = 0 if wing is None else wing.shape[1]
            self._add_to_kernel(index, torch.cat([gradient[:, n - taps :], gradient[:, : kernel.shape[1]]], dim=1))
        if g_lags.shape[1] > 0:
            g_spectrum.addcmul_(signal.spectrum, (2 * _symmetric(g_lags, n)).to(g_spectrum.dtype))

    def _add_parseval(self, index: int, lags: Tensor, g_lags: Tensor) -> None:
        kernel, wing = self.branches[index]
        both = _exact(kernel if wing is None else torch.cat([wing.flip(1), kernel], dim=1))
        span, g_square = both.shape[1], self.g_square[index][:, None]
        n = fft_size(2 * span)
        spectrum = torch.fft.rfft(both, n=n)
        g_lags[:, :span] += g_square * torch.fft.irfft(_power(spectrum), n=n)[:, :span]
        gradient = torch.fft.irfft(spectrum * _symmetric(lags[:, :span], n), n=n)[:, :span]
        self._add_to_kernel(index, 2 * g_square * gradient)

    def add_edges_(self, g_u: Tensor) -> None:
        """Add to the gradient of u what is known at the edges: that of the sums, and of what lies beyond an edge."""
        for last in (True, False):
            edge = Edge(last, self.signal.stop if last else self.signal.start)
            g_inputs = self._input_gradient(last)
            if g_inputs is not None:
                edge.add_(g_u, g_inputs.to(g_u.dtype)[None])
        beyond: dict[int, tuple[Edge, Tensor]] = {}
        for index, branch in enumerate(self.branches):
            if self.signal.is_formed(*branch):
                continue
            for side, edge, crossing in self.signal.edges(*branch):
                g_inputs = self._edge_gradient(index, side, edge, crossing)
                if side in beyond:
                    shorter, g_inputs = sorted((beyond[side][1], g_inputs), key=lambda g: g.shape[-1])
                    g_inputs[..., : shorter.shape[-1]] += shorter
                beyond[side] = edge, g_inputs
        for edge, g_inputs in beyond.values():
            edge.add_(g_u, g_inputs)

    def _input_gradient(self, last: bool) -> Tensor | None:
        """Gradient of the sums by the distance of an input from the edge: cumulative sums of the kernels."""
        length = self.signal.u.shape[2]
        g_inputs = _exact(self.signal.u.new_zeros(self.signal.u.shape[1], length))
        for g, (kernel, wing) in zip(self.g_total, self.branches, strict=True):
            if last:
                g_inputs[:, : kernel.shape[1]] += g[:, None] * kernel
            elif wing is None:
                return None
            else:
                g_inputs[:, 1 : 1 + wing.shape[1]] += g[:, None] * wing
        return running_sums(g_inputs)

    def _edge_gradient(self, index: int, side: int, edge: Edge, crossing: Tensor) -> Tensor:
        count = crossing.shape[1]
        n = fft_size(2 * count)
        inputs, factors = torch.fft.rfft(edge.inputs(self.signal.u, count), n=n), torch.fft.rfft(crossing, n=n)
        y = response(inputs, factors, n, count)
        g_y = torch.fft.rfft(y.mul_((-2 * self.g_square[index]).to(y.dtype)[:, None]), n=n)
        g_inputs = response(g_y, factors.conj_physical_(), n, count)
        gradient = correlation(inputs.conj_physical_(), g_y, n)[:, :count].flip(1)
        if side == 0:
            self.kernels[index][:, 1:] += gradient
        else:
            wing = self.wings[index]
            assert wing is not None
            wing += gradient
        return g_inputs


class LongConv(torch.autograd.Function):
    """Saves the input and the kernels; spectra are computed again."""

    @staticmethod
    def forward(
        ctx: Any, u: Tensor, kernel: Tensor, wing: Tensor | None, spectrum: Tensor | None, bias: Tensor | None, n: int
    ) -> Tensor:
        ctx.save_for_backward(u, kernel, wing, spectrum)
        ctx.n = n
        y = torch.empty(u.shape, dtype=u.dtype, device=u.device)
        for part in channel_chunks(u, n):
            factors = kernel_spectrum(kernel[part], _rows(wing, part), n) if spectrum is None else spectrum[part]
            spectra = torch.fft.rfft(u[:, part].to(kernel.dtype), n=n).mul_(factors)
            chunk = torch.fft.irfft(spectra, n=n)[..., : u.shape[2]]
            if bias is None:
                y[:, part] = chunk
            else:
                torch.add(chunk, bias[part, None], out=y[:, part])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        u, kernel, wing, spectrum = ctx.saved_tensors
        (g_y,), n, needed = gradients, ctx.n, ctx.needs_input_grad
        g_u, g_kernel, g_wing = (
            torch.empty(x.shape, dtype=x.dtype, device=x.device) if x is not None and need else None
            for x, need in zip((u, kernel, wing), needed, strict=False)
        )
        for part in channel_chunks(u, n):
            g_spectrum = torch.fft.rfft(g_y[:, part].to(kernel.dtype), n=n)
            if g_u is not None:
                factors = kernel_spectrum(kernel[part], _rows(wing, part), n) if spectrum is None else spectrum[part]
                g_u[:, part] = response(g_spectrum, factors.conj_physical(), n, u.shape[2])
            if spectrum is None and (g_kernel is not None or g_wing is not None):
                conjugate = torch.fft.rfft(u[:, part].to(kernel.dtype), n=n).conj_physical_()
                lags = correlation(conjugate, g_spectrum, n)
                if g_kernel is not None:
                    g_kernel[part] = lags[:, : kernel.shape[1]]
                if g_wing is not None:
                    g_wing[part] = lags[:, n - g_wing.shape[1] :].flip(1)
        g_bias = g_y.sum((0, 2), dtype=kernel.dtype) if needed[4] else None
        return g_u, g_kernel, g_wing, None, g_bias, None


def _rows(kernel: Tensor | None, part: slice) -> Tensor | None:
    return None if kernel is None else kernel[part]


# Ratio of squared mean and variance above which float32 has lost two digits.
_LARGE_MEAN = 100

Wings = list[Tensor] | list[None]


class Chunk(NamedTuple):
    """Some channels: input, kernels of the past, and of the future, all in one dtype."""

    signal: Signal
    kernels: list[Tensor]
    wings: Wings

    @property
    def dtype(self) -> torch.dtype:
        return self.signal.u.dtype


class BatchNormLayer(NamedTuple):
    """What a layer is but for its tensors."""

    n: int
    eps: float
    group: torch.distributed.ProcessGroup | None
    start: Tensor | None
    stop: Tensor | None

    def chunk(self, u: Tensor, kernels: Sequence[Tensor], branches: int, part: slice, dtype: torch.dtype) -> "Chunk":
        """Some channels; of `kernels`, the first ones are those of the past."""
        samples = u[:, part].to(dtype)
        signal = Signal(samples, torch.fft.rfft(samples, n=self.n), self.n, self.start, self.stop)
        rows = [kernel[part].to(dtype) for kernel in kernels]
        return Chunk(signal, rows[:branches], rows[branches:] or [None] * branches)

    def measured_chunk(
        self, u: Tensor, kernels: Sequence[Tensor], branches: int, part: slice
    ) -> tuple["Chunk", Tensor]:
        """
        Some channels, in float64 where float32 is not enough, and of each branch sum, squared sum and number of
        positions: [3, N, channels].
        """
        chunk = self.chunk(u, kernels, branches, part, kernels[0].dtype)
        sums = self._sums(chunk)
        if u.device.type != "cpu" or chunk.dtype == torch.float64:
            return chunk, sums
        mean, square = sums[:2] / sums[2].clamp_min(1)
        if not bool((mean.square() > _LARGE_MEAN * (square - mean.square())).any()):
            return chunk, sums
        chunk = self.chunk(u, kernels, branches, part, torch.float64)
        return chunk, self._sums(chunk)

    def _sums(self, chunk: "Chunk") -> Tensor:
        total, square = branch_sums(*chunk)
        u, valid = chunk.signal.u, chunk.signal.valid
        count = total.new_full((), len(u) * u.shape[2]) if valid is None else valid.sum().to(total.dtype)
        return torch.stack([total, square, count.expand_as(total)])

    def exchange(
        self, parts: list[slice], begin: Callable[[slice], tuple[Any, Tensor]], again: Callable[[slice], Any]
    ) -> Iterator[tuple[slice, Any, Tensor]]:
        """
        Work on parts of the channels that have sums in common with other processes: each part with what `begin` made
        of it and its sums, [..., channels], over all processes.

        All sums travel in one collective, so that no process waits for each part. Until it is there all parts have to
        be begun, and what they work on is not kept, as there is no memory for it, but made `again`.
        """
        if self.group is None:
            for part in parts:
                yield part, *begin(part)
            return
        begun = [begin(part) if len(parts) == 1 else (None, begin(part)[1]) for part in parts]
        sums: Tensor = SumOverProcesses.apply(torch.cat([found for _, found in begun], dim=-1), self.group)
        for part, (work, _) in zip(parts, begun, strict=True):
            yield part, again(part) if work is None else work, sums[..., part]

    def merged_spectrum(self, kernels: list[Tensor], wings: Wings, scale: Tensor) -> Tensor:
        return kernel_spectrum(_merge(kernels, scale), None if wings[0] is None else _merge(wings, scale), self.n)

    def normalization(
        self, total: Tensor, square: Tensor, count: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Scale of each branch, shift of their sum, mean and variance, from sums over the batch: eqs. 4-6."""
        positions = count.clamp_min(1)
        mean = total / positions
        var = (square / positions - mean.square()).clamp_min(0)
        scale = alpha * weight * (var + self.eps).rsqrt()
        return scale, (alpha * bias - scale * mean).sum(0), mean, var


def _merge(kernels: Any, scale: Tensor) -> Tensor:
    merged = kernels[0].new_zeros(len(kernels[0]), max(kernel.shape[1] for kernel in kernels))
    for kernel, factor in zip(kernels, scale.to(merged.dtype), strict=True):
        merged[:, : kernel.shape[1]].addcmul_(kernel, factor[:, None])
    return merged


class BatchNormConv(torch.autograd.Function):
    """Sums of the branches, their normalization, and one convolution with the merged kernel, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, u: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor, layer: BatchNormLayer, *kernels: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y = torch.empty(u.shape, dtype=u.dtype, device=u.device)
        mean, var = (torch.empty(alpha.shape, dtype=kernels[0].dtype, device=u.device) for _ in range(2))
        branches, dtypes = len(alpha), {}

        def begin(part: slice) -> tuple[Chunk, Tensor]:
            chunk, sums = layer.measured_chunk(u, kernels, branches, part)
            dtypes[part.start] = chunk.dtype
            return chunk, sums

        def again(part: slice) -> Chunk:
            return layer.chunk(u, kernels, branches, part, dtypes[part.start])

        all_sums = []
        for part, (signal, past, wings), sums in layer.exchange(list(channel_chunks(u, layer.n)), begin, again):
            coefficients = alpha[:, part], weight[:, part], bias[:, part]
            scale, shift, mean[:, part], var[:, part] = layer.normalization(sums[0], sums[1], sums[2], *coefficients)
            chunk = response(signal.spectrum, layer.merged_spectrum(past, wings, scale), layer.n, u.shape[2])
            torch.add(chunk, shift.to(chunk.dtype)[:, None], out=y[:, part])
            all_sums.append(sums[:2])
            # The same for all channels.
            count = sums[2, 0, 0].clone()
        ctx.save_for_backward(u, alpha, weight, bias, count, torch.cat(all_sums, dim=2), *kernels)
        ctx.layer, ctx.dtypes = layer, dtypes
        count = count.to(mean.dtype)
        ctx.mark_non_differentiable(mean, var, count)
        return y, mean, var, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        u, alpha, weight, bias, count, all_sums, *kernels = ctx.saved_tensors
        layer, g_y = ctx.layer, gradients[0]
        g_u = torch.empty(u.shape, dtype=u.dtype, device=u.device)
        g_coefficients = [torch.empty_like(x) for x in (alpha, weight, bias)]
        g_kernels = [torch.empty_like(kernel) for kernel in kernels]

        def begin(part: slice) -> tuple[tuple[Any, ...], Tensor]:
            signal, past, wings = chunk = layer.chunk(u, kernels, len(alpha), part, ctx.dtypes[part.start])
            leaves = [x[:, part].detach().requires_grad_() for x in (*all_sums, alpha, weight, bias)]
            with torch.enable_grad():
                scale, shift = layer.normalization(*leaves[:2], count, *leaves[2:])[:2]
            g_chunk = g_y[:, part].to(chunk.dtype)
            g_spectrum = torch.fft.rfft(g_chunk, n=layer.n)
            conjugate = signal.spectrum.conj_physical()
            lags = correlation(conjugate, g_spectrum.clone(), layer.n)
            g_scale = _scale_gradient(lags, past, wings).to(scale.dtype)
            g_shift = g_chunk.sum((0, 2), dtype=shift.dtype)
            *g_sums, g_alpha, g_weight, g_bias = torch.autograd.grad((scale, shift), leaves, (g_scale, g_shift))
            for target, gradient in zip(g_coefficients, (g_alpha, g_weight, g_bias), strict=True):
                target[:, part] = gradient
            return (chunk, scale.detach(), g_spectrum, conjugate, lags), torch.stack(g_sums)

        parts = list(channel_chunks(u, layer.n))
        for part, work, g_sums in layer.exchange(parts, begin, lambda part: begin(part)[0]):
            (signal, past, wings), scale, g_spectrum, conjugate, lags = work
            sums = SumGradients(signal, past, wings, *g_sums)
            g_spectrum.mul_(layer.merged_spectrum(past, wings, scale).conj_physical_())
            sums.add_spectra_(g_spectrum, conjugate)
            g_chunk = torch.fft.irfft(g_spectrum, n=layer.n)[..., : u.shape[2]]
            sums.add_edges_(g_chunk)
            g_u[:, part] = g_chunk
            sums.add_merged_(lags, scale)
            for target, gradient in zip(g_kernels, sums.kernel_gradients, strict=True):
                target[part] = gradient
        return g_u, *g_coefficients, None, *g_kernels


@torch.compiler.disable
def normalized_conv(
    u: Tensor,
    kernels: list[Tensor],
    wings: list[Tensor],
    alpha: Tensor,
    weight: Tensor,
    bias: Tensor,
    n: int,
    eps: float,
    start: Tensor | None,
    stop: Tensor | None,
    group: torch.distributed.ProcessGroup | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[`BatchNormConv`], outside of compiled graphs: there is nothing to fuse, and chunks would be unrolled."""
    layer = BatchNormLayer(n, eps, group, start, stop)
    y, mean, var, count = BatchNormConv.apply(u, alpha, weight, bias, layer, *kernels, *wings)
    return y, mean, var, count


def _scale_gradient(lags: Tensor, kernels: list[Tensor], wings: Wings) -> Tensor:
    """Gradient of the factor of each branch from that of the merged kernel's lags: [N, channels]."""
    found = []
    for kernel, wing in zip(kernels, wings, strict=True):
        gradient = (lags[:, : kernel.shape[1]] * kernel).sum(1)
        if wing is not None:
            gradient = gradient + (lags[:, lags.shape[1] - wing.shape[1] :].flip(1) * wing).sum(1)
        found.append(gradient)
    return torch.stack(found)


FAST.update(long_conv=LongConv.apply, batch_norm_conv=normalized_conv)
