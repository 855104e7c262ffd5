# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""
The merged kernel of an MRConv layer, kept from one forward pass to the next as long as nothing it is made of changes.

Importing this module enters [`kept_kernel`] in `ops_mrconv.FAST`. Without it a layer in evaluation merges its branches
and transforms the kernel in each forward pass, which costs more than convolving a small batch.
"""

from typing import Any, Self

import torch
from torch import Tensor, nn

from hf_ext.mrconv.kernels_mrconv import KERNELS, MergedKernel
from hf_ext.mrconv.modeling_layers_mrconv import MRConvBranchNorm, MRConvLayer
from hf_ext.mrconv.ops_mrconv import FAST, convolution_size

# FFT sizes whose spectrum is kept.
_SPECTRA = 4


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
class KernelSource:
    """The sources of the merged kernel of a layer: tensors, and settings that decide too."""

    def __init__(self, layer: MRConvLayer):
        self.tensors = [*layer.parameters(), *layer.buffers()]
        norm = getattr(layer, "norm", None)
        self.settings = layer.rate_factor, layer.config.branch_norm, getattr(norm, "eps", None), list(layer.modules())
        merged = layer.reparameterized
        self.versions = [(tensor.data_ptr(), tensor._version) for tensor in self.tensors] if merged else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KernelSource) or (self.settings, self.versions) != (other.settings, other.versions):
            return False
        if len(self.tensors) != len(other.tensors):
            return False
        pairs = zip(self.tensors, other.tensors, strict=True)
        if self.versions is not None:
            return all(mine is its for mine, its in pairs)
        return all(
            mine.device == its.device and mine.dtype == its.dtype and torch.equal(mine, its) for mine, its in pairs
        )

    __hash__ = None  # type: ignore[assignment]

    def copy(self) -> Self:
        """The values as they are now, where values are compared."""
        if self.versions is None:
            self.tensors = [tensor.detach().clone() for tensor in self.tensors]
        return self


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
    source = KernelSource(layer)
    if layer.kept is None or layer.kept[0] != source:
        layer.kept = (source.copy(), KeptKernel(*layer.merged()))
    kernel: KeptKernel = layer.kept[1]
    return kernel


FAST["kept_kernel"] = kept_kernel
