"""The streaming merge: units of work, read, merged and written block by block by worker threads with reused buffers.

A unit is a segment of a tensor, or several small tensors. Which worker takes it, and in which blocks it is read,
changes no bit: sums are taken per segment and added up in the order of the segments.

A unit is also what a kill can cost (see `journal`): none reads what another one writes, and their sums are added up
only when all are there, in their order. So the result of a merge that was interrupted ten times is that of one that
was not, to the bit; `test_interrupted` and `test_failures` kill and fill disks and compare all files.

Memory does not depend on the models: a worker has one buffer for a block of each checkpoint, of the result and of the
masks, and every tensor goes through them. Where all lies in local files, compiled code reads, merges and writes such a
block without the interpreter; a block is then as small as the caches ask for. Where it does not, or where another
method than EMR's makes the weights, Python reads the block, and it is larger, as each costs a wait for the lock. Both
ways call the same kernel, and the tests compare their results bit for bit. Only a method of whole tensors holds one.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..emr.arithmetic import (
    SEGMENT,
    SUB_BLOCK,
    SUMS,
    TOTALS,
    Sums,
    find_kernels,
    mask_block,
    merge_block,
    pack_directions,
)
from ..emr.artifact import mask_bytes
from ..emr.report import TensorSums
from ..system import has_positions
from .journal import Copy, Outputs
from .methods import Block, MethodError
from .methods.registry import find_depths
from .plan import Plan
from .sources import Source
from .tensors import Row, inputs_first
from .vectors import NotFiniteError, TaskVectors, add_sample, is_finite, pick_sample, require_finite, require_vectors


@dataclass(frozen=True)
class Piece:
    """A run of elements of a merged tensor, or of a copy."""

    merged: bool
    index: int
    start: int
    stop: int


Unit = tuple[Piece, ...]


def make_units(merged: Sequence[Row], copies: Sequence[Copy], *, whole: bool = False) -> list[Unit]:
    """Cuts the work into units of about a segment, or with `whole` so that each merged tensor is one piece."""
    units, filled = list[list[Piece]](), SEGMENT
    kinds: tuple[tuple[bool, Sequence[Row | Copy]], ...] = ((True, merged), (False, copies))
    for is_merged, items in kinds:
        for index, item in enumerate(items):
            step = item.elements if whole and is_merged else SEGMENT
            for low, high in _blocks(0, item.elements, step):
                if filled + high - low > SEGMENT:
                    units.append([])
                    filled = 0
                units[-1].append(Piece(is_merged, index, low, high))
                filled += high - low
    return [tuple(unit) for unit in units]


def add_up(rows: Sequence[Row], tasks: int, units: Sequence[Unit], sums: Iterable[np.ndarray]) -> TensorSums:
    """Adds up the sums of all units, in their order."""
    elements = np.array([row.elements for row in rows], np.int64)
    participates = np.array([[task in row.members for task in range(tasks)] for row in rows])
    of_tasks, of_all = np.zeros((len(rows), tasks, len(SUMS))), np.zeros((len(rows), len(TOTALS)))
    total = TensorSums(elements, participates, of_tasks, of_all, np.zeros((tasks, tasks)))
    upper, own = np.triu_indices(tasks), tasks * len(SUMS)
    for unit, values in zip(units, sums, strict=True):
        merged = [piece.index for piece in unit if piece.merged]
        for index, row in zip(merged, values.reshape(len(merged), own + len(TOTALS) + len(upper[0])), strict=True):
            parts = np.split(row, [own, own + len(TOTALS)])
            of_tasks[index] += parts[0].reshape(tasks, -1)
            of_all[index] += parts[1]
            total.gram[upper] += parts[2]
    return total


# What of all checkpoints stays in the second-level cache while compiled code reads, merges and writes it: 8 GPT-2 took
# 1.5 s of processor time with 0.6 to 1.3 MB, 1.65 s with 2.6 MB or more.
FAST_BYTES = 1 << 20
# Where Python reads it, a block is small enough for the caches, and large enough that threads seldom wait for the
# interpreter's lock: 8 GPT-2 on 2 cores took 2.2 s with 1.5 MB, 1.5 s with 6 to 8 MB, 1.6 s with 24 MB.
_CACHED_BYTES = 6 << 20
# Masks are collected until they are worth a write.
_MASK_BYTES = 1 << 20
_MAX_CONNECTIONS = 32


@dataclass
class _Buffers:
    """Read buffers of one worker; nothing is allocated for a block."""

    inputs: Tensor  # [N + 2, bytes]: base, tasks, merged model
    unified: Tensor  # [bytes]
    vectors: Tensor  # [N + 1, elements]: task vectors and the base, float32
    masks: Tensor  # [planes, N, bytes]


class Engine:
    def __init__(self, plan: Plan, outputs: Outputs, vectors: TaskVectors, workers: int, memory: int) -> None:
        self._plan, self._outputs, self._vectors, self._workers = plan, outputs, vectors, workers
        self._method, self._arguments = plan.config.merge_method, plan.config.arguments
        depths = find_depths(plan.base.tensors)
        self._options = [
            plan.config.find_options(row.name, depths[row.name], [plan.tasks[task].label for task in row.members])
            for row in plan.merged_rows
        ]
        self._measured = plan.config.is_measured
        # elected plainly, by the kernels that mask and sum up too
        self._fused = self._method.fused and plan.config.drop == 0
        # one worker at a time holds a whole tensor of every checkpoint
        self._whole = threading.Lock()
        self._sources = plan.sources
        remote = any(source.repo_id is not None for source in self._sources)
        # Large blocks help if a network causes waiting.
        share = memory // workers if remote else min(memory // workers, _CACHED_BYTES)
        rows = len(self._sources) + 1
        # elements; fp32 is the widest type
        self.block = max(min(share // (4 * rows) // SUB_BLOCK * SUB_BLOCK, SEGMENT), SUB_BLOCK)
        self._planes = self._method.deltas or 1
        bits = self._planes * len(plan.tasks)
        span = min(memory // workers, 8 * _MASK_BYTES) // bits // self.block * self.block
        self.span = max(min(span, -(-SEGMENT // self.block) * self.block), self.block)
        # the step of compiled code that reads and writes the files itself
        self.step = max(min(self.block, FAST_BYTES // (4 * rows) // SUB_BLOCK * SUB_BLOCK), SUB_BLOCK)
        self._run_files = find_kernels("cpu").run_files if self._fused and has_positions() else None
        connections = min(workers * len(self._sources), _MAX_CONNECTIONS)
        self._pool = ThreadPoolExecutor(connections) if remote else None

    def run(self, units: Sequence[tuple[int, Unit]], done: Callable[[int, np.ndarray], None]) -> None:
        def work(number: int, unit: Unit, buffers: _Buffers) -> None:
            made = [(self._merge if piece.merged else self._copy)(piece, buffers) for piece in unit]
            done(number, np.concatenate(made))

        self._work(units, work)

    def count(self, index: int, units: Sequence[tuple[int, Unit]]) -> np.ndarray:
        """One pass over the merged tensors that counts the magnitudes of the task vectors."""
        vectors, lock = self._vectors, threading.Lock()
        total = vectors.new_counts()

        def work(number: int, unit: Unit, buffers: _Buffers) -> None:
            counts = vectors.new_counts()
            for piece in unit:
                for low, high in _blocks(piece.start, piece.stop, self.block) if piece.merged else ():
                    row = self._plan.merged_rows[piece.index]
                    base, tasks, _ = self._read(row, low, high, buffers)
                    made = self._make_vectors(piece.index, low, base, tasks, buffers)
                    if index == 0 and not self._measured:
                        require_vectors(self._plan, row, *made)
                    for task, vector in made[1].items():
                        vectors.count(index, task, vector, counts)
            with lock:
                np.add(total, counts, out=total)

        self._work(units, work)
        return total

    def bytes_read(self, unit: Unit) -> int:
        return sum(
            (piece.stop - piece.start) * source.tensors[name].dtype.itemsize
            for piece in unit
            for source, name in self._names(piece)
        )

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def _work(self, units: Sequence[tuple[int, Unit]], work: Callable[[int, Unit, _Buffers], None]) -> None:
        """Calls `work` for each unit in as many threads as there are workers; a failure ends them all."""
        size, tasks, own = 4 * self.block, len(self._plan.tasks), threading.local()

        def run(place: int) -> None:
            if not hasattr(own, "buffers"):
                own.buffers = _Buffers(
                    torch.empty(len(self._sources), size, dtype=torch.uint8),
                    torch.empty(size, dtype=torch.uint8),
                    torch.empty(tasks + 1, self.block),
                    torch.empty(self._planes, tasks, self.span // 8, dtype=torch.uint8),
                )
            # the system reads ahead what will be needed next
            for _, unit in units[place + self._workers : place + self._workers + 1]:
                for piece in unit:
                    for source, name in self._names(piece):
                        source.will_need(name, piece.start, piece.stop)
            work(*units[place], own.buffers)

        with ThreadPoolExecutor(self._workers) as pool:
            # the first exception cancels what has not begun
            list(pool.map(run, range(len(units))))

    def _names(self, piece: Piece) -> list[tuple[Source, str]]:
        """The tensors that a piece is made of, with their names in the files."""
        if piece.merged:
            return [(source, name) for _, source, name in self._sources_of(self._plan.merged_rows[piece.index])]
        item = self._outputs.copies[piece.index]
        return [(item.source, item.name)]

    def _sources_of(self, row: Row) -> list[tuple[int, Source, str]]:
        """The checkpoints that have a tensor, with the places of their buffers and its names there."""
        plan = self._plan
        found = [(0, plan.base, row.name), *((task + 1, plan.tasks[task], name) for task, name in row.members.items())]
        if plan.merged_model is not None:
            found.append((len(plan.tasks) + 1, plan.merged_model, row.name))
        return found

    def _copy(self, piece: Piece, buffers: _Buffers) -> np.ndarray:
        item = self._outputs.copies[piece.index]
        kind, parts = item.writer.dtypes[item.name], item.parts or ((item.source, item.name, 1.0),)
        for low, high in _blocks(piece.start, piece.stop, buffers.inputs.numel() // 16):
            mean: Tensor | None = None
            for source, name, share in parts:
                dtype = source.tensors[name].dtype
                values = buffers.inputs.view(-1)[: (high - low) * dtype.itemsize].view(dtype)
                source.read_into(name, low, high, values)
                if item.finite and dtype.is_floating_point and not is_finite(values):
                    raise NotFiniteError.of_input(name, source)
                if len(parts) > 1:
                    wide = values.to(torch.promote_types(dtype, torch.float64)) * share
                    mean = wide if mean is None else mean.add_(wide)
            if mean is not None:
                values = mean if kind.is_floating_point or kind.is_complex else mean.round_()
            if item.parts and kind.is_floating_point and not is_finite(values.to(kind)):
                raise NotFiniteError.of_result(item.name, kind)
            item.writer.write(item.name, low, values.to(kind))
        return np.empty(0)

    def _read(
        self, row: Row, low: int, high: int, buffers: _Buffers
    ) -> tuple[Tensor, dict[int, Tensor], Tensor | None]:
        """A block of the base, of every task that has the tensor, and of the model that was merged elsewhere."""
        jobs, blocks = [], dict[int, Tensor]()
        for place, source, name in self._sources_of(row):
            dtype = source.tensors[name].dtype
            if place and (source.spec, name) == (self._plan.base.spec, row.name):
                # an average without a base is measured from its first model, which is not read twice
                blocks[place - 1] = blocks[-1]
                continue
            blocks[place - 1] = buffers.inputs[place, : (high - low) * dtype.itemsize].view(dtype)
            jobs.append(partial(source.read_into, name, low, high, blocks[place - 1]))
        list((map if self._pool is None else self._pool.map)(lambda read: read(), jobs))
        return blocks.pop(-1), blocks, blocks.pop(len(self._plan.tasks), None)

    def _merge(self, piece: Piece, buffers: _Buffers) -> np.ndarray:
        """Merges a piece; its sums, totals and gram in one row."""
        plan, row = self._plan, self._plan.merged_rows[piece.index]
        members = [*row.members]
        if not self._merge_files(piece, members, sums := Sums.zeros(len(members)), buffers):
            # after a failed read or write, the Python path below continues or raises the error
            self._merge_blocks(piece, members, sums := Sums.zeros(len(members)), buffers)
        require_finite(plan, row, members, sums)
        wide, pairs = np.zeros((len(plan.tasks), len(SUMS))), np.zeros((len(plan.tasks),) * 2)
        wide[members], pairs[np.ix_(members, members)] = sums.tasks.numpy(), sums.gram.numpy()
        return np.concatenate([wide.ravel(), sums.totals.numpy(), pairs[np.triu_indices(len(plan.tasks))]])

    def _merge_files(self, piece: Piece, members: list[int], sums: Sums, buffers: _Buffers) -> bool:
        """Merges a piece without the interpreter, if everything lies in local files; False if it is not done."""
        if self._run_files is None:
            return False
        row, inputs = self._plan.merged_rows[piece.index], self._names(piece)
        files = [place for source, name in inputs if (place := source.location(name)) is not None]
        if len(files) < len(inputs):
            return False
        files.append(self._outputs.root[row.name].location(row.name))
        masks = None
        if self._plan.config.with_masks:
            files += [self._outputs.masks[task].location(row.members[task]) for task in members]
            masks = buffers.masks[0]
        dtypes = [source.tensors[name].dtype for source, name in inputs]
        blocks = [buffers.inputs[place].view(dtype) for place, dtype in enumerate(dtypes)]
        blocks.append(buffers.unified.view(row.dtype))
        return all(
            self._run_files(files, blocks, masks, range(begin, end, self.step), sums, self._arguments["tie"])
            for begin, end in _blocks(piece.start, piece.stop, self.span)
        )

    def _merge_blocks(self, piece: Piece, members: list[int], sums: Sums, buffers: _Buffers) -> None:
        """Merges a piece by any method, from and to anywhere."""
        plan, row, whole = self._plan, self._plan.merged_rows[piece.index], None
        if self._method.whole:
            with self._whole:
                whole = self._merge_whole(piece, row, sums)
            if not self._measured:
                self._outputs.root[row.name].write(row.name, 0, whole)
                return
        for begin, end in _blocks(piece.start, piece.stop, self.span):
            for low, high in _blocks(begin, end, self.block):
                base, tasks, merged = self._read(row, low, high, buffers)
                first, weights = low // SUB_BLOCK, list(tasks.values())
                planes = buffers.masks[:, : len(members), (low - begin) // 8 : -(-(high - begin) // 8)]
                masks = planes[0] if plan.config.with_masks else None
                unified = buffers.unified[: (high - low) * row.dtype.itemsize].view(row.dtype)
                if self._fused:
                    merge_block(base, weights, unified, masks, sums, first=first, tie=self._arguments["tie"])
                elif whole is not None:
                    unified = whole[low:high]
                else:
                    if not self._measured and low == piece.start:
                        picked = [pick_sample(values) for values in weights]
                        add_sample(pick_sample(base), picked, piece.stop - piece.start, sums)
                    wide, vectors = self._make_vectors(piece.index, low, base, tasks, buffers)
                    if not (self._measured or self._vectors.passes):
                        require_vectors(plan, row, wide, vectors)
                    block = Block(row.name, row.shape, low, wide, [*vectors.values()], merged)
                    if self._method.deltas:
                        kept = self._method.function(block, **self._options[piece.index])
                        pack_directions(base, weights, kept, planes, sums, first=first)
                        continue
                    unified = self._unify(piece.index, block, unified)
                if self._measured and not self._fused:
                    mask_block(base, weights, unified, masks, sums, first=first)
                self._outputs.root[row.name].write(row.name, low, unified)
            for place, task in enumerate(members if plan.config.with_masks else ()):
                for plane, packed in enumerate(buffers.masks[:, place, : -(-(end - begin) // 8)]):
                    at = plane * mask_bytes(row.elements) + begin // 8
                    self._outputs.masks[task].write_bytes(row.members[task], at, packed.numpy().data)

    def _make_vectors(
        self, tensor: int, low: int, base: Tensor, tasks: Mapping[int, Tensor], buffers: _Buffers
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """A block of base and task vectors in float32; new memory would cost as much as the arithmetic."""
        count = len(base)
        wide = base if base.dtype == torch.float32 else buffers.vectors[-1, :count].copy_(base)
        return wide, {
            task: self._vectors.make(tensor, task, low, wide, weights, buffers.vectors[task, :count])
            for task, weights in tasks.items()
        }

    def _unify(self, index: int, block: Block, room: Tensor) -> Tensor:
        """Calls the method; what it returns, flat, and rounded in `room` where that is of another type."""
        merged = self._method.function(block, **self._options[index])
        if merged.shape != block.base.shape:
            raise MethodError(
                f"method {self._method.name!r} returned {list(merged.shape)} for {block.name!r}, of which it got "
                f"{list(block.base.shape)}; a method must return as many elements as the base has"
            )
        flat: Tensor = merged.reshape(-1).contiguous()
        flat = flat if flat.dtype == room.dtype else room.resize_(len(flat)).copy_(flat)
        if not (self._measured or is_finite(flat)):
            raise NotFiniteError.of_result(block.name, flat.dtype)
        return flat

    def _merge_whole(self, piece: Piece, row: Row, sums: Sums) -> Tensor:
        """The merged values of a whole tensor, which its method gets in its shape."""
        plan = self._plan
        base = plan.base.read(row.name)
        vectors, picked = {}, []
        for task, name in row.members.items():
            weights = plan.tasks[task].read(name).view(-1)
            picked.append(pick_sample(weights))
            # in its own memory where that is wide enough
            room = weights if weights.dtype == torch.float32 else None
            vectors[task] = self._vectors.make(piece.index, task, 0, base.view(-1), weights, room).view(row.shape)
        if not self._measured:
            add_sample(pick_sample(base.view(-1)), picked, row.elements, sums)
            require_vectors(plan, row, base, vectors)
        block = Block(row.name, row.shape, 0, base, [*vectors.values()], count=len(plan.tasks))
        if plan.statistics:
            # of each task that has the tensor, in the order of the vectors
            known = [(plan.statistics[task], name) for task, name in row.members.items()]
            block.inputs_first = inputs_first(*known[0])
            there = [name in file.tensors for file, name in known]
            block.statistic = lambda place: known[place][0].read(known[place][1]) if there[place] else None
        return self._unify(piece.index, block, torch.empty(0, dtype=row.dtype))


def _blocks(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    return ((low, min(low + step, stop)) for low in range(start, stop, step))
