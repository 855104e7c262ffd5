"""Methods of training files: their tasks, and every field of a file as the docstrings of its classes describe it."""

import importlib
import inspect
import re
import textwrap
from dataclasses import is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..docstrings import Entry, read_entries
from ..settings import refuse_unknown
from .arguments import DataArguments, DataSource, SourcePart, TrainingArguments, apply_overrides, build, read_yaml

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
# A link in a docstring: a class, and in which module it is where the link says that.
LINK = re.compile(r"\[`~?(?:([\w.]+)\.)?(\w+)`\]")


def build_task(arguments: TrainingArguments) -> "Task":
    """
    Builds the task that `arguments.method` names, from the `task` section; raises `ValueError` if there is no such
    method, or the sections `task` and `model` do not fit it.
    """
    kind = find_task(arguments.method)
    task = build(kind, arguments.task, "task")
    if kind.config_class is not None:
        # The class itself refuses the same, and more, when the model is built: after the data was read.
        known = inspect.signature(kind.config_class).parameters
        refuse_unknown(arguments.model, [*known, *["preset"] * bool(kind.presets)], " in section 'model'")
    return task


def find_task(method: str) -> "type[Task]":
    if method not in TASKS:
        raise ValueError(f"unknown method {method!r}; allowed: {', '.join(sorted(TASKS))}.")
    module, name = TASKS[method]
    return cast("type[Task]", getattr(importlib.import_module(module), name))


def read_arguments(config: str | Path, overrides: list[str], **values: Any) -> TrainingArguments:
    """The arguments of a run, with mistakes said that show before its classes are imported."""
    given = apply_overrides(read_yaml(config), overrides)
    given.update(values)
    if {"base", "tasks"} <= given.keys():
        raise ValueError(f"{config} describes a merge, not a training: run `hf-ext merge FILE.yaml OUT`.")
    return build(TrainingArguments, given)


def list_sections(method: str | None) -> dict[str, tuple[str, list[Entry]]]:
    """The sections of a YAML file with a heading and their fields; those of task and model for one method."""
    found = {
        "": ("The run", read_entries(TrainingArguments)),
        "data": ("Data", read_entries(DataArguments)),
        "data.train": ("A source: `data.train`, `data.eval`", read_entries(DataSource)),
        "data.train.path": ("One of several sources, beside the above", read_entries(SourcePart)[:1]),
    }
    if method is not None:
        task = find_task(method)
        found["task"] = (f"Task of {method}", read_entries(task))
        for name, inner in find_inner(task).items():
            found[f"task.{name}"] = f"`{name}` of {method}", read_entries(inner)
        preset = Entry(["preset"], "`str`, *optional*", f"Where to start from: {', '.join(task.presets)}.")
        fields = [] if task.config_class is None else read_entries(task.config_class)
        found["model"] = (f"Model of {method}", [*([preset] if task.presets else []), *fields])
    return found


def find_inner(task: type) -> dict[str, type]:
    """The sections inside of a task's, such as a degradation: arguments that link to a class with arguments."""
    links = ((entry.names[0], *link) for entry in read_entries(task) for link in LINK.findall(entry.meaning))
    found = {key: getattr(importlib.import_module(module), name) for key, module, name in links if module}
    return {key: inner for key, inner in found.items() if isinstance(inner, type) and is_dataclass(inner)}


def describe_fields(config: str | Path | None) -> str:
    """Every field of a run, and those of the method that a YAML file names, for a terminal."""
    method = None if config is None else str(read_yaml(config).get("method"))
    lines = []
    for section, (heading, entries) in list_sections(method).items():
        lines += ["", f"{heading} (--{section}{'.' if section else ''}NAME VALUE)".replace("`", "")]
        for entry in entries:
            lines.append(f"  {', '.join(entry.names)}: {entry.kind}".replace("`", "").replace("*", ""))
            meaning = LINK.sub(r"\2", entry.meaning).replace("`", "")
            lines += textwrap.wrap(meaning, 100, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines[1:]) + "\n"
