"""Methods of training files, and the construction of their tasks."""

import importlib
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..settings import refuse_unknown
from .arguments import TrainingArguments, apply_overrides, build, read_yaml

if TYPE_CHECKING:
    from .task import Task

# Where each method keeps its part of the loop; imported when asked for, as diffusers is slow to import.
TASKS = {
    "semanir": ("hf_ext.tasks.restoration", "SemanIRTask"),
    "mrconv-listops": ("hf_ext.tasks.texts", "ListOpsTask"),
    "mrconv-text": ("hf_ext.tasks.texts", "TextTask"),
    "mrconv-retrieval": ("hf_ext.tasks.texts", "RetrievalTask"),
    "mrconv-lm": ("hf_ext.tasks.texts", "LanguageModelTask"),
    "mrconv-masked-lm": ("hf_ext.tasks.texts", "MaskedLanguageModelTask"),
    "mrconv-series": ("hf_ext.tasks.series", "SeriesClassificationTask"),
    "mrconv-regression": ("hf_ext.tasks.series", "SeriesRegressionTask"),
    "mrconv-positions": ("hf_ext.tasks.series", "PositionsTask"),
    "mrconv-pixels": ("hf_ext.tasks.signals", "PixelTask"),
    "mrconv-audio": ("hf_ext.tasks.signals", "AudioTask"),
    "mrconv-images": ("hf_ext.tasks.signals", "ImageTask"),
    "disentangled-dit": ("hf_ext.tasks.diffusion", "DisentangledDiTTask"),
}


def build_task(arguments: TrainingArguments) -> "Task":
    """
    Builds the task that `arguments.method` names, from the `task` section.

    Args:
        arguments ([`TrainingArguments`]): The run.

    Returns:
        [`Task`]: The method's part of the loop.

    Raises:
        ValueError: If there is no such method, or the sections `task` and `model` do not fit it.
    """
    kind = find_task(arguments.method)
    task = build(kind, arguments.task, "task")
    if kind.config_class is not None:
        # The class itself refuses the same, and more, when the model is built: after the data was read.
        known = inspect.signature(kind.config_class).parameters
        refuse_unknown(arguments.model, [*known, *["preset"] * bool(kind.presets)], " in section 'model'")
    return task


def find_task(method: str) -> "type[Task]":
    """The class of a method's task."""
    if method not in TASKS:
        raise ValueError(f"unknown method {method!r}; allowed: {', '.join(sorted(TASKS))}.")
    module, name = TASKS[method]
    found: type[Task] = getattr(importlib.import_module(module), name)
    return found


def read_arguments(config: str | Path, overrides: list[str], **values: Any) -> TrainingArguments:
    """The arguments of a run of our methods, with mistakes said that show before its classes are imported."""
    given = {**apply_overrides(read_yaml(config), overrides), **values}
    if {"base", "tasks"} <= given.keys():
        raise ValueError(f"{config} describes a merge, not a training: run `hf-ext merge FILE.yaml OUT`.")
    return build(TrainingArguments, given)
