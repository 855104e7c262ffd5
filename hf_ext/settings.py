"""Settings from YAML files and mappings: every key known, none repeated, every type checked."""

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from huggingface_hub.errors import StrictDataclassError

T = TypeVar("T")


# What a person writes is far below these; what is above them takes more time or memory than its size promises.
MAX_CHARACTERS = 200_000
MAX_VALUES = 100_000
MAX_DEPTH = 50
_MAX_DIGITS = 1000
# PyYAML looks at each of these again for every one of the next thousand characters.
_NESTED = re.compile(rf"(?:[\[{{]\s*){{{MAX_DEPTH + 1}}}")
# Fields of models' configurations that matter in training alone, beside those that are called dropout or the like.
_OF_TRAINING = (
    *("reconstruction_loss", "train_top_k", "norm_momentum", "sync_batch_norm"),
    *("initializer_range", "layer_scale_init_value"),
)


def matters_in_use(field: str) -> bool:
    """Whether a field of a configuration says what a trained model computes, and not only how it is trained."""
    return field not in _OF_TRAINING and "drop" not in field


class SettingsError(ValueError):
    """A setting that cannot be used; the message names its section, key, value and what is allowed."""


class _Loader(yaml.SafeLoader):
    """YAML that refuses a repeated key instead of keeping the last, and aliases that multiply what they stand for."""

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None:
            _weigh(node, {})
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            # `<<` merges other mappings, once or several times.
            key = None if key_node.tag.endswith(":merge") else self.construct_object(key_node, deep=True)
            if key is not None and key in seen:
                line = key_node.start_mark.line + 1
                raise ValueError(f"repeated key {key!r:.80} in line {line}: keep one of them.")
            seen.add(key)
        return super().construct_mapping(node, deep)


def _weigh(node: yaml.Node, known: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """How many values a node stands for, and how deep they lie, with every alias written out."""
    # Aliases share memory, but whatever copies or prints the values writes them out: ten lines of ten aliases each of
    # the line before are 10 ** 10 values. Each node is looked at once, so that finding that out takes no time.
    weight = known.get(id(node), (0, 0))
    if weight is None:
        raise ValueError("an alias stands for something that holds it: write the value out.")
    if weight != (0, 0):
        return weight
    known[id(node)] = None
    parts: list[yaml.Node] = []
    if isinstance(node, yaml.ScalarNode) and node.tag.endswith(":int") and len(node.value) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(node.value):,} digits: put it in quotes if it is a text.")
    if isinstance(node, yaml.MappingNode):
        parts = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        parts = node.value
    weights = [_weigh(part, known) for part in parts]
    count, depth = 1 + sum(count for count, _ in weights), 1 + max((depth for _, depth in weights), default=0)
    if count > MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES:,} values, aliases written out: keep fewer.")
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels: write it flatter.")
    known[id(node)] = count, depth
    return count, depth


def parse_yaml(text: str) -> Any:
    """Parses YAML that anybody may have written: no Python objects, no repeated keys, nothing that explodes."""
    if len(text) > MAX_CHARACTERS:
        raise SettingsError(f"{len(text):,} characters, at most {MAX_CHARACTERS:,} are allowed")
    if _NESTED.search(text):
        raise SettingsError(f"nested deeper than {MAX_DEPTH} levels: write it flatter.")
    try:
        # The loader derives from SafeLoader: it builds no Python objects.
        return yaml.load(text, Loader=_Loader)  # noqa: S506
    except RecursionError as error:
        raise SettingsError(f"nested deeper than {MAX_DEPTH} levels: write it flatter.") from error
    except (yaml.YAMLError, ValueError) as error:
        raise SettingsError(str(error)) from error
    # A key that is a list, or an explicit tag such as `!!bool x` or `!!timestamp x`, lets PyYAML fail with whatever
    # its conversion runs into.
    except (TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise SettingsError(f"a key that cannot be one, or a value that does not fit its tag ({error})") from error


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Reads a YAML file of arguments."""
    path = Path(path)
    if not path.is_file():
        kind = "is no regular file" if path.exists() else "does not exist"
        raise FileNotFoundError(f"no configuration file at {path}, which {kind}: give the path of a YAML file.")
    try:
        # A character takes up to four bytes.
        with open(path, "rb") as file:
            mapping = parse_yaml(file.read(4 * MAX_CHARACTERS + 1).decode("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not usable YAML: {error}") from error
    if not isinstance(mapping, dict):
        raise ValueError(f"{path} must hold `key: value` lines, got {type(mapping).__name__}.")
    return mapping


def build(cls: type[T], mapping: dict[str, Any], where: str = "", *, also: Iterable[str] = ()) -> T:
    """Builds a strict dataclass from a mapping, rejecting unknown keys and wrong types by name."""
    # `also`: other keys that the file may have, for the messages.
    section = f" in section {where!r}" if where else ""
    if not isinstance(mapping, dict):
        raise SettingsError(f"{where or 'the configuration'} must be a mapping of keys, got {mapping!r:.200}.")
    fields = {item.name: item for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
    refuse_unknown(mapping, fields, section, also)
    required = [
        name
        for name, item in fields.items()
        if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
    ]
    missing = [name for name in required if name not in mapping]
    if missing:
        raise SettingsError(f"missing key(s) {', '.join(missing)}{section}.")
    values = {key: _as_meant(value, fields[key].type) for key, value in mapping.items()}
    try:
        return cls(**values)
    except StrictDataclassError as error:
        if isinstance(error.__cause__, SettingsError):
            # A section inside this one was built by its checks: the message names it already.
            raise error.__cause__ from error
        raise SettingsError(f"bad value{section}: {explain(error)}") from error


def refuse_unknown(
    mapping: Iterable[Any], fields: Iterable[str], section: str, also: Iterable[str] = (), more: str = ""
) -> None:
    """Refuses a key that is no field; `also` are keys allowed elsewhere, and `more` ends the message."""
    for key in mapping:
        if key not in fields:
            allowed = [*fields, *also]
            near = difflib.get_close_matches(str(key), allowed, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise SettingsError(
                f"unknown key {key!r:.80}{section}.{hint} Allowed: {', '.join(sorted(allowed))}{more}."
            )


def explain(error: StrictDataclassError) -> str:
    """What a strict dataclass found wrong, without the lines that name its machinery."""
    return str(error.__cause__ or error)


def _as_meant(value: Any, annotation: Any) -> Any:
    """The value that a person meant, where YAML 1.1 reads another one."""
    # A float field takes whole numbers, and `1e-4`, which is text to YAML. A choice that has "no" takes `no`, which is
    # false to YAML.
    union = isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
    wanted = typing.get_args(annotation) if union else (annotation,)
    if value is False and any("no" in typing.get_args(kind) for kind in wanted):
        return "no"
    if float not in wanted or isinstance(value, bool) or not isinstance(value, (int, str)):
        return value
    try:
        return float(value)
    except (ValueError, OverflowError):
        return value
