"""The files that belong to an artifact, with their hashes: a flipped bit in a mask is a wrong weight like any other.

`emr.json` names every file beside it but itself, and those that are written anew without it: card, report, router.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..hub.file_hashes import file_sha256
from ..hub.safetensors_headers import CheckpointError
from .manifest_emr import MANIFEST, OWN_FILE, Manifest
from .places_emr import find_recorded

_NOT_NAMED = (MANIFEST, "README.md", "report.json", "report.png", "router.safetensors")
_WEIGHTS = ".safetensors"
# What earlier versions kept to add tasks; nothing reads it any more.
STATE = "state.safetensors"


class Verification(NamedTuple):
    """
    What came of reading an artifact through.

    Args:
        files (`int`): Files whose hash was compared.
        bytes (`int`): Their length together.
        wrong (`list[str]`): What is wrong, one line for each file.
        notes (`list[str]`): What could not be compared.
    """

    files: int
    bytes: int
    wrong: list[str]
    notes: list[str]


def list_files(folder: Path) -> list[str]:
    """Lists the files that a manifest names."""
    paths = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    names = [path.as_posix() for path in paths]
    return [name for name in names if OWN_FILE.fullmatch(name) and name not in _NOT_NAMED]


def hash_files(
    folder: Path, names: Iterable[str] | None = None, *, known: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, dict[str, Any]]:
    """Hashes files of an artifact."""
    found: dict[str, dict[str, Any]] = {}
    for name in list_files(folder) if names is None else names:
        told = (known or {}).get(name) if name.endswith(_WEIGHTS) else None
        path = folder / name
        found[name] = dict(told or {"bytes": path.stat().st_size, "sha256": file_sha256(path)})
    return found


def require_unchanged(folder: str | Path, manifest: Manifest, name: str) -> None:
    """Refuses a file of an artifact that is not as the merge wrote it. It is read once, and again only after it
    changed."""
    told = manifest.files.get(name)
    path = Path(folder, name)
    if told is not None and told.get("sha256") not in (None, file_sha256(path)):
        raise CheckpointError(
            f"{path}: not as the merge wrote it (its SHA-256 is not the one in {MANIFEST}); the artifact is damaged: "
            "fetch it again, or merge again."
        )


def verify_artifact(folder: str | Path) -> Verification:
    """Reads an artifact through and compares every file with its manifest; and the base, where it lies on this
    disk."""
    place = Path(folder).expanduser()
    manifest = Manifest.read(place)
    told = {name: (place / name, about) for name, about in manifest.files.items() if Path(name).name != STATE}
    notes = [f"{name}: of an earlier version, not used, not compared." for name in manifest.files.keys() - told]
    if not told:
        notes.append(
            f"{MANIFEST} has no hashes of the artifact's own files: an earlier version wrote it. Merge again for them."
        )
    base, inside = manifest.base, manifest.base.folder
    at = place / inside if inside is not None else find_recorded(base.source, place)
    if inside is None and (base.revision is not None or not at.is_dir()):
        notes.append(f"the base, {base.source}, was not read: it is not on this disk where the artifact says.")
    else:
        told |= {f"{inside or at}/{name}": (at / name, about) for name, about in base.files.items()}
    wrong, count, size = [], 0, 0
    for name, (path, about) in told.items():
        fault = _fault(path, about)
        if fault is not None:
            wrong.append(f"{name}: {fault}")
        elif about.get("sha256"):
            count, size = count + 1, size + about["bytes"]
    extra = sorted(set(list_files(place)) - manifest.files.keys()) if manifest.files else []
    notes += [f"{name}: not of the merge, not compared." for name in extra]
    return Verification(count, size, wrong, notes)


def _fault(path: Path, about: Mapping[str, Any]) -> str | None:
    if not path.is_file():
        return "missing"
    size = path.stat().st_size
    if size != about["bytes"]:
        return f"{size:,} bytes, expected {about['bytes']:,}"
    if about.get("sha256") and file_sha256(path, fresh=True) != about["sha256"]:
        return "other content than the merge wrote (its SHA-256 differs)"
    return None
