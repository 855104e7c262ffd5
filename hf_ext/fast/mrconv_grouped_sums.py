# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""
Sums of the branches of an MRConv layer as a function with a gradient, for packed sequences: groups of samples of
different lengths add their sums up, and are convolved group by group. Importing this module enters it in
`ops_mrconv.FAST`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_ext.mrconv.ops_mrconv import FAST

from .mrconv_branch_sums import SumGradients
from .mrconv_gradients import BatchNormLayer, channel_chunks


class BranchSums(torch.autograd.Function):
    """The first half of `BatchNormConv`, A_i, Q_i and the number of positions, with the gradients that stand there."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, layer: BatchNormLayer, count: int, *kernels: Tensor) -> Tensor:
        found, ctx.dtypes = [], {}
        for part in channel_chunks(u, layer.n):
            branches, sums = layer.measure(u, kernels, count, part)
            ctx.dtypes[part.start] = branches.dtype
            found.append(sums)
        ctx.save_for_backward(u, *kernels)
        ctx.layer, ctx.count = layer, count
        return torch.cat(found, dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (u, *kernels), layer = ctx.saved_tensors, ctx.layer
        g_u = torch.empty(u.shape, dtype=u.dtype, device=u.device)
        g_kernels = [torch.empty_like(kernel) for kernel in kernels]
        for part in channel_chunks(u, layer.n):
            branches = layer.branches(u, kernels, ctx.count, part, ctx.dtypes[part.start])
            spectrum, g_sums = branches.signal.spectrum, gradients[0][:2, :, part]
            # The merged kernel is convolved elsewhere: it has no gradient here.
            merged = spectrum.real.new_zeros(spectrum.shape[1], layer.n)
            none = torch.zeros_like(g_sums[0])
            sums = SumGradients(branches, spectrum.conj_physical(), g_sums[0], g_sums[1], merged, none)
            g_spectrum = torch.zeros_like(spectrum)
            for layout, formed in branches.parts():
                sums.add(layout, formed, g_spectrum)
            g_u[:, part] = sums.input_gradient(g_spectrum)
            for target, gradient in zip(g_kernels, sums.kernel_gradients, strict=True):
                target[part] = gradient
        return g_u, None, None, *g_kernels


def grouped_sums(
    u: Tensor, kernels: list[Tensor], wings: list[Tensor], n: int, start: Tensor | None, stop: Tensor | None
) -> Tensor:
    """Sum and squared sum of each branch over batch and valid positions, and their number: [3, N, channels]."""
    layer = BatchNormLayer(n, 0.0, None, start, stop)
    sums: Tensor = BranchSums.apply(u, layer, len(kernels), *kernels, *wings)
    return sums


FAST["branch_sums"] = grouped_sums
