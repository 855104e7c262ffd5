"""1-bit deltas: Liu et al., "BitDelta", https://arxiv.org/abs/2402.10193, without its distillation."""

from .registry import Block, Tensor, merge_method


@merge_method("onebit", "1-bit deltas", masks=True, deltas=1)
def take_all(tensor: Block) -> list[Tensor]:
    """The sign of each task's difference, restored as W_0 ± λ with λ the tensor's mean |τ_t|; no unified model."""
    return tensor.vectors
