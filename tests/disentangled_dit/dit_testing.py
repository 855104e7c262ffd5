"""Tiny Disentangled DiT models, away from initial values: `from tests.disentangled_dit.dit_testing import ...`."""

import torch
from torch import Tensor

from hf_ext.pipelines.disentangled_dit.transformer_disentangled_dit import DisentangledDiTTransformer2DModel

# Rectangular, and no two numbers equal.
SIZES = {"sample_size": [6, 10], "in_channels": 3, "num_layers": 3, "num_attention_heads": 2, "attention_head_dim": 8}
SIZES |= {"mlp_ratio": 2.0, "num_classes": 5}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shake(module: torch.nn.Module) -> None:
    """Move parameters from their initial values, where a missing term would not be seen."""
    with torch.no_grad():
        for index, value in enumerate(module.parameters()):
            value += 0.2 * torch.randn(value.shape, generator=generator(index), dtype=torch.float64).to(value.dtype)


def make_transformer(**fields) -> DisentangledDiTTransformer2DModel:
    """A class model; `num_classes=None, joint_attention_dim=7` makes it a text model."""
    torch.manual_seed(0)
    model = DisentangledDiTTransformer2DModel(**{**SIZES, **fields})
    shake(model)
    return model.eval()


def make_controls(batch: int) -> dict[str, Tensor]:
    """Values of all five controls, different in each row."""
    sizes = DisentangledDiTTransformer2DModel.CONTROL_SIZES
    values = (0.7 * torch.arange(1, 1 + batch * sum(sizes.values()))).split([batch * size for size in sizes.values()])
    return {name: part.view(batch, -1) for name, part in zip(sizes, values, strict=True)}


def make_inputs(model: DisentangledDiTTransformer2DModel, batch: int = 2, dtype: torch.dtype = torch.float32) -> dict:
    """Everything that `model` takes, at its own size."""
    height, width = model.config.sample_size
    inputs = {
        "hidden_states": torch.randn(batch, model.config.in_channels, height, width, generator=generator()).to(dtype),
        "timestep": torch.linspace(20, 700, batch, dtype=dtype),
        "controls": make_controls(batch),
        "control_mask": torch.arange(batch) % 3 != 1,
    }
    if model.config.num_classes is None:
        text = torch.randn(batch, 4, model.config.joint_attention_dim, generator=generator(1))
        return {**inputs, "encoder_hidden_states": text.to(dtype)}
    return {**inputs, "class_labels": torch.arange(batch) % (model.config.num_classes + 1)}
