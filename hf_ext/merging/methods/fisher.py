"""Fisher-weighted averaging: Matena & Raffel, https://arxiv.org/abs/2111.09832, with diagonal Fisher matrices."""

from typing import Annotated

from .registry import Block, MethodError, Option, Tensor, merge_method

Weight = Annotated[list[float], Option("Weight of each task.", default=1.0, above=0)]
Floor = Annotated[float, Option("Added to each Fisher value, as a share of the mean over tensor and tasks.", least=0)]


@merge_method("fisher", "the average weighted by Fisher information", whole=True, statistics="fisher")
def fisher(tensor: Block, *, weight: Weight, floor: Floor = 1e-6) -> Tensor:
    """W_0 + Σ_t w_t F_t τ_t / Σ_t w_t F_t, element by element, F_t the mean squared gradients of the task's loss.

    Where all F_t are 0, no task says anything and the average is that of the tasks.
    """
    count = len(tensor.vectors)
    mean = sum(float(_read(tensor, place).mean()) for place in range(count)) / count if tensor.base.numel() else 0.0
    total = tensor.base.new_zeros(tensor.base.shape).double()
    merged, plain = total.clone(), total.clone()
    for place, (vector, share) in enumerate(zip(tensor.vectors, weight, strict=True)):
        information = _read(tensor, place).add_(floor * mean).mul_(share)
        total += information
        merged.addcmul_(information, vector.double())
        plain.add_(vector, alpha=share / sum(weight))
    silent = total == 0
    return merged.div_(total.masked_fill_(silent, 1)).where(~silent, plain).add_(tensor.base)


def _read(tensor: Block, place: int) -> Tensor:
    assert tensor.statistic is not None
    values = tensor.statistic(place)
    if values is None or not bool((values >= 0).all()) or not bool(values.isfinite().all()):
        raise MethodError(
            f"{tensor.name!r}: the statistics of a task contain negative values, NaN or infinity, which a mean of "
            "squares never has; make them again with hf-ext emr statistics --kind fisher."
        )
    return values.double()
