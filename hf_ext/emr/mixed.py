"""A batch whose samples are of several tasks, in one forward pass by one rule.

A unit is a module that itself holds a tensor in which the tasks differ. It runs once for each task, on that task's
rows and with that task's weights, and its results are put together in the order of the batch; everything else runs
once for all rows. What a unit takes is divided by rows if its length is a multiple of the batch's, and given to every
task whole if not. A length can be a multiple by chance, and code can use a weight without calling the module that
holds it. So the rule is not believed: the first pass of each kind is compared with every task on the whole batch, and
where the two differ, batches of that kind take turns. A kind is what was divided in which call of which unit, whatever
the lengths.
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

from .batches import Rows, are_alike, keys_of, kind_of, leaves_of
from .building import BuiltModel
from .layers import TaskLayers
from .weights import TaskWeights

# Number of kinds of batches that are remembered.
_MAX_KINDS = 256
# A method that stands between modules as a module would: T5 and its kin compute one row for all samples from a table
# of relative positions, inside an attention that also writes into a cache, which cannot be divided by rows.
_METHOD = "compute_bias"
# Functions that choose rows by their values: how many go on, and whose they are, differs from batch to batch.
_CHOOSES = frozenset(("nonzero", "argwhere", "masked_select"))
_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.Size, slice, type(None))


class NotByRows(Exception):
    """The rows of several tasks cannot pass in one forward; the message says why."""


class Mixer:
    """Runs a model on batches whose samples are of different tasks. For inference: without gradients."""

    def __init__(self, weights: TaskWeights) -> None:
        self._weights = weights
        self._units: Units | None = None
        self._proven, self._refused = set[Any](), dict[Any, str]()

    @torch.no_grad()
    def run(self, built: BuiltModel, current: str, rows: Rows, given: tuple[Any, Any]) -> Any:
        """One forward pass for tasks that a model of the current one fits; raises [`NotByRows`] where that is not
        possible. Where the heads of the tasks differ in width, `logits` is a list with a tensor for each sample."""
        if self._units is None or not self._units.are_of(built.model):
            self._units = Units(self._weights, built)
            self._proven, self._refused = set(), {}
        if self._units.has_fused:
            raise NotByRows("experts, which are fused on loading, choose rows by value")
        units, kind = self._units, kind_of(built.model, given, sum(map(len, rows.values())))
        units.current = current
        lengths = tuple(leaf.shape for leaf in leaves_of(given)[0] if isinstance(leaf, Tensor))
        if (kind, lengths) in self._refused:
            raise NotByRows(self._refused[kind, lengths])
        try:
            mixed = Pass(units, rows)
            output = mixed.run(given)
            if (kind, *mixed.kind) not in self._proven:
                _check(units, rows, given)
                self._proven.add((kind, *mixed.kind))
            return output
        # Whatever a model raises that does not support this kind of run.
        except (NotByRows, RuntimeError, ValueError, IndexError, TypeError) as error:
            self._refused[kind, lengths] = str(error)
            raise NotByRows(str(error)) from error
        finally:
            if len(self._proven) + len(self._refused) > _MAX_KINDS:
                self._proven.clear()
                self._refused.clear()


def _check(units: Units, rows: Rows, given: tuple[Any, Any]) -> None:
    """Raises [`NotByRows`] where one pass does not give the rows that each task gives alone for the whole batch, of
    which nothing needs to be divided; contrastive logits so have other shapes.

    Both run with weights that are moved far apart, for each task by other random factors: what a unit did not get, or
    got of another task, then shows in the outputs, however near the fine-tunes are to each other.
    """
    size, mixed, compared = sum(map(len, rows.values())), Pass(units, rows), 0
    units.are_moved = True
    try:
        with _Choices(mixed):
            together = mixed.run(given)
        if mixed.has_chosen:
            raise NotByRows("the model selects samples by value")
        for task, own in rows.items():
            with units.weights(task, [slot for slots in units.slots.values() for slot in slots]):
                alone = units.model(*given[0], **given[1])
            for key in (key for key in keys_of(alone) if isinstance(alone[key], Tensor)):
                found, mine = alone[key], together[key]
                by_row = found.shape[:1] == (size,)
                if by_row and len(mine) == size:
                    found, mine = ([part[row] for row in own.tolist()] for part in (found, mine))
                elif isinstance(mine, Tensor):
                    found, mine = [found], [mine]
                if not are_alike(found, mine):
                    raise NotByRows("samples of several tasks in one pass do not give what each gives alone")
                compared += by_row
    finally:
        units.are_moved = False
    if not compared:
        raise NotByRows("no output has a row for each sample")


class Slot(NamedTuple):
    """A tensor of a unit in which the tasks differ."""

    holder: dict[str, Any]  # `_parameters` or `_buffers` of the module
    key: str
    name: str  # in the checkpoints


class Units:
    """The units of a model, and the weights of the tasks for them."""

    def __init__(self, weights: TaskWeights, built: BuiltModel) -> None:
        self.model = built.model
        # The task whose weights the model holds.
        self.current = ""
        self.layers = TaskLayers(weights)
        self._weights = weights
        self._contents = _list_contents(self.model)
        held = self.model.state_dict(keep_vars=True)
        alike = set.intersection(*(set(record.shared) for record in weights.manifest.tasks.values()))
        own = {name: place for name, place in built.places.items() if name not in alike}
        self.has_fused = any(place.part is not None for place in own.values())
        names = {id(held[place.tensor]): name for name, place in own.items()}
        self.slots: dict[torch.nn.Module, list[Slot]] = defaultdict(list)
        self.methods: list[tuple[torch.nn.Module, str]] = []
        for path, module in self.model.named_modules():
            unit = _find_run(self.model, path)
            for holder in (module._parameters, module._buffers):
                for key, value in holder.items():
                    if id(value) in names:
                        self.slots[unit].append(Slot(holder, key, names[id(value)]))
            if hasattr(module, _METHOD):
                self.methods.append((module, _METHOD))
        self.methods += [(module, "forward") for module in self.slots]
        self._small: dict[Any, Tensor] = {}
        # True while the weights of the tasks stand far apart.
        self.are_moved = False

    def are_of(self, model: torch.nn.Module) -> bool:
        """True where they are a model's that still holds the same modules and tensors at the same places."""
        return [*map(id, _list_contents(model))] == [*map(id, self._contents)]

    @contextmanager
    def weights(self, task: str, slots: list[Slot]) -> Iterator[None]:
        """Lets modules hold a task's weights inside a `with` block. The current task's are those of the model itself,
        with all that was changed in place."""
        before = [slot.holder[slot.key] for slot in slots]
        try:
            if self.are_moved or task != self.current:
                find = self._move if self.are_moved else self.values
                for slot, held in zip(slots, before, strict=True):
                    values = find(task, slot.name, held)
                    is_parameter = isinstance(held, torch.nn.Parameter)
                    slot.holder[slot.key] = torch.nn.Parameter(values, False) if is_parameter else values
            yield
        finally:
            for slot, held in zip(slots, before, strict=True):
                slot.holder[slot.key] = held

    def _move(self, task: str, name: str, held: Tensor) -> Tensor:
        if not held.is_floating_point():
            return held.detach()
        generator = torch.Generator().manual_seed(zlib.crc32(f"{task} {name}".encode()))
        return held.detach() * torch.rand(held.shape, generator=generator).add_(0.5).to(held)

    def values(self, task: str, name: str, held: Tensor) -> Tensor:
        """A task's values for a tensor; biases and the like are kept, as they take no room and many calls."""
        if task == self.current:
            return held.detach()
        key = (task, name, held.dtype, held.device)
        if key in self._small:
            return self._small[key]
        values = self._weights.restore(task, name, device=held.device, dtype=held.dtype)
        return self._small.setdefault(key, values) if values.ndim < 2 else values


