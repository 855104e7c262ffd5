"""TIES: Yadav et al., https://arxiv.org/abs/2306.01708: trim, elect the sign, average those that agree."""

from typing import Annotated

from .average import add_up
from .registry import Block, Option, Tensor, merge_method
from .task_arithmetic import Weight

Density = Annotated[float, Option("Share of each task vector that is kept.", above=0, most=1)]


@merge_method("ties", "TIES", trim="density")
def ties(tensor: Block, *, weight: Weight = 1.0, density: Density = 0.2) -> Tensor:
    """W_0 + w times the mean of the values whose sign is that of their sum; a sum of zero elects +1."""
    elected = add_up(tensor.vectors).add_(0.0)
    elected = elected.new_ones(()).expand_as(elected).copysign(elected)
    total, count = elected.new_zeros(elected.shape), elected.new_zeros(elected.shape)
    for vector in tensor.vectors:
        agreeing = vector.mul_(elected).clamp_(min=0)
        total += agreeing
        count += agreeing.sign()
    return total.div_(count.clamp_(min=1)).mul_(elected).mul_(weight).add_(tensor.base)
