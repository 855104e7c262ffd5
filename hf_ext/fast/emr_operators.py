# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""What hf_ext puts in place of EMR-Merging's plain torch: `hf_ext.emr` registers it there.

On the CPU the kernels that numba compiles, unless `HF_EXT_NO_NUMBA=1`. On CUDA those in triton, if `HF_EXT_TRITON=1`
asks for them: until a GPU has run them, torch computes there. The first call imports them: numba takes a second.
"""

import os
from functools import cache

from hf_ext.emr.arithmetic import KERNELS, Kernels
from hf_ext.emr.arithmetic import multiply as plain_multiply


@cache
def compiled_kernels() -> Kernels | None:
    """Kernels for the CPU, or None where they are not wanted or numba is missing."""
    if _is_set("HF_EXT_NO_NUMBA"):
        return None
    try:
        from .emr_blocks import run_block, run_files
        from .emr_mixed import restore_tasks
        from .emr_restore import multiply, restore, restore_directions
    except ImportError:
        return None
    return Kernels(run_block, restore, multiply, run_files, restore_directions, restore_tasks)


def triton_kernels() -> Kernels | None:
    """Kernels for CUDA, or None where nobody asked for them."""
    if not _is_set("HF_EXT_TRITON"):
        return None
    from .emr_triton import restore, run_block

    return Kernels(run_block, restore, plain_multiply)


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "0") not in ("", "0")


def register_kernels() -> None:
    """Enters the kernels into the table of EMR-Merging's arithmetic."""
    KERNELS.update(cpu=compiled_kernels, cuda=triton_kernels)
