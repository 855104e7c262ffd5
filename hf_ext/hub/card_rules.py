"""Metadata of cards, for `card --check`, a push and the embedded Hub: read at a bounded cost, and the Hub's rules.

The rules are taken from the Hub's documentation and from what it has answered in public threads. It refuses a card
that breaks one of the strict rules, with all files that come with it; of the others it says that something will not be
found. Rules for the names of branches are here too.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..errors import DataError

MAXIMUM_CHARACTERS = 1 << 20
_MAXIMUM_DEPTH = 50
_MAXIMUM_SCALAR = 1 << 16
_MAXIMUM_NUMBER = 300
# A value or a comment may end in the three hyphens; only a line of their own ends the metadata.
_FRONT_MATTER = re.compile(r"\A(?:\ufeff)?\s*---[ \t]*\r?\n(.*?)\r?\n?(?<=\n)---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_LICENSES = """
afl-3.0 agpl-3.0 apache-2.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m bigscience-bloom-rail-1.0
bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5
cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0
cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0
cdla-permissive-2.0 cdla-sharing-1.0 creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0 etalab-2.0
eupl-1.1 eupl-1.2 fair-noncommercial-research-license gemma gfdl gpl gpl-2.0 gpl-3.0 grok2-community h-research
intel-research isc lgpl lgpl-2.1 lgpl-3.0 lgpl-lr llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 lppl-1.3c mit
mpl-2.0 ms-pl ncsa odbl odc-by ofl-1.1 openmdw-1.0 openmdw-1.1 openrail openrail++ osl-3.0 other pddl postgresql
unknown unlicense wtfpl zlib
"""
_TASKS = """
any-to-any audio-classification audio-text-to-text audio-to-audio automatic-speech-recognition depth-estimation
document-question-answering feature-extraction fill-mask graph-ml image-classification image-feature-extraction
image-segmentation image-text-to-text image-to-3d image-to-image image-to-text image-to-video keypoint-detection
mask-generation multiple-choice object-detection other question-answering reinforcement-learning robotics
sentence-similarity summarization table-question-answering table-to-text tabular-classification tabular-regression
tabular-to-text text-classification text-generation text-ranking text-retrieval text-to-3d text-to-audio
text-to-image text-to-speech text-to-video text2text-generation time-series-forecasting token-classification
translation unconditional-image-generation video-classification video-text-to-text visual-document-retrieval
visual-question-answering voice-activity-detection zero-shot-classification zero-shot-image-classification
zero-shot-object-detection
"""
LICENSES, TASKS = frozenset(_LICENSES.split()), frozenset(_TASKS.split())
# Our models' own task, which the package adds to the pipelines of transformers.
_OWN_TASK = "image-restoration"
# Plain tables, since the embedded Hub does not import the libraries.
_ID = re.compile(
    r"(?!.*(?:--|\.\.|[.\-]$))(?:[A-Za-z0-9_][A-Za-z0-9_.\-]{0,95}/)?[A-Za-z0-9_][A-Za-z0-9_.\-]{0,95}(?<![.\-])"
)
_LINK = re.compile(r"https?://\S+|[^\s:]+")
_OPENED = re.compile(r"(?:\ufeff)?\s*---[ \t]*\r?\n(?!\s*---[ \t]*(?:\r?\n|\Z))")
# Of a model to its base.
_RELATIONS = ("adapter", "finetune", "merge", "quantized")


# Of the names of branches and tags.
_LONGEST_REF = 255
_NOT_IN_REFS = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//")


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


def is_ref_name(name: str) -> bool:
    """True for the name of a branch or tag by git's rules for refs, which is not a commit hash."""
    components = name.split("/")
    return not (
        _NOT_IN_REFS.search(name)
        or not name.isprintable()
        or len(name.encode()) > _LONGEST_REF
        or components[0] == "refs"
        or any(not part or part[0] in ".-" or part.endswith((".", ".lock")) for part in components)
        or re.fullmatch(r"[0-9a-f]{40}", name)
        or name in ("@", "HEAD")
    )


class Problem(NamedTuple):
    """A value that breaks a rule."""

    line: int
    field: str
    reason: str
    refused: bool  # True if the Hub refuses the card for it.

    def __str__(self) -> str:
        return f'line {self.line}: "{self.field}" {self.reason}'


class CardRefused(ValueError):
    """A card that the Hub would refuse, with `problems`: all that it would refuse, with lines and fields."""

    def __init__(self, problems: list[Problem]):
        super().__init__(f"README.md: the Hub would refuse its metadata: {'; '.join(map(str, problems))}")
        self.problems = problems


