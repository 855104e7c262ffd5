"""Compiled block kernels of EMR-Merging (arXiv 2405.17461), used by `ops` where numba can be imported.

Plain loops over tiles that stay in the first-level cache with all that is computed from them: all tasks vote, the
winner is elected and rounded, then each task is masked and its sums are added. The compiler makes vectors of them. For
that it must be free to add the terms of a sum in another order, which only the functions with `_ANY_ORDER` allow, and
these make nothing but sums: weights and masks have the bits of `ops` on every machine, sums the same
bits on one kind of processor. Loops are short and separate because a loop of one width of number makes better vectors
than one of two.
"""
# Numba's functions carry no types that mypy could read.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from functools import partial

import numpy as np
import torch
from numba import carray, njit, types
from torch import Tensor

from .compiling import compile_kernel, share
from .emr_sums import GRAM_STEP, SUB_BLOCK, Sums

TILE = 1024
KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
# A product of two fp32 numbers is exact in fp64: fused with its sum or not, it is the same.
_ANY_ORDER = {"reassoc", "contract"}
_TRANSFER = types.intp(types.int32, types.intp, types.intp, types.intp)
_pread = types.ExternalFunction("pread", _TRANSFER)
_pwrite = types.ExternalFunction("pwrite", _TRANSFER)
_memset = types.ExternalFunction("memset", types.CPointer(types.uint8)(types.intp, types.int32, types.intp))


# Memory. Tensors go in by address: one compilation serves all dtypes and numbers of tasks.


@njit
def bytes_at(address, count):
    """An array over memory. To set no bytes is how an integer becomes a pointer: memset returns its address."""
    return carray(_memset(address, 0, 0), count)


@njit
def size_of(kind):
    return 4 if kind == 0 else 2


@njit
def load_float32(address, kind, place, count, scratch):
    """Weights from `place` on as fp32: where they are, or widened into `scratch`."""
    address += place * size_of(kind)
    if kind == 0:
        return bytes_at(address, 4 * count).view(np.float32)
    bits, widened = bytes_at(address, 2 * count).view(np.uint16), scratch[:count]
    if kind == 1:
        _widen_float16(bits, widened)
    else:
        _widen_bfloat16(bits, widened)
    return widened


@njit
def store_float32(source, address, kind, place):
    """Write fp32 as the stored dtype, to nearest, ties to even."""
    address += place * size_of(kind)
    if kind == 0:
        out = bytes_at(address, 4 * len(source)).view(np.float32)
        for i in range(len(source)):
            out[i] = source[i]
    elif kind == 1:
        _round_float16(source, bytes_at(address, 2 * len(source)).view(np.uint16))
    else:
        _round_bfloat16(source, bytes_at(address, 2 * len(source)).view(np.uint16))


@njit
def _widen_float16(bits, out):
    words = out.view(np.uint32)
    for i in range(len(bits)):
        words[i] = (bits[i] & 0x7FFF) << 13
    for i in range(len(bits)):
        # Moves the bias of the exponent from 15 to 127; exact for subnormal numbers too.
        out[i] *= np.float32(2.0**112)
    for i in range(len(bits)):
        not_finite = 0x7F800000 if bits[i] & 0x7C00 == 0x7C00 else 0
        words[i] |= not_finite | (bits[i] & 0x8000) << 16


@njit
def _widen_bfloat16(bits, out):
    words = out.view(np.uint32)
    for i in range(len(bits)):
        words[i] = np.uint32(bits[i]) << 16


@njit
def _round_float16(source, out):
    words = source.view(np.uint32)
    for i in range(len(out)):
        # Subnormal numbers of float16 are multiples of 2^-24, as far apart as fp32 is between 0.5 and 1: the sum
        # rounds them.
        out[i] = np.float32(abs(source[i]) + np.float32(0.5)).view(np.uint32) - 0x3F000000
    for i in range(len(out)):
        size = words[i] & 0x7FFFFFFF
        normal = (size - 0x38000000 + 0xFFF + ((size >> 13) & 1)) >> 13
        rounded = out[i] if size < 0x38800000 else normal
        rounded = rounded if size < 0x477FF000 else 0x7C00
        rounded = rounded if size <= 0x7F800000 else 0x7E00
        out[i] = rounded | (words[i] >> 16) & 0x8000


