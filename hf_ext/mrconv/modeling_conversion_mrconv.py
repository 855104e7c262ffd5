# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints of MRConv in the form of earlier versions: what `from_pretrained` does with them.

`load_state_dict` needs nothing of this, see [`~kernels_mrconv.MRConvFourierKernel`].
"""

from typing import Any

import torch
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter

# Where Fourier kernels have their parameter; other kernels that have one of the first name pass unchanged.
_NAMES = ("kernel.weight", "kernel.fourier.weight")


class KeepWeight(ConversionOps):
    """What is saved is the parameter as it is."""

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        return input_dict

    @property
    def reverse_op(self) -> ConversionOps:
        return self


class PairsToNumbers(ConversionOps):
    """Parameters of Fourier kernels as pairs of real and imaginary parts become what they are now."""

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str = "",
        model: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        ((weight,),) = input_dict.values()
        kernel = model.get_submodule(full_layer_name.rpartition(".")[0])
        # By its methods, not its class: code that came with a checkpoint has classes of its own.
        if isinstance(weight, torch.Tensor) and hasattr(kernel, "reads_pairs") and kernel.reads_pairs(weight.shape):
            weight = kernel.from_pairs(weight)
        return {target_patterns[0]: [weight]}

    @property
    def reverse_op(self) -> ConversionOps:
        return KeepWeight()


def register_conversion(model_type: str) -> None:
    """
    Make `from_pretrained` read earlier checkpoints.

    Args:
        model_type (`str`): Of the configuration.
    """
    converters: list[Any] = [WeightConverter(name, name, [PairsToNumbers()]) for name in _NAMES]
    # Again where code that came with a checkpoint is imported beside this package: both do the same.
    register_checkpoint_conversion_mapping(model_type, converters, overwrite=True)


__all__ = ["register_conversion"]
