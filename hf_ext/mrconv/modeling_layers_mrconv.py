# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""The layer of MRConv (arXiv 2408.09453), its normalisation, the block around it, and the base of all models.

A layer sums N convolutions whose kernels double in length, each normalised by itself (eqs. 4-6). With running
statistics, in evaluation and where the normalisation is frozen, that is one convolution and a bias (eq. 7), computed
so: both are made once and kept as long as nothing they are made of changes. `reparameterize` drops the branches.

Shapes: batch B, channels D, length L; hidden states [B, L, D], inside of a convolution u [B, D, L]; branches N.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from numbers import Real
from typing import Any, Self

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging
from transformers.utils.generic import maybe_autocast
from transformers.utils.output_capturing import OutputRecorder

from .configuration_mrconv import AUTO_MAP, MRConvConfig, changed_lengths
from .kernels_mrconv import KERNELS, MergedKernel, MRConvKernel, keeps_state, precise, whole_parameters
from .ops_mrconv import (
    Forms,
    Span,
    SumOverProcesses,
    batch_norm_conv,
    grouped_batch_norm_conv,
    long_conv,
    merge_kernels,
    valid_positions,
)

logger = logging.get_logger(__name__)

# Arguments of other models that MRConv has no meaning for, and why.
_REFUSED = {"cache_params": "the state of a sequence is passed as `cache`"}
# Arguments that transformers adds to a model's own inputs: its Trainer, `generate`, its recording of outputs, and its
# collators, which bound packed keys apart from packed queries.
_PASSED_ON = {
    "output_hidden_states", "output_attentions", "return_dict", "use_cache", "num_items_in_batch", "shift_labels",
    "ignore_index", "cu_seq_lens_k", "max_length_q", "max_length_k",
}  # fmt: skip


def refuse_unknown(arguments: dict[str, Any]) -> None:
    """Refuse arguments that have no meaning here: a misspelt name would change nothing, in silence."""
    for name in sorted({name for name, value in arguments.items() if value is not None} - _PASSED_ON):
        if name in _REFUSED:
            raise ValueError(f"`{name}` is not an input of MRConv: {_REFUSED[name]}.")
        known = "`attention_mask` says padding of sequences, `observed_mask` missing values"
        raise TypeError(f"MRConv has no argument `{name}`: {known}; the documentation of `forward` names the others.")


def statistics_group(synchronized: bool) -> torch.distributed.ProcessGroup | None:
    """The processes that share their batch statistics; None if there is only this one."""
    distributed = synchronized and torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.group.WORLD if distributed and torch.distributed.get_world_size() > 1 else None


class MRConvPreciseBuffers(nn.Module):
    """A module whose floating-point buffers stay in float32 at least, whatever the parameters are cast to."""

    running_mean: Tensor
    running_var: Tensor
    # Share of a new batch in the running statistics.
    momentum = 0.1

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        before: dict[str, Any] = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, value in self._buffers.items():
            if value is not None and value.is_floating_point() and precise(value) is not value:
                self._buffers[name] = before[name].to(value.device)
        return self

    def register_statistics(self, *shape: int) -> None:
        """Scale and shift, and the running statistics that belong to them, built under the default dtype."""
        self.weight, self.bias = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.zeros(shape))
        self.register_buffer("running_mean", precise(torch.zeros(shape)))
        self.register_buffer("running_var", precise(torch.ones(shape)))

    def takes_batch_statistics(self) -> bool:
        """True where a batch normalisation uses the statistics of the batch, and moves the running ones."""
        # In training mode *and* where its own scale and shift are trained. Running statistics belong to these: where
        # they are frozen, by an adapter of peft or by `requires_grad_(False)`, what is saved afterwards does not hold
        # the statistics, so that any that had moved would be lost, and the reloaded model would be another one. Where
        # scale and shift are trained, as in a whole model or by `modules_to_save=["norm"]`, all are saved together.
        # Both have to be trained: an adapter that trains shifts alone, as `bias="all"` of peft, saves no statistics.
        # Adapters are saved and loaded in tests/mrconv/test_adapters_mrconv.py, and must answer as in training.
        return self.training and self.weight.requires_grad and self.bias.requires_grad

    @staticmethod
    def counts() -> bool:
        """True unless activation checkpointing repeats, within a backward pass, a forward that was counted."""
        return torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1

    @torch.no_grad()
    def update(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        """Take the statistics of a batch into the running ones, the variance without bias."""
        if self.counts():
            unbiased = var * (count / (count - 1).clamp_min(1))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)


