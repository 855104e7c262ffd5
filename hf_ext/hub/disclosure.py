"""Disclosures of a staged folder: secrets are refused; paths, addresses and the notes in pictures are cut.

The search reads every file that goes up, of weights only the header, where programs note how they were called.
"""

from __future__ import annotations

import bisect
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from huggingface_hub.utils import HFValidationError, validate_repo_id
from PIL import Image

from ..data.files import UNREADABLE
from ..errors import DataError, NotPublished
from ..files import read_json_object, write_json
from .published_files import CONFIGURATIONS, UNLISTED, walk
from .readings import read_text, readings
from .secret_shapes import find_secrets

# An absolute path as the whole of a text: of POSIX, a home, a variable, Windows, a Windows share, or another machine.
_ABSOLUTE = re.compile(
    r"(?:/|~[^/\\]*[/\\]|\$\{?\w+\}?[/\\]|%\w+%[/\\]|[A-Za-z]:[\\/]|\\\\|file:|[\w.\-@]{2,}:[\\/](?!/)).*"
    r"|[\w.\-]+@[\w.\-]+:\S*",
    re.DOTALL,
)
# One that begins with dots.
_RELATIVE = re.compile(r"\.{1,2}[/\\].*", re.DOTALL)
# A model or data set of a Hub, if need be with a revision.
_HUB_ID = re.compile(r"[\w\-][\w.\-]*/[\w\-][\w.\-]*(?:@[\w.\-/]+)?")
# Paths from a root inside of a text: between quotation marks, where spaces belong to them, and elsewhere. What follows
# a letter is a part of something else, as in "image/png" and in addresses.
_ROOT = r"(?:file:/+|~?/(?!/)|[A-Za-z]:[\\/]|\\\\)"
_QUOTED = re.compile(rf"(['\"`])({_ROOT}[^'\"`\n]*)(?=['\"`])")
_PATHS = re.compile(rf"(?<![\w/\\.~-]){_ROOT}[^\s'\"`,;:()<>\[\]]+")
# An address as the whole of a text. What stands behind `s3:` and the like is a private store, so it is a path.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+)://.+", re.DOTALL)
_PUBLIC = re.compile(r"(?i:https?|ftp|git\+https)://\S+|hf://(?:datasets|models|spaces)/\S+")
# Where runs, results and libraries note from where they read: what is no name and no public address there is a path.
_ORIGINS = (
    *("data", "dataset", "reference", "init_from", "resume_from_checkpoint"),
    *("_name_or_path", "name_or_path", "special_tokens_map_file", "tokenizer_file", "vocab_file", "merges_file"),
)
# Where a text like a path may be a label ("/m/09x0r") or a token.
_LABELS = ("id2label", "label2id", "added_tokens_decoder", "additional_special_tokens", "extra_special_tokens")
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Chunks of PNG that say how the pixels look and move. All others are notes: texts, EXIF with place
# and camera, times, and profiles of colours, which name screens and hold texts.
_SHOWN = (b"IHDR PLTE IDAT IEND tRNS gAMA cHRM sRGB cICP mDCV cLLI sBIT bKGD hIST pHYs sPLT acTL fcTL fdAT").split()
_ORIENTATION = 0x0112
# The fields of training.json. What runs wrote beside them, or somebody added, says nothing to readers of a card.
_TRAINING = ("arguments", "commit", "task", "hardware", "seconds", "steps", "samples", "versions", "released")


def clean(folder: Path, source: Path) -> None:
    """Removes private information about this machine from a staged folder, which was copied from `source`."""
    for name, path in walk(folder):
        if path.suffix == ".png":
            strip_picture(path)
        is_report = name in ("training.json", "eval.json")
        if not is_report and path.name not in (*CONFIGURATIONS, "tokenizer_config.json", "model_index.json"):
            continue
        if path.name == "adapter_config.json":
            _require_public_base(path, source)
        kept = content = read_json_object(path)
        if name == "training.json":
            kept = {field: content[field] for field in _TRAINING if field in content}
            if isinstance(arguments := kept.get("arguments"), dict):
                # where a run was written says nothing to others
                kept["arguments"] = {key: value for key, value in arguments.items() if key != "output_dir"}
        cleaned = cut_paths(kept, near=source) if is_report else _cut_configuration(content, near=source)
        if cleaned != content:
            write_json(path, cleaned)


