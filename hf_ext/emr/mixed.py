"""A batch whose samples are of several tasks: in one forward pass by the rule of `units`, or one task after the other.

The first pass of each kind is checked. It runs again with weights that are moved far apart, for each task by other
random factors, and so does the model for each task alone, with all of the task's weights at once: what a unit did not
get, or got of another task, then shows in the outputs, however near the fine-tunes are to each other. Where the two
differ, batches of that kind take turns.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import UsageError
from .batches import (
    Rows,
    are_close,
    axes_of_samples,
    join_samples,
    keys_of,
    leaves_of,
    require_tasks,
    rows_of,
    take_rows,
)
from .many_tasks import ManyTasks
from .units import NotByRows, Pass, Units

# Number of kinds of batches that are remembered.
_MAX_KINDS = 256
# Errors of models that do not support this kind of run.
_FAILURES = (NotByRows, RuntimeError, ValueError, IndexError, TypeError)


class Mixer:
    """Runs a model on batches whose samples are of different tasks. For inference: without gradients."""

    def __init__(self, emr: ManyTasks) -> None:
        self._emr = emr
        self._units: Units | None = None
        self._proven: set[Any] = set()
        self._refused: dict[Any, str] = {}
        self._axes: dict[Any, dict[Any, list[int] | None]] = {}
        self._warned: set[str] = set()

    def run(self, task_ids: Sequence[str], arguments: tuple[Any, ...], batch: dict[str, Any]) -> Any:
        """Runs the model; arguments with as many rows as there are names are split by sample.

        Where the heads of the tasks differ in width, `logits` is a list with a tensor for each sample. Where the tasks
        had to run one after the other, outputs that compare the samples with each other are refused; others that are
        not by sample are left out, and a warning names them once.
        """
        emr = self._emr
        sizes = require_tasks(task_ids, emr.tasks, (arguments, batch))
        if len(task_ids) not in sizes:
            raise UsageError(f"task_ids names {len(task_ids)} tasks for {sorted(sizes)} samples; give one for each")
        if len(set(task_ids)) == 1:
            with emr.task(task_ids[0]) as model:
                return model(*arguments, **batch)
        if batch.get("labels") is not None:
            raise UsageError(
                "a batch of several tasks has no common loss: leave out labels and compute each task's loss from its "
                "rows of the output, or run one task at a time"
            )
        rows = rows_of(task_ids)
        with torch.no_grad():
            try:
                return self._run_together(rows, arguments, batch)
            except _FAILURES as error:
                failure = error
            output, left_out = self._run_in_turn(rows, arguments, batch)
            self._warn_once(failure, left_out)
        return output

    def _run_together(self, rows: Rows, arguments: tuple[Any, ...], batch: dict[str, Any]) -> Any:
        """One forward pass; raises [`NotByRows`], or what the model raises, where that is not possible."""
        emr = self._emr
        different = [task for task in rows if not emr.fits(task)]
        if different or emr.current is None:
            raise NotByRows(f"the model of {different} differs from that of {emr.current!r} in more than its labels")
        if self._units is None or not self._units.are_of(emr.model):
            self._units = Units(emr)
            self._forget()
        kind, lengths = _describe(self._units.model, arguments, batch)
        if (kind, lengths) in self._refused:
            raise NotByRows(self._refused[kind, lengths])
        try:
            mixed = Pass(self._units, rows)
            output = mixed.run(arguments, batch)
            if (kind, mixed.kind) not in self._proven:
                self._check(rows, arguments, batch)
                self._proven.add((kind, mixed.kind))
            return output
        except _FAILURES as error:
            self._refused[kind, lengths] = str(error)
            raise
        finally:
            if len(self._proven) + len(self._refused) > _MAX_KINDS:
                self._forget()

    def _check(self, rows: Rows, arguments: tuple[Any, ...], batch: dict[str, Any]) -> None:
        """Raises [`NotByRows`] where one pass does not give what each task gives alone."""
        units, size = self._units, sum(map(len, rows.values()))
        assert units is not None
        with units.moved_apart(list(rows)):
            alone = {}
            for task, indices in rows.items():
                few, many = take_rows((arguments, batch), indices, size)
                with units.weights(task, [slot for slots in units.slots.values() for slot in slots]):
                    alone[task] = units.model(*few, **many)
            mixed = Pass(units, rows)
            together = mixed.run(arguments, batch, watched=True)
        if mixed.has_chosen:
            raise NotByRows("the model selects samples by value")
        compared = 0
        for task, indices in rows.items():
            for key in keys_of(alone[task]):
                own = alone[task][key]
                if not isinstance(own, torch.Tensor) or own.shape[:1] != (len(indices),):
                    continue
                if len(together[key]) != size or not all(
                    are_close(together[key][row], sample) for row, sample in zip(indices.tolist(), own, strict=True)
                ):
                    raise NotByRows("samples of several tasks in one pass do not give what each gives alone")
                compared += 1
        if not compared:
            raise NotByRows("no output has a row for each sample")

    def _forget(self) -> None:
        self._proven.clear()
        self._refused.clear()
        self._axes.clear()

    def _run_in_turn(self, rows: Rows, arguments: tuple[Any, ...], batch: dict[str, Any]) -> tuple[Any, list[Any]]:
        """Runs the model for one task after the other and puts the outputs that are by sample together."""
        emr, size = self._emr, sum(map(len, rows.values()))
        axes = self._axes_of_samples(arguments, batch, size)
        compared = [key for key, found in axes.items() if found and len(found) > 1]
        if compared:
            raise UsageError(
                f"{compared} of {type(emr.model).__name__} compare the samples of a batch with each other, which is "
                "meaningless between different tasks: run one task at a time, or change the number of items that all "
                "samples are compared with"
            )
        previous, outputs = emr.current, {}
        try:
            for task, indices in rows.items():
                few, many = take_rows((arguments, batch), indices, size)
                outputs[task] = emr.set_task(task).model(*few, **many)
        finally:
            if previous is not None:
                emr.set_task(previous)
        first = next(iter(outputs.values()))
        keys = keys_of(first)
        joined: dict[Any, Any] = {}
        for key in keys:
            if found := axes.get(key):
                joined[key] = join_samples({task: output[key] for task, output in outputs.items()}, rows, found[0])
        if not joined:
            raise ValueError(
                f"no output of {type(emr.model).__name__} ({', '.join(map(str, keys))}) has a row for each sample, so "
                "the outputs of several tasks cannot be separated; run one task at a time"
            )
        left_out = [key for key in keys if key not in joined]
        if isinstance(first, Mapping):
            return type(first)(**joined), left_out
        return tuple(joined.get(key) for key in keys), left_out

    def _axes_of_samples(
        self, arguments: tuple[Any, ...], batch: dict[str, Any], size: int
    ) -> dict[Any, list[int] | None]:
        """
        For each output, the axes along which it has a place for each sample that does not depend on the others.

        Seen, not guessed from shapes: contrastive logits of three samples have three rows, and each holds what belongs
        to the others. So the model runs on the first sample and on the first two, once for each kind of batch.
        """
        model = self._emr.model
        kind = _describe(model, arguments, batch)
        if kind not in self._axes:
            runs = (take_rows((arguments, batch), torch.arange(count), size) for count in (1, 2))
            one, two = (model(*few, **many) for few, many in runs)
            self._axes[kind] = {key: axes_of_samples(one[key], two[key], model.training) for key in keys_of(one)}
        return self._axes[kind]

    def _warn_once(self, error: Exception, left_out: Sequence[Any] = ()) -> None:
        missing = (
            f", and these outputs, which have no row for each sample, are left out: {left_out}" if left_out else ""
        )
        text = (
            f"samples of several tasks could not run in one forward pass, so each task gets its own: {error}. This is "
            f"slower{missing}."
        )
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=5)


def _describe(model: torch.nn.Module, arguments: tuple[Any, ...], batch: dict[str, Any]) -> tuple[Any, Any]:
    """The form, the options and the lengths of a batch: all but values that a forward pass may depend on."""
    leaves, form = leaves_of((arguments, batch))
    about: list[Any] = [type(model), model.training, str(form)]
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            about.append((leaf.dtype, leaf.ndim))
        else:
            about.append(repr(leaf))
    return tuple(about), tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor))
