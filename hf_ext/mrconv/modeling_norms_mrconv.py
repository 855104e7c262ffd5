# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Normalisation in MRConv: statistics over valid positions, of all processes if wanted, taken once per forward pass.

A batch normalisation takes its statistics from the batch, and moves the running ones, in training mode *and* where
its own scale and shift are trained; otherwise it uses the running ones. Running statistics belong to scale and shift:
where these are frozen, by an adapter of peft or by `requires_grad_(False)`, what is saved afterwards does not hold
the statistics, so that any that had moved would be lost, and the reloaded model would be another one. Where scale and
shift are trained, as in a whole model or by `modules_to_save=["norm"]`, both are saved together.

Shapes: batch B, channels D, length L, branches N.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.distributed
import torch.nn.functional as F
from torch import nn

from .configuration_mrconv import MRConvConfig
from .kernels_mrconv import precise
from .ops_mrconv import SumOverProcesses


def statistics_group(synchronized: bool) -> torch.distributed.ProcessGroup | None:
    """The processes that share their batch statistics; None if there is only this one."""
    distributed = synchronized and torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.group.WORLD if distributed and torch.distributed.get_world_size() > 1 else None


def recomputing() -> bool:
    """Whether the backward pass is calling: activation checkpointing then repeats a forward that was counted."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def takes_batch_statistics(norm: nn.Module) -> bool:
    """
    Whether a batch normalisation uses the statistics of the batch: in training mode, where its scale and its shift are
    both trained. An adapter that trains shifts alone, as `bias="all"` of peft, saves no statistics.
    """
    scale, shift = norm.weight, norm.bias
    assert isinstance(scale, torch.Tensor) and isinstance(shift, torch.Tensor)
    return norm.training and scale.requires_grad and shift.requires_grad


class MRConvPreciseBuffers(nn.Module):
    """A module whose floating-point buffers stay in float32 at least, whatever the parameters are cast to."""

    def register_precise_buffer(self, name: str, value: torch.Tensor) -> None:
        """Register a buffer that is saved; models are built under the default dtype of their parameters."""
        self.register_buffer(name, precise(value))

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, value in self._buffers.items():
            old = before[name]
            if value is not None and old is not None and value.is_floating_point() and precise(value) is not value:
                self._buffers[name] = old.to(value.device)
        return self


# From alpha, scale, shift and eps to outputs, and mean, variance and number of positions of the batch.
BatchConvolution = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, ...]]


class MRConvBranchNorm(MRConvPreciseBuffers):
    """
    Batch normalisation of the N branches of a layer: scale, shift and running statistics of shape (N, D). The
    statistics come from [`~ops_mrconv.batch_norm_conv`], which never forms the branches. Whether they are those of the
    batch says [`takes_batch_statistics`].

    All that a layer wants of it goes through `forward`: a wrapper of peft or a hook of accelerate that stands in its
    place has no other entrance.

    Args:
        num_branches (`int`): N.
        channels (`int`): D.
        eps (`float`): Added to the variance.
        momentum (`float`): Share of a new batch in the running statistics.
    """

    running_mean: torch.Tensor
    running_var: torch.Tensor

    def __init__(self, num_branches: int, channels: int, eps: float, momentum: float):
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.ones(num_branches, channels))
        self.bias = nn.Parameter(torch.zeros(num_branches, channels))
        self.register_precise_buffer("running_mean", torch.zeros(num_branches, channels))
        self.register_precise_buffer("running_var", torch.ones(num_branches, channels))

    def fold(self, alpha: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Factor alpha s and shift alpha t of each branch, where BN(c) = s c + t with the running statistics."""
        scale = precise(alpha) * precise(self.weight) * (self.running_var + self.eps).rsqrt()
        return scale, precise(alpha) * precise(self.bias) - scale * self.running_mean

    def forward(
        self, alpha: torch.Tensor, convolve: BatchConvolution | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            alpha (`torch.Tensor` of shape `(N, D)`): Mixing coefficients.
            convolve (`Callable`, *optional*): The layer on a batch, with the statistics of the batch.

        Returns:
            `torch.Tensor`: What `convolve` gives, if it is given and the statistics of the batch are to be taken;
            otherwise the `tuple` of factors and shifts that [`fold`] gives.
        """
        if convolve is None or not takes_batch_statistics(self):
            return self.fold(alpha)
        output, mean, var, count = convolve(precise(alpha), precise(self.weight), precise(self.bias), self.eps)
        self.update(mean, var, count)
        return output

    @torch.no_grad()
    def update(self, mean: torch.Tensor, var: torch.Tensor, count: torch.Tensor) -> None:
        """Take the statistics of a batch into the running ones, the variance without bias."""
        if recomputing():
            return
        unbiased = var * (count / (count - 1).clamp_min(1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)


class MRConvBranchLayerNorm(nn.Module):
    """Layer normalisation over the channels of each branch: the paper's ablation, which cannot be merged."""

    def __init__(self, num_branches: int, channels: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_branches, channels))
        self.bias = nn.Parameter(torch.zeros(num_branches, channels))

    def forward(self, branch: torch.Tensor, index: int) -> torch.Tensor:
        weight, bias = precise(self.weight[index]), precise(self.bias[index])
        normed = F.layer_norm(precise(branch).transpose(1, 2), weight.shape, weight, bias, self.eps)
        return normed.transpose(1, 2).to(branch.dtype)


