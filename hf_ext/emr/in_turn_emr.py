"""Samples of several tasks that cannot pass in one forward: a pass for each task; and rows of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from .building_emr import Place
from .units_emr import are_close
from .weights_emr import TaskWeights

# The samples of each task.
Rows = Mapping[str, torch.Tensor]


class Switchable(Protocol):
    """What mixed batches need of an [`EMRModel`]."""

    current: str | None
    weights: TaskWeights

    @property
    def model(self) -> Any:
        """The model of the current task."""

    @property
    def places(self) -> Mapping[str, Place]:
        """Where in `model` each tensor of the tasks' checkpoints is."""

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks."""

    def set_task(self, task: str) -> Switchable:
        """Give the model another task's weights."""

    def fits(self, task: str) -> bool:
        """Whether a task's weights can be put into `model` in place."""

    def task(self, name: str) -> AbstractContextManager[Any]:
        """A task that is current inside a `with` block."""


class InTurn:
    """Runs a model on batches whose samples are of different tasks, one task after the other, under its lock."""

    def __init__(self, emr: Switchable) -> None:
        self._emr = emr
        self._by_sample: dict[Any, set[Any]] = {}

    def run(self, rows: Rows, arguments: tuple[Any, ...], batch: dict[str, Any]) -> tuple[Any, list[Any]]:
        """Runs the model for each task and puts the outputs that are by sample together."""
        emr, size = self._emr, sum(map(len, rows.values()))
        by_sample = self._keys_by_sample(arguments, batch, size)
        previous, outputs = emr.current, {}
        try:
            for task, indices in rows.items():
                few, many = take_rows((arguments, batch), indices, size)
                outputs[task] = emr.set_task(task).model(*few, **many)
        finally:
            if previous is not None:
                emr.set_task(previous)
        first = next(iter(outputs.values()))
        keys = _keys(first)
        joined: dict[Any, Any] = {
            key: _join_samples({task: output[key] for task, output in outputs.items()}, rows)
            for key in keys
            if key in by_sample
        }
        joined = {key: value for key, value in joined.items() if value is not None}
        if not joined:
            raise ValueError(
                f"no output of {type(emr.model).__name__} ({', '.join(map(str, keys))}) is by sample, so that the "
                "samples of several tasks cannot be told apart; run one task at a time"
            )
        left_out = [key for key in keys if key not in joined]
        if isinstance(first, Mapping):
            return type(first)(**joined), left_out
        return tuple(joined.get(key) for key in keys), left_out

    def _keys_by_sample(self, arguments: tuple[Any, ...], batch: dict[str, Any], size: int) -> set[Any]:
        """
        The outputs with a row for each sample that does not depend on the other samples.

        Seen, not guessed from shapes: contrastive logits of three samples have three rows, and each holds what belongs
        to the others. So the model runs on the first sample and on the first two, once for each kind of batch.
        """
        leaves, form = tree_flatten((arguments, batch))
        model = self._emr.model
        key = (type(model), str(form), model.training, *(signature(leaf, size) for leaf in leaves))
        if key not in self._by_sample:
            runs = (take_rows((arguments, batch), torch.arange(count), size) for count in (1, 2))
            one, two = (model(*few, **many) for few, many in runs)
            self._by_sample[key] = {name for name in _keys(one) if _is_by_sample(one[name], two[name], model.training)}
        return self._by_sample[key]


def _keys(output: Any) -> list[Any]:
    return list(output) if isinstance(output, Mapping) else list(range(len(output)))


def _is_by_sample(one: Any, two: Any, training: bool) -> bool:
    """Whether an output for one sample is the first row of that for two; while training, dropout changes values."""
    if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor) or not one.ndim:
        return False
    if len(one) != 1 or len(two) != 2 or one.shape[1:] != two.shape[1:]:
        return False
    return training or are_close(one[0], two[0])


def _join_samples(parts: dict[str, Any], rows: Rows) -> Any:
    """A tensor, or a list where the shapes of the samples differ; None for what is not by sample."""
    samples: dict[int, torch.Tensor] = {}
    for task, part in parts.items():
        if not isinstance(part, torch.Tensor) or part.ndim == 0 or len(part) != len(rows[task]):
            return None
        samples |= {int(row): sample for row, sample in zip(rows[task], part, strict=True)}
    ordered = [samples[row] for row in sorted(samples)]
    return torch.stack(ordered) if len({sample.shape for sample in ordered}) == 1 else ordered


def signature(leaf: Any, size: int) -> Any:
    """What the course of a forward pass may depend on."""
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    shape = tuple(leaf.shape)
    return (shape[1:] if shape[:1] == (size,) else shape, leaf.dtype, shape[:1] == (size,))


def take_rows(tree: Any, rows: torch.Tensor, size: int) -> Any:
    """The same arguments for some samples."""
    leaves, form = tree_flatten(tree)
    by_row = [int(isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and len(leaf) == size) for leaf in leaves]
    return tree_unflatten([take(leaf, rows, count) for leaf, count in zip(leaves, by_row, strict=True)], form)


def take(leaf: Any, rows: torch.Tensor, count: int) -> Any:
    """Takes the rows of some samples."""
    return leaf.index_select(0, all_rows(rows, count, leaf.device)) if count else leaf


def all_rows(rows: torch.Tensor, count: int, device: torch.device) -> torch.Tensor:
    """Indices of all rows of some samples."""
    return (rows if count == 1 else (rows[:, None] * count + torch.arange(count)).flatten()).to(device)
