"""Files of an artifact: weights, masks and sums, opened only if they match the manifest, including hashes.

A flipped bit in a mask is a wrong weight like any other, so `emr.json` has the hash of every file beside it, but of
those that are written anew without it: card and report.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.numpy import save

from ..files import read_json, write_json
from ..hub.checkpoints import Checkpoint, explain_hub, open_checkpoint, split_id
from ..hub.file_hashes import file_sha256
from ..hub.header_format import CheckpointError
from .arithmetic import SUMS, TOTALS
from .emr_loader import OWN_FILE
from .manifest import MANIFEST, Manifest, artifact_file, find_folder

# Sums of a task in its folder, those of all tasks at the root: scales and report follow from them without checkpoints.
FILE = "sums.safetensors"
# Beside the files that a manifest names.
UNNAMED = (MANIFEST, "README.md", "report.json", "report.png", ".eval_results/hf_ext.yaml")


def mask_bytes(elements: int) -> int:
    """Length of the mask of a tensor: one bit an element, rounded up to 64 bytes."""
    return -(-elements // 512) * 64


def open_unified(folder: str | Path, manifest: Manifest) -> Checkpoint:
    for name in manifest.unified:
        _own_file(folder, manifest, name)
    with _close_on_error(folder) as unified:
        found = {name: (unified.info(name).shape, unified.info(name).dtype) for name in unified}
        told = {tensor.name: (tensor.shape, tensor.dtype) for tensor in manifest.tensors}
        differing = sorted(name for name in found.keys() | told.keys() if found.get(name) != told.get(name))
        require(not differing, folder, f"the root weights and the manifest differ in {differing[:3]}")
    return unified


def open_masks(folder: str | Path, manifest: Manifest, task: str) -> Checkpoint:
    """Opens the masks of a task: uint8 by its names; bit i of a flat tensor is `(byte[i // 8] >> i % 8) & 1`."""
    for name in manifest.files:
        # In place of a lost one the root's would be taken; sums are not fetched where nobody reads them.
        if name.startswith(f"tasks/{task}/") and not name.endswith(FILE):
            artifact_file(folder, name)
    path = _own_file(folder, manifest, f"tasks/{task}/mask.safetensors")
    record, merged = manifest.tasks[task], manifest.merged
    with _close_on_error(path) as masks:
        for name in masks:
            require(record.base_name(name) in merged, path, f"{name!r} is the mask of no merged tensor")
            base, info = merged[record.base_name(name)], masks.info(name)
            found, expected = info.shape, ((manifest.deltas or 1) * mask_bytes(base.elements),)
            fits = found == expected and info.dtype == torch.uint8
            needed = f"{base.elements} elements need {expected} of uint8"
            require(fits, path, f"{name!r} is {found} of {info.dtype}, {needed}")
            require(record.scale is not None or name in record.scales, path, f"{name!r} has no scale")
    return masks


def open_extras(folder: str | Path, manifest: Manifest, task: str) -> Checkpoint | None:
    """Opens the tensors that a task keeps as they are."""
    record, merged, file = manifest.tasks[task], manifest.merged, f"tasks/{task}/extra.safetensors"
    if not record.tails and file not in manifest.files and not Path(folder, file).exists():
        return None
    path = _own_file(folder, manifest, file)
    with _close_on_error(path) as extras:
        for name, shape in record.tails.items():
            fits = name in extras and record.base_name(name) in merged
            require(fits, path, f"no tail of {name!r}, of which the manifest tells")
            length = math.prod(shape) - merged[record.base_name(name)].elements
            found, expected = extras.info(name).shape, (length,)
            require(found == expected, path, f"the tail of {name!r} has shape {found}, expected {expected}")
    return extras


def read_sums(folder: str | Path, manifest: Manifest, task: str) -> np.ndarray:
    """Reads the sums of a task: fp64 `[merged tensors, 10]`, columns as `SUMS`, 0 where it takes no part."""
    path = _own_file(folder, manifest, f"tasks/{task}/{FILE}")
    (sums,) = _read(path, SUMS, sums=(len(manifest.merged), len(SUMS)))
    require(bool(np.isfinite(sums).all() and (sums[:, :7] >= 0).all()), path, "contains impossible sums")
    return sums


def _own_file(folder: str | Path, manifest: Manifest, name: str) -> Path:
    """The path of a file, which is as the merge wrote it. It is read once, and again only after it changed."""
    path, told = artifact_file(folder, name), {**manifest.unified.get(name, {}), **manifest.files.get(name, {})}
    fault = find_fault(path, told) if told else None
    require(fault is None, path, f"not as the merge wrote it ({fault})")
    return path


@contextlib.contextmanager
def _close_on_error(source: str | Path) -> Iterator[Checkpoint]:
    checkpoint = open_checkpoint(source)
    try:
        yield checkpoint
    except CheckpointError:
        checkpoint.close()
        raise


def require(fits: bool, where: str | Path, what: str) -> None:
    """Refuses what does not fit the manifest."""
    if not fits:
        raise CheckpointError(f"{where}: {what}; the artifact is damaged: download it again, or merge again.")


def write_sums(folder: Path, task: str, sums: np.ndarray) -> None:
    _write(folder / "tasks" / task / FILE, SUMS, sums=sums)


def write_totals(folder: Path, totals: np.ndarray, gram: np.ndarray) -> None:
    """Writes the sums that belong to no task alone."""
    _write(folder / FILE, TOTALS, totals=totals, gram=gram)


def read_totals(folder: Path, manifest: Manifest) -> tuple[np.ndarray, np.ndarray]:
    """Reads what [`write_totals`] wrote: totals `[merged tensors, 4]` and sampled inner products `[N, N]`."""
    tasks = len(manifest.tasks)
    shapes = {"totals": (len(manifest.merged), len(TOTALS)), "gram": (tasks, tasks)}
    totals, gram = _read(artifact_file(folder, FILE), TOTALS, **shapes)
    return totals, gram


def _read(path: Path, columns: Sequence[str], **shapes: tuple[int, ...]) -> list[np.ndarray]:
    with open_checkpoint(path) as file:
        expected = {name: (shape, torch.float64) for name, shape in shapes.items()}
        found = {name: (file.info(name).shape, file.info(name).dtype) for name in file}
        require(found == expected, path, f"holds {found}, expected {expected}")
        require(file.metadata.get("columns") == ",".join(columns), path, "has other columns")
        return [file[name].numpy() for name in shapes]


def _write(path: Path, columns: Sequence[str], **arrays: np.ndarray) -> None:
    # a new file: the one that is there may be shared with an artifact that is being replaced
    path.unlink(missing_ok=True)
    exact = {name: np.ascontiguousarray(array, np.float64) for name, array in arrays.items()}
    path.write_bytes(save(exact, metadata={"columns": ",".join(columns)}))


def find_code(config: Mapping[str, Any]) -> set[str]:
    """The files of code beside the weights that `auto_map` of a configuration names, perhaps several for a part."""
    parts = (config.get("auto_map") or {}).values()
    named = [name for part in parts for name in (part if isinstance(part, list) else [part])]
    return {f"{name.partition('.')[0]}.py" for name in named if isinstance(name, str) and "--" not in name}


class Verification(NamedTuple):
    """The result of reading an artifact through."""

    files: int  # files whose hash was compared
    bytes: int  # their length together
    wrong: list[str]  # what is wrong, one line for each file
    notes: list[str]  # what could not be compared


def list_files(folder: Path) -> list[str]:
    """Lists the files that a manifest names."""
    paths = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    names = [path.as_posix() for path in paths]
    return [name for name in names if OWN_FILE.fullmatch(name) and name not in UNNAMED]


def hash_files(
    folder: Path, names: Iterable[str] | None = None, *, known: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, dict[str, Any]]:
    kept = {name: dict(about) for name, about in (known or {}).items() if name.endswith(".safetensors")}
    return {
        name: kept.get(name) or {"bytes": (folder / name).stat().st_size, "sha256": file_sha256(folder / name)}
        for name in (list_files(folder) if names is None else names)
    }


def verify_artifact(folder: str | Path) -> Verification:
    """Compares every file of an artifact with its manifest, and the files of the base if it is on this disk."""
    place = Path(folder).expanduser()
    manifest = Manifest.read(place)
    told, notes = {name: (place / name, about) for name, about in manifest.files.items()}, []
    base, inside = manifest.base, manifest.base.folder
    at = place / inside if inside is not None else find_folder(base.source, place)
    if inside is None and (base.revision is not None or not at.is_dir()):
        notes.append(f"the base, {base.source}, was not read: it is not at the path that the artifact names.")
    else:
        told |= {f"{inside or at}/{name}": (at / name, about) for name, about in base.files.items()}
    wrong, count, size = [], 0, 0
    for name, (path, about) in told.items():
        if (fault := find_fault(path, about, fresh=True)) is not None:
            wrong.append(f"{name}: {fault}")
        elif about.get("sha256"):
            count, size = count + 1, size + about["bytes"]
    extra = sorted(set(list_files(place)) - manifest.files.keys())
    notes += [f"{name}: not compared, since it is not a file of the merge." for name in extra]
    return Verification(count, size, wrong, notes)


def find_fault(path: Path, about: Mapping[str, Any], *, fresh: bool = False) -> str | None:
    """The difference of a file from what a manifest says of it; `fresh`: it is read now, whatever was known."""
    if not path.is_file():
        return "missing"
    size = path.stat().st_size
    if size != about["bytes"]:
        return f"{size:,} bytes, expected {about['bytes']:,}"
    if about.get("sha256") and file_sha256(path, fresh=fresh) != about["sha256"]:
        return "changed since the merge: its SHA-256 differs"
    return None


# The root loads like any checkpoint, but its predictions belong to no task: those of merged restorers were worse than
# the input. So its configuration names the tasks, and a loader can recognise it.
MARK = "emr_tasks"


def mark_root(folder: Path, tasks: Sequence[str]) -> None:
    """Writes the names of the tasks into the root's `config.json`, as a new file: an artifact may share the old one.

    Nothing is done for diffusers, which complains of keys that it does not know, for adapters, and where a task has no
    `config.json` of its own and so takes the root's.
    """
    path = folder / "config.json"
    if path.is_file() and all((folder / "tasks" / task / path.name).is_file() for task in tasks):
        config = read_json(path)
        if isinstance(config, dict) and "_diffusers_version" not in config:
            write_json(path, config | {MARK: list(tasks)})


def read_tasks(source: str | Path) -> list[str] | None:
    """The tasks of a merge; None of what is none, or cannot be asked: whoever loads it next says what is wrong."""
    folder = Path(source).expanduser()
    if not folder.exists():
        with contextlib.suppress(CheckpointError):
            folder = fetch_file(str(source), MANIFEST).parent
    return list(Manifest.read(folder).tasks) if (folder / MANIFEST).is_file() else None


class HubFiles(NamedTuple):
    """Files of a repository of a Hub at one commit."""

    repo_id: str
    commit: str
    token: str | bool | None
    endpoint: str | None

    def fetch(self, allowed: Iterable[str], ignored: Iterable[str] = (), **options: Any) -> Path:
        """The snapshot in the cache, with the files of these patterns."""
        from huggingface_hub import HfApi

        with explain_hub(f"{', '.join(allowed)} of {self.repo_id}@{self.commit[:12]}", self.endpoint):
            chosen: dict[str, Any] = {"allow_patterns": list(allowed), "ignore_patterns": list(ignored) or None}
            api = HfApi(endpoint=self.endpoint, token=self.token)
            return Path(api.snapshot_download(self.repo_id, revision=self.commit, **chosen, **options))


def fetch_file(source: str, file: str, *, token: str | bool | None = None, endpoint: str | None = None) -> Path:
    """One file of `org/name[@revision]`, in the cache."""
    from huggingface_hub import hf_hub_download

    name, revision = split_id(source)
    with explain_hub(f"{file} of {source}", endpoint):
        return Path(hf_hub_download(name, file, revision=revision, token=token, endpoint=endpoint))
