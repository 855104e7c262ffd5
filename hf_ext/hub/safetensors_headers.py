"""Headers of safetensors files: what a file says it holds, believed only after every number has been checked.

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

from ..files import parse_json_object

# What huggingface_hub allows too. The format itself allows 100 MB, which are 1.7 million tensors: to parse that takes
# over a gigabyte of memory. A checkpoint of this world has thousands of tensors in a file, and 100 bytes for each.
MAX_HEADER_BYTES = 25_000_000
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
_PACKED = {torch.float4_e2m1fn_x2: 2}
# Sizes in a shape: torch and NumPy have no more, and the product of very many takes minutes.
_MAX_SIZES = 64


class CheckpointError(ValueError):
    """A checkpoint that cannot be read: the message names the file, what is wrong with it and what to do."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """
    Where one tensor lies and what it looks like, known before any of its bytes are read.

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
        """How many numbers the tensor holds; of `torch.float4_e2m1fn_x2` two in each element."""
        return math.prod(self.shape) * _PACKED.get(self.dtype, 1)


def header_length(prefix: bytes | bytearray, file_size: int, file: str) -> int:
    """Reads the first eight bytes of a safetensors file: the length of its header."""
    if file_size < 8:
        raise CheckpointError(f"{file}: {file_size} bytes are too few for a safetensors file; fetch or save it again.")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file}: the header claims {length} bytes, at most {MAX_HEADER_BYTES} are allowed; this is not a "
            "safetensors file, or it is damaged (fetch it again), or it has too many tensors (save it in shards)."
        )
    if 8 + length > file_size:
        raise CheckpointError(
            f"{file}: the header claims {length} bytes but the file has only {file_size}; it was cut: fetch it again."
        )
    return length


def parse_header(data: bytes | bytearray, file_size: int, file: str) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Parses the JSON header of a safetensors file, whose tensors must tile the file without gap or overlap."""
    entries = parse_json_object(data, file, CheckpointError)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(
            f"{file}: `__metadata__` must map strings to strings, got {metadata!r:.80}; save it again."
        )
    for name, entry in entries.items():
        complete = isinstance(entry, dict) and set(entry) == {"dtype", "shape", "data_offsets"}
        if not complete or not _are_sizes(entry["data_offsets"]) or len(entry["data_offsets"]) != 2:
            raise CheckpointError(
                f"{file}: tensor {name!r} must have dtype, shape and data_offsets, two non-negative integers; got "
                f"{entry!r:.80}: save the file again."
            )
    start = position = 8 + len(data)
    tensors = _in_order(
        {
            name: describe_tensor(name, entry["dtype"], entry["shape"], start + entry["data_offsets"][0], file)
            for name, entry in entries.items()
        }
    )
    for name, info in tensors.items():
        found, needed = entries[name]["data_offsets"], [position - start, position - start + info.nbytes]
        if found != needed:
            raise CheckpointError(
                f"{file}: tensor {name!r} has data_offsets {found}; its dtype and shape, after the tensor before it, "
                f"need {needed}: the file is malformed, fetch or save it again."
            )
        position += info.nbytes
    if position != file_size:
        raise CheckpointError(
            f"{file}: the header describes {position} bytes but the file has {file_size}; "
            "it was cut or changed: fetch it again."
        )
    return tensors, metadata


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
                info = describe_tensor(name, described.get_dtype(), described.get_shape(), position, file)
                tensors[name] = info
                position += info.nbytes
    except SafetensorError as error:
        raise CheckpointError(f"{file}: not a safetensors file ({error}); fetch or save it again.") from error
    # The library opens the file by its name, and the bytes are read from the descriptor.
    if not os.path.samestat(os.fstat(descriptor), os.stat(path)):
        raise CheckpointError(f"{file}: it was replaced while it was being opened; open it again.")
    return _in_order(tensors), metadata


def _in_order(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """As they lie in the file, those without bytes by their names: the same order for every reader."""
    return dict(sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes, item[0])))


def describe_tensor(name: str, dtype: object, shape: object, offset: int, file: str) -> TensorInfo:
    """Describes a tensor as torch has it, by what a header says of it."""
    kind = _DTYPES.get(dtype) if isinstance(dtype, str) else None
    if kind is None:
        raise CheckpointError(
            f"{file}: tensor {name!r} has dtype {dtype!r:.80}; allowed are {sorted(_DTYPES)}: convert it."
        )
    if not _are_sizes(shape):
        raise CheckpointError(
            f"{file}: tensor {name!r} has shape {shape!r:.80}; a list of at most {_MAX_SIZES} non-negative "
            "integers is allowed: save the file again."
        )
    assert isinstance(shape, list)
    packed = _PACKED.get(kind, 1)
    if packed > 1:
        if not shape or shape[-1] % packed:
            raise CheckpointError(
                f"{file}: tensor {name!r} of dtype {dtype} has shape {shape!r:.80}; its last size must be a multiple "
                f"of {packed}: save the file again."
            )
        shape = [*shape[:-1], shape[-1] // packed]
    return TensorInfo(kind, tuple(shape), math.prod(shape) * kind.itemsize, file, offset)


def header_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> list[int]:
    """How a header writes the shape of a tensor."""
    packed = _PACKED.get(dtype, 1)
    return list(shape) if packed == 1 else [*shape[:-1], shape[-1] * packed]


def _are_sizes(value: object) -> bool:
    # bool is an int to Python, but not a size; torch counts in 64-bit integers
    if not isinstance(value, list) or len(value) > _MAX_SIZES:
        return False
    return all(type(item) is int and 0 <= item < 2**63 for item in value)
