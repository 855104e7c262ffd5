"""The election of a merge held again with one more task, from the state that it kept: no old checkpoint is read.

S, the highest and the lowest W_t of every element, and the signs of every τ_t decide the unified weights and all masks
(section 1.1 of EMR-Merging). New files are written beside the old ones, block by block.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from hf_ext.emr.artifact_emr import mask_bytes, open_masks, open_state, open_unified, read_sums
from hf_ext.emr.manifest_emr import Manifest, TaskRecord, TensorRecord
from hf_ext.emr.ops_emr import SEGMENT, SUB_BLOCK, SUMS, TOTALS, mask_block, pack_mask, unpack_mask

from ..hub.checkpoints import Checkpoint
from ..hub.safetensors_writer import SafetensorsWriter
from ..hub.system_calls import open_descriptor, write_at
from .plan_table import Plan
from .sources import Source

_BLOCK = 16 * SUB_BLOCK
_KINDS = ("total", "highest", "lowest")
# What masks change. The products with τ_t need its magnitudes, which are not kept: they become NaN, not known.
_MASKED = [SUMS.index(name) for name in ("mask", "masked_abs", "masked_square", "opposed")]
_UNKNOWN = [SUMS.index(name) for name in ("masked_dot", "dot", "weight_opposed")]


class Election(NamedTuple):
    """
    What came out.

    Args:
        manifest ([`Manifest`]): With the tensors that are merged now; the scales are still the old ones.
        sums (`dict[str, np.ndarray]`): fp64 `[merged tensors, 10]` by task.
    """

    manifest: Manifest
    sums: dict[str, np.ndarray]


class _Piece(NamedTuple):
    """A run of elements of a merged tensor: at most a segment."""

    tensor: TensorRecord
    start: int
    stop: int


def elect_again(folder: Path, work: Path, manifest: Manifest, plan: Plan) -> Election:
    """Writes root weights, masks of the old tasks, and state, as a merge of all tasks would have written them."""
    parts = {part.name: part for part in plan.merged}
    tensors = tuple(
        tensor if tensor.elements or tensor.name not in parts
        else dataclasses.replace(tensor, elements=parts[tensor.name].elements, dtype=parts[tensor.name].dtype)
        for tensor in manifest.tensors
    )  # fmt: skip
    # The hashes are those of the old files.
    after = dataclasses.replace(manifest, tensors=tensors, files={})
    rows = {name: row for row, name in enumerate(after.merged)}
    sums: dict[str, np.ndarray] = {}
    for task in manifest.tasks:
        sums[task] = np.zeros((len(rows), len(SUMS)))
        sums[task][[rows[name] for name in manifest.merged]] = read_sums(folder, manifest, task)
    with _Files(folder, work, manifest, after, plan) as files:
        for name, row in rows.items():
            for task in files.members.get(name, ()) if name in parts else ():
                sums[task][row, _MASKED] = 0
                sums[task][row, _UNKNOWN] = np.nan
        pieces = list(_pieces(after))
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            # in the order of the segments, as in a merge
            for piece, found in zip(pieces, pool.map(files.elect, pieces), strict=True):
                for task, values in found.items():
                    sums[task][rows[piece.tensor.name], _MASKED] += values[_MASKED]
    return Election(after, sums)


def write_signs(work: Path, name: str, record: TaskRecord, manifest: Manifest, plan: Plan) -> None:
    """Writes the signs of a task's vector, from which its mask is made again when the unified weights change."""
    with open_masks(work, manifest, name) as masks:
        named = {mask: manifest.merged[record.base_name(mask)] for mask in masks}
    described = {
        f"{sign}.{mask}": (torch.uint8, (mask_bytes(tensor.elements),))
        for mask, tensor in named.items()
        for sign in ("positive", "negative")
    }
    writer = SafetensorsWriter(work / "tasks" / name / "state.safetensors", described)
    try:
        for mask, tensor in named.items():
            for low, high in _blocks(0, tensor.elements):
                delta = (
                    _read(plan.tasks[0], mask, low, high).float() - _read(plan.base, tensor.name, low, high).float()
                )
                for sign, bits in (("positive", delta > 0), ("negative", delta < 0)):
                    writer.write(f"{sign}.{mask}", low // 8, pack_mask(bits))
    finally:
        writer.close()


def _pieces(manifest: Manifest) -> Iterator[_Piece]:
    for tensor in manifest.merged.values():
        for start in range(0, tensor.elements, SEGMENT):
            yield _Piece(tensor, start, min(start + SEGMENT, tensor.elements))


def _blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    return ((low, min(low + _BLOCK, stop)) for low in range(start, stop, _BLOCK))


def _read(source: Source, name: str, low: int, high: int) -> torch.Tensor:
    out = torch.empty(high - low, dtype=source.tensors[name].dtype)
    source.read_into(name, low, high, out)
    return out


class _Patched:
    """Copies of the files of a checkpoint, whose tensors can be overwritten in place."""

    def __init__(self, checkpoint: Checkpoint, folder: Path) -> None:
        self._checkpoint = checkpoint
        self._descriptors: dict[str, int] = {}
        try:
            for name, about in checkpoint.files.items():
                # a copy: the file in `folder` may be the very one of the artifact
                (folder / name).unlink(missing_ok=True)
                assert about.path is not None
                shutil.copyfile(about.path, folder / name)
                self._descriptors[name] = open_descriptor(folder / name, os.O_RDWR)
        except BaseException:
            self.close()
            raise

    def write(self, name: str, first_byte: int, values: torch.Tensor) -> None:
        info = self._checkpoint.info(name)
        data, done = values.view(torch.uint8).numpy().data, 0
        while done < len(data):
            done += write_at(self._descriptors[info.file], data[done:], info.offset + first_byte + done)

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors = {}


class _Files:
    """What is read and written while the election is held again."""

    def __init__(self, folder: Path, work: Path, manifest: Manifest, after: Manifest, plan: Plan) -> None:
        self._manifest = manifest
        self._plan = plan
        self._new = {part.name: str(part.task_names[0]) for part in plan.merged}
        with ExitStack() as stack:
            self._old, self._signs = open_state(folder, manifest)
            for checkpoint in (self._old, *self._signs.values()):
                stack.callback(checkpoint.close)
            unified = stack.enter_context(open_unified(folder, manifest))
            self._unified = _Patched(unified, work)
            stack.callback(self._unified.close)
            self._masks: dict[str, _Patched] = {}
            # for every tensor, the old tasks that take part and their name of it
            self.members: dict[str, dict[str, str]] = {}
            for task, record in manifest.tasks.items():
                masks = stack.enter_context(open_masks(folder, manifest, task))
                self._masks[task] = _Patched(masks, work / "tasks" / task)
                stack.callback(self._masks[task].close)
                for name in masks:
                    self.members.setdefault(record.base_name(name), {})[task] = name
            (work / "state.safetensors").unlink()
            self._state = SafetensorsWriter(work / "state.safetensors", self._state_tensors(after))
            stack.callback(self._state.close)
            self._stack = stack.pop_all()

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _state_tensors(self, after: Manifest) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """The types that hold the weights of all tasks exactly."""
        described: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for name, tensor in after.merged.items():
            found = {self._old.info(f"highest.{name}").dtype} if f"highest.{name}" in self._old else set()
            if name in self._new:
                found.add(self._plan.tasks[0].tensors[self._new[name]].dtype)
            dtype = found.pop() if len(found) == 1 else torch.float32
            for kind in _KINDS:
                described[f"{kind}.{name}"] = (torch.float32 if kind == "total" else dtype, (tensor.elements,))
        return described

    def elect(self, piece: _Piece) -> dict[str, np.ndarray]:
        """Does one piece; what changed of the sums of each old task that takes part."""
        name = piece.tensor.name
        if name not in self._new:
            for kind in _KINDS:
                for low, high in _blocks(piece.start, piece.stop):
                    self._state.write(f"{kind}.{name}", low, self._old.read_block(f"{kind}.{name}", low, high))
            return {}
        members = self.members.get(name, {})
        sums = torch.zeros(len(members), len(SUMS), dtype=torch.float64)
        for low, high in _blocks(piece.start, piece.stop):
            base = _read(self._plan.base, name, low, high)
            unified = self._elect_block(piece.tensor, base, low, high)
            self._unified.write(name, low * unified.dtype.itemsize, unified)
            if members:
                self._mask(members, base, unified, sums, low)
        return dict(zip(members, sums.numpy(), strict=True))

    def _elect_block(self, tensor: TensorRecord, base: torch.Tensor, low: int, high: int) -> torch.Tensor:
        """The new task's vote; the arithmetic is that of `merge_block`."""
        name = tensor.name
        weights = _read(self._plan.tasks[0], self._new[name], low, high)
        dtype = self._state.dtypes[f"highest.{name}"]
        total, highest, lowest = torch.zeros(len(base)), weights.to(dtype), weights.to(dtype)
        if f"total.{name}" in self._old:
            total, before, below = (self._old.read_block(f"{kind}.{name}", low, high) for kind in _KINDS)
            # of equal weights the first is kept, as when electing
            highest = torch.where(highest > before.to(dtype), highest, before.to(dtype))
            lowest = torch.where(lowest < below.to(dtype), lowest, below.to(dtype))
        start = base.float()
        total = total + (weights.float() - start)
        for kind, values in zip(_KINDS, (total, highest, lowest), strict=True):
            self._state.write(f"{kind}.{name}", low, values)
        negative = total < 0
        if self._manifest.method.get("tie") == "negative":
            negative |= (total == 0) & (lowest.float() < start)
        elected = torch.where(total > 0, highest.float(), torch.where(negative, lowest.float(), start))
        return elected.to(tensor.dtype)

    def _mask(
        self, members: dict[str, str], base: torch.Tensor, unified: torch.Tensor, sums: torch.Tensor, low: int
    ) -> None:
        """The old tasks' masks. Weights with the signs of theirs stand for them: only the signs count here."""
        count = len(base)
        start = base.float()
        far = 2 * start.abs() + 1
        stand_ins = []
        for task, name in members.items():
            first, last = low // 8, -(-(low + count) // 8)
            positive, negative = (
                unpack_mask(self._signs[task].read_block(f"{sign}.{name}", first, last), count)
                for sign in ("positive", "negative")
            )
            stand_ins.append(torch.where(positive, far, torch.where(negative, -far, start)))
        masks = torch.zeros(len(members), -(-count // 8), dtype=torch.uint8)
        unused = (torch.zeros(len(TOTALS), dtype=torch.float64), torch.zeros(len(members), len(members)).double())
        mask_block(base, stand_ins, unified, masks, sums, *unused, first=low // SUB_BLOCK)
        for (task, name), mask in zip(members.items(), masks, strict=True):
            self._masks[task].write(name, low // 8, mask)
