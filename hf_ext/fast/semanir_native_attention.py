"""Key-semantic attention of SemanIR on the CPU (arXiv 2405.20008), and its gradients, for numba to compile: without
any tensor of N x N.

`gather` reads the keys and values of each token's list; `attend_blocks` computes all logits of a few queries at a time
and masks them. Both scale queries and keys themselves. Needs numba; without it this file cannot be imported.
"""
# Numba's functions carry no types that mypy could read.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

import numpy as np
from numba import njit

from . import semanir_native_vectors as vec
from .semanir_native_vectors import LANES, TILE_ROWS

_NOTHING = np.float32(-np.inf)


@njit
def align(array):
    """Address of a vector in an array that has room for one more."""
    return (array.ctypes.data + 63) & ~63


@njit
def norm_scale(row, vectors, dim, length):
    """The factor that gives a row a length."""
    squares = vec.spread(np.float32(0))
    for v in range(vectors):
        part = vec.load_some(row, LANES * v, dim - LANES * v)
        squares = vec.multiply_add(part, part, squares)
    return vec.spread(length / np.sqrt(max(vec.total(squares), np.float32(1e-24))))


@njit
def pack_row(row, out, vectors, dim, scale):
    for v in range(vectors):
        vec.store(out, LANES * v, vec.multiply(vec.load_some(row, LANES * v, dim - LANES * v), scale))


@njit
def pack_rows(source, rows, vectors, unit):
    """Copy the rows of a matrix, filled up to vectors; of unit length if asked for."""
    tokens, dim = source.shape
    for j in range(tokens):
        row = source[j].ctypes.data
        scale = norm_scale(row, vectors, dim, np.float32(1)) if unit else vec.spread(np.float32(1))
        pack_row(row, rows + 4 * LANES * vectors * j, vectors, dim, scale)


@njit
def _word(bits, b):
    """The bits of 16 keys."""
    word = np.int64(bits[2 * b])
    return word | np.int64(bits[2 * b + 1]) << 8 if 2 * b + 1 < len(bits) else word


