"""Format of safetensors headers, in plain Python: what a file says it holds, believed only after it was checked.

A server that counts parameters reads headers with this module alone; `checkpoints` adds the types of torch.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import DataError
from ..files import parse_json_object

# What huggingface_hub allows too. The format itself allows 100 MB, which are 1.7 million tensors: to parse that takes
# over a gigabyte of memory. A checkpoint of this world has thousands of tensors in a file, and 100 bytes for each.
MAX_HEADER_BYTES = 25_000_000

_TYPES = "F64 F32 F16 BF16 F8_E4M3 F8_E4M3FNUZ F8_E5M2 F8_E5M2FNUZ F8_E8M0 F4 C64 I64 I32 I16 I8 U64 U32 U16 U8 BOOL"
# Bits of a number of each type, which its name says.
BITS = {name: 8 if name == "BOOL" else int(re.findall(r"\d+", name)[0]) for name in _TYPES.split()}
# Sizes in a shape: torch and NumPy have no more, and the product of very many takes minutes.
_MAX_SIZES = 64


class CheckpointError(DataError):
    """A checkpoint that cannot be read: the message names the file, what is wrong with it and what to do."""


class Entry(NamedTuple):
    """One tensor as a header describes it: the shape counts numbers, also those that share a byte."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    numbers: int  # of numbers in the tensor
    nbytes: int


def header_length(prefix: bytes | bytearray, file_size: int, file: str) -> int:
    """Reads the first eight bytes of a safetensors file: the length of its header."""
    if file_size < 8:
        raise CheckpointError(f"{file}: {file_size} bytes are too few for a safetensors file; fetch or save it again.")
    if prefix == b"version ":
        raise CheckpointError(f"{file}: a pointer of Git LFS in place of the weights; fetch them with `git lfs pull`.")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        told = f"the header claims {length} bytes, at most {MAX_HEADER_BYTES} are allowed"
        advice = "it is no safetensors file, or damaged (fetch it again), or has too many tensors (save it in shards)."
        raise CheckpointError(f"{file}: {told}; {advice}")
    if 8 + length > file_size:
        told = f"the header claims {length} bytes but the file has only {file_size}"
        raise CheckpointError(f"{file}: {told}; it was cut: fetch it again.")
    return length


def parse_entries(data: bytes | bytearray, file_size: int, file: str) -> tuple[dict[str, Entry], dict[str, str]]:
    """Parses the JSON header of a safetensors file, whose tensors must tile the file without gap or overlap."""
    header = parse_json_object(data, file, CheckpointError)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        told = f"`__metadata__` must map strings to strings, got {metadata!r:.80}"
        raise CheckpointError(f"{file}: {told}; save it again.")
    start = position = 8 + len(data)
    found = {name: _describe(f"{file}: tensor {name!r}", entry, start) for name, entry in header.items()}
    # As they lie in the file, those without bytes by their names: the same order for every reader.
    tensors = dict(sorted(found.items(), key=lambda item: (item[1].offset, item[1].nbytes, item[0])))
    for name, info in tensors.items():
        offsets, needed = header[name]["data_offsets"], [position - start, position - start + info.nbytes]
        if offsets != needed:
            told = f"has data_offsets {offsets}; its dtype and shape, after the tensor before it, need {needed}"
            raise CheckpointError(f"{file}: tensor {name!r} {told}: fetch or save the file again.")
        position += info.nbytes
    if position != file_size:
        told = f"the header describes {position} bytes but the file has {file_size}"
        raise CheckpointError(f"{file}: {told}; it was cut or changed: fetch it again.")
    return tensors, metadata


def read_entries(path: Path) -> tuple[bytes, dict[str, Entry]]:
    """The header of a safetensors file on disk, and the tensors that it describes."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        data = file.read(header_length(file.read(8), size, path.name))
    return data, parse_entries(data, size, path.name)[0]


def _describe(where: str, entry: Any, start: int) -> Entry:
    complete = isinstance(entry, dict) and set(entry) == {"dtype", "shape", "data_offsets"}
    if not complete or not _are_sizes(entry["data_offsets"]) or len(entry["data_offsets"]) != 2:
        told = "must have dtype, shape and data_offsets, two non-negative integers"
        raise CheckpointError(f"{where} {told}; got {entry!r:.80}: save the file again.")
    dtype, shape = entry["dtype"], entry["shape"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise CheckpointError(f"{where} has dtype {dtype!r:.80}; allowed are {sorted(BITS)}: convert it.")
    if not _are_sizes(shape):
        told = f"a list of at most {_MAX_SIZES} non-negative integers is allowed: save the file again."
        raise CheckpointError(f"{where} has shape {shape!r:.80}; {told}")
    packed = max(8 // BITS[dtype], 1)
    if packed > 1 and (not shape or shape[-1] % packed):
        told = f"its last size must be a multiple of {packed}: save the file again."
        raise CheckpointError(f"{where} of dtype {dtype} has shape {shape!r:.80}; {told}")
    numbers = math.prod(shape)
    return Entry(dtype, tuple(shape), start + entry["data_offsets"][0], numbers, numbers * BITS[dtype] // 8)


def _are_sizes(value: object) -> bool:
    # bool is an int to Python, but not a size; torch counts in 64-bit integers
    if not isinstance(value, list) or len(value) > _MAX_SIZES:
        return False
    return all(type(item) is int and 0 <= item < 2**63 for item in value)
