# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""What hf_ext puts in place of EMR-Merging's plain torch: importing `hf_ext` enters it there.

On the CPU the kernels that numba compiles, unless `HF_EXT_NO_NUMBA=1`; on GPUs torch computes. The first call imports
them: numba takes a second.
"""

import os
from functools import cache
from typing import Any

from hf_ext.emr.kernel_table import KERNELS


@cache
def compiled_kernels() -> Any:
    """Kernels for the CPU, or None where they are not wanted or numba is missing."""
    if _is_set("HF_EXT_NO_NUMBA"):
        return None
    from hf_ext.emr.arithmetic import Kernels

    try:
        from .emr_blocks import run_block, run_files
        from .emr_mixed import restore_tasks
        from .emr_restore import multiply, restore, restore_directions
    except ImportError:
        return None
    return Kernels(run_block, restore, multiply, run_files, restore_directions, restore_tasks)


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "0") not in ("", "0")


KERNELS["cpu"] = compiled_kernels
