# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Gradients of SemanIR's key-semantic attention on the CPU, for numba to compile. Needs numba."""
# Numba's functions carry no types that mypy could read.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

import numpy as np
from numba import njit

from . import semanir_native_attention as forward
from . import semanir_native_vectors as vec
from .semanir_native_vectors import LANES, TILE_ROWS


@njit
def _clear(address, vectors):
    for v in range(vectors):
        vec.store(address, LANES * v, vec.spread(np.float32(0)))


@njit
def _update_rows(left, stride, right, width, depth, out, parts):
    """Add the product of 12 turned rows with 12 rows, one vector a row for each part."""
    vectors = len(parts)
    for v in range(0, vectors - 1, 2):
        vec.update32(left, stride, right + 64 * v, width, depth, out + 64 * v)
    if vectors % 2:
        vec.update16(left, stride, right + 64 * (vectors - 1), width, depth, out + 64 * (vectors - 1))


# Of the logits. The weights of a row are P = E / s with E = exp(S - max) and s its sum, and the derivative of a
# softmax is dS = P (dP - D) with D = rowsum(P dP). Divided by s once for all of a row, that is E (dP / s - D / s), and
# D / s = rowsum(E dP / s) / s: this function is given E and dP / s, so that P is never formed.
@njit
def _logit_gradients(weights, gradients, weight, slopes, places, first, tokens, width, window_size):
    """Turn a row of dP / s into dS, and add it to the gradients of the turned table."""
    inner = vec.spread(np.float32(0))
    for b in range(0, tokens, LANES):
        inner = vec.multiply_add(vec.load(weights, b), vec.load(gradients, b), inner)
    inner = vec.spread(vec.total(inner) / weight)
    for b in range(0, tokens, LANES):
        slope = vec.multiply(vec.load(weights, b), vec.subtract(vec.load(gradients, b), inner))
        vec.store(gradients, b, slope)
        base = slopes.ctypes.data
        if width % LANES == 0:
            place = first + b // width * (2 * window_size - 1 - width) + b
            vec.store_anywhere(base, place, vec.add(vec.load(base, place), slope))
        else:
            for lane in range(LANES):
                vec.add_number(gradients, b + lane, base, first - places[b + lane])


# Of a vector that was brought to a length t, y = t x / |x| = t x'. A unit vector can only turn, so what of the slope
# lies along it is taken off: dx = (du - (du . x') x') / |x| with du = t dy; and dt = dy . x'. Rows without length,
# which the forward pass divides by 1e-12 in place of 0, have nothing to take off.
@njit
def _unscale(row, slope, out, vectors, dim, length):
    """Gradient of a row x, given that of y = x length / |x|; returns the gradient of the length."""
    squares, along = vec.spread(np.float32(0)), vec.spread(np.float32(0))
    for v in range(vectors):
        given = vec.load_some(row, LANES * v, dim - LANES * v)
        squares = vec.multiply_add(given, given, squares)
        along = vec.multiply_add(given, vec.load(slope, LANES * v), along)
    norm, inner = vec.total(squares), vec.total(along)
    scale = length / np.sqrt(max(norm, np.float32(1e-24)))
    back = vec.spread(-inner / norm if norm > np.float32(1e-24) else np.float32(0))
    for v in range(vectors):
        turned = vec.multiply_add(vec.load_some(row, LANES * v, dim - LANES * v), back, vec.load(slope, LANES * v))
        vec.store_some(out, LANES * v, vec.multiply(turned, vec.spread(scale)), dim - LANES * v)
    return inner * scale / length


@njit
def _finish_keys(key, key_sums, value_sums, key_slope, value_slope, vectors):
    """Write the gradients of the keys and values of a window and head."""
    tokens, dim = key.shape
    for j in range(tokens):
        here = 4 * LANES * vectors * j
        _unscale(key[j].ctypes.data, key_sums + here, key_slope[j].ctypes.data, vectors, dim, np.float32(1))
        for v in range(vectors):
            vec.store_some(
                value_slope[j].ctypes.data, LANES * v, vec.load(value_sums + here, LANES * v), dim - LANES * v
            )


