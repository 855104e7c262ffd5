"""The YAML metadata at the head of a README.md, read as JSON data and at a bounded cost."""

from __future__ import annotations

import base64
import json
import math
import re
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from ..errors import DataError

MAXIMUM_CHARACTERS = 1 << 20
_MAXIMUM_DEPTH = 50
_MAXIMUM_SCALAR = 1 << 16
_MAXIMUM_NUMBER = 300
# A value or a comment may end in the three hyphens; only a line of their own ends the metadata.
_FRONT_MATTER = re.compile(r"\A(?:\ufeff)?\s*---[ \t]*\r?\n(.*?)\r?\n?(?<=\n)---[ \t]*(?:\r?\n|\Z)", re.DOTALL)


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """PyYAML's safe loader, in C where there is one, without the numbers that cost more than their length."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        """Refuses duplicate keys, as YAML and the Hub do; PyYAML keeps the last one."""
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise ValueError(f"{key.value!r:.60} occurs twice in the metadata of the card; remove one of them")
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def _construct_number(loader: _Loader, node: yaml.ScalarNode) -> Any:
    """A number; a very long one stays text, since PyYAML's arithmetic on `1:59:59...` takes its length squared."""
    if len(node.value) > _MAXIMUM_NUMBER:
        return node.value
    return yaml.constructor.SafeConstructor.yaml_constructors[node.tag](loader, node)


for _tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
    _Loader.add_constructor(_tag, _construct_number)


def read_card(path: Path) -> str:
    """The text of a card, which readers take for UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error.reason} at byte {error.start}); save the card as UTF-8") from error


def front_matter(card: str) -> str:
    """The text of the metadata; empty when there is none."""
    return match[1] if (match := _FRONT_MATTER.match(card)) else ""


def read_front_matter(card: str) -> dict[str, Any]:
    """The metadata of a card, as data that JSON can say; empty when there is none."""
    text = front_matter(card)
    if not text.strip():
        return {}
    if len(text) > MAXIMUM_CHARACTERS:
        raise ValueError(f"the metadata of the card is longer than {MAXIMUM_CHARACTERS} characters")
    try:
        _check_cost(text)
        metadata = as_json(yaml.load(text, Loader=_Loader))  # noqa: S506
    except ValueError:
        raise
    except Exception as error:
        # PyYAML's constructors raise IndexError, AttributeError, OverflowError... for tags on odd scalars.
        raise ValueError(f"the metadata of the card is not valid YAML: {error}") from error
    if not isinstance(metadata or {}, dict):
        raise ValueError(f"the metadata of the card must be a mapping, got {type(metadata).__name__}")
    return metadata or {}


def find_lines(card: str) -> dict[tuple[str | int, ...], int]:
    """The line of the card in which each value of its metadata begins, by the keys and places that lead to it."""
    text = front_matter(card)
    first = card[: card.find(text)].count("\n") + 1
    lines: dict[tuple[str | int, ...], int] = {}
    pending: list[tuple[tuple[str | int, ...], yaml.Node | None]] = [((), yaml.compose(text, Loader=_Loader))]
    for path, node in pending:
        if node is not None:
            lines[path] = first + node.start_mark.line
        if isinstance(node, yaml.MappingNode):
            pending += [((*path, str(key.value)), value) for key, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            pending += [((*path, place), value) for place, value in enumerate(node.value)]
    return lines


def _check_cost(text: str) -> None:
    """Refuse what takes far more time or memory than its size: deep nesting, and aliases that multiply."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("the metadata of the card uses YAML aliases, which are not supported")
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > _MAXIMUM_SCALAR:
            raise ValueError(f"the metadata of the card has a value longer than {_MAXIMUM_SCALAR} characters")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAXIMUM_DEPTH:
            raise ValueError(f"the metadata of the card is nested deeper than {_MAXIMUM_DEPTH} levels")


def as_json(value: Any) -> Any:
    """Values in the types of JSON: keys, dates, binaries and the like are text, other numbers floats or null."""
    if isinstance(value, dict):
        named = ((as_json(key), as_json(each)) for key, each in value.items())
        return {key if isinstance(key, str) else json.dumps(key): each for key, each in named}
    if isinstance(value, (list, tuple, set)):
        return [as_json(each) for each in value]
    if isinstance(value, int) and not isinstance(value, bool) and not -(2**63) <= value < 2**64:
        # Other readers of JSON take such a number for a float, and Python prints no longer one than 4,300 digits.
        return float(value) if abs(value) < 2**1023 else None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value if isinstance(value, str | int | float | None) else str(value)
