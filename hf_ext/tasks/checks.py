"""Checks of settings and of examples that the tasks share."""

import math
from typing import Any

from ..errors import MissingColumn

# Of each example of an evaluation its scores by their names.
Scores = list[dict[str, float]]


def require(settings: object, *rules: tuple[str, bool, str]) -> None:
    """Refuses the first setting that is wrong, by rules of its name, a truth and the allowed values."""
    for name, is_right, allowed in rules:
        if not is_right:
            raise ValueError(f"{name} must be {allowed}; got {getattr(settings, name)!r}.")


def all_or_none(scores: dict[str, float]) -> dict[str, float]:
    """The scores of a data set, or NaN for each if one is: logits that are NaN would count as the class 0."""
    return dict.fromkeys(scores, math.nan) if any(map(math.isnan, scores.values())) else scores


def is_scaled(small: tuple[int, ...], large: tuple[int, ...], scale: int) -> bool:
    """True for sizes of a pair: by the scale, or less than it larger, which is cut off, as a picture that was made
    smaller by it may have had an odd size."""
    return all(0 <= side - own * scale < scale for own, side in zip(small, large, strict=True))


def column(example: dict[str, Any], name: str, option: str, advice: str = "") -> Any:
    """The value of an example in a column, which an option of the task names."""
    if name not in example:
        raise MissingColumn.of(name, example, f"task.{option}", advice)
    return example[name]
