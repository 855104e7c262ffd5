# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Fused kernels of EMR-Merging (arXiv 2405.17461) for CUDA, used by `ops` where HF_EXT_TRITON=1 asks for them.

Merging reads every weight twice, the second time mostly from the cache, and writes the unified weights and the packed
masks; restoring reads and writes each weight once. Multiplications and additions are not fused, so weights and masks
have the bits of the other paths. Sums are taken by tile, then by sub-block, then in the order of the sub-blocks.
"""
# Triton's functions carry no types that mypy could read.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("triton is not installed: torch computes instead") from error

from hf_ext.emr.arithmetic import GRAM_STEP, SUB_BLOCK, SUMS, TOTALS, Sums
from hf_ext.emr.arithmetic import run_block as plain

# Elements of a program.
_TILE = 1024
_RESTORE_TILE = 4096


@triton.jit
def _load(address, offsets, inside):
    return tl.load(address + offsets, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _round(values, address):
    """fp32 as `address` can store it: to nearest, ties to even. For bfloat16 in integers: the interpreter cuts off."""
    if address.dtype.element_ty == tl.bfloat16:
        word = values.to(tl.int32, bitcast=True)
        rounded = (word + 0x7FFF + ((word >> 16) & 1)) & -65536
        rounded = tl.where(values == values, rounded, 0x7FC00000)
        values = rounded.to(tl.float32, bitcast=True)
    return values.to(address.dtype.element_ty)


@triton.jit
def _task(table, index, like, offsets, inside):
    address = tl.load(table + index).to(tl.pointer_type(like.dtype.element_ty))
    return _load(address, offsets, inside)


@triton.jit
def _sign(values):
    return (values > 0).to(tl.int32) - (values < 0).to(tl.int32)


@triton.jit
def _total(values):
    return tl.sum(values.to(tl.float64), axis=0)


@triton.jit
def _elect(table, like, start, offsets, inside, tasks, tie: tl.constexpr):
    highest = _task(table, 0, like, offsets, inside)
    lowest = highest
    votes = highest - start
    for index in range(1, tasks):
        weight = _task(table, index, like, offsets, inside)
        votes += weight - start
        highest = tl.where(weight > highest, weight, highest)
        lowest = tl.where(weight < lowest, weight, lowest)
    negative = votes < 0
    if tie == 1:
        negative = negative | ((votes == 0) & (lowest < start))
    return tl.where(votes > 0, highest, tl.where(negative, lowest, start))


@triton.jit
def _store_bits(address, bits, tile, n, size: tl.constexpr):
    places = (1 << (tl.arange(0, size) % 8)).to(tl.int32)
    packed = tl.sum(tl.reshape(tl.where(bits, places, 0), [size // 8, 8]), axis=1)
    column = tile * (size // 8) + tl.arange(0, size // 8)
    tl.store(address + column, packed.to(tl.uint8), mask=column * 8 < n)


@triton.jit
def _merge(
    table,
    like,
    base,
    unified,
    masks,
    mask_row,
    parts,
    n,
    tasks,
    tie: tl.constexpr,
    masked: tl.constexpr,
    size: tl.constexpr,
):
    """One tile; `parts` [tiles, 10 N + 4] takes its sums. `tie`: 0 zero, 1 negative, -1 unified is given."""
    tile = tl.program_id(0).to(tl.int64)
    offsets = tile * size + tl.arange(0, size)
    inside = offsets < n
    start = _load(base, offsets, inside)
    if tie >= 0:
        elected = _round(_elect(table, like, start, offsets, inside, tasks, tie), unified)
        tl.store(unified + offsets, elected, mask=inside)
        winner = elected.to(tl.float32)
    else:
        winner = _load(unified, offsets, inside)
    common = winner - start
    wide = common.to(tl.float64)
    part = parts + tile * (10 * tasks + 4)
    for index in range(tasks):
        weight = _task(table, index, like, offsets, inside)
        delta = weight - start
        agreement = _sign(delta) * _sign(common)
        bits = agreement > 0
        if masked:
            _store_bits(masks + index * mask_row, bits, tile, n, size)
        step = delta.to(tl.float64)
        chosen = tl.where(bits, wide, 0.0)
        line = part + 10 * index
        tl.store(line, _total(tl.abs(step)))
        tl.store(line + 1, _total(step * step))
        tl.store(line + 2, _total(delta != 0))
        tl.store(line + 3, _total(bits))
        tl.store(line + 4, _total(tl.abs(chosen)))
        tl.store(line + 5, _total(chosen * chosen))
        tl.store(line + 6, _total(step * chosen))
        tl.store(line + 7, _total(step * wide))
        tl.store(line + 8, _total(agreement < 0))
        tl.store(line + 9, _total(_sign(weight) * _sign(winner) < 0))
    line, first = part + 10 * tasks, start.to(tl.float64)
    tl.store(line, _total(first * first))
    tl.store(line + 1, _total(tl.abs(wide)))
    tl.store(line + 2, _total(wide * wide))
    tl.store(line + 3, _total(common != 0))


@triton.jit
def _add_up(parts, out, tiles, columns, tiles_of_block, size: tl.constexpr):
    """out += the tiles of each sub-block in order, and the sub-blocks in order."""
    column = tl.program_id(0) * size + tl.arange(0, size)
    inside = column < columns
    total = tl.load(out + column, mask=inside, other=0.0)
    line = parts + column
    for start in range(0, tiles, tiles_of_block):
        block = tl.zeros([size], tl.float64)
        for _ in range(start, min(start + tiles_of_block, tiles)):
            block += tl.load(line, mask=inside, other=0.0)
            line += columns
        total += block
    tl.store(out + column, total, mask=inside)


@triton.jit
def _restore(base, unified, mask, scale, out, n, size: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    inside = offsets < n
    start = _load(base, offsets, inside)
    moved = start + scale * (_load(unified, offsets, inside) - start)
    bytes_ = tl.load(mask + offsets // 8, mask=inside, other=0).to(tl.int32)
    bits = (bytes_ >> (offsets % 8).to(tl.int32)) & 1
    tl.store(out + offsets, _round(tl.where(bits != 0, moved, start), out), mask=inside)


def run_block(
    base: Tensor, tasks: list[Tensor], unified: Tensor, masks: Tensor | None, sums: Sums, first: int, tie: str | None
) -> None:
    """`ops.merge_block`, or `mask_block` if `tie` is None; arguments are checked there."""
    if len({task.dtype for task in tasks}) > 1:
        # One pointer type for all.
        plain(base, tasks, unified, masks, sums, first, tie)
        return
    n, count = len(base), len(tasks)
    if n == 0:
        return
    tiles, columns = triton.cdiv(n, _TILE), len(SUMS) * count + len(TOTALS)
    # torch.tensor waits for the copy to the device.
    table = torch.tensor([task.data_ptr() for task in tasks], device=base.device)
    parts = torch.empty(tiles, columns, dtype=torch.float64, device=base.device)
    _merge[(tiles,)](
        table,
        tasks[0],
        base,
        unified,
        base if masks is None else masks,
        0 if masks is None else masks.stride(0),
        parts,
        n,
        count,
        tie={None: -1, "zero": 0, "negative": 1}[tie],
        masked=masks is not None,
        size=_TILE,
        enable_fp_fusion=False,
    )
    out = torch.cat([sums.tasks.flatten(), sums.totals])
    width = 64
    _add_up[(triton.cdiv(columns, width),)](parts, out, tiles, columns, SUB_BLOCK // _TILE, size=width)
    sums.tasks.copy_(out[: -len(TOTALS)].view_as(sums.tasks))
    sums.totals.copy_(out[-len(TOTALS) :])
    for place in range(-first % GRAM_STEP * SUB_BLOCK, n, GRAM_STEP * SUB_BLOCK):
        here = slice(place, place + SUB_BLOCK)
        deltas = torch.stack([task[here].float() - base[here].float() for task in tasks]).double()
        for index, delta in enumerate(deltas):
            sums.gram[index, index:] += (delta * deltas[index:]).sum(dim=1)


def restore(base: Tensor, unified: Tensor, mask: Tensor, scale: float, out: Tensor) -> None:
    """`ops.restore_block` of flat tensors; arguments are checked there."""
    if len(base):
        grid = (triton.cdiv(len(base), _RESTORE_TILE),)
        _restore[grid](base, unified, mask, scale, out, len(base), size=_RESTORE_TILE, enable_fp_fusion=False)
