"""TIES: Yadav et al., https://arxiv.org/abs/2306.01708: trim, elect the sign, average those that agree."""

from typing import Annotated

import numpy as np

from .average import Weight, add_up, weigh
from .registry import Block, Option, Tensor, merge_method

KEPT = "Share of each task vector that is kept, with all that are as large as the last of them."
SPACED = "Share of each tensor that is kept; of those as large as the last, evenly spaced ones."

Density = Annotated[list[float], Option(KEPT, default=0.2, above=0, most=1)]
DensityByTensor = Annotated[list[float], Option(SPACED, default=0.2, above=0, most=1)]
Normalize = Annotated[bool, Option("Divide the sum of those that agree by the sum of their weights.")]
Scale = Annotated[float, Option("Factor of the merged task vector.")]


@merge_method("ties", "TIES", trim="density")
def ties(tensor: Block, *, weight: Weight, density: Density) -> Tensor:
    """W_0 plus the mean of the w_t τ_t whose sign is that of their sum; a sum of zero elects +1.

    What reaches this function is trimmed to the largest over the whole model, as the authors do.
    """
    common = weight[0] if len(set(weight)) == 1 else 1.0
    vectors = tensor.vectors if len(set(weight)) == 1 else weigh(tensor.vectors, weight)
    return average_agreeing(vectors).mul_(common).add_(tensor.base)


def average_agreeing(vectors: list[Tensor]) -> Tensor:
    """The mean of the values whose sign is that of their sum. The vectors are overwritten."""
    elected = elect_sign(vectors)
    total, count = elected.new_zeros(elected.shape), elected.new_zeros(elected.shape)
    for vector in vectors:
        agreeing = vector.mul_(elected).clamp_(min=0)
        total += agreeing
        count += agreeing.sign()
    return total.div_(count.clamp_(min=1)).mul_(elected)


def elect_sign(vectors: list[Tensor]) -> Tensor:
    """1 or -1 by the sum of the vectors; 1 where it is zero."""
    elected = add_up([vectors[0].new_zeros(vectors[0].shape), *vectors])
    return elected.new_ones(()).expand_as(elected).copysign(elected)


@merge_method("ties_by_tensor", "TIES, tensor by tensor", whole=True)
def ties_by_tensor(
    tensor: Block, *, weight: Weight, density: DensityByTensor, normalize: Normalize = True, scale: Scale = 1.0
) -> Tensor:
    """W_0 + s Σ w_t τ_t / Σ w_t over the tasks that agree, each tensor trimmed by itself: TIES as mergekit has it."""
    for vector, share in zip(tensor.vectors, density, strict=True):
        keep_largest(vector, share)
    elected = elect_sign(weigh(tensor.vectors, weight))
    total, divisor = elected.new_zeros(elected.shape), elected.new_zeros(elected.shape)
    for vector, factor in zip(tensor.vectors, weight, strict=True):
        agrees = vector.sign() == elected
        total += vector.mul_(agrees)
        divisor.add_(agrees, alpha=factor)
    if normalize:
        total /= divisor.masked_fill_(divisor == 0, 1)
    return total.mul_(scale).add_(tensor.base)


def keep_largest(vector: Tensor, share: float) -> None:
    """Zeroes all but a share of the elements, the largest, at least one; of equal ones at its end, evenly spaced stay.

    Differences of half-precision weights are a few steps of rounding. Which equal ones mergekit keeps, depends on the
    processor; the first ones would all lie in the first rows.
    """
    if share < 1 and vector.numel():
        smallest = vector.numel() - max(1, int(share * vector.numel()))
        # in place of a copy: sorted only as far as it is needed
        magnitudes = vector.abs().flatten().numpy()
        magnitudes.partition(smallest)
        last = float(magnitudes[smallest])
        if last == 0:
            return
        found = vector.abs()
        equal = (found == last).flatten().nonzero().flatten()
        vector.masked_fill_(found < last, 0)
        ends = np.arange(len(equal) + 1) * np.count_nonzero(magnitudes[smallest:] == last) // max(len(equal), 1)
        vector.view(-1)[equal.numpy()[np.diff(ends) == 0]] = 0
