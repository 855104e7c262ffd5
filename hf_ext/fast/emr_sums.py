"""Sums of a merge, shared by the compiled kernels of EMR-Merging and plain torch."""

from typing import NamedTuple

import torch
from torch import Tensor

# Elements whose terms are one sum.
SUB_BLOCK = 8192
# Inner products of pairs of tasks are sampled: one sub-block in 16.
GRAM_STEP = 16

# Columns of `sums`, with d = W_t - W_0, t = W_uni - W_0 and the mask M:
# Σ|d|, Σd², #{d≠0}, #{M}, ΣM|t|, ΣMt², ΣMdt, Σdt, #{dt<0}, #{W_uni·W_t<0}.
SUMS = (
    *("abs", "square", "nonzero", "mask", "masked_abs", "masked_square"),
    *("masked_dot", "dot", "opposed", "weight_opposed"),
)
# Columns of `totals`: ΣW_0², Σ|t|, Σt², #{t≠0}.
TOTALS = ("base_square", "unified_abs", "unified_square", "unified_nonzero")


class Sums(NamedTuple):
    """Sums of blocks, in float64."""

    tasks: Tensor  # [N, 10], columns `SUMS`
    totals: Tensor  # [4], `TOTALS`
    gram: Tensor  # [N, N], Σ d_i d_j of every sixteenth sub-block, in its upper triangle

    @classmethod
    def zeros(cls, count: int) -> "Sums":
        shapes = ((count, len(SUMS)), (len(TOTALS),), (count, count))
        return cls(*(torch.zeros(shape, dtype=torch.float64) for shape in shapes))
