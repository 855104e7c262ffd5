"""Ternary deltas: the signs of the largest differences, as in T-Switch (Qi et al., https://arxiv.org/abs/2412.00054)."""

from typing import Annotated

from .registry import Block, Option, Tensor, merge_method
from .ties import KEPT

Density = Annotated[list[float], Option(KEPT, default=0.4, above=0, most=1)]


@merge_method("ternary", "ternary deltas", masks=True, deltas=2, trim="density")
def take_largest(tensor: Block, *, density: Density) -> list[Tensor]:
    """1-bit deltas of the largest elements of each task vector, W_0 elsewhere; λ is the mean of what is kept."""
    return tensor.vectors
