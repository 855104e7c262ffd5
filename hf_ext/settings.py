"""Settings from YAML files and mappings: every key known, none repeated, every type checked."""

import copy
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

from .errors import DataError, UsageError

T = TypeVar("T")


# Hand-written files are far smaller; the limit avoids reading a weights file that was given by mistake.
MAX_CHARACTERS = 200_000
# Fields of models' configurations that matter in training alone, beside those that are called dropout or the like.
_OF_TRAINING = ("reconstruction_loss", "train_top_k", "sync_batch_norm", "initializer_range", "layer_scale_init_value")
# A number without the point and the sign that YAML 1.1 wants.
_EXPONENT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+")


def matters_in_use(field: str) -> bool:
    """True for a field of a configuration that decides what a trained model computes, not only its training."""
    return field not in _OF_TRAINING and "drop" not in field


class SettingsError(UsageError):
    """A setting that cannot be used; the message names its section, key, value and what is allowed."""


class Section(dict[Any, Any]):
    """A mapping of a file, whose `texts` has each value as it was written: 1.50, yes or 007 may be a name."""

    def __init__(self, *items: Any) -> None:
        super().__init__(*items)
        self.texts: dict[Any, Any] = {}


class Unread(str):
    """A word that only an option of text can have; `problem` says why YAML has no value for it."""

    problem: str

    def __new__(cls, word: str, problem: str = "") -> "Unread":
        found = super().__new__(cls, word)
        found.problem = problem
        return found

    def __repr__(self) -> str:
        return f"{str(self)!r} ({self.problem})"


yaml.SafeDumper.add_representer(Section, yaml.SafeDumper.represent_dict)
yaml.SafeDumper.add_representer(Unread, yaml.SafeDumper.represent_str)


class _Loader(yaml.SafeLoader):
    """
    YAML that refuses a repeated key instead of keeping the last, an alias inside of what it stands for, and reads no
    number that is none in base 10: YAML 1.1 reads 010 as 8, and 1:30 as 90. A day, such as 2026-05-01, is text.
    """

    def __init__(self, stream: str, keeps_words: bool) -> None:
        super().__init__(stream)
        self.keeps_words = keeps_words
        self.texts: dict[yaml.Node, list[Any]] = {}
        # Otherwise PyYAML makes a list that holds itself, which nothing can print or copy.
        self.deep_construct = True

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            # `<<` merges other mappings, once or several times.
            key = None if key_node.tag.endswith(":merge") else self.construct_object(key_node, deep=True)
            if key is not None and key in seen:
                line = key_node.start_mark.line + 1
                raise ValueError(f"repeated key {key!r:.80} in line {line}: keep one of them.")
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_section(self, node: yaml.MappingNode) -> Section:
        section = Section(self.construct_mapping(node, deep=True))
        section.texts = {self.construct_object(key): self.find_text(value) for key, value in node.value}
        return section

    def find_text(self, node: yaml.Node) -> Any:
        """The text of a node, or of each item of a list. A list is read once: aliases may repeat it 10^9 times."""
        if isinstance(node, yaml.SequenceNode):
            if node not in self.texts:
                self.texts[node] = [self.find_text(item) for item in node.value]
            return self.texts[node]
        return node.value if isinstance(node, yaml.ScalarNode) else None

    def construct_decimal(self, node: yaml.ScalarNode) -> int | float | Unread:
        word = node.value.lstrip("+-")
        if ":" in word or (word.replace("_", "").isdigit() and word[0] == "0" != word):
            line, base = node.start_mark.line + 1, 60 if ":" in word else 8
            problem = f"line {line}: YAML reads {word!r:.80} in base {base}; use base 10."
            if self.keeps_words:
                return Unread(node.value, problem)
            raise ValueError(problem)
        is_whole = node.tag.endswith(":int")
        return self.construct_yaml_int(node) if is_whole else self.construct_yaml_float(node)


for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_decimal)
_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.construct_section)
_Loader.yaml_implicit_resolvers = {
    first: [found for found in resolvers if not found[0].endswith(":timestamp")]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}


def parse_yaml(text: str) -> Any:
    """Parses YAML without Python objects, repeated keys and words that it has no value for."""
    return parse_words(text, keeps_words=False)[0]


