"""Units of work of a merge: a segment of a tensor, or several small tensors; and the sums of all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hf_ext.emr.ops_emr import SEGMENT, SUMS, TOTALS

from .outputs import Copy
from .tensor_rules import Part


@dataclass(frozen=True)
class Piece:
    """A run of elements of a merged tensor, or of a copy: at most a segment."""

    merged: bool
    index: int
    start: int
    stop: int


Unit = tuple[Piece, ...]


class TensorSums(NamedTuple):
    """Sums of a merge: `tensors` `[M, N, 10]`, `totals` `[M, 4]` and `gram` `[N, N]`, all fp64."""

    tensors: np.ndarray
    totals: np.ndarray
    gram: np.ndarray


def make_units(merged: Sequence[Part], copies: Sequence[Copy]) -> list[Unit]:
    """Cuts the work into units of about a segment."""
    units: list[Unit] = []
    group: list[Piece] = []
    filled = 0
    for piece in _pieces(merged, copies):
        length = piece.stop - piece.start
        if group and filled + length > SEGMENT:
            units.append(tuple(group))
            group, filled = [], 0
        group.append(piece)
        filled += length
    return [*units, tuple(group)] if group else units


def _pieces(merged: Sequence[Part], copies: Sequence[Copy]) -> Iterator[Piece]:
    ranges = [(True, index, 0, part.elements) for index, part in enumerate(merged)]
    ranges += [(False, index, item.start, item.stop) for index, item in enumerate(copies)]
    for is_merged, index, first, last in ranges:
        for start in range(first, last, SEGMENT):
            yield Piece(is_merged, index, start, min(start + SEGMENT, last))


def add_up(units: Sequence[Unit], sums: Iterable[np.ndarray], tensors: int, tasks: int) -> TensorSums:
    """Adds up the sums of all units, in their order."""
    total = TensorSums(np.zeros((tensors, tasks, len(SUMS))), np.zeros((tensors, len(TOTALS))), np.zeros((tasks,) * 2))
    upper = np.triu_indices(tasks)
    lengths = (tasks * len(SUMS), len(TOTALS), len(upper[0]))
    for unit, values in zip(units, sums, strict=True):
        merged = [piece.index for piece in unit if piece.merged]
        for index, row in zip(merged, values.reshape(len(merged), sum(lengths)), strict=True):
            parts = np.split(row, np.cumsum(lengths)[:-1])
            total.tensors[index] += parts[0].reshape(tasks, -1)
            total.totals[index] += parts[1]
            total.gram[upper] += parts[2]
    return total
