# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Restores the weights of one task from a folder that EMR-Merging (arXiv 2405.17461) wrote.

This file travels with the folder and needs torch and safetensors only:

    python emr_loader.py FOLDER TASK OUT.safetensors [--base BASE]

or, in Python, `restore(folder, task, base=None)`. A task's weights are W_0 + λ·(W_uni - W_0) where its mask is set and
W_0 elsewhere, computed in fp32 and rounded once: W_0 are the weights of the base, W_uni those at the root of the
folder, the mask is in `tasks/<task>/mask.safetensors` (one bit an element, lowest bit first), λ in `emr.json`. What
was not merged is in `tasks/<task>/extra.safetensors`, or equal to the base. Where `emr.json` has `deltas`, there is no
W_uni: a bit says W_0 + λ or W_0 - λ, and with two bits the second one whether it is not W_0.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

TASK_ID = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,64}")
# A file without a folder before it, and not hidden; and one in a folder of the artifact.
_FILE = re.compile(r"[\w\-][\w.\- ]*")
OWN_FILE = re.compile(rf"({_FILE.pattern}/)*{_FILE.pattern}")
_MAX_JSON_BYTES = 100_000_000
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_OF_A_TASK = ("mask.safetensors", "extra.safetensors")
# Elements restored at once; a multiple of 8, so that every piece starts with a byte of the mask.
_PIECE, _PIECE_GPU = 2**18, 2**26


def restore(
    folder: str | os.PathLike[str], task: str, base: str | os.PathLike[str] | None = None
) -> dict[str, Tensor]:
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
    if task not in manifest["tasks"]:
        raise ValueError(f"there is no task {task!r}; the tasks are {', '.join(map(repr, manifest['tasks']))}")
    description = manifest["tasks"][task]
    weights = _Files([inside(root, file, root) for file in manifest["unified"]["files"]], "the root weights")
    started = find_base(root, manifest, base)
    here = root / "tasks" / task
    masks = _Files([inside(here, _OF_A_TASK[0], root)], f"the masks of {task}")
    own = [f"tasks/{task}/{kind}" for kind in _OF_A_TASK]
    has_extras = own[1] in manifest["files"] or (root / own[1]).exists()
    extras = _Files([inside(here, _OF_A_TASK[1], root)] if has_extras else [], f"the extras of {task}")
    for name in (*manifest["unified"]["files"], *own):
        if (root / name).is_file():
            told = {"sha256": manifest["files"].get(name, {}).get("sha256")}
            _verify(root / name, told, f"its SHA-256 is not that of emr.json; {_DAMAGED}")
    tensors = {entry["name"]: entry for entry in manifest["tensors"] if entry["elements"]}

    restored: dict[str, Tensor] = {}
    for name in masks.holders:
        source = _base_name(description, name)
        if source not in tensors:
            raise ValueError(f"{here}: mask of {name!r}, but emr.json has no merged {source!r}; {_DAMAGED}")
        scale = description.get("scales", {}).get(name, description.get("scale_hex"))
        if scale is None:
            raise ValueError(f"{here}: emr.json has no scale for {name!r}; {_DAMAGED}")
        record, planes = tensors[source], manifest.get("deltas") or 0
        merged = torch.empty(0, dtype=_DTYPES[record["dtype"]]) if planes else weights.get(source)
        leading = restore_tensor(
            started.get(source), merged, masks.get(name), float.fromhex(scale), record["elements"], planes
        )
        tail = extras.get(name).flatten() if name in extras.holders else leading[:0]
        shape = description["tails"].get(name, {}).get("shape", tuple(tensors[source]["shape"]))
        if tail.dtype != leading.dtype or math.prod(shape) != len(leading) + len(tail):
            raise ValueError(f"{here}: {name!r} of shape {list(shape)} does not fit its parts; {_DAMAGED}")
        restored[name] = torch.cat([leading, tail]).reshape(tuple(shape)) if len(tail) else leading.reshape(shape)
    for name in extras.holders.keys() - restored.keys():
        restored[name] = extras.get(name).clone()
    for name in description.get("shared") or ():
        restored[name] = started.get(_base_name(description, name)).clone()
    return restored