@njit
def _round_bfloat16(source, out):
    words = source.view(np.uint32)
    for i in range(len(out)):
        rounded = (words[i] + 0x7FFF + ((words[i] >> 16) & 1)) >> 16
        out[i] = 0x7FC0 if words[i] & 0x7FFFFFFF > 0x7F800000 else rounded


# Elect, mask, add up: tiles of fp32, of equal lengths.


@njit
def _vote(first, second, base, total, highest, lowest):
    """Two tasks at once: what they vote on is loaded and stored once for both."""
    for i in range(len(base)):
        start, one, other = base[i], first[i], second[i]
        total[i] = (total[i] + (one - start)) + (other - start)
        best = one if one > highest[i] else highest[i]
        worst = one if one < lowest[i] else lowest[i]
        highest[i] = other if other > best else best
        lowest[i] = other if other < worst else worst


@njit
def _elect(total, highest, lowest, base, negative_ties, unified):
    for i in range(len(base)):
        votes, start, worst = total[i], base[i], lowest[i]
        negative = (votes < 0) | ((votes == 0) & (worst < start) & negative_ties)
        unified[i] = highest[i] if votes > 0 else (worst if negative else start)


@njit
def _subtract(first, second, out):
    for i in range(len(out)):
        out[i] = first[i] - second[i]


@njit(fastmath={"reassoc"})
def _mask(task, base, unified, common, delta, masked, flags, sums):
    """τ_t, M·τ_uni, M as a byte each, and numbers of elements: in fp32, where they are exact up to 2^24."""
    zero, one = np.float32(0), np.float32(1)
    moved = kept = opposed = crossed = zero
    for i in range(len(delta)):
        weight, winner, size = task[i], unified[i], common[i]
        step = weight - base[i]
        agreed = ((step > zero) & (size > zero)) | ((step < zero) & (size < zero))
        delta[i] = step
        masked[i] = size if agreed else zero
        flags[i] = agreed
        moved += one if step != zero else zero
        kept += one if agreed else zero
        opposed += one if ((step > zero) & (size < zero)) | ((step < zero) & (size > zero)) else zero
        crossed += one if ((weight > zero) & (winner < zero)) | ((weight < zero) & (winner > zero)) else zero
    sums[2] += moved
    sums[3] += kept
    sums[8] += opposed
    sums[9] += crossed


# Bits. Eight flags are eight bytes, each 0 or 1, and so one number of 64 bits with bit 8i for flag i. The product with
# 0x0102040810204080, whose bits are 7, 14, 21 to 56, adds up copies of it, each shifted by one of these: flag i lands
# at 8i + 7j for j = 1 to 8, and 8i + 7j is 56 + i for j = 8 - i alone. No two flags meet in a bit of the highest byte,
# and nothing below carries into it: 8i + 7j = 8k + 7l would need j - l to be a multiple of 8. So that byte is the
# eight bits of the mask, lowest first, for one multiplication instead of eight shifts. Bytes after the last element
# are zeroed before, so that the last byte has no bits of an earlier tile. `pack_mask` of plain torch says the same by
# its formula, and the tests compare the two bit for bit, at all lengths around a byte.
@njit
def _pack(flags, out):
    """A byte, 0 or 1, becomes a bit."""
    words = flags[: 8 * len(out)].view(np.uint64)
    for i in range(len(out)):
        out[i] = (words[i] * np.uint64(0x0102040810204080)) >> np.uint64(56)


@njit(fastmath=_ANY_ORDER)
def _add_common(common, base, totals):
    squares = sums = common_squares = 0.0
    for i in range(len(base)):
        start, size = np.float64(base[i]), np.float64(common[i])
        squares += start * start
        sums += abs(size)
        common_squares += size * size
    totals[0] += squares
    totals[1] += sums
    totals[2] += common_squares


