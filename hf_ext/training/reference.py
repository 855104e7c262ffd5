"""Every field of a training's YAML file, read from the docstrings of the classes that check it."""

import importlib
import re
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass

from hf_ext.docstrings import Entry, read_entries

from .arguments import DataArguments, DataSource, SourcePart, TrainingArguments
from .launch import TASKS, find_task

# A class, and in which module it is where its link says that.
_LINK = re.compile(r"\[`~?(?:([\w.]+)\.)?(\w+)`\]")


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
        found |= dict(_list_inner(method, found["task"][1]))
        preset = Entry(["preset"], "`str`, *optional*", f"Where to start from: {', '.join(task.presets)}.")
        fields = [] if task.config_class is None else read_entries(task.config_class)
        found["model"] = (f"Model of {method}", [*([preset] if task.presets else []), *fields])
    return found


def _list_inner(method: str, entries: list[Entry]) -> Iterator[tuple[str, tuple[str, list[Entry]]]]:
    """The sections inside of a task's, such as a degradation: arguments that link to a class with arguments."""
    for entry in entries:
        for module, name in _LINK.findall(entry.meaning):
            inner = getattr(importlib.import_module(module), name) if module else None
            if is_dataclass(inner) and isinstance(inner, type):
                yield f"task.{entry.names[0]}", (f"`{entry.names[0]}` of {method}", read_entries(inner))


def show_fields(method: str | None) -> str:
    """The fields for a terminal."""
    lines = []
    for section, (heading, entries) in list_sections(method).items():
        lines += ["", f"{heading}{f' (--{section}.NAME VALUE)' if section else ' (--NAME VALUE)'}".replace("`", "")]
        for entry in entries:
            lines.append(f"  {', '.join(entry.names)}: {entry.kind}".replace("`", "").replace("*", ""))
            meaning = _LINK.sub(r"\2", entry.meaning).replace("`", "")
            lines += textwrap.wrap(meaning, 100, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines[1:]) + "\n"


def write_reference() -> str:
    """The fields of all methods as Markdown."""
    lines = ["# Fields of a training's YAML file", ""]
    sections = list(list_sections(None).values())
    for method in TASKS:
        sections += list(list_sections(method).values())[len(list_sections(None)) :]
    written: dict[str, str] = {}
    for heading, entries in sections:
        lines += [f"## {heading}", ""]
        same = written.setdefault(str(entries), heading)
        if same != heading:
            lines += [f"As of: {same}.", ""]
            continue
        for entry in entries:
            meaning = _LINK.sub(r"`\2`", entry.meaning)
            lines.append(f"- **{', '.join(entry.names)}** ({entry.kind}): {meaning}")
        lines.append("")
    return "\n".join(lines)
