# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Compiled block kernels of EMR-Merging (arXiv 2405.17461), used by `ops_emr` where numba can be imported.

A tile of elements stays in the first-level cache: all tasks vote, the winner is elected and rounded, then each task is
masked and its sums are added to 8 lanes of fp64. The product of two fp32 numbers is exact in fp64, hence fused and
unfused multiply-adds agree to the bit. Tensors go in by address: one compilation serves every dtype and number of tasks.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from numba import f4, f8, int64, njit, void

from .kernels_vectors_emr import (
    absolute,
    bfloat16,
    bits16,
    choose,
    count,
    counted,
    float16,
    float32,
    float64,
    high,
    load,
    low,
    multiply_add,
    spread,
    store,
    turn,
)

LANES = 16
TILE = 1024
SUB_BLOCK = 8192
GRAM_STEP = 16
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
# Work of a thread in fp32 tiles: base, sum of the votes, highest and lowest weight, elected weight; two for fp64.
_TILES = 8
# Below this a thread costs more than it saves.
_THREAD_ELEMENTS = 2**17


@njit
def _copy(weights, out, vectors):
    for i in range(vectors):
        store(out, i, load(weights, i))


@njit
def _vote(task, base, total, highest, lowest, vectors):
    for i in range(vectors):
        weight = load(task, i)
        store(total, i, load(total, i) + (weight - load(base, i)))
        best, worst = load(highest, i), load(lowest, i)
        store(highest, i, choose(weight > best, weight, best))
        store(lowest, i, choose(weight < worst, weight, worst))


@njit
def _elect(total, highest, lowest, base, negative_ties, unified, vectors):
    zero = spread(np.float32(0))
    ties = spread(np.float32(negative_ties)) > zero
    for i in range(vectors):
        votes, start, worst = load(total, i), load(base, i), load(lowest, i)
        negative = (votes < zero) | ((votes == zero) & (worst < start) & ties)
        store(unified, i, choose(votes > zero, load(highest, i), choose(negative, worst, start)))


@njit
def _common(unified, base, vector, barrier, magnitude, totals, counts, vectors):
    """τ_uni of the rounded weights; `barrier` is infinite where it is 0, so that nothing agrees with it there."""
    zero, wall = spread(np.float32(0)), spread(np.float32(np.inf))
    squares, sums, sum_squares = load(totals, 0), load(totals, 1), load(totals, 2)
    nonzero = spread(np.int32(0))
    for i in range(vectors):
        weight, start = load(unified, i), load(base, i)
        step = weight - start
        moved = step != zero
        store(vector, i, step)
        store(barrier, i, choose(moved, zero, wall))
        nonzero = count(nonzero, moved)
        first, second = absolute(low(step)), absolute(high(step))
        store(magnitude, 2 * i, first)
        store(magnitude, 2 * i + 1, second)
        sums = sums + first + second
        sum_squares = multiply_add(second, second, multiply_add(first, first, sum_squares))
        first, second = low(start), high(start)
        squares = multiply_add(second, second, multiply_add(first, first, squares))
    store(totals, 0, squares)
    store(totals, 1, sums)
    store(totals, 2, sum_squares)
    counts[3] += counted(nonzero)


@njit
def _account(task, base, elected, vector, barrier, magnitude, mask, lanes, counts, vectors):
    """Mask a task and add to its sums. Turned by the sign of τ_uni, a δ that agrees is positive."""
    zero, nothing = spread(np.float32(0)), spread(0.0)
    sums, squares, masked_sums = load(lanes, 0), load(lanes, 1), load(lanes, 2)
    masked_squares, masked_dots, dots = load(lanes, 3), load(lanes, 4), load(lanes, 5)
    nonzero = agreed = opposed = crossed = spread(np.int32(0))
    for i in range(vectors):
        weight, winner, wall = load(task, i), load(elected, i), load(barrier, i)
        step = turn(weight - load(base, i), load(vector, i))
        bits = step > wall
        store(mask, i, bits)
        nonzero = count(nonzero, step != zero)
        agreed = count(agreed, bits)
        opposed = count(opposed, step < zero - wall)
        crossed = count(crossed, (turn(weight, winner) < zero) & (winner != zero))
        delta, size = low(step), load(magnitude, 2 * i)
        masked = choose(low(bits), size, nothing)
        sums = sums + absolute(delta)
        squares = multiply_add(delta, delta, squares)
        dots = multiply_add(delta, size, dots)
        masked_sums = masked_sums + masked
        masked_squares = multiply_add(masked, masked, masked_squares)
        masked_dots = multiply_add(delta, masked, masked_dots)
        delta, size = high(step), load(magnitude, 2 * i + 1)
        masked = choose(high(bits), size, nothing)
        sums = sums + absolute(delta)
        squares = multiply_add(delta, delta, squares)
        dots = multiply_add(delta, size, dots)
        masked_sums = masked_sums + masked
        masked_squares = multiply_add(masked, masked, masked_squares)
        masked_dots = multiply_add(delta, masked, masked_dots)
    store(lanes, 0, sums)
    store(lanes, 1, squares)
    store(lanes, 2, masked_sums)
    store(lanes, 3, masked_squares)
    store(lanes, 4, masked_dots)
    store(lanes, 5, dots)
    counts[0] += counted(nonzero)
    counts[1] += counted(agreed)
    counts[2] += counted(opposed)
    counts[3] += counted(crossed)


