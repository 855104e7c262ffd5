# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""A compiled kernel that restores a block of the weights of several tasks: the base and the merged model are read once
for all of them, tile by tile, and each task adds a bit an element. The weights have the bits of `restore`.
"""
# Numba's functions carry no types that mypy could read.

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from numba import njit

from .emr_blocks import KINDS, TILE, bytes_at, compile_kernel, load_float32, size_of, store_float32
from .emr_restore import restore_tile, unpack


@njit
def _restore_one(first, second, mask, scale, flags, work, target, kind):
    unpack(mask, flags)
    if kind == 0:
        restore_tile(first, second, flags, scale, bytes_at(target, 4 * len(first)).view(np.float32))
    else:
        restore_tile(first, second, flags, scale, work)
        store_float32(work, target, kind)


def _restore_tasks(base, base_kind, unified, kind, masks, scales, outs, n):
    work, flags = np.empty((3, TILE), np.float32), np.empty(TILE, np.uint8)
    for place in range(0, n, TILE):
        count = min(TILE, n - place)
        first = load_float32(base + place * size_of(base_kind), base_kind, count, work[0])
        second = load_float32(unified + place * size_of(kind), kind, count, work[1])
        for task in range(len(masks)):
            mask = bytes_at(masks[task] + place // 8, (count + 7) // 8)
            target = outs[task] + place * size_of(kind)
            _restore_one(first, second, mask, scales[task], flags, work[2][:count], target, kind)


@cache
def _restore_tasks_kernel() -> Callable[..., None]:
    arrays = "int64[::1], float32[::1], int64[::1]"
    return compile_kernel(_restore_tasks, f"void(int64, int64, int64, int64, {arrays}, int64)")


def restore_tasks(
    base: torch.Tensor,
    unified: torch.Tensor,
    masks: list[torch.Tensor],
    scales: list[float],
    outs: list[torch.Tensor],
) -> None:
    """`arithmetic.restore_tasks` on one thread."""
    sources = (base.data_ptr(), KINDS[base.dtype], unified.data_ptr(), KINDS[unified.dtype])
    addresses = (np.array([tensor.data_ptr() for tensor in tensors]) for tensors in (masks, outs))
    places, targets = addresses
    _restore_tasks_kernel()(*sources, places, np.array(scales, np.float32), targets, len(base))
