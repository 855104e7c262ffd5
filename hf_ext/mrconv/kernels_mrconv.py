# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Kernels of MRConv's branches (arXiv 2408.09453, eqs. 3, 8-10): dilated, Fourier, sparse, their sum, and an MLP.

A module holds one wing of all N branches of a layer: every branch has equally many parameters, so each parameter is
one tensor with the branch first. Shapes: parameters [N, channels, ...], kernels [channels, l_i], lag of tap t:
t, or t + 1 on the wing that looks ahead.
"""

import math
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from .configuration_mrconv import branch_lengths, changed_lengths
from .ops_mrconv import dilated_kernel, fourier_kernel, sparse_kernel


def precise(value: torch.Tensor) -> torch.Tensor:
    """The tensor in float32, or float64 if it is that: kernels and statistics are never computed in half precision."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


class MRConvKernel(nn.Module):
    """
    Base of the kernels: one wing of all branches of a layer. Linear in `weight`, which starts so that the whole
    kernel of a branch, both wings of a bidirectional one together, has norm 1 in every channel.

    Args:
        config ([`MRConvConfig`]): Or one with the same fields that describe kernels.
        channels (`int`): Number of channels.
        length (`int`): Length of the longest kernel, in samples at the rate of training.
        seed (`int`, *optional*, defaults to 0): What decides the places of sparse taps, and nothing else.
        ahead (`bool`, *optional*, defaults to `False`): Whether this wing multiplies later inputs, from lag 1 on.
    """

    weight: nn.Parameter

    def __init__(self, config: Any, channels: int, length: int, seed: int = 0, ahead: bool = False):
        super().__init__()
        self.branches = branch_lengths(config.kernel_size, length, config.num_branches)
        self.taps = min(config.kernel_size, length)
        self.channels, self.seed = channels, seed
        self.ahead = ahead
        self.initial_norm = math.sqrt(0.5) if config.bidirectional else 1.0

    def branch(self, index: int, rate: float, length: int) -> torch.Tensor:
        """Kernel of one branch, `length` samples at `rate` times fewer samples per second."""
        raise NotImplementedError

    def forward(self, rate: float = 1.0) -> list[torch.Tensor]:
        """
        Args:
            rate (`float`, *optional*, defaults to 1.0):
                How many times fewer samples per second than at training: 2.0 where the rate is halved.

        Returns:
            `list[torch.Tensor]`: N kernels of shape `(channels, l_i / rate)`, float32 or float64.
        """
        lengths = changed_lengths(self.branches, rate)
        return [self.branch(index, rate, length) for index, length in enumerate(lengths)]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw every parameter anew."""
        init.normal_(self.weight)
        norms = torch.stack([kernel.norm(dim=-1) for kernel in self()])  # [N, channels]
        scale = (self.initial_norm / norms).reshape(norms.shape + (1,) * (self.weight.ndim - 2))
        init.copy_(self.weight, self.weight * scale)

    def first_position(self, rate: float) -> float:
        """Where the first tap at another rate lies among the taps of training: lag 1 lies `rate` samples ahead."""
        return rate - 1 if self.ahead else 0.0

    def extra_repr(self) -> str:
        return f"channels={self.channels}, lengths={[length for _, length in self.branches]}, ahead={self.ahead}"


class MRConvDilatedKernel(MRConvKernel):
    """l_0 taps, 2^i samples apart (eq. 8). At another rate tap p moves to floor(p / rate); those that meet add up."""

    def __init__(self, config: Any, channels: int, length: int, seed: int = 0, ahead: bool = False):
        super().__init__(config, channels, length, seed, ahead)
        self.weight = nn.Parameter(torch.empty(len(self.branches), channels, self.taps))
        self.reset_parameters()

    def branch(self, index: int, rate: float, length: int) -> torch.Tensor:
        weight, dilation = precise(self.weight[index]), self.branches[index][0]
        if rate == 1:
            return dilated_kernel(weight, dilation, length)
        positions = dilation * torch.arange(self.taps, device=weight.device)
        kept = positions < self.branches[index][1]
        positions = (positions[kept] / rate).floor().long().expand(self.channels, -1)
        return sparse_kernel(weight[:, kept], positions, length)


class MRConvFourierKernel(MRConvKernel):
    """The m lowest modes of a kernel of l_i samples (eq. 9): k_i = irfft(modes, l_i)."""

    def __init__(self, config: Any, channels: int, length: int, seed: int = 0, ahead: bool = False):
        super().__init__(config, channels, length, seed, ahead)
        modes = config.num_modes or min(self.taps // 2 + 1, self.branches[0][1] // 2 + 1)
        # Real and imaginary part as numbers of their own: optimizers and files treat complex ones worse.
        self.weight = nn.Parameter(torch.empty(len(self.branches), channels, modes, 2))
        self.reset_parameters()

    def branch(self, index: int, rate: float, length: int) -> torch.Tensor:
        # The inverse transform divides by its length: k'[t] = rate k[rate t], which keeps sums over time.
        modes = precise(self.weight[index])
        shift = self.first_position(rate)
        if shift:
            frequency = torch.arange(modes.shape[1], device=modes.device, dtype=modes.dtype)
            turn = torch.polar(torch.ones_like(frequency), 2 * math.pi * shift / self.branches[index][1] * frequency)
            modes = torch.view_as_real(torch.view_as_complex(modes) * turn)
        return fourier_kernel(modes, length)


class MRConvSparseKernel(MRConvKernel):
    """l_0 taps at places drawn once, for every branch and channel (eq. 10). Another rate: as for dilated kernels."""

    positions: torch.Tensor

    def __init__(self, config: Any, channels: int, length: int, seed: int = 0, ahead: bool = False):
        super().__init__(config, channels, length, seed, ahead)
        shape = (len(self.branches), channels, self.taps)
        self.weight = nn.Parameter(torch.empty(shape))
        self.register_buffer("positions", torch.zeros(shape, dtype=torch.int64))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        # Places are part of the model, not of its training: the same ones whenever such a model is made.
        source = torch.Generator().manual_seed(2 * self.seed + self.ahead)
        init.copy_(self.positions, torch.stack([self._draw(length, source) for _, length in self.branches]))
        super().reset_parameters()

    def _draw(self, length: int, source: torch.Generator) -> torch.Tensor:
        chances = torch.rand(self.channels, length, generator=source, device="cpu")
        return chances.topk(self.taps, dim=-1).indices.sort(dim=-1).values

    def branch(self, index: int, rate: float, length: int) -> torch.Tensor:
        positions = self.positions[index]
        if rate != 1:
            positions = (positions / rate).floor().long()
        return sparse_kernel(precise(self.weight[index]), positions, length)


class MRConvFourierSparseKernel(nn.Module):
    """beta_0 k_fourier + beta_1 k_sparse (eq. 3): kernels of one length are one convolution in training too."""

    def __init__(self, config: Any, channels: int, length: int, seed: int = 0, ahead: bool = False):
        super().__init__()
        self.fourier = MRConvFourierKernel(config, channels, length, seed, ahead)
        self.sparse = MRConvSparseKernel(config, channels, length, seed, ahead)
        self.branches = self.fourier.branches
        self.fourier_scale = nn.Parameter(torch.empty(len(self.branches), channels))
        self.sparse_scale = nn.Parameter(torch.empty(len(self.branches), channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set both scales to 1 / sqrt(2): the two kernels are nearly orthogonal, so their sum has norm 1 about."""
        init.constant_(self.fourier_scale, math.sqrt(0.5))
        init.constant_(self.sparse_scale, math.sqrt(0.5))

    def forward(self, rate: float = 1.0) -> list[torch.Tensor]:
        """As [`MRConvKernel`]."""
        scales = zip(precise(self.fourier_scale), precise(self.sparse_scale), strict=True)
        return [
            first[:, None] * fourier + second[:, None] * sparse
            for (first, second), fourier, sparse in zip(scales, self.fourier(rate), self.sparse(rate), strict=True)
        ]


