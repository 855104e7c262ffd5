"""What a merge method is, and the table of those that are registered."""

import inspect
import math
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
else:
    # For the annotations of methods; torch is imported when one of them runs.
    Tensor = Any


@dataclass
class Block:
    """
    What a method gets: a tensor, or a run of its elements, of the base and of the tasks that have it.

    Args:
        name (`str`): Its name in the base.
        shape (`tuple[int, ...]`): Shape of the whole tensor.
        start (`int`): The first of these elements in the flat tensor; 0 for a method of whole tensors.
        base (`torch.Tensor`): Weights of the base, float32, float16 or bfloat16.
        vectors (`list[torch.Tensor]`):
            The task vectors W_t - W_0 in float32, after DARE and trimming; the method may overwrite them.
        merged (`torch.Tensor`, *optional*): Weights of the merged model, for a method that `takes_merged`.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    base: Tensor
    vectors: list[Tensor]
    merged: Tensor | None = None


@dataclass(frozen=True)
class Option:
    """
    What is said of an option: its help, and for numbers what they must be above and may be at most.

    Args:
        help (`str`): One line.
        above (`float`, *optional*): The value must be greater than this.
        most (`float`, *optional*): The value may not be greater than this.
        kind (`type`): `float` or `int`; `str` for a choice.
        choices (`tuple[str, ...]`): What a text may be.
        default (`Any`): Value where none is given.
    """

    help: str
    above: float = -math.inf
    most: float = math.inf
    kind: type = float
    choices: tuple[str, ...] = ()
    default: Any = None

    def read(self, name: str, value: Any) -> Any:
        """The value, checked; YAML may have given a number as a text."""
        if self.choices:
            if value not in self.choices:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, self.choices))}; got {value!r:.80}.")
            return value
        try:
            number = math.nan if isinstance(value, bool) else self.kind(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not (math.isfinite(number) and self.above < number <= self.most):
            bounded = math.isfinite(self.above) and math.isfinite(self.most)
            allowed = f"in ({self.above:g}, {self.most:g}]" if bounded else "finite"
            raise ValueError(f"{name} must be {allowed}; got {value!r:.80}.")
        return number


@dataclass(frozen=True)
class Method:
    """A registered method; see [`merge_method`]."""

    name: str  # what configurations call it
    label: str  # what cards call it: "merged by …"
    function: Callable[..., Tensor]  # merges a [`Block`]
    options: dict[str, Option] = field(default_factory=dict)  # its options by name
    masks: bool = False
    fused: bool = False
    whole: bool = False
    takes_merged: bool = False
    trim: str | None = None


# By name, in the order in which help shows them.
METHODS: dict[str, Method] = {}

Function = typing.TypeVar("Function", bound=Callable[..., Tensor])


def merge_method(
    name: str,
    label: str,
    *,
    masks: bool = False,
    fused: bool = False,
    whole: bool = False,
    takes_merged: bool = False,
    trim: str | None = None,
) -> Callable[[Function], Function]:
    """
    Registers a function as a merge method.

    Args:
        name (`str`): What configurations call it.
        label (`str`): What cards call it.
        masks (`bool`, *optional*, defaults to `False`): Whether it always comes with task masks and scales.
        fused (`bool`, *optional*, defaults to `False`):
            Whether `hf_ext.emr.ops.merge_block` computes the same, with masks and sums, in compiled code.
        whole (`bool`, *optional*, defaults to `False`):
            Whether it needs whole tensors, in their shape. The others get flat runs of elements, which fit the caches;
            a whole tensor of the base and of every task must fit into memory.
        takes_merged (`bool`, *optional*, defaults to `False`): Whether it takes a model that was merged elsewhere.
        trim (`str`, *optional*):
            The option that says which share of each task vector is kept: only the largest elements over all tensors
            reach the function. All checkpoints are then read three times.

    Returns:
        The function, as it was.
    """

    def register(function: Function) -> Function:
        METHODS[name] = Method(name, label, function, _read_options(function), masks, fused, whole, takes_merged, trim)
        return function

    return register


def _read_options(function: Callable[..., Any]) -> dict[str, Option]:
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        kind, option = typing.get_args(parameter.annotation)
        choices = typing.get_args(kind)
        found[name] = Option(
            option.help, option.above, option.most, str if choices else kind, choices, parameter.default
        )
    return found


def options_by_name() -> dict[str, dict[str, Option]]:
    """Every option of any method, with the methods that have it."""
    found: dict[str, dict[str, Option]] = {}
    for method in METHODS.values():
        for name, option in method.options.items():
            found.setdefault(name, {})[method.name] = option
    return found
