"""Pictures of examples, for all tasks that take some."""

from typing import Any

from PIL import Image


def require_picture(value: Any, column: str) -> Image.Image:
    """The picture in a column of an example; a row without one is an example that cannot be used."""
    if not isinstance(value, Image.Image):
        held = "" if value is None else f", but a value of type {type(value).__name__}"
        raise ValueError(f"column {column!r} holds no picture{held}.")
    return value
