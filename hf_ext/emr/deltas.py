"""1-bit and ternary deltas: each task by the signs of its own difference from the base, and a scale for each tensor.

Ŵ_t = W_0 + λ s_t with s_t = ±1 (BitDelta, https://arxiv.org/abs/2402.10193), or 0 where the difference is small. There
is no unified model. With the direction s_t in the place of τ_uni and [s_t ≠ 0] in that of the mask, sums and rescalers
are those of EMR-Merging; the least squares of a tensor, `tensor_l2`, are the mean magnitude of what is kept.

In a file a direction has one plane of bits, where it is 1, or two, the second where it is not 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_ext.fast.emr_sums import SUMS, TOTALS, Sums

from .arithmetic import find_kernels, list_pieces, unpack_mask

_COUNTED = [SUMS.index(name) for name in ("mask", "masked_abs", "masked_square")]
_OF_UNIFIED = [SUMS.index(name) for name in ("dot", "opposed", "weight_opposed")]


def pack_directions(
    base: Tensor,  # [n], W_0
    tasks: list[Tensor],  # [n] each, W_t
    kept: list[Tensor],  # [n] each, fp32: the task vectors, with 0 for what is left out
    planes: Tensor,  # [planes, N, ceil(n / 8) or more], takes the bits of their signs
    sums: Sums,  # the block's are added to them
    *,
    first: int = 0,  # index in the tensor of the block's first sub-block
) -> None:
    """Pack the signs of a block, and add its sums; those that ask for a unified model stay 0."""
    run = find_kernels(base.device.type).run_block
    count, own = len(tasks), Sums.zeros(len(tasks))
    # Masked against what is above all weights, an element has its bit set where its difference is positive. What is
    # summed up beside that is of no use, but for the task vectors alone.
    above = torch.full((len(base),), torch.finfo(torch.float32).max, device=base.device)
    run(base, tasks, above, planes[0] if len(planes) == 1 else None, own, first, None)
    magnitude, moved = own.tasks[:, SUMS.index("abs")], torch.full((count,), float(len(base)), dtype=torch.float64)
    if len(planes) > 1:
        zero, signs = torch.zeros_like(above), Sums.zeros(count)
        run(zero, kept, above, planes[0], signs, first, None)
        run(zero, [vector.abs() for vector in kept], above, planes[1], Sums.zeros(count), first, None)
        magnitude, moved = signs.tasks[:, SUMS.index("abs")], signs.tasks[:, SUMS.index("nonzero")]
    own.tasks[:, _COUNTED] = moved[:, None]
    own.tasks[:, SUMS.index("masked_dot")] = magnitude
    own.tasks[:, _OF_UNIFIED] = 0
    own.totals[TOTALS.index("unified_abs") :] = 0
    for total, part in zip(sums, own, strict=True):
        total += part


@torch.no_grad()
def restore_directions(base: Tensor, planes: Tensor, scale: float, out: Tensor) -> None:
    """Weights of one task, W_0 + λ s, computed in fp32 and rounded once. Flat, but planes `[planes, bytes]`."""
    (find_kernels(base.device.type).restore_directions or _restore_plainly)(base, planes, scale, out)


def _restore_plainly(base: Tensor, planes: Tensor, scale: float, out: Tensor) -> None:
    for part in list_pieces(base):
        start, place, count = base[part].float(), part.start // 8, part.stop - part.start
        moved = torch.where(unpack_mask(planes[0, place:], count), start + scale, start - scale)
        if len(planes) > 1:
            moved = torch.where(unpack_mask(planes[1, place:], count), moved, start)
        out[part] = moved
