"""Kernels of all branches of an MRConv layer in few calls, their sum with a gradient written by hand, and the merged
kernel, kept from one forward pass to the next as long as nothing it is made of changes.

Importing this module enters all of them in `ops_mrconv.FAST`. A kernel is [channels, taps]. Without [`kept_kernel`] a
layer in evaluation merges its branches and transforms the kernel in each forward pass, which costs more than to
convolve a small batch."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_ext.mrconv.kernels_mrconv import KERNELS, MergedKernel
from hf_ext.mrconv.modeling_layers_mrconv import MRConvBranchNorm, MRConvLayer
from hf_ext.mrconv.ops_mrconv import FAST, convolution_size

# Numbers of a branch up to which the product with its waves is faster than padding, copies and an inverse FFT.
_MOST_NUMBERS = 64
# FFT sizes whose spectrum is kept.
_SPECTRA = 4


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
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scales, *kernels = ctx.saved_tensors
        # m = sum_i s_i k_i: the gradient of s_i is <g, k_i>, that of k_i is s_i g, at the lags of k_i.
        parts = [gradients[0][:, : kernel.shape[1]] for kernel in kernels]
        products = [torch.linalg.vecdot(part, kernel) for part, kernel in zip(parts, kernels, strict=True)]
        factors = scales.to(parts[0].dtype)[..., None].unbind(0)
        g_kernels = [part * factor for part, factor in zip(parts, factors, strict=True)]
        return torch.stack(products).to(scales.dtype), *g_kernels


class KeptKernel(MergedKernel):
    """A merged kernel with its spectra and its form for streams, each made when it is first asked for."""

    def __init__(self, *merged: Any):
        super().__init__(*merged)
        self.spectra: dict[int, Tensor] = {}
        self._streaming: Any = None

    def spectrum(self, length: int) -> Tensor:
        """Spectrum for an input of `length` samples; those of the last few FFT sizes are kept."""
        n = convolution_size(length, self.kernel.shape[1], 0 if self.ahead is None else self.ahead.shape[1])
        # Threads may share the model: each step is one operation on the dict, and none fails if another came first.
        spectrum = self.spectra.pop(n, None)
        if spectrum is None:
            # A later call may need a gradient, which tensors made in inference mode cannot have.
            with torch.inference_mode(False), torch.no_grad():
                spectrum = super().spectrum(length)
        self.spectra[n] = spectrum
        for size in list(self.spectra)[:-_SPECTRA]:
            self.spectra.pop(size, None)
        return spectrum

    def streaming(self) -> Any:
        """The form that streams share: heads and spectra of tiles."""
        if self._streaming is None:
            self._streaming = super().streaming()
        return self._streaming


# A stale kernel would be silently wrong, so nothing here trusts that a change was announced: by `train()`, an
# optimizer or `load_state_dict`. What is compared depends on the layer and the device:
#
# - A layer with branches on a CPU: parameters and statistics *by value*, with copies. They are few, l_0 numbers a
#   branch and channel for a kernel of up to l_0 2^N: this costs a small part of a merge, and sees every write.
# - A layer with branches elsewhere: nothing is kept, it is merged in each pass. To compare values would wait for the
#   device. Version counters would not, but count neither writes through `.data` (moving averages of weights are often
#   written so), nor FSDP, which gathers new values into the same memory. `reparameterize` merges once.
# - A merged layer: the tensors themselves (an address that was freed may be given to another), their addresses and
#   version counters, on every device. Its kernels are as long as the input, too long to compare. A write to a merged
#   kernel through `.data` goes uncounted: call `eval()` after it.
#
# Nothing is kept if a wrapper or a hook may change the output of a module.
#
# How we know: tests/mrconv/test_kept_kernels_mrconv.py changes weights in every way that we know of.
class KernelSource(NamedTuple):
    """The sources of the merged kernel of a layer: tensors, settings that decide too, and versions if it is merged."""

    tensors: list[Tensor]
    settings: tuple[Any, ...]
    versions: list[tuple[int, int]] | None

    def equals(self, other: "KernelSource") -> bool:
        if self[1:] != other[1:] or len(self.tensors) != len(other.tensors):
            return False
        pairs = zip(self.tensors, other.tensors, strict=True)
        if self.versions is not None:
            return all(mine is its for mine, its in pairs)
        return all(
            mine.device == its.device and mine.dtype == its.dtype and torch.equal(mine, its) for mine, its in pairs
        )


# Whose values decide about the merged kernel, and nothing else of them.
_OWN_MODULES: tuple[type, ...] = (MRConvLayer, MRConvBranchNorm, *KERNELS.values())


def is_known(layer: MRConvLayer) -> bool:
    """True where the source of a layer can be known, and without waiting."""
    for module in layer.modules():
        # A wrapper of peft is another type; accelerate's hooks stand in the place of `forward`.
        hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
        if type(module) not in _OWN_MODULES or hooked:
            return False
    for tensor in (*layer.parameters(), *layer.buffers()):
        # Subclasses such as distributed, fake or quantized tensors may change unnoticed.
        if type(tensor) not in (Tensor, nn.Parameter):
            return False
        # Values are read on a CPU only; version counters wherever there are some.
        if tensor.device.type == "meta" or tensor.is_inference() if layer.reparameterized else not tensor.is_cpu:
            return False
    return True


def kept_kernel(layer: MRConvLayer) -> KeptKernel:
    """The merged kernel of a layer, made anew only where something it is made of has changed since the last call."""
    if not is_known(layer):
        return KeptKernel(*layer.merged())
    tensors, eps = [*layer.parameters(), *layer.buffers()], getattr(getattr(layer, "norm", None), "eps", None)
    versions = [(tensor.data_ptr(), tensor._version) for tensor in tensors] if layer.reparameterized else None
    settings = layer.rate_factor, layer.config.branch_norm, eps, list(layer.modules())
    source = KernelSource(tensors, settings, versions)
    if layer.kept is None or not source.equals(layer.kept[0]):
        if versions is None:
            source = source._replace(tensors=[tensor.detach().clone() for tensor in tensors])
        layer.kept = (source, KeptKernel(*layer.merged()))
    kernel: KeptKernel = layer.kept[1]
    return kernel


FAST.update(fourier_kernels=fourier_kernels, kept_kernel=kept_kernel)
FAST["merge_kernels"] = lambda kernels, scales: MergedKernels.apply(scales, *kernels)
