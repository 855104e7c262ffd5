"""Checks of settings and of examples that the tasks share."""

from typing import Any

from ..errors import MissingColumn

# Of each example of an evaluation its scores by their names.
Scores = list[dict[str, float]]


def require(settings: object, *rules: tuple[str, bool, str]) -> None:
    """Refuses the first setting that is wrong, by rules of its name, a truth and the allowed values."""
    for name, is_right, allowed in rules:
        if not is_right:
            raise ValueError(f"{name} must be {allowed}; got {getattr(settings, name)!r}.")


def column(example: dict[str, Any], name: str, option: str, advice: str = "") -> Any:
    """The value of an example in a column, which an option of the task names."""
    if name not in example:
        raise MissingColumn.of(name, example, f"task.{option}", advice)
    return example[name]