@njit(fastmath=_ANY_ORDER)
def _add_task(delta, common, masked, sums):
    total = squares = masked_total = masked_squares = masked_dots = dots = 0.0
    for i in range(len(delta)):
        step, size, kept = np.float64(delta[i]), np.float64(common[i]), np.float64(masked[i])
        total += abs(step)
        squares += step * step
        masked_total += abs(kept)
        masked_squares += kept * kept
        masked_dots += step * kept
        dots += step * size
    sums[0] += total
    sums[1] += squares
    sums[4] += masked_total
    sums[5] += masked_squares
    sums[6] += masked_dots
    sums[7] += dots


@njit(fastmath={"reassoc"})
def _count_moved(common):
    zero, one = np.float32(0), np.float32(1)
    moved = zero
    for i in range(len(common)):
        moved += one if common[i] != zero else zero
    return moved


@njit(fastmath=_ANY_ORDER)
def _dot(first, second):
    total = 0.0
    for i in range(len(first)):
        total += np.float64(first[i]) * np.float64(second[i])
    return total


# Election. The paper's two passes, first the signs of the sums and then the largest magnitude among those who agree,
# are one here: with S = Σ d_t, the winner along S > 0 is the largest weight, along S < 0 the smallest, so sum, maximum
# and minimum are kept in one pass, and no task vector has to be kept for it. The weight itself is kept, not W_0 + d:
# it has no rounding. S is taken in fp32 in the order of the tasks, as in `ops.elect`; two tasks at once change
# neither the order nor a rounding, and the base, which stands in for a missing second one, has d = 0. The tests
# compare the elected weights with plain torch and with the paper's two passes (`reference_ops`), ties included.
@njit
def _unify(addresses, kinds, place, base, tie, work, unified):
    """Elect a tile of the unified weights and write it in its dtype."""
    last, n = len(addresses) - 1, len(base)
    total, highest, lowest = work[1][:n], work[2][:n], work[3][:n]
    for task in range(1, last, 2):
        first = load_float32(addresses[task], kinds[task], place, n, work[4])
        if task == 1:
            total[:] = 0
            highest[:] = first
            lowest[:] = first
        # The last of an odd number votes beside the base, which changes nothing.
        second = base
        if task + 1 < last:
            second = load_float32(addresses[task + 1], kinds[task + 1], place, n, work[6])
        _vote(first, second, base, total, highest, lowest)
    _elect(total, highest, lowest, base, tie > 0, unified)
    store_float32(unified, addresses[last], kinds[last], place)


