# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Textbook MRConv operators: `ops_mrconv` with the same names and signatures, as direct sums over N branches.

For tests and benchmarks: slow, never shipped with a checkpoint. Each function states its equation literally.
"""

import cmath
import math

import torch
import torch.distributed
import torch.distributed.nn.functional
from torch import Tensor


def fft_size(length: int) -> int:
    """Count up to an even number without a prime factor above 5. See [`ops_mrconv.fft_size`]."""
    size = length
    while True:
        rest = size
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1 and size % 2 == 0:
            return size
        size += 1


def convolution_size(length: int, taps: int, backward_taps: int = 0) -> int:
    """Smallest fast size at which nothing wraps into the outputs. See [`ops_mrconv.convolution_size`]."""
    lags = range(-min(backward_taps, length - 1), min(taps, length))
    indices = {time + lag for time in range(length) for lag in lags} | set(range(length))
    size = length
    while any(index % size in range(length) for index in indices if not 0 <= index < length):
        size += 1
    return fft_size(size)


def fourier_kernel(modes: Tensor, length: int) -> Tensor:
    """Add the cosine and the sine of each mode. See [`ops_mrconv.fourier_kernel`]."""
    modes = modes.to(torch.promote_types(modes.dtype, torch.float32))
    columns = []
    for lag in range(length):
        column = torch.zeros_like(modes[:, 0, 0])
        for mode in range(min(modes.shape[1], length // 2 + 1)):
            wave = cmath.exp(2j * math.pi * mode * lag / length)
            # A frequency other than 0 and Nyquist stands for its conjugate too.
            multiplicity = 1 if mode == 0 or 2 * mode == length else 2
            column = column + multiplicity * (modes[:, mode, 0] * wave.real - modes[:, mode, 1] * wave.imag)
        columns.append(column / length)
    return torch.stack(columns, dim=1)


def tap_kernels(weight: Tensor, positions: Tensor, lengths: list[int]) -> list[Tensor]:
    """Add each tap to its place. See [`ops_mrconv.tap_kernels`]."""
    kernels = []
    for values_of_all, places_of_all, length in zip(weight, positions.tolist(), lengths, strict=True):
        rows = []
        for values, places in zip(values_of_all, places_of_all, strict=True):
            row = [torch.zeros_like(values[0])] * length
            for value, place in zip(values, places, strict=True):
                row[place] = row[place] + value
            rows.append(torch.stack(row))
        kernels.append(torch.stack(rows))
    return kernels


def merge_kernels(kernels: list[Tensor], scales: Tensor) -> Tensor:
    """Add the branches lag by lag. See [`ops_mrconv.merge_kernels`]."""
    columns = []
    for lag in range(max(kernel.shape[1] for kernel in kernels)):
        reaching = [scale * k[:, lag] for k, scale in zip(kernels, scales, strict=True) if lag < k.shape[1]]
        columns.append(torch.stack(reaching).sum(0))
    return torch.stack(columns, dim=1)


def kernel_spectrum(kernel: Tensor, backward_kernel: Tensor | None, n: int) -> Tensor:
    """Discrete Fourier transform of each lag. See [`ops_mrconv.kernel_spectrum`]."""
    kernel = kernel.to(torch.promote_types(kernel.dtype, torch.float32))
    lags = {lag: kernel[:, lag] for lag in range(kernel.shape[1])}
    if backward_kernel is not None:
        lags |= {-1 - j: backward_kernel[:, j].to(kernel.dtype) for j in range(backward_kernel.shape[1])}
    columns = []
    for frequency in range(n // 2 + 1):
        waves = [column * cmath.exp(-2j * math.pi * frequency * lag / n) for lag, column in lags.items()]
        columns.append(torch.stack(waves).sum(0))
    return torch.stack(columns, dim=1)


def long_conv(
    u: Tensor, kernel: Tensor, backward_kernel: Tensor | None = None, *, spectrum: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Add the shifted inputs lag by lag. See [`ops_mrconv.long_conv`]."""
    if spectrum is not None:
        kernel = kernel.detach()
        backward_kernel = None if backward_kernel is None else backward_kernel.detach()
    length = u.shape[2]
    y = torch.zeros_like(u)
    for lag in range(min(length, kernel.shape[1])):
        y = y + torch.cat([u.new_zeros(*u.shape[:2], lag), u[..., : length - lag] * kernel[:, lag, None]], dim=2)
    if backward_kernel is not None:
        for j in range(min(length - 1, backward_kernel.shape[1])):
            y = y + torch.cat([u[..., 1 + j :] * backward_kernel[:, j, None], u.new_zeros(*u.shape[:2], 1 + j)], dim=2)
    return y if bias is None else y + bias[:, None]


