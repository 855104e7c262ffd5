"""Tiny MRConv layers and models away from their initial values: `from tests.mrconv.mrconv_testing import ...`."""

import itertools

import torch

from hf_ext.mrconv import MRConvConfig, MRConvForSequenceClassification, MRConvLayer
from hf_ext.mrconv.configuration_mrconv import KERNEL_TYPES
from tests.kit.models import ModelTesterMixin

# The shortest kernel does not divide the longest, and no length is a power of two.
SIZES = {"hidden_size": 4, "num_hidden_layers": 2, "kernel_size": 5, "max_position_embeddings": 37, "num_labels": 3}
TOKENS = {**SIZES, "vocab_size": 11}
EVERY_KERNEL = list(itertools.product(KERNEL_TYPES, (False, True)))


class MRConvTester(ModelTesterMixin):
    bfloat16_tolerance = 0.05
    fields: dict

    def make_config(self):
        return MRConvConfig(**self.fields)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 11, shape, generator=generator(seed))


def shake(module: torch.nn.Module) -> None:
    """Move parameters and statistics from their initial values, where a missing term would not be seen."""
    with torch.no_grad():
        for index, value in enumerate(itertools.chain(module.parameters(), module.buffers())):
            if value.is_floating_point():
                value += 0.3 * torch.rand(value.shape, generator=generator(index)).to(value.dtype)


def make_model(model_class=MRConvForSequenceClassification, **fields):
    torch.manual_seed(0)
    model = model_class(MRConvConfig(**(fields or TOKENS)))
    shake(model)
    return model.eval()


def make_layer(layer_index: int = 0, **fields) -> MRConvLayer:
    torch.manual_seed(0)
    layer = MRConvLayer(MRConvConfig(**{**SIZES, **fields}), layer_index)
    shake(layer)
    return layer.eval()


def make_signal(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=generator(), dtype=torch.float64).to(dtype)
