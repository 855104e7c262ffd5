# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""EMR-Merging (arXiv 2405.17461) in plain torch: elect, mask and rescale; and the table of faster kernels.

Weights and masks have the bits of the compiled kernels; sums agree within 1e-12.
"""

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_ext.fast.emr_operators import Kernels, compiled_kernels
from hf_ext.fast.emr_sums import GRAM_STEP, SUB_BLOCK, SUMS, Sums

from ..errors import UsageError

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
RESCALES = ("global", "official", "tensor", "l2", "tensor_l2", "none")
TENSOR_RESCALES = ("tensor", "tensor_l2")
# Elements that `restore` works on at once.
_PIECE_CPU = 2**18
_PIECE_GPU = 2**26


def list_pieces(tensor: Tensor) -> Iterator[slice]:
    """Runs of elements that are worked on at once."""
    step = _PIECE_CPU if tensor.device.type == "cpu" else _PIECE_GPU
    return (slice(start, min(start + step, len(tensor))) for start in range(0, len(tensor), step))


def pack_mask(bits: Tensor) -> Tensor:
    """Pack booleans: element i is bit i % 8 of byte i // 8."""
    padded = F.pad(bits.to(torch.uint8), (0, -len(bits) % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(-1, dtype=torch.uint8)


def unpack_mask(mask: Tensor, n: int) -> Tensor:
    """Undo [`pack_mask`]."""
    bits = mask[: -(-n // 8), None] >> torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (bits & 1).view(-1)[:n].bool()


def elect(base: Tensor, tasks: list[Tensor], tie: str) -> Tensor:
    """W_uni in fp32. The first of equal weights is kept, which matters for +0 and -0 only."""
    total = torch.zeros_like(base)
    highest = lowest = tasks[0].float()
    for task in tasks:
        weights = task.float()
        total += weights - base
        highest = torch.where(weights > highest, weights, highest)
        lowest = torch.where(weights < lowest, weights, lowest)
    negative = total < 0
    if tie == "negative":
        negative |= (total == 0) & (lowest < base)
    return torch.where(total > 0, highest, torch.where(negative, lowest, base))


def _add_up(values: Tensor) -> Tensor:
    """[..., n] -> [..., sub-blocks]: sums by halving, so that neither threads nor vectors decide the order."""
    values = F.pad(values, (0, -values.shape[-1] % SUB_BLOCK))
    values = values.view(*values.shape[:-1], -1, SUB_BLOCK)
    while values.shape[-1] > 1:
        low, high = values.chunk(2, dim=-1)
        values = low + high
    return values.squeeze(-1)


def _task_sums(base: Tensor, weights: Tensor, unified: Tensor, bits: Tensor) -> Tensor:
    """`SUMS` of one task for each sub-block, [10, sub-blocks], from weights in fp32."""
    delta, common = (weights - base).double(), (unified - base).double()
    masked = torch.where(bits, common, 0.0)
    columns = (
        delta.abs(),
        delta * delta,
        delta != 0,
        bits,
        masked.abs(),
        masked * masked,
        delta * masked,
        delta * common,
        delta.sign() * common.sign() < 0,
        weights.sign() * unified.sign() < 0,
    )
    return torch.stack([_add_up(column.double()) for column in columns])


def restore(base: Tensor, unified: Tensor, mask: Tensor, scale: float, out: Tensor) -> None:
    for part in list_pieces(base):
        bits = unpack_mask(mask[part.start // 8 :], part.stop - part.start)
        start = base[part].float()
        moved = (unified[part].float() - start).mul_(scale).add_(start)
        out[part] = torch.where(bits, moved, start)


def restore_tasks(base: Tensor, unified: Tensor, masks: list[Tensor], scales: list[float], outs: list[Tensor]) -> None:
    """[`restore`] for several tasks whose weights have one base and one unified model."""
    for mask, scale, out in zip(masks, scales, outs, strict=True):
        restore(base, unified, mask, scale, out)


def multiply(b: Tensor, a: Tensor) -> Tensor:
    """b @ a, [rows, rank] and [rank, columns] of fp32, summed in the order of the rank."""
    product = torch.zeros(len(b), a.shape[1], device=a.device)
    for column, row in zip(b.T, a, strict=True):
        product += column[:, None] * row
    return product


def run_block(
    base: Tensor, tasks: list[Tensor], unified: Tensor, masks: Tensor | None, sums: Sums, first: int, tie: str | None
) -> None:
    """[`merge_block`] in torch, or [`mask_block`] if `tie` is None."""
    base = base.float()
    if tie is not None:
        unified.copy_(elect(base, tasks, tie))
    elected = unified.float()
    common = elected - base
    rows = []
    for index, task in enumerate(tasks):
        weights = task.float()
        bits = ((weights - base).sign() == common.sign()) & (common != 0)
        if masks is not None:
            masks[index, : -(-len(bits) // 8)] = pack_mask(bits)
        rows.append(_task_sums(base, weights, elected, bits))
    columns = (base.double().square(), common.double().abs(), common.double().square(), (common != 0).double())
    parts = torch.stack([_add_up(column) for column in columns])
    for position in range(parts.shape[-1]):
        sums.tasks.add_(torch.stack([row[:, position] for row in rows]))
        sums.totals.add_(parts[:, position])
        if (first + position) % GRAM_STEP == 0:
            here = slice(position * SUB_BLOCK, (position + 1) * SUB_BLOCK)
            deltas = torch.stack([task[here].float() - base[here] for task in tasks]).double()
            for index, delta in enumerate(deltas):
                sums.gram[index, index:] += _add_up(delta * deltas[index:])[:, 0]


def compute_scales(sums: np.ndarray, elements: np.ndarray, participates: np.ndarray, mode: str) -> np.ndarray:
    r"""The rescalers λ of every task, from the sums of the merge.

    With sums over the elements p of the tensors in which task t takes part:
    `global` \\(\sum|\tau_t| / \sum M_t|\tau_{uni}|\\) (the paper);
    `official` the same of the per-tensor means (the authors' code);
    `l2` \\(\langle\tau_t, M_t\tau_{uni}\rangle / \lVert M_t\tau_{uni}\rVert^2\\), the least squares;
    `tensor` and `tensor_l2` the first and the last for every tensor by itself; `none` 1.
    Where nothing is masked in, λ is 1 if the task equals the base there, and 0 if it lost every vote.
    """
    if mode not in RESCALES:
        raise UsageError(f"rescale is {mode!r}; allowed are {', '.join(RESCALES)}")
    if mode == "none":
        return np.ones(sums.shape[1])
    column = {name: sums[:, :, index] * participates for index, name in enumerate(SUMS)}
    upper, lower = column["abs"], column["masked_abs"]
    if mode in ("l2", "tensor_l2"):
        upper, lower = column["masked_dot"], column["masked_square"]
    if mode == "official":
        counts = np.maximum(elements, 1)[:, None]
        upper, lower = upper / counts, lower / counts
    lost = column["abs"] > 0
    if mode not in TENSOR_RESCALES:
        # exactly rounded, so that the order of the tensors does not matter
        upper, lower = (np.array([math.fsum(task) for task in part.T]) for part in (upper, lower))
        lost = lost.any(axis=0)
    return np.where(lower > 0, upper / np.where(lower > 0, lower, 1.0), np.where(lost, 0.0, 1.0))


_TORCH = Kernels(run_block, restore, multiply, restore_tasks)
# By type of device: a function that gives faster kernels, or None where they cannot be had.
KERNELS: dict[str, Callable[[], Kernels | None]] = {"cpu": compiled_kernels}


def find_kernels(device: str) -> Kernels:
    """The fastest kernels that can be had for a type of device."""
    found = KERNELS[device]() if device in KERNELS else None
    return _TORCH if found is None else found
