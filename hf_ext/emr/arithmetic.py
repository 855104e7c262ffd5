# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Block operations of EMR-Merging (arXiv 2405.17461): elect, mask, the sums of the rescalers, and restore.

In plain torch, or by the compiled kernels of `hf_ext.fast`: bit-equal weights and masks, sums within 1e-12. Compiled
sums may differ in their last bits between processors with vectors of other widths; threads and blocks change nothing.
`tests/emr/reference_ops.py` has the same functions in the paper's own two passes.
Shapes: n elements of a flat tensor, N tasks. A sum is taken in fp64 over each sub-block of 8,192 elements, and the
sub-blocks are added in the order of their index: how a tensor is cut into blocks changes no bit.
"""

import math
import os
from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations_with_replacement
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UsageError
from ..fast.emr_sums import GRAM_STEP as GRAM_STEP
from ..fast.emr_sums import SUB_BLOCK as SUB_BLOCK
from ..fast.emr_sums import SUMS as SUMS
from ..fast.emr_sums import TOTALS as TOTALS
from ..fast.emr_sums import Sums as Sums
from .emr_loader import restore_into

# Elements of one tensor that are one unit of work, of the journal and of partial sums.
SEGMENT = 128 * SUB_BLOCK
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
RESCALES = ("global", "official", "tensor", "l2", "tensor_l2", "none")
TENSOR_RESCALES = ("tensor", "tensor_l2")


def merge_block(
    base: Tensor,  # [n], W_0; float32, float16 or bfloat16, as all weights
    tasks: list[Tensor],  # [n] each, W_t, each of its own dtype
    unified: Tensor,  # [n], takes W_uni, rounded to its dtype
    masks: Tensor | None,  # [N, ceil(n / 8) or more], takes M_t, lowest bit first; bits after the last are 0
    sums: Sums,  # the block's are added to them
    *,
    first: int = 0,  # index in the tensor of the block's first sub-block
    tie: str | None = "zero",  # S = 0 elects nobody (the paper), or "negative" the lowest d_t (the authors' code)
) -> None:
    """
    Elect the unified weights of a block, mask each task, and add the block's sums. All tensors lie on one device. On
    the CPU it runs on one thread, and Python's other threads run meanwhile.

    With d_t = W_t - W_0 in fp32 and S = Σ_t d_t (fp32, in the order of the tasks), W_uni is max_t W_t where S > 0,
    min_t W_t where S < 0 and W_0 where S = 0: the paper's τ_uni = W_uni - W_0. The mask is M_t = [sgn d_t = sgn τ_uni
    ≠ 0], with the τ_uni of the weights as stored. Without `tie` the unified weights are those that are given.
    """
    n, count, device = base.numel(), len(tasks), base.device
    if tie not in ("zero", "negative", None):
        raise UsageError(f"tie is {tie!r}: choose 'zero' (the paper) or 'negative' (the authors' code)")
    if not tasks or first < 0:
        raise UsageError(f"{count} tasks from sub-block {first}: at least one task and no negative index")
    if masks is not None and (masks.ndim != 2 or len(masks) != count):
        raise UsageError(f"masks have shape {tuple(masks.shape)}: one row of packed bits for each task is needed")
    weights = {"base": base, "unified": unified, **{f"task {index}": task for index, task in enumerate(tasks)}}
    _check_memory(n, device, weights, masks)
    for name, tensor, shape in zip(Sums._fields, sums, ((count, 10), (4,), (count, count)), strict=True):
        if (tensor.dtype, tensor.shape, tensor.device) != (torch.float64, shape, device) or not tensor.is_contiguous():
            raise UsageError(
                f"sums of {name} are {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}: "
                f"contiguous float64 of {shape} on {device} is needed"
            )
    find_kernels(device.type).run_block(base, tasks, unified, masks, sums, first, tie)


def mask_block(
    base: Tensor, tasks: list[Tensor], unified: Tensor, masks: Tensor | None, sums: Sums, *, first: int = 0
) -> None:
    """Mask each task against unified weights that are given, and add the block's sums: the second half of
    [`merge_block`], and mask-and-rescale as a post-process of any merged model (Table 9 of the paper)."""
    merge_block(base, tasks, unified, masks, sums, first=first, tie=None)


@torch.no_grad()
def restore_block(base: Tensor, unified: Tensor, mask: Tensor, scale: float, out: Tensor) -> None:
    """Weights of one task: Ŵ = W_0 + λ·(W_uni - W_0) where the mask is set and W_0 elsewhere, computed in fp32 and
    rounded once. On the CPU it runs on as many threads as torch uses."""
    _check_memory(base.numel(), base.device, {"base": base, "unified": unified, "out": out}, mask)
    base, unified, out, mask = base.view(-1), unified.view(-1), out.view(-1), mask.view(-1)
    find_kernels(base.device.type).restore(base, unified, [mask], [scale], [out])


def _check_memory(n: int, device: torch.device, weights: dict[str, Tensor], mask: Tensor | None) -> None:
    """Refuses tensors that compiled code would not read and write in their bounds; it takes a few microseconds."""
    for name, tensor in weights.items():
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} is {tensor.dtype}: weights must be float32, float16 or bfloat16; convert them")
        if tensor.numel() != n or not tensor.is_contiguous() or tensor.device != device:
            raise UsageError(
                f"{name} has {tensor.numel()} elements with strides {tensor.stride()} on {tensor.device}: "
                f"it must be contiguous with {n} elements on {device}"
            )
    if mask is not None and mask.dtype != torch.uint8:
        raise TypeError(f"the mask is {mask.dtype}: it must be packed bits in uint8, as pack_mask makes them")
    if mask is not None and (mask.shape[-1] < -(-n // 8) or mask.stride(-1) != 1 or mask.device != device):
        got = f"{mask.shape[-1]} bytes on {mask.device}"
        raise UsageError(f"the mask has {got}: {n} elements need {-(-n // 8)} contiguous bytes on {device}")


def pack_mask(bits: Tensor) -> Tensor:
    """Pack booleans: element i is bit i % 8 of byte i // 8."""
    if bits.device.type == "cpu":
        return torch.from_numpy(np.packbits(bits.numpy(), bitorder="little"))
    padded = F.pad(bits.to(torch.uint8), (0, -len(bits) % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(-1, dtype=torch.uint8)


def elect(base: Tensor, tasks: list[Tensor], tie: str) -> Tensor:
    """W_uni in fp32. The first of equal weights is kept, which matters for +0 and -0 only."""
    total, moved = torch.zeros_like(base), torch.empty_like(base)
    highest, lowest = tasks[0].float().clone(), tasks[0].float().clone()
    for task in tasks:
        weights = task.float()
        total += torch.sub(weights, base, out=moved)
        torch.maximum(highest, weights, out=highest)
        torch.minimum(lowest, weights, out=lowest)
    negative = total < 0
    if tie == "negative":
        negative |= (total == 0) & (lowest < base)
    elected = torch.where(total > 0, highest, torch.where(negative, lowest, base))
    # Which of +0 and -0 is the larger differs between processors: the first task's is taken.
    zeros = (elected == 0) & (negative | (total > 0))
    if bool(zeros.any()):
        for task in reversed(tasks):
            elected = torch.where(zeros & (task == 0), task.float(), elected)
    return elected


# No comparison is made, whose result torch writes without vectors, at three times the cost of a product. A product of
# two fp32 numbers in fp64 is exact and never 0 by underflow, so its sign is that of the comparison: d·t > 0 where the
# mask is set, d·t < 0 where d and t are opposed. Of x >= 0 the sign is 0 or 1, and its sum a number of elements, exact
# in fp64. Nothing is allocated: memory that is freed goes back to the system, and costs more to get again than all the
# arithmetic. The tests compare these sums with compiled comparisons, zeros and subnormal numbers too.
def _add_up_task(
    delta: Tensor, common: Tensor, size: Tensor, crossed: Tensor, work: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """`SUMS` of one task for each sub-block, [10, sub-blocks], and its mask of 0 and 1. All are fp64, [sub-blocks,
    elements]: d, t, |t|, W_uni·W_t, and four to work on."""
    product, agreed, mask, other = work
    torch.mul(delta, common, out=product)
    torch.clamp(product, min=0, out=agreed)
    torch.sign(agreed, out=mask)
    magnitude, moved = torch.abs(delta, out=other).sum(-1), other.sign_().sum(-1)
    square, kept = torch.mul(delta, delta, out=other).sum(-1), mask.sum(-1)
    masked, masked_square = torch.mul(mask, size, out=other).sum(-1), other.square_().sum(-1)
    masked_dot, dot = agreed.sum(-1), product.sum(-1)
    opposed = kept - product.sign_().sum(-1)
    weight_opposed = crossed.clamp_(max=0).sign_().sum(-1).neg_()
    sums = (magnitude, square, moved, kept, masked, masked_square, masked_dot, dot, opposed, weight_opposed)
    return torch.stack(sums), mask


def restore(base: Tensor, unified: Tensor, masks: list[Tensor], scales: list[float], outs: list[Tensor]) -> None:
    """[`restore_block`] for several tasks, of flat tensors."""
    for mask, scale, out in zip(masks, scales, outs, strict=True):
        restore_into(base, unified, mask[None], scale, 0, out)


def run_block(
    base: Tensor, tasks: list[Tensor], unified: Tensor, masks: Tensor | None, sums: Sums, first: int, tie: str | None
) -> None:
    """[`merge_block`] in torch: on the CPU one sub-block after the other, of which all stays in the second-level
    cache, and which torch computes on one thread; elsewhere all at once."""
    n, small = len(base), base.device.type == "cpu"
    step = SUB_BLOCK if small else max(-(-n // SUB_BLOCK), 1) * SUB_BLOCK
    work = torch.empty((10, step), dtype=torch.float64, device=base.device)
    for low in range(0, n, step):
        # one that is not full is a shorter sum, or ends in zeros
        space = work[:, None, : n - low] if small else work.view(10, -1, SUB_BLOCK)
        start, common, size, elected, crossed, delta, *own = space.unbind()
        piece = slice(low, min(low + step, n))
        before, weights = base[piece].float(), [task[piece].float() for task in tasks]
        if tie is not None:
            unified[piece] = elect(before, weights, tie)
        winner = unified[piece].float()
        _fill_up(start, before)
        _fill_up(elected, winner)
        _fill_up(common, winner - before)
        torch.abs(common, out=size)
        rows, moved = [], torch.empty_like(before)
        for index, weight in enumerate(weights):
            _fill_up(delta, torch.sub(weight, before, out=moved))
            _fill_up(crossed, weight)
            row, mask = _add_up_task(delta, common, size, crossed.mul_(elected), own)
            rows.append(row)
            if masks is not None:
                masks[index, low // 8 : -(-piece.stop // 8)] = pack_mask(mask.bool().view(-1)[: len(before)])
        columns = torch.stack(rows)
        totals = torch.stack([column.sum(-1) for column in (start.square_(), size, common.square_(), size.sign())])
        for position in range(columns.shape[-1]):
            sums.tasks.add_(columns[..., position])
            sums.totals.add_(totals[:, position])
            if (first + low // SUB_BLOCK + position) % GRAM_STEP == 0:
                here = slice(position * SUB_BLOCK, (position + 1) * SUB_BLOCK)
                deltas = [(weight[here] - before[here]).double() for weight in weights]
                for one, two in combinations_with_replacement(range(len(deltas)), 2):
                    sums.gram[one, two] += (deltas[one] * deltas[two]).sum()


def _fill_up(out: Tensor, values: Tensor) -> None:
    """Values to sub-blocks in fp64, and zeros after the last."""
    flat = out.view(-1)
    if flat.shape != values.shape:
        flat[len(values) :] = 0
        flat = flat[: len(values)]
    flat.copy_(values)


# Deltas: each task by the signs of its own difference from the base, and a scale for each tensor.
# Ŵ_t = W_0 + λ s_t with s_t = ±1 (BitDelta, https://arxiv.org/abs/2402.10193), or 0 where the difference is small.
# There is no unified model. With the direction s_t in the place of τ_uni and [s_t ≠ 0] in that of the mask, sums and
# rescalers are those of EMR-Merging; the least squares of a tensor, `tensor_l2`, are the mean magnitude of what is
# kept. In a file a direction has one plane of bits, where it is 1, or two, the second where it is not 0.
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


class Kernels(NamedTuple):
    """One way to compute on a type of device. Only compiled code reads and writes files itself (`run_files`)."""

    run_block: Callable[..., None] = run_block
    restore: Callable[..., None] = restore
    run_files: Callable[..., bool] | None = None
    # weights of one task, W_0 + λ s, computed in fp32 and rounded once; flat, but planes `[planes, bytes]`
    restore_directions: Callable[..., None] = lambda base, planes, scale, out: restore_into(
        base, base, planes, scale, len(planes), out
    )


@cache
def compiled_kernels() -> Kernels | None:
    """The kernels that numba compiles for the CPU, or None where they are not wanted or numba is missing."""
    if os.environ.get("HF_EXT_NO_NUMBA", "0") not in ("", "0"):
        return None
    # On the first call: numba takes a second.
    try:
        import hf_ext.fast.emr_blocks as fast
    except ImportError:
        return None
    return Kernels(fast.run_block, fast.restore, fast.run_files, fast.restore_directions)


def find_kernels(device: str) -> Kernels:
    """The fastest kernels that can be had for a type of device."""
    return (compiled_kernels() if device == "cpu" else None) or Kernels()
