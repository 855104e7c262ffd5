"""Weight average: Wortsman et al., "Model soups", https://arxiv.org/abs/2203.05482."""

from .registry import Block, Tensor, merge_method


@merge_method("average", "the average of their weights")
def average(tensor: Block) -> Tensor:
    """W_0 + 1/N Σ_t τ_t."""
    return add_up(tensor.vectors).mul_(1 / len(tensor.vectors)).add_(tensor.base)


def add_up(vectors: list[Tensor]) -> Tensor:
    """Σ_t τ_t in the order of the tasks."""
    total = vectors[0].clone()
    for vector in vectors[1:]:
        total += vector
    return total
