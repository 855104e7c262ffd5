"""Rules of the Hub for the metadata of a model card, used by `card --check`, a push and the embedded Hub.

Taken from the Hub's documentation and from what it has answered in public threads. It refuses a card that breaks one
of the strict rules, with all files that come with it; of the others it says that something will not be found.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from .front_matter import find_lines, read_front_matter

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
_OWN_TASKS = ("image-restoration",)
# Plain tables, since the embedded Hub does not import the libraries.
_ID = re.compile(
    r"(?!.*(?:--|\.\.|[.\-]$))(?:[A-Za-z0-9_][A-Za-z0-9_.\-]{0,95}/)?[A-Za-z0-9_][A-Za-z0-9_.\-]{0,95}(?<![.\-])"
)
_LINK = re.compile(r"https?://\S+|[^\s:]+")
# Of a model to its base.
_RELATIONS = ("adapter", "finetune", "merge", "quantized")
_LANGUAGE = re.compile(r"[a-z]{2,3}|code|multilingual")


class Problem(NamedTuple):
    """A value that breaks a rule."""

    line: int
    field: str
    reason: str
    # True if the Hub refuses the card for it.
    refused: bool

    def __str__(self) -> str:
        return f'line {self.line}: "{self.field}" {self.reason}'


class CardRefused(ValueError):
    """
    A card that the Hub would refuse.

    Args:
        problems (`list[Problem]`): All that it would refuse, with lines and fields.
    """

    def __init__(self, problems: list[Problem]):
        super().__init__(f"README.md: the Hub would refuse its metadata: {'; '.join(map(str, problems))}")
        self.problems = problems


def check_card(card: str) -> list[Problem]:
    """
    Checks the metadata of a card.

    Args:
        card (`str`): The text of a README.md.

    Returns:
        `list[Problem]`: All that is wrong with it, by lines; empty where nothing is, and where there is no metadata.

    Raises:
        ValueError: The metadata cannot be read.
    """
    metadata = read_front_matter(card)
    if not metadata:
        return []
    lines = find_lines(card)

    def find_line(path: tuple[str | int, ...]) -> int:
        # What is missing has the line of what it is missing in.
        while path not in lines:
            path = path[:-1]
        return lines[path]

    found = [Problem(find_line(path), _show(path), reason, refused) for path, reason, refused in _apply(metadata)]
    return sorted(found)


def refuse_card(card: str) -> None:
    """Refuses a card that the Hub would refuse."""
    if refused := [problem for problem in check_card(card) if problem.refused]:
        raise CardRefused(refused)


def _show(path: tuple[str | int, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


# The path of a value, what is wrong with it, and whether the Hub refuses the card for it.
_Broken = tuple[tuple[str | int, ...], str, bool]


def _apply(metadata: dict[str, Any]) -> Iterator[_Broken]:
    if metadata.get("license") == []:
        yield ("license",), "is an empty list", False
    for path, value in _texts(metadata, "license"):
        if not isinstance(value, str) or value not in LICENSES:
            advice = "for another one write other, license_name and license_link"
            yield path, f"must be one of the licences that the Hub knows, got {value!r:.60}; {advice}", True
        elif value == "other":
            for name in ("license_name", "license_link"):
                if not metadata.get(name):
                    yield path, f"is other, and {name} is missing; add it to state the licence", False
    for path, value in _texts(metadata, "language"):
        if not isinstance(value, str) or not _LANGUAGE.fullmatch(value):
            said = f"must be a code of ISO 639 in two or three letters, code or multilingual, got {value!r:.60}"
            yield path, said + ("; write 'no' with quotation marks" if value is False else ""), True
    tag = metadata.get("pipeline_tag")
    if tag is not None and not isinstance(tag, str):
        yield ("pipeline_tag",), f"must be a text, got {tag!r:.60}", True
    elif tag is not None and tag not in TASKS and tag not in _OWN_TASKS:
        yield (
            ("pipeline_tag",),
            f"is {tag!r:.60}, which is not a task of the Hub, so searches do not find the model",
            False,
        )
    for name in ("base_model", "datasets", "new_version"):
        for path, value in _texts(metadata, name):
            if not isinstance(value, str) or not _ID.fullmatch(value):
                # Names of other data sets are shown without a link.
                refused = name == "base_model" or not isinstance(value, str)
                yield path, f"must be org/name, as on the Hub, got {value!r:.60}", refused
    for name in ("license_name", "license_link", "library_name", "base_model_relation", "thumbnail"):
        if not isinstance(value := metadata.get(name), str | None):
            yield (name,), f"must be a text, got {value!r:.60}", True
    relation = metadata.get("base_model_relation")
    if isinstance(relation, str) and relation not in _RELATIONS:
        yield ("base_model_relation",), f"must be {', '.join(_RELATIONS)}, got {relation!r:.60}", False
    link = metadata.get("license_link")
    if isinstance(link, str) and not _LINK.fullmatch(link):
        yield ("license_link",), f"must be an address or the name of a file, got {link!r:.60}", False
    for name in ("tags", "metrics"):
        value = metadata.get(name)
        if name == "tags" and value is not None and not isinstance(value, list):
            yield (name,), f"must be a list, got {value!r:.60}", True
        for path, each in _texts(metadata, name) if name == "metrics" or isinstance(value, list) else ():
            if not isinstance(each, str):
                yield path, f"must be a text, got {each!r:.60}", True
    if "model-index" in metadata:
        yield from _check_results(metadata["model-index"])


def _texts(metadata: dict[str, Any], name: str) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """The values of a field that is one text or a list of them, each with its path."""
    value = metadata.get(name)
    if isinstance(value, list):
        yield from (((name, place), each) for place, each in enumerate(value))
    elif value is not None:
        yield (name,), value


def _check_results(index: Any) -> Iterator[_Broken]:
    """The rules of `model-index`: models with results, each with a task, a data set, and metrics with values."""
    start: tuple[str | int, ...] = ("model-index",)
    for path, model in _items(index, start):
        yield from _require_text(model, path, "name")
        for place, result in _items(_get(model, "results"), (*path, "results")):
            yield from _require_text(_get(result, "task"), (*place, "task"), "type")
            for name in ("type", "name"):
                yield from _require_text(_get(result, "dataset"), (*place, "dataset"), name)
            for spot, metric in _items(_get(result, "metrics"), (*place, "metrics")):
                yield from _require_text(metric, spot, "type")
                if _get(metric, "value") is None:
                    yield (*spot, "value"), "is missing", True
            if not isinstance(_get(result, "metrics"), list):
                yield (*place, "metrics"), "must be a list", True
        if not isinstance(_get(model, "results"), list):
            yield (*path, "results"), "must be a list", True
    if not isinstance(index, list):
        yield start, "must be a list", True


def read_results_of(metadata: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Metric and value of each result in the metadata of a card; what breaks the rules is left out."""
    for path, model in _items(metadata.get("model-index"), ()):
        for place, result in _items(_get(model, "results"), path):
            for _, metric in _items(_get(result, "metrics"), place):
                kind, value = _get(metric, "type"), _get(metric, "value")
                if isinstance(kind, str) and isinstance(value, int | float | str):
                    yield kind, value


def _items(value: Any, path: tuple[str | int, ...]) -> list[tuple[tuple[str | int, ...], Any]]:
    return [((*path, place), each) for place, each in enumerate(value)] if isinstance(value, list) else []


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _require_text(value: Any, path: tuple[str | int, ...], name: str) -> Iterator[_Broken]:
    if not isinstance(found := _get(value, name), str) or not found:
        yield (*path, name), f"must be a text that is not empty, got {found!r:.60}", True
