"""Headers of safetensors files: what a file says it holds, believed only after every number has been checked."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

# The limit of the safetensors format itself.
MAX_HEADER_BYTES = 100_000_000

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
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


class CheckpointError(ValueError):
    """A checkpoint that cannot be read: the message names the file, what is wrong with it and what to do."""


@dataclass(frozen=True)
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


def parse_json_object(data: bytes | bytearray, file: str) -> dict[str, Any]:
    """
    Parses bytes that must hold one JSON object in which no key comes twice.

    Args:
        data (`bytes` or `bytearray`): UTF-8 text.
        file (`str`): Name used in the error messages.

    Returns:
        `dict[str, Any]`: The object.

    Raises:
        CheckpointError: The bytes are not UTF-8, not JSON, not an object, or repeat a key.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(key for key, _ in pairs)
        if len(counts) != len(pairs):
            twice = [key for key, count in counts.most_common(3) if count > 1]
            raise CheckpointError(f"{file}: the JSON repeats {twice}; the file is malformed: fetch or save it again.")
        return dict(pairs)

    try:
        value = json.loads(bytes(data).decode("utf-8"), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not valid JSON ({error}); fetch or save the file again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: expected a JSON object, got {type(value).__name__}; fetch or save it again.")
    return value


def header_length(prefix: bytes | bytearray, file_size: int, file: str) -> int:
    """
    Reads the first eight bytes of a safetensors file: the length of its header.

    Args:
        prefix (`bytes` or `bytearray`): The first eight bytes.
        file_size (`int`): Length of the whole file in bytes.
        file (`str`): Name used in the error messages.

    Returns:
        `int`: Length of the JSON header in bytes.

    Raises:
        CheckpointError: The length is over 100 MB, or the file ends before the header does.
    """
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file}: the header claims {length} bytes, at most {MAX_HEADER_BYTES} are allowed; "
            "this is not a safetensors file, or it is damaged: fetch it again."
        )
    if 8 + length > file_size:
        raise CheckpointError(
            f"{file}: the header claims {length} bytes but the file has only {file_size}; it was cut: fetch it again."
        )
    return length


def parse_header(data: bytes | bytearray, file_size: int, file: str) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """
    Parses and verifies the JSON header of a safetensors file.

    Args:
        data (`bytes` or `bytearray`): The header, without the eight bytes before it.
        file_size (`int`): Length of the whole file in bytes.
        file (`str`): Name of the file, kept in each [`TensorInfo`] and used in the error messages.

    Returns:
        `tuple[dict[str, TensorInfo], dict[str, str]]`: The tensors by name, and the `__metadata__` strings.

    Raises:
        CheckpointError: An entry is malformed, or the tensors do not tile the file exactly: gap, overlap, a
            length that is not shape times element size, an end that is not the end of the file.
    """
    entries = parse_json_object(data, file)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(
            f"{file}: `__metadata__` must map strings to strings, got {metadata!r:.80}; save it again."
        )
    start = 8 + len(data)
    tensors = {name: _tensor_info(name, entry, start, file) for name, entry in entries.items()}

    position = start
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if info.offset != position:
            what = "overlaps the tensor before it" if info.offset < position else "leaves a gap before it"
            raise CheckpointError(
                f"{file}: tensor {name!r} {what} (starts at byte {info.offset}, expected {position}); "
                "the file is malformed: fetch or save it again."
            )
        position += info.nbytes
    if position != file_size:
        raise CheckpointError(
            f"{file}: the header describes {position} bytes but the file has {file_size}; "
            "it was cut or changed: fetch it again."
        )
    return tensors, metadata


def _tensor_info(name: str, entry: object, start: int, file: str) -> TensorInfo:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            f"{file}: tensor {name!r} must have dtype, shape and data_offsets, got {entry!r:.80}; save the file again."
        )
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{file}: tensor {name!r} has shape {shape!r:.80} and data_offsets {offsets!r:.80}; "
            "lists of non-negative integers are allowed (two offsets): save the file again."
        )
    dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise CheckpointError(
            f"{file}: tensor {name!r} has dtype {entry['dtype']!r:.80}; allowed are {sorted(_DTYPES)}: convert it."
        )
    nbytes = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise CheckpointError(
            f"{file}: tensor {name!r} of shape {shape} and dtype {entry['dtype']} needs {nbytes} bytes, "
            f"its offsets give {offsets[1] - offsets[0]}; the file is malformed: fetch or save it again."
        )
    return TensorInfo(dtype=dtype, shape=tuple(shape), nbytes=nbytes, file=file, offset=start + offsets[0])


def _are_sizes(value: object) -> bool:
    # bool is an int to Python, but not a size; torch counts in 64-bit integers
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)
