"""Definition of a merge method, and the table of registered methods."""

import dataclasses
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from .options import Option

if TYPE_CHECKING:
    from torch import Tensor
else:
    # For the annotations of methods; torch is imported when one of them runs.
    Tensor = Any


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
        inputs_first (`bool`): Whether the rows of this weight of a linear layer are its inputs.
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
    # it always comes with task masks and scales
    masks: bool = False
    # `hf_ext.emr.ops.merge_block` computes the same, with masks and sums, in compiled code
    fused: bool = False
    # It needs whole tensors, in their shape. The others get flat runs of elements, which fit the caches; a whole
    # tensor of the base and of every task must fit into memory.
    whole: bool = False
    # it takes a model that was merged elsewhere
    takes_merged: bool = False
    # The option that says which share of each task vector is kept: only the largest elements over all tensors reach
    # the function. All checkpoints are then read three times.
    trim: str | None = None
    # how many tasks it takes
    most_tasks: int | None = None
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
    """
    Registers a function as a merge method.

    Args:
        name (`str`): What configurations call it.
        label (`str`): What cards call it.
        traits (`Any`, *optional*): Other fields of [`Method`], such as `whole=True`.

    Returns:
        The function, as it was.
    """

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
