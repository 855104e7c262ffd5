"""Manifest of a resume state, by which a damaged state is found before it is loaded."""

# A state is a folder of files that libraries read without asking whether they are whole: a flipped bit of a weight is
# loaded in silence. So the last thing written into a state is its manifest: length and SHA-256 of every other file,
# what the run was when it was saved (`changes` compares it with what it is now), and a SHA-256 of all this text. The
# folder gets its name only after that. A state without a manifest was therefore damaged later.
# Hashing takes a processor for 0.6 to 1 s a gigabyte, partly while the disk syncs: no background is needed.

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..files import read_json, write_json

NAME = "manifest.json"
# Of accelerate: random states, which no step reads (`loop`). They are deleted from a state before it is whole.
RANDOM_STATES = "random_states_{rank}.pkl"


class DamagedState(DataError):
    """A resume state is not what was saved; the message says why."""


def list_files(folder: Path) -> list[str]:
    """Names of every file of a state but its manifest."""
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    return [name for name in names if name != NAME]


def hash_files(folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Length and SHA-256 of files of a state."""
    # hashlib lets other threads run.
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(names, pool.map(lambda name: _hash_file(folder / name), names), strict=True))


def _hash_file(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Writes the manifest of a state, with a hash of its text."""
    # As it will be read: JSON knows no tuples, and no keys but text.
    content = json.loads(json.dumps(content))
    write_json(folder / NAME, {**content, "sha256": _hash_content(content)})


def _hash_content(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a state whose files are all whole."""
    if not (folder / NAME).is_file():
        raise DamagedState(f"{NAME} is missing")
    try:
        content = read_json(folder / NAME)
        digest = content.pop("sha256")
        files = content["files"]
        is_whole = digest == _hash_content(content)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedState(f"{NAME} is damaged") from error
    if not is_whole:
        raise DamagedState(f"{NAME} is damaged")
    _check_files(folder, files)
    return dict(content)


def _check_files(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    """Checks the files, lengths first: missing or truncated files are found without reading the others."""
    for name, entry in files.items():
        if not (folder / name).is_file():
            raise DamagedState(f"{name} is missing")
        length = (folder / name).stat().st_size
        if length != entry["bytes"]:
            raise DamagedState(f"{name} has {length} bytes in place of {entry['bytes']}")
    try:
        found = hash_files(folder, list(files))
    except OSError as error:
        raise DamagedState(f"a file cannot be read ({error})") from error
    changed = [name for name in files if found[name] != files[name]]
    if changed:
        raise DamagedState(f"{', '.join(changed)} changed after being saved")