@njit
def _differ(task, base, out, vectors):
    for i in range(vectors):
        step = load(task, i) - load(base, i)
        store(out, 2 * i, low(step))
        store(out, 2 * i + 1, high(step))


@njit
def _inner(first, second, lanes, vectors):
    total = load(lanes, 0)
    for i in range(2 * vectors):
        total = multiply_add(load(first, i), load(second, i), total)
    store(lanes, 0, total)


@njit
def _add_up(lanes):
    """Eight lanes in a fixed order."""
    return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]))


@njit
def _fill(out, number, vectors):
    for i in range(vectors):
        store(out, i, spread(np.float32(number)))


@njit
def _as_float32(address, kind, scratch, vectors):
    """Address of a tile's weights as fp32: where they are, or widened into `scratch`."""
    if kind == 0:
        return address
    if kind == 1:
        _copy(float16(address), float32(scratch), vectors)
    else:
        _copy(bfloat16(address), float32(scratch), vectors)
    return scratch


@njit
def _round(source, address, kind, vectors):
    if kind == 0:
        _copy(float32(source), float32(address), vectors)
    elif kind == 1:
        _copy(float32(source), float16(address), vectors)
    else:
        _copy(float32(source), bfloat16(address), vectors)


@njit
def _sample(addresses, kinds, base, scratch, vectors, deltas, pairs, gram):
    """Σ δ_i δ_j of a tile."""
    tasks = len(addresses) - 2
    step = deltas.shape[1] * 8
    start = deltas.ctypes.data
    for task in range(tasks):
        weights = _as_float32(addresses[1 + task], kinds[1 + task], scratch, vectors)
        _differ(float32(weights), float32(base), float64(start + task * step), vectors)
    for first in range(tasks):
        for second in range(first, tasks):
            pairs[:] = 0.0
            _inner(float64(start + first * step), float64(start + second * step), float64(pairs.ctypes.data), vectors)
            gram[first, second] += _add_up(pairs)


@njit
def _tile(addresses, kinds, masks, mask_row, tie, vectors, work, lanes, totals, counts):
    """All of a tile but the inner products. `addresses`: of the base, of each task and of the unified weights."""
    tasks = len(addresses) - 2
    total, highest, lowest, elected = work, work + 4 * TILE, work + 8 * TILE, work + 12 * TILE
    scratch, start, magnitude = work + 16 * TILE, work + 20 * TILE, work + 24 * TILE
    base = float32(_as_float32(addresses[0], kinds[0], start, vectors))
    if tie >= 0:
        _fill(float32(total), 0.0, vectors)
        weights = _as_float32(addresses[1], kinds[1], scratch, vectors)
        _copy(float32(weights), float32(highest), vectors)
        _copy(float32(weights), float32(lowest), vectors)
        for task in range(1, tasks + 1):
            weights = _as_float32(addresses[task], kinds[task], scratch, vectors)
            _vote(float32(weights), base, float32(total), float32(highest), float32(lowest), vectors)
        _elect(float32(total), float32(highest), float32(lowest), base, tie, float32(elected), vectors)
        _round(elected, addresses[tasks + 1], kinds[tasks + 1], vectors)
    winner = float32(_as_float32(addresses[tasks + 1], kinds[tasks + 1], elected, vectors))
    # The votes are counted: their tiles hold τ_uni and its barrier from here.
    vector, barrier = float32(total), float32(highest)
    _common(winner, base, vector, barrier, float64(magnitude), float64(totals.ctypes.data), counts[tasks], vectors)
    for task in range(tasks):
        weights = _as_float32(addresses[1 + task], kinds[1 + task], scratch, vectors)
        _account(
            float32(weights),
            base,
            winner,
            vector,
            barrier,
            float64(magnitude),
            bits16(masks + task * mask_row),
            float64(lanes[task].ctypes.data),
            counts[task],
            vectors,
        )


