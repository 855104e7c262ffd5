# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Compiled kernels of EMR-Merging's arithmetic.

On the CPU the kernels that numba compiles, unless `HF_EXT_NO_NUMBA=1`; on GPUs torch computes. The first call imports
them: numba takes a second. `hf_ext.emr.ops` asks for them here; this folder imports nothing of EMR's.
"""

import os
from collections.abc import Callable
from functools import cache
from typing import NamedTuple


class Kernels(NamedTuple):
    """One way to compute on a type of device. Only compiled code reads and writes files itself (`run_files`)."""

    run_block: Callable[..., None]
    restore: Callable[..., None]
    run_files: Callable[..., bool] | None = None
    restore_directions: Callable[..., None] | None = None


@cache
def compiled_kernels() -> Kernels | None:
    """Kernels for the CPU, or None where they are not wanted or numba is missing."""
    if os.environ.get("HF_EXT_NO_NUMBA", "0") not in ("", "0"):
        return None
    try:
        from .emr_blocks import run_block, run_files
        from .emr_restore import restore, restore_directions
    except ImportError:
        return None
    return Kernels(run_block, restore, run_files, restore_directions)