class MRConvUnits(MRConvPreciseBuffers):
    """Mean and spread of channels: from the units of the data to normalised ones, and back."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: list[float], std: list[float]):
        super().__init__()
        self.values = {"mean": mean, "std": std}
        for name, numbers in self.values.items():
            # The configuration keeps them.
            self.register_buffer(name, torch.tensor(numbers, dtype=torch.float32), persistent=False)

    def normalize(self, values: Tensor) -> Tensor:
        """Values in float32 at least, normalised."""
        return (precise(values) - self.mean) / self.std

    def restore(self, values: Tensor) -> Tensor:
        """Normalised values in the units of the data."""
        return precise(values) * self.std + self.mean


def make_units(mean: list[float] | None, std: list[float] | None) -> MRConvUnits | None:
    """The units that a configuration names, if it does."""
    return None if mean is None or std is None else MRConvUnits(mean, std)


# From alpha, scale, shift and eps to a list of outputs, and mean, variance and number of positions of the batch.
BatchConvolution = Callable[[Tensor, Tensor, Tensor, float], tuple[list[Tensor], Tensor, Tensor, Tensor]]


class MRConvBranchNorm(MRConvPreciseBuffers):
    """Batch normalisation of the N branches of a layer: scale, shift and running statistics of shape (N, D).

    A layer calls `forward` alone: a wrapper of peft or a hook of accelerate in its place has no other entrance."""

    def __init__(self, num_branches: int, channels: int, eps: float):
        super().__init__()
        self.eps = eps
        self.register_statistics(num_branches, channels)

    def forward(self, alpha: Tensor, convolve: BatchConvolution | None = None) -> list[Tensor] | tuple[Tensor, Tensor]:
        """The result of `convolve`, the layer on a batch, where it is given and the statistics of the batch are taken.
        Otherwise factor alpha s and shift alpha t of each branch, BN(c) = s c + t with the running statistics."""
        if convolve is None or not self.takes_batch_statistics():
            scale = precise(alpha) * precise(self.weight) * (self.running_var + self.eps).rsqrt()
            return scale, precise(alpha) * precise(self.bias) - scale * self.running_mean
        outputs, mean, var, count = convolve(precise(alpha), precise(self.weight), precise(self.bias), self.eps)
        self.update(mean, var, count)
        return outputs


class MRConvBranchLayerNorm(nn.Module):
    """Layer normalisation over the channels of each branch: the paper's ablation, which cannot be merged."""

    def __init__(self, num_branches: int, channels: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_branches, channels))
        self.bias = nn.Parameter(torch.zeros(num_branches, channels))

    def forward(self, branch: Tensor, index: int) -> Tensor:
        weight, bias = precise(self.weight[index]), precise(self.bias[index])
        normed = F.layer_norm(precise(branch).transpose(1, 2), weight.shape, weight, bias, self.eps)
        return normed.transpose(1, 2).to(branch.dtype)