class MRConvBatchNorm(MRConvPreciseBuffers):
    """
    Batch normalisation of hidden states `(B, L, D)` over the valid positions: with the statistics of the batch where
    [`takes_batch_statistics`] says so, otherwise with the running ones.

    Args:
        channels (`int`): D.
        eps (`float`): Added to the variance.
        momentum (`float`): Share of a new batch in the running statistics.
        synchronized (`bool`): Whether all processes share their statistics in training.
    """

    running_mean: torch.Tensor
    running_var: torch.Tensor

    def __init__(self, channels: int, eps: float, momentum: float, synchronized: bool):
        super().__init__()
        self.eps, self.momentum, self.synchronized = eps, momentum, synchronized
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_precise_buffer("running_mean", torch.zeros(channels))
        self.register_precise_buffer("running_var", torch.ones(channels))

    def forward(self, hidden: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        """Normalise; statistics are taken where `valid`, of shape `(B, L)`, is True."""
        mean, var = self.running_mean, self.running_var
        if takes_batch_statistics(self):
            mean, var = self._batch_statistics(hidden, valid)
        scale = precise(self.weight) * (var + self.eps).rsqrt()
        return (precise(hidden) * scale + (precise(self.bias) - mean * scale)).to(hidden.dtype)

    def _batch_statistics(self, hidden: torch.Tensor, valid: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Mean and biased variance. Squares are taken about the mean of this process, and each has a weight of 0 or 1: to
        pick the valid rows would wait for their number. Sums over processes are made of sums and of whole squares
        q = squares + total^2 / count, in float64, so that one collective is enough and no digits are lost.
        """
        rows = precise(hidden)

        def total_of(values: torch.Tensor) -> torch.Tensor:
            return (values if valid is None else torch.where(valid[..., None], values, 0)).flatten(0, 1).sum(0)

        positions = rows.new_full((), hidden[..., 0].numel()) if valid is None else valid.sum().to(rows.dtype)
        count, total, group = positions, total_of(rows), statistics_group(self.synchronized)
        mean = total / count.clamp_min(1)
        squares = total_of((rows - mean).square())
        if group is not None:
            total, count = total.double(), count.double()
            whole = squares + total.square() / count.clamp_min(1)
            joined: torch.Tensor = SumOverProcesses.apply(torch.cat([total, whole, count[None]]), group)
            (total, whole), count = joined[:-1].view(2, -1), joined[-1].detach()
            squares = (whole - total.square() / count.clamp_min(1)).clamp_min(0).to(rows.dtype)
            mean, count = (total / count.clamp_min(1)).to(rows.dtype), count.to(rows.dtype)
        var = squares / count.clamp_min(1)
        if not recomputing():
            with torch.no_grad():
                unbiased = squares / (count - 1).clamp_min(1)
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
        return mean, var


class MRConvLayerNorm(nn.LayerNorm):
    """LayerNorm that takes, and has no use for, the valid positions."""

    def forward(self, hidden: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(hidden)


def make_norm(config: MRConvConfig) -> nn.Module:
    """Normalisation of a block, as the configuration has it."""
    if config.norm == "layer":
        return MRConvLayerNorm(config.hidden_size, eps=config.norm_eps)
    return MRConvBatchNorm(config.hidden_size, config.norm_eps, config.norm_momentum, config.sync_batch_norm)


__all__ = [
    "MRConvBatchNorm",
    "MRConvBranchLayerNorm",
    "MRConvBranchNorm",
    "MRConvLayerNorm",
    "MRConvPreciseBuffers",
    "make_norm",
    "recomputing",
    "statistics_group",
    "takes_batch_statistics",
]
