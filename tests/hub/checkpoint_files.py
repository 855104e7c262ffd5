"""Small checkpoints that the tests of `open_checkpoint` write, and how they are compared."""

from collections.abc import Mapping
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "double": torch.randn(3, 5, dtype=torch.float64),
        "single": torch.randn(2, 3, 4),
        "half": torch.randn(7).half(),
        "brain": torch.randn(6, 2).bfloat16(),
        "eighth": torch.randn(9).to(torch.float8_e4m3fn),
        "scales": torch.arange(6, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "quarter": torch.arange(12, dtype=torch.uint8).view(3, 4).view(torch.float4_e2m1fn_x2),
        "complex": torch.randn(4, dtype=torch.complex64),
        "long": torch.arange(10),
        "unsigned": torch.tensor([1, 2, 65535], dtype=torch.uint16),
        "mask": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
    }


def sharded(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {f"layer.{i}.weight": torch.randn(8, 8) for i in range(5)}
    save_torch_state_dict(tensors, folder, max_shard_size=600)
    assert len(list(folder.glob("*.safetensors"))) == 3
    return tensors


def assert_same(checkpoint: Mapping[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
    assert set(checkpoint) == set(tensors) and len(checkpoint) == len(tensors)
    for name, tensor in tensors.items():
        read = checkpoint[name]
        assert read.dtype == tensor.dtype and read.shape == tensor.shape
        assert read.contiguous().view(-1).view(torch.uint8).equal(tensor.contiguous().view(-1).view(torch.uint8)), name