class MRConvBatchNorm(MRConvPreciseBuffers):
    """Batch normalisation of hidden states (B, L, D) over the valid positions, of all processes if `synchronized`."""

    def __init__(self, channels: int, eps: float, synchronized: bool):
        super().__init__()
        self.eps, self.synchronized = eps, synchronized
        self.register_statistics(channels)

    def forward(self, hidden: Tensor, valid: Tensor | None = None) -> Tensor:
        """Normalise; statistics are taken where `valid`, of shape `(B, L)`, is True."""
        mean, var = self.running_mean, self.running_var
        if self.takes_batch_statistics():
            rows, alone = precise(hidden).flatten(0, 1), statistics_group(self.synchronized) is None
            if valid is None and alone and len(rows) > 1 and rows.dtype == mean.dtype:
                # In one call of torch, forward and backward, what is written out below. A repetition must save as many
                # tensors as the first pass, so that it too gets statistics to move.
                running = (mean, var) if self.counts() else (mean.clone(), var.clone())
                weight, bias = precise(self.weight), precise(self.bias)
                normed = F.batch_norm(rows, *running, weight, bias, True, self.momentum, self.eps)
                return normed.view_as(hidden).to(hidden.dtype)
            mean, var = self._batch_statistics(hidden, valid)
        scale = precise(self.weight) * (var + self.eps).rsqrt()
        return (precise(hidden) * scale + (precise(self.bias) - mean * scale)).to(hidden.dtype)

    def _batch_statistics(self, hidden: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mean and biased variance over the valid positions."""
        # Squares are taken about the mean of this process, and each has a weight of 0 or 1: to pick the valid rows
        # would wait for their number. Sums over processes are made of sums and of whole squares, q = squares +
        # total^2 / count, in float64, so that one collective is enough and no digits are lost.
        rows = precise(hidden)

        def total_of(values: Tensor) -> Tensor:
            return (values if valid is None else torch.where(valid[..., None], values, 0)).flatten(0, 1).sum(0)

        positions = rows.new_full((), hidden[..., 0].numel()) if valid is None else valid.sum().to(rows.dtype)
        count, total, group = positions, total_of(rows), statistics_group(self.synchronized)
        mean = total / count.clamp_min(1)
        squares = total_of((rows - mean).square())
        if group is not None:
            total, count = total.double(), count.double()
            whole = squares + total.square() / count.clamp_min(1)
            joined: Tensor = SumOverProcesses.apply(torch.cat([total, whole, count[None]]), group)
            (total, whole), count = joined[:-1].view(2, -1), joined[-1].detach()
            squares = (whole - total.square() / count.clamp_min(1)).clamp_min(0).to(rows.dtype)
            mean, count = (total / count.clamp_min(1)).to(rows.dtype), count.to(rows.dtype)
        var = squares / count.clamp_min(1)
        self.update(mean, var, count)
        return mean, var


class MRConvLayerNorm(nn.LayerNorm):
    """LayerNorm that takes, and has no use for, the valid positions."""

    def forward(self, hidden: Tensor, valid: Tensor | None = None) -> Tensor:
        return super().forward(hidden)


def make_norm(config: MRConvConfig) -> nn.Module:
    """Normalisation of a block, as the configuration has it."""
    if config.norm == "layer":
        return MRConvLayerNorm(config.hidden_size, eps=config.norm_eps)
    return MRConvBatchNorm(config.hidden_size, config.norm_eps, config.sync_batch_norm)


class MRConvLayer(MRConvPreciseBuffers):
    """The convolution layer: y = sum_i alpha_i BN_i(k_i * u) in training (eqs. 4-6), k * u + b in evaluation (7)."""

    merged_kernel: Tensor
    merged_backward_kernel: Tensor | None
    merged_bias: Tensor

    def __init__(self, config: MRConvConfig, layer_index: int = 0):
        super().__init__()
        self.config, self.layer_index = config, layer_index
        self.rate_factor = float(config.rate_factor)
        self.reparameterized = config.reparameterized
        # Sums instead of FFTs once merged; see `MRConvPreTrainedModel.use_direct_convolution`.
        self.direct = False
        # What the installed package keeps of the merged kernel from call to call.
        self.kept: Any = None
        channels, branches = config.hidden_size, config.branches
        if config.reparameterized:
            taps = changed_lengths(branches, self.rate_factor)[-1]
            ahead = torch.zeros(channels, taps) if config.bidirectional else None
            self._register_merged(torch.zeros(channels, taps), ahead, torch.zeros(channels))
            return
        kernel = KERNELS[config.kernel_type]
        self.kernel = kernel(config, layer_index)
        self.backward_kernel = kernel(config, layer_index, ahead=True) if config.bidirectional else None
        self.alpha = nn.Parameter(torch.empty(len(branches), channels))
        norm: Any = {"batch": MRConvBranchNorm, "layer": MRConvBranchLayerNorm}.get(config.branch_norm)
        self.norm: Any = None if norm is None else norm(len(branches), channels, config.norm_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set alpha to 1 / sqrt(N): branches are nearly uncorrelated, so that their sum has variance 1 about."""
        if not self.reparameterized:
            init.constant_(self.alpha, 1 / math.sqrt(len(self.alpha)))

    def forward(
        self,
        u: Tensor,
        start: Tensor | None = None,
        stop: Tensor | None = None,
        cache: Any | None = None,
        packing: Any | None = None,
    ) -> Tensor:
        """Convolve u [batch, channels, length]. Of each sample the positions [start, stop) are valid, None: all;
        outputs outside have no meaning. `cache` holds what came before; `packing` says that rows hold several
        sequences."""
        if start is not None and stop is not None:
            u = torch.where(valid_positions(u, start, stop), u, 0)
        if cache is not None:
            streamed: Tensor = cache.convolve(self.layer_index, u, self.streaming_kernel, self.sources)
            return streamed
        if packing is not None:  # of `packing_mrconv`
            spans: list[Span] = [(None, group.lengths) for group in packing.groups]
            return packing.pack(self._convolve(packing.unpack(u), spans, packed=True))
        return self._convolve([u], [(start, stop)])[0]

    def _convolve(self, inputs: list[Tensor], spans: list[Span], packed: bool = False) -> list[Tensor]:
        """The outputs of groups of samples, which are zero outside of their spans; statistics are those of all spans
        together."""
        # By the configuration: a wrapper of peft may stand in the place of `self.norm`.
        if not self.reparameterized and self.config.branch_norm == "layer":
            return [self._forward_layer_norm(u) for u in inputs]
        if self.training and self.reparameterized:
            logger.warning_once("The convolutions are merged: training leaves their kernels and biases as they are.")
        elif self.training and self.norm is not None:
            outputs = self.norm(self.alpha, partial(self._batch_convolution, inputs, spans, packed))
            if isinstance(outputs, list):
                return outputs
        return self._merged_forward(inputs)

    def sources(self) -> Iterator[Tensor]:
        """Values that the merged kernel is made of; an adapter makes alpha of parameters outside of the layer."""
        if not self.reparameterized:
            yield self.alpha
        yield from self.parameters()

    def branch_kernels(self, rate: float | None = None) -> tuple[list[Tensor], list[Tensor] | None]:
        """The N kernels (channels, l_i) as they are convolved, or at another rate; and those ahead of it, or None."""
        if self.reparameterized:
            raise ValueError("This layer is merged, without branches; load a checkpoint from before `reparameterize`.")
        rate = self.rate_factor if rate is None else rate
        with whole_parameters(self), maybe_autocast(self.alpha.device.type, enabled=False):
            return self.kernel(rate), None if self.backward_kernel is None else self.backward_kernel(rate)

    def merged(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """One kernel and one bias for all branches, with the running statistics (eq. 7), in float32 or float64: k =
        sum_i alpha_i s_i k_i, b = sum_i alpha_i t_i. Returns the kernel, the one that looks ahead or None, the bias.
        """
        if self.reparameterized:
            return self.merged_kernel, self.merged_backward_kernel, self.merged_bias
        if self.config.branch_norm == "layer":
            told = "`branch_norm` is 'layer': its scale depends on each input, so no kernel can stand for all branches"
            raise ValueError(f"{told}. Merging and streaming need 'batch', 'kernel' or 'none'.")
        with whole_parameters(self):
            kernels, ahead = self.branch_kernels()
            scale, shift = self.branch_scales(kernels, ahead)
        return merge_kernels(kernels, scale), None if ahead is None else merge_kernels(ahead, scale), shift.sum(0)

    def branch_scales(self, kernels: list[Tensor], ahead: list[Tensor] | None) -> tuple[Tensor, Tensor]:
        """Factor of each of these kernels, and what its branch adds, with the running statistics: [N, D]."""
        if self.norm is not None:
            scale, shift = self.norm(self.alpha)
            return scale, shift
        scale = precise(self.alpha)
        if self.config.branch_norm == "kernel":
            # The norm of both wings together, at the rate of training. Below 1e-12 a kernel counts as zero.
            if self.rate_factor != 1:
                kernels, ahead = self.branch_kernels(1.0)
            if ahead is not None:
                kernels = [torch.cat(wings, dim=-1) for wings in zip(kernels, ahead, strict=True)]
            scale = scale / torch.stack([kernel.norm(dim=-1) for kernel in kernels]).clamp_min(1e-12)
        return scale, torch.zeros_like(scale)

    def _batch_convolution(
        self, inputs: list[Tensor], spans: list[Span], packed: bool, *coefficients: Any
    ) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        """The outputs with the statistics of the batch, and these: a [`BatchConvolution`], given the first three."""
        (kernels, ahead), group = self.branch_kernels(), statistics_group(self.config.sync_batch_norm)
        options: dict[str, Any] = {"backward_kernels": ahead, "group": group}
        # Processes that share statistics have groups of their own, and must exchange the same sums.
        if len(inputs) > 1 or (packed and group is not None):
            mean, var, count, *outputs = grouped_batch_norm_conv(inputs, spans, kernels, *coefficients, **options)
            return outputs, mean, var, count
        options["start"], options["stop"] = spans[0]
        output, mean, var, count = batch_norm_conv(inputs[0], kernels, *coefficients, **options)
        return [output], mean, var, count

    def _forward_layer_norm(self, u: Tensor) -> Tensor:
        """N convolutions: the statistics of a position are not linear in the kernels, so nothing can be merged."""
        kernels, ahead = self.branch_kernels()
        output = torch.zeros_like(u)
        for index, kernel in enumerate(kernels):
            branch = self.norm(long_conv(u, kernel, None if ahead is None else ahead[index]), index)
            output = output + self.alpha[index][:, None].to(u.dtype) * branch
        return output

    def _merged_forward(self, inputs: list[Tensor]) -> list[Tensor]:
        if self.direct:
            return [self._sum_over_taps(u) for u in inputs]
        capturing = inputs[0].is_cuda and torch.cuda.is_current_stream_capturing()
        trained = torch.is_grad_enabled() and any(value.requires_grad for value in self.sources())
        if trained or capturing or torch.compiler.is_compiling() or Forms.is_transformed():
            # Whoever differentiates or records the operations needs all of them, and values cannot be looked at.
            kernel, ahead, bias = self.merged()
            return [long_conv(u, kernel, ahead, bias=bias) for u in inputs]
        kept = self.kept_kernel()
        return [
            long_conv(u, kept.kernel, kept.ahead, spectrum=kept.spectrum(u.shape[-1]), bias=kept.bias) for u in inputs
        ]

    def _sum_over_taps(self, u: Tensor) -> Tensor:
        taps, ahead = self.merged_kernel.shape[1], self.merged_backward_kernel
        # conv1d correlates: its weights run from the oldest input that a tap reaches to the newest.
        window = self.merged_kernel.flip(1) if ahead is None else torch.cat([self.merged_kernel.flip(1), ahead], 1)
        padded = F.pad(u, (taps - 1, window.shape[1] - taps))
        return F.conv1d(padded, window[:, None].to(u.dtype), self.merged_bias.to(u.dtype), groups=u.shape[1])

    @keeps_state
    def kept_kernel(self) -> MergedKernel:
        """The merged kernel without gradients. The installed package keeps it; nothing in it may be changed."""
        form: Callable[[Any], MergedKernel] | None = Forms.fast("kept_kernel")
        return MergedKernel(*self.merged()) if form is None else form(self)

    def streaming_kernel(self) -> Any:
        """The merged kernel as it is now, for streams; all of them share it."""
        if self.config.bidirectional:
            told = f"Layer {self.layer_index} is bidirectional: its outputs depend on inputs to come"
            raise ValueError(f"{told}, so it cannot be streamed. Use a model with `bidirectional=False`.")
        return self.kept_kernel().streaming()

    def _register_merged(self, *merged: Tensor | None) -> None:
        for name, value in zip(("merged_kernel", "merged_backward_kernel", "merged_bias"), merged, strict=True):
            self.register_buffer(name, None if value is None else precise(value))

    def check_loaded(self) -> None:
        """Refuse weights that have no values."""
        if any(value.device.type == "meta" for value in self.parameters()):
            raise ValueError(
                f"The weights of layer {self.layer_index} are offloaded or not loaded yet, so that they cannot be "
                "merged. Call `reparameterize()` before the model is offloaded, save the result, and offload that."
            )

    @keeps_state
    def reparameterize(self) -> None:
        """Replace the branches by their merged kernel and bias, as buffers. Does nothing the second time."""
        # No parameters: a dense kernel of D x L free values is another model than N branches of D x l_0, and training
        # it would lose what the branches are for. What surrounds the convolution can still be trained.
        if self.reparameterized:
            return
        self.check_loaded()
        merged = self.merged()
        del self.kernel, self.backward_kernel, self.alpha, self.norm
        self._register_merged(*merged)
        self.reparameterized = True

    def train(self, mode: bool = True) -> Self:
        self.kept = None
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.kept = None
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.reparameterized:
            # Which FSDP puts back in each forward pass.
            destination.pop(f"{prefix}alpha", None)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles make a merged kernel of their own."""
        return {**vars(self), "kept": None}


class MRConvBlock(GradientCheckpointingLayer):
    """x + GLU(W dropout(GELU(MRConv(x)))), normalised after that, as the paper draws it, or before MRConv."""

    def __init__(self, config: MRConvConfig, layer_index: int):
        super().__init__()
        self.prenorm = config.prenorm
        self.dropout, self.tied_dropout = float(config.dropout), config.tied_dropout
        self.norm = make_norm(config)
        self.convolution = MRConvLayer(config, layer_index)
        self.pointwise = nn.Linear(config.hidden_size, 2 * config.hidden_size)

    def forward(
        self,
        hidden: Tensor,
        start: Tensor | None = None,
        stop: Tensor | None = None,
        valid: Tensor | None = None,
        cache: Any | None = None,
        packing: Any | None = None,
    ) -> Tensor:
        mixed = self.norm(hidden, valid) if self.prenorm else hidden
        mixed = self.convolution(mixed.transpose(1, 2), start, stop, cache, packing)  # [B, D, L]
        drop: Callable[[Tensor, float, bool], Tensor] = F.dropout
        if self.tied_dropout:
            drop = F.dropout1d if packing is None else packing.drop_channels
        mixed = drop(F.gelu(mixed), self.dropout, self.training)
        hidden = hidden + F.glu(self.pointwise(mixed.transpose(1, 2)), dim=-1)
        return hidden if self.prenorm else self.norm(hidden, valid)


class MRConvPreTrainedModel(PreTrainedModel):
    """Loading, saving, initialisation, merging and change of rate shared by the MRConv models."""

    config_class = MRConvConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MRConvBlock"]
    _input_embed_layer = "embedding"
    _can_record_outputs = {"hidden_states": OutputRecorder(MRConvBlock)}
    # What a folder names: the heads whose code transformers copies with that of the saved one.
    code_beside = AUTO_MAP
    # A loss is a mean over the batch, but where a head says otherwise: Trainer divides by the steps it accumulates.
    accepts_loss_kwargs = False

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As [`~transformers.PreTrainedModel.save_pretrained`]; the folder names the heads whose code lies in it."""
        if isinstance(self.config, MRConvConfig):
            self.config.auto_map = dict(self.code_beside)
        super().save_pretrained(*args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init.kaiming_uniform_(module.weight, a=math.sqrt(5))
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, MRConvUnits):
            for name, numbers in module.values.items():
                init.copy_(getattr(module, name), torch.tensor(numbers))
        elif isinstance(module, MRConvLayer):
            module.reset_parameters()
            for merged in module.buffers(recurse=False):
                init.zeros_(merged)
        elif isinstance(module, MRConvKernel):
            module.reset_parameters()
        elif isinstance(module, (MRConvBranchNorm, MRConvBatchNorm)):
            for ones, zeros in ((module.weight, module.bias), (module.running_var, module.running_mean)):
                init.ones_(ones)
                init.zeros_(zeros)
        else:
            # Embeddings and layer normalisations, by their names.
            super()._init_weights(module)

    def convolutions(self) -> list[MRConvLayer]:
        """The convolution layers, first to last."""
        return [module for module in self.modules() if isinstance(module, MRConvLayer)]

    def kernel_parameters(self) -> list[str]:
        """Names of the parameters that make the kernels, for a learning rate of their own and no weight decay: the
        branches are normalised, so that decay would only change the effective learning rate."""
        if self.config.reparameterized:
            told = "The model is merged: its kernels are buffers, which training leaves as they are"
            raise ValueError(f"{told}. Train a checkpoint from before `reparameterize`, or only the other parameters.")
        return [
            f"{prefix}.{name}"
            for prefix, module in self.named_modules()
            if isinstance(module, MRConvKernel)
            for name, _ in module.named_parameters(recurse=False)
        ]

    def reparameterize(self) -> Self:
        """
        Merge every layer into one kernel and one bias, in place (eq. 7). Outputs in evaluation stay the same. A second
        call does nothing, and the model is saved and loaded merged. Its kernels can no longer be trained.

        Returns:
            `MRConvPreTrainedModel`: The model itself.

        Raises:
            ValueError: Weights are offloaded or not loaded yet, or `branch_norm="layer"` cannot be merged.
        """
        layers = self.convolutions()
        # Before the first is merged, so that a model which is refused stays whole.
        for act in (MRConvLayer.check_loaded, MRConvLayer.reparameterize):
            for layer in layers:
                act(layer)
        self.config.reparameterized = True
        return self

    def use_direct_convolution(self, direct: bool = True) -> Self:
        """
        Compute the merged convolutions as sums over the taps, `conv1d`, instead of by FFT, or by FFT again. For
        exports: every runtime has `conv1d`, and the exported model takes any length, while an FFT has a fixed size.
        The cost is `length x taps` instead of `length x log(length)`, so use it for some thousand taps at most.

        Args:
            direct (`bool`, *optional*, defaults to `True`): Sum over the taps; `False` returns to the FFT.

        Returns:
            `MRConvPreTrainedModel`: The model itself. The choice is not saved.

        Raises:
            ValueError: The model is not merged.
        """
        if not self.config.reparameterized:
            raise ValueError("The model still has branches instead of one kernel. Call `reparameterize()` first.")
        for layer in self.convolutions():
            layer.direct = direct
        return self

    def change_rate(self, factor: float) -> Self:
        """
        Adapt the kernels to inputs with `factor` times fewer samples per second, in place and saved in the
        configuration; 2.0 takes a model from 16 to 8 kHz, 0.5 back. Nothing is trained, running statistics stay.

        Fourier kernels keep the modes that the new rate can represent, k'[t] = factor k[factor t]. A tap of a dilated
        or sparse kernel moves to floor(lag / factor), where they add up: aliased.

        Args:
            factor (`float`): Present sampling rate divided by the new one; it divides the length of every kernel.

        Returns:
            `MRConvPreTrainedModel`: The model itself.

        Raises:
            ValueError: The model is merged, or the factor is not positive or does not divide lengths and rate evenly.
        """
        config = self.config
        if config.reparameterized:
            told = "The model is merged: its kernels have no modes or taps left to change"
            raise ValueError(f"{told}. Call `change_rate` before `reparameterize`.")
        if not isinstance(factor, Real) or not 0 < factor < math.inf:
            raise ValueError(f"`factor` is {factor}; give a positive number, such as 2.0 for half the sampling rate.")
        # A configuration takes numbers of Python alone.
        total = float(config.rate_factor * factor)
        changed_lengths(config.branches, total)
        if config.sampling_rate is not None:
            rate = config.sampling_rate / factor
            if not rate.is_integer():
                raise ValueError(
                    f"`factor` is {factor}; {config.sampling_rate} Hz would become {rate}, not a whole number."
                )
            config.sampling_rate = int(rate)
        config.rate_factor = total
        for layer in self.convolutions():
            layer.rate_factor = total
        if config.kernel_type in ("dilated", "sparse", "fourier_sparse"):
            told = f"`change_rate`: taps of {config.kernel_type!r} kernels move to the nearest earlier sample"
            logger.warning(f"{told}. Expect a loss; Fourier kernels have none below the new Nyquist frequency.")
        return self

    def fit_labels(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Labels of the shape and type that the loss of a problem takes with logits `(B, N)`; refuses others, which a
        regression would spread over the batch in silence."""
        problem_type = self.config.problem_type
        # Without a problem type transformers takes whole numbers as classes, and one output as a value.
        is_whole, count = not labels.is_floating_point() and labels.dtype != torch.bool, logits.shape[1]
        is_class = problem_type == "single_label_classification" or (problem_type is None and is_whole and count > 1)
        expected = logits.shape[:1] if is_class else logits.shape
        # Of one output, or one row, there is one order.
        has_order = is_class or 1 in logits.shape
        fits = labels.numel() == expected.numel() if has_order else labels.shape == expected
        if not fits or (is_class and labels.is_floating_point()):
            raise ValueError(
                f"`labels` have shape {tuple(labels.shape)} and type {labels.dtype}; expected {tuple(expected)} and "
                f"{'whole' if is_class else 'any'} numbers with `config.problem_type` {problem_type!r}."
            )
        # Of values in 16 bits the loss would have 16 bits too.
        kind = torch.long if is_class else torch.promote_types(labels.dtype, torch.float32)
        return labels.reshape(expected).to(logits.device, kind)
