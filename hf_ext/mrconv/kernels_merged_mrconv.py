# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""The one kernel and bias that stand for all branches of a layer (eq. 7): made once, and what is made of them.

Kernels [channels, taps], bias [channels].
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from .ops_mrconv import convolution_size, kernel_spectrum
from .streaming_convolution_mrconv import StreamingKernel

# FFT sizes whose spectrum is kept.
_SPECTRA = 4


class MergedKernel:
    """
    A merged kernel with its spectra and its form for streaming, each made when it is first asked for.

    Args:
        kernel (`torch.Tensor` of shape `(channels, taps)`): Kernel of the past.
        ahead (`torch.Tensor` of shape `(channels, backward_taps)`, *optional*): Kernel of the future.
        bias (`torch.Tensor` of shape `(channels,)`): Bias.
    """

    def __init__(self, kernel: Tensor, ahead: Tensor | None, bias: Tensor):
        self.kernel, self.ahead, self.bias = kernel, ahead, bias
        self.spectra: dict[int, Tensor] = {}
        self._streaming: StreamingKernel | None = None

    def spectrum(self, length: int) -> Tensor:
        """Spectrum for an input of `length` samples; those of the last few FFT sizes are kept."""
        kernel, ahead = self.kernel, self.ahead
        n = convolution_size(length, kernel.shape[1], 0 if ahead is None else ahead.shape[1])
        # Threads may share the model: each step is one operation on the dict, and none fails if another came first.
        spectrum = self.spectra.pop(n, None)
        if spectrum is None:
            # No input of this FFT size is longer than half of it, nor can more taps wrap around onto its outputs.
            ahead = None if ahead is None else ahead[:, : n // 2]
            # A later call may need a gradient, which tensors made in inference mode cannot have.
            with torch.inference_mode(False), torch.no_grad():
                spectrum = kernel_spectrum(kernel[:, : n // 2], ahead, n)
        self.spectra[n] = spectrum
        for size in list(self.spectra)[:-_SPECTRA]:
            self.spectra.pop(size, None)
        return spectrum

    def streaming(self) -> StreamingKernel:
        """The form that streams share: heads and spectra of tiles."""
        if self._streaming is None:
            self._streaming = StreamingKernel(self.kernel, self.bias)
        return self._streaming


class KernelSource:
    """
    What the merged kernel of a layer is made of, to find out whether it has changed since.

    A stale kernel would be silently wrong, so nothing here trusts that a change was announced: by `train()`, an
    optimizer or `load_state_dict`. Of a layer with branches the parameters and statistics are compared *by value*
    with copies. They are few, l_0 numbers a branch and channel for a kernel of up to l_0 2^N, so that this costs a
    small part of a merge, and it sees what PyTorch's version counters do not count: writes through `.data`, and FSDP,
    which gathers new values into the same memory. Of a merged layer the kernels themselves would have to be
    compared, as long as the input; there the tensors, their addresses and their version counters are. (A write to a
    merged kernel through `.data` goes uncounted: call `eval()` after it.)

    Args:
        layer (`torch.nn.Module`): The layer.
        tensors (`list[torch.Tensor]`): What is compared: parameters and buffers.
        settings (`tuple`): And numbers and names that decide about the kernel.
    """

    def __init__(self, layer: nn.Module, tensors: list[Tensor], settings: tuple[Any, ...], merged: bool):
        self.modules, self.tensors, self.settings = list(layer.modules()), tensors, settings
        self.versions = [(tensor.data_ptr(), tensor._version) for tensor in tensors] if merged else None

    @classmethod
    def of(cls, layer: nn.Module, known: tuple[type, ...], settings: tuple[Any, ...], merged: bool) -> "Self | None":
        """
        The source of a layer; None where it cannot be known: a module is none of `known` types, such as a wrapper of
        peft, or carries a hook, such as accelerate's, that may change what it gives; or a tensor has no values here.
        """
        if not all(type(module) in known and not _is_hooked(module) for module in layer.modules()):
            return None
        tensors = [*layer.parameters(), *layer.buffers()]
        if not all(_has_values(tensor) and not (merged and tensor.is_inference()) for tensor in tensors):
            return None
        return cls(layer, tensors, settings, merged)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KernelSource) or (self.settings, self.versions) != (other.settings, other.versions):
            return False
        if len(self.modules) != len(other.modules) or len(self.tensors) != len(other.tensors):
            return False
        modules = zip(self.modules, other.modules, strict=True)
        pairs = list(zip(self.tensors, other.tensors, strict=True))
        if not all(mine is its for mine, its in modules):
            return False
        if self.versions is not None:
            # The tensors themselves: an address that was freed may have been given to another.
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


@contextmanager
def whole_parameters(module: nn.Module) -> Iterator[None]:
    """
    Within, parameters of which each process holds a part are whole, as FSDP makes them for a forward pass; outside of
    one it does not. All processes have to come here, since each gives its part to the others. Other parameters stay
    what they are.
    """
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


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _has_values(tensor: Tensor) -> bool:
    """A tensor of PyTorch's own, not one of a subclass: distributed, fake or quantized; and in memory."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.device.type != "meta"


__all__ = ["KernelSource", "MergedKernel", "whole_parameters"]
