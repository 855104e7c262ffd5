# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""MRConv operators (arXiv 2408.09453): kernels of the branches, long convolution, and the training-mode layer.

What is written here is plain: FFTs, and gradients by autograd. The installed package has forms of the two convolutions
that give the same numbers in less time and memory (`FAST`); a checkpoint's copy of this file runs without them.
`tests/mrconv/reference_ops.py` has the same functions as direct sums.
Shapes: u is [batch, channels, length]; a kernel is [channels, taps] and starts at lag 0; N branches.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor
from transformers.utils.generic import maybe_autocast

# Faster forms of the same values and gradients, by the name of what they replace: of a function here, of
# `MRConvLayer.kept_kernel`, or of the kernels of all branches. `hf_ext.fast` enters them.
FAST: dict[str, Callable[..., Any]] = {}


class Forms:
    """Choice between plain and faster forms."""

    @staticmethod
    def is_transformed() -> bool:
        """True in a transform of `torch.func`, a forward-mode derivative or a trace: these follow plain forms only."""
        if torch.compiler.is_compiling():
            return False
        derived = torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
        return derived or torch.jit.is_tracing()

    @staticmethod
    def fast(name: str) -> Callable[..., Any] | None:
        """The faster form of what has this name, where there is one that serves."""
        form = FAST.get(name)
        return None if form is None or Forms.is_transformed() else form


def _working_dtype(dtype: torch.dtype) -> torch.dtype:
    """FFTs and statistics run in float32 at least: half-precision FFTs overflow and know few sizes."""
    # Written out: `torch.promote_types` is a call of torch, and this is asked for each tensor.
    return torch.float64 if dtype == torch.float64 else torch.float32


