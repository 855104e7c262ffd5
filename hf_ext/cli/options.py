"""Options and arguments that commands share: models, files, names, and the fields of a dataclass."""

import csv
import dataclasses
import difflib
import functools
import os
import types
import typing
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from hf_ext.docstrings import read_entries

from .output import note


def find_released(value: str) -> str:
    """The folder of a released model for its name; of another folder or name itself, unless similar to one."""
    value = os.path.expanduser(value)
    if "/" in value:
        return value
    from hf_ext.hub.released import find_model, list_released

    if Path(value).exists():
        if released := {model.name: model.folder for model in list_released()}.get(value):
            told = f"{value} is the folder or file here, not the released model {released}"
            # Standard output may be a picture or JSON.
            note(f"warning: {told}; write ./{value} to say so.", to_stderr=True)
        return value
    found = find_model(value)
    names = [model.name for model in list_released()] if found == value else []
    if close := difflib.get_close_matches(value.lower(), names, n=1, cutoff=0.85):
        raise click.UsageError(f"no released model {value!r}; did you mean {close[0]!r}? `hf-ext models` lists them.")
    return found


class Place(click.Path):
    """A path, in which ~ is the home of the user: shells leave that of --out=~/restored as it is."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the path is empty; '.' is the folder here.", param, ctx)
        return super().convert(os.path.expanduser(value), param, ctx)


class ModelFolder(Place):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(find_released(str(value)), param, ctx)


class NewFolder(Place):
    """A folder for a checkpoint; a name of a file of weights is refused, since a folder of that name helps no one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(value)
        if path.suffix.lower() in (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf") and not path.is_dir():
            self.fail(f"{path} is the name of a file; a checkpoint is a folder: leave out {path.suffix}.", param, ctx)
        return super().convert(value, param, ctx)


def number(text: Any) -> Any:
    """A number, or in YAML syntax a list by layer or a mapping by task."""
    if not text.lstrip().startswith(("[", "{")):
        return click.FLOAT.convert(text, None, None)
    from hf_ext.settings import parse_yaml

    try:
        return parse_yaml(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r:.80} is not usable YAML: {error}") from error


def value_type(
    name: str, read: Callable[[str], Any], wrong: str, fits: Callable[[Any], bool] = lambda value: True
) -> Callable[[Any], Any]:
    """A type of values that a function reads from text: its name in the help, and what an invalid text is called."""

    def convert(given: Any) -> Any:
        if not isinstance(given, str) or given in name.split("|")[1:]:
            return given
        with suppress(ValueError):
            if fits(value := read(given)):
                return value
        raise click.BadParameter(f"{given!r} is {wrong}.")

    convert.__name__ = name
    return convert


# An option whose help shows its default.
shown = functools.partial(click.option, show_default=True)
AT_LEAST_1 = click.IntRange(min=1)
FILE = Place(exists=True, dir_okay=False, path_type=Path)
MODEL_FOLDER = ModelFolder(exists=True, file_okay=False, path_type=Path)
NEW_FOLDER = NewFolder(file_okay=False, path_type=Path)
NEW_FILE = Place(dir_okay=False, path_type=Path)
MODEL = click.argument("source", metavar="MODEL", type=find_released)
TASK = click.option("--task", metavar="NAME", help="Task of a merge.")
DEVICE = click.option("--device", help="cpu, cuda, cuda:1, ...  [default: the GPU if there is one]")
DTYPE = click.Choice(["float32", "bfloat16", "float16"])
JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


def split_names(text: str | None) -> list[str]:
    """Names between commas or on lines; a name with a comma stands in double quotes."""
    rows = csv.reader((text or "").splitlines(keepends=True), skipinitialspace=True)
    names = [name.strip() for row in rows for name in row if name.strip()]
    if text is not None and not names:
        raise click.UsageError(f"{text!r} holds no name; give names, separated by commas, or leave the option out.")
    return names


def options_of(kind: type, flags: Mapping[str, str], but: Collection[str]) -> list[click.Parameter]:
    """An option for each field of a dataclass, with its entry in `Args:` as help; `flags` differ from the fields."""
    told = {name: entry.meaning.replace("`", "") for entry in read_entries(kind) for name in entry.names}
    hints = typing.get_type_hints(kind)
    return [
        _make_option(flags.get(field.name), field, hints[field.name], told[field.name])
        for field in dataclasses.fields(kind)
        if field.name not in but
    ]


def _make_option(flag: str | None, field: "dataclasses.Field[Any]", hint: Any, told: str) -> click.Option:
    flag = flag or f"--{field.name.replace('_', '-')}"
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    origin, shown = typing.get_origin(hint), field.default
    more: dict[str, Any] = {"type": hint}
    if origin is typing.Literal:
        more = {"type": click.Choice(typing.get_args(hint))}
    elif origin is dict:
        told, more = f"{told} Repeatable.", {"metavar": "NAME=VALUE", "multiple": True, "callback": _as_mapping}
    elif origin is list:
        told = f"{told} Repeatable."
        more = {"multiple": True, "callback": lambda ctx, param, texts: list(texts) or None}
    elif hint is bool:
        more, flag = {}, f"{flag}/--no-{flag[2:]}"
        shown = None if shown is None else flag.split("/")[not shown][2:]
    default = "" if shown in (None, dataclasses.MISSING) else f"  [default: {shown}]"
    return click.Option([flag, field.name], default=None, help=told + default, **more)


def _as_mapping(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> dict[str, str] | None:
    """The mapping of NAME=VALUE texts, in which each name occurs once."""
    found = dict(map(name_and_value, texts))
    if len(found) != len(texts):
        raise click.BadParameter("a name is given twice; use each name once.", ctx, param)
    return found or None


def name_and_value(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign and value):
        raise click.UsageError(f"Expected NAME=VALUE, for instance emotion=org/bert-emotion, got '{text}'.")
    return name, os.path.expanduser(value)
