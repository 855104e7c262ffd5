# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""The convolution layer of MRConv (arXiv 2408.09453) and the block around it.

A layer sums N convolutions whose kernels double in length, each normalised by itself (eqs. 4-6). With running
statistics, in evaluation and where the normalisation is frozen, that is one convolution and a bias (eq. 7), computed
so: both are made once and kept as long as nothing they are made of changes. `reparameterize` drops the branches.
Shapes: batch B, channels D, length L; hidden states [B, L, D], inside of a convolution u [B, D, L]; branches N.
"""

import math
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging
from transformers.utils.generic import maybe_autocast

from .configuration_mrconv import MRConvConfig, branch_lengths, changed_lengths
from .kernels_merged_mrconv import KernelSource, MergedKernel, whole_parameters
from .kernels_mrconv import KERNELS, precise
from .modeling_norms_mrconv import (
    MRConvBranchLayerNorm,
    MRConvBranchNorm,
    MRConvPreciseBuffers,
    make_norm,
    statistics_group,
)
from .ops_mrconv import batch_norm_conv, long_conv, merge_kernels
from .streaming_convolution_mrconv import StreamingKernel

logger = logging.get_logger(__name__)

# Norm below which a kernel counts as zero.
_TINY = 1e-12


class MRConvLayer(MRConvPreciseBuffers):
    """
    The convolution layer: y = sum_i alpha_i BN_i(k_i * u) in training (eqs. 4-6), k * u + b in evaluation (eq. 7).

    Training takes the statistics of the batch, and moves the running ones, where scale and shift of the branches'
    normalisation are trained. Where they are frozen, as below an adapter, training is computed as evaluation is.

    Args:
        config ([`MRConvConfig`]): Its `hidden_size` is the number of channels, its `max_position_embeddings` the
            length of the longest kernel.
        layer_index (`int`, *optional*, defaults to 0): Place of the layer in the model, for its cache.
    """

    merged_kernel: torch.Tensor
    merged_backward_kernel: torch.Tensor | None
    merged_bias: torch.Tensor

    def __init__(self, config: MRConvConfig, layer_index: int = 0):
        super().__init__()
        self.config, self.layer_index = config, layer_index
        self.rate_factor = float(config.rate_factor)
        self.reparameterized = config.reparameterized
        # Sums instead of FFTs once merged; see `MRConvPreTrainedModel.use_direct_convolution`.
        self.direct = False
        # The merged kernel that was made last, and of what.
        self._kept: tuple[KernelSource, MergedKernel] | None = None
        channels, length = config.hidden_size, config.max_position_embeddings
        branches = branch_lengths(config.kernel_size, length, config.num_branches)
        if config.reparameterized:
            taps = changed_lengths(branches, self.rate_factor)[-1]
            ahead = torch.zeros(channels, taps) if config.bidirectional else None
            self._register_merged(torch.zeros(channels, taps), ahead, torch.zeros(channels))
            return
        kernel = KERNELS[config.kernel_type]
        self.kernel = kernel(config, channels, length, layer_index)
        self.backward_kernel = None
        if config.bidirectional:
            self.backward_kernel = kernel(config, channels, length, layer_index, ahead=True)
        self.alpha = nn.Parameter(torch.empty(len(branches), channels))
        self.norm: MRConvBranchNorm | MRConvBranchLayerNorm | None = None
        if config.branch_norm == "batch":
            self.norm = MRConvBranchNorm(len(branches), channels, config.norm_eps, config.norm_momentum)
        elif config.branch_norm == "layer":
            self.norm = MRConvBranchLayerNorm(len(branches), channels, config.norm_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set alpha to 1 / sqrt(N): branches are nearly uncorrelated, so that their sum has variance 1 about."""
        if not self.reparameterized:
            init.constant_(self.alpha, 1 / math.sqrt(len(self.alpha)))

    def forward(
        self,
        u: torch.Tensor,
        start: torch.Tensor | None = None,
        stop: torch.Tensor | None = None,
        cache: Any | None = None,
    ) -> torch.Tensor:
        """
        Args:
            u (`torch.Tensor` of shape `(batch, channels, length)`): Input; what lies outside [start, stop) is ignored.
            start, stop (`torch.LongTensor` of shape `(batch,)`, *optional*): First valid position of each sample, and
                the first after the last; all positions are valid when not given.
            cache ([`~streaming_mrconv.MRConvCache`], *optional*): What came before, when `u` continues a sequence.

        Returns:
            `torch.Tensor` of shape `(batch, channels, length)`: Output; of no meaning outside [start, stop).
        """
        if start is not None and stop is not None:
            positions = torch.arange(u.shape[-1], device=u.device)
            valid = (positions >= start[:, None]) & (positions < stop[:, None])  # [B, L]
            u = torch.where(valid[:, None], u, 0)
        if cache is not None:
            streamed: torch.Tensor = cache.convolve(self.layer_index, u, self.streaming_kernel)
            return streamed
        # By the configuration: a wrapper of peft may stand in the place of `self.norm`.
        if not self.reparameterized and self.config.branch_norm == "layer":
            return self._forward_layer_norm(u)
        if self.training:
            output = self._forward_in_training(u, start, stop)
            if output is not None:
                return output
        return self._merged_forward(u)

    def branch_kernels(self) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
        """
        Kernels of the branches as they are convolved, without normalisation and alpha.

        Returns:
            `tuple`: N kernels of shape `(channels, l_i)`, and those that look ahead, or None if the layer is causal.

        Raises:
            ValueError: If the layer is merged.
        """
        if self.reparameterized:
            raise ValueError(
                "This layer is merged and has no branches; load a checkpoint from before `reparameterize()`."
            )
        with whole_parameters(self), maybe_autocast(self.alpha.device.type, enabled=False):
            ahead = None if self.backward_kernel is None else self.backward_kernel(self.rate_factor)
            return self.kernel(self.rate_factor), ahead

    def merged(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """
        One kernel and one bias for all branches, with the running statistics (eq. 7), in float32 or float64:
        k = sum_i alpha_i s_i k_i, b = sum_i alpha_i t_i.

        Returns:
            `tuple`: Kernel of shape `(channels, taps)`, kernel that looks ahead or None, bias of shape `(channels,)`.

        Raises:
            ValueError: If branches are layer-normalised, which depends on each input.
        """
        if self.reparameterized:
            return self.merged_kernel, self.merged_backward_kernel, self.merged_bias
        if self.config.branch_norm == "layer":
            raise ValueError(
                "`branch_norm` is 'layer': its scale depends on each input, so that no kernel can stand for all "
                "branches. Merging and streaming need 'batch', 'kernel' or 'none'."
            )
        with whole_parameters(self):
            kernels, ahead = self.branch_kernels()
            scale = precise(self.alpha)
            bias = scale.new_zeros(scale.shape[1])
            if self.norm is not None:
                scale, shift = self.norm(self.alpha)
                bias = shift.sum(0)
            elif self.config.branch_norm == "kernel":
                scale = scale / self._kernel_norms()
        return merge_kernels(kernels, scale), None if ahead is None else merge_kernels(ahead, scale), bias

    def _kernel_norms(self) -> torch.Tensor:
        """Norm of each branch's kernel, both wings together, at the rate of training: [N, D]."""
        with maybe_autocast(self.alpha.device.type, enabled=False):
            wings = [self.kernel()] if self.backward_kernel is None else [self.kernel(), self.backward_kernel()]
            whole = [torch.cat(branch, dim=-1) for branch in zip(*wings, strict=True)]
            return torch.stack([kernel.norm(dim=-1) for kernel in whole]).clamp_min(_TINY)

    def _forward_in_training(
        self, u: torch.Tensor, start: torch.Tensor | None, stop: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The output with the statistics of the batch; None where these are not to be taken."""
        if self.reparameterized:
            logger.warning_once("The convolutions are merged: training leaves their kernels and biases as they are.")
            return None
        return self._batch_normed(u, start, stop) if self.config.branch_norm == "batch" else None

    # Compilers cannot trace its backward pass, and there is nothing in it to fuse: the graph breaks here once.
    @torch.compiler.disable
    def _batch_normed(
        self, u: torch.Tensor, start: torch.Tensor | None, stop: torch.Tensor | None
    ) -> torch.Tensor | None:
        def convolve(alpha: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Any:
            kernels, ahead = self.branch_kernels()
            group = statistics_group(self.config.sync_batch_norm)
            options: dict[str, Any] = {"backward_kernels": ahead, "start": start, "stop": stop, "group": group}
            return batch_norm_conv(u, kernels, alpha, weight, bias, eps, **options)

        assert self.norm is not None
        output = self.norm(self.alpha, convolve)
        return output if isinstance(output, torch.Tensor) else None

    def _forward_layer_norm(self, u: torch.Tensor) -> torch.Tensor:
        """N convolutions: the statistics of a position are not linear in the kernels, so nothing can be merged."""
        kernels, ahead = self.branch_kernels()
        assert self.norm is not None
        output = torch.zeros_like(u)
        for index, kernel in enumerate(kernels):
            branch = long_conv(u, kernel, None if ahead is None else ahead[index])
            output = output + self.alpha[index][:, None].to(u.dtype) * self.norm(branch, index)
        return output

    def _merged_forward(self, u: torch.Tensor) -> torch.Tensor:
        if self.direct:
            return self._direct_forward(u)
        capturing = u.is_cuda and torch.cuda.is_current_stream_capturing()
        trained = torch.is_grad_enabled() and any(value.requires_grad for value in self.parameters())
        if trained or capturing or torch.compiler.is_compiling():
            # Whoever differentiates or records the operations needs all of them, and values cannot be looked at.
            kernel, ahead, bias = self.merged()
            return long_conv(u, kernel, ahead, bias=bias)
        kept = self.kept_kernel()
        return long_conv(u, kept.kernel, kept.ahead, spectrum=kept.spectrum(u.shape[-1]), bias=kept.bias)

    def kept_kernel(self) -> MergedKernel:
        """
        The merged kernel without gradients, of the parameters and statistics as they are now: made anew only where
        one of them has changed since the last call.

        Returns:
            [`~kernels_merged_mrconv.MergedKernel`]: Shared by all who call; nothing in it may be changed.
        """
        # Inside of inference mode tensors would be made that gradients cannot pass.
        with torch.inference_mode(False), torch.no_grad():
            settings = (self.rate_factor, self.config.branch_norm, getattr(getattr(self, "norm", None), "eps", None))
            source = KernelSource.of(self, _OWN_MODULES, settings, self.reparameterized)
            if source is None:
                return MergedKernel(*self.merged())
            kept = self._kept
            if kept is None or kept[0] != source:
                kept = self._kept = (source.copy(), MergedKernel(*self.merged()))
            return kept[1]

    def streaming_kernel(self) -> StreamingKernel:
        """
        The merged kernel for streams; all of them share it.

        Returns:
            [`~streaming_convolution_mrconv.StreamingKernel`]: As of now; a stream keeps the one that it began with.

        Raises:
            ValueError: If the layer is bidirectional, or branches are layer-normalised.
        """
        kept = self.kept_kernel()
        if kept.ahead is not None:
            raise ValueError(
                f"Layer {self.layer_index} is bidirectional: its outputs depend on inputs to come, so it cannot be "
                "streamed. Use a model with `bidirectional=False`."
            )
        return kept.streaming()

    def _direct_forward(self, u: torch.Tensor) -> torch.Tensor:
        taps, ahead = self.merged_kernel.shape[1], self.merged_backward_kernel
        # conv1d correlates: its weights run from the oldest input that a tap reaches to the newest.
        window = self.merged_kernel.flip(1) if ahead is None else torch.cat([self.merged_kernel.flip(1), ahead], 1)
        padded = F.pad(u, (taps - 1, window.shape[1] - taps))
        return F.conv1d(padded, window[:, None].to(u.dtype), self.merged_bias.to(u.dtype), groups=u.shape[1])

    def _register_merged(self, kernel: torch.Tensor, backward_kernel: torch.Tensor | None, bias: torch.Tensor) -> None:
        self.register_precise_buffer("merged_kernel", kernel)
        if backward_kernel is None:
            self.register_buffer("merged_backward_kernel", None)
        else:
            self.register_precise_buffer("merged_backward_kernel", backward_kernel)
        self.register_precise_buffer("merged_bias", bias)

    @torch.no_grad()
    def reparameterize(self) -> None:
        """
        Replace the branches by their merged kernel and bias, as buffers. Does nothing the second time.

        They are no parameters: a dense kernel of D x L free values is another model than N branches of D x l_0, and
        training it would lose what the branches are for. What surrounds the convolution can still be trained.

        Raises:
            ValueError: If branches are layer-normalised, or the weights are not in memory.
        """
        if self.reparameterized:
            return
        if any(value.device.type == "meta" for value in self.parameters()):
            raise ValueError(
                "The weights of this layer are offloaded or not loaded yet, so that they cannot be merged. Call "
                "`reparameterize()` before the model is offloaded, save the result, and offload that."
            )
        merged = self.merged()
        del self.kernel, self.backward_kernel, self.alpha, self.norm
        self._register_merged(*merged)
        self.reparameterized = True

    def train(self, mode: bool = True) -> Self:
        self._kept = None
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._kept = None
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._kept = None
        super()._load_from_state_dict(*args, **kwargs)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.reparameterized:
            # Which FSDP puts back in each forward pass.
            destination.pop(f"{prefix}alpha", None)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles make a merged kernel of their own."""
        return {**vars(self), "_kept": None}


# Whose values decide about the merged kernel, and nothing else of them.
_OWN_MODULES: tuple[type, ...] = (MRConvLayer, MRConvBranchNorm, *KERNELS.values())


class MRConvBlock(GradientCheckpointingLayer):
    """x + GLU(W dropout(GELU(MRConv(x)))), normalised after that (as the paper draws it) or before MRConv."""

    def __init__(self, config: MRConvConfig, layer_index: int):
        super().__init__()
        self.prenorm = config.prenorm
        self.dropout, self.tied_dropout = float(config.dropout), config.tied_dropout
        self.norm = make_norm(config)
        self.convolution = MRConvLayer(config, layer_index)
        self.pointwise = nn.Linear(config.hidden_size, 2 * config.hidden_size)

    def forward(
        self,
        hidden: torch.Tensor,
        start: torch.Tensor | None = None,
        stop: torch.Tensor | None = None,
        valid: torch.Tensor | None = None,
        cache: Any | None = None,
    ) -> torch.Tensor:
        mixed = self.norm(hidden, valid) if self.prenorm else hidden
        mixed = self.convolution(mixed.transpose(1, 2), start, stop, cache)  # [B, D, L]
        mixed = F.gelu(mixed)
        if self.tied_dropout:
            mixed = F.dropout1d(mixed, self.dropout, self.training)
        else:
            mixed = F.dropout(mixed, self.dropout, self.training)
        hidden = hidden + F.glu(self.pointwise(mixed.transpose(1, 2)), dim=-1)
        return hidden if self.prenorm else self.norm(hidden, valid)


__all__ = ["MRConvBlock", "MRConvLayer"]
