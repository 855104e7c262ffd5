"""Spherical interpolation of two models: Shoemake, "Animating rotation with quaternion curves", 1985."""

import math
from typing import Annotated

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
    base = tensor.base.float()
    if len(tensor.vectors) == 1 and tensor.count == 2:
        return tensor.vectors[0].add_(base)
    first, second = [base, *(vector.add_(base) for vector in tensor.vectors)][-2:]
    (square,), (product, other) = inner_products([first, second])
    cosine = min(max(product / (math.sqrt(square * other) or 1.0), -1.0), 1.0)
    shares = 1 - t, t
    if abs(cosine) <= _STRAIGHT:
        angle = math.acos(cosine)
        shares = math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)
    return second.mul_(shares[1]).add_(first, alpha=shares[0])
