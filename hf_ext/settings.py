"""Settings from YAML files and mappings: every key known, none repeated, every type checked."""

import dataclasses
import difflib
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

import yaml
from huggingface_hub.errors import StrictDataclassError

T = TypeVar("T")


class _Loader(yaml.SafeLoader):
    """YAML that refuses a repeated key instead of keeping the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        repeated = {key for key in keys if keys.count(key) > 1}
        if repeated:
            raise ValueError(
                f"repeated key(s) {sorted(repeated)} near line {node.start_mark.line + 1}: keep one of each."
            )
        return super().construct_mapping(node, deep)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """
    Reads a YAML file of arguments.

    Args:
        path (`str` or `Path`): The file.

    Returns:
        `dict[str, Any]`: Its mapping.

    Raises:
        ValueError: If the file is no valid YAML mapping or repeats a key.
        FileNotFoundError: If there is no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no configuration file at {path}: give the path of a YAML file.")
    try:
        # The loader derives from SafeLoader: it builds no Python objects.
        mapping = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)  # noqa: S506
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path} is not usable YAML: {error}") from error
    if not isinstance(mapping, dict):
        raise ValueError(f"{path} must hold `key: value` lines, got {type(mapping).__name__}.")
    return mapping


def build(cls: type[T], mapping: dict[str, Any], where: str = "") -> T:
    """
    Builds a strict dataclass from a mapping, rejecting unknown keys and wrong types by name.

    Args:
        cls (`type`): A dataclass decorated with `huggingface_hub.dataclasses.strict`.
        mapping (`dict[str, Any]`): Field values.
        where (`str`, *optional*): The section's name, for the messages.

    Returns:
        An instance of `cls`.

    Raises:
        ValueError: If a key is unknown, a required one is missing, or a value is not allowed.
    """
    section = f" in section {where!r}" if where else ""
    if not isinstance(mapping, dict):
        raise ValueError(f"{where or 'the configuration'} must be a mapping of keys, got {mapping!r}.")
    fields = {item.name: item for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in mapping:
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"unknown key {key!r}{section}.{hint} Allowed: {', '.join(sorted(fields))}.")
    required = [
        name
        for name, item in fields.items()
        if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
    ]
    missing = [name for name in required if name not in mapping]
    if missing:
        raise ValueError(f"missing key(s) {', '.join(missing)}{section}.")
    values = {key: _number(value, fields[key].type) for key, value in mapping.items()}
    try:
        return cls(**values)
    except StrictDataclassError as error:
        raise ValueError(f"bad value{section}: {error.__cause__ or error}") from error


def _number(value: Any, annotation: Any) -> Any:
    """A float field takes whole numbers, and `1e-4`, which YAML 1.1 reads as text."""
    union = isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
    wanted = typing.get_args(annotation) if union else (annotation,)
    if float not in wanted or isinstance(value, bool) or not isinstance(value, (int, str)):
        return value
    try:
        return float(value)
    except ValueError:
        return value
