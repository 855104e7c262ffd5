"""EMR-Merging (Huang et al., NeurIPS 2024): many fine-tunes of one model as one model and a 1-bit mask per task."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .configuration_emr import MergeConfig
    from .merging_emr import MergeResult, merge_checkpoints
    from .plan_emr import make_plan
    from .updating_emr import add_task, add_task_frozen, remove_task
    from .using_emr import EMRModel

__all__ = [
    "EMRModel",
    "MergeConfig",
    "MergeResult",
    "add_task",
    "add_task_frozen",
    "make_plan",
    "merge_checkpoints",
    "remove_task",
]

# What is imported when it is first used: merging needs no model, and using one no merge.
_MODULES = {
    "EMRModel": ".using_emr",
    "MergeConfig": ".configuration_emr",
    "MergeResult": ".merging_emr",
    "add_task": ".updating_emr",
    "add_task_frozen": ".updating_emr",
    "make_plan": ".plan_emr",
    "merge_checkpoints": ".merging_emr",
    "remove_task": ".updating_emr",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
