"""Model stock: Jang et al., https://arxiv.org/abs/2403.19522: an average drawn to the base, tensor by tensor."""

from .average import add_up
from .registry import Block, Tensor, merge_method


@merge_method("model_stock", "model stock", whole=True)
def model_stock(tensor: Block) -> Tensor:
    """W_0 + t/N Σ_i τ_i with t = N c / (1 + (N - 1) c), c the mean cosine of two task vectors, at least 0."""
    vectors, count = tensor.vectors, len(tensor.vectors)
    norms = [float(vector.norm()) for vector in vectors]
    cosines = [
        float((vectors[i] * vectors[j]).sum()) / (norms[i] * norms[j]) if norms[i] and norms[j] else 0.0
        for i in range(count)
        for j in range(i)
    ]
    cosine = min(max(sum(cosines) / len(cosines), 0.0), 1.0) if cosines else 1.0
    share = count * cosine / (1 + (count - 1) * cosine)
    return add_up(vectors).mul_(share / count).add_(tensor.base)
