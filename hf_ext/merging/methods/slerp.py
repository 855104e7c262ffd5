"""Spherical interpolation of two models: Shoemake, "Animating rotation with quaternion curves", 1985."""

import math
from typing import Annotated

import torch

from .average import inner_products
from .registry import Block, Option, Tensor, merge_method

Place = Annotated[float, Option("Place between the two models: 0 is the first, 1 the second.", least=0, most=1)]
# Above this cosine the arc is as good as straight, and its formula divides by nearly nothing.
_STRAIGHT = 0.9995


@merge_method("slerp", "spherical interpolation", whole=True, most_tasks=2)
def slerp(tensor: Block, *, t: Place = 0.5) -> Tensor:
    """sin((1 - t)θ)/sin θ W_1 + sin(tθ)/sin θ W_2, θ between both as vectors: two tasks, or the base and one task.

    A tensor that one of the two lacks is the other's.
    """
    first, step = tensor.base.float(), tensor.vectors[-1]
    if len(tensor.vectors) == 1 and tensor.count == 2:
        return step.add_(first)
    if len(tensor.vectors) == 2:
        step.sub_(tensor.vectors[0])
        first = tensor.vectors[0].add_(first)
    # The second vector is the first and a step, which is never added up: each pass over memory costs a tenth of the
    # merge. Where both are equal, the step is 0 and their cosine 1, which rounded sums would miss.
    (square,), (along, length) = inner_products([first, step])
    product, other = square + along, square + 2 * along + length
    if other < 0.01 * square:
        # of a far smaller second vector rounding leaves little
        (other,), (product, _) = inner_products([first + step, first])
    cosine = min(max(product / (math.sqrt(square * max(other, 0.0)) or 1.0), -1.0), 1.0)
    total, share = 1.0, t
    if abs(cosine) <= _STRAIGHT:
        angle = math.acos(cosine)
        total = (math.sin((1 - t) * angle) + math.sin(t * angle)) / math.sin(angle)
        share = math.sin(t * angle) / math.sin(angle) / total
    merged = torch.add(first, step, alpha=share, out=step)
    return merged if total == 1 else merged.mul_(total)
