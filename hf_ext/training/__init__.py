"""Training of every method through accelerate: one loop, exact resume, evaluation."""

from typing import TYPE_CHECKING

from ..lazy import make_lazy

if TYPE_CHECKING:
    from .arguments import DataArguments, DataSource, TrainingArguments
    from .evaluation import evaluate
    from .launch import build_task, evaluate_checkpoint, main
    from .loop import train
    from .task import Task

__all__ = [
    "DataArguments",
    "DataSource",
    "Task",
    "TrainingArguments",
    "build_task",
    "evaluate",
    "evaluate_checkpoint",
    "main",
    "train",
]

# Imported when first used: the files of a run are read, and their mistakes found, before torch is imported.
_MODULES = {
    "DataArguments": ".arguments",
    "DataSource": ".arguments",
    "Task": ".task",
    "TrainingArguments": ".arguments",
    "build_task": ".launch",
    "evaluate": ".evaluation",
    "evaluate_checkpoint": ".launch",
    "main": ".launch",
    "train": ".loop",
}


__getattr__, __dir__ = make_lazy(globals(), _MODULES)