class Pass:
    """One forward pass for rows of several tasks; the model is as before when it is over."""

    def __init__(self, units: Units, rows: Rows) -> None:
        self._units, self._rows, self._size = units, rows, sum(map(len, rows.values()))
        self._thread = threading.get_ident()
        self._indices: dict[Any, Tensor] = {}
        # Width of the head's output by task, if they differ.
        self._widths: dict[str, int] = {}
        # The task that a unit runs for; None while the model runs for all rows.
        self.inside: str | None = None
        # The units in the order of their calls, and the inputs that each call divided by rows.
        self.kind: list[tuple[int, tuple[bool, ...]]] = []
        self.has_chosen = False

    def run(self, given: tuple[Any, Any]) -> Any:
        """Runs the model. Where the heads differ in width, `logits` is a list with a tensor for each row."""
        with contextlib.ExitStack() as stack:
            for number, (module, method) in enumerate(self._units.methods):
                by_task = self._by_task(number, self._units.slots.get(module, []), getattr(module, method))
                stack.enter_context(_replace_method(module, method, by_task))
            output = self._units.model(*given[0], **given[1])
        return _trim(output, self._widths, self._rows) if self._widths else output

    def _by_task(self, number: int, slots: list[Slot], forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            # Another thread, in the middle of the same model, runs what was there.
            if threading.get_ident() != self._thread:
                return forward(*args, **kwargs)
            if self.inside is None:
                return self._run_unit(number, slots, forward, (args, kwargs))
            # All rows in a unit that runs for one task are that task's.
            with self._units.weights(self.inside, slots):
                return forward(*args, **kwargs)

        return call

    def _run_unit(self, number: int, slots: list[Slot], forward: Callable[..., Any], given: Any) -> Any:
        leaves, form = leaves_of(given)
        counts = [self._count(leaf) for leaf in leaves]
        self.kind.append((number, tuple(map(bool, counts))))
        output = self._run_layer(slots, forward, leaves[0], counts[0]) if len(leaves) == 1 else None
        if output is not None:
            return output
        results = {}
        for task in self._rows:
            own = [
                leaf.index_select(0, self._all_rows(task, count, leaf.device)) if count else leaf
                for leaf, count in zip(leaves, counts, strict=True)
            ]
            args, kwargs = tree_unflatten(own, form)
            self.inside = task
            try:
                with self._units.weights(task, slots):
                    results[task], result_form = leaves_of(forward(*args, **kwargs))
            finally:
                self.inside = None
        if len({len(result) for result in results.values()}) > 1:
            raise NotByRows("a module returns other things for one task than for another")
        parts = [dict(zip(results, found, strict=True)) for found in zip(*results.values(), strict=True)]
        return tree_unflatten([self._join(part, any(counts)) for part in parts], result_form)

    def _run_layer(self, slots: list[Slot], forward: Callable[..., Any], x: Any, count: int) -> Tensor | None:
        """The output of a linear layer or an embedding, where no whole weight is needed for it."""
        units, names = self._units, {slot.key: slot.name for slot in slots}
        kind = units.layers.find_kind(forward, x) if "weight" in names and not units.are_moved else None
        if kind is None or not (count or len(x) == 1):
            return None
        layer: Any = cast(Any, forward).__self__
        weight, tasks = layer.weight.detach(), list(self._rows)
        parts = units.layers.find_all(names["weight"], weight, [task for task in tasks if task != units.current])
        if parts is None:
            return None
        if not count:
            x, count = x.expand(self._size, *x.shape[1:]), 1
        rows = [self._all_rows(task, count, x.device) for task in tasks]
        own = [x.index_select(0, indices) for indices in rows]
        if kind == "embedding":
            found = [units.layers.look_up(ids, weight, parts.get(task)) for task, ids in zip(tasks, own, strict=True)]
        else:
            held, name = layer.bias, names.get("bias")
            biases = [held if name is None else units.values(task, name, held) for task in tasks]
            flat = [values.reshape(-1, x.shape[-1]) for values in own]
            of_tasks = [parts.get(task) for task in tasks]
            found = units.layers.multiply(flat, weight, of_tasks, biases, kind == "transposed")
            found = [y.view(*values.shape[:-1], -1) for y, values in zip(found, own, strict=True)]
        y = torch.cat(found)
        return torch.empty_like(y).index_copy_(0, torch.cat(rows), y)

    def _count(self, leaf: Any) -> int:
        """Rows for each sample of what a unit takes; 0 if all tasks take the same."""
        if isinstance(leaf, Tensor):
            return 0 if leaf.ndim == 0 or len(leaf) % self._size else len(leaf) // self._size
        if not isinstance(leaf, _PLAIN):
            raise NotByRows(f"a {type(leaf).__name__} cannot be divided by samples")
        return 0

    def _all_rows(self, task: str, count: int, device: torch.device) -> Tensor:
        """Indices of a task's rows, of which each sample has so many."""
        key = (task, count, device)
        if key not in self._indices:
            self._indices[key] = (self._rows[task][:, None] * count + torch.arange(count)).flatten().to(device)
        return self._indices[key]

    def _join(self, parts: dict[str, Any], by_rows: bool) -> Any:
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
        (count, rest), *others = {divmod(len(part), len(self._rows[task])) for task, part in parts.items()}
        if others or rest or not count:
            raise NotByRows("a module does not return rows for each sample")
        if len({part.shape[1:-1] for part in parts.values()}) > 1:
            raise NotByRows("a module returns tensors of different shapes for different tasks")
        # Narrower heads leave zeros at the end, which are cut off when the model is done.
        widths = {task: part.shape[-1] for task, part in parts.items() if part.ndim > 1}
        if len(set(widths.values())) > 1:
            self._widths = widths
        widest = [max(widths.values())] if widths else []
        whole = first.new_zeros(count * self._size, *first.shape[1:-1], *widest)
        for task, part in parts.items():
            target = whole if first.ndim == 1 else whole[..., : part.shape[-1]]
            target.index_copy_(0, self._all_rows(task, count, part.device), part)
        return whole


class _Choices(TorchFunctionMode):
    """Notes inside a `with` block whether rows were chosen by value outside of units. An expert that gets the tokens
    that chose it may get a multiple of the batch's length by chance, and from each sample another number."""

    def __init__(self, mixed: Pass) -> None:
        super().__init__()
        self._pass = mixed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        chooses = name in _CHOOSES or (name == "where" and len(args) == 1)
        if name == "__getitem__":
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            chooses = any(isinstance(part, Tensor) and part.ndim and part.dtype == torch.bool for part in index)
        self._pass.has_chosen |= chooses and self._pass.inside is None
        return func(*args, **(kwargs or {}))


def _trim(output: Any, widths: Mapping[str, int], rows: Rows) -> Any:
    """The output with a list of logits, each sample's of the width of its task's head."""
    key: Any = "logits" if isinstance(output, Mapping) else 0
    logits = output.get("logits") if isinstance(output, Mapping) else output[0]
    width = {int(row): widths[task] for task, indices in rows.items() for row in indices}
    if not isinstance(logits, Tensor) or (len(logits), logits.shape[-1]) != (len(width), max(widths.values())):
        raise NotByRows("the heads of the tasks have different widths, and what they give is not returned as logits")
    samples = [sample[..., : width[row]] for row, sample in enumerate(logits)]
    if isinstance(output, tuple):
        return (samples, *output[1:])
    output[key] = samples
    return output


@contextmanager
def _replace_method(module: torch.nn.Module, method: str, function: Callable[..., Any]) -> Iterator[None]:
    """Lets a module run another method inside a `with` block; another library's hook may have set one already."""
    own, before = vars(module), vars(module).get(method)
    own[method] = function
    try:
        yield
    finally:
        del own[method]
        if before is not None:
            own[method] = before


def _find_run(model: torch.nn.Module, name: str) -> torch.nn.Module:
    """The module of a name; of one that is never run itself, a dictionary of parameters say, the module around it."""
    module = model.get_submodule(name)
    runs = type(module).forward is not torch.nn.Module.forward
    return module if runs or not name else _find_run(model, name.rpartition(".")[0])


def _list_contents(model: torch.nn.Module) -> list[Any]:
    modules = model.modules()
    return [part for own in modules for part in (own, *own._parameters.values(), *own._buffers.values())]
