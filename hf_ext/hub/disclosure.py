"""What a staged folder would disclose: tokens are refused, paths of this machine cut to their last name.

The scan reads every file that goes up, of weights only the header, where programs note how they were called.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub.utils import HFValidationError, validate_repo_id  # type: ignore[attr-defined]

from ..files import read_json_object
from .published_files import walk

# Prefixes of secrets and their shapes. What comes before must not be part of a word, so that `task-…` is none; the end
# of an escape of JSON (`\n`, `\u003d`) or of an address (`%3D`) is none, though it ends with a letter or digit.
_ESCAPE = rb"(?<=\\[bfnrt])|(?<=\\u[0-9A-Fa-f]{4})|(?<=%[0-9A-Fa-f]{2})"
_START = rb"(?:(?<![A-Za-z0-9])|" + _ESCAPE + rb")"
_START_OF_NAME = rb"(?:(?<![A-Za-z0-9_])|" + _ESCAPE + rb")"
_TOKENS = {
    "a token of Hugging Face": _START_OF_NAME
    + rb"(?:hf_(?:oauth_|jwt_)[A-Za-z0-9.\-_]{20,}|(?:hf_|api_org_)[A-Za-z0-9]{20,})",
    "a key of OpenAI, Anthropic or the like": _START + rb"sk-(?:[A-Za-z0-9]+-){0,3}[A-Za-z0-9_]{16,}",
    "a key of AWS": _START + rb"(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])",
    "a token of GitHub": _START + rb"(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{40,})",
    "a token of GitLab": _START + rb"glpat-[A-Za-z0-9_\-]{20,}",
    "a token of Slack": _START + rb"xox[abeoprs]-[A-Za-z0-9\-]{20,}",
    "a key of Google": _START + rb"AIza[A-Za-z0-9_\-]{35}",
    "a private key": rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----",
}
_SECRET = re.compile(b"|".join(b"(%b)" % pattern for pattern in _TOKENS.values()))
_KINDS = tuple(_TOKENS)
_MAX_HEADER_BYTES = 100_000_000

# A path of POSIX, of a home, of Windows or of a Windows share, or one that begins with dots, as the whole of a text.
_PATH = re.compile(r"(?:/|\.{1,2}[/\\]|~[^/\\]*[/\\]|[A-Za-z]:[\\/]|\\\\|file:).*", re.DOTALL)
# Where a library notes from where it read; elsewhere such a text may be a label ("/m/09x0r") or a token.
_ORIGINS = ("_name_or_path", "name_or_path", "special_tokens_map_file", "tokenizer_file", "vocab_file", "merges_file")
_CONFIGURATIONS = ("config.json", "adapter_config.json", "tokenizer_config.json", "generation_config.json")
# The fields of training.json. What runs wrote beside them, or somebody added, says nothing to readers of a card.
_TRAINING = ("arguments", "commit", "task", "hardware", "seconds", "steps", "samples", "versions")


def clean(folder: Path) -> None:
    """Takes out of a staged folder what says more of this machine than its owner meant."""
    # Of `training.json` the fields that hf-ext writes are kept. Texts that are paths are cut to their last name: all
    # of `training.json` and `eval.json`, and in configurations the origin of what they describe.
    for name, path in walk(folder):
        file = name.rpartition("/")[2]
        if name in ("training.json", "eval.json"):
            content = read_json_object(path)
            kept = _keep_known_training(content) if name == "training.json" else content
            _rewrite(path, content, cut_paths(kept))
        elif file in _CONFIGURATIONS:
            if file == "adapter_config.json":
                _require_public_base(path)
            content = read_json_object(path)
            _rewrite(path, content, _cut_origins(content))


def refuse_secrets(folder: Path) -> None:
    """Refuses a staged folder that holds a token or a private key; the message does not repeat it."""
    for name, path in walk(folder):
        content = _readable(path)
        if found := _SECRET.search(content):
            kind = _KINDS[(found.lastindex or 1) - 1]
            line = content.count(b"\n", 0, found.start()) + 1
            where = f"{name}, in its header" if name.endswith(".safetensors") else f"{name}, line {line}"
            raise ValueError(
                f"{where}: {kind}; nothing was uploaded. Take it out of the file, and if anybody else may have seen "
                "it, revoke it where it was made"
            )


def find_secret(path: Path) -> str | None:
    """The kind of a token or private key that a file holds, if it holds one."""
    found = _SECRET.search(_readable(path))
    return None if found is None else _KINDS[(found.lastindex or 1) - 1]


def find_machine_paths(folder: Path) -> tuple[str, ...]:
    """Finds texts of a staged folder that name the home, the working or the temporary folder; a sentence a file."""
    places = {os.fsencode(place) for place in _machine_places()}
    written = {shape for place in places for shape in (place, place.replace(b"\\", b"\\\\"))}
    if not written:
        return ()
    pattern = re.compile(
        b"|".join(rb"(?<![\w.])%b(?=[/\\\"'\s,;)]|$)" % re.escape(place) for place in sorted(written))
    )
    notes = []
    for name, path in walk(folder):
        content = _readable(path)
        if found := pattern.search(content):
            line = content.count(b"\n", 0, found.start()) + 1
            notes.append(f"{name}, line {line}: names a folder of this machine")
    return tuple(notes)


def _machine_places() -> Iterator[str]:
    for place in (Path.home(), Path.cwd(), Path(tempfile.gettempdir())):
        # "/" and "C:\" would be found everywhere
        if len(place.parts) > 1 and place.parts[1:] != ("tmp",):
            yield str(place)


def _readable(path: Path) -> bytes:
    if path.suffix != ".safetensors":
        content = path.read_bytes()
        # UTF-16, as some editors of Windows write: its letters must lie side by side
        return content.replace(b"\0", b"") if content[:2] in (b"\xff\xfe", b"\xfe\xff") else content
    with open(path, "rb") as file:
        return file.read(min(int.from_bytes(file.read(8), "little"), _MAX_HEADER_BYTES))


def _rewrite(path: Path, before: dict[str, Any], after: dict[str, Any]) -> None:
    if after != before:
        path.write_text(json.dumps(after, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _keep_known_training(content: dict[str, Any]) -> dict[str, Any]:
    from ..training.arguments import DataArguments, SourcePart, TrainingArguments

    def known(value: Any, kind: type) -> Any:
        names = [item.name for item in dataclasses.fields(kind)]
        return {name: value[name] for name in names if name in value} if isinstance(value, dict) else value

    def known_source(value: Any) -> Any:
        """One source, a list of them, or evaluation sets by name."""
        if isinstance(value, list):
            return [known_source(part) for part in value]
        if not isinstance(value, dict):
            return value
        if "path" not in value:
            return {name: known_source(part) for name, part in value.items() if isinstance(part, dict)}
        return {**known(value, SourcePart), "path": known_source(value["path"])}

    kept = {name: content[name] for name in _TRAINING if name in content}
    if not isinstance(arguments := kept.get("arguments"), dict):
        return kept
    kept["arguments"] = arguments = known(arguments, TrainingArguments)
    # where a run was written says nothing to others
    arguments.pop("output_dir", None)
    if isinstance(arguments.get("data"), dict):
        data = known(arguments["data"], DataArguments)
        arguments["data"] = {
            name: known_source(value) if name in ("train", "eval") else value for name, value in data.items()
        }
    return kept


def is_path(text: str) -> bool:
    """Whether a text can only be a path, of this system or another, or is the name of something on this disk."""
    return bool(_PATH.fullmatch(text)) or ("/" in text and os.path.lexists(text))


def last_name(text: str) -> str:
    """The last part of a path, of this system or another."""
    return re.split(r"[\\/]+", text.rstrip("\\/"))[-1] or "."


def cut_paths(value: Any) -> Any:
    """What may be published of a value of JSON: of each text that is a path its last part."""
    if isinstance(value, dict):
        return {key: cut_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [cut_paths(item) for item in value]
    return last_name(value) if isinstance(value, str) and is_path(value) else value


def _cut_origins(value: Any) -> Any:
    if isinstance(value, list):
        return [_cut_origins(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: cut_paths(item) if key in _ORIGINS else _cut_origins(item) for key, item in value.items()}


def _require_public_base(path: Path) -> None:
    """An adapter is of no use to those who do not have its base."""
    base = read_json_object(path).get("base_model_name_or_path")
    if not base:
        return
    try:
        validate_repo_id(str(base))
        local = os.path.exists(str(base))
    except HFValidationError:
        local = True
    if local:
        raise ValueError(
            f"{path.name}: the base of this adapter is {last_name(str(base))!r}, a folder that others cannot reach. "
            'Push the base first, write its org/name as "base_model_name_or_path" into adapter_config.json, and push '
            "the adapter again; or merge the adapter into the base and push the result"
        )
