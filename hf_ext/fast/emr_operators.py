# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""What hf_ext puts in place of EMR-Merging's plain torch: `hf_ext.emr` registers it there.

On the CPU the kernels that numba compiles, unless `HF_EXT_NO_NUMBA=1`; on GPUs torch computes. The first call imports
them: numba takes a second.
"""

import os
from functools import cache

from hf_ext.emr.arithmetic import KERNELS, Kernels


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


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "0") not in ("", "0")


def register_kernels() -> None:
    """Enters the kernels into the table of EMR-Merging's arithmetic."""
    KERNELS["cpu"] = compiled_kernels
