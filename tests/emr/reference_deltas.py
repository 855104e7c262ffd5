"""1-bit and ternary deltas on whole tensors, from their definition in float64."""

import torch
from torch import Tensor


def one_bit(base: Tensor, task: Tensor) -> Tensor:
    """W_0 ± the mean magnitude of the difference; what did not change goes down."""
    vector = task.double() - base.double()
    return base.double() + torch.where(vector > 0, 1.0, -1.0) * vector.abs().mean()


def ternary(base: dict[str, Tensor], task: dict[str, Tensor], density: float) -> dict[str, Tensor]:
    """The largest share over all tensors moves by the mean magnitude of those in its tensor."""
    vectors = {name: (task[name].float() - base[name].float()).double() for name in base}
    magnitudes = torch.cat([vector.abs().flatten() for vector in vectors.values()]).sort(descending=True).values
    smallest = magnitudes[max(1, int(density * len(magnitudes))) - 1]
    restored = {}
    for name, vector in vectors.items():
        kept = (vector.abs() >= smallest) & (vector != 0)
        scale = vector.abs()[kept].mean() if kept.any() else 0.0
        restored[name] = base[name].double() + scale * vector.sign() * kept
    return restored


def error(vector: Tensor, found: Tensor) -> float:
    """‖τ - τ̂‖² / ‖τ‖²."""
    return float((vector - found).square().sum() / vector.square().sum())