class MRConvImplicitKernel(MRConvKernel):
    """k_i[t] = W sin(omega (A e(t / l_i) + b)), an MLP of the position; e(x) is x and sinusoids of it."""

    frequency = 10.0

    def __init__(self, config: Any, channels: int, length: int, seed: int = 0, ahead: bool = False):
        super().__init__(config, channels, length, seed, ahead)
        self.bands = max(1, self.taps // 2)
        features, units = 1 + 2 * self.bands, self.taps
        self.hidden_weight = nn.Parameter(torch.empty(len(self.branches), units, features))
        self.hidden_bias = nn.Parameter(torch.empty(len(self.branches), units))
        self.weight = nn.Parameter(torch.empty(len(self.branches), channels, units))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        bound = 1 / self.hidden_weight.shape[-1]
        init.uniform_(self.hidden_weight, -bound, bound)
        init.uniform_(self.hidden_bias, -bound, bound)
        super().reset_parameters()

    def branch(self, index: int, rate: float, length: int) -> torch.Tensor:
        weight, hidden = precise(self.weight[index]), precise(self.hidden_weight[index])
        position = torch.arange(length, device=weight.device, dtype=weight.dtype) * rate + self.first_position(rate)
        position = position / self.branches[index][1]
        angles = 2 * math.pi * torch.outer(torch.arange(1, self.bands + 1, device=weight.device), position)
        features = torch.cat([position[None], angles.sin(), angles.cos()])  # [features, length]
        active = (self.frequency * (hidden @ features + precise(self.hidden_bias[index])[:, None])).sin()
        # As with Fourier kernels, fewer samples per second weigh more each.
        return rate * (weight @ active)


KERNELS: dict[str, type[nn.Module]] = {
    "dilated": MRConvDilatedKernel,
    "fourier": MRConvFourierKernel,
    "sparse": MRConvSparseKernel,
    "fourier_sparse": MRConvFourierSparseKernel,
    "implicit": MRConvImplicitKernel,
}

__all__ = [
    "KERNELS",
    "MRConvDilatedKernel",
    "MRConvFourierKernel",
    "MRConvFourierSparseKernel",
    "MRConvImplicitKernel",
    "MRConvKernel",
    "MRConvSparseKernel",
    "precise",
]