@njit
def _end_sub_block(lanes, counts, totals, sums, all_totals):
    tasks = len(lanes)
    for task in range(tasks):
        for column, lane in ((0, 0), (1, 1), (4, 2), (5, 3), (6, 4), (7, 5)):
            sums[task, column] += _add_up(lanes[task, lane])
        for column, place in ((2, 0), (3, 1), (8, 2), (9, 3)):
            sums[task, column] += counts[task, place]
    for column in range(3):
        all_totals[column] += _add_up(totals[column])
    all_totals[3] += counts[tasks, 3]
    lanes[:] = 0.0
    totals[:] = 0.0
    counts[:] = 0


def _block(addresses, tail, kinds, masks, mask_row, tail_masks, n, first, tie, work, sums, totals, gram):
    """[`run_block`] of `n` elements at `addresses`; the last n % 16, with zeros after them, at `tail`."""
    tasks = len(addresses) - 2
    lanes, counts = np.zeros((tasks, 6, 8)), np.zeros((tasks + 1, 4), np.int64)
    lane_totals, pairs = np.zeros((3, 8)), np.zeros(8)
    deltas, pair_sums = np.empty((tasks, TILE)), np.zeros((tasks, tasks))
    unmasked = np.empty(TILE // 8, np.uint8)
    here = np.empty_like(addresses)
    for start in range(0, n, SUB_BLOCK):
        stop = min(start + SUB_BLOCK, n)
        sampled = (first + start // SUB_BLOCK) % GRAM_STEP == 0
        for low_end in range(start, stop, TILE):
            whole = min(TILE, stop - low_end) // LANES
            for part in range(2):
                vectors = whole if part == 0 else 1
                if part == 1 and (stop - low_end >= TILE or stop % LANES == 0) or vectors == 0:
                    continue
                for item in range(tasks + 2):
                    size = 4 if kinds[item] == 0 else 2
                    here[item] = addresses[item] + low_end * size if part == 0 else tail[item]
                if mask_row == 0:
                    bits, row = unmasked.ctypes.data, 0
                elif part == 0:
                    bits, row = masks + low_end // 8, mask_row
                else:
                    bits, row = tail_masks, 2
                _tile(here, kinds, bits, row, tie, vectors, work, lanes, lane_totals, counts)
                if sampled:
                    base = _as_float32(here[0], kinds[0], work, vectors)
                    _sample(here, kinds, base, work + 4 * TILE, vectors, deltas, pairs, pair_sums)
        _end_sub_block(lanes, counts, lane_totals, sums, totals)
        if sampled:
            gram += pair_sums
            pair_sums[:] = 0.0


_BLOCK = void(
    int64[::1],
    int64[::1],
    int64[::1],
    int64,
    int64,
    int64,
    int64,
    int64,
    int64,
    int64,
    f8[:, ::1],
    f8[::1],
    f8[:, ::1],
)


@cache
def _compile(function, signature):
    """Compile once in a lifetime; if the cache of numba cannot be read or written, once in this process."""
    try:
        return njit(signature, nogil=True, cache=True)(function)
    except Exception:  # Whatever is wrong with the cache: without it the same error comes again if it is not that.
        return njit(signature, nogil=True)(function)


def run_block(
    base: torch.Tensor,
    tasks: list[torch.Tensor],
    unified: torch.Tensor,
    masks: torch.Tensor | None,
    sums: torch.Tensor,
    totals: torch.Tensor,
    gram: torch.Tensor,
    first: int,
    tie: str | None,
) -> None:
    """`ops_emr.merge_block`, or `mask_block` if `tie` is None; arguments are checked there."""
    weights = [base, *tasks, unified]
    n = len(base)
    rest = n % LANES
    addresses = np.array([tensor.data_ptr() for tensor in weights])
    kinds = np.array([_KINDS[tensor.dtype] for tensor in weights])
    tail, tail_masks, work = addresses, None, torch.empty(_TILES, TILE)
    if rest:
        ends = [torch.zeros(LANES, dtype=tensor.dtype) for tensor in weights]
        for end, tensor in zip(ends, weights, strict=True):
            end[:rest] = tensor[n - rest :]
        tail, tail_masks = np.array([end.data_ptr() for end in ends]), torch.empty(len(tasks), 2, dtype=torch.uint8)
    _compile(_block, _BLOCK)(
        addresses,
        tail,
        kinds,
        0 if masks is None else masks.data_ptr(),
        0 if masks is None else masks.stride(0),
        0 if tail_masks is None else tail_masks.data_ptr(),
        n,
        first,
        {None: -1, "zero": 0, "negative": 1}[tie],
        work.data_ptr(),
        sums.numpy(),
        totals.numpy(),
        gram.numpy(),
    )
    if rest:
        unified[n - rest :] = ends[-1][:rest]
        if masks is not None:
            length = -(-rest // 8)
            masks[:, (n - rest) // 8 : (n - rest) // 8 + length] = tail_masks[:, :length]


@njit
def _restore_tile(base, unified, mask, scale, out, vectors):
    factor = spread(scale)
    for i in range(vectors):
        start = load(base, i)
        moved = start + factor * (load(unified, i) - start)
        store(out, i, choose(load(mask, i), moved, start))


def _restore(base, base_kind, unified, unified_kind, mask, scale, out, out_kind, work, start, stop):
    """Elements from `start`, a multiple of 16, to `stop`; whole vectors only."""
    base_size, unified_size = 4 if base_kind == 0 else 2, 4 if unified_kind == 0 else 2
    out_size = 4 if out_kind == 0 else 2
    alike = base_kind == unified_kind and base_kind == out_kind
    for place in range(start, stop, TILE):
        vectors = (min(TILE, stop - place)) // LANES
        first, second, target = base + place * base_size, unified + place * unified_size, out + place * out_size
        bits = bits16(mask + place // 8)
        if alike and base_kind == 0:
            _restore_tile(float32(first), float32(second), bits, scale, float32(target), vectors)
        elif alike and base_kind == 1:
            _restore_tile(float16(first), float16(second), bits, scale, float16(target), vectors)
        elif alike:
            _restore_tile(bfloat16(first), bfloat16(second), bits, scale, bfloat16(target), vectors)
        else:
            first = _as_float32(first, base_kind, work, vectors)
            second = _as_float32(second, unified_kind, work + 4 * TILE, vectors)
            _restore_tile(float32(first), float32(second), bits, scale, float32(work + 8 * TILE), vectors)
            _round(work + 8 * TILE, target, out_kind, vectors)


_RESTORE = void(int64, int64, int64, int64, int64, f4, int64, int64, int64, int64, int64)


@cache
def _threads(process: int, count: int) -> ThreadPoolExecutor:
    """Threads of this process: after a fork those of the parent are gone."""
    return ThreadPoolExecutor(count, thread_name_prefix="hf-ext-restore")


def restore(base: torch.Tensor, unified: torch.Tensor, mask: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """`ops_emr.restore_block` of flat tensors on the CPU; arguments are checked there."""
    kernel = _compile(_restore, _RESTORE)
    n = len(base)
    whole = n // LANES * LANES
    arguments = (
        base.data_ptr(),
        _KINDS[base.dtype],
        unified.data_ptr(),
        _KINDS[unified.dtype],
        mask.data_ptr(),
        scale,
        out.data_ptr(),
        _KINDS[out.dtype],
    )
    count = max(1, min(torch.get_num_threads(), whole // _THREAD_ELEMENTS))
    share = max(1, -(-whole // count // TILE)) * TILE
    edges = [(start, min(start + share, whole)) for start in range(0, whole, share)]
    work = torch.empty(len(edges), 3, TILE)
    jobs = [(*arguments, row.data_ptr(), *edge) for row, edge in zip(work, edges, strict=True)]
    if jobs:
        others = [_threads(os.getpid(), count - 1).submit(kernel, *job) for job in jobs[1:]]
        kernel(*jobs[0])
        for other in others:
            other.result()
    if n > whole:
        ends = [torch.zeros(LANES, dtype=tensor.dtype) for tensor in (base, unified, out)]
        for end, tensor in zip(ends, (base, unified, out), strict=True):
            end[: n - whole] = tensor[whole:]
        restore(ends[0], ends[1], F.pad(mask[whole // 8 :][:2], (0, 1)), scale, ends[2])
        out[whole:] = ends[2][: n - whole]
