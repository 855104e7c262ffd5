"""EMR-Merging (Huang et al., NeurIPS 2024): many fine-tunes of one model as one model and a 1-bit mask per task."""

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
