"""What a method's sections may hold, read from the source of its classes before torch is imported."""

# The classes refuse the same, and more, once they are imported, which takes seconds. No name is written twice: tests
# compare what is read here with what the classes say. What is not found here is left to that later check.

import ast
import functools
import typing
from collections.abc import Iterable
from dataclasses import make_dataclass
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict

from ..settings import build, refuse_unknown


def check_sections(module: str, name: str, task: dict[str, Any], model: dict[str, Any]) -> None:
    """Refuses keys and types in the sections of task and model that the task of that name will refuse."""
    fields: dict[str, str] = {}
    values: dict[str, tuple[str, ast.expr | None]] = {}
    decided: list[str] = []
    family = read_class(module, name)
    for where, node in reversed(family):
        fields |= read_fields(node)
        values |= {ast.unparse(item.target): (where, item.value) for item in _list_annotations(node)}
        decided = _read_keys(node, "model_fields") or decided
    if not family:
        return
    refuse_unknown(task, fields, " in section 'task'")
    _check_types(fields, task, "task")
    where, config = values["config_class"]
    if isinstance(config, ast.Name):
        node = read_class(where, config.id)[0][1]
        check_model_keys(model, read_options(node), not isinstance(values["presets"][1], ast.Dict), decided)
        _check_types(read_fields(node), model, "model")


def check_model_keys(
    section: dict[str, Any], fields: Iterable[str], has_presets: bool, decided: Iterable[str]
) -> None:
    """Refuses keys of the section `model` that are no field, or one that the task decides."""
    more = f"; the section 'task' decides {', '.join(sorted(decided))}" if decided else ""
    refuse_unknown(section, {*fields, *["preset"] * has_presets} - {*decided}, " in section 'model'", more=more)


def check_optimizer(name: str, options: dict[str, Any]) -> None:
    """Refuses arguments that an optimizer of torch does not have."""
    for _, node in read_class("torch.optim", name)[:1]:
        refuse_unknown(options, read_options(node), f" in optim_args of {name}")


def read_class(module: str, name: str) -> list[tuple[str, ast.ClassDef]]:
    """A class and then those that it extends, each with its module; only of hf_ext and of torch's optimizers."""
    if not module.startswith(("hf_ext.", "torch.optim")):
        return []
    for node in _parse(module).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            bases = [base for item in node.bases if isinstance(item, ast.Name) for base in read_class(module, item.id)]
            return [(module, node), *bases]
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            if isinstance(node, ast.ImportFrom) and (alias.asname or alias.name) == name:
                origin = resolve_name("." * node.level + (node.module or ""), module.rpartition(".")[0])
                # A package that imports one of its own modules: that is no class.
                return [] if origin == module else read_class(origin, alias.name)
    return []


@functools.cache
def _parse(module: str) -> ast.Module:
    # To find what is inside of a package, Python imports the package: only the first name, or two, are looked up.
    names = module.split(".")
    depth = 2 if names[0] == "hf_ext" else 1
    spec = find_spec(".".join(names[:depth]))
    assert spec is not None and spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0], *names[depth:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    # Where only compiled files are installed, nothing is found.
    return ast.parse(path.read_text(encoding="utf-8") if path.is_file() else "")


def _list_annotations(node: ast.ClassDef) -> list[ast.AnnAssign]:
    return [item for item in node.body if isinstance(item, ast.AnnAssign)]


def _find_function(node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    return next((item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == name), None)


def read_fields(node: ast.ClassDef) -> dict[str, str]:
    """The fields of a dataclass with their types; none of another class."""
    found = {ast.unparse(item.target): ast.unparse(item.annotation) for item in _list_annotations(node)}
    own = {} if _find_function(node, "__init__") else found
    return {name: kind for name, kind in own.items() if not kind.startswith("ClassVar")}


def read_options(node: ast.ClassDef) -> list[str]:
    """What a class is built with: the arguments of its `__init__`, or its fields."""
    function = _find_function(node, "__init__")
    if function is None:
        return list(read_fields(node))
    return [argument.arg for argument in [*function.args.args[1:], *function.args.kwonlyargs]]


def _read_keys(node: ast.ClassDef, name: str) -> list[str]:
    """The keys of the dictionary that a function of a class returns, where they are written out."""
    function = _find_function(node, name)
    found = [item.value for item in ast.walk(function) if isinstance(item, ast.Return)] if function else []
    keys = [key for value in found if isinstance(value, ast.Dict) for key in value.keys]
    return [str(key.value) for key in keys if isinstance(key, ast.Constant)]


def _check_types(fields: dict[str, str], section: dict[str, Any], where: str) -> None:
    """Builds a dataclass of those fields that a section has."""
    given = {name: fields[name] for name in section if name in fields}
    # Types are written in Python's own names and those of typing.
    kinds = typing.get_type_hints(type(where, (), {"__annotations__": given}), vars(typing))
    build(strict(make_dataclass(where, kinds.items())), {name: section[name] for name in given}, where)
