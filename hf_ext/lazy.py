"""Names of a package that are imported when they are first used."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def make_lazy(
    package: dict[str, Any], modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """
    Makes what Python asks of a package for names that it does not have yet (PEP 562).

    Args:
        package (`dict[str, Any]`): Its `globals()`.
        modules (`Mapping[str, str]`): The relative module that each name comes from.

    Returns:
        `tuple[Callable, Callable]`: To be called `__getattr__` and `__dir__` in the package.
    """
    own = package["__name__"]

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {own!r} has no attribute {name!r}")
        return getattr(import_module(modules[name], own), name)

    def list_names() -> list[str]:
        return sorted({*package, *package["__all__"]})

    return find, list_names
