"""Weight average: Wortsman et al., "Model soups", https://arxiv.org/abs/2203.05482."""

from typing import Annotated

from .options import Option
from .registry import Block, MethodError, Tensor, merge_method

Share = Annotated[list[float], Option("Weight of each task.", default=1.0)]

Sum = Annotated[bool, Option("Divide the weighted sum by the sum of the weights.", default=True)]


@merge_method("average", "the average of their weights")
def average(tensor: Block, *, weight: Share, normalize: Sum = True) -> Tensor:
    """W_0 + Σ_t w_t τ_t / Σ_t w_t; or Σ_t w_t W_t."""
    total = sum(weight)
    if not normalize:
        return add_up(weigh(tensor.vectors, weight)).add_(tensor.base, alpha=total)
    # Not by 0 alone: 0.1 + 0.2 - 0.3 is 5.6e-17.
    if abs(total) <= 1e-12 * sum(map(abs, weight)):
        raise MethodError(f"the weights of {tensor.name!r} add up to 0, so the average is undefined; change them.")
    if len(set(weight)) == 1:
        return add_up(tensor.vectors).mul_(1 / len(tensor.vectors)).add_(tensor.base)
    return add_up(weigh(tensor.vectors, weight)).div_(total).add_(tensor.base)


def weigh(vectors: list[Tensor], weight: list[float]) -> list[Tensor]:
    """w_t τ_t, in the place of the task vectors."""
    return [vector.mul_(factor) for vector, factor in zip(vectors, weight, strict=True)]


def add_up(vectors: list[Tensor]) -> Tensor:
    """Σ_t τ_t in the order of the tasks, in the place of the first."""
    for vector in vectors[1:]:
        vectors[0].add_(vector)
    return vectors[0]