def parse_words(text: str, keeps_words: bool = True) -> tuple[Any, Any]:
    """The value of YAML, where it may keep [`Unread`] words, and the text of it, or of each item of a list."""
    if len(text) > MAX_CHARACTERS:
        raise SettingsError(f"{len(text):,} characters, at most {MAX_CHARACTERS:,} are allowed")
    try:
        # The loader derives from SafeLoader: it builds no Python objects.
        loader = _Loader(text, keeps_words)
        node = loader.get_single_node()
        return (None, None) if node is None else (loader.construct_document(node), loader.find_text(node))
    except RecursionError as error:
        raise SettingsError("nested too deeply: reduce the nesting.") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise SettingsError(where + " ".join(filter(None, [error.context, error.problem]))) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise SettingsError(f"line {line}: the character {chr(error.character)!r} is not allowed") from error
    except (yaml.YAMLError, ValueError) as error:
        raise SettingsError(str(error)) from error
    # A key that is a list, or an explicit tag such as `!!bool x` or `!!timestamp x`, lets PyYAML fail with whatever
    # its conversion runs into.
    except (TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise SettingsError(f"an invalid key, or a value that does not fit its tag ({error})") from error


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Reads a YAML file of arguments."""
    path = Path(path)
    if not path.is_file():
        kind = "is no regular file" if path.exists() else "does not exist"
        raise FileNotFoundError(f"no configuration file at {path}, which {kind}: give the path of a YAML file.")
    try:
        # A character takes up to four bytes.
        with open(path, "rb") as file:
            content = file.read(4 * MAX_CHARACTERS + 1)
        mapping, _ = parse_words(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path} is not usable YAML: line {line} is not UTF-8 ({error.reason}).") from error
    except ValueError as error:
        raise DataError(f"{path} is not usable YAML: {error}") from error
    if not isinstance(mapping, dict):
        raise DataError(f"{path} must hold `key: value` lines, got {type(mapping).__name__}.")
    return mapping


def build(cls: type[T], mapping: dict[str, Any], where: str = "", *, also: Iterable[str] = ()) -> T:
    """Builds a strict dataclass from a mapping, rejecting unknown keys and wrong types by name."""
    # `also`: other keys that the file may have, for the messages.
    section = f" in section {where!r}" if where else ""
    if not isinstance(mapping, dict):
        raise SettingsError(f"{where or 'the configuration'} must be a mapping of keys, got {mapping!r:.200}.")
    fields = {item.name: item for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
    refuse_unknown(mapping, fields, section, also)
    # Without a default and a factory of one.
    required = [name for name, item in fields.items() if item.default is item.default_factory]
    if missing := [name for name in required if name not in mapping]:
        raise SettingsError(f"missing key(s) {', '.join(missing)}{section}.")
    texts = getattr(mapping, "texts", {})
    values = {key: as_meant(value, fields[key].type, texts.get(key)) for key, value in mapping.items()}
    for key, value in values.items():
        if isinstance(value, Unread):
            raise SettingsError(f"bad value{section}: {key}: {value.problem}")
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
            allowed = sorted([*fields, *also])
            near = difflib.get_close_matches(str(key), allowed, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise SettingsError(f"unknown key {key!r:.80}{section}.{hint} Allowed: {', '.join(allowed)}{more}.")


def explain(error: StrictDataclassError) -> str:
    """The message of a strict dataclass without its technical lines."""
    found = error.__cause__ or error
    # Of an item of a list the cause says what it is.
    return f"{found}: {found.__cause__}" if isinstance(found, TypeError) and found.__cause__ else str(found)


def read_numbers(value: Any) -> Any:
    """A value with all in it that are text to YAML 1.1 and numbers to everybody else, such as 1e-4, as numbers."""
    if isinstance(value, dict):
        # A section keeps its texts.
        numbers = copy.copy(value)
        numbers.update((key, read_numbers(item)) for key, item in value.items())
        return numbers
    if isinstance(value, list):
        return [read_numbers(item) for item in value]
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def as_meant(value: Any, annotation: Any, text: Any = None) -> Any:
    """The intended value, if YAML 1.1 reads another one than the text that was written."""
    # A float field takes whole numbers, and `1e-4`, which is text to YAML; an int field `1e4`. A choice that has "no"
    # takes `no`, which is false to YAML. An option of text takes any word, such as 2024, yes or 010; a flag without a
    # value has no text.
    union = isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
    wanted = typing.get_args(annotation) if union else (annotation,)
    if value is False and any("no" in typing.get_args(kind) for kind in wanted):
        return "no"
    lists = [kind for kind in wanted if list in (kind, typing.get_origin(kind))]
    if lists and isinstance(value, list):
        (kind,) = typing.get_args(lists[0]) or (str | dict if str in wanted else object,)
        words = parse_words(text)[1] if isinstance(text, str) else text or [None] * len(value)
        pairs = zip(value, words, strict=True)
        return [word if item is None and kind is str else as_meant(item, kind, word) for item, word in pairs]
    if isinstance(value, Unread):
        return value if str not in wanted or (lists and value.startswith("[")) else str(value)
    # A list or mapping of one line is none, in a file and in a flag.
    is_word = isinstance(text, str) and text[:1] not in ("", "[", "{")
    if str in wanted and is_word and value is not None and not isinstance(value, str):
        # What else the option takes has its own kind.
        return value if any(isinstance(value, kind) for kind in wanted if isinstance(kind, type)) else text
    if dict in wanted:
        # A section without types of its own.
        return read_numbers(value)
    word = text if isinstance(text, str) else value
    if int in wanted and float not in wanted and isinstance(word, str) and _EXPONENT.fullmatch(word):
        return int(number) if (number := float(word)).is_integer() else value
    if float not in wanted or isinstance(value, bool) or not isinstance(value, (int, str)):
        return value
    try:
        # Python knows other digits than YAML.
        return float(value) if str(value).isascii() else value
    except (ValueError, OverflowError):
        return value
