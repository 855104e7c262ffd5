# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Restores the weights of one task from a folder that EMR-Merging (arXiv 2405.17461) wrote.

This file travels with the folder and needs torch and safetensors only:

    python emr_loader.py FOLDER TASK OUT.safetensors [--base BASE]

or, in Python, `restore(folder, task, base=None)`. A task's weights are W_0 + λ·(W_uni - W_0) where its mask is set and
W_0 elsewhere, computed in fp32 and rounded once: W_0 are the weights of the base, W_uni those at the root of the
folder, the mask is in `tasks/<task>/mask.safetensors` (one bit an element, lowest bit first), λ in `emr.json`. What
was not merged is in `tasks/<task>/extra.safetensors`, or equal to the base.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

_TASK = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,64}")
_FILE = re.compile(r"[\w\-][\w.\- ]*\.safetensors")
_MAX_JSON_BYTES = 100_000_000
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_OF_A_TASK = ("mask.safetensors", "extra.safetensors")
# Elements restored at once; a multiple of 8, so that every piece starts with a byte of the mask.
_PIECE = 2**20


def restore(
    folder: str | os.PathLike[str], task: str, base: str | os.PathLike[str] | None = None
) -> dict[str, torch.Tensor]:
    """
    Restores the weights of one task.

    Args:
        folder (`str` or `Path`): The folder with `emr.json`.
        task (`str`): Name of the task.
        base (`str` or `Path`, *optional*): Folder of the base checkpoint, or its file when there is only one. Not
            needed when the base is inside `folder`, or still where it was at the time of the merge.

    Returns:
        `dict[str, torch.Tensor]`: The tensors of the task's checkpoint, by name, on the CPU.

    Raises:
        ValueError: `folder` is not such a folder or is damaged, there is no such task, the base is not found, or
            `base` is not the base of the merge; the message says what to do.
    """
    root = Path(folder).expanduser()
    manifest = read_manifest(root)
    description = _task(manifest, task)
    weights = _Files({file: inside(root, file, root) for file in manifest["unified"]["files"]}, "the root weights")
    started = find_base(root, manifest, base)
    here = root / "tasks" / task
    masks = _Files({"mask.safetensors": inside(here, "mask.safetensors", root)}, f"the masks of {task}")
    optional = ["extra.safetensors"] if (here / "extra.safetensors").exists() else []
    extras = _Files({file: inside(here, file, root) for file in optional}, f"the extras of {task}")
    verify_own(root, manifest, [*manifest["unified"]["files"], *(f"tasks/{task}/{kind}" for kind in _OF_A_TASK)])
    lengths = {entry["name"]: entry["elements"] for entry in manifest["tensors"]}

    restored: dict[str, torch.Tensor] = {}
    for name in masks.names():
        source = _base_name(description, name)
        if source not in lengths:
            raise ValueError(f"{here}: mask of {name!r}, but emr.json has no tensor {source!r}; {_DAMAGED}")
        scale, length = _scale(description, name), lengths[source]
        leading = restore_tensor(started.get(source), weights.get(source), masks.get(name), scale, length)
        tail = extras.get(name).flatten() if name in extras.names() else leading[:0]
        shape = description.get("tails", {}).get(name, {}).get("shape", weights.get(source).shape)
        if tail.dtype != leading.dtype or math.prod(shape) != len(leading) + len(tail):
            raise ValueError(f"{here}: {name!r} of shape {list(shape)} does not fit its parts; {_DAMAGED}")
        restored[name] = torch.cat([leading, tail]).reshape(tuple(shape)) if len(tail) else leading.reshape(shape)
    for name in set(extras.names()) - set(restored):
        restored[name] = extras.get(name).clone()
    for name in description.get("shared", []):
        restored[name] = started.get(_base_name(description, name)).clone()
    return restored


