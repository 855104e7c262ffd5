# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""SemanIR on the CPU (arXiv 2405.20008): exact selection of the keys, and attention that reads only those.

The kernels are compiled by numba at their first call and kept in its cache; each call shares its work among as many
threads as torch has.
"""
# Numba's functions carry no types that mypy could read.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

try:
    import numpy as np
    from numba import njit
except ImportError as error:
    raise ImportError("numba is not installed: torch computes instead") from error

from .kernels_vectors_semanir import (
    LANES,
    add,
    at_least,
    choose,
    choose_ints,
    compress,
    dots,
    equal,
    exp,
    larger,
    larger_ints,
    largest,
    largest_int,
    load,
    load_ints,
    load_some,
    look_up,
    multiply,
    multiply_add,
    ones,
    ordered,
    same,
    smaller_ints,
    smallest_int,
    spread,
    spread_int,
    store,
    store_ints,
    store_some,
    subtract,
    total,
    weighted,
)

_dots16, _dots32, _dots48, _dots64 = dots
_weighted16, _weighted32, _weighted48, _weighted64 = weighted
MAX_HEAD_DIM = 64
_LEAST, _MOST = -(2**31), 2**31 - 1
_NOTHING = np.float32(-np.inf)


@njit
def _aligned(array):
    """Address of a vector in an array that has room for one more."""
    return (array.ctypes.data + 63) & ~63


@njit
def _order(scores, keys, regions, number, blocks, tokens):
    """Write integers in the order of the scores, the least for illegal keys: how many are legal, and their range."""
    least = spread_int(np.int32(_LEAST))
    low, high = spread_int(np.int32(_MOST)), least
    legal = 0
    for b in range(blocks):
        left = tokens - LANES * b
        usable = 0xFFFF if left >= LANES else (1 << left) - 1
        value = load(scores, LANES * b) if left >= LANES else load_some(scores, LANES * b, left)
        if regions != 0:
            usable &= same(regions, LANES * b, number)
        key = choose_ints(usable, ordered(value), least)
        store_ints(keys, LANES * b, key)
        low = smaller_ints(low, choose_ints(usable, key, low))
        high = larger_ints(high, key)
        legal += ones(usable)
    return legal, np.int64(smallest_int(low)), np.int64(largest_int(high))


@njit
def _threshold(keys, blocks, low, high, legal, wanted):
    """Largest threshold that `wanted` keys reach, and how many of those that equal it are too many."""
    # `low` is reached by enough keys, the end of the range by too few.
    end, reaching = high + 1, legal
    while end - low > 1:
        middle = (low + end) >> 1
        bound = spread_int(np.int32(middle))
        count = 0
        for b in range(blocks):
            count += ones(at_least(load_ints(keys, LANES * b), bound))
        if count == wanted:
            return middle, 0
        if count > wanted:
            low, reaching = middle, count
        else:
            end = middle
    return low, reaching - wanted


@njit
def _write_row(keys, threshold, surplus, row, blocks):
    """Bits of the keys that reach the threshold, without the last `surplus` of those that equal it."""
    bound = spread_int(np.int32(threshold))
    for b in range(blocks - 1, -1, -1):
        key = load_ints(keys, LANES * b)
        word = at_least(key, bound)
        if surplus > 0:
            tied = equal(key, bound)
            for lane in range(LANES - 1, -1, -1):
                if surplus > 0 and tied >> lane & 1:
                    word &= ~(1 << lane)
                    surplus -= 1
        row[2 * b] = word & 255
        if 2 * b + 1 < len(row):
            row[2 * b + 1] = word >> 8


def _select(scores, regions, top_k, include_self, bits, start, end):
    """Bits of the best keys of some rows of all windows' scores [W, N, N]."""
    tokens = scores.shape[2]
    blocks = (tokens + LANES - 1) // LANES
    room = np.empty(LANES * blocks + LANES, np.int32)
    padded = np.zeros(LANES * blocks, np.uint8)
    keys = _aligned(room)
    many = len(regions) > 0
    window = -1
    for item in range(start, end):
        i = item % tokens
        if item // tokens != window:
            window = item // tokens
            if many:
                padded[:tokens] = regions[window % len(regions)]
        where = padded.ctypes.data if many else 0
        legal, low, high = _order(scores[window, i].ctypes.data, keys, where, padded[i], blocks, tokens)
        wanted = min(top_k, legal)
        if include_self:
            room[(keys - room.ctypes.data) // 4 + i] = _MOST
        if wanted == legal:
            threshold, surplus = np.int64(_LEAST + 1), 0
        elif include_self and wanted == 1:
            threshold, surplus = np.int64(_MOST), 0
        else:
            threshold, surplus = _threshold(keys, blocks, low, high, legal, wanted)
        _write_row(keys, threshold, surplus, bits[window, i], blocks)


@njit
def _norm_scale(row, vectors, dim, length):
    """What a row is multiplied by to have a length."""
    squares = spread(np.float32(0))
    for v in range(vectors):
        part = load_some(row, LANES * v, dim - LANES * v)
        squares = multiply_add(part, part, squares)
    return spread(length / np.sqrt(max(total(squares), np.float32(1e-24))))


@njit
def _pack_row(row, out, vectors, dim, scale):
    for v in range(vectors):
        store(out, LANES * v, multiply(load_some(row, LANES * v, dim - LANES * v), scale))


@njit
def _list_keys(bits, columns, numbers, backs, tokens, room):
    """Keys of a token and their offsets in the table, filled up with the last to whole vectors: how many there are."""
    count = 0
    for b in range((tokens + LANES - 1) // LANES):
        word = np.int64(bits[2 * b])
        if 2 * b + 1 < len(bits):
            word |= np.int64(bits[2 * b + 1]) << 8
        if word:
            compress(numbers, count, load_ints(columns, LANES * b), word)
            compress(backs, count, load_ints(columns, room + LANES * b), word)
            count += ones(word)
    return count


@njit
def _attend_row(query, keys, values, numbers, backs, count, table, base, logits, sums, vectors):
    """Softmax over the listed keys of one query: `sums` has the weighted values, the result is the sum of weights."""
    high = spread(_NOTHING)
    for b in range(0, count, LANES):
        listed = numbers + 4 * b
        if vectors == 2:
            logit = _dots32(query, keys, listed)
        elif vectors == 1:
            logit = _dots16(query, keys, listed)
        elif vectors == 3:
            logit = _dots48(query, keys, listed)
        else:
            logit = _dots64(query, keys, listed)
        logit = add(logit, look_up(table, base, load_ints(backs, b)))
        if count - b < LANES:
            logit = choose((1 << (count - b)) - 1, logit, spread(_NOTHING))
        store(logits, b, logit)
        high = larger(high, logit)
    high = spread(largest(high))
    for v in range(2 * vectors):
        store(sums, LANES * v, spread(np.float32(0)))
    weight = spread(np.float32(0))
    for b in range(0, count, LANES):
        listed, weights = numbers + 4 * b, logits + 4 * b
        part = exp(subtract(load(logits, b), high))
        store(logits, b, part)
        weight = add(weight, part)
        if vectors == 2:
            _weighted32(sums, weights, values, listed)
        elif vectors == 1:
            _weighted16(sums, weights, values, listed)
        elif vectors == 3:
            _weighted48(sums, weights, values, listed)
        else:
            _weighted64(sums, weights, values, listed)
    return total(weight)


def _gather(query, key, value, temperature, table, bits, width, window_size, out, start, end):
    """Attention of some pairs of window and head. Result [W, N, heads, head_dim]."""
    heads, tokens, dim = query.shape[1:]
    vectors = (dim + LANES - 1) // LANES
    padded = LANES * vectors
    room = (tokens + LANES - 1) // LANES * LANES
    matrices = np.empty(2 * room * padded + LANES, np.float32)
    keys = _aligned(matrices)
    values = keys + 4 * room * padded
    scratch = np.empty(3 * padded + room + LANES, np.float32)
    vector = _aligned(scratch)
    sums, logits = vector + 4 * padded, vector + 12 * padded
    columns = np.zeros(2 * room, np.int32)
    span = 2 * window_size - 1
    for j in range(tokens):
        columns[j], columns[room + j] = j, j // width * span + j % width
    # Keys are listed once for all heads of a window.
    most = 0
    lists = np.zeros((1, 2, LANES), np.int32)
    counts = np.zeros(tokens, np.int64)
    listed = -1
    for item in range(start, end):
        w, head = item // heads, item % heads
        if w != listed:
            listed = w
            needed = 0
            for i in range(tokens):
                counts[i] = 0
                for byte in bits[w, i]:
                    counts[i] += ones(np.int64(byte))
                needed = max(needed, counts[i])
            if needed > most:
                most = needed
                lists = np.zeros((tokens, 2, (most + LANES - 1) // LANES * LANES), np.int32)
            for i in range(tokens):
                lists[i, :, max(counts[i] - LANES, 0) :] = 0
                _list_keys(
                    bits[w, i], columns.ctypes.data, lists[i, 0].ctypes.data, lists[i, 1].ctypes.data, tokens, room
                )
        for j in range(tokens):
            row = key[w, head, j].ctypes.data
            _pack_row(row, keys + 4 * padded * j, vectors, dim, _norm_scale(row, vectors, dim, np.float32(1)))
            row = value[w, head, j].ctypes.data
            _pack_row(row, values + 4 * padded * j, vectors, dim, spread(np.float32(1)))
        biases = table[head].ctypes.data
        middle = (window_size - 1) * span + window_size - 1
        for i in range(tokens):
            row = query[w, head, i].ctypes.data
            _pack_row(row, vector, vectors, dim, _norm_scale(row, vectors, dim, temperature[head]))
            weight = _attend_row(
                vector, keys, values, lists[i, 0].ctypes.data, lists[i, 1].ctypes.data, counts[i], biases,
                middle + columns[room + i], logits, sums, vectors,
            )  # fmt: skip
            scale = spread(np.float32(1) / weight)
            result = out[w, i, head].ctypes.data
            for v in range(vectors):
                both = add(load(sums, 2 * LANES * v), load(sums, 2 * LANES * v + LANES))
                store_some(result, LANES * v, multiply(both, scale), dim - LANES * v)
    # Numba frees an array after its last use, and these are used by address.
    matrices[0] = scratch[0]


_SIGNATURES = {
    _select: "void(float32[:, :, ::1], uint8[:, ::1], int64, boolean, uint8[:, :, ::1], int64, int64)",
    _gather: "void(float32[:, :, :, :], float32[:, :, :, :], float32[:, :, :, :], float32[::1], float32[:, ::1], "
    "uint8[:, :, ::1], int64, int64, float32[:, :, :, ::1], int64, int64)",
}


@cache
def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    """Machine code of a kernel: from numba's cache, or compiled and put there, or only compiled."""
    try:
        return njit(_SIGNATURES[function], nogil=True, cache=True)(function)
    except Exception:
        # No folder can be written, the disk is full: do without. What is wrong with the kernel is raised again.
        return njit(_SIGNATURES[function], nogil=True)(function)


@cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Threads of a process: a fork has none of its parent's."""
    return ThreadPoolExecutor(threads, thread_name_prefix="semanir")


def _share(function: Callable[..., None], items: int, *arguments: Any) -> None:
    """Run a kernel on all items, shared among the threads that torch uses."""
    kernel = _compiled(function)
    threads = min(torch.get_num_threads(), items)
    if threads == 1:
        return kernel(*arguments, 0, items)
    edges = [items * part // threads for part in range(threads + 1)]
    pool = _pool(threads, os.getpid())
    running = [pool.submit(kernel, *arguments, *edges[part : part + 2]) for part in range(threads)]
    for future in running:
        future.result()
    return None


def select_keys(scores: torch.Tensor, regions: torch.Tensor | None, top_k: int, include_self: bool) -> torch.Tensor:
    """
    Bits of the `top_k` highest scores of each row; of equal ones the first.

    Args:
        scores (`torch.Tensor` of shape `(W, N, N)`): Similarities, float32 on the CPU.
        regions (`torch.ByteTensor` of shape `(windows of an image, N)`, *optional*): See [`ops_semanir.key_regions`].
        top_k (`int`): Keys per token.
        include_self (`bool`): Whether the diagonal comes first.

    Returns:
        `torch.ByteTensor` of shape `(W, N, ceil(N / 8))`: As in [`ops_semanir.Dictionary`].
    """
    windows, tokens = scores.shape[:2]
    bits = torch.empty(windows, tokens, -(-tokens // 8), dtype=torch.uint8)
    numbers = np.empty((0, tokens), np.uint8) if regions is None else regions.numpy()
    _share(_select, windows * tokens, scores.numpy(), numbers, top_k, include_self, bits.numpy())
    return bits


def native_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    temperature: torch.Tensor,
    table: torch.Tensor,
    window: tuple[int, int],
    window_size: int,
    bits: torch.Tensor,
) -> torch.Tensor:
    """
    Attention that reads the chosen keys and values only. Without gradient.

    Args:
        query, key, value (`torch.Tensor` of shape `(W, heads, N, head_dim)`):
            Projections, float32 on the CPU, of any layout whose last dimension lies together.
        temperature (`torch.Tensor` of shape `(heads,)`): tau of each head, float32.
        table (`torch.Tensor` of shape `(heads, (2 * window_size - 1)^2)`): Position biases, float32.
        window (`tuple[int, int]`): Height and width of a window.
        window_size (`int`): Side of the largest window.
        bits (`torch.ByteTensor` of shape `(W, N, ceil(N / 8))`): Keys of each token, at least one.

    Returns:
        `torch.Tensor` of shape `(W, heads, N, head_dim)`: A view of `(W, N, heads, head_dim)`.
    """
    windows, heads, tokens, dim = query.shape
    out = torch.empty(windows, tokens, heads, dim)
    given = [(part if part.stride(-1) == 1 else part.contiguous()).numpy() for part in (query, key, value)]
    arrays = (temperature.contiguous().numpy(), table.contiguous().numpy(), bits.contiguous().numpy())
    _share(_gather, windows * heads, *given, *arrays, window[1], window_size, out.numpy())
    return out.transpose(1, 2)
