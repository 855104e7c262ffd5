"""RegMean: Jin et al., https://arxiv.org/abs/2212.09849: linear layers with outputs nearest to those of the tasks."""

from typing import Annotated

from .average import add_up
from .registry import Block, MethodError, Option, Tensor, merge_method

# With 1 the system has no solution where a task has fewer examples than a layer has inputs.
Alpha = Annotated[float, Option("Factor of the off-diagonals of G.", least=0, most=0.99)]


@merge_method("regmean", "RegMean", whole=True, statistics="gram")
def regmean(tensor: Block, *, alpha: Alpha = 0.9) -> Tensor:
    """(Σ_t G_t)⁻¹ Σ_t G_t W_t for the weight of a linear layer, G_t = X_tᵀX_t of its inputs; others are averaged.

    It is the least-squares answer to Σ_t |X_t W - X_t W_t|². An input that is 0 in all examples has no answer: the
    average is taken.
    """
    import torch

    average = add_up([tensor.vectors[0].clone(), *tensor.vectors[1:]]).div_(len(tensor.vectors))
    first = _scale(tensor, 0, alpha)
    if first is None:
        return average.add_(tensor.base)
    # With rows as inputs, W_0 + (Σ G)⁻¹ Σ G τ. That is the formula, as (Σ G)⁻¹ Σ G W_0 = W_0.
    vectors = [vector if tensor.inputs_first else vector.T for vector in tensor.vectors]
    total, right = first, first @ vectors[0].double()
    for place, vector in enumerate(vectors[1:], 1):
        gram = _scale(tensor, place, alpha)
        assert gram is not None  # all tasks have one, or none
        total += gram
        right += gram @ vector.double()
    unused = total.diagonal() == 0
    total.diagonal()[unused] = 1
    right = right.where(~unused[:, None], average.double() if tensor.inputs_first else average.double().T)
    try:
        solved = torch.linalg.solve(total, right)
    except torch.linalg.LinAlgError as error:
        raise MethodError(f"{tensor.name!r}: the grams have no solution ({error}); make them again.") from error
    return (solved if tensor.inputs_first else solved.T) + tensor.base


def _scale(tensor: Block, place: int, alpha: float) -> Tensor | None:
    """A gram in float64, its off-diagonals scaled; None for what is no linear layer."""
    assert tensor.statistic is not None
    gram = tensor.statistic(place)
    if gram is None:
        return None
    if not bool(gram.isfinite().all()) or not bool((gram.diagonal() >= 0).all()):
        raise MethodError(
            f"{tensor.name!r}: the statistics of a task contain NaN, infinity or a negative square, which XᵀX never "
            "has; make them again with hf-ext emr statistics --kind gram."
        )
    diagonal = gram.diagonal().double().clone()
    gram = gram.double().mul_(alpha)
    gram.diagonal().copy_(diagonal)
    return gram
