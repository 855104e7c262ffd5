"""One forward pass for samples of different tasks: each module that has weights runs for each task on its rows, with
that task's weights. One module's weights are in memory at a time, of a linear layer or an embedding a piece; what is
small (biases, norms) is kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache

from .batches import (
    Rows,
    axes_of_samples,
    describe_cache,
    join_samples,
    keys_of,
    leaves_of,
    rows_of,
    take_rows,
)
from .layers import TaskLayers
from .losses import as_labels, count_targets, heads_are_alike, loss_of_heads, mean_loss
from .mixed_forward import Layout, MixedForward, differing_tensors
from .units import Leaf, NotByRows, Observation, Unit, are_close, observe, plan_units

if TYPE_CHECKING:
    from .model import EMRModel

# Shapes of batches whose units are remembered.
_MAX_PLANS = 256
# What a model may raise when it is run in a way that it is not made for.
FAILURES = (NotByRows, RuntimeError, ValueError, IndexError, TypeError)


class Mixer:
    """
    Runs a model on batches whose samples are of different tasks. For inference: without gradients.

    How a forward pass can be divided is found out on the first two samples of a batch; see `units`. Batches of other
    lengths try what was found for a like one, and look anew where a module then takes something else.
    """

    def __init__(self, emr: EMRModel) -> None:
        self._emr = emr
        self._model: torch.nn.Module | None = None
        self._plans: dict[Any, dict[str, Unit] | NotByRows] = {}
        self._alike: dict[Any, dict[str, Unit]] = {}
        self._proven: set[Any] = set()
        self._warned: set[str] = set()
        self._axes: dict[Any, dict[Any, list[int] | None]] = {}
        self.layers = TaskLayers(emr)
        self._layout: Layout | None = None

    def run(self, task_ids: Sequence[str], arguments: tuple[Any, ...], batch: dict[str, Any]) -> Any:
        """Runs the model; arguments with as many rows as there are names are split by sample.

        Where the heads of the tasks differ in width, `logits` is a list with a tensor for each sample. With `labels`,
        the loss is the mean over all targets of the batch (rows, or tokens with a label). Where the tasks had to run
        one after the other, a cache is refused, and so are outputs that compare the samples with each other;
        others that are not by sample are left out, and a warning names them once.
        """
        emr = self._emr
        if isinstance(task_ids, str) or not set(task_ids) <= set(emr.tasks):
            raise ValueError(f"task_ids is {task_ids!r:.200}; give a list of tasks, which are {emr.tasks}")
        sizes = {
            len(leaf) for leaf in leaves_of((arguments, batch))[0] if isinstance(leaf, torch.Tensor) and leaf.ndim
        }
        if not task_ids or len(task_ids) not in sizes:
            raise ValueError(f"task_ids names {len(task_ids)} tasks for {sorted(sizes)} samples; give one for each")
        if len(set(task_ids)) == 1:
            with emr.task(task_ids[0]) as model:
                return model(*arguments, **batch)
        rows = rows_of(task_ids)
        with torch.no_grad():
            try:
                output, failure = self._run_together(rows, arguments, batch), None
            except FAILURES as error:
                failure = error
            if failure is not None:
                output, left_out = self._run_in_turn(rows, arguments, batch, failure)
                self.warn_once(failure, left_out)
        if batch.get("labels") is not None and isinstance(output, Mapping) and output.get("aux_loss") is not None:
            raise ValueError(
                "the loss holds aux_loss, which balances the experts over a whole batch and has no parts for tasks: "
                "leave out labels or output_router_logits, or run one task at a time"
            )
        return output

    def _run_together(self, rows: Rows, arguments: tuple[Any, ...], batch: dict[str, Any]) -> Any:
        labels, configs = batch.get("labels"), {task: self._emr.read_config(task) for task in rows}
        if labels is None or heads_are_alike(list(configs.values())):
            return self.run_module(self._emr.model, rows, arguments, batch)
        rest = {name: value for name, value in batch.items() if name != "labels"}
        output = self.run_module(self._emr.model, rows, arguments, rest)
        return loss_of_heads(self._emr, configs, output, labels, rows)

    def run_module(
        self, module: torch.nn.Module, rows: Rows, arguments: tuple[Any, ...], batch: dict[str, Any]
    ) -> Any:
        """One forward pass of the model or a part of it; raises [`NotByRows`] where that is not possible."""
        emr = self._emr
        different = [task for task in rows if not emr.fits(task)]
        if different or emr.current is None:
            raise NotByRows(f"the model of {different} differs from that of {emr.current!r} in more than its labels")
        if self._model is not emr.model or len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
            self._alike.clear()
            self._axes.clear()
            self._model = emr.model
        key, alike = self._kind(module, arguments, batch, sum(map(len, rows.values())))
        if key not in self._plans and alike in self._alike:
            try:
                return self._forward(self._alike[alike], rows, other_length=True).run(module, arguments, batch)
            except FAILURES:
                # What is wrong for every length is told by the attempt that follows.
                del self._alike[alike]
        if key not in self._plans:
            plan = self._plans[key] = self._plan(module, rows, arguments, batch)
            if not isinstance(plan, NotByRows):
                self._alike[alike] = plan
        found = self._plans[key]
        if isinstance(found, NotByRows):
            # A new one each time: an exception keeps what it passed through, batches too.
            raise NotByRows(str(found))
        return self._forward(found, rows).run(module, arguments, batch)

    def _plan(
        self, module: torch.nn.Module, rows: Rows, arguments: tuple[Any, ...], batch: dict[str, Any]
    ) -> dict[str, Unit] | NotByRows:
        """Units with which one pass for two tasks gives what each of them gives alone, or why there are none."""
        emr, model, current = self._emr, self._emr.model, str(self._emr.current)
        other, size = next(task for task in rows if task != current), sum(map(len, rows.values()))
        weights = differing_tensors(emr)
        zero, one, both = torch.tensor([0]), torch.tensor([1]), torch.tensor([0, 1])

        def samples(chosen: torch.Tensor) -> Any:
            # Anew for each run: a cache is written to.
            return take_rows((arguments, batch), chosen, size)

        def run(chosen: torch.Tensor) -> Any:
            few, many = samples(chosen)
            return module(*few, **many)

        single = observe(model, weights, lambda: run(zero))
        double = observe(model, weights, lambda: run(both))
        failure = NotByRows("no module can be run by rows")
        for share_rows in (True, False):
            try:
                plan = plan_units(model, single, double, share_rows=share_rows)
                _add_unseen(plan, model, weights, double)
                if _outline(plan) in self._proven:
                    return plan
                together = self._forward(plan, {current: zero, other: one}).run(module, *samples(both))
                alone = [
                    self._forward(plan, {current: zero}).run(module, *samples(zero)),
                    self._forward(plan, {other: zero}).run(module, *samples(one)),
                ]
            except FAILURES as error:
                failure = NotByRows(str(error))
                continue
            if _agree(together, alone):
                self._proven.add(_outline(plan))
                return plan
            failure = NotByRows("samples of two tasks in one pass do not give what each gives alone")
        return failure

    def _forward(self, plan: dict[str, Unit], rows: Rows, *, other_length: bool = False) -> MixedForward:
        if self._layout is None or not self._layout.is_of(self._emr):
            self._layout = Layout(self._emr)
        return MixedForward(self._emr, plan, rows, self.layers, self._layout, other_length)

    def _run_in_turn(
        self, rows: Rows, arguments: tuple[Any, ...], batch: dict[str, Any], reason: Exception
    ) -> tuple[Any, list[Any]]:
        """Runs the model for one task after the other and puts the outputs that are by sample together."""
        emr, size, labels = self._emr, sum(map(len, rows.values())), batch.get("labels")
        if any(isinstance(leaf, Cache) for leaf in leaves_of((arguments, batch))[0]):
            raise ValueError(
                "past_key_values go with samples of several tasks in one forward alone, and these cannot pass so: "
                f"{reason}. Run one task at a time."
            ) from reason
        axes = self._axes_of_samples(arguments, batch, size)
        compared = [key for key, found in axes.items() if found and len(found) > 1]
        if compared:
            raise ValueError(
                f"{compared} of {type(emr.model).__name__} compare the samples of a batch with each other, which "
                "means nothing between samples of different tasks: run one task at a time, or give what all of them "
                "are compared with in another number"
            )
        previous, outputs, losses, counts = emr.current, {}, {}, {}
        try:
            for task, indices in rows.items():
                few, many = take_rows((arguments, batch), indices, size)
                model = emr.set_task(task).model
                if labels is not None:
                    many["labels"] = as_labels(many["labels"], model.config)
                    counts[task] = count_targets(model, many["labels"])
                outputs[task] = output = model(*few, **many)
                if labels is not None:
                    losses[task] = output[0]
        finally:
            if previous is not None:
                emr.set_task(previous)
        first = next(iter(outputs.values()))
        keys = keys_of(first)
        joined: dict[Any, Any] = {keys[0]: mean_loss(losses, counts)} if labels is not None else {}
        for key in keys:
            if found := axes.get(key):
                joined[key] = join_samples({task: output[key] for task, output in outputs.items()}, rows, found[0])
        if not joined:
            raise ValueError(
                f"no output of {type(emr.model).__name__} ({', '.join(map(str, keys))}) is by sample, so that the "
                "samples of several tasks cannot be told apart; run one task at a time"
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
        key, _ = self._kind(model, arguments, batch, size)
        if key not in self._axes:
            runs = (take_rows((arguments, batch), torch.arange(count), size) for count in (1, 2))
            one, two = (model(*few, **many) for few, many in runs)
            self._axes[key] = {name: axes_of_samples(one[name], two[name], model.training) for name in keys_of(one)}
        return self._axes[key]

    def _kind(
        self, module: torch.nn.Module, arguments: tuple[Any, ...], batch: dict[str, Any], size: int
    ) -> tuple[Any, Any]:
        """What the course of a forward pass may depend on, but for the values; and the same but for lengths."""
        leaves, form = leaves_of((arguments, batch))
        found: list[Any] = [type(module), module.training, str(form)]
        alike = list(found)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                by_row = leaf.shape[:1] == (size,)
                shape = tuple(leaf.shape[int(by_row) :])
                found.append((leaf.dtype, by_row, shape))
                alike.append((leaf.dtype, by_row, *(min(length, 2) for length in shape)))
            elif isinstance(leaf, Cache):
                *about, lengths = describe_cache(leaf)
                found.append((*about, lengths))
                alike.append(tuple(about))
            else:
                found.append(repr(leaf))
                alike.append(repr(leaf))
        return tuple(found), tuple(alike)

    def warn_once(self, error: Exception, left_out: Sequence[Any] = ()) -> None:
        """Tells that tasks take turns, and why."""
        missing = f", and these outputs, which are not by sample, are left out: {left_out}" if left_out else ""
        text = (
            f"samples of several tasks could not pass in one forward, so each task gets its own: {error}. This is "
            f"slower{missing}."
        )
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=5)


def _add_unseen(plan: dict[str, Unit], model: torch.nn.Module, weights: Mapping[int, str], seen: Observation) -> None:
    """Adds the modules that two samples did not reach, as units without a call: an expert that other rows choose is
    run with the right weights inside of another unit, and outside of it the pass fails instead of being wrong."""
    for name, module in model.named_modules():
        held = [*module._parameters.values(), *module._buffers.values()]
        own = {weights[id(tensor)] for tensor in held if id(tensor) in weights}
        if own and name and name not in seen.calls:
            plan[name] = Unit([], own)


def _outline(plan: Mapping[str, Unit]) -> Any:
    """What a plan has in common with those for other lengths."""

    def follows(leaves: list[Leaf]) -> tuple[tuple[int, bool], ...]:
        return tuple((leaf.rows, leaf.is_row) for leaf in leaves)

    return frozenset(
        (name, frozenset(unit.weights), tuple((follows(takes), follows(gives)) for takes, gives in unit.calls))
        for name, unit in plan.items()
    )


def _agree(together: Any, alone: list[Any]) -> bool:
    """Whether the outputs by sample of one pass are those of a pass for each sample."""
    compared = 0
    for key in together if isinstance(together, Mapping) else range(len(together)):
        for row, output in enumerate(alone):
            if isinstance(output[key], torch.Tensor) and output[key].shape[:1] == (1,):
                if len(together[key]) != len(alone) or not are_close(together[key][row], output[key][0]):
                    return False
                compared += 1
    return compared > 0
