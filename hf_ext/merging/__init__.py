"""Merging of many fine-tunes into one artifact: plan, engine, other methods beside EMR, card, later changes."""

from typing import TYPE_CHECKING

from ..lazy import make_lazy

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


__getattr__, __dir__ = make_lazy(globals(), _MODULES)
