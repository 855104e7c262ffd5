"""Definition of a merge method and of its options, and the table of registered methods.

A number is one for all, `0.3`; or by layer, `[0.1, 0.5]`, first layer to last with the values between them; or by
name, `[{filter: mlp, value: 0.5}, {value: 0.3}]`, of which the first whose text is in a tensor's name holds. An option
of the tasks may be a mapping of their names to any of these. Lists mean what they mean to mergekit.
"""

import contextlib
import dataclasses
import inspect
import math
import re
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor
else:
    # For the annotations of methods; torch is imported when one of them runs.
    Tensor = Any


@dataclass(frozen=True)
class Option:
    """
    Description of an option: its help and its allowed values.

    Args:
        help (`str`): One line.
        above (`float`, *optional*): A number must be greater than this.
        least (`float`, *optional*): A number must be at least this.
        most (`float`, *optional*): A number may not be greater than this.
        kind (`type`): `float` or `bool`; `str` for a choice.
        choices (`tuple[str, ...]`): What a text may be.
        default (`Any`): Value where none is given.
        by_task (`bool`): True if the tasks may have values of their own; the method then gets a list.
        by_layer (`bool`): True if layers and tensors may have values of their own.
    """

    help: str
    above: float = -math.inf
    least: float = -math.inf
    most: float = math.inf
    kind: type = float
    choices: tuple[str, ...] = ()
    default: Any = None
    by_task: bool = False
    by_layer: bool = True

    def read(self, name: str, setting: Any) -> Any:
        """The setting, checked; YAML may have given a number as a text."""
        if not isinstance(setting, Mapping):
            return self._read_list(name, setting)
        if not self.by_task:
            raise ValueError(f"{name} must be one value for all tasks; got {setting!r:.80}.")
        return {task: self._read_list(f"{name} of {task}", part) for task, part in setting.items()}

    def _read_list(self, name: str, setting: Any) -> Any:
        if not isinstance(setting, list) or self.choices:
            return self._read_value(name, setting)
        if not self.by_layer:
            raise ValueError(f"{name} must be one value for the whole model, not by layer; got {setting!r:.80}.")
        if not setting:
            raise ValueError(f"{name} is an empty list: give values from the first layer to the last.")
        if not any(isinstance(part, Mapping) for part in setting):
            return [self._read_value(name, part) for part in setting]
        found = []
        for part in setting:
            if not isinstance(part, Mapping) or not {"value"} <= set(part) <= {"value", "filter"}:
                raise ValueError(f"{name}: an entry must have `value`, may have `filter`; got {part!r:.80}.")
            value, text = part["value"], part.get("filter")
            if isinstance(text, list | Mapping):
                raise ValueError(f"{name}: `filter` is one text in the names of tensors; got {text!r:.80}.")
            if isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value):
                raise ValueError(f"{name}: `value` is a number or a list of numbers; got {value!r:.80}.")
            found.append(({} if text is None else {"filter": str(text)}) | {"value": self._read_list(name, value)})
        return found

    def _read_value(self, name: str, value: Any) -> Any:
        # numpy's numbers and truths are Python's
        found = value = value.item() if getattr(value, "shape", None) == () else value
        if self.choices or self.kind is bool:
            fits = value in self.choices if self.choices else isinstance(value, bool)
        else:
            found = math.nan
            with contextlib.suppress(TypeError, ValueError, OverflowError):
                found = math.nan if isinstance(value, bool) else float(value)
            fits = math.isfinite(found) and self.above < found <= self.most and self.least <= found
        if not fits:
            raise ValueError(f"{name} must be {self.allowed_values}; got {value!r:.80}.")
        return found

    @property
    def allowed_values(self) -> str:
        """The allowed values, in words."""
        if self.choices:
            return f"one of {', '.join(map(repr, self.choices))}"
        if self.kind is bool:
            return "true or false"
        if math.isinf(max(self.above, self.least)):
            return "finite"
        is_open, low = math.isfinite(self.above), max(self.above, self.least)
        if math.isinf(self.most):
            return f"more than {low:g}" if is_open else f"at least {low:g}"
        return f"in {'(' if is_open else '['}{low:g}, {self.most:g}]"

    def find(self, setting: Any, tensor: str, depth: float, tasks: Sequence[str]) -> Any:
        """The value for a tensor, or with `by_task` one for each of these tasks."""
        own = setting if isinstance(setting, Mapping) else dict.fromkeys(tasks, setting)
        settings = [own.get(task) for task in tasks] if self.by_task else [setting]
        found = [find_value(part, tensor, depth) for part in settings]
        values = [self.default if value is None else value for value in found]
        return values if self.by_task else values[0]


class MethodError(UsageError):
    """Options that do not fit a tensor: no repetition of the merge can succeed."""


