"""1-bit and ternary deltas: each task by the signs of its own difference from the base, and a scale for each tensor.

Ŵ_t = W_0 + λ s_t with s_t = ±1 (BitDelta, https://arxiv.org/abs/2402.10193), or 0 where the difference is small. There
is no unified model. With the direction s_t in the place of τ_uni and [s_t ≠ 0] in that of the mask, sums and rescalers
are those of EMR-Merging; the least squares of a tensor, `tensor_l2`, are the mean magnitude of what is kept.

In a file a direction has one plane of bits, where it is 1, or two, the second where it is not 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .arithmetic import SUMS, Sums, add_sub_blocks, list_pieces, pack_mask, sum_task, unpack_mask


def pack_directions(
    base: Tensor,  # [n], W_0
    tasks: list[Tensor],  # [n] each, W_t
    directions: list[Tensor],  # [n] each, s_t: -1, 0 or 1
    planes: Tensor,  # [planes, N, ceil(n / 8) or more], takes the bits
    sums: Sums,  # the block's are added to them
    *,
    first: int = 0,  # index in the tensor of the block's first sub-block
) -> None:
    """Pack the directions of a block, and add its sums; those that ask for a unified model stay 0."""
    base, rows = base.float(), []
    for index, (task, direction) in enumerate(zip(tasks, directions, strict=True)):
        kept = direction != 0
        for plane, bits in zip(planes, (direction > 0, kept), strict=False):
            plane[index, : -(-len(bits) // 8)] = pack_mask(bits)
        row = sum_task((task.float() - base).double(), direction.double(), kept, torch.zeros_like(kept))
        row[SUMS.index("dot") :] = 0
        rows.append(row)
    add_sub_blocks(sums, rows, base, torch.zeros_like(base), tasks, first)


@torch.no_grad()
def restore_directions(base: Tensor, planes: Tensor, scale: float, out: Tensor) -> None:
    """Weights of one task, W_0 + λ s, computed in fp32 and rounded once. Flat, but planes `[planes, bytes]`."""
    for part in list_pieces(base):
        start, place, count = base[part].float(), part.start // 8, part.stop - part.start
        moved = torch.where(unpack_mask(planes[0, place:], count), start + scale, start - scale)
        if len(planes) > 1:
            moved = torch.where(unpack_mask(planes[1, place:], count), moved, start)
        out[part] = moved
