"""Headers of safetensors files with torch's types: what a file says it holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .header_format import BITS, parse_entries
from .header_format import CheckpointError as CheckpointError

# Of an index of shards, whose entries are plain strings: that of a trillion parameters has 20 MB.
MAX_INDEX_BYTES = 50_000_000

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# How a header names each type.
DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# Numbers in an element: torch packs two numbers of 4 bits into one, a header counts them one by one.
_PACKED = {dtype: 8 // BITS[name] for name, dtype in _DTYPES.items() if BITS[name] < 8}


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
        return math.prod(self.shape) * _PACKED.get(self.dtype, 1)


def parse_header(data: bytes | bytearray, file_size: int, file: str) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Parses the JSON header of a safetensors file, whose tensors must tile the file without gap or overlap."""
    entries, metadata = parse_entries(data, file_size, file)
    found = {}
    for name, entry in entries.items():
        dtype, shape = _DTYPES[entry.dtype], entry.shape
        if dtype in _PACKED:
            shape = (*shape[:-1], shape[-1] // _PACKED[dtype])
        found[name] = TensorInfo(dtype, shape, entry.nbytes, file, entry.offset)
    return found, metadata


def header_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> list[int]:
    """Shape of a tensor as a header writes it."""
    packed = _PACKED.get(dtype, 1)
    return list(shape) if packed == 1 else [*shape[:-1], shape[-1] * packed]
