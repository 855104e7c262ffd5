"""`emr.json`, the manifest of a merge: what was merged, from where, and how a task is restored.

What comes from a folder or a Hub is believed only after it has been checked: names, numbers, types, links. The checks
stand in `emr_loader.py`, which travels with artifacts and reads them without this package.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..files import stays_inside, write_json
from ..hub.checkpoints import DTYPE_NAMES
from ..hub.header_format import CheckpointError
from .arithmetic import RESCALES
from .emr_loader import read_manifest

MANIFEST = "emr.json"
FORMAT = "emr-merging"
# 2 where the tasks are deltas, which readers of 1 cannot read.
FORMAT_VERSION, DELTAS_VERSION = 1, 2
# Names of weight files that `from_pretrained` of each library looks for.
WEIGHT_STEMS = {"transformers": "model", "diffusers": "diffusion_pytorch_model", "peft": "adapter_model"}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class TensorRecord:
    """A tensor of the root weights."""

    name: str  # its name, which is the base's
    shape: tuple[int, ...]
    dtype: torch.dtype
    elements: int  # leading elements that were merged; 0 where the tensor is the base's


@dataclass(frozen=True)
class SourceRecord:
    source: str  # `org/name`, or a path, relative ones to the artifact (`manifest`)
    revision: str | None  # commit, of a Hub
    files: dict[str, dict[str, Any]]  # `bytes`, `sha256` (or `None`) and `header_sha256` of every weight file
    folder: str | None = None  # `"base"` when the weights lie in the artifact

    def as_given(self) -> dict[str, Any]:
        """The source as a task records it."""
        return {"source": self.source, "revision": self.revision, "files": self.files}


@dataclass(frozen=True)
class TaskRecord:
    origin: SourceRecord  # its checkpoint
    architecture: str | None  # class of its model
    base_prefix: str  # name in the root weights = `base_prefix` + the task's name without `task_prefix`
    task_prefix: str
    scale: float | None  # λ; `None` where every tensor has its own
    density: float  # share of mask bits that are set
    # λ by the task's tensor names, for the rescale modes by tensor
    scales: dict[str, float] = field(default_factory=dict)
    shared: tuple[str, ...] = ()  # the task's tensors that equal the base's
    absent: tuple[str, ...] = ()  # files of the root that are none of the task's
    # full shapes of tensors whose leading elements are merged and whose others are in `extra.safetensors`
    tails: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def base_name(self, name: str) -> str:
        """Name in the root weights and in the base."""
        return self.base_prefix + name.removeprefix(self.task_prefix)


@dataclass(frozen=True)
class Manifest:
    """`emr.json`: what an artifact holds and how to restore a task from it."""

    library: str  # `transformers`, `diffusers` or `peft`
    base: SourceRecord  # the pretrained weights
    unified: dict[str, dict[str, Any]]  # `bytes` of every file of the root weights
    method: dict[str, Any]  # options that decided the numbers
    tensors: tuple[TensorRecord, ...]  # tensors of the root weights
    aliases: dict[str, str]  # tied names, to the name that is stored
    tasks: dict[str, TaskRecord]  # tasks by name
    version: str  # version of the package that wrote it
    # `bytes` and `sha256` of the artifact's files by path
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    # bits an element of tasks that are deltas (see `arithmetic`); 0 where masks choose from a unified model
    deltas: int = 0

    @property
    def merged(self) -> dict[str, TensorRecord]:
        """The merged tensors in order, by name."""
        return {tensor.name: tensor for tensor in self.tensors if tensor.elements}

    @classmethod
    def read(cls, folder: str | Path) -> Manifest:
        path = artifact_file(folder, MANIFEST)
        try:
            record = read_manifest(Path(folder))
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        _check_for_this_package(record, path)
        return cls(
            **{name: record[name] for name in ("library", "method", "aliases", "files")},
            base=_source(record["base"]),
            unified=record["unified"]["files"],
            tensors=tuple(
                TensorRecord(tensor["name"], tuple(tensor["shape"]), _DTYPES[tensor["dtype"]], tensor["elements"])
                for tensor in record["tensors"]
            ),
            tasks={name: _task(task) for name, task in record["tasks"].items()},
            version=record["hf_ext_version"],
            deltas=record.get("deltas") or 0,
        )

    def write(self, folder: str | Path) -> None:
        """Writes `emr.json`, complete or not at all."""
        record = {
            "format": FORMAT,
            "format_version": DELTAS_VERSION if self.deltas else FORMAT_VERSION,
            **({"deltas": self.deltas} if self.deltas else {}),
            "hf_ext_version": self.version,
            "library": self.library,
            "bit_order": "little",
            "base": vars(self.base),
            "unified": {"files": self.unified},
            "method": self.method,
            "tensors": [{**vars(tensor), "dtype": DTYPE_NAMES[tensor.dtype]} for tensor in self.tensors],
            "aliases": self.aliases,
            "tasks": {name: _task_dict(task) for name, task in self.tasks.items()},
            "files": self.files,
        }
        write_json(Path(folder, MANIFEST), record, indent=1)


def artifact_file(folder: str | Path, *parts: str) -> Path:
    """Path of a file of an artifact, which has to be there and to be its own."""
    folder = Path(folder)
    path = folder.joinpath(*parts)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; check that the folder is a complete artifact of a merge.")
    if not stays_inside(folder, path):
        raise CheckpointError(f"{path}: a link that leaves the folder of the artifact; copy the file into it.")
    return path


def _task_dict(task: TaskRecord) -> dict[str, Any]:
    by_tensor = {"scales": {name: scale.hex() for name, scale in task.scales.items()}}
    return {
        **task.origin.as_given(),
        **{key: getattr(task, key) for key in ("architecture", "base_prefix", "task_prefix")},
        **(by_tensor if task.scale is None else {"scale": task.scale, "scale_hex": task.scale.hex()}),
        "density": task.density,
        "shared": task.shared,
        **({"absent": task.absent} if task.absent else {}),
        "tails": {name: {"shape": shape} for name, shape in task.tails.items()},
    }


def _check_for_this_package(record: dict[str, Any], path: Path) -> None:
    """Checks what `emr_loader.read_manifest` has not, and only this package needs to be right."""
    types = {tensor["name"]: tensor["dtype"] for tensor in record["tensors"]}
    known = sorted(_DTYPES)
    wrong = [f"`dtype` of {name!r} must be one of {known}" for name, dtype in types.items() if dtype not in known]
    if record["method"].get("rescale") not in RESCALES:
        wrong.append(f"`rescale` must be one of {RESCALES}")
    statistics, merged = record["method"].get("statistics", {}), record["method"].get("merged") or ""
    texts = [merged, *statistics.values()] if isinstance(statistics, dict) else [None]
    if not all(isinstance(text, str) for text in texts):
        wrong.append("`statistics` must be a mapping of tasks to texts, and `merged` a text or null")
    if wrong:
        raise CheckpointError(f"{path}: {wrong[0]}: fetch the artifact again, or merge again.")


def _source(record: Mapping[str, Any]) -> SourceRecord:
    return SourceRecord(record["source"], record.get("revision"), record["files"], record.get("folder"))


def _task(record: Mapping[str, Any]) -> TaskRecord:
    return TaskRecord(
        origin=_source(record),
        architecture=record.get("architecture"),
        base_prefix=record["base_prefix"],
        task_prefix=record["task_prefix"],
        scale=float.fromhex(record["scale_hex"]) if "scale_hex" in record else None,
        density=float(record["density"]),
        scales={name: float.fromhex(scale) for name, scale in record.get("scales", {}).items()},
        shared=tuple(record.get("shared") or ()),
        absent=tuple(record.get("absent") or ()),
        tails={name: tuple(tail["shape"]) for name, tail in record["tails"].items()},
    )


def recorded_path(spec: str, folder: str | Path) -> str:
    """The path of a local checkpoint as an artifact records it: a relative one from the artifact, so that it holds
    from any working folder, and after both were moved together; an absolute one as it is."""
    path = Path(spec).expanduser()
    if path.is_absolute():
        return str(path)
    # Links are followed first: `..` after a link leads elsewhere than it looks.
    real = os.path.realpath(path)
    try:
        relative = os.path.relpath(real, os.path.realpath(folder))
    except ValueError:
        # Another drive of Windows.
        return real
    # Whatever is told apart from `org/name`, and has a name of its own at the end.
    return relative if relative.startswith("..") and Path(relative).name != ".." else real


def find_recorded(source: str, folder: str | Path) -> Path:
    """The place of a local checkpoint that [`recorded_path`] wrote down."""
    path = Path(source).expanduser()
    return path if path.is_absolute() else Path(os.path.normpath(Path(os.path.realpath(folder)) / path))


def find_folder(source: str, folder: str | Path) -> Path:
    """The folder in which the weights of such a checkpoint lie, which may have been given by its file."""
    place = find_recorded(source, folder)
    return place.parent if place.is_file() else place
