"""Machine code of numba's kernels, and threads that share their work. Needs numba."""

import gc
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Lock
from typing import Any

import torch
from numba import njit

_compiling = Lock()


@cache
def compile_kernel(function: Callable[..., Any], signature: str) -> Callable[..., Any]:
    """Machine code of a kernel: from numba's cache, or compiled and put there, or only compiled."""
    with _compiling:
        # Switch the garbage collector off while numba loads: its passes took longer than the load.
        collecting = gc.isenabled()
        gc.disable()
        try:
            return njit(signature, nogil=True, cache=True)(function)
        except Exception:
            # No folder can be written, the disk is full, a file of the cache is damaged: do without. What is wrong
            # with the kernel itself is raised again.
            return njit(signature, nogil=True)(function)
        finally:
            if collecting:
                gc.enable()


@cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Threads of a process: a fork has none of its parent's."""
    return ThreadPoolExecutor(threads, thread_name_prefix="hf-ext-kernel")


def share(kernel: Callable[..., None], items: int, *arguments: Any, least: int = 1, step: int = 1) -> None:
    """Run a kernel, called with arguments, start and stop, on all items: on as many threads as torch uses, of which
    each has `least` of them or more, and starts at a multiple of `step`."""
    count = max(1, min(torch.get_num_threads(), items // least))
    part = -(-items // (count * step)) * step
    edges = [(start, min(start + part, items)) for start in range(0, items, part)] if items else []
    others = [_pool(count - 1, os.getpid()).submit(kernel, *arguments, *edge) for edge in edges[1:]]
    if edges:
        kernel(*arguments, *edges[0])
    for other in others:
        other.result()