class SecretFound(NotPublished):
    """A file that would be published contains a token, a key or a password. The message does not repeat it."""

    def __init__(self, file: str, line: int | None, kind: str):
        where = f"{file}, in its header" if line is None else f"{file}, line {line}"
        advice = "nothing was uploaded. Remove it from the file, and revoke it if others may have seen it"
        super().__init__(f"{where}: {kind}; {advice}")
        self.file, self.line, self.kind = file, line, kind


def refuse_secrets(folder: Path) -> None:
    """Refuses a staged folder that holds a token, a key or a password, or a pointer to a file that is elsewhere."""
    for name, path in walk(folder, frozenset()):
        if hidden := [part for part in name.split("/") if part in UNLISTED]:
            raise NotPublished(f"{name}: no folder called {hidden[0]} is published; give it another name")
        if (kind := find_kind(name)) is not None:
            raise SecretFound("the name of a file", 1, kind)
        if path.stat().st_size < 1000 and path.read_bytes().startswith(b"version https://git-lfs.github.com/spec/"):
            raise NotPublished(f"{name}: a pointer of Git LFS in place of the file; fetch it with `git lfs pull`")
        refuse_secret(path, name)


def refuse_secret(path: Path, name: str) -> None:
    """Refuses a file, called `name`, that holds a token, a key or a password."""
    text = read_text(path)
    if (kind := find_kind(text)) is not None:
        raise SecretFound(name, None if name.endswith(".safetensors") else _find_line(text, kind), kind)


def find_kind(text: str) -> str | None:
    """The kind of a token, key or password in a text, if it has one."""
    return next((match.kind for reading in readings(text) for match in find_secrets(reading)), None)


def _find_line(text: str, kind: str) -> int:
    """The line in which a secret begins, or where only decoded lines have one, ends."""
    if (plain := next(find_secrets(text), None)) is not None:
        return text.count("\n", 0, plain.start) + 1
    # Decoded texts have other lines. So the shortest beginning of the file that has such a secret is looked for.
    lines = text.split("\n")
    shorter = range(1, len(lines))
    return 1 + bisect.bisect_left(shorter, True, key=lambda count: find_kind("\n".join(lines[:count])) == kind)