@njit
def _list_keys(bits, columns, numbers, backs, tokens, room):
    """Keys of a token and their offsets in the table, one behind the other: how many there are."""
    count = 0
    for b in range((tokens + LANES - 1) // LANES):
        word = _word(bits, b)
        if word:
            vec.compress(numbers, count, vec.load_ints(columns, LANES * b), word)
            vec.compress(backs, count, vec.load_ints(columns, room + LANES * b), word)
            count += vec.ones(word)
    return count


@njit
def _attend_row(query, keys, values, numbers, backs, count, table, base, logits, sums, parts):
    """Softmax over the listed keys of one query: `sums` has the weighted values, the result is the sum of weights."""
    vectors = len(parts)
    high = vec.spread(_NOTHING)
    for b in range(0, count, LANES):
        logit = vec.dots(query, keys, numbers + 4 * b, parts)
        logit = vec.add(logit, vec.look_up(table, base, vec.load_ints(backs, b)))
        if count - b < LANES:
            logit = vec.choose((1 << (count - b)) - 1, logit, vec.spread(_NOTHING))
        vec.store(logits, b, logit)
        high = vec.larger(high, logit)
    high = vec.spread(vec.largest(high))
    for v in range(2 * vectors):
        vec.store(sums, LANES * v, vec.spread(np.float32(0)))
    weight = vec.spread(np.float32(0))
    for b in range(0, count, LANES):
        part = vec.exp(vec.subtract(vec.load(logits, b), high))
        vec.store(logits, b, part)
        weight = vec.add(weight, part)
        vec.weighted(sums, logits + 4 * b, values, numbers + 4 * b, parts)
    return vec.total(weight)


def gather(query, key, value, temperature, table, bits, width, window_size, parts, out, start, end):
    """Attention of some pairs of window and head. Result [W, N, heads, head_dim]."""
    heads, tokens, dim = query.shape[1:]
    # The length of a tuple is known when this is compiled: only the code for it is kept.
    vectors = len(parts)
    padded = LANES * vectors
    room = (tokens + LANES - 1) // LANES * LANES
    matrices = np.empty(2 * room * padded + LANES, np.float32)
    keys = align(matrices)
    values = keys + 4 * room * padded
    scratch = np.empty(3 * padded + room + LANES, np.float32)
    vector = align(scratch)
    sums, logits = vector + 4 * padded, vector + 12 * padded
    columns = np.zeros(2 * room, np.int32)
    span = 2 * window_size - 1
    for j in range(tokens):
        columns[j], columns[room + j] = j, j // width * span + j % width
    # Keys are listed once for all heads of a window: lists behind one another, filled up with key 0 to whole vectors.
    lists, counts = np.empty((2, tokens * room), np.int32), np.empty(tokens, np.int64)
    places = np.zeros(tokens + 1, np.int64)
    numbers, backs, listed = lists[0].ctypes.data, lists[1].ctypes.data, -1
    for item in range(start, end):
        w, head = item // heads, item % heads
        if w != listed:
            listed = w
            for i in range(tokens):
                here = 4 * places[i]
                counts[i] = _list_keys(bits[w, i], columns.ctypes.data, numbers + here, backs + here, tokens, room)
                last = places[i] + counts[i]
                places[i + 1] = (last + LANES - 1) // LANES * LANES
                lists[:, last : places[i + 1]] = 0
        pack_rows(key[w, head], keys, vectors, True)
        pack_rows(value[w, head], values, vectors, False)
        biases = table[head].ctypes.data
        middle = (window_size - 1) * span + window_size - 1
        for i in range(tokens):
            row = query[w, head, i].ctypes.data
            pack_row(row, vector, vectors, dim, norm_scale(row, vectors, dim, temperature[head]))
            here, base = 4 * places[i], middle + columns[room + i]
            weight = _attend_row(
                vector, keys, values, numbers + here, backs + here, counts[i], biases, base, logits, sums, parts
            )
            scale = vec.spread(np.float32(1) / weight)
            result = out[w, i, head].ctypes.data
            for v in range(vectors):
                both = vec.add(vec.load(sums, 2 * LANES * v), vec.load(sums, 2 * LANES * v + LANES))
                vec.store_some(result, LANES * v, vec.multiply(both, scale), dim - LANES * v)
    # Numba frees an array after its last use, and these are used by address.
    matrices[0] = scratch[0]


@njit
def multiply_tiles(left, stride, right, width, depth, out, out_stride, parts):
    """Product of 12 rows with a matrix, one vector a row for each part."""
    vectors = len(parts)
    for v in range(0, vectors - 1, 2):
        vec.tile32(left, stride, right + 64 * v, width, depth, out + 64 * v, out_stride)
    if vectors % 2:
        vec.tile16(left, stride, right + 64 * (vectors - 1), width, depth, out + 64 * (vectors - 1), out_stride)


# The bias of a pair is a number of the small table, at a place that depends on its offset alone. From query i, key j
# has the place of i less the place of j, so from one key to the next the table is read backwards. A turned copy of it
# is read forwards: where a window's row is whole vectors wide, 16 keys are then one load, and else 16 single ones.
@njit
def key_places(tokens, width, window_size):
    """The place of the offset from each key in the turned table, behind that from the first; -1 times that."""
    places = np.zeros((tokens + 2 * LANES - 1) // (2 * LANES) * (2 * LANES), np.int32)
    for j in range(tokens):
        places[j] = -(j // width * (2 * window_size - 1) + j % width)
    return places


@njit
def first_place(token, width, window_size):
    """The place of the offset from a query's first key in the turned table."""
    span = 2 * window_size - 1
    return span * span - 1 - (token // width + window_size - 1) * span - token % width - window_size + 1


@njit
def turn_table(table, turned):
    for x in range(len(table)):
        turned[x] = table[len(table) - 1 - x]


@njit
def pack_panels(rows, panels, tokens, dim, padded):
    """Turn rows into columns, 32 of them lying together."""
    for j in range(tokens):
        panel = j // 32 * 32 * dim + j % 32
        for c in range(dim):
            vec.copy_number(rows, padded * j + c, panels, panel + 32 * c)


@njit
def softmax_row(logits, bits, biases, places, first, width, window_size):
    """Weights of all keys of one query, not divided by their sum, which is returned."""
    high = vec.spread(_NOTHING)
    blocks = (len(bits) + 1) // 2
    for b in range(blocks):
        if width % LANES == 0:
            place = first + LANES * b // width * (2 * window_size - 1 - width) + LANES * b
            bias = vec.load(biases, place)
        else:
            bias = vec.look_up(biases, first, vec.load_ints(places, LANES * b))
        logit = vec.choose(_word(bits, b), vec.add(vec.load(logits, LANES * b), bias), vec.spread(_NOTHING))
        vec.store(logits, LANES * b, logit)
        high = vec.larger(high, logit)
    high = vec.spread(vec.largest(high))
    weight = vec.spread(np.float32(0))
    for b in range(blocks):
        part = vec.exp(vec.subtract(vec.load(logits, LANES * b), high))
        vec.store(logits, LANES * b, part)
        weight = vec.add(weight, part)
    return vec.total(weight)


@njit
def weigh_keys(query, begin, tau, bits, turned, places, sums, queries, panels, logits, width, window_size, vectors):
    """Weights of all keys of 12 queries, as `softmax_row` gives them; the last query fills up the 12."""
    tokens, dim = query.shape
    padded = LANES * vectors
    for i in range(TILE_ROWS):
        source = query[min(begin + i, tokens - 1)].ctypes.data
        pack_row(source, queries + 4 * padded * i, vectors, dim, norm_scale(source, vectors, dim, tau))
    # Rows of a power of two would all lie in the same places of the cache.
    stride = len(places) + LANES
    for j in range(0, len(places), 2 * LANES):
        vec.tile32(queries, padded, panels + 4 * j * dim, 2 * LANES, dim, logits + 4 * j, stride)
    for i in range(TILE_ROWS):
        token = min(begin + i, tokens - 1)
        first = first_place(token, width, window_size)
        row = logits + 4 * stride * i
        biases, behind = turned.ctypes.data, places.ctypes.data
        sums[i] = softmax_row(row, bits[token], biases, behind, first, width, window_size)


def attend_blocks(query, key, value, temperature, table, bits, width, window_size, parts, out, start, end):
    """Attention of some pairs of window and head, all logits of a few queries at a time. Result as of `gather`."""
    heads, tokens, dim = query.shape[1:]
    vectors = len(parts)
    padded = LANES * vectors
    places = key_places(tokens, width, window_size)
    turned = np.empty(table.shape[1] + LANES, np.float32)
    sums = np.empty(TILE_ROWS, np.float32)
    room, stride = len(places), len(places) + LANES
    matrices = np.zeros(room * (dim + padded) + TILE_ROWS * (stride + 2 * padded) + LANES, np.float32)
    panels = align(matrices)
    values = panels + 4 * room * dim
    logits = values + 4 * room * padded
    queries = logits + 4 * TILE_ROWS * stride
    results = queries + 4 * TILE_ROWS * padded
    for item in range(start, end):
        w, head = item // heads, item % heads
        turn_table(table[head], turned)
        pack_rows(key[w, head], values, vectors, True)
        pack_panels(values, panels, tokens, dim, padded)
        pack_rows(value[w, head], values, vectors, False)
        for begin in range(0, tokens, TILE_ROWS):
            weigh_keys(
                query[w, head], begin, temperature[head], bits[w % len(bits)], turned, places, sums, queries, panels,
                logits, width, window_size, vectors,
            )  # fmt: skip
            multiply_tiles(logits, stride, values, padded, tokens, results, padded, parts)
            for i in range(min(TILE_ROWS, tokens - begin)):
                scale = vec.spread(np.float32(1) / sums[i])
                for v in range(vectors):
                    result = vec.multiply(vec.load(results, padded * i + LANES * v), scale)
                    vec.store_some(out[w, begin + i, head].ctypes.data, LANES * v, result, dim - LANES * v)
    # Numba frees an array after its last use, and these are used by address.
    matrices[0] = turned[0] + places[0]


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
    """Gradients for some pairs of window and head: of query, key and value [W, N, heads, head_dim], of the temperature
    [W, heads] and of the turned table [W, heads, (2w - 1)^2], from that of the result [W, heads, N, head_dim]."""
    heads, tokens, dim = query.shape[1:]
    vectors = len(parts)
    padded = LANES * vectors
    places = key_places(tokens, width, window_size)
    turned = np.empty(table.shape[1] + LANES, np.float32)
    sums = np.empty(TILE_ROWS, np.float32)
    room, stride = len(places), len(places) + LANES
    matrices = np.zeros(room * (2 * dim + 3 * padded) + TILE_ROWS * (2 * stride + 3 * padded) + LANES, np.float32)
    key_panels = align(matrices)
    value_panels = key_panels + 4 * room * dim
    keys = value_panels + 4 * room * dim
    key_sums, value_sums = keys + 4 * room * padded, keys + 8 * room * padded
    weights = keys + 12 * room * padded
    slopes = weights + 4 * TILE_ROWS * stride
    queries = slopes + 4 * TILE_ROWS * stride
    results, given = queries + 4 * TILE_ROWS * padded, queries + 8 * TILE_ROWS * padded
    for item in range(start, end):
        w, head = item // heads, item % heads
        turn_table(table[head], turned)
        pack_rows(value[w, head], keys, vectors, False)
        pack_panels(keys, value_panels, tokens, dim, padded)
        pack_rows(key[w, head], keys, vectors, True)
        pack_panels(keys, key_panels, tokens, dim, padded)
        _clear(key_sums, 2 * room * vectors)
        tau_slope = np.float32(0)
        for begin in range(0, tokens, TILE_ROWS):
            rows = min(TILE_ROWS, tokens - begin)
            weigh_keys(
                query[w, head], begin, temperature[head], bits[w % len(bits)], turned, places, sums, queries,
                key_panels, weights, width, window_size, vectors,
            )  # fmt: skip
            _clear(queries + 4 * padded * rows, (TILE_ROWS - rows) * vectors)
            _clear(given, TILE_ROWS * vectors)
            for i in range(rows):
                source = gradient[w, head, begin + i].ctypes.data
                pack_row(source, given + 4 * padded * i, vectors, dim, vec.spread(np.float32(1) / sums[i]))
            for j in range(0, room, 2 * LANES):
                vec.tile32(given, padded, value_panels + 4 * j * dim, 2 * LANES, dim, slopes + 4 * j, stride)
            _update_rows(weights, stride, given, padded, tokens, value_sums, parts)
            for i in range(rows):
                here = 4 * stride * i
                first = first_place(begin + i, width, window_size)
                _logit_gradients(
                    weights + here, slopes + here, sums[i], table_slope[w, head], places, first, tokens, width,
                    window_size,
                )  # fmt: skip
            _update_rows(slopes, stride, queries, padded, tokens, key_sums, parts)
            multiply_tiles(slopes, stride, keys, padded, tokens, results, padded, parts)
            for i in range(rows):
                source, out = query[w, head, begin + i].ctypes.data, query_slope[w, begin + i, head].ctypes.data
                slope = results + 4 * padded * i
                tau_slope += _unscale(source, slope, out, vectors, dim, temperature[head])
        temperature_slope[w, head] = tau_slope
        _finish_keys(key[w, head], key_sums, value_sums, key_slope[w, :, head], value_slope[w, :, head], vectors)
    # Numba frees an array after its last use, and these are used by address.
    matrices[0] = turned[0] + places[0]
