# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Compiled kernels that restore weights of EMR-Merging and multiply LoRA factors, used by `ops_emr` if numba is there.

Restoring moves 12 bytes a weight of fp32, so it is bound by memory: large results are written past the caches.
"""
# Numba's functions carry no types that mypy could read.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from numba import njit

from .kernels_vectors_emr import (
    KINDS,
    LANES,
    TILE,
    as_float32,
    bfloat16,
    bits16,
    choose,
    compile_kernel,
    element,
    float16,
    float32,
    load,
    round_float32,
    settle,
    size_of,
    spread,
    store,
    stream,
)

# Below this a thread costs more than it saves.
_THREAD_ELEMENTS = 2**17
# Bytes of a result that does not fit in a second-level cache anyway.
_STREAM_BYTES = 2**22


@njit
def _restore_tile(base, unified, mask, scale, out, vectors):
    factor = spread(scale)
    for i in range(vectors):
        start = load(base, i)
        moved = start + factor * (load(unified, i) - start)
        store(out, i, choose(load(mask, i), moved, start))


@njit
def _stream_tile(base, unified, mask, scale, out, vectors):
    factor = spread(scale)
    for i in range(vectors):
        start = load(base, i)
        moved = start + factor * (load(unified, i) - start)
        stream(out, i, choose(load(mask, i), moved, start))


@njit
def _restore_mixed(base, base_kind, unified, unified_kind, mask, scale, out, out_kind, work, vectors):
    result = work + 8 * TILE
    first = float32(as_float32(base, base_kind, work, vectors))
    second = float32(as_float32(unified, unified_kind, work + 4 * TILE, vectors))
    _restore_tile(first, second, mask, scale, float32(result), vectors)
    round_float32(result, out, out_kind, vectors)


def _restore(base, base_kind, unified, unified_kind, mask, scale, out, out_kind, past_caches, work, start, stop):
    """Whole vectors from element `start`, a multiple of a tile, to `stop`."""
    # One dtype without a detour, past the caches or not; else by way of fp32.
    path = 2 * base_kind + past_caches if base_kind == unified_kind and base_kind == out_kind else -1
    for place in range(start, stop, TILE):
        vectors = min(TILE, stop - place) // LANES
        first, second = base + place * size_of(base_kind), unified + place * size_of(unified_kind)
        target, bits = out + place * size_of(out_kind), bits16(mask + place // 8)
        if path == 0:
            _restore_tile(float32(first), float32(second), bits, scale, float32(target), vectors)
        elif path == 1:
            _stream_tile(float32(first), float32(second), bits, scale, float32(target), vectors)
        elif path == 2:
            _restore_tile(float16(first), float16(second), bits, scale, float16(target), vectors)
        elif path == 3:
            _stream_tile(float16(first), float16(second), bits, scale, float16(target), vectors)
        elif path == 4:
            _restore_tile(bfloat16(first), bfloat16(second), bits, scale, bfloat16(target), vectors)
        elif path == 5:
            _stream_tile(bfloat16(first), bfloat16(second), bits, scale, bfloat16(target), vectors)
        else:
            _restore_mixed(first, base_kind, second, unified_kind, bits, scale, target, out_kind, work, vectors)
    settle()


@cache
def _restore_kernel() -> Callable[..., None]:
    whole = ", ".join(["int64"] * 6)
    return compile_kernel(_restore, f"void(int64, int64, int64, int64, int64, float32, {whole})")


@cache
def _threads(process: int, count: int) -> ThreadPoolExecutor:
    """Threads of this process: after a fork those of the parent are gone."""
    return ThreadPoolExecutor(count, thread_name_prefix="hf-ext-restore")


def restore(base: torch.Tensor, unified: torch.Tensor, mask: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """`ops_emr.restore_block` of flat tensors on the CPU; arguments are checked there."""
    kernel, n = _restore_kernel(), len(base)
    whole = n // LANES * LANES
    past_caches = out.nbytes >= _STREAM_BYTES and out.data_ptr() % 64 == 0
    sources = (base.data_ptr(), KINDS[base.dtype], unified.data_ptr(), KINDS[unified.dtype])
    arguments = (*sources, mask.data_ptr(), scale, out.data_ptr(), KINDS[out.dtype], int(past_caches))
    count = max(1, min(torch.get_num_threads(), whole // _THREAD_ELEMENTS))
    share = max(1, -(-whole // count // TILE)) * TILE
    edges = [(start, min(start + share, whole)) for start in range(0, whole, share)]
    work = torch.empty(len(edges), 3, TILE)
    jobs = [(*arguments, row.data_ptr(), *edge) for row, edge in zip(work, edges, strict=True)]
    others = [_threads(os.getpid(), count - 1).submit(kernel, *job) for job in jobs[1:]]
    if jobs:
        kernel(*jobs[0])
    for other in others:
        other.result()
    if n > whole:
        ends = [torch.zeros(LANES, dtype=tensor.dtype) for tensor in (base, unified, out)]
        for end, tensor in zip(ends, (base, unified), strict=False):
            end[: n - whole] = tensor[whole:]
        restore(ends[0], ends[1], F.pad(mask[whole // 8 :][:2], (0, 1)), scale, ends[2])
        out[whole:] = ends[2][: n - whole]


def _multiply(a, b, rank, rows, vectors, out):
    """out[row, column] = Σ_k b[row, k]·a[k, column] in the order of k, each product and each sum rounded."""
    stride = 4 * LANES * vectors
    # Four sums at once: an addition takes four cycles.
    for i in range(0, vectors, 4):
        for row in range(rows):
            first = second = third = fourth = spread(np.float32(0))
            for k in range(rank):
                factor, line = element(float32(b), row * rank + k), float32(a + k * stride)
                first = first + factor * load(line, i)
                second = second + factor * load(line, i + 1)
                third = third + factor * load(line, i + 2)
                fourth = fourth + factor * load(line, i + 3)
            line = float32(out + row * stride)
            store(line, i, first)
            store(line, i + 1, second)
            store(line, i + 2, third)
            store(line, i + 3, fourth)


@cache
def _multiply_kernel() -> Callable[..., None]:
    return compile_kernel(_multiply, "void(int64, int64, int64, int64, int64, int64)")


def multiply(b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """b @ a of contiguous fp32 in a fixed order, [rows, rank] and [rank, columns]."""
    (rows, rank), columns = b.shape, a.shape[1]
    a = F.pad(a, (0, -columns % (4 * LANES))).contiguous()
    product = torch.empty(rows, a.shape[1])
    b = b.contiguous()
    _multiply_kernel()(a.data_ptr(), b.data_ptr(), rank, rows, a.shape[1] // LANES, product.data_ptr())
    return product[:, :columns]
