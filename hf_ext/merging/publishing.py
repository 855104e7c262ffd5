"""A publishable copy of an artifact: its own files only, the installed loader, no paths of this machine."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from hf_ext.emr import emr_loader
from hf_ext.emr.artifact import hash_files, open_extras, open_masks, open_unified
from hf_ext.emr.manifest import MANIFEST, Manifest

from ..errors import DataError, UsageError
from ..files import copy_into, parse_json_object, read_json_object, stays_inside, write_json
from ..hub.disclosure import is_path, last_name
from ..hub.folder_kinds import FolderKind
from ..hub.published_files import LICENCES, is_described, is_loaded, walk
from .card import describe, read_merge
from .compare import REPORT, explain_damage

LOADER = "emr_loader.py"
# The one that travels with artifacts.
_LOADER_HERE = Path(emr_loader.__file__)
# What a folder of an artifact has beside what loaders of other libraries read; the state of the merge stays behind.
_OWN = (MANIFEST, "mask.safetensors", "extra.safetensors", "sums.safetensors")


def copy_artifact(folder: Path, out: Path) -> None:
    """Copies what belongs to an artifact, verified, into an empty folder.

    Tasks that `emr.json` does not name, hidden files and the state of the merge stay behind.
    """
    manifest = Manifest.read(folder)
    if manifest.base.revision is None and manifest.base.folder is None:
        raise DataError(
            f"{folder}: its tasks are restored from the base {manifest.base.source}, a folder on this "
            "machine. Merge again with include_base: true (--include-base), which stores the base in the artifact; or "
            "push the base to the Hub and merge again with its org/name"
        )
    loader = folder / LOADER
    if loader.is_file() and loader.read_bytes() != _LOADER_HERE.read_bytes():
        raise UsageError(
            f"{loader}: not the loader of the installed hf_ext, so it is not published; remove it (the installed one "
            "is published), or install the version of hf_ext that wrote it"
        )
    if not manifest.deltas:
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
        files = manifest.base.files if place == Path("base") else manifest.unified
        stems = {re.sub(r"-\d{5}-of-\d{5}$", "", name.removesuffix(".safetensors")) for name in files}
        weights = {*files, *(f"{stem}.safetensors.index.json" for stem in stems)}
        # What the merge took along beside what loaders read; code is taken from installed packages.
        inner = "" if place == Path() else f"{place.as_posix()}/"
        along = {name.removeprefix(inner) for name in manifest.files if name.startswith(inner)}
        along = {name for name in along if not re.match(r"(tasks|base)/|.*\.py$", name)}
        _copy(folder, place, out, weights | along)
    # The root is no task's model, so its configuration offers no pipeline; those of the tasks do.
    path = out / "config.json"
    if path.is_file() and "custom_pipelines" in (config := read_json_object(path)):
        del config["custom_pipelines"]
        write_json(path, config)
    shutil.copyfile(_LOADER_HERE, out / LOADER)


def _copy(folder: Path, place: Path, out: Path, weights: set[str]) -> None:
    for name, path in walk(folder / place):
        described = name in LICENCES if place.parts else is_described(name)
        chosen = is_loaded(name) or name in _OWN or name in weights or described
        if not chosen or not path.is_file():
            continue
        if not stays_inside(folder, path):
            raise ValueError(
                f"{path}: a link out of the folder, which is not published; copy the file into the folder"
            )
        copy_into({name: path}, out / place)


def hide_paths(folder: Path) -> None:
    """Cuts the paths of this machine in `emr.json` and `report.json` of a merge to their last part, and lets the
    hashes be those of the files that are published."""
    merge = read_merge(folder)
    if merge is None:
        return
    paths = {source.source for source in (merge.base, *merge.tasks.values()) if source.revision is None}
    with explain_damage(folder / REPORT):
        given = filter(None, (merge.method.get("merged"), *merge.method.get("statistics", {}).values()))
        # `org/name` stays as it is
        paths |= {place for place in given if is_path(place)}
    # the longest first: one may begin another
    ordered = sorted((path for path in paths if re.search(r"[\\/]", path)), key=len, reverse=True)
    for file in (MANIFEST, REPORT):
        path = folder / file
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            for hidden in ordered:
                text = text.replace(_escape(hidden), _escape(last_name(hidden)))
            content = parse_json_object(text.encode(), str(path))
            if file == MANIFEST and merge.manifest is not None and merge.manifest.files:
                # Weights are copies, and keep the hashes of the merge, by which a fault of the copy is noticed;
                # configurations may have been changed for publication.
                content["files"] = hash_files(folder, known=merge.manifest.files)
            write_json(path, content, indent=1)


def _escape(text: str) -> str:
    """The text as it stands between quotes in a JSON file."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


MERGES = FolderKind(describe, hide_paths, copy_artifact)
