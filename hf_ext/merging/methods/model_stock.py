"""Model stock: Jang et al., https://arxiv.org/abs/2403.19522: an average drawn to the base, tensor by tensor."""

from typing import Annotated

from .average import add_up, inner_products
from .registry import Block, Option, Tensor, merge_method

Rows = Annotated[bool, Option("Measure the angle of every row of a matrix, not of the whole tensor.")]
Away = Annotated[bool, Option("Move away from the average where the mean cosine is negative, in place of the base.")]

Clamp = Annotated[float, Option("Least product of two norms by which a cosine is divided; 0 for none.", least=0)]


@merge_method("model_stock", "model stock", whole=True)
def model_stock(tensor: Block, *, filter_wise: Rows = False, away: Away = False, clamp: Clamp = 0.0) -> Tensor:
    """W_0 + t/N Σ_i τ_i with t = N c / (1 + (N - 1) c), c the mean cosine of two task vectors, at least 0."""
    import torch

    vectors, count = tensor.vectors, len(tensor.vectors)
    by_row = filter_wise and tensor.base.ndim > 1
    if by_row:
        rows = [vector.flatten(1) for vector in vectors]
        products = [[(row * other).sum(1).double() for other in rows[: place + 1]] for place, row in enumerate(rows)]
    else:
        products = [[torch.tensor([value], dtype=torch.float64) for value in row] for row in inner_products(vectors)]
    norms = [row[-1].sqrt() for row in products]
    cosines = [
        products[i][j] / (norms[i] * norms[j]).clamp(min=clamp or 1e-300) for i in range(count) for j in range(i)
    ]
    cosine = sum(cosines[1:], cosines[0]) / len(cosines) if cosines else norms[0].new_ones(norms[0].shape)
    cosine = cosine.clamp(-1.0 if away else 0.0, 1.0)
    divisor = 1 + (count - 1) * cosine
    # where all are opposed there is no such point; the base it is
    singular = divisor < 1e-6
    share = (count * cosine / divisor.masked_fill(singular, 1)).masked_fill(singular, 0) / count
    merged = add_up(vectors)
    (merged.flatten(1) if by_row else merged.view(1, -1)).mul_(share.float()[:, None])
    return merged.add_(tensor.base)
