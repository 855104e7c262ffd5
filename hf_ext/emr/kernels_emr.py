# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Compiled block kernels of EMR-Merging (arXiv 2405.17461), used by `ops_emr` where numba can be imported.

A tile of elements stays in the first-level cache: all tasks vote, the winner is elected and rounded, then each task is
masked and its sums are added to 8 lanes of fp64. The product of two fp32 numbers is exact in fp64, hence fused and
unfused multiply-adds agree to the bit. Tensors go in by address: one compilation serves all dtypes and
numbers of tasks. What lies in local files is read, merged and written in one call.
"""
# Numba's functions carry no types that mypy could read.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from numba import njit

from .kernels_files_emr import read_block, write_bytes
from .kernels_vectors_emr import (
    KINDS,
    LANES,
    TILE,
    absolute,
    as_float32,
    bits16,
    bits64,
    choose,
    compile_kernel,
    copy_vectors,
    float32,
    float64,
    high,
    load,
    low,
    multiply_add,
    ones,
    round_float32,
    size_of,
    spread,
    store,
    turn,
    word,
)
from .ops_emr import GRAM_STEP, SUB_BLOCK

_WORDS = TILE // LANES
# Work of a thread, in tiles of fp32: votes, highest, lowest and elected weight, a task and the base widened, |τ_uni|
# in fp64 (two), bits.
_TILES = 9


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
def _common(unified, base, vector, barrier, magnitude, bits, totals, counts, vectors):
    """τ_uni of the rounded weights; `barrier` is infinite where it is 0, so that nothing agrees with it there."""
    zero, wall = spread(np.float32(0)), spread(np.float32(np.inf))
    lanes = float64(totals.ctypes.data)
    squares, sums, sum_squares = load(lanes, 0), load(lanes, 1), load(lanes, 2)
    for i in range(vectors):
        weight, start = load(unified, i), load(base, i)
        step = weight - start
        moved = step != zero
        store(vector, i, step)
        store(barrier, i, choose(moved, zero, wall))
        store(bits, i, moved)
        store(bits, _WORDS + i, weight != zero)
        first, second = absolute(low(step)), absolute(high(step))
        store(magnitude, 2 * i, first)
        store(magnitude, 2 * i + 1, second)
        sums = sums + first + second
        sum_squares = multiply_add(second, second, multiply_add(first, first, sum_squares))
        first, second = low(start), high(start)
        squares = multiply_add(second, second, multiply_add(first, first, squares))
    store(lanes, 0, squares)
    store(lanes, 1, sums)
    store(lanes, 2, sum_squares)
    for i in range(vectors):
        counts[0] += ones(word(bits, i))


@njit
def _account(task, base, unified, vector, barrier, magnitude, mask, bits, lanes, vectors):
    """Mask a task and add to its sums. Turned by the sign of τ_uni, a δ that agrees is positive."""
    zero, nothing = spread(np.float32(0)), spread(0.0)
    sums, squares, masked_sums = load(lanes, 0), load(lanes, 1), load(lanes, 2)
    masked_squares, masked_dots, dots = load(lanes, 3), load(lanes, 4), load(lanes, 5)
    for i in range(vectors):
        weight = load(task, i)
        step = turn(weight - load(base, i), load(vector, i))
        agreed = step > load(barrier, i)
        store(mask, i, agreed)
        store(bits, 2 * _WORDS + i, step != zero)
        store(bits, 3 * _WORDS + i, turn(weight, load(unified, i)) < zero)
        delta, size = low(step), load(magnitude, 2 * i)
        masked = choose(low(agreed), size, nothing)
        sums = sums + absolute(delta)
        squares = multiply_add(delta, delta, squares)
        dots = multiply_add(delta, size, dots)
        masked_sums = masked_sums + masked
        masked_squares = multiply_add(masked, masked, masked_squares)
        masked_dots = multiply_add(delta, masked, masked_dots)
        delta, size = high(step), load(magnitude, 2 * i + 1)
        masked = choose(high(agreed), size, nothing)
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


@njit
def _count_words(mask, moved, used, stepped, turned, counts, start, stop):
    nonzero = agreed = differing = crossed = 0
    for i in range(start, stop):
        steps = word(stepped, i)
        nonzero += ones(steps)
        agreed += ones(word(mask, i))
        differing += ones(steps & word(moved, i))
        crossed += ones(word(turned, i) & word(used, i))
    counts[0] += nonzero
    counts[1] += agreed
    # Both are not 0: their signs agree or they oppose each other.
    counts[2] += differing - agreed
    counts[3] += crossed


@njit
def _count(mask, bits, counts, vectors):
    """Count what `_common` and `_account` have marked in a tile: #{δ≠0}, #{M}, #{δ·τ_uni<0}, #{W_uni·W_t<0}."""
    step = TILE // 8
    moved, used, stepped, turned = bits, bits + step, bits + 2 * step, bits + 3 * step
    whole = vectors // 4
    _count_words(bits64(mask), bits64(moved), bits64(used), bits64(stepped), bits64(turned), counts, 0, whole)
    _count_words(
        bits16(mask), bits16(moved), bits16(used), bits16(stepped), bits16(turned), counts, 4 * whole, vectors
    )


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
def _sample(addresses, kinds, vectors, work, deltas, pairs, gram):
    """Σ δ_i δ_j of a tile."""
    tasks = len(addresses) - 2
    base, scratch = as_float32(addresses[0], kinds[0], work, vectors), work + 4 * TILE
    step = deltas.shape[1] * 8
    start = deltas.ctypes.data
    for task in range(tasks):
        weights = as_float32(addresses[1 + task], kinds[1 + task], scratch, vectors)
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
    base = float32(as_float32(addresses[0], kinds[0], start, vectors))
    if tie >= 0:
        _fill(float32(total), 0.0, vectors)
        weights = as_float32(addresses[1], kinds[1], scratch, vectors)
        copy_vectors(float32(weights), float32(highest), vectors)
        copy_vectors(float32(weights), float32(lowest), vectors)
        for task in range(1, tasks + 1):
            weights = as_float32(addresses[task], kinds[task], scratch, vectors)
            _vote(float32(weights), base, float32(total), float32(highest), float32(lowest), vectors)
        _elect(float32(total), float32(highest), float32(lowest), base, tie, float32(elected), vectors)
        round_float32(elected, addresses[tasks + 1], kinds[tasks + 1], vectors)
    winner = float32(as_float32(addresses[tasks + 1], kinds[tasks + 1], elected, vectors))
    # The votes are counted: their tiles hold τ_uni and its barrier from here.
    vector, barrier = float32(total), float32(highest)
    bits = work + 32 * TILE
    _common(winner, base, vector, barrier, float64(magnitude), bits16(bits), totals, counts[tasks], vectors)
    for task in range(tasks):
        weights = float32(as_float32(addresses[1 + task], kinds[1 + task], scratch, vectors))
        mask, sums = masks + task * mask_row, float64(lanes[task].ctypes.data)
        _account(weights, base, winner, vector, barrier, float64(magnitude), bits16(mask), bits16(bits), sums, vectors)
        _count(mask, bits, counts[task], vectors)


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
    all_totals[3] += counts[tasks, 0]
    lanes[:] = 0.0
    totals[:] = 0.0
    counts[:] = 0


