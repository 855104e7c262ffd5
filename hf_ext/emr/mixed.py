"""One forward pass for samples of different tasks: each module that has weights runs for each task on its rows, with
that task's weights. One module's weights are in memory at a time, of a linear layer or an embedding a piece; what is
small (biases, norms) is kept.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from .building import Place
from .layers import TaskLayers, TaskRows, layer_kind
from .units import Leaf, NotByRows, Unit, are_close, observe, patched_forwards, plan_units

if TYPE_CHECKING:
    from .model import EMRModel

# The samples of each task.
Rows = Mapping[str, torch.Tensor]
# Shapes of batches whose units are remembered.
_MAX_PLANS = 256
# What a model may raise when it is run in a way that it is not made for.
_FAILURES = (NotByRows, RuntimeError, ValueError, IndexError, TypeError)


class Mixer:
    """
    Runs a model on batches whose samples are of different tasks. For inference: without gradients.

    How a forward pass can be divided is found out for each shape of batch, on its first two samples; see `units`.
    """

    def __init__(self, emr: EMRModel) -> None:
        self._emr = emr
        self._model: torch.nn.Module | None = None
        self._plans: dict[Any, dict[str, Unit] | NotByRows] = {}
        self._proven: set[Any] = set()
        self._warned: set[str] = set()
        self._by_sample: dict[Any, set[Any]] = {}
        self.layers = TaskLayers(emr)
        self._layout: _Layout | None = None

    def run(self, task_ids: Sequence[str], arguments: tuple[Any, ...], batch: dict[str, Any]) -> Any:
        """Runs the model; arguments with as many rows as there are names are split by sample.

        Where the heads of the tasks differ in width, `logits` is a list with a tensor for each sample. Where the tasks
        had to run one after the other, outputs that are not by sample are left out (contrastive logits, say, which
        compare the samples of a batch with each other); a warning names them once.
        """
        emr = self._emr
        if isinstance(task_ids, str) or not set(task_ids) <= set(emr.tasks):
            raise ValueError(f"task_ids is {task_ids!r:.200}; give a list of tasks, which are {emr.tasks}")
        sizes = {len(leaf) for leaf in tree_leaves((arguments, batch)) if isinstance(leaf, torch.Tensor) and leaf.ndim}
        if not task_ids or len(task_ids) not in sizes:
            raise ValueError(f"task_ids names {len(task_ids)} tasks for {sorted(sizes)} samples; give one for each")
        if len(set(task_ids)) == 1:
            with emr.task(task_ids[0]) as model:
                return model(*arguments, **batch)
        refused = [name for name in ("labels", "past_key_values") if batch.get(name) is not None]
        if refused:
            raise ValueError(f"{refused[0]} cannot be given with samples of several tasks; run one task at a time")
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
        """One forward pass; raises [`NotByRows`] where that is not possible."""
        emr = self._emr
        different = [task for task in rows if not emr.fits(task)]
        if different or emr.current is None:
            raise NotByRows(f"the model of {different} differs from that of {emr.current!r} in more than its labels")
        if self._model is not emr.model or len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
            self._model = emr.model
        size = sum(map(len, rows.values()))
        key = self._kind(arguments, batch, size)
        if key not in self._plans:
            other = next(task for task in rows if task != emr.current)
            self._plans[key] = self._plan(other, arguments, batch, size)
        plan = self._plans[key]
        if isinstance(plan, NotByRows):
            raise plan
        return self._forward(plan, rows).run(arguments, batch)

    def _plan(
        self, other: str, arguments: tuple[Any, ...], batch: dict[str, Any], size: int
    ) -> dict[str, Unit] | NotByRows:
        """Units with which one pass for two tasks gives what each of them gives alone, or why there are none."""
        emr, model, current = self._emr, self._emr.model, str(self._emr.current)
        weights = _differing_tensors(emr)
        zero, one = torch.tensor([0]), torch.tensor([1])
        first, second, both = (take_rows((arguments, batch), rows, size) for rows in (zero, one, torch.tensor([0, 1])))
        single = observe(model, weights, lambda: model(*first[0], **first[1]))
        double = observe(model, weights, lambda: model(*both[0], **both[1]))
        failure = NotByRows("no module can be run by rows")
        for share_rows in (True, False):
            try:
                plan = plan_units(model, single, double, share_rows=share_rows)
                if _outline(plan) in self._proven:
                    return plan
                together = self._forward(plan, {current: zero, other: one}).run(*both)
                alone = [
                    self._forward(plan, {current: zero}).run(*first),
                    self._forward(plan, {other: zero}).run(*second),
                ]
            except _FAILURES as error:
                failure = NotByRows(str(error))
                continue
            if _agree(together, alone):
                self._proven.add(_outline(plan))
                return plan
            failure = NotByRows("samples of two tasks in one pass do not give what each gives alone")
        return failure

    def _forward(self, plan: dict[str, Unit], rows: Rows) -> _MixedForward:
        if self._layout is None or not self._layout.is_of(self._emr):
            self._layout = _Layout(self._emr)
        return _MixedForward(self._emr, plan, rows, self.layers, self._layout)

    def _run_in_turn(self, rows: Rows, arguments: tuple[Any, ...], batch: dict[str, Any]) -> tuple[Any, list[Any]]:
        """Runs the model for one task after the other and puts the outputs that are by sample together."""
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
        model, key = self._emr.model, self._kind(arguments, batch, size)
        if key not in self._by_sample:
            runs = (take_rows((arguments, batch), torch.arange(count), size) for count in (1, 2))
            one, two = (model(*few, **many) for few, many in runs)
            self._by_sample[key] = {name for name in _keys(one) if _is_by_sample(one[name], two[name], model.training)}
        return self._by_sample[key]

    def _kind(self, arguments: tuple[Any, ...], batch: dict[str, Any], size: int) -> Any:
        """What the course of a forward pass may depend on, but for the values."""
        leaves, form = tree_flatten((arguments, batch))
        found: list[Any] = [type(self._emr.model), self._emr.model.training, str(form)]
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                by_row = leaf.shape[:1] == (size,)
                found.append((leaf.dtype, by_row, tuple(leaf.shape[int(by_row) :])))
            else:
                found.append(repr(leaf))
        return tuple(found)

    def _warn_once(self, error: Exception, left_out: list[Any]) -> None:
        missing = f", and these outputs, which are not by sample, are left out: {left_out}" if left_out else ""
        text = (
            f"samples of several tasks could not pass in one forward, so each task gets its own: {error}. This is "
            f"slower{missing}."
        )
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=4)


class _MixedForward:
    """A forward pass in which units run for each task on its rows; the model is as before when it is over."""

    def __init__(
        self, emr: EMRModel, units: Mapping[str, Unit], rows: Rows, layers: TaskLayers, layout: _Layout
    ) -> None:
        self._emr = emr
        self._units = units
        self._rows = rows
        self._task_rows = TaskRows(rows)
        self._layers = layers
        self._size = sum(map(len, rows.values()))
        self._layout = layout
        self._inside: str | None = None
        self._done: dict[str, int] = defaultdict(int)
        # Width of the head's output by task, if they differ.
        self._widths: dict[str, int] = {}

    def run(self, arguments: tuple[Any, ...], batch: dict[str, Any]) -> Any:
        def patch(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **kwargs: self._run_unit(name, forward, args, kwargs)

        model = self._emr.model
        with patched_forwards(((name, model.get_submodule(name)) for name in self._units), patch):
            output = model(*arguments, **batch)
        for name, done in self._done.items():
            if done != len(self._units[name].calls):
                raise NotByRows(f"{name} was called {done} times, for one sample {len(self._units[name].calls)} times")
        return _trim(output, self._widths, self._rows) if self._widths else output

    def _run_unit(self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unit = self._units[name]
        if self._inside is not None:
            # All rows in a unit that runs for one task are that task's.
            with self._weights_of(self._inside, unit):
                return forward(*args, **kwargs)
        call = self._done[name]
        self._done[name] += 1
        alone = len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor)
        leaves = [args[0]] if alone else tree_leaves((args, kwargs))
        if self._widths or call >= len(unit.calls) or len(leaves) != len(unit.calls[call][0]):
            reason = "comes after a head of different widths" if self._widths else "is not called as for one sample"
            raise NotByRows(f"{name} {reason}")
        takes, gives = unit.calls[call]
        counts = [self._count(name, leaf, take) for leaf, take in zip(leaves, takes, strict=True)]
        output = self._run_layer(forward, unit, leaves, counts, gives)
        if output is not None:
            return output
        _, form = tree_flatten((args, kwargs))
        results: dict[str, list[Any]] = {}
        for task, rows in self._rows.items():
            chosen = [take(leaf, rows, count) for leaf, count in zip(leaves, counts, strict=True)]
            own_args, own_kwargs = tree_unflatten(chosen, form)
            self._inside = task
            try:
                with self._weights_of(task, unit):
                    results[task], result_form = tree_flatten(forward(*own_args, **own_kwargs))
            finally:
                self._inside = None
            if len(results[task]) != len(gives):
                raise NotByRows(f"{name} does not return what it does for one sample")
        joined = [self._join(name, {t: r[i] for t, r in results.items()}, give) for i, give in enumerate(gives)]
        return tree_unflatten(joined, result_form)

    def _run_layer(
        self, forward: Callable[..., Any], unit: Unit, leaves: list[Any], counts: list[int], gives: list[Leaf]
    ) -> Any:
        """What a unit gives if it is one of the layers that need no whole weights, else `None`."""
        kind = layer_kind(forward)
        if kind is None or len(leaves) != 1 or len(gives) != 1 or not isinstance(leaves[0], torch.Tensor):
            return None
        layer = cast(Any, forward).__self__
        names = self._names_in(layer, unit)
        if "weight" not in names:
            return None
        x = leaves[0]
        if counts[0] == 0:
            if x.shape[:1] != (1,):
                return None
            x = x.expand(self._size, *x.shape[1:])
        return self._layers.run(kind, layer, names, x, self._task_rows)

    def _names_in(self, layer: torch.nn.Module, unit: Unit) -> dict[str, str]:
        """Under which name the checkpoints have the parameters of a layer, where they are not parts of fused ones."""
        names = {}
        for whole in unit.weights:
            for holder, attribute in self._layout.holders[whole]:
                ((name, place), *others) = self._layout.parts[whole]
                if holder is layer._parameters and not others and place.part is None:
                    names[attribute] = name
        return names

    def _count(self, name: str, leaf: Any, take: Leaf) -> int:
        """Rows for each sample of what a unit takes."""
        shape = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None
        if take.rows and shape is not None and shape[:1] == (take.rows * self._size,):
            return take.rows
        if take.rows == 0 and shape == take.shape:
            return 0
        if take.is_row and shape is not None and shape[:1] == (self._size,):
            # A unit before this one gave each sample its own.
            return 1
        raise NotByRows(f"{name} takes {shape}, and {take.shape} for one sample")

    def _join(self, name: str, parts: dict[str, Any], give: Leaf) -> Any:
        """Puts the tasks' rows of a result together."""
        first = next(iter(parts.values()))
        if give.shape is None:
            return first
        count = give.rows or 1
        if give.is_row:
            parts = {task: part.expand(len(self._rows[task]), *part.shape[1:]) for task, part in parts.items()}
        if any(len(part) != count * len(self._rows[task]) for task, part in parts.items()):
            raise NotByRows(f"{name} does not return rows for each sample")
        widths = {task: part.shape[-1] for task, part in parts.items()}
        if len({part.shape[1:] for part in parts.values()}) > 1:
            if first.ndim < 2 or len({part.shape[1:-1] for part in parts.values()}) > 1:
                raise NotByRows(f"{name} returns tensors of different shapes for different tasks")
            self._widths = widths
        # Narrower heads leave zeros at the end, which are cut off when the model is done.
        whole = first.new_zeros(count * self._size, *first.shape[1:-1], *([max(widths.values())] * (first.ndim > 1)))
        for task, part in parts.items():
            target = whole if first.ndim < 2 else whole[..., : part.shape[-1]]
            target.index_copy_(0, all_rows(self._rows[task], count, part.device), part)
        return whole

    @contextmanager
    def _weights_of(self, task: str, unit: Unit) -> Iterator[None]:
        replaced: list[tuple[dict[str, Any], str, Any]] = []
        try:
            # The model itself holds the weights of the current task.
            for whole in unit.weights if task != self._emr.current else ():
                held = [holder[attribute] for holder, attribute in self._layout.holders[whole]]
                tensor = self._restore(task, whole, held[0])
                is_parameter = isinstance(held[0], torch.nn.Parameter)
                for (holder, attribute), original in zip(self._layout.holders[whole], held, strict=True):
                    replaced.append((holder, attribute, original))
                    holder[attribute] = torch.nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
            yield
        finally:
            for holder, attribute, original in reversed(replaced):
                holder[attribute] = original

    def _restore(self, task: str, whole: str, held: torch.Tensor) -> torch.Tensor:
        """A task's values for one of the model's tensors; a head may have another width than the model's."""
        weights, parts = self._emr.weights, self._layout.parts[whole]
        name, place = parts[0]
        if place.part is None and held.ndim < 2:
            return self._layers.vector(task, name, held)
        if place.part is None:
            return weights.restore(task, name, device=held.device, dtype=held.dtype)
        fused = torch.empty_like(held)
        for name, place in parts:
            weights.restore_into(task, name, place.within(fused))
        return fused


