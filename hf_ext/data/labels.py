"""Labels of examples: names of classes, and numbers that are classes or values."""

import unicodedata
from typing import Any

import numpy as np

from ..errors import DataError
from .numbers import is_number

# More different whole numbers than these are values, where they do not count up from 0 or 1 without a gap.
_MOST_CLASSES = 20


def class_name(value: Any) -> str | None:
    """A class as it is called: texts as they are, numbers without `.0`; none where it is missing or -100."""
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or value == "" or value != value or value == -100:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value)


def are_values(labels: list[Any], wanted: bool | None = None) -> bool:
    """
    True if labels are values to predict and no classes.

    Numbers are values if one is a fraction, or if they are more than 20 different whole ones that do not count up from
    0 or 1 without a gap.

    Args:
        labels (`list`): Those of all examples; some may be missing.
        wanted (`bool`, *optional*): What the user says that they are.

    Raises:
        DataError: If names are said to be values.
    """
    given = {value for value in labels if class_name(value) is not None}
    numbers = {float(value) for value in given if isinstance(value, int | float | np.number)}
    if not given or len(numbers) < len(given) or any(isinstance(value, bool) for value in given):
        if wanted and given:
            raise DataError(f"--values: the labels hold names such as {next(iter(given - numbers), True)!r}")
        return False
    if wanted is not None:
        return wanted
    counted = min(numbers) in (0, 1) and max(numbers) - min(numbers) + 1 == len(numbers)
    return any(value % 1 for value in numbers) or (len(numbers) > _MOST_CLASSES and not counted)


def check_classes(path: str, labels: list[Any], wanted: bool | None = None) -> list[str]:
    """The classes that occur in labels, in order; refuses values that are not wanted as classes, and two spellings."""
    if wanted is not False and are_values(labels, wanted):
        values = {value for value in labels if class_name(value) is not None}
        raise DataError(
            f"the column `label` holds {len(values):,} different numbers such as "
            f"{min((value for value in values if value % 1), default=min(values))}, which are not classes but values: "
            "method mrconv-regression learns one for each series of numbers. To take each number as a class: --classes"
        )
    names = sorted({name for name in map(class_name, set(labels)) if name is not None})
    if all(map(is_number, names)):
        # Of many digits, two may be one as floats: those stay in the order of their names.
        names.sort(key=float)
    spelled: dict[str, str] = {}
    for name in names:
        plain = unicodedata.normalize("NFC", name).strip().casefold()
        other = spelled.setdefault(str(int(plain)) if plain.isdecimal() else plain, name)
        # Single letters may differ in case: beats of a heart are N and n.
        if other != name and not len(name) == len(other) == 1:
            raise DataError(
                f"{path}: the classes {other!r} and {name!r} are spelled differently: use one spelling, or other "
                "names if they are two classes."
            )
    return names