def find_machine_paths(folder: Path) -> tuple[str, ...]:
    """Finds texts of a staged folder that name the home, the working or the temporary folder; a sentence a file."""
    places = (Path.home(), Path.cwd(), Path(tempfile.gettempdir()))
    # "/" and "C:\" would be found everywhere
    named = [str(place) for place in places if len(place.parts) > 1 and place.parts[1:] != ("tmp",)]
    written = sorted({shape for place in named for shape in (place, place.replace("\\", "\\\\"))})
    pattern = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, written))})(?=[/\\\"'\s,;)]|$)")
    notes = []
    for name, path in walk(folder) if written else ():
        if found := pattern.search(text := read_text(path)):
            line = text.count("\n", 0, found.start()) + 1
            notes.append(f"{name}, line {line}: names a folder of this machine")
    return tuple(notes)


def is_path(text: str, near: Path | None = None) -> bool:
    """Tells if a text can only be a path, of a system or a private store, or names something on this disk."""
    if _URL.fullmatch(text):
        return not _PUBLIC.fullmatch(text)
    return bool(_ABSOLUTE.fullmatch(text) or _RELATIVE.fullmatch(text)) or ("/" in text and is_here(text, near))


def is_here(text: str, near: Path | None = None) -> bool:
    """Tells if a relative path is there, seen from the working folder, or from `near` and the folders that hold it."""
    # Runs note `clients/acme`, which looks like `org/name`, from the folder they were started in. That is nearly
    # always one that holds their output too, from wherever it is published.
    places = [Path(), *([] if near is None else [near.absolute(), *near.absolute().parents])]
    return any(os.path.lexists(place / text) for place in places)


def last_name(text: str) -> str:
    """The last part of a path, of this system or another."""
    if _URL.fullmatch(text):
        text = re.split(r"[?#]", text)[0]
    return re.split(r"[\\/]+|(?<=\S):(?=\S)", text.rstrip("\\/"))[-1] or "."


def cut_folders(message: str) -> str:
    """A message to a stranger, in which each path of this machine is its last part."""
    message = _QUOTED.sub(lambda found: found[1] + last_name(found[2]), message)
    return _PATHS.sub(lambda found: last_name(found[0]), message)


def cut_paths(value: Any, origin: bool = False, near: Path | None = None) -> Any:
    """A copy of a JSON value that may be published: of each text that is a path, the last part."""
    if isinstance(value, dict):
        return {key: cut_paths(item, origin or key in _ORIGINS, near) for key, item in value.items()}
    if isinstance(value, list):
        return [cut_paths(item, origin, near) for item in value]
    if not isinstance(value, str):
        return value
    named = not origin or not re.search(r"[\\/]", value) or _HUB_ID.fullmatch(value) or _PUBLIC.fullmatch(value)
    return _cut_address(value) if named and not is_path(value, near) else last_name(value)


def _cut_address(text: str) -> str:
    """An address without user, password, query and fragment; another text as it is."""
    if not _PUBLIC.fullmatch(text) or not re.search(r"[@?#]", text):
        return text
    scheme, place, path, _, _ = urlsplit(text)
    return urlunsplit((scheme, place.rpartition("@")[2], path, "", ""))


def _cut_configuration(value: Any, key: str = "", near: Path | None = None) -> Any:
    if isinstance(value, dict) and key not in _ORIGINS:
        return {name: v if name in _LABELS else _cut_configuration(v, name, near) for name, v in value.items()}
    if isinstance(value, list):
        return [_cut_configuration(item, key, near) for item in value]
    if key in _ORIGINS or not isinstance(value, str):
        return cut_paths(value, key in _ORIGINS, near)
    # "/s" may be a token, and says nothing; a template of several lines is none
    absolute = _URL.fullmatch(value) or (_ABSOLUTE.fullmatch(value) and not re.fullmatch(r"/[^/]*/?", value))
    return last_name(value) if absolute and is_path(value) and "\n" not in value else _cut_address(value)


def _require_public_base(path: Path, near: Path) -> None:
    """An adapter is of no use to those who do not have its base."""
    base = read_json_object(path).get("base_model_name_or_path")
    if base in (None, ""):
        return
    if not isinstance(base, str):
        raise DataError(f"{path.name}: `base_model_name_or_path` must be a text, got {base!r:.80}; correct the file.")
    arguments = read_json_object(path.with_name("training.json"), optional=True).get("arguments")
    # Runs note a folder that they began from by its last name.
    noted = isinstance(arguments, dict) and "/" in base and arguments.get("init_from") == last_name(base)
    try:
        validate_repo_id(base)
        is_local = noted or is_here(base, near if "/" in base else None)
    except HFValidationError:
        is_local = True
    if is_local:
        told = f"{path.name}: the base of this adapter is {last_name(base)!r}, a folder on this machine."
        advice = 'Push the base first, set "base_model_name_or_path" to its org/name, and push the adapter again; or '
        advice += "merge the adapter into the base and push the result. If a model of this name on the Hub is meant, "
        raise NotPublished(f"{told} {advice}rename the folder")


def strip_picture(path: Path) -> None:
    """Takes the notes out of a PNG file, and what follows its end. A picture that a note turns is refused."""
    content = path.read_bytes()
    chunks = list(_chunks(content))
    if not content.startswith(_SIGNATURE) or not chunks or chunks[-1][:4] != b"IEND":
        raise ValueError(f"{path.name}: not a complete PNG, so its notes cannot be removed; save it as PNG again")
    kept = (len(chunk[4:-4]).to_bytes(4, "big") + chunk for chunk in chunks if chunk[:4] in _SHOWN)
    stripped = _SIGNATURE + b"".join(kept)
    if stripped == content:
        return
    try:
        with Image.open(path) as picture:
            turned = picture.getexif().get(_ORIENTATION, 1) != 1
    except (*UNREADABLE, ValueError) as error:
        raise ValueError(f"{path.name}: not a readable PNG ({error}); save the picture again") from error
    if turned:
        raise ValueError(f"{path.name}: its metadata contain a rotation and are not published; save it upright")
    path.write_bytes(stripped)


def _chunks(content: bytes) -> Iterator[bytes]:
    """Chunks up to the end of the picture, from the kind to the checksum; nothing of one that is cut off."""
    place = len(_SIGNATURE)
    while place + 12 <= len(content):
        end = place + 12 + int.from_bytes(content[place : place + 4], "big")
        if end > len(content):
            return
        yield content[place + 4 : end]
        if content[place + 4 : place + 8] == b"IEND":
            return
        place = end
