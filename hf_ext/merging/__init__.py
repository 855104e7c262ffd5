"""Merging of many fine-tunes into one artifact: plan, engine, other methods beside EMR, card, later changes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .configuration import MergeConfig
    from .merge import MergeResult, merge_checkpoints
    from .plan import make_plan
    from .updating import add_task, add_task_frozen, remove_task

__all__ = [
    "MergeConfig",
    "MergeResult",
    "add_task",
    "add_task_frozen",
    "make_plan",
    "merge_checkpoints",
    "remove_task",
]

# Imported at first use, so that a command which needs one of them does not wait for all.
_MODULES = {
    "MergeConfig": ".configuration",
    "MergeResult": ".merge",
    "add_task": ".updating",
    "add_task_frozen": ".updating",
    "make_plan": ".plan",
    "merge_checkpoints": ".merge",
    "remove_task": ".updating",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
