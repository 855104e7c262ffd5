# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Local files read and written by compiled code, for the kernels of EMR-Merging: between read, merge and write no
thread waits for the interpreter's lock, so that a block is still in the caches."""
# Numba's functions carry no types that mypy could read.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from numba import njit, types

from .kernels_vectors_emr import LANES, size_of

_TRANSFER = types.int64(types.int32, types.int64, types.int64, types.int64)
_pread = types.ExternalFunction("pread", _TRANSFER)
_pwrite = types.ExternalFunction("pwrite", _TRANSFER)
_memset = types.ExternalFunction("memset", types.int64(types.int64, types.int32, types.int64))


@njit
def read_block(files, places, kinds, addresses, tails, low, n):
    """Read `n` elements from `low` on of the base and of each task, with zeros after the last to whole vectors, whose
    address goes to `tails`. False where a file did not give all of them."""
    rest = n % LANES
    for item in range(len(kinds)):
        size = size_of(kinds[item])
        tails[item] = addresses[item] + (n - rest) * size
        # The last are the unified weights, which are written.
        if item < len(kinds) - 1:
            if _pread(files[item], addresses[item], n * size, places[item] + low * size) != n * size:
                return False
            if rest:
                _memset(tails[item] + rest * size, 0, (LANES - rest) * size)
    return True


@njit
def write_bytes(file, place, address, count):
    """False where a file did not take all of them."""
    return _pwrite(file, address, count, place) == count
