# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""
Sum and energy of the branches of an MRConv layer, and their gradients, without forming most of the branches.

Shapes: u [batch, channels, length], kernels [channels, taps], n is the FFT size, spectra [..., n // 2 + 1]. A wing is
a kernel of the future, for negative lags.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_ext.mrconv.ops_mrconv import fft_size, kernel_spectrum


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
        """Whether a position of a sample is valid, [batch, 1, length]; None: all are."""
        if self.start is None and self.stop is None:
            return None
        time = torch.arange(self.u.shape[2], device=self.u.device)
        valid = torch.ones(len(self.u), self.u.shape[2], dtype=torch.bool, device=self.u.device)
        if self.start is not None:
            valid &= time >= self.start[:, None]
        if self.stop is not None:
            valid &= time < self.stop[:, None]
        return valid[:, None]

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
    spans = [
        sum(0 if k is None else k.shape[1] for k in branch) for branch in branches if not signal.is_formed(*branch)
    ]
    if not spans:
        return _exact(signal.u.new_zeros(signal.u.shape[1], 0))
    power = torch.view_as_real(signal.spectrum).square().sum(0).sum(-1)
    return torch.fft.irfft(_exact(power), n=signal.n)[:, : max(spans)]


def _symmetric(lags: Tensor, n: int) -> Tensor:
    """Spectrum, real, of a symmetric sequence of which the lags 0, 1, ... are given."""
    return 2 * torch.fft.rfft(lags, n=n).real - lags[:, :1]


# Of a branch k_i * u the layer needs A_i = sum (k_i * u) and Q_i = sum (k_i * u)^2 over the valid positions of the
# batch, and neither needs the branch itself:
#
# - A_i = sum_j k_i[j] S[j], S[j] being the sum of all inputs that lie j or more positions before the end.
# - The energy of the whole response k_i * u, which runs on beyond both ends, is sum_d R_u[d] R_i[d], with the
#   autocorrelations of u and of k_i (Parseval). Q_i is that less what lies beyond the ends; as many inputs next to the
#   end as the kernel has taps make it. A kernel longer than about half of u is cheaper to convolve, and then Q_i is
#   taken of its output.
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


# Backward, from dL/dA_i and dL/dQ_i. The sums are linear and quadratic in u and in k_i, so that
#
#     dA_i/dk_i[j] = S[j]                      dA_i/du[t] = sum of k_i over all lags that stay before the end
#     dQ_i/dk_i = 2 R_u * k_i - edges          dQ_i/du = 2 R_i * u - edges
#
# where the edges are the energy of a small convolution, whose gradient is again a convolution and a correlation. The
# parts of dL/du that are filters of u or of the layer's own gradient are added as spectra and transformed back once.
#
# How we know: gradcheck in float64, and all gradients against sums written lag by lag, at random lengths, kernels and
# valid positions (tests/mrconv/test_ops_mrconv.py).
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
