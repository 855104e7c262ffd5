"""Training of every method through accelerate: one loop, exact resume, evaluation."""

from .arguments import DataArguments, DataSource, TrainingArguments
from .evaluation import evaluate
from .launch import build_task, evaluate_checkpoint, main
from .loop import Task, train

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
