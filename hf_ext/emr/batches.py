"""Selection of samples from a batch, and joining of outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers.cache_utils import Cache

from ..errors import UsageError

# The samples of each task.
Rows = Mapping[str, torch.Tensor]
# Tolerance for equal values, since rounding depends on the size of a batch.
_TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-4}
_HALF_TOLERANCE = 1e-2


def rows_of(task_ids: Sequence[str]) -> dict[str, torch.Tensor]:
    """The samples of each task."""
    return {
        task: torch.tensor([i for i, name in enumerate(task_ids) if name == task]) for task in dict.fromkeys(task_ids)
    }


def require_tasks(task_ids: Sequence[str], known: Sequence[str], given: Any) -> set[int]:
    """Refuse unknown task names, and a cache, which belongs to one task; return the lengths of the given tensors."""
    if isinstance(task_ids, str) or not task_ids or not set(task_ids) <= set(known):
        raise UsageError(f"task_ids is {task_ids!r:.200}; give a list of tasks, which are {list(known)}")
    leaves = leaves_of(given)[0]
    if any(isinstance(leaf, Cache) for leaf in leaves) and len(set(task_ids)) > 1:
        raise UsageError("past_key_values belong to one task: leave them out, or run one task at a time")
    return {len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim}


def leaves_of(tree: Any) -> tuple[list[Any], Any]:
    """The parts of arguments, a cache as a whole, and their form."""
    return tree_flatten(tree, is_leaf=lambda leaf: isinstance(leaf, Cache))


def take_rows(tree: Any, rows: torch.Tensor, size: int) -> Any:
    """The same arguments for some samples."""

    def take(leaf: Any) -> Any:
        by_row = isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and len(leaf) == size
        return leaf.index_select(0, rows.to(leaf.device)) if by_row else leaf

    leaves, form = leaves_of(tree)
    return tree_unflatten([take(leaf) for leaf in leaves], form)


def repeat_rows(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of all rows of some samples, each of which has so many."""
    return rows if count == 1 else (rows[:, None] * count + torch.arange(count)).flatten()


def keys_of(output: Any) -> list[Any]:
    """Keys of the outputs of a model, or their numbers."""
    return list(output) if isinstance(output, Mapping) else list(range(len(output)))


def are_close(one: torch.Tensor, two: torch.Tensor) -> bool:
    """True for two tensors that are equal up to rounding."""
    if one.shape != two.shape:
        return False
    tolerance = _TOLERANCES.get(one.dtype, _HALF_TOLERANCE)
    one, two = (torch.view_as_real(values) if values.is_complex() else values for values in (one, two))
    one, two = one.detach().double(), two.detach().double()
    size = float(one[one.isfinite()].abs().max()) if bool(one.isfinite().any()) else 0.0
    return torch.allclose(one, two, rtol=tolerance, atol=tolerance * size, equal_nan=True)


def axes_of_samples(one: Any, two: Any, training: bool) -> list[int] | None:
    """
    The axes along which an output has a place for each sample: seen from what the model gives for the first sample
    and for the first two. None if it does not follow the batch; while training, dropout changes values.
    """
    if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor) or one.ndim != two.ndim:
        return None
    sizes = list(zip(one.shape, two.shape, strict=True))
    if any(first != second and (first, second) != (1, 2) for first, second in sizes):
        return None
    axes = [axis for axis, (first, second) in enumerate(sizes) if first != second]
    begun = two[tuple(slice(size) for size in one.shape)]
    return axes if axes and (training or are_close(one, begun)) else None


def join_samples(parts: Mapping[str, torch.Tensor], rows: Rows, axis: int) -> Any:
    """The tasks' outputs in the order of the batch; a list where the shapes of the samples differ."""
    samples: dict[int, torch.Tensor] = {}
    for task, part in parts.items():
        samples |= {int(row): sample for row, sample in zip(rows[task], part.unbind(axis), strict=True)}
    ordered = [samples[row] for row in sorted(samples)]
    return torch.stack(ordered, axis) if len({sample.shape for sample in ordered}) == 1 else ordered