@njit
def _block(addresses, tail, kinds, masks, mask_row, tail_masks, tail_row, n, first, tie, work, sums, totals, gram):
    """[`run_block`] of `n` elements at `addresses`; the last n % 16, with zeros after them, at `tail`."""
    tasks = len(addresses) - 2
    lanes, counts, lane_totals = np.zeros((tasks, 6, 8)), np.zeros((tasks + 1, 4), np.int64), np.zeros((3, 8))
    deltas, pairs, pair_sums = np.empty((tasks, TILE)), np.zeros(8), np.zeros((tasks, tasks))
    here = np.empty_like(addresses)
    # Masks that nobody wants are written over each other.
    wanted = 1 if masks else 0
    masks, tail_masks = (masks, tail_masks) if wanted else (work + 33 * TILE, work + 33 * TILE)
    for start in range(0, n, SUB_BLOCK):
        stop = min(start + SUB_BLOCK, n)
        sampled = (first + start // SUB_BLOCK) % GRAM_STEP == 0
        for place in range(start, stop, TILE):
            vectors = min(TILE, stop - place) // LANES
            for item in range(tasks + 2):
                here[item] = addresses[item] + place * size_of(kinds[item])
            mask = masks + place // 8 * wanted
            _tile(here, kinds, mask, mask_row * wanted, tie, vectors, work, lanes, lane_totals, counts)
            if sampled:
                _sample(here, kinds, vectors, work, deltas, pairs, pair_sums)
        if stop % LANES:
            _tile(tail, kinds, tail_masks, tail_row * wanted, tie, 1, work, lanes, lane_totals, counts)
            if sampled:
                _sample(tail, kinds, 1, work, deltas, pairs, pair_sums)
        _end_sub_block(lanes, counts, lane_totals, sums, totals)
        if sampled:
            gram += pair_sums
            pair_sums[:] = 0.0


def _run(
    files, places, addresses, tail, kinds, masks, row, tail_masks, start, stop, step, tie, work, sums, totals, gram
):
    """Elements [start, stop) of a tensor: one block at `addresses`, or in blocks of `step` that go through there from
    and to `files` (base, tasks, unified, masks; in each the tensor is at its byte of `places`); False if one fails."""
    count, tail_row = len(kinds), 2
    for begin in range(start, stop, step):
        n = min(step, stop - begin)
        here = masks + (begin - start) // 8 if masks else 0
        if len(files):
            if not read_block(files, places, kinds, addresses, tail, begin, n):
                return False
            tail_masks, tail_row = here + n // LANES * 2, row
        first = begin // SUB_BLOCK
        _block(addresses, tail, kinds, here, row, tail_masks, tail_row, n, first, tie, work, sums, totals, gram)
        size = size_of(kinds[-1])
        if len(files) and not write_bytes(files[count - 1], places[count - 1] + begin * size, addresses[-1], n * size):
            return False
    for task in range(len(files) - count):
        place = places[count + task] + start // 8
        if not write_bytes(files[count + task], place, masks + task * row, (stop - start + 7) // 8):
            return False
    return True


@cache
def _kernel() -> Callable[..., bool]:
    whole, arrays = ", ".join(["int64"] * 8), ", ".join(["int64[::1]"] * 4)
    sums = "float64[:, ::1], float64[::1], float64[:, ::1]"
    return compile_kernel(_run, f"boolean(int32[::1], {arrays}, {whole}, {sums})")


def _call(files, weights, tail, masks, tail_masks, elements, tie, sums, totals, gram) -> bool:
    """The kernel with addresses in place of tensors."""
    work = torch.empty(_TILES, TILE)
    return _kernel()(
        np.array([file for file, _ in files], np.int32),
        np.array([place for _, place in files], np.int64),
        np.array([tensor.data_ptr() for tensor in weights]),
        np.array([tensor.data_ptr() for tensor in tail]),
        np.array([KINDS[tensor.dtype] for tensor in weights]),
        0 if masks is None else masks.data_ptr(),
        0 if masks is None else masks.stride(0),
        0 if tail_masks is None else tail_masks.data_ptr(),
        elements.start,
        elements.stop,
        elements.step,
        {None: -1, "zero": 0, "negative": 1}[tie],
        work.data_ptr(),
        sums.numpy(),
        totals.numpy(),
        gram.numpy(),
    )


def run_files(
    files: list[tuple[int, int]],
    buffers: list[torch.Tensor],
    masks: torch.Tensor | None,
    elements: range,
    sums: torch.Tensor,
    totals: torch.Tensor,
    gram: torch.Tensor,
    tie: str,
) -> bool:
    """`ops_emr.merge_block` of `elements` of a tensor that lies in local files, as many at once as their step.

    `files`: descriptor and first byte of the tensor for the base, each task, the unified weights and each mask.
    `buffers`: a block in the dtype of each but the masks; `masks` has room for those of all elements. Start and step
    are multiples of `SUB_BLOCK`. False if a file did not give or take everything: the sums are of no use then.
    """
    return _call(files, buffers, buffers, masks, None, elements, tie, sums, totals, gram)


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
    ends, tail_masks = weights, None
    if rest:
        ends = [torch.zeros(LANES, dtype=tensor.dtype) for tensor in weights]
        for end, tensor in zip(ends, weights, strict=True):
            end[:rest] = tensor[n - rest :]
        tail_masks = torch.empty(len(tasks), 2, dtype=torch.uint8)
    start = first * SUB_BLOCK
    _call([], weights, ends, masks, tail_masks, range(start, start + n, max(n, 1)), tie, sums, totals, gram)
    if tail_masks is not None:
        unified[n - rest :] = ends[-1][:rest]
        if masks is not None:
            first_byte, last_byte = n // LANES * 2, -(-n // 8)
            masks[:, first_byte:last_byte] = tail_masks[:, : last_byte - first_byte]
