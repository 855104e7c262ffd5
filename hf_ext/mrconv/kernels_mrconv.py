# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Kernels of MRConv (arXiv 2408.09453): those of the branches (eqs. 3, 8-10), and the one that stands for all (eq. 7).

A module holds one wing of all N branches of a layer. Branches have equally many parameters, so each parameter is one
tensor with the branch first; but for Fourier kernels, see there. Shapes: parameters [N, channels, ...], kernels
[channels, l_i], lag of tap t: t, or t + 1 on the wing that looks ahead.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .configuration_mrconv import MRConvConfig, changed_lengths
from .ops_mrconv import Forms, convolution_size, fourier_kernel, kernel_spectrum, tap_kernels


def precise(value: Tensor) -> Tensor:
    """The tensor in float32, or float64 if it is that: kernels and statistics are never computed in half precision."""
    return value.to(torch.float64 if value.dtype == torch.float64 else torch.float32)


def at_rate(positions: Tensor, rate: float) -> Tensor:
    """Positions of taps at `rate` times fewer samples per second: the nearest earlier ones."""
    return positions if rate == 1 else (positions / rate).floor().long()


class MRConvKernel(nn.Module):
    """Base of the kernels: one wing of all branches of a layer. Linear in `weight`, which starts so that the kernel of
    a branch, both wings of a bidirectional one together, has norm 1 in every channel. `seed` decides the places of
    sparse taps; a wing `ahead` multiplies later inputs, from lag 1 on."""

    weight: nn.Parameter

    def __init__(self, config: MRConvConfig, seed: int = 0, ahead: bool = False):
        super().__init__()
        self.branches = config.branches
        self.taps = min(config.kernel_size, config.max_position_embeddings)
        self.channels, self.seed, self.ahead = config.hidden_size, seed, ahead
        self.initial_norm = math.sqrt(0.5) if config.bidirectional else 1.0
        self.make_parameters(config)
        self.reset_parameters()

    def make_parameters(self, config: MRConvConfig) -> None:
        """Register what the branches are made of: taps of each branch and channel."""
        self.weight = nn.Parameter(torch.empty(len(self.branches), self.channels, self.taps))

    def forward(self, rate: float = 1.0) -> list[Tensor]:
        """N kernels [channels, l_i / rate], for `rate` times fewer samples per second than at training."""
        raise NotImplementedError

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw every parameter anew."""
        init.normal_(self.weight)
        init.copy_(self.weight, self.weight * self.initial_scale([kernel.norm(dim=-1) for kernel in self()]))

    def initial_scale(self, norms: list[Tensor]) -> Tensor:
        """Factors of the weights for kernels of `initial_norm`, given the norms of the branches, [channels] each."""
        return self.initial_norm / torch.stack(norms)[..., None]


class MRConvDilatedKernel(MRConvKernel):
    """l_0 taps, 2^i samples apart (eq. 8). At another rate tap p moves to floor(p / rate); those that meet add up."""

    def forward(self, rate: float = 1.0) -> list[Tensor]:
        lengths, dilations = changed_lengths(self.branches, rate), [dilation for dilation, _ in self.branches]
        steps = torch.arange(self.taps, device=self.weight.device).expand(self.channels, -1)
        positions = torch.stack([steps * dilation for dilation in dilations])
        # Of the longest kernel, which is cropped to the longest input, taps may lie beyond.
        whole = [*lengths[:-1], max(lengths[-1], math.ceil(self.taps * dilations[-1] / rate))]
        kernels = tap_kernels(precise(self.weight), at_rate(positions, rate), whole)
        return [*kernels[:-1], kernels[-1][:, : lengths[-1]]]


class MRConvFourierKernel(MRConvKernel):
    """The m lowest modes of a kernel of l_i samples (eq. 9): k_i = irfft(modes, l_i).

    `weight`, of shape (channels, sum of the counts), holds them branch by branch as X_0, Re X_1, Im X_1, Re X_2, ...;
    each starts as a normal number, scaled so that the kernel has norm 1."""

    # A real kernel has a real constant and, where l_i is even, a real highest mode: an imaginary part there is no
    # degree of freedom. On a CPU the inverse transform ignores it; on CUDA one of 2^13 or 2^14 points adds it to the
    # kernel (pytorch/pytorch#154496), so that one checkpoint would be two models. Such parts are no parameters: a
    # branch and channel has min(2 m - 1, l_i) of these, which is 2 m - 1, or 2 m - 2 where the last mode is the
    # highest that l_i samples have, as in the shortest branch by default.
    def make_parameters(self, config: MRConvConfig) -> None:
        self.modes = config.num_modes or min(self.taps // 2 + 1, self.branches[0][1] // 2 + 1)
        self.counts = [min(2 * self.modes - 1, length) for _, length in self.branches]
        # Real and imaginary part as numbers of their own: optimizers and files treat complex ones worse.
        self.weight = nn.Parameter(torch.empty(self.channels, sum(self.counts)))

    def initial_scale(self, norms: list[Tensor]) -> Tensor:
        pairs = zip(norms, self.counts, strict=True)
        return torch.cat([(self.initial_norm / norm[:, None]).expand(-1, count) for norm, count in pairs], dim=1)

    def forward(self, rate: float = 1.0) -> list[Tensor]:
        weight, lengths = precise(self.weight), changed_lengths(self.branches, rate)
        form = Forms.fast("fourier_kernels") if rate == 1 and not torch.compiler.is_compiling() else None
        found: list[Tensor] | None = None if form is None else form(weight, self.counts, lengths)
        if found is not None:
            return found
        pairs = zip(weight.split(self.counts, dim=1), self.branches, lengths, strict=True)
        return [fourier_kernel(self._modes(numbers, rate, own), length) for numbers, (_, own), length in pairs]

    def _modes(self, numbers: Tensor, rate: float, length: int) -> Tensor:
        """Modes, [channels, m, 2], of a branch of that length at training: the constant has no imaginary part, nor the
        last mode if its number is not there. The inverse transform at another rate divides by its own length: k'[t] =
        rate k[rate t], which keeps sums over time."""
        rest = F.pad(numbers[:, 1:], (0, 2 * self.modes - numbers.shape[1] - 1))
        modes = torch.cat([F.pad(numbers[:, :1], (0, 1)), rest], dim=1).unflatten(1, (self.modes, 2))
        if self.ahead and rate != 1:
            # The first tap ahead, at lag 1, lies `rate` samples ahead among those of training, rate - 1 further on.
            frequency = torch.arange(self.modes, device=modes.device, dtype=modes.dtype)
            turn = torch.polar(torch.ones_like(frequency), 2 * math.pi * (rate - 1) / length * frequency)
            modes = torch.view_as_real(torch.view_as_complex(modes) * turn)
        return modes


class MRConvSparseKernel(MRConvKernel):
    """l_0 taps at places drawn once, for every branch and channel (eq. 10). Another rate: as for dilated kernels."""

    positions: Tensor

    def make_parameters(self, config: MRConvConfig) -> None:
        super().make_parameters(config)
        self.register_buffer("positions", torch.zeros(self.weight.shape, dtype=torch.int64))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        # Places are part of the model, not of its training: the same ones whenever such a model is made.
        source = torch.Generator().manual_seed(2 * self.seed + self.ahead)
        chances = [torch.rand(self.channels, length, generator=source, device="cpu") for _, length in self.branches]
        places = [chance.topk(self.taps, dim=-1).indices.sort(dim=-1).values for chance in chances]
        init.copy_(self.positions, torch.stack(places))
        super().reset_parameters()

    def forward(self, rate: float = 1.0) -> list[Tensor]:
        return tap_kernels(precise(self.weight), at_rate(self.positions, rate), changed_lengths(self.branches, rate))


class MRConvFourierSparseKernel(MRConvKernel):
    """beta_0 k_fourier + beta_1 k_sparse (eq. 3): kernels of one length are one convolution in training too."""

    def make_parameters(self, config: MRConvConfig) -> None:
        self.fourier = MRConvFourierKernel(config, self.seed, self.ahead)
        self.sparse = MRConvSparseKernel(config, self.seed, self.ahead)
        self.fourier_scale = nn.Parameter(torch.empty(len(self.branches), self.channels))
        self.sparse_scale = nn.Parameter(torch.empty(len(self.branches), self.channels))

    def reset_parameters(self) -> None:
        """Set both scales to 1 / sqrt(2): the two kernels are nearly orthogonal, so their sum has norm 1 about."""
        init.constant_(self.fourier_scale, math.sqrt(0.5))
        init.constant_(self.sparse_scale, math.sqrt(0.5))

    def forward(self, rate: float = 1.0) -> list[Tensor]:
        scales = zip(precise(self.fourier_scale), precise(self.sparse_scale), strict=True)
        return [
            first[:, None] * fourier + second[:, None] * sparse
            for (first, second), fourier, sparse in zip(scales, self.fourier(rate), self.sparse(rate), strict=True)
        ]


KERNELS: dict[str, type[MRConvKernel]] = {
    "dilated": MRConvDilatedKernel,
    "fourier": MRConvFourierKernel,
    "sparse": MRConvSparseKernel,
    "fourier_sparse": MRConvFourierSparseKernel,
}


def keeps_state(method: Callable[..., Any]) -> Callable[..., Any]:
    """Without gradients; and a state begun in `torch.inference_mode` can be continued outside of it."""
    return torch.inference_mode(False)(torch.no_grad()(method))


@dataclass
class MergedKernel:
    """A merged kernel, the one that looks ahead or None, and the bias."""

    # The form that streams share, made of kernel and bias; `streaming_mrconv` enters it, for heads that stream.
    stream_form: ClassVar[Any] = None

    kernel: Tensor
    ahead: Tensor | None
    bias: Tensor

    def spectrum(self, length: int) -> Tensor:
        """Spectrum for an input of `length` samples."""
        kernel, ahead = self.kernel, self.ahead
        n = convolution_size(length, kernel.shape[1], 0 if ahead is None else ahead.shape[1])
        # No input of this FFT size is longer than half of it, nor can more taps wrap around onto its outputs.
        return kernel_spectrum(kernel[:, : n // 2], None if ahead is None else ahead[:, : n // 2], n)

    def streaming(self) -> Any:
        """The form that streams share."""
        return self.stream_form(self.kernel, self.bias)


@contextmanager
def whole_parameters(module: nn.Module) -> Iterator[None]:
    """Within, parameters of which each process holds a part are whole; others stay what they are."""
    # As FSDP makes them for a forward pass, and not outside of it. All processes must come here: each gives its part.
    parts = [
        (part, name, value)
        for part in module.modules()
        for name, value in part._parameters.items()
        if isinstance(value, nn.Parameter) and hasattr(value, "full_tensor")
    ]
    for part, name, value in parts:
        part._parameters[name] = value.full_tensor()
    try:
        yield
    finally:
        for part, name, value in parts:
            part._parameters[name] = value
