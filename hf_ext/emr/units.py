"""One forward pass for rows of several tasks, by one rule.

A unit is a module that itself holds a tensor in which the tasks differ. It runs once for each task, on that task's
rows and with that task's weights, and its results are put together in the order of the batch; everything else runs
once for all rows. What a unit takes is divided by rows if its length is a multiple of the batch's, and given to every
task whole if not. A length can be a multiple by chance, and code can use a weight without calling the module that
holds it. So the rule is not believed: `mixed` compares the first pass of each kind with every task alone. A kind is
what was divided in which call of which unit (`Pass.kind`), whatever the lengths are.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_unflatten

from .batches import Rows, leaves_of, repeat_rows
from .building import Place
from .layers import TaskLayers
from .many_tasks import ManyTasks

# A method that stands between modules as a module would: T5 and its kin compute one row for all samples from a table
# of relative positions, inside an attention that also writes into a cache, which cannot be divided by rows.
_METHOD = "compute_bias"
# Functions that choose rows by their values: how many go on, and whose they are, differs from batch to batch.
_CHOOSES = frozenset(("nonzero", "argwhere", "masked_select"))
_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.Size, slice, type(None))


class NotByRows(Exception):
    """The rows of several tasks cannot pass in one forward; the message says why."""


class Slot(NamedTuple):
    """A tensor of a unit in which the tasks differ."""

    holder: dict[str, Any]  # `_parameters` or `_buffers` of the module
    key: str
    parts: list[tuple[str, Place]]  # names in the checkpoints, and which part of the tensor each of them is


class Units:
    """The units of a model, and the weights of the tasks for them."""

    def __init__(self, emr: ManyTasks) -> None:
        self._emr = emr
        self.model: torch.nn.Module = emr.model
        self._tensors = _list_tensors(self.model)
        held, places = self.model.state_dict(keep_vars=True), defaultdict(list)
        alike = set.intersection(*(set(record.shared) for record in emr.weights.manifest.tasks.values()))
        for name, place in emr.places.items():
            if name not in alike:
                places[id(held[place.tensor])].append((name, place))
        self.slots: dict[torch.nn.Module, list[Slot]] = defaultdict(list)
        self.methods: list[tuple[torch.nn.Module, str]] = []
        for name, module in self.model.named_modules():
            unit = _find_run(self.model, name)
            for holder in _holders(module):
                for key, value in holder.items():
                    if id(value) in places:
                        self.slots[unit].append(Slot(holder, key, places[id(value)]))
            if hasattr(module, _METHOD):
                self.methods.append((module, _METHOD))
        self.methods += [(module, "forward") for module in self.slots]
        self._small: dict[Any, Tensor] = {}
        self._memory: dict[Any, Tensor] = {}
        self._used: dict[Any, int] = defaultdict(int)
        self._apart: list[str] = []
        self.layers = TaskLayers(emr.weights)

    def are_of(self, model: torch.nn.Module) -> bool:
        """True where they are a model's that still holds the same tensors at the same places."""
        now = _list_tensors(model)
        return len(now) == len(self._tensors) and all(one is two for one, two in zip(now, self._tensors, strict=True))

    @property
    def current(self) -> str | None:
        """The task whose weights the model holds."""
        return self._emr.current

    @property
    def are_moved(self) -> bool:
        """True while tasks have other weights than their own."""
        return bool(self._apart)

    @contextmanager
    def weights(self, task: str, slots: list[Slot]) -> Iterator[None]:
        """Lets modules hold a task's weights inside a `with` block. The current task's are those of the model itself,
        with all that was changed in place."""
        used, before = dict(self._used), [(slot.holder, slot.key, slot.holder[slot.key]) for slot in slots]
        try:
            for slot in slots if task != self._emr.current else ():
                held = slot.holder[slot.key]
                tensor = self._restore(task, slot.parts, held)
                tensor = self._move(task, slot.parts[0][0], tensor) if self._apart else tensor
                is_parameter = isinstance(held, torch.nn.Parameter)
                slot.holder[slot.key] = torch.nn.Parameter(tensor, False) if is_parameter else tensor
            yield
        finally:
            for holder, key, held in before:
                holder[key] = held
            self._used = defaultdict(int, used)

    @contextmanager
    def moved_apart(self, tasks: list[str]) -> Iterator[None]:
        """Moves the weights of some tasks far apart inside a `with` block. It may take the memory of another model."""
        self._apart = tasks
        try:
            yield
        finally:
            self._apart = []
            self._memory.clear()

    def _move(self, task: str, name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._apart.index(task)} {name}".encode()))
        factors = torch.rand(tensor.shape, generator=generator).add_(0.5)
        return tensor * factors.to(tensor)

    def _restore(self, task: str, parts: list[tuple[str, Place]], held: Tensor) -> Tensor:
        """A task's values for a tensor; biases and the like are kept, as they take no room and many calls."""
        name, place = parts[0]
        if place.part is None and held.ndim < 2:
            return self.small(task, name, held)
        if place.part is None:
            shape = self._emr.weights.entries(task)[name][1]
            whole = self._take_memory(held, torch.Size(shape))
        else:
            whole = self._take_memory(held, held.shape).copy_(held.detach())
        for name, place in parts:
            self._emr.weights.restore_into(task, name, place.within(whole))
        return whole

    def small(self, task: str, name: str | None, held: Tensor) -> Tensor:
        """A task's values for a bias or the like, which are kept; the model's own where tasks have none of theirs."""
        if name is None or task == self.current:
            return held.detach()
        key = (task, name, held.dtype, held.device)
        if key not in self._small:
            self._small[key] = self._emr.weights.restore(task, name, device=held.device, dtype=held.dtype)
        return self._small[key]

    def _take_memory(self, like: Tensor, shape: torch.Size) -> Tensor:
        """Memory for a tensor, free again after the `with` block: to get new pages for each costs more than to fill
        them. What does not fit is new memory, which later blocks use."""
        key, count = (like.dtype, like.device), shape.numel()
        start = self._used[key]
        # Each tensor begins on a line of the cache.
        stop = start + -(-count // 64) * 64
        if key not in self._memory or len(self._memory[key]) < stop:
            self._memory[key] = torch.empty(2 * stop, dtype=like.dtype, device=like.device)
        self._used[key] = stop
        return self._memory[key][start : start + count].view(shape)


class Pass:
    """One forward pass for rows of several tasks; the model is as before when it is over."""

    def __init__(self, units: Units, rows: Rows) -> None:
        self._units = units
        self._rows = rows
        self._size = sum(map(len, rows.values()))
        self._thread = threading.get_ident()
        self._inside: str | None = None
        self._repeated: dict[Any, Tensor] = {}
        # Width of the head's output by task, if they differ.
        self._widths: dict[str, int] = {}
        self._divided: list[Any] = []
        self.has_chosen = False

    @property
    def is_outside(self) -> bool:
        """True while the model runs for all rows."""
        return self._inside is None

    @property
    def kind(self) -> tuple[Any, ...]:
        """The units in the order of their calls, and the inputs that each call divided by rows."""
        return tuple(self._divided)

    def run(self, arguments: tuple[Any, ...], batch: Mapping[str, Any], *, watched: bool = False) -> Any:
        """Runs the model. Where the heads differ in width, `logits` is a list with a tensor for each row. A pass that
        is watched notes whether rows were chosen by value."""
        patched: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for number, (module, method) in enumerate(self._units.methods):
                # An instance may have a `forward` of its own already, from a hook of another library.
                own = vars(module)
                patched.append((own, method, own.get(method)))
                own[method] = self._by_task(number, self._units.slots.get(module, []), getattr(module, method))
            with _Choices(self) if watched else contextlib.nullcontext():
                output = self._units.model(*arguments, **batch)
        finally:
            for own, method, original in patched:
                if original is None:
                    del own[method]
                else:
                    own[method] = original
        return _trim(output, self._widths, self._rows) if self._widths else output

    def _by_task(self, number: int, slots: list[Slot], forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            # Another thread, in the middle of the same model, runs what was there.
            if threading.get_ident() != self._thread:
                return forward(*args, **kwargs)
            if self._inside is not None:
                # All rows in a unit that runs for one task are that task's.
                with self._units.weights(self._inside, slots):
                    return forward(*args, **kwargs)
            return self._run_unit(number, slots, forward, args, kwargs)

        return call

    def _run_unit(
        self, number: int, slots: list[Slot], forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        leaves, form = leaves_of((args, kwargs))
        counts = [self._count(leaf) for leaf in leaves]
        output = self._run_layer(slots, forward, leaves[0], counts[0]) if len(leaves) == 1 else None
        if output is not None:
            self._divided.append((number, (bool(counts[0]),)))
            return output
        results = {}
        for task in self._rows:
            own = [self._take(leaf, task, count) for leaf, count in zip(leaves, counts, strict=True)]
            own_args, own_kwargs = tree_unflatten(own, form)
            self._inside = task
            try:
                with self._units.weights(task, slots):
                    results[task], result_form = leaves_of(forward(*own_args, **own_kwargs))
            finally:
                self._inside = None
        if len({len(result) for result in results.values()}) > 1:
            raise NotByRows("a module returns other things for one task than for another")
        parts = [dict(zip(results, found, strict=True)) for found in zip(*results.values(), strict=True)]
        self._divided.append((number, tuple(map(bool, counts))))
        return tree_unflatten([self._join(part, any(counts)) for part in parts], result_form)

    def _run_layer(self, slots: list[Slot], forward: Callable[..., Any], x: Any, count: int) -> Tensor | None:
        """The output of a linear layer or an embedding, where no whole weight is needed for it."""
        units, layers, tasks = self._units, self._units.layers, list(self._rows)
        kind = layers.find_kind(forward, x) if slots and not units.are_moved else None
        named = {slot.key: slot.parts[0][0] for slot in slots if slot.parts[0][1].part is None}
        if kind is None or "weight" not in named:
            return None
        layer: Any = cast(Any, forward).__self__
        weight, others = layer.weight.detach(), [task for task in tasks if task != units.current]
        parts = {task: layers.find_parts(task, named["weight"], weight) for task in others}
        places = {0 if found is None else found.base.data_ptr() for found in parts.values()}
        if 0 in places or len(places) > 1 or not (count or len(x) == 1):
            return None
        if not count:
            x, count = x.expand(self._size, *x.shape[1:]), 1
        order = self._order(count)
        own = x.index_select(0, order).split([len(self._rows[task]) * count for task in tasks])
        if kind == "embedding":
            found = [layers.look_up(ids, weight, parts.get(task)) for task, ids in zip(tasks, own, strict=True)]
        else:
            held = layer.bias
            biases = [held if held is None else units.small(task, named.get("bias"), held) for task in tasks]
            flat = [rows.reshape(-1, x.shape[-1]) for rows in own]
            found = layers.multiply(flat, weight, [parts.get(task) for task in tasks], biases, kind == "transposed")
        y = torch.cat(found)
        y = y.view(*x.shape, -1) if kind == "embedding" else y.view(*x.shape[:-1], -1)
        return torch.empty_like(y).index_copy_(0, order, y)

    def _order(self, count: int) -> Tensor:
        if ("", count) not in self._repeated:
            self._repeated["", count] = torch.cat([repeat_rows(rows, count) for rows in self._rows.values()])
        return self._repeated["", count]

    def _count(self, leaf: Any) -> int:
        """Rows for each sample of what a unit takes; 0 if all tasks take the same."""
        if isinstance(leaf, Tensor):
            return 0 if leaf.ndim == 0 or len(leaf) % self._size else len(leaf) // self._size
        if not isinstance(leaf, _PLAIN):
            raise NotByRows(f"a {type(leaf).__name__} cannot be divided by samples")
        return 0

    def _take(self, leaf: Any, task: str, count: int) -> Any:
        return leaf.index_select(0, self._all_rows(task, count, leaf.device)) if count else leaf

    def _all_rows(self, task: str, count: int, device: torch.device) -> Tensor:
        key = (task, count, device)
        if key not in self._repeated:
            self._repeated[key] = repeat_rows(self._rows[task], count).to(device)
        return self._repeated[key]

    def _join(self, parts: dict[str, Any], by_rows: bool) -> Any:
        """The tasks' results in the order of the batch."""
        first = next(iter(parts.values()))
        if isinstance(first, _PLAIN):
            return first
        if not all(isinstance(part, Tensor) and part.ndim for part in parts.values()):
            raise NotByRows(f"a module returns a {type(first).__name__}, which has no rows")
        if all(len(part) == 1 for part in parts.values()):
            # One row for all samples, positions say: each task has its own.
            parts = {task: part.expand(len(self._rows[task]), *part.shape[1:]) for task, part in parts.items()}
        elif not by_rows:
            raise NotByRows("what a module gives does not follow the batch")
        counts = {divmod(len(part), len(self._rows[task])) for task, part in parts.items()}
        if len(counts) > 1 or (count := next(iter(counts))[0]) == 0 or next(iter(counts))[1]:
            raise NotByRows("a module does not return rows for each sample")
        widths = {task: part.shape[-1] for task, part in parts.items()}
        if len({part.shape[1:] for part in parts.values()}) > 1:
            if first.ndim < 2 or len({part.shape[1:-1] for part in parts.values()}) > 1:
                raise NotByRows("a module returns tensors of different shapes for different tasks")
            self._widths = widths
        # Narrower heads leave zeros at the end, which are cut off when the model is done.
        whole = first.new_zeros(count * self._size, *first.shape[1:-1], *([max(widths.values())] * (first.ndim > 1)))
        for task, part in parts.items():
            target = whole if first.ndim < 2 else whole[..., : part.shape[-1]]
            target.index_copy_(0, self._all_rows(task, count, part.device), part)
        return whole


class _Choices(TorchFunctionMode):
    """Notes inside a `with` block whether rows were chosen by value outside of units. An expert that gets the tokens
    that chose it may get a multiple of the batch's length by chance, and from each sample another number."""

    def __init__(self, mixed: Pass) -> None:
        super().__init__()
        self._pass = mixed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._pass.is_outside and _chooses(getattr(func, "__name__", ""), args):
            self._pass.has_chosen = True
        return func(*args, **(kwargs or {}))


def _chooses(name: str, args: tuple[Any, ...]) -> bool:
    """True for a function that chooses rows by value: `nonzero` and its kin, or a mask as an index."""
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(part, Tensor) and part.ndim and part.dtype == torch.bool for part in index)
    return name in _CHOOSES or (name == "where" and len(args) == 1)


def _trim(output: Any, widths: Mapping[str, int], rows: Rows) -> Any:
    """The output with a list of logits, each sample's of the width of its task's head."""
    key: Any = "logits" if isinstance(output, Mapping) else 0
    logits = output.get("logits") if isinstance(output, Mapping) else output[0]
    if not isinstance(logits, Tensor) or logits.shape[-1] != max(widths.values()):
        raise NotByRows("the heads of the tasks have different widths, and what they give is not returned as logits")
    width = {int(row): widths[task] for task, indices in rows.items() for row in indices}
    samples = [sample[..., : width[row]] for row, sample in enumerate(logits)]
    if isinstance(output, tuple):
        return (samples, *output[1:])
    output[key] = samples
    return output


def _find_run(model: torch.nn.Module, name: str) -> torch.nn.Module:
    """The module of a name; of one that is never run itself, a dictionary of parameters say, the module around it."""
    module = model.get_submodule(name)
    runs = type(module).forward is not torch.nn.Module.forward
    return module if runs or not name else _find_run(model, name.rpartition(".")[0])


def _holders(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers


def _list_tensors(model: torch.nn.Module) -> list[Any]:
    return [tensor for module in model.modules() for holder in _holders(module) for tensor in holder.values()]
