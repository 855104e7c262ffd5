"""Command options created from the fields of a dataclass."""

import csv
import dataclasses
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any

import click

from hf_ext.docstrings import read_entries


class Number(click.ParamType):  # type: ignore[type-arg]
    """A number, or in YAML syntax a list by layer or a mapping by task."""

    name = "float"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not (isinstance(value, str) and value.lstrip().startswith(("[", "{"))):
            return click.FLOAT.convert(value, param, ctx)
        from hf_ext.settings import parse_yaml

        try:
            return parse_yaml(value)
        except ValueError as error:
            self.fail(f"{value!r:.80} is not usable YAML: {error}", param, ctx)


def split_names(text: str | None) -> list[str]:
    """Names between commas or on lines; a name with a comma stands in double quotes."""
    rows = csv.reader((text or "").splitlines(keepends=True), skipinitialspace=True)
    names = [name.strip() for row in rows for name in row if name.strip()]
    if text is not None and not names:
        raise click.UsageError(f"{text!r} holds no name; give names, separated by commas, or leave the option out.")
    return names


def options_of(kind: type, flags: Mapping[str, str] | None = None, but: Collection[str] = ()) -> list[click.Parameter]:
    """
    Creates an option for each field of a dataclass, with its entry in `Args:` as help. An absent option gives None.

    Args:
        kind (`type`): The dataclass.
        flags (`dict[str, str]`, *optional*): Names of options that differ from their fields.
        but (`Collection[str]`): Fields without an option.

    Returns:
        `list[click.Parameter]`: The options, in the order of the fields.
    """
    told = {name: entry.meaning.replace("`", "") for entry in read_entries(kind) for name in entry.names}
    hints = typing.get_type_hints(kind)
    found: list[click.Parameter] = []
    for field in dataclasses.fields(kind):
        if field.name not in but:
            flag = (flags or {}).get(field.name) or f"--{field.name.replace('_', '-')}"
            found.append(_make_option(flag, field, hints[field.name], told[field.name]))
    return found


def _make_option(flag: str, field: "dataclasses.Field[Any]", hint: Any, told: str) -> click.Option:
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
    """Splits NAME=VALUE."""
    name, sign, value = text.partition("=")
    if not (name and sign and value):
        raise click.UsageError(f"Expected NAME=VALUE, for instance emotion=org/bert-emotion, got '{text}'.")
    return name, value