def restore_tensor(base: Tensor, unified: Tensor, mask: Tensor, scale: float, length: int, planes: int = 0) -> Tensor:
    """
    Restores the leading elements of one tensor. With `planes` the mask holds signs, and in a second plane which of
    them are moved; of the unified tensor the type alone is used.
    """
    rows = max(planes, 1)
    if not planes and (base.shape != unified.shape or unified.dtype not in _FLOATS):
        raise ValueError(
            f"a tensor of the base has the shape {list(base.shape)}, its merged one {list(unified.shape)} of "
            f"{unified.dtype}; {_DAMAGED}"
        )
    if mask.dtype != torch.uint8 or mask.ndim != 1 or len(mask) % rows or 8 * len(mask) < rows * length:
        raise ValueError(f"a mask of {length} elements needs {rows * -(-length // 8)} bytes; {_DAMAGED}")
    if base.dtype not in _FLOATS or base.numel() < length:
        raise ValueError(f"a tensor of the base is {base.dtype} {list(base.shape)}, {length} were merged; {_DAMAGED}")
    out = torch.empty(length, dtype=unified.dtype)
    restore_into(base.flatten(), unified.flatten(), mask.view(rows, -1), scale, planes, out)
    return out


def restore_into(base: Tensor, unified: Tensor, mask: Tensor, scale: float, planes: int, out: Tensor) -> None:
    """The same without checks, on any device: flat tensors, of which `out` has those elements, and rows of a mask."""
    places = torch.arange(8, dtype=torch.uint8, device=base.device)
    step = _PIECE if base.device.type == "cpu" else _PIECE_GPU
    for start in range(0, len(out), step):
        here = slice(start, min(start + step, len(out)))
        packed = mask[:, start // 8 : -(-here.stop // 8), None] >> places & 1
        bits, before = packed.flatten(1)[:, : here.stop - start].bool(), base[here].float()
        if planes:
            moved = torch.where(bits[0], before + scale, before - scale)
        else:
            moved = (unified[here].float() - before).mul_(scale).add_(before)
        out[here] = moved if planes == 1 else torch.where(bits[-1], moved, before)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Reads and checks `emr.json`: whoever has it may use its values, but for what only the files can tell."""
    path = folder / "emr.json"
    if not path.is_file():
        raise ValueError(f"{folder}: there is no emr.json; give the folder that EMR-Merging wrote")
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise ValueError(f"{path}: larger than {_MAX_JSON_BYTES:,} bytes; {_DAMAGED}")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}); {_DAMAGED}") from error
    try:
        _check_manifest(manifest)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; {_DAMAGED}") from error
    return dict(manifest)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key comes twice")
    return found


def _is_size(value: object) -> bool:
    # For Python, true and false are numbers; torch counts in 64-bit integers.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _is_exact(value: object) -> bool:
    try:
        return isinstance(value, str) and _is_number(float.fromhex(value))
    except (ValueError, OverflowError):
        return False


def _is_list(value: object, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(fits, value))


def _is_hexadecimal(value: object, *lengths: int) -> bool:
    return isinstance(value, str) and len(value) in lengths and not re.search("[^0-9a-f]", value)


# What a value of emr.json must be: in words, and a test of it. A key that is not there has the value None.
_Rules = dict[str, tuple[str, Callable[[Any], bool]]]
_TEXT = ("a text", lambda value: isinstance(value, str))
_OBJECT = ("an object", lambda value: isinstance(value, dict))
_DIGEST = ("64 hexadecimal digits, or null", lambda value: value is None or _is_hexadecimal(value, 64))
_SHAPE = ("a list of sizes", lambda value: _is_list(value, _is_size))
_NAMES = ("a list of names", lambda value: value is None or _is_list(value, lambda name: isinstance(name, str)))
_VERSIONS = "1 or 2 (a newer hf-ext, or the loader of that folder, may read others)"
_MANIFEST: _Rules = {
    "format": ('"emr-merging"', lambda value: value == "emr-merging"),
    "format_version": (_VERSIONS, lambda value: value in (1, 2)),
    "deltas": ("1, 2 or missing", lambda value: value in (None, 1, 2)),
    "bit_order": ('"little"', lambda value: value == "little"),
    "hf_ext_version": _TEXT,
    "library": _TEXT,
    "base": _OBJECT,
    "unified": _OBJECT,
    "method": _OBJECT,
    "tensors": ("a list", lambda value: isinstance(value, list)),
    "aliases": _OBJECT,
    "tasks": ("an object with at least one task", lambda value: isinstance(value, dict) and bool(value)),
    "files": _OBJECT,
}
_ABOUT_FILE: _Rules = {"bytes": ("a length", _is_size), "sha256": _DIGEST, "header_sha256": _DIGEST}
_SOURCE: _Rules = {
    "source": ("a text of at most 4000 bytes", lambda value: isinstance(value, str) and not _is_long(value)),
    "revision": ("a commit, or null", lambda value: value is None or _is_hexadecimal(value, 40, 64)),
    "folder": ('"base" or null', lambda value: value in (None, "base")),
    "files": _OBJECT,
}
_TENSOR: _Rules = {"name": _TEXT, "shape": _SHAPE, "dtype": _TEXT, "elements": ("a number of elements", _is_size)}
_TASK: _Rules = _SOURCE | {
    "architecture": ("a text or null", lambda value: isinstance(value, str | None)),
    "base_prefix": _TEXT,
    "task_prefix": _TEXT,
    "density": ("a finite number, not negative", _is_number),
    "shared": _NAMES,
    "absent": _NAMES,
    "tails": _OBJECT,
}
_SCALE = ("a finite hexadecimal number in quotes, not negative", _is_exact)


def _check_manifest(manifest: Any) -> None:
    _check(manifest, "", _MANIFEST)
    fits = (manifest["format_version"] == 2) == ("deltas" in manifest)
    _expect(fits, "`deltas` belongs to format_version 2", manifest.get("deltas"))
    _check(manifest["base"], "the base", _SOURCE)
    _check_files(manifest["base"]["files"], _FILE)
    _check_files(manifest["unified"].get("files"), _FILE)
    _check_files(manifest["files"], OWN_FILE)
    elements = {}
    for tensor in manifest["tensors"]:
        _check(tensor, "an entry of `tensors`", {"name": _TEXT})
        _check(tensor, repr(tensor["name"]), _TENSOR)
        elements[tensor["name"]], most = tensor["elements"], math.prod(tensor["shape"])
        _expect(tensor["elements"] <= most, f"`elements` of {tensor['name']!r} must be from 0 to {most}", tensor)
        merged = not tensor["elements"] or tensor["dtype"] in ("F32", "F16", "BF16")
        _expect(merged, f"the merged tensor {tensor['name']!r} must be float32, float16 or bfloat16", tensor["dtype"])
    _expect(len(elements) == len(manifest["tensors"]), "no tensor may come twice in `tensors`", len(elements))
    for alias, name in manifest["aliases"].items():
        fits = isinstance(name, str) and name in elements and alias not in elements
        _expect(fits, "an alias must lead from a name that is not stored to one that is", {alias: name})
    for name, task in manifest["tasks"].items():
        _expect(bool(TASK_ID.fullmatch(name)), "a task must be named by [A-Za-z0-9._-]{1,64}", name)
        _check_task(task, f"task {name!r}")


def _check_task(task: Any, where: str) -> None:
    _check(task, where, _TASK)
    _check_files(task["files"], _FILE)
    _expect(("scale_hex" in task) != ("scales" in task), f"{where}: either scale_hex or scales is needed", task)
    _check(task, where, {"scales": _OBJECT} if "scales" in task else {"scale_hex": _SCALE})
    _check(task.get("scales", {}), "`scales`", dict.fromkeys(task.get("scales", {}), _SCALE))
    for name, tail in task["tails"].items():
        _check(tail, f"the tail of {name!r}", {"shape": _SHAPE})


def _check_files(files: Any, form: re.Pattern[str]) -> None:
    _expect(isinstance(files, dict), "`files` must be an object", files)
    for name, about in files.items():
        what = "a file must be named without folders" if form is _FILE else "a file must lie in the artifact"
        _expect(bool(form.fullmatch(name)) and not _is_long(name), f"{what}, by a name that no system refuses", name)
        _check(about, f"file {name!r}", _ABOUT_FILE)


def _check(record: Any, where: str, rules: _Rules) -> None:
    _expect(isinstance(record, dict), f"{where or 'the manifest'} must be an object", record)
    of = f" of {where}" if where else ""
    for key, (allowed, fits) in rules.items():
        _expect(fits(record.get(key)), f"`{key}`{of} must be {allowed}", record.get(key))


def _expect(fits: bool, what: str, value: object) -> None:
    if not fits:
        raise ValueError(f"{what}, got {value!r:.80}")


def _is_long(path: str) -> bool:
    """True for a path that the system refuses with an error of its own."""
    lengths = [len(part.encode("utf-8", "surrogatepass")) for part in path.split("/")]
    return max(lengths) > 255 or sum(lengths) + len(lengths) > 4000


def find_base(root: Path, manifest: dict[str, Any], base: str | os.PathLike[str] | None = None) -> _Files:
    """Finds and verifies the base checkpoint: the length of each file and, where `emr.json` has it, its SHA-256."""
    known = manifest["base"]
    source, files = known["source"], known["files"]
    named = f"{source} at commit {known['revision']}" if known.get("revision") else source
    if base is not None:
        place = Path(base).expanduser()
    elif known.get("folder") == "base":
        place = root / "base"
    else:
        # A relative path is one from the folder, but for a name on a Hub. "~nobody" stays as it is, unlike in Path.
        place = Path("" if known.get("revision") else root.resolve(), os.path.expanduser(source))
    alone = place.is_file() and len(files) == 1
    if not place.is_dir() and not alone:
        raise ValueError(
            f"the base of the merge, {named}, is not at {place}: these weights are restored from it. "
            f"Download {', '.join(files)} of {named} and pass the folder as base"
        )
    artifact = base is None and known.get("folder") == "base"
    paths = {file: place if alone else inside(place, file, root if artifact else place) for file in files}
    advice = f"this is another checkpoint than {named}. Pass the folder of that one as base"
    for file, expected in files.items():
        _verify(paths[file], expected, advice)
    return _Files(paths.values(), f"the base {named}")


def inside(folder: Path, file: str, root: Path) -> Path:
    """The path of a safetensors file of a folder."""
    if not _FILE.fullmatch(file) or not file.endswith(".safetensors"):
        raise ValueError(f"{folder}: {file!r} is not the name of a .safetensors file; do not trust this folder")
    path = folder / file
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file; download it, or write the folder again")
    if not stays_inside(root, path):
        raise ValueError(f"{path}: a link that leaves the folder; copy the file into it")
    return path


def stays_inside(folder: Path, path: Path) -> bool:
    """True for a path that really lies in a folder, or in the download cache that the folder is part of."""
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

    def __init__(self, paths: Iterable[Path], what: str) -> None:
        self._what = what
        self.holders: dict[str, Any] = {}
        for path in paths:
            try:
                opened: Any = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{path}: not a safetensors file ({error}); {_DAMAGED}") from error
            self.holders.update(dict.fromkeys(opened.keys(), opened))

    def get(self, name: str) -> Tensor:
        if name not in self.holders:
            raise ValueError(f"{self._what}: there is no tensor {name!r}; {_DAMAGED}")
        try:
            tensor: Tensor = self.holders[name].get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{self._what}: {name!r} cannot be read ({error}); {_DAMAGED}") from error
        return tensor


def _base_name(description: dict[str, Any], name: str) -> str:
    """The name in the base of a tensor of the task: `bert.pooler.weight` may be `pooler.weight` there."""
    return str(description["base_prefix"]) + name.removeprefix(description["task_prefix"])


def _verify(path: Path, expected: dict[str, Any], advice: str) -> None:
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
            raise ValueError(f"{path}: {key} is {value}, at the merge it was {expected[key]}: {advice}")


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
        partial.touch()
        # safetensors would let nobody but its maker read it.
        mode = partial.stat().st_mode
        save_file(restore(given.folder, given.task, given.base), partial, metadata={"format": "pt"})
        partial.chmod(mode)
        os.replace(partial, given.out)
    except (ValueError, OSError, SafetensorError) as error:
        raise SystemExit(f"emr_loader: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
