"""EMR-Merging (Huang et al., https://arxiv.org/abs/2405.17461): elect the unified weights; masks and scales follow."""

from typing import Annotated, Literal

from .registry import Block, Option, Tensor, merge_method

Tie = Annotated[Literal["zero", "negative"], Option("Elected value where the tasks sum to zero.")]


@merge_method("elect", "the election of EMR-Merging", fused=True)
@merge_method("emr", "EMR-Merging", masks=True, fused=True)
def elect(tensor: Block, *, tie: Tie = "zero") -> Tensor:
    """The weight farthest along the sign of Σ_t τ_t; where the sum is zero, the base's or the lowest (`tie`)."""
    import torch

    from hf_ext.emr.arithmetic import Sums, merge_block

    base, merged = tensor.base.float(), torch.empty(tensor.base.shape)
    weights = [base + vector for vector in tensor.vectors]
    # The compiled election is faster than plain torch, even with the sums, which nobody reads here.
    merge_block(base, weights, merged, None, Sums.zeros(len(weights)), tie=tie)
    return merged
