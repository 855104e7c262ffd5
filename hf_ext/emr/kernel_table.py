# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""The table of EMR-Merging's faster kernels. Importing `hf_ext` fills it, and loads no torch for that."""

from collections.abc import Callable
from typing import Any

# By type of device: a function that gives the `Kernels` of `arithmetic`, or None where they cannot be had.
KERNELS: dict[str, Callable[[], Any]] = {}