def restore_tensor(
    base: torch.Tensor, unified: torch.Tensor, mask: torch.Tensor, scale: float, length: int
) -> torch.Tensor:
    """Restores the leading elements of one tensor."""
    if mask.dtype != torch.uint8 or mask.ndim != 1 or len(mask) < -(-length // 8):
        raise ValueError(f"a mask of {length} elements needs {-(-length // 8)} bytes; {_DAMAGED}")
    if base.shape != unified.shape or base.numel() < length or not {base.dtype, unified.dtype} <= set(_FLOATS):
        raise ValueError(
            f"a tensor of the base is {base.dtype} {list(base.shape)}, its merged one {unified.dtype} "
            f"{list(unified.shape)}, and {length} elements were merged; {_DAMAGED}"
        )
    base, unified = base.flatten(), unified.flatten()
    out = torch.empty(length, dtype=unified.dtype)
    places = torch.arange(8, dtype=torch.uint8)
    for start in range(0, length, _PIECE):
        stop = min(start + _PIECE, length)
        bits = (mask[start // 8 : -(-stop // 8), None] >> places & 1).flatten()[: stop - start].bool()
        before = base[start:stop].float()
        moved = (unified[start:stop].float() - before).mul_(scale).add_(before)
        out[start:stop] = torch.where(bits, moved, before)
    return out


def read_manifest(folder: Path) -> dict[str, Any]:
    """Reads and checks `emr.json`."""
    path = folder / "emr.json"
    if not path.is_file():
        raise ValueError(f"{folder}: there is no emr.json; give the folder that EMR-Merging wrote")
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise ValueError(f"{path}: larger than {_MAX_JSON_BYTES:,} bytes; {_DAMAGED}")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}); {_DAMAGED}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != "emr-merging":
        raise ValueError(f'{path}: it does not say "format": "emr-merging"; give the folder that EMR-Merging wrote')
    if manifest.get("format_version") != 1 or manifest.get("bit_order") != "little":
        raise ValueError(
            f"{path}: format_version {manifest.get('format_version')!r} and bit_order {manifest.get('bit_order')!r}; "
            "this loader reads version 1, little: use the one that came with the folder"
        )
    kinds = {"base": dict, "unified": dict, "tensors": list, "tasks": dict}
    wrong = [key for key, kind in kinds.items() if not isinstance(manifest.get(key), kind)]
    if wrong or not isinstance(manifest["unified"].get("files"), dict):
        raise ValueError(f"{path}: {wrong or ['unified']} are missing or of the wrong kind; {_DAMAGED}")
    for entry in manifest["tensors"]:
        if not (isinstance(entry, dict) and isinstance(entry.get("name"), str) and _is_size(entry.get("elements"))):
            raise ValueError(f"{path}: a tensor is described by {entry!r:.80}; {_DAMAGED}")
    base = manifest["base"]
    texts = [base.get("source"), base.get("revision"), base.get("folder")]
    files = base.get("files", {})
    known = isinstance(files, dict) and all(isinstance(entry, dict) for entry in files.values())
    if not known or not all(isinstance(text, str | None) for text in texts):
        raise ValueError(f"{path}: the base is described by {base!r:.80}; {_DAMAGED}")
    # The system refuses such names with an error of its own.
    named = [str(base.get("source")), *files, *manifest["unified"]["files"]]
    if long := [name for name in named if max(map(_bytes, name.split("/"))) > 255 or _bytes(name) > 4000]:
        raise ValueError(f"{path}: {long[0]!r:.80} is too long for a name; {_DAMAGED}")
    for name, task in manifest["tasks"].items():
        _check_task(task, f"{path}: task {name!r}")
    return manifest


def _check_task(task: Any, where: str) -> None:
    """Refuses the description of a task whose parts are of other kinds than they must be."""
    kinds = {"base_prefix": str, "task_prefix": str, "shared": list, "tails": dict, "scales": dict, "scale_hex": str}
    if not isinstance(task, dict):
        raise ValueError(f"{where} is described by {task!r:.80}; {_DAMAGED}")
    for key, kind in kinds.items():
        if key in task and not isinstance(task[key], kind):
            raise ValueError(f"{where}: {key} is {task[key]!r:.80}; {_DAMAGED}")
    for name in task.get("shared", []):
        if not isinstance(name, str):
            raise ValueError(f"{where}: `shared` holds {name!r:.80}; {_DAMAGED}")
    for name, tail in task.get("tails", {}).items():
        shape = tail.get("shape") if isinstance(tail, dict) else None
        if not isinstance(shape, list) or not all(map(_is_size, shape)):
            raise ValueError(f"{where}: the tail of {name!r} is {tail!r:.80}; {_DAMAGED}")


def _bytes(name: str) -> int:
    return len(name.encode("utf-8", "surrogatepass"))


def _is_size(value: object) -> bool:
    # For Python, true and false are numbers; torch counts in 64-bit integers.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def verify_own(root: Path, manifest: dict[str, Any], names: list[str]) -> None:
    """Compares files of the folder with their SHA-256 in `emr.json`; early folders have none."""
    told = manifest.get("files") or {}
    for name in names if isinstance(told, dict) else ():
        expected = told.get(name)
        if isinstance(expected, dict) and (root / name).is_file():
            with open(root / name, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if expected.get("sha256") not in (None, digest):
                raise ValueError(f"{root / name}: its SHA-256 is {digest}, not that of emr.json; {_DAMAGED}")


def find_base(root: Path, manifest: dict[str, Any], base: str | os.PathLike[str] | None = None) -> _Files:
    """Finds and verifies the base checkpoint: the length of each file and, where `emr.json` has it, its SHA-256."""
    known = manifest["base"]
    source, revision, files = known.get("source"), known.get("revision"), known.get("files") or {}
    named = f"{source} at commit {revision}" if revision else str(source)
    if base is not None:
        place = Path(base).expanduser()
    elif known.get("folder") == "base":
        place = root / "base"
    else:
        # Unlike Path.expanduser it leaves "~nobody" as it is.
        place = Path(os.path.expanduser(str(source)))
        # A relative path is one from the folder; early folders have them from where the merge ran.
        if not place.is_absolute() and (root.resolve() / place).exists():
            place = root.resolve() / place
    alone = place.is_file() and len(files) == 1
    if not place.is_dir() and not alone:
        raise ValueError(
            f"the base of the merge, {named}, is not at {place}: these weights are restored from it. "
            f"Download {', '.join(files)} of {named} and pass the folder as base"
        )
    artifact = base is None and known.get("folder") == "base"
    paths = {file: place if alone else inside(place, file, root if artifact else place) for file in files}
    for file, expected in files.items():
        _verify(paths[file], expected, named)
    return _Files(paths, f"the base {named}")


def inside(folder: Path, file: str, root: Path) -> Path:
    """The path of a safetensors file of a folder."""
    if not isinstance(file, str) or not _FILE.fullmatch(file):
        raise ValueError(f"{folder}: {file!r} is not the name of a .safetensors file; do not trust this folder")
    path = folder / file
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file; download it, or write the folder again")
    if not stays_inside(root, path):
        raise ValueError(f"{path}: a link that leaves the folder; copy the file into it")
    return path


def stays_inside(folder: Path, path: Path) -> bool:
    """Whether a path really lies in a folder, or in the download cache that the folder is part of."""
    home, target = folder.resolve(), path.resolve()
    allowed = [home]
    for commit in (home, *home.parents):
        repository = commit.parent.parent
        if commit.parent.name == "snapshots" and repository.name.startswith(("models--", "datasets--", "spaces--")):
            allowed += [repository / "blobs", repository.parent / "blobs"]
    return any(target.is_relative_to(place) for place in allowed)


_DAMAGED = "the folder is damaged: download it, or write it, again"


class _Files:
    """Tensors of several safetensors files, mapped into memory and read when they are asked for."""

    def __init__(self, files: dict[str, Path], what: str) -> None:
        self._what = what
        self._holders: dict[str, Any] = {}
        for path in files.values():
            try:
                opened: Any = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{path}: not a safetensors file ({error}); {_DAMAGED}") from error
            self._holders.update(dict.fromkeys(opened.keys(), opened))

    def names(self) -> Iterator[str]:
        return iter(self._holders)

    def get(self, name: str) -> torch.Tensor:
        if name not in self._holders:
            raise ValueError(f"{self._what}: there is no tensor {name!r}; {_DAMAGED}")
        try:
            tensor: torch.Tensor = self._holders[name].get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{self._what}: {name!r} cannot be read ({error}); {_DAMAGED}") from error
        return tensor


def _task(manifest: dict[str, Any], task: str) -> dict[str, Any]:
    if task not in manifest["tasks"]:
        raise ValueError(f"there is no task {task!r}; the tasks are {', '.join(map(repr, manifest['tasks']))}")
    if not _TASK.fullmatch(task):
        raise ValueError(f"{task!r} is not the name of a task (A-Z, a-z, 0-9, '.', '_', '-'); do not trust the folder")
    description: dict[str, Any] = manifest["tasks"][task]
    return description


def _base_name(description: dict[str, Any], name: str) -> str:
    """The name in the base of a tensor of the task: `bert.pooler.weight` may be `pooler.weight` there."""
    return str(description.get("base_prefix", "")) + name.removeprefix(description.get("task_prefix", ""))


def _scale(description: dict[str, Any], name: str) -> float:
    scales = description.get("scales")
    try:
        scale = float.fromhex(scales[name] if scales is not None else description["scale_hex"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"emr.json: no scale for {name!r} ({error!r}); {_DAMAGED}") from error
    if not math.isfinite(scale):
        raise ValueError(f"emr.json: the scale of {name!r} is {scale}; {_DAMAGED}")
    return scale


def _verify(path: Path, expected: dict[str, Any], named: str) -> None:
    """Refuses a file that is not the one that was merged."""
    found: dict[str, Any] = {"bytes": path.stat().st_size}
    with open(path, "rb") as file:
        prefix = file.read(8)
        header = file.read(min(int.from_bytes(prefix, "little"), _MAX_JSON_BYTES))
        found["header_sha256"] = hashlib.sha256(prefix + header).hexdigest()
        if expected.get("sha256"):
            file.seek(0)
            found["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
    for key, value in found.items():
        if expected.get(key) not in (None, value):
            raise ValueError(
                f"{path}: {key} is {value}, that of the base of the merge is {expected[key]}: this is another "
                f"checkpoint than {named}. Pass the folder of that one as base"
            )


def main(arguments: list[str] | None = None) -> None:
    """The command: FOLDER TASK OUT.safetensors."""
    parser = argparse.ArgumentParser(description="Writes the weights of one task of an EMR-Merging folder.")
    parser.add_argument("folder", help="the folder with emr.json")
    parser.add_argument("task", help="name of the task")
    parser.add_argument("out", type=Path, help="the .safetensors file to write")
    parser.add_argument("--base", help="folder of the base checkpoint, if it is not where emr.json says")
    given = parser.parse_args(arguments)
    partial = given.out.with_name(f".{given.out.name}.partial")
    try:
        save_file(restore(given.folder, given.task, given.base), partial, metadata={"format": "pt"})
        os.replace(partial, given.out)
    except (ValueError, OSError) as error:
        raise SystemExit(f"emr_loader: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