def check_card(card: str, metadata: dict[str, Any] | None = None) -> list[Problem]:
    """All that is wrong with the metadata of a card, by lines. A ValueError: they cannot be read."""
    if not front_matter(card) and _OPENED.match(card):
        return [Problem(1, "---", "begins metadata that no line --- ends, so the Hub reads none", False)]
    # Each reading of a megabyte takes seconds: it is read once, and again for lines where something is wrong.
    broken = list(_apply(read_front_matter(card) if metadata is None else metadata))
    lines, problems = find_lines(card) if broken else {}, []
    for path, reason, refused in broken:
        # What is missing has the line of what it is missing in.
        known = next(path[:length] for length in range(len(path), -1, -1) if path[:length] in lines)
        problems.append(Problem(lines[known], _show(path), reason, refused))
    return sorted(problems)


def _show(path: _Path) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


_Path = tuple[str | int, ...]
# The path of a value, what is wrong with it, and whether the Hub refuses the card for it.
_Broken = tuple[_Path, str, bool]


class _Rule(NamedTuple):
    """Texts that a field may have. The Hub refuses what is no text, and with `refused` each other text."""

    allows: Callable[[str], object]
    reason: str
    refused: bool = False
    many: bool = False  # a list of texts is allowed too


_ANY = _Rule(re.compile(r"(?s).*").fullmatch, "must be a text")
_ORG_NAME = _Rule(_ID.fullmatch, "must be org/name, as on the Hub", many=True)
_RULES = {
    "license": _Rule(
        LICENSES.__contains__,
        "must be one of the licences that the Hub knows, or other with license_name and license_link",
        refused=True,
        many=True,
    ),
    "language": _Rule(
        re.compile(r"[a-z]{2,3}|code|multilingual").fullmatch,
        "must be a code of ISO 639 in two or three letters ('no' with quotation marks), code or multilingual",
        refused=True,
        many=True,
    ),
    "pipeline_tag": _Rule(
        (TASKS | {_OWN_TASK}).__contains__, "must be a task of the Hub, or searches do not find the model"
    ),
    "base_model": _ORG_NAME._replace(refused=True),
    **dict.fromkeys(("datasets", "new_version"), _ORG_NAME),
    "base_model_relation": _Rule(_RELATIONS.__contains__, f"must be {', '.join(_RELATIONS)}"),
    "license_link": _Rule(_LINK.fullmatch, "must be an address or the name of a file"),
    **dict.fromkeys(("tags", "metrics"), _ANY._replace(many=True)),
    **dict.fromkeys(("license_name", "library_name", "thumbnail"), _ANY),
}


def _apply(metadata: dict[str, Any]) -> Iterator[_Broken]:
    for name, rule in _RULES.items():
        value = metadata.get(name)
        entries: list[tuple[_Path, Any]] = [((name,), value)] if value is not None else []
        if rule.many and isinstance(value, list):
            entries = _items(value, (name,))
        for path, each in entries:
            if not isinstance(each, str) or not rule.allows(each):
                yield path, f"{rule.reason}, got {each!r:.60}", rule.refused or not isinstance(each, str)
            elif (name, each) == ("license", "other"):
                for missing in ("license_name", "license_link"):
                    if not metadata.get(missing):
                        yield path, f"is other, and {missing} is missing; add it to state the licence", False
    if metadata.get("license") == []:
        yield ("license",), "is an empty list", False
    if isinstance(metadata.get("tags"), str):
        yield ("tags",), f"must be a list, got {metadata['tags']!r:.60}", True
    if "model-index" in metadata:
        yield from _compare(metadata["model-index"], _INDEX, ("model-index",))


# `model-index`: models with results, each with a task, a data set, and metrics with values.
_METRIC = {"type": str, "value": object}
_RESULT = {"task": {"type": str}, "dataset": {"type": str, "name": str}, "metrics": [_METRIC]}
_INDEX = [{"name": str, "results": [_RESULT]}]


def _compare(value: Any, wanted: Any, path: _Path) -> Iterator[_Broken]:
    """Compares a part of `model-index` with what it must be: lists, mappings, texts, and what is there at all."""
    if isinstance(wanted, dict):
        for name, part in wanted.items():
            yield from _compare(_get(value, name), part, (*path, name))
    elif isinstance(wanted, list):
        if not isinstance(value, list):
            yield path, "must be a list", True
        for place, each in _items(value, path):
            yield from _compare(each, wanted[0], place)
    elif wanted is str and (not isinstance(value, str) or not value):
        yield path, f"must be a text that is not empty, got {value!r:.60}", True
    elif value is None:
        yield path, "is missing", True


def read_metrics(metadata: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The metrics of all results in the metadata of a card, in which anything may be wrong."""
    for _, model in _items(metadata.get("model-index"), ()):
        for _, result in _items(_get(model, "results"), ()):
            yield from (metric for _, metric in _items(_get(result, "metrics"), ()) if isinstance(metric, dict))


def _items(value: Any, path: _Path) -> list[tuple[_Path, Any]]:
    return [((*path, place), each) for place, each in enumerate(value)] if isinstance(value, list) else []


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None