def fft_size(length: int) -> int:
    """Smallest size 2^a 3^b 5^c with a > 0, not below a length: what FFT libraries are fast at."""
    best = 1 << max(1, (length - 1).bit_length())
    five = 1
    while five < best:
        odd = five
        while odd < best:
            best = min(best, odd << max(1, (-(-length // odd) - 1).bit_length()))
            odd *= 3
        five *= 5
    return best


def convolution_size(length: int, taps: int, backward_taps: int = 0) -> int:
    """FFT size at which [`long_conv`] computes: what wraps around falls outside of the outputs that are kept."""
    if isinstance(length, (torch.SymInt, Tensor)):
        # Compiled or traced for any length: no search for a fast size, nor a choice of the longer one.
        return length + taps + backward_taps
    return fft_size(length + max(min(taps, length) - 1, min(backward_taps, length - 1), 0))


def tap_kernels(weight: Tensor, positions: Tensor, lengths: list[int]) -> list[Tensor]:
    """N kernels [channels, lengths[i]] with k_i[positions[i, c, j]] = weight[i, c, j], zero elsewhere (poster eqs. 8,
    10); taps at one position add up. Weights and positions are [N, channels, taps]."""
    # One scatter for all kernels, side by side, is a seventh of the calls, forward and backward, of one for each.
    begins = [sum(lengths[:index]) for index in range(len(lengths))]
    places = torch.cat([own + begin for own, begin in zip(positions, begins, strict=True)], dim=1)
    flat = weight.new_zeros(weight.shape[1], sum(lengths)).scatter_add(1, places, weight.transpose(0, 1).flatten(1))
    return list(flat.split(lengths, dim=1))


def fourier_kernel(modes: Tensor, length: int) -> Tensor:
    """k = irfft(ZeroPad(modes)) of `length` samples, in float32 at least (poster eq. 9, real form).

    `modes`, [channels, modes, 2], are real and imaginary parts, from frequency 0 up. Modes above the Nyquist frequency
    are dropped, imaginary parts at frequency 0 and there are zeroed: a real kernel has none, and not every FFT ignores
    them (pytorch/pytorch#154496)."""
    with maybe_autocast(modes.device.type, enabled=False):
        modes = modes.to(_working_dtype(modes.dtype))[:, : length // 2 + 1]
        frequency = torch.arange(modes.shape[1], device=modes.device)
        real = (frequency == 0) | (2 * frequency == length)
        return torch.fft.irfft(torch.complex(modes[..., 0], modes[..., 1].masked_fill(real, 0)), n=length)


def merge_kernels(kernels: list[Tensor], scales: Tensor) -> Tensor:
    """One kernel for N branches: sum_i scales_i * ZeroPadRight(k_i), `scales` being [N, channels] (poster eq. 7)."""
    if not torch.compiler.is_compiling() and (form := Forms.fast("merge_kernels")) is not None:
        merged: Tensor = form(kernels, scales)
        return merged
    longest = max(kernel.shape[1] for kernel in kernels)
    pairs = zip(kernels, scales, strict=True)
    padded = [F.pad(kernel * scale[:, None], (0, longest - kernel.shape[1])) for kernel, scale in pairs]
    return torch.stack(padded).sum(0)


def kernel_spectrum(kernel: Tensor, backward_kernel: Tensor | None, n: int) -> Tensor:
    """Spectrum [channels, n // 2 + 1] of a two-sided kernel, in float32 at least: k at lags 0, 1, ...; entry j of the
    backward kernel is the factor of u[t + 1 + j] and lies at index n - 1 - j."""
    taps = kernel.shape[1] + (0 if backward_kernel is None else backward_kernel.shape[1])
    if taps > n:
        raise ValueError(f"A kernel of {taps} taps does not fit an FFT of size n={n}. Pass n >= {taps}.")
    with maybe_autocast(kernel.device.type, enabled=False):
        kernel = kernel.to(_working_dtype(kernel.dtype))
        if backward_kernel is None or backward_kernel.shape[1] == 0:
            return torch.fft.rfft(kernel, n=n)
        wing = backward_kernel.to(kernel.dtype).flip(1)
        return torch.fft.rfft(torch.cat([kernel, kernel.new_zeros(len(kernel), n - taps), wing], dim=1))


def _check_input(u: Tensor, *kernels: Tensor | None) -> None:
    if u.dim() != 3 or u.shape[2] < 1:
        raise ValueError(f"The input is [batch, channels, length] with length >= 1, got shape {tuple(u.shape)}.")
    for k in kernels:
        if k is not None and (k.dim() != 2 or k.shape[0] != u.shape[1]):
            raise ValueError(
                f"A kernel is [channels, taps] with the {u.shape[1]} channels of the input, got {tuple(k.shape)}."
            )


def long_conv(
    u: Tensor,
    kernel: Tensor,
    backward_kernel: Tensor | None = None,
    *,
    spectrum: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """y[t] = sum_j k[j] u[t - j] + sum_j k_backward[j] u[t + 1 + j] + bias, in the dtype of `u`, zero around it.

    `spectrum` is [`kernel_spectrum`] of these kernels at an even size of at least [`convolution_size`], computed
    before; no gradient then reaches the kernels. Taps beyond the length of `u` have no effect."""
    _check_input(u, kernel, backward_kernel)
    if u.shape[0] == 0:
        # FFT libraries refuse it.
        return long_conv(F.pad(u, (0, 0, 0, 0, 0, 1)), kernel, backward_kernel, spectrum=spectrum, bias=bias)[:0]
    length, dtype = u.shape[2], _working_dtype(u.dtype)
    wings = [kernel] if backward_kernel is None else [kernel, backward_kernel]
    n = convolution_size(length, *(wing.shape[1] for wing in wings))
    if not isinstance(length, (torch.SymInt, Tensor)):
        wings = [wing[:, :reach] for wing, reach in zip(wings, (length, length - 1), strict=False)]
    if spectrum is not None:
        points = 2 * (spectrum.shape[-1] - 1)
        if points < n:
            told = f"An input of {length} samples needs a spectrum at n >= {n}, got one at n = {points}"
            raise ValueError(f"{told}. Compute it at `convolution_size`.")
        n, wings = points, [wing.detach() for wing in wings]
    kernel, backward_kernel = wings[0].to(dtype), wings[1].to(dtype) if wings[1:] else None
    bias = None if bias is None else bias.to(dtype)
    # For torch.export and the compiler there is nothing faster than the plain expression.
    if not torch.compiler.is_compiling() and (form := Forms.fast("long_conv")) is not None:
        y: Tensor = form(u, kernel, backward_kernel, spectrum, bias, n)
        return y
    factors = kernel_spectrum(kernel, backward_kernel, n) if spectrum is None else spectrum
    y = torch.fft.irfft(torch.fft.rfft(u.to(dtype), n=n) * factors, n=n)[..., :length]
    return (y if bias is None else y + bias[:, None]).to(u.dtype)


def valid_positions(u: Tensor, start: Tensor | None, stop: Tensor | None) -> Tensor:
    """Mask of the positions from start to stop - 1 of each sample, [batch, 1, length]; None: no such bound."""
    time = torch.arange(u.shape[2], device=u.device).expand(u.shape[0], 1, -1)
    valid = torch.ones_like(time, dtype=torch.bool)
    if start is not None:
        valid = valid & (time >= start[:, None, None])
    if stop is not None:
        valid = valid & (time < stop[:, None, None])
    return valid


class SumOverProcesses(torch.autograd.Function):
    """Sum over the processes of a group; so is the gradient, since the result of each depends on all inputs."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
        ctx.group = group
        values = values.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return SumOverProcesses.apply(gradients[0], ctx.group), None


def batch_norm_conv(
    u: Tensor,
    kernels: list[Tensor],
    alpha: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    *,
    backward_kernels: list[Tensor] | None = None,
    start: Tensor | None = None,
    stop: Tensor | None = None,
    group: torch.distributed.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training-mode MRConv layer (poster eqs. 2, 4-6): y = sum_i alpha_i (weight_i (k_i * u - mean_i) / sqrt(var_i +
    eps) + bias_i), with coefficients of shape [N, channels].

    Of a sample the positions start, ..., stop - 1 are valid; `u` is zero outside of them, and its gradient there is of
    no meaning. Processes of a `group` share the statistics, which are those of the joined batch, gradients included.

    Returns y, in the dtype of `u`, and, without gradient and in float32 at least, mean and biased variance of each
    branch over batch and valid positions, [N, channels], and the number of positions."""
    wings = backward_kernels or []
    _check_input(u, *kernels, *wings)
    empty = u.shape[0] == 0
    if empty:
        # FFT libraries refuse it; a sample without valid positions is as good.
        u, start = F.pad(u, (0, 0, 0, 0, 0, 1)), torch.zeros(1, dtype=torch.long, device=u.device)
        stop = start
    if (form := Forms.fast("batch_norm_conv")) is not None:
        own = _crop_kernels(u, kernels, wings)
        y, mean, var, count = form(u, *own, [alpha, weight, bias], eps, start, stop, group)
    else:
        span, form = (start, stop), grouped_batch_norm_conv
        mean, var, count, y = form([u], [span], kernels, alpha, weight, bias, eps, wings, group)
    return y[:0] if empty else y, mean, var, count


# First valid position of each sample and first after the last; None: from the beginning, to the end.
Span = tuple[Tensor | None, Tensor | None]


def grouped_batch_norm_conv(
    inputs: list[Tensor],
    spans: list[Span],
    kernels: list[Tensor],
    alpha: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    backward_kernels: list[Tensor] | None,
    group: torch.distributed.ProcessGroup | None,
) -> tuple[Tensor, ...]:
    """[`batch_norm_conv`] of several groups of samples, each of a length of its own, with the statistics of all: mean,
    variance and count, then the outputs of each group."""
    wings, form = backward_kernels or [], Forms.fast("branch_sums") or branch_sums
    found = [form(u, *_crop_kernels(u, kernels, wings), *span) for u, span in zip(inputs, spans, strict=True)]
    sums = torch.stack(found).sum(0)
    sums = sums if group is None else SumOverProcesses.apply(sums, group)
    total, square, count = sums[0], sums[1], sums[2, 0, 0].detach()
    mean = total / count.clamp_min(1)
    var = (square / count.clamp_min(1) - mean.square()).clamp_min(0)
    dtype, scale = _working_dtype(alpha.dtype), alpha * weight * (var + eps).rsqrt()
    shift = (alpha * bias - scale * mean).sum(0)
    merged, ahead = merge_kernels(kernels, scale.to(dtype)), merge_kernels(wings, scale.to(dtype)) if wings else None
    outputs = [long_conv(u, merged, ahead, bias=shift) for u in inputs]
    return mean.detach().to(dtype), var.detach().to(dtype), count.to(dtype), *outputs


def branch_sums(
    u: Tensor, kernels: list[Tensor], wings: list[Tensor], n: int, start: Tensor | None, stop: Tensor | None
) -> Tensor:
    """Sum and squared sum of each branch over batch and valid positions, outside of which `u` is zero, and the number
    of these: [3, N, channels], in float64 where there is that, as the variance is a small difference of large sums."""
    exact = kernels[0].dtype if u.device.type == "mps" else torch.float64
    valid = valid_positions(u, start, stop)
    spectrum = torch.fft.rfft(u.to(exact), n=n)
    sums = []
    for i, kernel in enumerate(kernels):
        factors = kernel_spectrum(kernel.to(exact), wings[i] if wings else None, n)
        branch = torch.where(valid, torch.fft.irfft(spectrum * factors, n=n)[..., : u.shape[2]], 0)
        total = branch.sum((0, 2))
        sums.append(torch.stack([total, branch.square().sum((0, 2)), valid.sum().to(exact).expand_as(total)]))
    return torch.stack(sums, dim=1)


def _crop_kernels(u: Tensor, kernels: list[Tensor], wings: list[Tensor]) -> tuple[list[Tensor], list[Tensor], int]:
    """Kernels as far as they reach within the length of `u`, in float32 at least, and the FFT size that fits them."""
    length, dtype = u.shape[2], _working_dtype(u.dtype)
    cropped = [kernel[:, :length].to(dtype) for kernel in kernels]
    ahead = [wing[:, : length - 1].to(dtype) for wing in wings]
    # The longest branch, whose wings are the longest too: neither outputs nor autocorrelation of u wrap around.
    span = max([kernel.shape[1] for kernel in cropped]) + max([0, *[wing.shape[1] for wing in ahead]])
    return cropped, ahead, convolution_size(length, span)
