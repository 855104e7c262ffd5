"""The artifact of a merge as others may have it: its own files only, the installed loader, no path of this machine."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from ..hub.checkpoints import stays_inside
from .artifact_emr import open_extras, open_masks, open_unified
from .card_emr import public_name
from .manifest_emr import Manifest, SourceRecord, TaskRecord

LOADER = "emr_loader.py"
# What a folder of an artifact consists of; everything else in it stays behind, and so does the state of the merge.
_COPIED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "additional_chat_templates/*.jinja", "LICENSE*")
_AT_ROOT = ("README.md", "report.png")
_NOT_PUBLISHED = ("state.safetensors",)


def packaged_loader() -> Path:
    """
    Where the loader that travels with artifacts lies.

    Returns:
        `Path`: `emr_loader.py` of the installed package.
    """
    return Path(__file__).with_name(LOADER)


def copy_artifact(folder: Path, out: Path) -> None:
    """
    Copies what belongs to an artifact, verified, into an empty folder.

    Tasks that `emr.json` does not name, hidden files and the state of the merge stay behind. Paths of this machine in
    `emr.json` are cut to their last part.

    Args:
        folder (`Path`): The artifact.
        out (`Path`): Where to; exists and is empty.

    Raises:
        ValueError: It is damaged, holds other code than the installed loader, or needs a base that nobody else has.
    """
    manifest = Manifest.read(folder)
    _require_reachable(manifest, folder)
    loader = folder / LOADER
    if loader.is_file() and loader.read_bytes() != packaged_loader().read_bytes():
        raise ValueError(
            f"{loader}: not the loader of the installed hf_ext, so it is not published; remove it (the installed one "
            "is published), or install the version of hf_ext that wrote it"
        )
    open_unified(folder, manifest).close()
    for task in manifest.tasks:
        open_masks(folder, manifest, task).close()
        if (extras := open_extras(folder, manifest, task)) is not None:
            extras.close()
    places = [Path(), *(Path("tasks", task) for task in manifest.tasks)]
    if manifest.base.folder is not None:
        places.append(Path(manifest.base.folder))
    for place in places:
        (out / place).mkdir(parents=True, exist_ok=True)
        for pattern in (*_COPIED, *(() if place.parts else _AT_ROOT)):
            _copy(folder, place, pattern, out)
    shutil.copyfile(packaged_loader(), out / LOADER)
    _without_paths(manifest).write(out)


def _require_reachable(manifest: Manifest, folder: Path) -> None:
    if manifest.base.revision is None and manifest.base.folder is None:
        raise ValueError(
            f"{folder}: its tasks are restored from the base {manifest.base.source}, a folder that others cannot "
            "reach. Merge again with include_base: true (--include-base), which stores the base in the artifact; or "
            "push the base to the Hub and merge again with its org/name"
        )


def _copy(folder: Path, place: Path, pattern: str, out: Path) -> None:
    for path in sorted((folder / place).glob(pattern)):
        name = path.relative_to(folder)
        if name.parts[-1] in _NOT_PUBLISHED or not path.is_file():
            continue
        if not stays_inside(folder, path):
            raise ValueError(f"{path}: a link that leaves the folder, which is not published; copy the file into it")
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, out / name)


def _without_paths(manifest: Manifest) -> Manifest:
    def public(source: SourceRecord) -> SourceRecord:
        return dataclasses.replace(source, source=public_name(source))

    tasks: dict[str, TaskRecord] = {
        name: dataclasses.replace(task, origin=public(task.origin)) for name, task in manifest.tasks.items()
    }
    return dataclasses.replace(manifest, base=public(manifest.base), tasks=tasks)
