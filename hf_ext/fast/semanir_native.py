"""SemanIR on the CPU (arXiv 2405.20008): exact selection of the keys, and attention that reads only those.

The kernels are compiled by numba at their first call and kept in its cache; each call shares its work among as many
threads as torch has.
"""
# Numba's functions carry no types that mypy could read.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from hf_ext.semanir.ops_semanir import pack_keys

from . import semanir_native_vectors as vec
from .compiling import compile_kernel, share
from .semanir_native_attention import align, attend_backward, attend_blocks, gather
from .semanir_native_vectors import LANES

_LEAST, _MOST = -(2**31), 2**31 - 1


# Selection. A row of scores becomes integers in the same order (`ordered`: of a negative float all bits but the sign
# are turned over), illegal keys the least of all. Then the k-th largest is found by halving the range of integers, at
# most 32 times, counting how many reach the middle: each count reads the row once, in whole vectors, and never moves
# it, as sorting would. Of keys that tie with the k-th the last are taken off again, as torch's way keeps the first
# ones. How we know: tests/semanir/test_kernels_semanir.py compares with a stable sort, with ties, infinities and
# regions.
@njit
def _order(scores, keys, regions, number, blocks, tokens):
    """Write integers in the order of the scores, the least for illegal keys: how many are legal, and their range."""
    least = vec.spread_int(np.int32(_LEAST))
    low, high = vec.spread_int(np.int32(_MOST)), least
    legal = 0
    for b in range(blocks):
        left = tokens - LANES * b
        usable = 0xFFFF if left >= LANES else (1 << left) - 1
        value = vec.load(scores, LANES * b) if left >= LANES else vec.load_some(scores, LANES * b, left)
        if regions != 0:
            usable &= vec.same(regions, LANES * b, number)
        key = vec.choose_ints(usable, vec.ordered(value), least)
        vec.store_ints(keys, LANES * b, key)
        low = vec.smaller_ints(low, vec.choose_ints(usable, key, low))
        high = vec.larger_ints(high, key)
        legal += vec.ones(usable)
    return legal, np.int64(vec.smallest_int(low)), np.int64(vec.largest_int(high))


@njit
def _threshold(keys, blocks, low, high, legal, wanted):
    """Largest threshold that `wanted` keys reach, and how many of those that equal it are too many."""
    # `low` is reached by enough keys, the end of the range by too few.
    end, reaching = high + 1, legal
    while end - low > 1:
        middle = (low + end) >> 1
        bound = vec.spread_int(np.int32(middle))
        count = 0
        for b in range(blocks):
            count += vec.ones(vec.at_least(vec.load_ints(keys, LANES * b), bound))
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
    bound = vec.spread_int(np.int32(threshold))
    for b in range(blocks - 1, -1, -1):
        key = vec.load_ints(keys, LANES * b)
        word = vec.at_least(key, bound)
        if surplus > 0:
            tied = vec.equal(key, bound)
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
    keys = align(room)
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


_TENSOR = "float32[:, :, :, :]"
_GIVEN = f"{_TENSOR}, {_TENSOR}, {_TENSOR}, float32[::1], float32[:, ::1], uint8[:, :, ::1]"
_SIZES = "int64, int64, UniTuple(int64, {})"
_MADE = "float32[:, :, :, ::1]"
_ATTENTION = f"void({_GIVEN}, {_SIZES}, {_MADE}, int64, int64)"
_SLOPES = f"{_MADE}, {_MADE}, {_MADE}, float32[:, ::1], float32[:, :, ::1]"
_BACKWARD = f"void({_GIVEN}, {_TENSOR}, {_SIZES}, {_SLOPES}, int64, int64)"
_SELECTION = "void(float32[:, :, ::1], uint8[:, ::1], int64, boolean, uint8[:, :, ::1], int64, int64)"


def select_keys(scores: Tensor, regions: Tensor | None, top_k: int, include_self: bool) -> Tensor:
    """Bits of the `top_k` highest scores of each row; of equal ones the first."""
    windows, tokens = scores.shape[:2]
    bits = torch.empty(windows, tokens, -(-tokens // 8), dtype=torch.uint8)
    numbers = np.empty((0, tokens), np.uint8) if regions is None else regions.numpy()
    kernel = compile_kernel(_select, _SELECTION)
    share(kernel, windows * tokens, scores.numpy(), numbers, top_k, include_self, bits.numpy())
    return bits


def _array(tensor: Tensor) -> Any:
    """A tensor that a kernel can read: any layout whose last dimension lies together."""
    tensor = tensor.detach()
    return (tensor if tensor.stride(-1) == 1 else tensor.contiguous()).numpy()


def _kernel_inputs(query, key, value, temperature, table, bits):
    if bits is None:
        # One window for all of them.
        bits = pack_keys(torch.ones(1, 1, query.shape[2], dtype=torch.bool)).repeat(1, query.shape[2], 1)
    vectors = (_array(temperature.detach().contiguous()), _array(table.detach().contiguous()))
    return (_array(query), _array(key), _array(value), *vectors, bits.contiguous().numpy())


def attend(query, key, value, temperature, table, bits, width, window_size):
    """Attention to the chosen keys, without gradient: see [`semanir_operators.native_attention`]."""
    windows, heads, tokens, dim = query.shape
    given = _kernel_inputs(query, key, value, temperature, table, bits)
    keys = tokens if bits is None else int(np.unpackbits(given[-1][:, 0], axis=-1).sum(-1).max())
    # With more keys all logits take less time than looking the keys up: measured for 64, 256, 1024 tokens.
    function = attend_blocks if bits is None or keys > max(128, 3 * tokens // 8) else gather
    parts = (0,) * -(-dim // LANES)
    out = torch.empty(windows, tokens, heads, dim)
    kernel = compile_kernel(function, _ATTENTION.format(len(parts)))
    share(kernel, windows * heads, *given, width, window_size, parts, out.numpy())
    return out


def attend_gradients(gradient, query, key, value, temperature, table, bits, width, window_size):
    """Gradients of query, key and value [W, N, heads, d], temperature and table, from that of [`attend`]."""
    windows, heads, tokens, dim = query.shape
    parts = (0,) * -(-dim // LANES)
    slopes = [torch.empty(windows, tokens, heads, dim) for _ in range(3)]
    # One for each window and head: sums in the same order, whatever the number of threads.
    slopes += [torch.empty(windows, heads), torch.zeros(windows, heads, table.shape[1])]
    kernel = compile_kernel(attend_backward, _BACKWARD.format(len(parts)))
    given = _kernel_inputs(query, key, value, temperature, table, bits)
    arrays = [slope.numpy() for slope in slopes]
    share(kernel, windows * heads, *given, _array(gradient.transpose(1, 2)), width, window_size, parts, *arrays)
    return *slopes[:3], slopes[3].sum(0), slopes[4].sum(0).flip(-1)
