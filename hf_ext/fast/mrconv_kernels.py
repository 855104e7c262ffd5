# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""
Kernels of all branches of an MRConv layer in few calls, and their sum with a gradient written by hand.

Importing this module enters both in `ops_mrconv.FAST`. A kernel is [channels, taps].
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hf_ext.mrconv.ops_mrconv import FAST

# Numbers of a branch up to which the product with its waves is faster than padding, copies and an inverse FFT.
_MOST_NUMBERS = 64


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def waves(count: int, length: int, dtype: torch.dtype) -> Tensor:
    """Kernels that the numbers X_0, Re X_1, Im X_1, Re X_2, ... give each alone, by `irfft`: [count, length]."""
    number = torch.arange(count, device="cpu")
    mode = (number + 1) // 2
    # Whole turns are taken off before the angle is a float, of which many turns would leave few digits.
    turns = torch.outer(mode, torch.arange(length, device="cpu")) % length
    angles = turns.double() * (2 * math.pi / length)
    imaginary = (number > 0) & (number % 2 == 0)
    values = torch.where(imaginary[:, None], -angles.sin(), angles.cos())
    # The constant, and the highest mode of an even length, stand for themselves, others for their conjugates too.
    alone = (mode == 0) | (2 * mode == length)
    return (values * torch.where(alone, 1.0, 2.0).double()[:, None] / length).to(dtype)


# An inverse transform of few modes is a product with a fixed matrix: one call for a branch in each direction, where
# the transform and its gradient take some thirty. How we know that both are one function: test_kernels_mrconv.py
# compares values and gradients in float64.
def fourier_kernels(weight: Tensor, counts: list[int], lengths: list[int]) -> list[Tensor] | None:
    """The kernels of all branches, whose numbers lie side by side in `weight`; None where FFTs are faster, or products
    are not in full precision."""
    known = type(weight) in (Tensor, nn.Parameter) and weight.device.type == "cpu"
    if not known or max(counts) > _MOST_NUMBERS or torch.get_float32_matmul_precision() != "highest":
        return None
    pairs = zip(weight.split(counts, dim=1), counts, lengths, strict=True)
    return [numbers @ waves(count, length, weight.dtype) for numbers, count, length in pairs]


def add_kernels(kernels: Sequence[Tensor], scales: Tensor) -> Tensor:
    """sum_i scales_i k_i, [channels, longest], without gradient."""
    factors = scales.to(kernels[0].dtype)[..., None].unbind(0)
    longest = max(range(len(kernels)), key=lambda index: kernels[index].shape[1])
    merged = kernels[longest] * factors[longest]
    for index, (kernel, factor) in enumerate(zip(kernels, factors, strict=True)):
        if index != longest:
            merged[:, : kernel.shape[1]].addcmul_(kernel, factor)
    return merged


class MergedKernels(torch.autograd.Function):
    """`ops_mrconv.merge_kernels`, without an array of the longest kernel's size for each branch."""

    @staticmethod
    def forward(ctx: Any, scales: Tensor, *kernels: Tensor) -> Tensor:
        ctx.save_for_backward(scales, *kernels)
        return add_kernels(kernels, scales)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scales, *kernels = ctx.saved_tensors
        # m = sum_i s_i k_i: the gradient of s_i is <g, k_i>, that of k_i is s_i g, at the lags of k_i.
        parts = [gradients[0][:, : kernel.shape[1]] for kernel in kernels]
        products = [torch.linalg.vecdot(part, kernel) for part, kernel in zip(parts, kernels, strict=True)]
        factors = scales.to(parts[0].dtype)[..., None].unbind(0)
        g_kernels = [part * factor for part, factor in zip(parts, factors, strict=True)]
        return torch.stack(products).to(scales.dtype), *g_kernels


FAST.update(
    fourier_kernels=fourier_kernels, merge_kernels=lambda kernels, scales: MergedKernels.apply(scales, *kernels)
)
