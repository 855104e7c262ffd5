# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Linear layers of EMR-Merging for rows of several tasks: y_t = x_t Ŵ_tᵀ without a restored weight in memory.

Ŵ_t = W_0 + λ_t·M_t ⊙ τ_uni is restored piece by piece and multiplied while the piece lies in the caches: W_0 and W_uni
pass through memory once for all tasks, 8 bytes a weight and a bit for each task, where N models read 4·N. The pieces
have the bits of `restore`. Few rows: tiles in the first-level cache, restored and multiplied in one compiled loop,
with sums in fp32. More rows: blocks in the second-level cache, and a product of torch for each; of blocks of 2^14 to
all weights 2^17 were the fastest.
"""
# Numba's functions carry no types that mypy could read.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

import os
import threading
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from numba import njit
from torch import Tensor

from .emr_blocks import KINDS, TILE, bytes_at, compile_kernel, load_float32, size_of, store_float32
from .emr_restore import THREAD_ELEMENTS, pool, restore_tile, unpack

if TYPE_CHECKING:
    from hf_ext.emr.layers import TaskRows

# Rows for each task, on average, up to which the compiled loop is the faster one.
_FEW = 4
_BLOCK = 2**17
# Rows in a run from which a product for each run costs less than to bring a task's runs together.
_LONG_RUN = 64
_KEPT = threading.local()


@njit(fastmath={"reassoc", "contract"})
def _dot(first, second):
    total = np.float32(0)
    for i in range(len(first)):
        total += first[i] * second[i]
    return total


@njit(fastmath={"contract"})
def _add(factor, line, out):
    for i in range(len(line)):
        out[i] += factor * line[i]


def _few(base, base_kind, unified, kind, own, masks, scales, order, edges, columns, transposed, x, y, start, stop):
    """Elements [start, stop) of the weight, `start` a multiple of 8. Where a mask is 0: the model's own, at `own`."""
    work, flags, bits = np.empty((3, TILE), np.float32), np.empty(TILE, np.uint8), np.empty(TILE, np.uint16)
    for place in range(start, stop, TILE):
        n = min(TILE, stop - place)
        first = load_float32(base + place * size_of(base_kind), base_kind, n, work[0])
        second = load_float32(unified + place * size_of(kind), kind, n, work[1])
        for task in range(len(masks)):
            if masks[task] == 0:
                weights = load_float32(own + place * size_of(kind), kind, n, work[2])
            else:
                weights = work[2][:n]
                unpack(bytes_at(masks[task] + place // 8, (n + 7) // 8), flags)
                restore_tile(first, second, flags, scales[task], weights)
                if kind != 0:
                    # Rounded as the model would hold them.
                    store_float32(weights, bits.ctypes.data, kind)
                    load_float32(bits.ctypes.data, kind, n, weights)
            done = 0
            while done < n:
                line = (place + done) // columns
                left = place + done - line * columns
                count = min(columns - left, n - done)
                piece = weights[done : done + count]
                for index in range(edges[task], edges[task + 1]):
                    row = order[index]
                    if transposed:
                        _add(x[row, line], piece, y[row][left : left + count])
                    else:
                        y[row, line] += _dot(x[row][left : left + count], piece)
                done += count


@cache
def _few_kernel() -> Callable[..., None]:
    tasks, rows = "int64[::1], float32[::1], int64[::1], int64[::1]", "float32[:, ::1], float32[:, ::1]"
    weights = "int64, int64, int64, int64, int64"
    return compile_kernel(_few, f"void({weights}, {tasks}, int64, boolean, {rows}, int64, int64)")


# Where the model's own weight is what would be restored, to restore it is cheaper here than to read it.
def _multiply_few(x, rows, base, unified, own, current, masks, scales, biases, transposed) -> Tensor:
    (lines, columns), elements = base.shape, base.numel()
    width = columns if transposed else lines
    first = torch.zeros(len(x), width) if biases is None else biases.float()[rows.tasks]
    sources = (base.data_ptr(), KINDS[base.dtype], unified.data_ptr(), KINDS[unified.dtype], own.data_ptr())
    addresses = np.array([0 if mask is None else mask.data_ptr() for mask in masks])
    order = (rows.order.numpy(), rows.edges_array)
    arguments = (*sources, addresses, np.array(scales, np.float32), *order, columns, transposed, x.float().numpy())
    count = max(1, min(torch.get_num_threads(), elements // THREAD_ELEMENTS))
    share = -(-lines // count // 8) * 8 * columns
    # The lines of a transposed weight add to all outputs: each thread has sums of its own.
    starts = range(0, elements, share)
    sums = [torch.zeros_like(first) if transposed and start else first for start in starts]
    calls = [(*arguments, y.numpy(), at, min(at + share, elements)) for y, at in zip(sums, starts, strict=True)]
    others = [pool(os.getpid(), count - 1).submit(_few_kernel(), *call) for call in calls[1:]]
    _few_kernel()(*calls[0])
    for other in others:
        other.result()
    for y in sums[1:] if transposed else ():
        first += y
    return first.to(x.dtype)


def _restore_tasks(base, base_kind, unified, kind, masks, scales, outs, start, stop):
    """Elements [start, stop), `start` a multiple of 8, for each task into its memory; none where a mask is 0."""
    work, flags = np.empty((3, TILE), np.float32), np.empty(TILE, np.uint8)
    for place in range(start, stop, TILE):
        n = min(TILE, stop - place)
        first = load_float32(base + place * size_of(base_kind), base_kind, n, work[0])
        second = load_float32(unified + place * size_of(kind), kind, n, work[1])
        for task in range(len(masks)):
            if masks[task] != 0:
                unpack(bytes_at(masks[task] + place // 8, (n + 7) // 8), flags)
                target = outs[task] + (place - start) * size_of(kind)
                if kind == 0:
                    restore_tile(first, second, flags, scales[task], bytes_at(target, 4 * n).view(np.float32))
                else:
                    restore_tile(first, second, flags, scales[task], work[2][:n])
                    store_float32(work[2][:n], target, kind)


@cache
def _restore_tasks_kernel() -> Callable[..., None]:
    arrays = "int64[::1], float32[::1], int64[::1]"
    return compile_kernel(_restore_tasks, f"void(int64, int64, int64, int64, {arrays}, int64, int64)")


def _scratch(elements: int, dtype: torch.dtype) -> Tensor:
    """Memory of this thread, which is kept: to get it anew costs more than to fill it."""
    held = getattr(_KEPT, "scratch", None)
    if held is None or held.dtype != dtype or len(held) < elements:
        held = _KEPT.scratch = torch.empty(elements, dtype=dtype)
    return held[:elements]


def _multiply_blocks(x, rows, base, unified, own, current, masks, scales, biases, transposed) -> Tensor:
    (lines, columns), apart = base.shape, len(x) < (2048 if transposed else _LONG_RUN) * sum(map(len, rows.runs))
    source = x[rows.order] if apart else x
    runs = [[slice(*edge)] for edge in zip(rows.edges[:-1], rows.edges[1:], strict=True)] if apart else rows.runs
    y = x.new_empty(len(x), columns if transposed else lines)
    step = max(8, _BLOCK // columns // 8 * 8)
    if transposed and x.dtype != torch.float32:
        # Products of blocks are added up, and in half precision each sum would be rounded.
        step = lines
    scratch = _scratch(len(masks) * min(step, lines) * columns, x.dtype).view(len(masks), -1, columns)
    kernel = _restore_tasks_kernel()
    sources = (base.data_ptr(), KINDS[base.dtype], unified.data_ptr(), KINDS[unified.dtype])
    masks = [None if task == current else mask for task, mask in enumerate(masks)]
    addresses = np.array([0 if mask is None else mask.data_ptr() for mask in masks])
    outs = np.array([part.data_ptr() for part in scratch])
    scales = np.array(scales, np.float32)
    for run in runs[current] if current >= 0 else ():
        weights = own if transposed else own.t()
        _multiply(None if biases is None else biases[current], source[run], weights, y[run])
    others = [task for task in range(len(masks)) if task != current]
    for top in range(0, lines, step):
        block = slice(top, min(top + step, lines))
        kernel(*sources, addresses, scales, outs, top * columns, block.stop * columns)
        for task in others:
            weights = scratch[task, : block.stop - top]
            for run in runs[task]:
                if transposed:
                    begun = y[run] if top else None if biases is None else biases[task]
                    _multiply(begun, source[run, block], weights, y[run])
                else:
                    _multiply(None if biases is None else biases[task, block], source[run], weights.t(), y[run, block])
    return y[rows.inverse] if apart else y


def _multiply(begun, x, weights, out) -> None:
    if begun is None:
        torch.mm(x, weights, out=out)
    else:
        torch.addmm(begun, x, weights, out=out)


def multiply_tasks(
    x: Tensor,  # [n, in], in the type of the model's weight
    rows: "TaskRows",  # whose rows they are
    base: Tensor,  # the merged weight as a matrix [out, in]; [in, out] if `transposed`
    unified: Tensor,  # the same shape
    own: Tensor,  # the weight that the model holds
    current: int,  # whose it is, -1 if nobody's
    masks: list[Tensor | None],  # of each task; the current one may have none, then `own` is used
    scales: list[float],
    biases: Tensor | None,  # [tasks, out]
    transposed: bool,
) -> Tensor:
    """Multiplies rows of several tasks by each task's weight, and adds its bias: [n, out]."""
    multiply = _multiply_few if len(x) <= _FEW * len(masks) else _multiply_blocks
    return multiply(x.contiguous(), rows, base, unified, own, current, masks, scales, biases, transposed)
