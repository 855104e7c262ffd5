"""A forward pass of which each unit runs for each task on its rows."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from transformers import Cache

from .batches import Rows, all_rows, copy_cache, leaves_of, take
from .building import Place
from .layers import TaskLayers, TaskRows, layer_kind
from .units import Leaf, NotByRows, Unit, patched_forwards

if TYPE_CHECKING:
    from .model import EMRModel


class MixedForward:
    """A forward pass in which units run for each task on its rows; the model is as before when it is over."""

    def __init__(
        self,
        emr: EMRModel,
        units: Mapping[str, Unit],
        rows: Rows,
        layers: TaskLayers,
        layout: Layout,
        other_length: bool,
    ) -> None:
        self._emr = emr
        self._units = units
        self._rows = rows
        self._task_rows = TaskRows(rows)
        self._layers = layers
        self._size = sum(map(len, rows.values()))
        self._layout = layout
        # Whether the units were found for a batch of another length.
        self._other_length = other_length
        self._inside: str | None = None
        self._done: dict[str, int] = defaultdict(int)
        # Width of the head's output by task, if they differ.
        self._widths: dict[str, int] = {}

    def run(self, module: torch.nn.Module, arguments: tuple[Any, ...], batch: dict[str, Any]) -> Any:
        def patch(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **kwargs: self._run_unit(name, forward, args, kwargs)

        caches = [leaf for leaf in leaves_of((arguments, batch))[0] if isinstance(leaf, Cache)]
        as_before = [copy_cache(cache) for cache in caches]
        try:
            with patched_forwards(self._emr.model, self._units, patch):
                output = module(*arguments, **batch)
            for name, done in self._done.items():
                if done != (seen := len(self._units[name].calls)):
                    raise NotByRows(f"{name} was called {done} times, for one sample {seen} times")
            return _trim(output, self._widths, self._rows) if self._widths else output
        except BaseException:
            for cache, kept in zip(caches, as_before, strict=True):
                vars(cache).update(vars(kept))
            raise

    def _run_unit(self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unit = self._units[name]
        if self._inside is not None:
            # All rows in a unit that runs for one task are that task's.
            with self._weights_of(self._inside, unit, self._chosen_experts(unit, forward, args, kwargs)):
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
                with self._weights_of(task, unit, self._chosen_experts(unit, forward, own_args, own_kwargs)):
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
        if self._other_length and shape is not None and take.shape is not None and len(shape) == len(take.shape):
            if take.rows and shape[0] and shape[0] % self._size == 0:
                return shape[0] // self._size
            if take.rows == 0 and shape and (shape[0] == 1 or take.shape[0] != 1):
                return 0
        raise NotByRows(f"{name} takes {shape}, and {take.shape} for one sample")

    def _join(self, name: str, parts: dict[str, Any], give: Leaf) -> Any:
        """Puts the tasks' rows of a result together."""
        first = next(iter(parts.values()))
        if give.shape is None:
            return first
        count = give.rows or 1
        if give.is_row:
            parts = {task: part.expand(len(self._rows[task]), *part.shape[1:]) for task, part in parts.items()}
        if self._other_length and give.rows:
            count = len(first) // len(next(iter(self._rows.values())))
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
    def _weights_of(self, task: str, unit: Unit, experts: set[int] | None) -> Iterator[None]:
        replaced: list[tuple[dict[str, Any], str, Any]] = []
        try:
            # The model itself holds the weights of the current task.
            for whole in unit.weights if task != self._emr.current else ():
                held = [holder[attribute] for holder, attribute in self._layout.holders[whole]]
                tensor = self._restore(task, whole, held[0], experts)
                is_parameter = isinstance(held[0], torch.nn.Parameter)
                for (holder, attribute), original in zip(self._layout.holders[whole], held, strict=True):
                    replaced.append((holder, attribute, original))
                    holder[attribute] = torch.nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
            yield
        finally:
            for holder, attribute, original in reversed(replaced):
                holder[attribute] = original

    def _chosen_experts(
        self, unit: Unit, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> set[int] | None:
        """The experts that the rows of a call go to, by the name that transformers has for their numbers."""
        if not any(place.part for whole in unit.weights for _, place in self._layout.parts[whole]):
            return None
        index = inspect.signature(forward).bind(*args, **kwargs).arguments.get("top_k_index")
        return None if index is None else set(index.unique().tolist())

    def _restore(self, task: str, whole: str, held: torch.Tensor, experts: set[int] | None) -> torch.Tensor:
        """
        A task's values for one of the model's tensors; a head may have another width than the model's. Of fused
        experts, those that no row goes to stay zero: whoever multiplies by all of them gives these the weight 0.
        """
        weights, parts = self._emr.weights, self._layout.parts[whole]
        name, place = parts[0]
        if place.part is None and held.ndim < 2:
            return self._layers.vector(task, name, held)
        if place.part is None:
            return weights.restore(task, name, device=held.device, dtype=held.dtype)
        fused = torch.zeros_like(held)
        for name, place in parts:
            if experts is None or place.part is None or place.part[2] // held.stride(0) in experts:
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


def differing_tensors(emr: EMRModel) -> dict[int, str]:
    """Name of each parameter and buffer of the model that the tasks have their own of, by `id`."""
    held = emr.model.state_dict(keep_vars=True)
    return {id(held[place.tensor]): place.tensor for place in emr.places.values()}


class Layout:
    """Where the model keeps what the tasks have their own of."""

    def __init__(self, emr: EMRModel) -> None:
        self._seen = _all_tensors(emr.model)
        weights = differing_tensors(emr)
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