def _trim(output: Any, widths: Mapping[str, int], rows: Rows) -> Any:
    """The output with a list of logits, each sample's of the width of its task's head."""
    key: Any = "logits" if isinstance(output, Mapping) else 0
    logits = output.get("logits") if isinstance(output, Mapping) else output[0]
    if not isinstance(logits, torch.Tensor) or logits.shape[-1] != max(widths.values()):
        raise NotByRows("the heads of the tasks have different widths, and what they give is not returned as logits")
    width = {int(row): widths[task] for task, indices in rows.items() for row in indices}
    samples = [sample[..., : width[row]] for row, sample in enumerate(logits)]
    if isinstance(output, tuple):
        return (samples, *output[1:])
    output[key] = samples
    return output


def _differing_tensors(emr: EMRModel) -> dict[int, str]:
    """Name of each parameter and buffer of the model that the tasks have their own of, by `id`."""
    held = emr.model.state_dict(keep_vars=True)
    return {id(held[place.tensor]): place.tensor for place in emr.places.values()}


class _Layout:
    """Where the model keeps what the tasks have their own of."""

    def __init__(self, emr: EMRModel) -> None:
        self._seen = _all_tensors(emr.model)
        weights = _differing_tensors(emr)
        # by name of the model's tensor: where it is, at more than one place if it is tied
        self.holders: dict[str, list[tuple[dict[str, Any], str]]] = defaultdict(list)
        for module in emr.model.modules():
            for kept in (module._parameters, module._buffers):
                for attribute, tensor in kept.items():
                    if id(tensor) in weights:
                        self.holders[weights[id(tensor)]].append((kept, attribute))
        # and what the checkpoints call it, or the parts of it
        self.parts: dict[str, list[tuple[str, Place]]] = defaultdict(list)
        for name, place in emr.places.items():
            self.parts[place.tensor].append((name, place))

    def is_of(self, emr: EMRModel) -> bool:
        """Whether the model has the same tensors at the same places still."""
        now = _all_tensors(emr.model)
        return len(now) == len(self._seen) and all(one is two for one, two in zip(now, self._seen, strict=True))


def _all_tensors(model: torch.nn.Module) -> list[Any]:
    return [
        tensor
        for module in model.modules()
        for kept in (module._parameters, module._buffers)
        for tensor in kept.values()
    ]


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


def rows_of(task_ids: Sequence[str]) -> dict[str, torch.Tensor]:
    """The samples of each task."""
    return {
        task: torch.tensor([i for i, name in enumerate(task_ids) if name == task]) for task in dict.fromkeys(task_ids)
    }


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
