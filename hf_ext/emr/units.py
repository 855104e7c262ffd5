"""Which modules of a model can be run on some rows of a batch, and which weights each of them uses.

Observed, not assumed: the model runs once on one sample and once on two. A tensor follows the batch if its first
dimension doubles and its first half is the first sample's. A module that cannot be run by rows (a table of relative
positions, say) becomes part of the smallest module around it that can.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

# Values of a tensor that are compared between the two observations, and how far they may be apart: rounding depends on
# the size of a batch, another sample's values differ by far more.
_SAMPLE = 256
_TOLERANCE = 1e-2
# Methods that stand between modules as a module would: T5 and its kin compute one row for all samples from a table of
# relative positions, inside an attention that also writes into a cache, which cannot be divided by rows.
_METHODS = ("compute_bias",)
# Methods that read values without giving a tensor.
_READS = frozenset(("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__"))

# Functions that choose rows by their values: how many go on, and whose they are, differs from batch to batch.
_CHOOSES = frozenset(("nonzero", "argwhere", "masked_select"))


class NotByRows(Exception):
    """The samples of several tasks cannot pass in one forward; the message says why."""


@dataclass(frozen=True)
class Leaf:
    """How something that a module takes or gives follows the batch."""

    rows: int  # rows of it for each sample; 0 if it is the same for all samples
    shape: tuple[int, ...] | None  # its shape for one sample; `None` if it is no tensor

    @property
    def is_row(self) -> bool:
        """Whether it is one row that all samples share."""
        return self.rows == 0 and self.shape is not None and self.shape[:1] == (1,)


@dataclass
class Unit:
    """A module that is run for each task on that task's rows."""

    calls: list[tuple[list[Leaf], list[Leaf]]]  # arguments and results of each call
    # the tensors that it uses, itself or in modules that cannot be run by rows
    weights: set[str] = field(default_factory=set)


