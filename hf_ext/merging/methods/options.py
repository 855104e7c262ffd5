"""Options of merge methods: what they may be, and their values by task and by layer.

A number is one for all, `0.3`; or by layer, `[0.1, 0.5]`, first layer to last with the values between them; or by
name, `[{filter: mlp, value: 0.5}, {value: 0.3}]`, of which the first whose text is in a tensor's name holds. An option
of the tasks may be a mapping of their names to any of these. Lists mean what they mean to mergekit.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


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
        by_task (`bool`): Whether the tasks may have values of their own; the method then gets a list.
        by_layer (`bool`): Whether layers and tensors may have values of their own.
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
        for part in setting:
            if not isinstance(part, Mapping) or not {"value"} <= set(part) <= {"value", "filter"}:
                raise ValueError(f"{name}: an entry must have `value`, may have `filter`; got {part!r:.80}.")
            if isinstance(part.get("filter"), list | Mapping):
                raise ValueError(f"{name}: `filter` is one text in the names of tensors; got {part['filter']!r:.80}.")
            if isinstance(part["value"], list) and any(isinstance(inner, Mapping) for inner in part["value"]):
                raise ValueError(f"{name}: `value` is a number or a list of numbers; got {part['value']!r:.80}.")
        return [
            {**({"filter": str(part["filter"])} if part.get("filter") is not None else {}),
             "value": self._read_list(name, part["value"])}
            for part in setting
        ]  # fmt: skip

    def _read_value(self, name: str, value: Any) -> Any:
        # numpy's numbers and truths are Python's
        found = value = value.item() if getattr(value, "shape", None) == () else value
        if self.choices:
            fits = value in self.choices
        elif self.kind is bool:
            fits = isinstance(value, bool)
        else:
            try:
                found = math.nan if isinstance(value, bool) else self.kind(value)
            except (TypeError, ValueError, OverflowError):
                found = math.nan
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
        if math.isinf(self.most) and math.isfinite(max(self.above, self.least)):
            return f"more than {self.above:g}" if math.isfinite(self.above) else f"at least {self.least:g}"
        low = f"({self.above:g}" if math.isfinite(self.above) else f"[{self.least:g}"
        bounded = math.isfinite(max(self.above, self.least)) and math.isfinite(self.most)
        return f"in {low}, {self.most:g}]" if bounded else "finite"

    def find(self, setting: Any, tensor: str, depth: float, tasks: Sequence[str]) -> Any:
        """The value for a tensor, or with `by_task` one for each of these tasks."""

        def find_or_default(setting: Any) -> Any:
            found = find_value(setting, tensor, depth)
            return self.default if found is None else found

        if not self.by_task:
            return find_or_default(setting)
        own = setting if isinstance(setting, Mapping) else dict.fromkeys(tasks, setting)
        return [find_or_default(own.get(task)) for task in tasks]


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