@dataclass
class Block:
    """
    Input of a method: a tensor, or a run of its elements, of the base and of the tasks that have it.

    Args:
        name (`str`): Its name in the base.
        shape (`tuple[int, ...]`): Shape of the whole tensor.
        start (`int`): The first of these elements in the flat tensor; 0 for a method of whole tensors.
        base (`torch.Tensor`): Weights of the base, float32, float16 or bfloat16.
        vectors (`list[torch.Tensor]`):
            The task vectors W_t - W_0 in float32, after DARE and trimming; the method may overwrite them.
        merged (`torch.Tensor`, *optional*): Weights of the merged model, for a method that `takes_merged`.
        count (`int`): Tasks of the merge, with those that do not have this tensor.
        statistic (`Callable[[int], torch.Tensor | None]`, *optional*):
            The statistics of this tensor for a place of `vectors`, None where the file has none; for a method with
            `statistics`. What it returns may be overwritten.
        inputs_first (`bool`): True if the rows of this weight of a linear layer are its inputs.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    base: Tensor
    vectors: list[Tensor]
    merged: Tensor | None = None
    count: int = 0
    statistic: Callable[[int], Tensor | None] | None = None
    inputs_first: bool = False


@dataclass(frozen=True)
class Method:
    """A registered merge method; see [`merge_method`]."""

    name: str  # what configurations call it
    label: str  # what cards call it: "merged by …"
    function: Callable[..., Any]  # merges a [`Block`]
    options: dict[str, Option] = field(default_factory=dict)  # its options by name
    masks: bool = False  # it always comes with task masks and scales
    # `hf_ext.emr.arithmetic.merge_block` computes the same, with masks and sums, in compiled code
    fused: bool = False
    # It needs whole tensors, in their shape. The others get flat runs of elements, which fit the caches; a whole
    # tensor of the base and of every task must fit into memory.
    whole: bool = False
    takes_merged: bool = False  # it takes a model that was merged elsewhere
    # The option that says which share of each task vector is kept: only the largest elements over all tensors reach
    # the function. All checkpoints are then read three times.
    trim: str | None = None
    most_tasks: int | None = None  # how many tasks it takes
    # Bits an element that each task has in place of a unified model: 1 for a sign, 2 where elements may be left out
    # too. The function then returns the task vectors with 0 for what is left out.
    deltas: int = 0
    # What it has to know of each task's data: `"fisher"` or `"gram"`, see `hf_ext.merging.measuring`. Only for a
    # method of whole tensors.
    statistics: str | None = None


# By name, in the order in which help shows them.
METHODS: dict[str, Method] = {}

Function = typing.TypeVar("Function", bound=Callable[..., Any])


def merge_method(name: str, label: str, **traits: Any) -> Callable[[Function], Function]:
    """Registers a function as a merge method; name, label and traits such as `whole=True` are fields of [`Method`]."""

    def register(function: Function) -> Function:
        METHODS[name] = Method(name, label, function, _read_options(function, traits.get("trim")), **traits)
        return function

    return register


def _read_options(function: Callable[..., Any], trim: str | None) -> dict[str, Option]:
    """The keyword-only arguments: a `list[float]` has a value for each task, and its default in the annotation."""
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        kind, option = typing.get_args(parameter.annotation)
        choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
        by_task = typing.get_origin(kind) is list
        found[name] = dataclasses.replace(
            option,
            kind=str if choices else typing.get_args(kind)[0] if by_task else kind,
            choices=choices,
            default=option.default if parameter.default is parameter.empty else parameter.default,
            by_task=by_task,
            # a share of the whole model
            by_layer=name != trim,
        )
    return found


def options_by_name() -> dict[str, dict[str, Option]]:
    """Every option of any method, with the methods that have it."""
    found: dict[str, dict[str, Option]] = {}
    for method in METHODS.values():
        for name, option in method.options.items():
            found.setdefault(name, {})[method.name] = option
    return found


def find_value(setting: Any, tensor: str, depth: float) -> Any:
    """The value of a setting for a tensor; None where no filter fits."""
    if not isinstance(setting, list):
        return setting
    if isinstance(setting[0], Mapping):
        fitting = (part["value"] for part in setting if part.get("filter", "*") == "*" or part["filter"] in tensor)
        return find_value(next(fitting, None), tensor, depth)
    place = depth * (len(setting) - 1)
    low = int(place)
    if isinstance(setting[0], bool):
        return setting[low]
    high = min(low + 1, len(setting) - 1)
    return setting[low] + (place - low) * (setting[high] - setting[low])


def find_filters(setting: Any) -> Iterator[str]:
    """The filters of a setting, or of several."""
    if isinstance(setting, Mapping):
        if "value" in setting and isinstance(setting.get("filter"), str) and setting["filter"] != "*":
            yield setting["filter"]
        setting = list(setting.values())
    for part in setting if isinstance(setting, list) else ():
        yield from find_filters(part)


# The first number among the parts of a name; it has as many digits as a number of layers may have.
_LAYER = re.compile(r"((?:.*?\.)??)(\d{1,9})(?:\.|$)", re.DOTALL)


def find_depths(names: Collection[str]) -> dict[str, float]:
    """The relative depth of each tensor, from 0 in the first layer to 1 in the last; 0 outside of layers."""
    layers = {name: (part[1], int(part[2])) for name in names if (part := _LAYER.match(name))}
    last: dict[str, int] = {}
    for stack, number in layers.values():
        last[stack] = max(number, last.get(stack, 0))
    # A stack of one layer ends with it, as it does for mergekit.
    depths = {name: number / last[stack] if last[stack] else 1.0 for name, (stack, number) in layers.items()}
    return dict.fromkeys(names, 0.0) | depths
