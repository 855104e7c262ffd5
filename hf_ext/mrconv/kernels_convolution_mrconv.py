# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""What runs below `ops_mrconv`: long convolution, and the training-mode layer, with gradients that compute again.

Both save their input and the kernels, and work on a few channels at a time, so that no other array is as large.

What the mean of the input gives at the output of a branch is a constant, which the normalization takes off again.
Where the mean is large, the variance is the small difference of a large square and a large squared mean, and the
digits of float32 that both have in common are lost. How many those are is known as soon as the sums are: mean^2 /
var. Channels that lose more than two digits of seven are computed again in float64, forward and backward; the others
pay nothing. It is the same function of the same numbers, rounded less, so that there is nothing to derive; tests
compare it with float64. Processes that share statistics decide by their own samples: where mean^2 <= 100 var in all
of them, it holds of the joined batch, whose variance is at least the mean of theirs. The numbers are looked at on a
CPU only: that would hold up another device, and some have no float64.
Shapes: u [batch, channels, length], kernels [channels, taps], n is the FFT size, spectra [..., n // 2 + 1].
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor
from torch.autograd.function import once_differentiable

from .kernels_sums_mrconv import (
    Signal,
    SumGradients,
    branch_sums,
    channel_chunks,
    correlation,
    response,
    two_sided,
)


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
            factors = two_sided(kernel[part], _rows(wing, part), n) if spectrum is None else spectrum[part]
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
                factors = two_sided(kernel[part], _rows(wing, part), n) if spectrum is None else spectrum[part]
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


def reduced(values: Tensor, group: torch.distributed.ProcessGroup | None) -> Tensor:
    """Sum over the processes of a group."""
    if group is None:
        return values
    values = values.clone()
    torch.distributed.all_reduce(values, group=group)
    return values


# Ratio of squared mean and variance above which float32 has lost two digits.
_LARGE_MEAN = 100

# Channels of a chunk whose sums processes add up: the same number on all of them, whatever their batches.
_SHARED_CHANNELS = 16

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
    """
    What a layer is but for its tensors.

    Args:
        n (`int`): FFT size.
        eps (`float`): Added to the variance.
        group (`torch.distributed.ProcessGroup`, *optional*): Processes that share the statistics.
        start, stop (`torch.LongTensor` of shape `(batch,)`, *optional*): The valid positions.
    """

    n: int
    eps: float
    group: torch.distributed.ProcessGroup | None
    start: Tensor | None
    stop: Tensor | None

    def chunks(self, u: Tensor) -> Iterator[slice]:
        if self.group is None:
            return channel_chunks(u, self.n)
        size = _SHARED_CHANNELS
        return (slice(first, first + size) for first in range(0, u.shape[1], size))

    def chunk(self, u: Tensor, kernels: Sequence[Tensor], branches: int, part: slice, dtype: torch.dtype) -> "Chunk":
        """Some channels; of `kernels`, the first ones are those of the past."""
        samples = u[:, part].to(dtype)
        signal = Signal(samples, torch.fft.rfft(samples, n=self.n), self.n, self.start, self.stop)
        rows = [kernel[part].to(dtype) for kernel in kernels]
        return Chunk(signal, rows[:branches], rows[branches:] or [None] * branches)

    def measured_chunk(
        self, u: Tensor, kernels: Sequence[Tensor], branches: int, part: slice
    ) -> tuple["Chunk", Tensor]:
        """Some channels and the sums of their branches, [2, N, channels], in float64 where float32 is not enough."""
        chunk = self.chunk(u, kernels, branches, part, kernels[0].dtype)
        sums = torch.stack(branch_sums(*chunk))
        if u.device.type != "cpu" or chunk.dtype == torch.float64:
            return chunk, sums
        valid = chunk.signal.valid
        mean, square = sums / (len(u) * u.shape[2] if valid is None else valid.sum().clamp_min(1))
        if not bool((mean.square() > _LARGE_MEAN * (square - mean.square())).any()):
            return chunk, sums
        chunk = self.chunk(u, kernels, branches, part, torch.float64)
        return chunk, torch.stack(branch_sums(*chunk))

    def merged_spectrum(self, kernels: list[Tensor], wings: Wings, scale: Tensor) -> Tensor:
        return two_sided(_merged(kernels, scale), None if wings[0] is None else _merged(wings, scale), self.n)

    def normalization(
        self, total: Tensor, square: Tensor, count: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Scale of each branch, shift of their sum, mean and variance, from sums over the batch: eqs. 4-6."""
        positions = count.clamp_min(1)
        mean = total / positions
        var = (square / positions - mean.square()).clamp_min(0)
        scale = alpha * weight * (var + self.eps).rsqrt()
        return scale, (alpha * bias - scale * mean).sum(0), mean, var


def _merged(kernels: Any, scale: Tensor) -> Tensor:
    merged = kernels[0].new_zeros(len(kernels[0]), max(kernel.shape[1] for kernel in kernels))
    for kernel, factor in zip(kernels, scale.to(merged.dtype), strict=True):
        merged[:, : kernel.shape[1]].addcmul_(kernel, factor[:, None])
    return merged


class BatchNormConv(torch.autograd.Function):
    """Sums of the branches, their normalization, and one convolution with the merged kernel, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        alpha: Tensor,
        weight: Tensor,
        bias: Tensor,
        count: Tensor,
        layer: BatchNormLayer,
        *kernels: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        y = torch.empty(u.shape, dtype=u.dtype, device=u.device)
        mean, var = (torch.empty(alpha.shape, dtype=count.dtype, device=u.device) for _ in range(2))
        all_sums, ctx.dtypes = [], []
        for part in layer.chunks(u):
            (signal, past, wings), sums = layer.measured_chunk(u, kernels, len(alpha), part)
            ctx.dtypes.append(signal.u.dtype)
            sums = reduced(sums, layer.group)
            scale, shift, mean[:, part], var[:, part] = layer.normalization(
                sums[0], sums[1], count, alpha[:, part], weight[:, part], bias[:, part]
            )
            chunk = response(signal.spectrum, layer.merged_spectrum(past, wings, scale), layer.n, u.shape[2])
            torch.add(chunk, shift.to(chunk.dtype)[:, None], out=y[:, part])
            all_sums.append(sums)
        ctx.save_for_backward(u, alpha, weight, bias, count, torch.cat(all_sums, dim=2), *kernels)
        ctx.layer = layer
        ctx.mark_non_differentiable(mean, var)
        return y, mean, var

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        u, alpha, weight, bias, count, all_sums, *kernels = ctx.saved_tensors
        layer, g_y = ctx.layer, gradients[0]
        g_u = torch.empty(u.shape, dtype=u.dtype, device=u.device)
        g_coefficients = [torch.empty_like(x) for x in (alpha, weight, bias)]
        g_kernels = [torch.empty_like(kernel) for kernel in kernels]
        for part, dtype in zip(layer.chunks(u), ctx.dtypes, strict=True):
            signal, past, wings = layer.chunk(u, kernels, len(alpha), part, dtype)
            leaves = [x[:, part].detach().requires_grad_() for x in (*all_sums, alpha, weight, bias)]
            with torch.enable_grad():
                scale, shift = layer.normalization(*leaves[:2], count, *leaves[2:])[:2]
            g_chunk = g_y[:, part].to(signal.u.dtype)
            g_spectrum = torch.fft.rfft(g_chunk, n=layer.n)
            conjugate = signal.spectrum.conj_physical()
            lags = correlation(conjugate, g_spectrum.clone(), layer.n)
            g_scale = _scale_gradient(lags, past, wings).to(scale.dtype)
            g_shift = g_chunk.sum((0, 2), dtype=shift.dtype)
            *g_sums, g_alpha, g_weight, g_bias = torch.autograd.grad((scale, shift), leaves, (g_scale, g_shift))
            for target, gradient in zip(g_coefficients, (g_alpha, g_weight, g_bias), strict=True):
                target[:, part] = gradient
            sums = SumGradients(signal, past, wings, *reduced(torch.stack(g_sums), layer.group))
            g_spectrum.mul_(layer.merged_spectrum(past, wings, scale.detach()).conj_physical_())
            sums.add_spectra_(g_spectrum, conjugate)
            g_chunk = torch.fft.irfft(g_spectrum, n=layer.n)[..., : u.shape[2]]
            sums.add_edges_(g_chunk)
            g_u[:, part] = g_chunk
            sums.add_merged_(lags, scale.detach())
            for target, gradient in zip(g_kernels, sums.kernel_gradients, strict=True):
                target[part] = gradient
        return g_u, *g_coefficients, None, None, *g_kernels


@torch.compiler.disable
def normalized_conv(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """[`BatchNormConv`], outside of compiled graphs: there is nothing to fuse, and chunks would be unrolled."""
    y, mean, var = BatchNormConv.apply(*arguments)
    return y, mean, var


def _scale_gradient(lags: Tensor, kernels: list[Tensor], wings: Wings) -> Tensor:
    """Gradient of the factor of each branch from that of the merged kernel's lags: [N, channels]."""
    found = []
    for kernel, wing in zip(kernels, wings, strict=True):
        gradient = (lags[:, : kernel.shape[1]] * kernel).sum(1)
        if wing is not None:
            gradient = gradient + (lags[:, lags.shape[1] - wing.shape[1] :].flip(1) * wing).sum(1)
        found.append(gradient)
    return torch.stack(found)


__all__ = ["BatchNormLayer", "LongConv", "normalized_conv", "reduced"]
