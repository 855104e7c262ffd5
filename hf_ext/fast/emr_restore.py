# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Compiled kernels that restore weights of EMR-Merging, used by `ops` if numba is there.

Plain loops, as in `emr_blocks`. No sum is taken in another order here: results have the bits of `ops`.
"""
# Numba's functions carry no types that mypy could read.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from functools import partial

import numpy as np
import torch
from numba import njit

from .compiling import compile_kernel, share
from .emr_blocks import KINDS, TILE, bytes_at, load_float32, size_of, store_float32

# With fewer elements a thread costs more than it saves.
_share = partial(share, least=2**17, step=TILE)
_RESTORE = "void(int64, int64, int64, int64, int64[::1], float32[::1], int64[::1], int64, int64, int64)"
_MOVE = "void(int64, int64, int64, int64, float32, int64, int64, int64, int64)"


@njit
def unpack(mask, flags):
    """A bit becomes a byte: byte i of the product has all eight bits, of which bit i is kept."""
    words = flags[: 8 * len(mask)].view(np.uint64)
    for i in range(len(mask)):
        words[i] = (mask[i] * np.uint64(0x0101010101010101)) & np.uint64(0x8040201008040201)


@njit
def restore_tile(base, unified, flags, scale, out):
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
        first = load_float32(base + place * size_of(base_kind), base_kind, n, work[0])
        second = load_float32(unified + place * size_of(unified_kind), unified_kind, n, work[1])
        for task in range(len(masks)):
            unpack(bytes_at(masks[task] + place // 8, (n + 7) // 8), flags)
            target = outs[task] + place * size_of(out_kind)
            if out_kind == 0:
                restore_tile(first, second, flags, scales[task], bytes_at(target, 4 * n).view(np.float32))
            else:
                restore_tile(first, second, flags, scales[task], work[2][:n])
                store_float32(work[2][:n], target, out_kind)


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
        first = load_float32(base + place * size_of(base_kind), base_kind, n, work[0])
        unpack(bytes_at(signs + place // 8, (n + 7) // 8), flags)
        if kept != 0:
            unpack(bytes_at(kept + place // 8, (n + 7) // 8), moved)
        target = out + place * size_of(out_kind)
        if out_kind == 0:
            _move_tile(first, flags, moved, scale, bytes_at(target, 4 * n).view(np.float32))
        else:
            _move_tile(first, flags, moved, scale, work[1][:n])
            store_float32(work[1][:n], target, out_kind)


def restore(
    base: torch.Tensor, unified: torch.Tensor, masks: list[torch.Tensor], scales: list[float], outs: list[torch.Tensor]
) -> None:
    """`ops.restore_block` for several tasks, of flat tensors on the CPU; arguments are checked there."""
    places, targets = (np.array([tensor.data_ptr() for tensor in tensors]) for tensors in (masks, outs))
    sources = (base.data_ptr(), KINDS[base.dtype], unified.data_ptr(), KINDS[unified.dtype])
    arguments = (*sources, places, np.array(scales, np.float32), targets, KINDS[outs[0].dtype])
    _share(compile_kernel(_restore, _RESTORE), len(base), *arguments)


def restore_directions(base: torch.Tensor, planes: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """`ops.restore_directions` on the CPU."""
    kept = planes[1].data_ptr() if len(planes) > 1 else 0
    arguments = (base.data_ptr(), KINDS[base.dtype], planes[0].data_ptr(), kept)
    _share(compile_kernel(_move, _MOVE), len(base), *arguments, scale, out.data_ptr(), KINDS[out.dtype])
