"""Task arithmetic: Ilharco et al., https://arxiv.org/abs/2212.04089."""

from typing import Annotated

from .average import add_up
from .registry import Block, Option, Tensor, merge_method

Weight = Annotated[float, Option("Factor of the merged task vector.")]


@merge_method("task_arithmetic", "task arithmetic")
def task_arithmetic(tensor: Block, *, weight: Weight = 0.3) -> Tensor:
    """W_0 + w Σ_t τ_t."""
    return add_up(tensor.vectors).mul_(weight).add_(tensor.base)
