"""Safetensors files whose size is known beforehand: written in place, in any order, by several threads or processes.

`safetensors` itself writes whole tensors from memory. Here the header and the space come first, so that a file larger
than memory is filled block by block, and a full disk is noticed before any work is done.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from ..errors import DataError, UsageError
from ..system import free_bytes, open_descriptor, reserve, sync_data, write_at
from .checkpoints import DTYPE_NAMES, PACKED
from .header_format import MAX_HEADER_BYTES

# Data starts at a multiple of this, so that every tensor is aligned for a memory map and for vector instructions.
_ALIGNMENT = 64


class SafetensorsWriter:
    """One safetensors file that is filled in place."""

    # Creating it writes the header and reserves the whole file. A file that is there and has the same size keeps its
    # data: so an interrupted work goes on. The data of wide types comes first, so that every element is aligned.

    def __init__(self, path: str | Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        self.path = Path(path)
        header, self._offsets, self.size = _layout(tensors, self.path.name)
        self.dtypes = {name: dtype for name, (dtype, _) in tensors.items()}
        self._lengths = {name: math.prod(shape) for name, (_, shape) in tensors.items()}
        self._descriptor = open_descriptor(self.path, os.O_RDWR | os.O_CREAT)
        try:
            with self._explain():
                reserve(self._descriptor, self.size, self.path)
            self._write_at(memoryview(header), 0)
        except BaseException:
            os.close(self._descriptor)
            raise

    def write(self, name: str, start: int, tensor: torch.Tensor) -> None:
        """Writes a run of elements of a tensor. Thread-safe."""
        dtype = self.dtypes[name]
        if tensor.dtype != dtype or tensor.device.type != "cpu" or not tensor.is_contiguous():
            got = f"{tensor.dtype} on {tensor.device}, contiguous: {tensor.is_contiguous()}"
            raise UsageError(f"{self.path}: {name!r} takes contiguous {dtype} on the CPU, got {got}; convert it first")
        if start < 0 or start + tensor.numel() > self._lengths[name]:
            told = f"elements [{start}, {start + tensor.numel()}) are not inside {name!r} of {self._lengths[name]}"
            raise DataError(f"{self.path}: {told}")
        if tensor.numel():
            data = tensor.reshape(-1).view(torch.uint8).numpy().data
            self._write_at(data, self._offsets[name] + start * dtype.itemsize)

    def write_bytes(self, name: str, start: int, data: memoryview) -> None:
        """Writes a run of bytes of a tensor, without the checks of [`~SafetensorsWriter.write`]. Thread-safe."""
        self._write_at(data, self._offsets[name] + start)

    def location(self, name: str) -> tuple[int, int]:
        """Descriptor of the file, open until [`~SafetensorsWriter.close`], and the first byte of a tensor in it."""
        return self._descriptor, self._offsets[name]

    def flush(self) -> None:
        """Waits until what was written so far is on the disk."""
        sync_data(self._descriptor)

    def close(self, *, sync: bool = True) -> None:
        if self._descriptor < 0:
            return
        try:
            if sync:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write_at(self, data: memoryview, position: int) -> None:
        done = 0
        with self._explain():
            while done < len(data):
                done += write_at(self._descriptor, data[done:], position + done)

    @contextmanager
    def _explain(self) -> Iterator[None]:
        """Has an error of the system say what is needed and what there is."""
        try:
            yield
        except OSError as error:
            told = f"cannot write ({error.strerror})"
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                free = f"{free_bytes(self.path.parent):,} are free on its disk; make room, or lift the limit"
                told = f"no room ({error.strerror}): this file needs {self.size:,} bytes in all, {free}"
            raise OSError(error.errno, told, str(self.path)) from error


def plan_shards(sizes: Mapping[str, int], max_shard_size: int, stem: str) -> dict[str, list[str]]:
    """Distributes tensors over files, in their order, as `save_pretrained` names them."""
    # A tensor larger than the limit gets a file of its own. A single file has no number in its name.
    if max_shard_size <= 0:
        raise UsageError(f"max_shard_size is {max_shard_size}; give a positive number of bytes")
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > max_shard_size:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    if len(shards) == 1:
        return {f"{stem}.safetensors": shards[0]}
    return {f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, start=1)}


def shard_index(shards: Mapping[str, Iterable[str]], sizes: Mapping[str, int]) -> str:
    """The text of `<stem>.safetensors.index.json`."""
    weight_map = {name: file for file, names in shards.items() for name in names}
    index = {"metadata": {"total_size": sum(sizes[name] for name in weight_map)}, "weight_map": weight_map}
    return json.dumps(index, indent=2) + "\n"


def _layout(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], file: str
) -> tuple[bytes, dict[str, int], int]:
    """Header, first byte of every tensor, and the length of the file."""
    for name, (dtype, shape) in tensors.items():
        # Of two numbers in an element, as in float4_e2m1fn_x2, a header counts the last size: there has to be one.
        if dtype not in DTYPE_NAMES or (PACKED[dtype] > 1 and not shape) or any(size < 0 for size in shape):
            raise DataError(f"{file}: tensor {name!r} is {dtype} {tuple(shape)}, which safetensors cannot hold")
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    position = 0
    for name in sorted(tensors, key=lambda name: -tensors[name][0].itemsize):
        dtype, shape = tensors[name]
        starts[name], position = position, position + math.prod(shape) * dtype.itemsize
        counts = [*shape[:-1], *(size * PACKED[dtype] for size in shape[-1:])]
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": counts, "data_offsets": [starts[name], position]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise DataError(f"{file}: the header would have {len(text)} bytes, at most {MAX_HEADER_BYTES} are allowed")
    begin = 8 + len(text)
    offsets = {name: begin + start for name, start in starts.items()}
    return len(text).to_bytes(8, "little") + text, offsets, begin + position
