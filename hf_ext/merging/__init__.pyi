from .configuration import MergeConfig as MergeConfig
from .merge import MergeResult as MergeResult, merge_checkpoints as merge_checkpoints
from .plan import make_plan as make_plan
from .updating import add_task as add_task, remove_task as remove_task
