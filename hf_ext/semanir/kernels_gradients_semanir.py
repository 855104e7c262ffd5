# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Gradients of SemanIR's key-semantic attention on the CPU, for numba to compile: logits are computed again.

With P the weights, s their sums before the division and G = dO / s: dV = (sP)^T G, dS = sP (G V^T - D / s) with
D = rowsum(P dP), dQ = dS K, dK = dS^T Q. A few queries at a time: nothing of N x N is stored. Needs numba.
"""
# Numba's functions carry no types that mypy could read.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

try:
    import numpy as np
    from numba import njit
except ImportError as error:
    raise ImportError("numba is not installed: torch computes instead") from error

from .kernels_attention_semanir import aligned, multiply_tiles, norm_scale, pack_row, softmax_row
from .kernels_vectors_semanir import (
    LANES,
    TILE_ROWS,
    add,
    load,
    multiply,
    multiply_add,
    spread,
    store,
    store_anywhere,
    store_some,
    subtract,
    tile32,
    total,
    update16,
    update32,
)


@njit
def _update_rows(left, stride, right, width, depth, out, vectors):
    """Add the product of 12 turned rows with 12 rows of `vectors` vectors."""
    for v in range(0, vectors - 1, 2):
        update32(left, stride, right + 64 * v, width, depth, out + 64 * v)
    if vectors % 2:
        update16(left, stride, right + 64 * (vectors - 1), width, depth, out + 64 * (vectors - 1))


@njit
def _logit_gradients(weights, gradients, weight, slopes, places, first, tokens, width, turned):
    """Turn a row of dP / s into dS, and add it to the gradients of the turned table."""
    blocks = (tokens + LANES - 1) // LANES
    inner = spread(np.float32(0))
    for b in range(blocks):
        inner = multiply_add(load(weights, LANES * b), load(gradients, LANES * b), inner)
    inner = spread(total(inner) / weight)
    for b in range(blocks):
        slope = multiply(load(weights, LANES * b), subtract(load(gradients, LANES * b), inner))
        store(gradients, LANES * b, slope)
        if width % LANES == 0:
            place = first + LANES * b // width * (turned - width) + LANES * b
            base = slopes.ctypes.data
            store_anywhere(base, place, add(load(base, place), slope))


@njit
def _add_to_table(row, slopes, places, first, tokens):
    """Add a row of dS to the gradients of the turned table, one by one."""
    for j in range(tokens):
        slopes[first - places[j]] += row[j]


@njit
def _unscale(row, slope, out, vectors, dim, length):
    """Gradient of a row x, given that of y = x length / |x|, which it overwrites; returns the gradient of length."""
    squares, along = spread(np.float32(0)), spread(np.float32(0))
    for v in range(vectors):
        given = load(row, LANES * v)
        squares = multiply_add(given, given, squares)
        along = multiply_add(given, load(slope, LANES * v), along)
    norm, inner = total(squares), total(along)
    scale = length / np.sqrt(max(norm, np.float32(1e-24)))
    back = spread(-inner / norm if norm > np.float32(1e-24) else np.float32(0))
    for v in range(vectors):
        turned = multiply_add(load(row, LANES * v), back, load(slope, LANES * v))
        store_some(out, LANES * v, multiply(turned, spread(scale)), dim - LANES * v)
    return inner * scale / length


def attend_backward(
    query, key, value, temperature, table, bits, gradient, width, window_size, parts,
    query_slope, key_slope, value_slope, temperature_slope, table_slope, start, end,
):  # fmt: skip
    """
    Gradients for some pairs of window and head: of query, key and value [W, N, heads, head_dim], of the temperature
    [W, heads] and of the turned table [W, heads, (2w - 1)^2], from that of the result [W, heads, N, head_dim].
    """
    heads, tokens, dim = query.shape[1:]
    vectors = len(parts)
    padded = LANES * vectors
    room = (tokens + 2 * LANES - 1) // (2 * LANES) * (2 * LANES)
    stride = room + LANES
    unit = np.float32(1)
    matrices = np.zeros(room * 2 * dim + 3 * room * padded + TILE_ROWS * (2 * stride + 3 * padded) + LANES, np.float32)
    key_panels = aligned(matrices)
    value_panels = key_panels + 4 * room * dim
    keys = value_panels + 4 * room * dim
    key_sums, value_sums = keys + 4 * room * padded, keys + 8 * room * padded
    weights = keys + 12 * room * padded
    slopes = weights + 4 * TILE_ROWS * stride
    queries = slopes + 4 * TILE_ROWS * stride
    results, sums = queries + 4 * TILE_ROWS * padded, queries + 8 * TILE_ROWS * padded
    offset = (key_panels - matrices.ctypes.data) // 4
    row = np.zeros(padded + LANES, np.float32)
    packed = aligned(row)
    skipped = (packed - row.ctypes.data) // 4
    span = 2 * window_size - 1
    places = np.zeros(room, np.int32)
    for j in range(tokens):
        places[j] = -(j // width * span + j % width)
    last = span * span - 1
    turned = np.empty(span * span + LANES, np.float32)
    totals = np.empty(TILE_ROWS, np.float32)
    masked = len(bits) > 0
    nothing = np.empty(0, np.uint8)
    zero = spread(np.float32(0))
    for item in range(start, end):
        w, head = item // heads, item % heads
        for x in range(span * span):
            turned[x] = table[head, last - x]
        for j in range(tokens):
            panel = offset + j // 32 * 32 * dim + j % 32
            pack_row(value[w, head, j].ctypes.data, packed, vectors, dim, spread(unit))
            for c in range(dim):
                matrices[panel + room * dim + 32 * c] = row[skipped + c]
            source = key[w, head, j].ctypes.data
            pack_row(source, packed, vectors, dim, norm_scale(source, vectors, dim, unit))
            for c in range(dim):
                matrices[panel + 32 * c] = row[skipped + c]
            for v in range(vectors):
                place = padded * j + LANES * v
                store(keys, place, load(packed, LANES * v))
                store(key_sums, place, zero)
                store(value_sums, place, zero)
        tau = temperature[head]
        tau_slope = np.float32(0)
        for begin in range(0, tokens, TILE_ROWS):
            rows = min(TILE_ROWS, tokens - begin)
            for i in range(TILE_ROWS):
                source = query[w, head, min(begin + i, tokens - 1)].ctypes.data
                scale = norm_scale(source, vectors, dim, tau) if i < rows else zero
                pack_row(source, queries + 4 * padded * i, vectors, dim, scale)
            for j in range(0, room, 32):
                tile32(queries, padded, key_panels + 4 * j * dim, 32, dim, weights + 4 * j, stride)
            for i in range(TILE_ROWS):
                token = min(begin + i, tokens - 1)
                first = last - ((token // width + window_size - 1) * span + token % width + window_size - 1)
                chosen = bits[w, token] if masked else nothing
                weight = softmax_row(
                    weights + 4 * stride * i, chosen, masked, turned.ctypes.data, places.ctypes.data, first, tokens,
                    width, span,
                )  # fmt: skip
                totals[i] = weight
                scale = spread(unit / weight) if i < rows else zero
                pack_row(gradient[w, head, token].ctypes.data, results + 4 * padded * i, vectors, dim, scale)
            for j in range(0, room, 32):
                tile32(results, padded, value_panels + 4 * j * dim, 32, dim, slopes + 4 * j, stride)
            _update_rows(weights, stride, results, padded, tokens, value_sums, vectors)
            for i in range(rows):
                token = begin + i
                first = last - ((token // width + window_size - 1) * span + token % width + window_size - 1)
                slope_row = slopes + 4 * stride * i
                _logit_gradients(
                    weights + 4 * stride * i, slope_row, totals[i], table_slope[w, head], places, first, tokens, width,
                    span,
                )  # fmt: skip
                if width % LANES:
                    begun = (slope_row - matrices.ctypes.data) // 4
                    _add_to_table(matrices[begun : begun + tokens], table_slope[w, head], places, first, tokens)
            _update_rows(slopes, stride, queries, padded, tokens, key_sums, vectors)
            multiply_tiles(slopes, stride, keys, padded, tokens, sums, padded, vectors)
            for i in range(rows):
                token = begin + i
                pack_row(query[w, head, token].ctypes.data, packed, vectors, dim, spread(unit))
                out = query_slope[w, token, head].ctypes.data
                tau_slope += _unscale(packed, sums + 4 * padded * i, out, vectors, dim, tau)
        temperature_slope[w, head] = tau_slope
        for j in range(tokens):
            pack_row(key[w, head, j].ctypes.data, packed, vectors, dim, spread(unit))
            out = key_slope[w, j, head].ctypes.data
            _unscale(packed, key_sums + 4 * padded * j, out, vectors, dim, unit)
            out = value_slope[w, j, head].ctypes.data
            for v in range(vectors):
                store_some(out, LANES * v, load(value_sums, padded * j + LANES * v), dim - LANES * v)
    # Numba frees an array after its last use, and these are used by address.
    matrices[0] = row[0] + turned[0] + places[0]
