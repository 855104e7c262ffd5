# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Textbook EMR-Merging: `ops` with the same names and signatures, in the two passes of the paper.

For tests and benchmarks: slow, never shipped with a checkpoint. Each function states its equation literally; sums are
taken over the whole block in fp64.
"""

import numpy as np
import torch
from torch import Tensor

from hf_ext.emr.arithmetic import GRAM_STEP, SUB_BLOCK, Sums


def merge_block(
    base: Tensor,
    tasks: list[Tensor],
    unified: Tensor,
    masks: Tensor | None,
    sums: Sums,
    *,
    first: int = 0,
    tie: str = "zero",
) -> None:
    """γ = sgn Σ_t τ_t, then ε = max |τ_t| over the tasks with τ_t·γ > 0. See [`ops.merge_block`]."""
    weights = torch.stack([task.float() for task in tasks])
    vectors = weights - base.float()
    total = vectors[0].clone()
    for vector in vectors[1:]:
        total += vector
    gamma = total.sign()
    if tie == "negative":
        gamma[total == 0] = -1.0
    agreeing = (vectors.sign() == gamma) & (gamma != 0)
    # ε belongs to the agreeing weight farthest along γ; that weight is W_0 + τ_uni without the rounding of the sum.
    winner = torch.where(agreeing, gamma * weights, -torch.inf).argmax(dim=0)
    unified.copy_(torch.where(agreeing.any(dim=0), weights.gather(0, winner[None])[0], base.float()))
    mask_block(base, tasks, unified, masks, sums, first=first)


def mask_block(
    base: Tensor, tasks: list[Tensor], unified: Tensor, masks: Tensor | None, sums: Sums, *, first: int = 0
) -> None:
    """M_t = [τ_t ⊙ τ_uni > 0], a product that cannot underflow in fp64. See [`ops.mask_block`]."""
    common = (unified.float() - base.float()).double()
    vectors = torch.stack([task.float() - base.float() for task in tasks]).double()
    for index, (task, vector) in enumerate(zip(tasks, vectors, strict=True)):
        mask = vector * common > 0
        if masks is not None:
            masks[index, : -(-len(mask) // 8)] = pack_mask(mask)
        sums.tasks[index] += torch.stack(
            [
                vector.abs().sum(),
                vector.square().sum(),
                (vector != 0).sum(),
                mask.sum(),
                common[mask].abs().sum(),
                common[mask].square().sum(),
                (vector * common)[mask].sum(),
                (vector * common).sum(),
                (vector * common < 0).sum(),
                (task.double() * unified.double() < 0).sum(),
            ]
        )
    pieces = [base.double().square(), common.abs(), common.square(), (common != 0)]
    sums.totals.add_(torch.stack([piece.sum() for piece in pieces]))
    sub_blocks = first + torch.arange(len(base)) // SUB_BLOCK
    sampled = vectors[:, sub_blocks % GRAM_STEP == 0]
    sums.gram.add_((sampled @ sampled.T).triu())


def restore_block(base: Tensor, unified: Tensor, mask: Tensor, scale: float, out: Tensor) -> None:
    """Ŵ = W_0 + λ·M ⊙ τ_uni in fp32. See [`ops.restore_block`]."""
    start = base.float().flatten()
    vector = unified.float().flatten() - start
    chosen = unpack_mask(mask.flatten(), base.numel())
    weights = start.clone()
    weights[chosen] += torch.tensor(scale, dtype=torch.float32) * vector[chosen]
    out.copy_(weights.view(out.shape))


def pack_mask(bits: Tensor) -> Tensor:
    """Byte i // 8 holds element i at bit i % 8. See [`ops.pack_mask`]."""
    flags = [int(flag) for flag in bits.tolist()]
    packed = [sum(flag << bit for bit, flag in enumerate(flags[i : i + 8])) for i in range(0, len(flags), 8)]
    return torch.tensor(packed, dtype=torch.uint8)


def unpack_mask(mask: Tensor, n: int) -> Tensor:
    """Element i is (byte[i // 8] >> (i % 8)) & 1."""
    return torch.from_numpy(np.unpackbits(mask.numpy(), count=n, bitorder="little")).bool()


def relative_error(vector: Tensor, found: Tensor) -> float:
    """‖τ - τ̂‖² / ‖τ‖²."""
    return float((vector - found).square().sum() / vector.square().sum())
