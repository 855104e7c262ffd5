"""Headers of safetensors files with torch's types: what a file says it holds.

A file on this disk is parsed by the safetensors library, several times faster and in less memory. It takes whole files
only, so the header of a file on a Hub, of which nothing else is fetched, is parsed here.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from .header_format import (
    BITS,
    MAX_HEADER_BYTES,
    CheckpointError,
    Entry,
    describe_entry,
    header_length,
    in_order,
    parse_entries,
)

__all__ = [
    "DTYPE_NAMES",
    "MAX_HEADER_BYTES",
    "MAX_INDEX_BYTES",
    "CheckpointError",
    "TensorInfo",
    "header_length",
    "header_shape",
    "parse_header",
    "read_header",
]

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
    """
    Place, dtype and shape of one tensor, known before any of its bytes are read.

    Args:
        dtype (`torch.dtype`): Type of the elements.
        shape (`tuple[int, ...]`): Shape; `()` for a scalar.
        nbytes (`int`): Length in bytes.
        file (`str`): Name of the file that holds the tensor, relative to the checkpoint.
        offset (`int`): First byte of the tensor, counted from the start of the file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    file: str
    offset: int

    @property
    def numbers(self) -> int:
        """Count of numbers in the tensor; of `torch.float4_e2m1fn_x2` two in each element."""
        return math.prod(self.shape) * _PACKED.get(self.dtype, 1)


def parse_header(data: bytes | bytearray, file_size: int, file: str) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Parses the JSON header of a safetensors file, whose tensors must tile the file without gap or overlap."""
    entries, metadata = parse_entries(data, file_size, file)
    return {name: _with_dtype(entry, file) for name, entry in entries.items()}, metadata


def read_header(
    path: Path, descriptor: int, header_bytes: int, file: str
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Reads the header of a file on this disk with the safetensors library, which verifies it as `parse_header`."""
    tensors = {}
    try:
        # NumPy's form is the one that maps no tensor; only the descriptions are taken from it.
        with safe_open(path, framework="numpy") as opened:
            metadata = opened.metadata() or {}
            # The library names no offsets. It made sure that the tensors tile the file without gap or overlap, so in
            # this order each begins where the one before it ends.
            position = 8 + header_bytes
            for name in opened.offset_keys():
                described = opened.get_slice(name)
                entry = describe_entry(name, described.get_dtype(), described.get_shape(), position, file)
                tensors[name] = entry
                position += entry.nbytes
    except SafetensorError as error:
        raise CheckpointError(f"{file}: not a safetensors file ({error}); fetch or save it again.") from error
    # The library opens the file by its name, and the bytes are read from the descriptor.
    if not os.path.samestat(os.fstat(descriptor), os.stat(path)):
        raise CheckpointError(f"{file}: it was replaced while it was being opened; open it again.")
    return {name: _with_dtype(entry, file) for name, entry in in_order(tensors).items()}, metadata


def _with_dtype(entry: Entry, file: str) -> TensorInfo:
    dtype, shape = _DTYPES[entry.dtype], entry.shape
    packed = _PACKED.get(dtype, 1)
    if packed > 1:
        shape = (*shape[:-1], shape[-1] // packed)
    return TensorInfo(dtype, shape, entry.nbytes, file, entry.offset)


def header_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> list[int]:
    """Shape of a tensor as a header writes it."""
    packed = _PACKED.get(dtype, 1)
    return list(shape) if packed == 1 else [*shape[:-1], shape[-1] * packed]