def observe(model: torch.nn.Module, weights: Mapping[int, str], run: Callable[[], Any]) -> Observation:
    """Runs a model and notes what each of its modules takes, gives and uses."""
    seen = Observation()
    stack: list[str] = []

    def patch(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            inputs, through = _see((args, kwargs)), tuple(stack)
            seen.after_choice[name] |= seen.choosers.intersection(through)
            stack.append(name)
            try:
                result = forward(*args, **kwargs)
            finally:
                stack.pop()
            seen.calls[name].append(_Call(through, inputs, _see(result)))
            return result

        return call

    methods = [f"{name}.{key}" for name, module in model.named_modules() for key in _METHODS if hasattr(module, key)]
    names = [name for name, _ in model.named_modules()]
    with (
        patched_forwards(model, [*names, *methods], patch),
        _Uses(weights, lambda weight: seen.used[stack[-1]].add(weight), lambda: seen.choosers.update(stack[-1:])),
    ):
        run()
    return seen


def plan_units(model: torch.nn.Module, one: Observation, two: Observation, *, share_rows: bool) -> dict[str, Unit]:
    """Finds the modules to run by rows: every use of one of the weights is inside one of them.

    With `share_rows` a module may give one row for all samples (positions, say), which is then repeated; without,
    it is a part of the module around it. Raises [`NotByRows`] where only the whole model could be run so.
    """
    units: dict[str, Unit] = {}
    for name, used in two.used.items():
        around = cast(tuple[str, ...], os.path.commonprefix([call.through for call in two.calls[name]]))
        candidates = [name, *reversed(around)]
        # Not the table alone: for one position its only row looks like one of the batch's, and then has another axis.
        first = next((at for at, one in enumerate(candidates) if one.rpartition(".")[2] in _METHODS), 0)
        # Nor an expert that gets the tokens that chose it: two samples may send it as many each, and others more.
        first = max([first, *(at for at, one in enumerate(candidates) if one in two.after_choice[name])])
        for candidate in candidates[first:]:
            # The whole model has no name, and is not run by rows.
            calls = _match_calls(one.calls[candidate], two.calls[candidate], share_rows) if candidate else None
            if calls is not None:
                units.setdefault(candidate, Unit(calls)).weights |= used
                break
        else:
            kind = type(_find_method(model, name)[0]).__name__
            raise NotByRows(f"what {name or 'the model itself'} ({kind}) computes does not follow the batch")
    return units


def _find_method(model: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    """What is run under a name: the `forward` of a module, or another method of it."""
    owner, _, last = name.rpartition(".")
    return (model.get_submodule(owner), last) if last in _METHODS else (model.get_submodule(name), "forward")


@contextmanager
def patched_forwards(
    model: torch.nn.Module, names: Iterable[str], patch: Callable[[str, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Replaces the `forward` of modules, or a method of theirs, inside a `with` block, for this thread: another one
    that is in the middle of the model runs what was there."""
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    here = threading.get_ident()

    def only_here(forward: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (other if threading.get_ident() == here else forward)(*args, **kwargs)

        return call

    try:
        for name in names:
            module, method = _find_method(model, name)
            forward = cast(Callable[..., Any], getattr(module, method))
            # An instance may have a `forward` of its own already, from a hook of another library.
            replaced.append((vars(module), method, vars(module).get(method)))
            vars(module)[method] = only_here(forward, patch(name, forward))
        yield
    finally:
        for held, method, original in reversed(replaced):
            if original is None:
                del held[method]
            else:
                held[method] = original


@dataclass(frozen=True)
class _Seen:
    """A tensor that a module took or gave: its shape, and values from all of it and from its first half."""

    shape: tuple[int, ...]
    values: torch.Tensor
    first_half: torch.Tensor


@dataclass(frozen=True)
class _Call:
    """A call of a module: leaves of its arguments and its result, and the modules through which it was called."""

    through: tuple[str, ...]
    inputs: list[Any]
    outputs: list[Any]


@dataclass
class Observation:
    """One forward pass: calls by module, and the weights that each module uses in its own `forward`."""

    calls: dict[str, list[_Call]] = field(default_factory=lambda: defaultdict(list))
    used: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    # modules that have chosen rows by value, and by module those of them that then called it
    choosers: set[str] = field(default_factory=set)
    after_choice: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))


class _Uses(TorchFunctionMode):
    """Notes which weights an operation reads (asking for a type or a shape is not reading), and where rows are chosen
    by value."""

    def __init__(
        self, weights: Mapping[int, str], note: Callable[[str], None], note_choice: Callable[[], None]
    ) -> None:
        super().__init__()
        self._weights = weights
        self._note = note
        self._note_choice = note_choice

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        parts = result if isinstance(result, tuple | list) else (result,)
        name = getattr(func, "__name__", "")
        if _is_choice(name, args):
            self._note_choice()
        if name in _READS or any(isinstance(part, torch.Tensor) for part in parts):
            for leaf in tree_leaves((args, kwargs)):
                if id(leaf) in self._weights:
                    self._note(self._weights[id(leaf)])
        return result


def _is_choice(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a function chooses rows by value: `nonzero` and its kin, or a mask as an index."""
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(part, torch.Tensor) and part.ndim and part.dtype == torch.bool for part in index)
    return name in _CHOOSES or (name == "where" and len(args) == 1)


def _see(tree: Any) -> list[Any]:
    seen: list[Any] = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            half = leaf[: len(leaf) // 2] if leaf.ndim else leaf
            seen.append(_Seen(tuple(leaf.shape), _some_values(leaf), _some_values(half)))
        else:
            seen.append(leaf)
    return seen


def _some_values(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    flat = flat[:: max(1, len(flat) // _SAMPLE)]
    return (torch.view_as_real(flat) if flat.is_complex() else flat).double().cpu()


def _match_calls(one: list[_Call], two: list[_Call], share_rows: bool) -> list[tuple[list[Leaf], list[Leaf]]] | None:
    """How arguments and results of each call follow the batch; None if the module cannot be run by rows."""
    if len(one) != len(two):
        return None
    calls = []
    for single, double in zip(one, two, strict=True):
        inputs = _match_leaves(single.inputs, double.inputs)
        outputs = _match_leaves(single.outputs, double.outputs)
        if inputs is None or outputs is None:
            return None
        for leaf in outputs:
            # What is the same for all samples will differ by task, so each sample needs its own.
            if leaf.shape is not None and not leaf.rows and not (share_rows and leaf.is_row):
                return None
        calls.append((inputs, outputs))
    return calls


def _match_leaves(one: list[Any], two: list[Any]) -> list[Leaf] | None:
    if len(one) != len(two):
        return None
    leaves = []
    for single, double in zip(one, two, strict=True):
        if not isinstance(single, _Seen) or not isinstance(double, _Seen):
            if type(single) is not type(double) or not _is_plain(single):
                return None
            leaves.append(Leaf(0, None))
        elif single.shape == double.shape and are_close(single.values, double.values):
            leaves.append(Leaf(0, single.shape))
        elif (
            single.shape[1:] == double.shape[1:]
            and double.shape[:1] == (2 * sum(single.shape[:1]),)
            and are_close(single.values, double.first_half)
        ):
            leaves.append(Leaf(single.shape[0], single.shape))
        else:
            return None
    return leaves


def _is_plain(leaf: Any) -> bool:
    """Whether something that is no tensor can be given to every task alike, since it holds no samples."""
    return leaf is None or isinstance(leaf, bool | int | float | str | torch.dtype | torch.device | torch.Size | slice)


def are_close(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors are the same but for rounding."""
    if one.shape != two.shape:
        return False
    one, two = one.double(), two.double()
    size = float(one[one.isfinite()].abs().max()) if bool(one.isfinite().any()) else 0.0
    return torch.allclose(one, two, rtol=_TOLERANCE, atol=_TOLERANCE * size, equal_nan=True)
