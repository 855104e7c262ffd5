"""Weight average: Wortsman et al., "Model soups", https://arxiv.org/abs/2203.05482."""

from collections.abc import Sequence
from typing import Annotated

from .registry import Block, MethodError, Option, Tensor, merge_method

Weight = Annotated[list[float], Option("Weight of each task.", default=1.0)]

Sum = Annotated[bool, Option("Divide the weighted sum by the sum of the weights.", default=True)]


@merge_method("average", "the average of their weights")
def average(tensor: Block, *, weight: Weight, normalize: Sum = True) -> Tensor:
    """W_0 + Σ_t w_t τ_t / Σ_t w_t; or Σ_t w_t W_t."""
    total = sum(weight)
    if not normalize:
        return add_up(tensor.vectors, weight).add_(tensor.base, alpha=total)
    # Not by 0 alone: 0.1 + 0.2 - 0.3 is 5.6e-17.
    if abs(total) <= 1e-12 * sum(map(abs, weight)):
        raise MethodError(f"the weights of {tensor.name!r} add up to 0, so the average is undefined; change them.")
    if len(set(weight)) == 1:
        return add_up(tensor.vectors).mul_(1 / len(tensor.vectors)).add_(tensor.base)
    return add_up(tensor.vectors, [factor / total for factor in weight]).add_(tensor.base)


def weigh(vectors: list[Tensor], weight: list[float]) -> list[Tensor]:
    """w_t τ_t, in the place of the task vectors."""
    return [vector.mul_(factor) for vector, factor in zip(vectors, weight, strict=True)]


def add_up(vectors: list[Tensor], weight: Sequence[float] = ()) -> Tensor:
    """Σ_t w_t τ_t in the order of the tasks, in the place of the first; Σ_t τ_t without weights."""
    if weight:
        vectors[0].mul_(weight[0])
    for vector, factor in zip(vectors[1:], weight[1:] or [1.0] * len(vectors[1:]), strict=True):
        vectors[0].add_(vector, alpha=factor)
    return vectors[0]


# Elements of a run of every vector that stay in the second-level cache while their products are summed.
_RUN = 1 << 16


def inner_products(vectors: Sequence[Tensor]) -> list[list[float]]:
    """Inner products of each vector with those up to itself, read once; sums of runs are added up in float64."""
    products = [[0.0] * (place + 1) for place in range(len(vectors))]
    for run in zip(*(vector.flatten().split(_RUN) for vector in vectors), strict=True):
        for place, row in enumerate(products):
            for other in range(place + 1):
                row[other] += float(run[place].dot(run[other]))
    return products