@njit
def _tile(addresses, kinds, place, n, masks, row, tie, sampled, work, flags, deltas, sums, totals, gram):
    """`n` elements from `place` on. `addresses`: of the base, of each task and of the unified weights."""
    tasks = len(addresses) - 2
    base = load_float32(addresses[0], kinds[0], place, n, work[0])
    if tie >= 0:
        _unify(addresses, kinds, place, base, tie, work, work[5][:n])
    unified = load_float32(addresses[-1], kinds[-1], place, n, work[5])
    common, masked = work[6][:n], work[7][:n]
    _subtract(unified, base, common)
    _add_common(common, base, totals)
    totals[3] += _count_moved(common)
    flags[n : (n + 7) // 8 * 8] = 0
    for task in range(tasks):
        weights = load_float32(addresses[1 + task], kinds[1 + task], place, n, work[4])
        delta = deltas[task if sampled else 0][:n]
        _mask(weights, base, unified, common, delta, masked, flags, sums[task])
        if masks:
            _pack(flags, bytes_at(masks + task * row + place // 8, (n + 7) // 8))
        _add_task(delta, common, masked, sums[task])
    for first in range(tasks if sampled else 0):
        for second in range(first, tasks):
            gram[first, second] += _dot(deltas[first][:n], deltas[second][:n])


@njit
def _block(addresses, kinds, masks, row, n, first, tie, sums, totals, gram):
    """[`run_block`] of `n` elements at `addresses`: sums of tiles make that of a sub-block, and these are added up."""
    tasks = len(addresses) - 2
    work, flags = np.empty((8, TILE), np.float32), np.empty(TILE, np.uint8)
    deltas = np.empty((tasks, TILE), np.float32)
    own_sums, own_totals, own_gram = own = np.empty_like(sums), np.empty_like(totals), np.empty_like(gram)
    for start in range(0, n, SUB_BLOCK):
        sampled = (first + start // SUB_BLOCK) % GRAM_STEP == 0
        own_sums[:], own_totals[:], own_gram[:] = 0, 0, 0
        for place in range(start, min(start + SUB_BLOCK, n), TILE):
            count = min(TILE, n - place)
            _tile(addresses, kinds, place, count, masks, row, tie, sampled, work, flags, deltas, *own)
        sums += own_sums
        totals += own_totals
        gram += own_gram


@njit
def _read_block(files, places, kinds, addresses, low, n):
    """Read `n` elements from `low` on of the base and of each task; False where a file did not give all of them."""
    for item in range(len(kinds) - 1):
        size = size_of(kinds[item])
        if _pread(files[item], addresses[item], n * size, places[item] + low * size) != n * size:
            return False
    return True


def _run(files, places, addresses, kinds, masks, row, start, stop, step, tie, sums, totals, gram):
    """Elements [start, stop) of a tensor: one block at `addresses`, or in blocks of `step` that go through there from
    and to `files` (base, tasks, unified, masks; in each the tensor is at its byte of `places`); False if one fails.
    Between read, merge and write no thread waits for the interpreter's lock, so that a block is still in the caches.
    """
    count = len(kinds)
    for low in range(start, stop, step):
        n = min(step, stop - low)
        if len(files) and not _read_block(files, places, kinds, addresses, low, n):
            return False
        here = masks + (low - start) // 8 if masks else 0
        _block(addresses, kinds, here, row, n, low // SUB_BLOCK, tie, sums, totals, gram)
        size, last = size_of(kinds[-1]), count - 1
        if len(files) and _pwrite(files[last], addresses[last], n * size, places[last] + low * size) != n * size:
            return False
    for task in range(len(files) - count):
        size, place = (stop - start + 7) // 8, places[count + task] + start // 8
        if _pwrite(files[count + task], masks + task * row, size, place) != size:
            return False
    return True


_RUN = (
    "boolean(int32[::1], int64[::1], int64[::1], int64[::1], int64, int64, int64, int64, int64, int64, "
    "float64[:, ::1], float64[::1], float64[:, ::1])"
)


def run_files(
    files: list[tuple[int, int]],
    buffers: list[Tensor],
    masks: Tensor | None,
    elements: range,
    sums: Sums,
    tie: str | None,
) -> bool:
    """`ops.merge_block` of `elements` of a tensor that lies in local files, as many at once as their step.

    `files`: descriptor and first byte of the tensor for the base, each task, the unified weights and each mask.
    `buffers`: a block in the dtype of each but the masks; `masks` has room for those of all elements. Start and step
    are multiples of `SUB_BLOCK`. False if a file did not give or take everything: the sums are of no use then.
    """
    places = np.array([file for file, _ in files], np.int32), np.array([place for _, place in files], np.int64)
    blocks = np.array([block.data_ptr() for block in buffers]), np.array([KINDS[block.dtype] for block in buffers])
    bits = (0, 0) if masks is None else (masks.data_ptr(), masks.stride(0))
    steps = elements.start, elements.stop, elements.step, {None: -1, "zero": 0, "negative": 1}[tie]
    return compile_kernel(_run, _RUN)(*places, *blocks, *bits, *steps, *(part.numpy() for part in sums))


def run_block(
    base: Tensor, tasks: list[Tensor], unified: Tensor, masks: Tensor | None, sums: Sums, first: int, tie: str | None
) -> None:
    """`ops.merge_block`, or `mask_block` if `tie` is None; arguments are checked there."""
    start, n = first * SUB_BLOCK, len(base)
    run_files([], [base, *tasks, unified], masks, range(start, start + n, max(n, 1)), sums, tie)


# Restoring: no sum is taken in another order, so results have the bits of plain torch.
# With fewer elements a thread costs more than it saves.
_share = partial(share, least=2**17, step=TILE)
_RESTORE = "void(int64, int64, int64, int64, int64[::1], float32[::1], int64[::1], int64, int64, int64)"
_MOVE = "void(int64, int64, int64, int64, float32, int64, int64, int64, int64)"


@njit
def _target(address, kind, place, count, scratch):
    """Place of a tile in fp32: the one where it stays, or `scratch`, to be rounded from there."""
    return bytes_at(address + 4 * place, 4 * count).view(np.float32) if kind == 0 else scratch[:count]


@njit
def _unpack(mask, flags):
    """A bit becomes a byte: byte i of the product has all eight bits, of which bit i is kept."""
    words = flags[: 8 * len(mask)].view(np.uint64)
    for i in range(len(mask)):
        words[i] = (mask[i] * np.uint64(0x0101010101010101)) & np.uint64(0x8040201008040201)


@njit
def _restore_tile(base, unified, flags, scale, out):
    for i in range(len(base)):
        start = base[i]
        moved = start + scale * (unified[i] - start)
        out[i] = moved if flags[i] != 0 else start


def _restore(base, base_kind, unified, unified_kind, masks, scales, outs, out_kind, start, stop):
    """Elements [start, stop) of several tasks, the first a multiple of a tile: base and merged model are read once for
    all of them, tile by tile, and each task adds a bit an element."""
    work, flags = np.empty((3, TILE), np.float32), np.empty(TILE, np.uint8)
    for place in range(start, stop, TILE):
        n = min(TILE, stop - place)
        first = load_float32(base, base_kind, place, n, work[0])
        second = load_float32(unified, unified_kind, place, n, work[1])
        for task in range(len(masks)):
            _unpack(bytes_at(masks[task] + place // 8, (n + 7) // 8), flags)
            target = _target(outs[task], out_kind, place, n, work[2])
            _restore_tile(first, second, flags, scales[task], target)
            if out_kind != 0:
                store_float32(target, outs[task], out_kind, place)


@njit
def _move_tile(base, signs, kept, scale, out):
    for i in range(len(base)):
        moved = base[i] + (scale if signs[i] != 0 else -scale)
        out[i] = moved if kept[i] != 0 else base[i]


def _move(base, base_kind, signs, kept, scale, out, out_kind, start, stop):
    """Elements [start, stop) moved by the scale; `kept` is 0 where all are."""
    work, flags, moved = np.empty((2, TILE), np.float32), np.empty(TILE, np.uint8), np.ones(TILE, np.uint8)
    for place in range(start, stop, TILE):
        n = min(TILE, stop - place)
        first = load_float32(base, base_kind, place, n, work[0])
        _unpack(bytes_at(signs + place // 8, (n + 7) // 8), flags)
        if kept != 0:
            _unpack(bytes_at(kept + place // 8, (n + 7) // 8), moved)
        target = _target(out, out_kind, place, n, work[1])
        _move_tile(first, flags, moved, scale, target)
        if out_kind != 0:
            store_float32(target, out, out_kind, place)


def restore(base: Tensor, unified: Tensor, masks: list[Tensor], scales: list[float], outs: list[Tensor]) -> None:
    """`ops.restore_block` for several tasks, of flat tensors on the CPU; arguments are checked there."""
    places, targets = (np.array([tensor.data_ptr() for tensor in tensors]) for tensors in (masks, outs))
    sources = (base.data_ptr(), KINDS[base.dtype], unified.data_ptr(), KINDS[unified.dtype])
    arguments = (*sources, places, np.array(scales, np.float32), targets, KINDS[outs[0].dtype])
    _share(compile_kernel(_restore, _RESTORE), len(base), *arguments)


def restore_directions(base: Tensor, planes: Tensor, scale: float, out: Tensor) -> None:
    """`ops.restore_directions` on the CPU."""
    kept = planes[1].data_ptr() if len(planes) > 1 else 0
    arguments = (base.data_ptr(), KINDS[base.dtype], planes[0].data_ptr(), kept)
    _share(compile_kernel(_move, _MOVE), len(base), *arguments, scale, out.data_ptr(), KINDS[out.dtype])
