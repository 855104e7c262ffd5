"""DELLA: Deep et al., https://arxiv.org/abs/2406.11617: drop small elements more often, then elect as TIES."""

from typing import Annotated

from .average import weigh
from .options import Option
from .registry import Block, MethodError, Tensor, merge_method
from .ties import average_agreeing

Weight = Annotated[list[float], Option("Weight of each task.", default=1.0)]
Density = Annotated[list[float], Option("Share of each task vector that is kept.", default=0.5, above=0, most=1)]
Epsilon = Annotated[
    list[float],
    Option("Distance from density of the smallest and largest keep probability.", default=0.15, least=0, most=0.5),
]

_AT_ONCE = 2**18


@merge_method("della", "DELLA", whole=True)
def della(tensor: Block, *, weight: Weight, density: Density, epsilon: Epsilon) -> Tensor:
    """W_0 plus the mean of the w_t τ_t whose sign is that of their sum, of task vectors thinned by magnitude."""
    for place, (share, spread) in enumerate(zip(density, epsilon, strict=True)):
        if share < 1:
            thin_by_rank(tensor, place, share, spread)
    return average_agreeing(weigh(tensor.vectors, weight)).add_(tensor.base)


def thin_by_rank(tensor: Block, place: int, density: float, epsilon: float) -> None:
    """Keeps an element with a chance that grows with its rank in its row, and divides it by that chance.

    The chances go in even steps from density - ε for the smallest of a row to density + ε for the largest, so that
    the expectation of each element is what it was.
    """
    import torch

    if not epsilon < density <= 1 - epsilon:
        raise MethodError(
            f"{tensor.name!r}: density {density:g} and epsilon {epsilon:g} give chances from {density - epsilon:g} to "
            f"{density + epsilon:g}, which must lie in (0, 1]; choose a smaller epsilon."
        )
    assert tensor.draw is not None
    vector = tensor.vectors[place]
    rows = vector.flatten(1) if vector.ndim > 1 else vector.reshape(1, -1)
    count = rows.shape[1]
    steps = density - epsilon + 2 * epsilon * torch.arange(count) / max(count - 1, 1)
    # some rows at once: ranks and random numbers of a whole tensor would take several times its room
    step = max(1, _AT_ONCE // max(count, 1))
    for low in range(0, len(rows), step):
        part = rows[low : low + step]
        chances = torch.empty(part.shape).scatter_(1, sort_by_magnitude(part), steps.expand(part.shape))
        drawn = tensor.draw(place, low * count, part.numel()).view(part.shape)
        part.mul_(drawn < chances).div_(chances)


# A magnitude's bits sort as the number does. With the place in the lower half of a 64-bit key no two keys are equal,
# so a plain sort, which numpy does by vectors, has one result on every machine: that of a stable sort of magnitudes,
# in a third of the time of torch's. `test_method_options` compares the two, ties included.
def sort_by_magnitude(rows: Tensor) -> Tensor:
    """The places of each row's elements, the smallest magnitude first; of equal ones the first place."""
    import numpy as np
    import torch

    keys = rows.abs().numpy().view(np.int32).astype(np.int64)
    keys <<= 32
    keys |= np.arange(keys.shape[1])
    keys.sort(axis=1)
    keys &= 2**32 - 1
    return torch.from_numpy(keys)
