"""Headers of safetensors files with torch's types: what a file says it holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .header_format import BITS, parse_entries
from .header_format import CheckpointError as CheckpointError

# Of an index of shards, whose entries are plain strings: that of a trillion parameters has 20 MB.
MAX_INDEX_BYTES = 50_000_000

# In the order of the names in headers.
_TYPES = """
float64 float32 float16 bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu
float4_e2m1fn_x2 complex64 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool
"""
_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, dtype) for name, dtype in zip(BITS, _TYPES.split(), strict=True)
}
# How a header names each type.
DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# Numbers in an element: torch packs two numbers of 4 bits into one, a header counts them one by one.
PACKED = {dtype: max(8 // BITS[name], 1) for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Place, dtype and shape of one tensor, known before any of its bytes are read."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    # relative to the checkpoint
    file: str
    # first byte of the tensor in its file
    offset: int

    @property
    def numbers(self) -> int:
        """Count of numbers in the tensor; of `torch.float4_e2m1fn_x2` two in each element."""
        return math.prod(self.shape) * PACKED[self.dtype]


def parse_header(data: bytes | bytearray, file_size: int, file: str) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Parses the JSON header of a safetensors file, whose tensors must tile the file without gap or overlap."""
    entries, metadata = parse_entries(data, file_size, file)
    found = {}
    for name, entry in entries.items():
        dtype, shape = _DTYPES[entry.dtype], entry.shape
        if PACKED[dtype] > 1:
            shape = (*shape[:-1], shape[-1] // PACKED[dtype])
        found[name] = TensorInfo(dtype, shape, entry.nbytes, file, entry.offset)
    return found, metadata
