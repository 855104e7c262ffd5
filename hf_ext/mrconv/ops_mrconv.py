# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""MRConv operators (arXiv 2408.09453): kernels of the branches, long convolution, and the merged training-mode layer.

`reference_mrconv` has the same functions as direct sums over N branches.
Shapes: u is [batch, channels, length]; a kernel is [channels, taps] and starts at lag 0; N branches.
"""

import torch
import torch.distributed
import torch.distributed.nn.functional
import torch.nn.functional as F
from torch import Tensor
from transformers.utils.generic import maybe_autocast


def _working_dtype(dtype: torch.dtype) -> torch.dtype:
    """FFTs and statistics run in float32 at least: half-precision FFTs overflow and know few sizes."""
    return torch.promote_types(dtype, torch.float32)


def fft_size(length: int) -> int:
    """
    Smallest size of the form 2^a 3^b 5^c with a > 0 that is not below a length: what FFT libraries are fast at.

    Args:
        length (`int`): At least 1.

    Returns:
        `int`: The size, even.
    """
    if length < 1:
        raise ValueError(f"An FFT has at least one point, got length={length}. Pass a length of 1 or more.")
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
    """
    FFT size at which [`long_conv`] computes, and for which a spectrum may be cached.

    Args:
        length (`int`): Length of the input.
        taps (`int`): Taps of the kernel.
        backward_taps (`int`, *optional*, defaults to 0): Taps of the backward kernel.

    Returns:
        `int`: The size. What wraps around falls outside of the `length` outputs that are kept.
    """
    return fft_size(length + max(min(taps, length) - 1, min(backward_taps, length - 1), 0))


def dilated_kernel(weight: Tensor, dilation: int, length: int) -> Tensor:
    """
    Dense form of a dilated kernel: k[dilation * j] = weight[j], zero elsewhere (poster eq. 8).

    Args:
        weight (`torch.Tensor` of shape `(channels, taps)`): Values of the taps.
        dilation (`int`): Distance p of the taps, at least 1.
        length (`int`): Length of the kernel; taps beyond it are dropped.

    Returns:
        `torch.Tensor` of shape `(channels, length)`: The kernel.
    """
    if dilation < 1:
        raise ValueError(f"Taps lie at least one sample apart, got dilation={dilation}. Pass 1 or more.")
    spread = F.pad(weight[:, :, None], (0, dilation - 1)).flatten(1)[:, :length]
    return F.pad(spread, (0, length - spread.shape[1]))


def fourier_kernel(modes: Tensor, length: int) -> Tensor:
    """
    Kernel of the given low-frequency modes: k = irfft(ZeroPad(modes)) (poster eq. 9, real form).

    Args:
        modes (`torch.Tensor` of shape `(channels, modes, 2)`): Real and imaginary parts, from frequency 0 up. Modes
            above the Nyquist frequency of `length` are dropped.
        length (`int`): Length of the kernel.

    Returns:
        `torch.Tensor` of shape `(channels, length)`: The kernel, in float32 at least.
    """
    if modes.shape[-1] != 2:
        raise ValueError(f"Modes are stored as real and imaginary part, got shape {tuple(modes.shape)}, not (..., 2).")
    with maybe_autocast(modes.device.type, enabled=False):
        modes = modes.to(_working_dtype(modes.dtype))
        return torch.fft.irfft(torch.view_as_complex(modes.contiguous()), n=length)


def sparse_kernel(weight: Tensor, positions: Tensor, length: int) -> Tensor:
    """
    Kernel that is zero but at given positions: k[positions[j]] = weight[j] (poster eq. 10); equal positions add up.

    Args:
        weight (`torch.Tensor` of shape `(channels, taps)`): Values of the taps.
        positions (`torch.LongTensor` of shape `(channels, taps)`): Their lags, below `length`.
        length (`int`): Length of the kernel.

    Returns:
        `torch.Tensor` of shape `(channels, length)`: The kernel.
    """
    return weight.new_zeros(weight.shape[0], length).scatter_add(1, positions, weight)


def merge_kernels(kernels: list[Tensor], scales: Tensor) -> Tensor:
    """
    One kernel for all branches: sum_i scales_i * ZeroPadRight(k_i) (poster eq. 7).

    Args:
        kernels (`list[torch.Tensor]`): N kernels of shape `(channels, taps_i)`.
        scales (`torch.Tensor` of shape `(N, channels)`): Factor of each branch and channel.

    Returns:
        `torch.Tensor` of shape `(channels, longest taps)`: The kernel.
    """
    _check_branches(kernels, scales)
    longest = max(kernel.shape[1] for kernel in kernels)
    scaled = [
        F.pad(kernel * scale[:, None], (0, longest - kernel.shape[1]))
        for kernel, scale in zip(kernels, scales, strict=True)
    ]
    return torch.stack(scaled).sum(0)


def _check_branches(kernels: list[Tensor], *scales: Tensor) -> None:
    if not kernels:
        raise ValueError("A layer has at least one branch, got no kernels. Pass N kernels of shape (channels, taps).")
    for scale in scales:
        if scale.shape != (len(kernels), kernels[0].shape[0]):
            raise ValueError(
                f"{len(kernels)} kernels of {kernels[0].shape[0]} channels need coefficients of shape "
                f"{(len(kernels), kernels[0].shape[0])}, got {tuple(scale.shape)}."
            )


def kernel_spectrum(kernel: Tensor, backward_kernel: Tensor | None, n: int) -> Tensor:
    """
    Spectrum of a two-sided kernel: k at lags 0, 1, ...; the backward kernel at lags -1, -2, ..., from the end.

    Args:
        kernel (`torch.Tensor` of shape `(channels, taps)`): Kernel of the past.
        backward_kernel (`torch.Tensor` of shape `(channels, backward_taps)`, *optional*):
            Kernel of the future: entry j is the factor of u[t + 1 + j] and lies at index n - 1 - j.
        n (`int`): FFT size, at least `taps + backward_taps`.

    Returns:
        `torch.Tensor` of shape `(channels, n // 2 + 1)`, complex: The spectrum, in float32 at least.
    """
    taps = kernel.shape[1] + (0 if backward_kernel is None else backward_kernel.shape[1])
    if taps > n:
        raise ValueError(f"A kernel of {taps} taps does not fit an FFT of size n={n}. Pass n >= {taps}.")
    with maybe_autocast(kernel.device.type, enabled=False):
        kernel = kernel.to(_working_dtype(kernel.dtype))
        if backward_kernel is not None:
            wing = backward_kernel.to(kernel.dtype).flip(1)
            kernel = torch.cat([F.pad(kernel, (0, n - taps)), wing], dim=1)
        return torch.fft.rfft(kernel, n=n)


def _check_input(u: Tensor, kernel: Tensor, backward_kernel: Tensor | None) -> None:
    if u.dim() != 3 or u.shape[2] < 1:
        raise ValueError(f"The input is [batch, channels, length] with length >= 1, got shape {tuple(u.shape)}.")
    for k in (kernel, backward_kernel):
        if k is not None and (k.dim() != 2 or k.shape[0] != u.shape[1]):
            raise ValueError(
                f"A kernel is [channels, taps] with the {u.shape[1]} channels of the input, got {tuple(k.shape)}."
            )


def long_conv(
    u: Tensor, kernel: Tensor, backward_kernel: Tensor | None = None, *, spectrum: Tensor | None = None
) -> Tensor:
    """
    Convolve each channel with its kernel: y[t] = sum_j k[j] u[t - j] + sum_j k_backward[j] u[t + 1 + j], by FFT.

    Args:
        u (`torch.Tensor` of shape `(batch, channels, length)`): Input, zero before and after.
        kernel (`torch.Tensor` of shape `(channels, taps)`): Kernel of the past. Taps beyond `length` have no effect.
        backward_kernel (`torch.Tensor` of shape `(channels, backward_taps)`, *optional*): Kernel of the future.
        spectrum (`torch.Tensor` of shape `(channels, n // 2 + 1)`, *optional*):
            [`kernel_spectrum`] of these kernels at an even size n of at least [`convolution_size`], computed before.
            No gradient then reaches the kernels.

    Returns:
        `torch.Tensor` of shape `(batch, channels, length)`: The output, in the dtype of `u`.
    """
    _check_input(u, kernel, backward_kernel)
    length = u.shape[2]
    n = convolution_size(length, kernel.shape[1], 0 if backward_kernel is None else backward_kernel.shape[1])
    with maybe_autocast(u.device.type, enabled=False):
        precise = u.to(_working_dtype(u.dtype))
        if spectrum is None:
            backward_kernel = None if backward_kernel is None else backward_kernel[:, : length - 1].to(precise.dtype)
            spectrum = kernel_spectrum(kernel[:, :length].to(precise.dtype), backward_kernel, n)
        elif 2 * (spectrum.shape[-1] - 1) < n:
            raise ValueError(
                f"An input of {length} samples needs a spectrum at n >= {n}, got one of {spectrum.shape[-1]} points "
                f"(n = {2 * (spectrum.shape[-1] - 1)}). Compute it at `convolution_size`."
            )
        n = 2 * (spectrum.shape[-1] - 1)
        y = torch.fft.irfft(torch.fft.rfft(precise, n=n) * spectrum, n=n)
        return y[..., :length].to(u.dtype)


def _valid_positions(u: Tensor, start: Tensor | None, stop: Tensor | None) -> Tensor | None:
    """1 at the positions [start, stop) of each sample, [batch, 1, length]; None: everywhere."""
    if start is None and stop is None:
        return None
    time = torch.arange(u.shape[2], device=u.device)
    valid = torch.ones(u.shape[0], u.shape[2], dtype=torch.bool, device=u.device)
    if start is not None:
        valid &= time >= start[:, None]
    if stop is not None:
        valid &= time < stop[:, None]
    return valid[:, None]


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
    """
    Training-mode MRConv layer (poster eqs. 2, 4-6), as one convolution:
    y = sum_i alpha_i (weight_i (k_i * u - mean_i) / sqrt(var_i + eps) + bias_i).

    Args:
        u (`torch.Tensor` of shape `(batch, channels, length)`): Input, zero outside of the valid positions.
        kernels (`list[torch.Tensor]`): N kernels of shape `(channels, taps_i)`.
        alpha, weight, bias (`torch.Tensor` of shape `(N, channels)`):
            Mixing coefficient, and scale and shift of the normalization, of each branch.
        eps (`float`): Added to the variance.
        backward_kernels (`list[torch.Tensor]`, *optional*): N kernels of the future, as in [`long_conv`].
        start, stop (`torch.LongTensor` of shape `(batch,)`, *optional*):
            The valid positions of a sample are start, ..., stop - 1. Default: all.
        group (`torch.distributed.ProcessGroup`, *optional*):
            Processes that share the statistics, which then are those of the joined batch, gradients included.

    Returns:
        `tuple[torch.Tensor]`: y, in the dtype of `u`, and, without gradient and in float32 at least, mean and biased
        variance of each branch over batch and valid positions, `(N, channels)`, and the number of positions.
    """
    _check_branches(kernels, alpha, weight, bias)
    dtype = _working_dtype(u.dtype)
    precise = u.to(dtype)
    wings: list[Tensor] | list[None] = [None] * len(kernels) if backward_kernels is None else backward_kernels
    branches = torch.stack([long_conv(precise, k, wing) for k, wing in zip(kernels, wings, strict=True)])
    valid = _valid_positions(u, start, stop)
    masked = branches if valid is None else branches * valid
    count = masked.new_tensor(u.shape[0] * u.shape[2]) if valid is None else valid.sum().to(dtype)
    sums = torch.cat([masked.sum((1, 3)).flatten(), masked.square().sum((1, 3)).flatten(), count[None]])
    if group is not None:
        sums = torch.distributed.nn.functional.all_reduce(sums, group=group)
    count = sums[-1].detach()
    mean, power = sums[:-1].view(2, *alpha.shape) / count.clamp_min(1)
    var = (power - mean.square()).clamp_min(0)
    scale = alpha * weight * (var + eps).rsqrt()
    shift = (alpha * bias - scale * mean).sum(0)
    y = (branches * scale[:, None, :, None]).sum(0) + shift[:, None]
    return y.to(u.dtype), mean.detach(), var.detach(), count