# Forward: with unit vectors q' = q / |q| and k' = k / |k|, logits S = tau q' k'^T + B for the chosen keys, weights
# P = E / s as above, O = P V. Nothing of N x N is kept, so E and s are computed again here, for 12 queries at a time,
# and each tile is used up before the next. What follows from dO, by the chain rule:
#
#     dV = P^T dO = E^T G           with G = dO / s: rows of V and of G are divided once, not rows of E
#     dP = dO V^T                   so that dP / s = G V^T, which `_logit_gradients` turns into dS
#     dB = dS                       added up at the offset of each pair, in the turned table
#     d(tau q') = dS k'             dk' = dS^T (tau q'), both through `_unscale`
#
# Each pair of window and head sums by itself and in one order, so that the number of threads changes no bit. How we
# know: tests/semanir/test_kernels_semanir.py compares all five gradients with autograd over loops in float64.
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
    places = forward.key_places(tokens, width, window_size)
    turned = np.empty(table.shape[1] + LANES, np.float32)
    sums = np.empty(TILE_ROWS, np.float32)
    room, stride = len(places), len(places) + LANES
    matrices = np.zeros(room * (2 * dim + 3 * padded) + TILE_ROWS * (2 * stride + 3 * padded) + LANES, np.float32)
    key_panels = forward.align(matrices)
    value_panels = key_panels + 4 * room * dim
    keys = value_panels + 4 * room * dim
    key_sums, value_sums = keys + 4 * room * padded, keys + 8 * room * padded
    weights = keys + 12 * room * padded
    slopes = weights + 4 * TILE_ROWS * stride
    queries = slopes + 4 * TILE_ROWS * stride
    results, given = queries + 4 * TILE_ROWS * padded, queries + 8 * TILE_ROWS * padded
    for item in range(start, end):
        w, head = item // heads, item % heads
        forward.turn_table(table[head], turned)
        forward.pack_rows(value[w, head], keys, vectors, False)
        forward.pack_panels(keys, value_panels, tokens, dim, padded)
        forward.pack_rows(key[w, head], keys, vectors, True)
        forward.pack_panels(keys, key_panels, tokens, dim, padded)
        _clear(key_sums, 2 * room * vectors)
        tau_slope = np.float32(0)
        for begin in range(0, tokens, TILE_ROWS):
            rows = min(TILE_ROWS, tokens - begin)
            forward.weigh_keys(
                query[w, head], begin, temperature[head], bits[w % len(bits)], turned, places, sums, queries,
                key_panels, weights, width, window_size, vectors,
            )  # fmt: skip
            _clear(queries + 4 * padded * rows, (TILE_ROWS - rows) * vectors)
            _clear(given, TILE_ROWS * vectors)
            for i in range(rows):
                source = gradient[w, head, begin + i].ctypes.data
                forward.pack_row(source, given + 4 * padded * i, vectors, dim, vec.spread(np.float32(1) / sums[i]))
            for j in range(0, room, 2 * LANES):
                vec.tile32(given, padded, value_panels + 4 * j * dim, 2 * LANES, dim, slopes + 4 * j, stride)
            _update_rows(weights, stride, given, padded, tokens, value_sums, parts)
            for i in range(rows):
                here = 4 * stride * i
                first = forward.first_place(begin + i, width, window_size)
                _logit_gradients(
                    weights + here, slopes + here, sums[i], table_slope[w, head], places, first, tokens, width,
                    window_size,
                )  # fmt: skip
            _update_rows(slopes, stride, queries, padded, tokens, key_sums, parts)
            forward.multiply_tiles(slopes, stride, keys, padded, tokens, results, padded, parts)
            for i in range(rows):
                source, out = query[w, head, begin + i].ctypes.data, query_slope[w, begin + i, head].ctypes.data
                slope = results + 4 * padded * i
                tau_slope += _unscale(source, slope, out, vectors, dim, temperature[head])
        temperature_slope[w, head] = tau_slope
        _finish_keys(key[w, head], key_sums, value_sums, key_slope[w, :, head], value_slope[w, :, head], vectors)
    # Numba frees an array after its last use, and these are used by address.
    matrices[0] = turned[0] + places[0]