def valid_positions(u: Tensor, start: Tensor | None, stop: Tensor | None) -> Tensor:
    """Look at each position by itself. See [`ops_mrconv.valid_positions`]."""
    valid = torch.ones(u.shape[0], 1, u.shape[2], dtype=torch.bool)
    for sample in range(u.shape[0]):
        for time in range(u.shape[2]):
            early, late = start is not None and time < start[sample], stop is not None and time >= stop[sample]
            valid[sample, 0, time] = not (early or late)
    return valid


def branch_sums(
    u: Tensor, kernels: list[Tensor], wings: list[Tensor], n: int, start: Tensor | None, stop: Tensor | None
) -> Tensor:
    """Form each branch and add up its valid positions. See [`ops_mrconv.branch_sums`]."""
    valid, rows = valid_positions(u, start, stop).to(u.dtype), []
    for i, kernel in enumerate(kernels):
        branch = long_conv(u, kernel, wings[i] if wings else None) * valid
        rows.append(torch.stack([branch.sum((0, 2)), branch.square().sum((0, 2)), valid.sum().expand(u.shape[1])]))
    return torch.stack(rows, dim=1)


def batch_norm_conv(
    u: Tensor, kernels: list[Tensor], alpha: Tensor, weight: Tensor, bias: Tensor, eps: float, *,
    backward_kernels: list[Tensor] | None = None, start: Tensor | None = None, stop: Tensor | None = None,
    group: torch.distributed.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Form, normalize and add N branches, with two passes for the variance. See [`ops_mrconv.batch_norm_conv`]."""
    starts = [0] * len(u) if start is None else start.tolist()
    stops = [u.shape[2]] * len(u) if stop is None else stop.tolist()
    count = _total(u.new_tensor(sum(max(0, b - a) for a, b in zip(starts, stops, strict=True))), group)
    y, means, variances = torch.zeros_like(u), [], []
    for i, kernel in enumerate(kernels):
        branch = long_conv(u, kernel, None if backward_kernels is None else backward_kernels[i])
        samples = [sample[:, a:b] for sample, a, b in zip(branch, starts, stops, strict=True)]
        valid = torch.cat([u.new_zeros(u.shape[1], 0), *samples], dim=1)
        mean = _total(valid.sum(1), group) / count.clamp(min=1)
        var = _total((valid - mean[:, None]).square().sum(1), group) / count.clamp(min=1)
        normalized = (branch - mean[:, None]) / (var + eps).sqrt()[:, None]
        y = y + alpha[i, :, None] * (weight[i, :, None] * normalized + bias[i, :, None])
        means.append(mean.detach())
        variances.append(var.detach())
    return y, torch.stack(means), torch.stack(variances), count


def grouped_batch_norm_conv(
    inputs: list[Tensor], spans: list[tuple[Tensor | None, Tensor | None]], kernels: list[Tensor], alpha: Tensor,
    weight: Tensor, bias: Tensor, eps: float, backward_kernels: list[Tensor] | None,
    group: torch.distributed.ProcessGroup | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """One batch of all samples, padded to the longest. See [`ops_mrconv.grouped_batch_norm_conv`]."""
    longest = max(u.shape[2] for u in inputs)
    joined = torch.cat([torch.nn.functional.pad(u, (0, longest - u.shape[2])) for u in inputs])
    pairs = list(zip(inputs, spans, strict=True))
    start = torch.cat([torch.zeros(len(u), dtype=torch.long) if first is None else first for u, (first, _) in pairs])
    stop = torch.cat([torch.full((len(u),), u.shape[2]) if last is None else last for u, (_, last) in pairs])
    y, mean, var, count = batch_norm_conv(
        joined, kernels, alpha, weight, bias, eps,
        backward_kernels=backward_kernels, start=start, stop=stop, group=group,
    )  # fmt: skip
    parts = zip(y.split([len(u) for u in inputs]), inputs, strict=True)
    return mean, var, count, *(part[..., : u.shape[2]] for part, u in parts)


def _total(values: Tensor, group: torch.distributed.ProcessGroup | None) -> Tensor:
    return values if group is None else torch.distributed.nn.functional.all_reduce(values, group=group)
