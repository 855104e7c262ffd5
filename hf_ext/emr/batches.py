"""Some samples of a batch, the cache of their keys and values among it, and outputs put together again."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers.cache_utils import Cache, DummyLayer, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache

from .units import NotByRows, are_close

# The samples of each task.
Rows = Mapping[str, torch.Tensor]
# Their `update` makes new tensors, so that a copy can share them.
_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)


def rows_of(task_ids: Sequence[str]) -> dict[str, torch.Tensor]:
    """The samples of each task."""
    return {
        task: torch.tensor([i for i, name in enumerate(task_ids) if name == task]) for task in dict.fromkeys(task_ids)
    }


def leaves_of(tree: Any) -> tuple[list[Any], Any]:
    """The parts of arguments, a cache as a whole, and their form."""
    return tree_flatten(tree, is_leaf=lambda leaf: isinstance(leaf, Cache))


def take_rows(tree: Any, rows: torch.Tensor, size: int) -> Any:
    """The same arguments for some samples; of a cache a copy."""
    leaves, form = leaves_of(tree)
    by_row = [int(isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and len(leaf) == size) for leaf in leaves]
    taken = [
        _take_of_cache(leaf, rows) if isinstance(leaf, Cache) else take(leaf, rows, count)
        for leaf, count in zip(leaves, by_row, strict=True)
    ]
    return tree_unflatten(taken, form)


def take(leaf: Any, rows: torch.Tensor, count: int) -> Any:
    """Takes the rows of some samples."""
    return leaf.index_select(0, all_rows(rows, count, leaf.device)) if count else leaf


def all_rows(rows: torch.Tensor, count: int, device: torch.device) -> torch.Tensor:
    """Indices of all rows of some samples."""
    return (rows if count == 1 else (rows[:, None] * count + torch.arange(count)).flatten()).to(device)


def copy_cache(cache: Cache) -> Cache:
    """A cache that can be gone on with, while the first one stays as it is; they share what is in it."""
    copied: Any = copy.copy(cache)
    if isinstance(cache, EncoderDecoderCache):
        copied.self_attention_cache = copy_cache(cache.self_attention_cache)
        copied.cross_attention_cache = copy_cache(cache.cross_attention_cache)
        copied.is_updated = dict(cache.is_updated)
        return cast(Cache, copied)
    other = next((type(layer).__name__ for layer in cache.layers if type(layer) not in _LAYERS), None)
    if other is not None:
        raise NotByRows(f"a {type(cache).__name__} of {other} cannot be divided by samples")
    copied.layers = [copy.copy(layer) for layer in cache.layers]
    return cast(Cache, copied)


def _take_of_cache(cache: Cache, rows: torch.Tensor) -> Cache:
    copied: Any = copy_cache(cache)
    copied.batch_select_indices(rows)
    return cast(Cache, copied)


def describe_cache(cache: Cache) -> tuple[Any, ...]:
    """What of a cache changes the course of a forward pass: its kind, whether something is in it, and how much."""
    parts = [cache]
    if isinstance(cache, EncoderDecoderCache):
        parts = [cache.self_attention_cache, cache.cross_attention_cache]
    lengths = [part.get_seq_length() for part in parts]
    return type(cache).__name__, tuple(length > 0 for length in lengths), tuple(lengths)


def keys_of(output: Any) -> list[Any]:
    """Names of the parts of what a model returns, or their numbers."""
    return list(output) if isinstance(output, Mapping) else list(range(len(output)))


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
