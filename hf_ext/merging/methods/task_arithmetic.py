"""Task arithmetic: Ilharco et al., https://arxiv.org/abs/2212.04089."""

from typing import Annotated

from .average import add_up
from .registry import Block, Option, Tensor, merge_method

Weight = Annotated[list[float], Option("Weight of each task.", default=0.3)]


@merge_method("task_arithmetic", "task arithmetic")
def task_arithmetic(tensor: Block, *, weight: Weight) -> Tensor:
    """W_0 + Σ_t w_t τ_t."""
    if len(set(weight)) == 1:
        return add_up(tensor.vectors).mul_(weight[0]).add_(tensor.base)
    return add_up(tensor.vectors, weight).add_(tensor.base)
