"""`emr.json`, the manifest of a merge: what was merged, from where, and how a task is restored.

What comes from a folder or a Hub is believed only after it has been checked: names, numbers, types, links. The layout
of an artifact is described in `emr_loader.py`, which reads it without this package.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..files import stays_inside, write_json
from ..hub.safetensors_headers import DTYPE_NAMES, CheckpointError, parse_json_object
from .arithmetic import DTYPES, RESCALES

MANIFEST = "emr.json"
FORMAT = "emr-merging"
FORMAT_VERSION = 1
TASK_ID = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,64}")
# A file without a folder before it, and not hidden.
_FILE = re.compile(r"[\w\-][\w.\- ]*")
OWN_FILE = re.compile(rf"({_FILE.pattern}/)*{_FILE.pattern}")
_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_SHA256 = re.compile(r"[0-9a-f]{64}")
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
    """Where weights came from."""

    source: str  # `org/name`, or a path, relative ones to the artifact (`manifest`)
    revision: str | None  # commit, of a Hub
    files: dict[str, dict[str, Any]]  # `bytes`, `sha256` (or `None`) and `header_sha256` of every weight file
    folder: str | None = None  # `"base"` when the weights lie in the artifact


@dataclass(frozen=True)
class TaskRecord:
    """A task of the artifact."""

    origin: SourceRecord  # its checkpoint
    architecture: str | None  # class of its model
    base_prefix: str  # name in the root weights = `base_prefix` + the task's name without `task_prefix`
    task_prefix: str
    scale: float | None  # λ; `None` where every tensor has its own
    density: float  # share of mask bits that are set
    # λ by the task's tensor names, for the rescale modes by tensor
    scales: dict[str, float] = field(default_factory=dict)
    shared: tuple[str, ...] = ()  # the task's tensors that equal the base's
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
    # `bytes` and `sha256` of the artifact's files by path; empty in early artifacts
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def merged(self) -> dict[str, TensorRecord]:
        """The merged tensors in order, by name."""
        return {tensor.name: tensor for tensor in self.tensors if tensor.elements}

    @classmethod
    def read(cls, folder: str | Path) -> Manifest:
        """Reads and verifies `emr.json`."""
        path = artifact_file(folder, MANIFEST)
        return _parse(parse_json_object(path.read_bytes(), str(path)), str(path))

    def write(self, folder: str | Path) -> Path:
        """Writes `emr.json`, complete or not at all."""
        path = Path(folder, MANIFEST)
        write_json(path, _to_dict(self), indent=1)
        return path


def artifact_file(folder: str | Path, *parts: str) -> Path:
    """Path of a file of an artifact, which has to be there and to be its own."""
    folder = Path(folder)
    path = folder.joinpath(*parts)
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such file; is it an artifact of a merge, and is it complete?")
    if not stays_inside(folder, path):
        raise CheckpointError(f"{path}: a link that leaves the folder of the artifact; copy the file into it.")
    return path


def _to_dict(manifest: Manifest) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "hf_ext_version": manifest.version,
        "library": manifest.library,
        "bit_order": "little",
        "base": _source_dict(manifest.base) | {"folder": manifest.base.folder},
        "unified": {"files": manifest.unified},
        "method": manifest.method,
        "tensors": [
            {
                "name": tensor.name,
                "shape": list(tensor.shape),
                "dtype": DTYPE_NAMES[tensor.dtype],
                "elements": tensor.elements,
            }
            for tensor in manifest.tensors
        ],
        "aliases": manifest.aliases,
        "tasks": {name: _task_dict(task) for name, task in manifest.tasks.items()},
        **({"files": manifest.files} if manifest.files else {}),
    }


def _source_dict(source: SourceRecord) -> dict[str, Any]:
    return {"source": source.source, "revision": source.revision, "files": source.files}


def _task_dict(task: TaskRecord) -> dict[str, Any]:
    record: dict[str, Any] = _source_dict(task.origin) | {
        "architecture": task.architecture,
        "base_prefix": task.base_prefix,
        "task_prefix": task.task_prefix,
    }
    if task.scale is None:
        record["scales"] = {name: scale.hex() for name, scale in task.scales.items()}
    else:
        record |= {"scale": task.scale, "scale_hex": task.scale.hex()}
    tails = {name: {"shape": list(shape)} for name, shape in task.tails.items()}
    return record | {"density": task.density, "shared": list(task.shared), "tails": tails}


class _Reader:
    """Values of one JSON file, refused with their place when they are not what they must be."""

    def __init__(self, file: str) -> None:
        self.file = file

    def expect(self, fits: bool, what: str, value: object) -> None:
        if not fits:
            raise CheckpointError(
                f"{self.file}: {what}, got {value!r:.80}; the artifact is damaged or was not written by hf-ext: "
                "fetch it again, or merge again."
            )

    def text(self, record: Mapping[str, Any], key: str) -> str:
        self.expect(isinstance(record.get(key), str), f"`{key}` must be a text", record.get(key))
        return str(record[key])

    def mapping(self, record: Mapping[str, Any], key: str) -> dict[str, Any]:
        self.expect(isinstance(record.get(key), dict), f"`{key}` must be an object", record.get(key))
        return dict(record[key])

    def shape(self, value: object, name: str) -> tuple[int, ...]:
        fits = isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)
        self.expect(fits, f"the shape of {name!r} must be a list of sizes", value)
        assert isinstance(value, list)
        return tuple(value)

    def number(self, value: object, what: str) -> float:
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
        self.expect(fits, f"{what} must be a finite number, not negative", value)
        assert isinstance(value, (int, float))
        return float(value)

    def exact(self, value: object, what: str) -> float:
        """A number as `float.hex` writes it."""
        self.expect(isinstance(value, str), f"{what} must be a hexadecimal number in quotes", value)
        try:
            number = float.fromhex(str(value))
        except (ValueError, OverflowError):
            number = math.nan
        return self.number(number, what)

    def files(self, record: Mapping[str, Any], form: re.Pattern[str] = _FILE) -> dict[str, dict[str, Any]]:
        files = self.mapping(record, "files")
        for name, about in files.items():
            what = "a file must be named without folders" if form is _FILE else "a file must lie in the artifact"
            self.expect(bool(form.fullmatch(name)), what, name)
            self.expect(isinstance(about, dict), f"what is said of {name!r} must be an object", about)
            size = about.get("bytes")
            self.expect(type(size) is int and size >= 0, f"`bytes` of {name!r} must be its length", size)
            for key in ("sha256", "header_sha256"):
                digest = about.get(key)
                fits = digest is None or (isinstance(digest, str) and bool(_SHA256.fullmatch(digest)))
                self.expect(fits, f"`{key}` of {name!r} must be 64 hexadecimal digits, or null", digest)
        return files

    def source(self, record: Mapping[str, Any]) -> SourceRecord:
        revision, folder = record.get("revision"), record.get("folder")
        fits = revision is None or (isinstance(revision, str) and bool(_COMMIT.fullmatch(revision)))
        self.expect(fits, "`revision` must be a commit, or null", revision)
        self.expect(folder in (None, "base"), '`folder` must be "base" or null', folder)
        return SourceRecord(self.text(record, "source"), revision, self.files(record), folder)

    def tensor(self, record: object) -> TensorRecord:
        self.expect(isinstance(record, dict), "an entry of `tensors` must be an object", record)
        assert isinstance(record, dict)
        name = self.text(record, "name")
        shape, dtype, elements = (
            self.shape(record.get("shape"), name),
            self.text(record, "dtype"),
            record.get("elements"),
        )
        self.expect(dtype in _DTYPES, f"`dtype` of {name!r} must be one of {sorted(_DTYPES)}", dtype)
        fits = type(elements) is int and 0 <= elements <= math.prod(shape)
        self.expect(fits, f"`elements` of {name!r} must be from 0 to {math.prod(shape)}", elements)
        assert isinstance(elements, int)
        fits = not elements or _DTYPES[dtype] in DTYPES
        self.expect(fits, f"the merged tensor {name!r} must be float32, float16 or bfloat16", dtype)
        return TensorRecord(name, shape, _DTYPES[dtype], elements)

    def task(self, record: object) -> TaskRecord:
        self.expect(isinstance(record, dict), "an entry of `tasks` must be an object", record)
        assert isinstance(record, dict)
        self.expect(("scale_hex" in record) != ("scales" in record), "either scale_hex or scales is needed", record)
        scale, scales = None, {}
        if "scales" in record:
            scales = {name: self.exact(value, "a scale") for name, value in self.mapping(record, "scales").items()}
        else:
            scale = self.exact(record["scale_hex"], "`scale_hex`")
        architecture = record.get("architecture")
        self.expect(architecture is None or isinstance(architecture, str), "`architecture` must be a text", record)
        shared = record.get("shared", [])
        fits = isinstance(shared, list) and all(isinstance(name, str) for name in shared)
        self.expect(fits, "`shared` must be a list of names", shared)
        tails = self.mapping(record, "tails")
        self.expect(all(isinstance(tail, dict) for tail in tails.values()), "`tails` must hold objects", tails)
        return TaskRecord(
            origin=self.source(record),
            architecture=architecture,
            base_prefix=self.text(record, "base_prefix"),
            task_prefix=self.text(record, "task_prefix"),
            scale=scale,
            density=self.number(record.get("density"), "`density`"),
            scales=scales,
            shared=tuple(shared),
            tails={name: self.shape(tail.get("shape"), name) for name, tail in tails.items()},
        )


def _parse(record: dict[str, Any], file: str) -> Manifest:
    read = _Reader(file)
    read.expect(record.get("format") == FORMAT, f'`format` must be "{FORMAT}"', record.get("format"))
    read.expect(
        record.get("format_version") == FORMAT_VERSION,
        f"`format_version` must be {FORMAT_VERSION} (a newer hf-ext may read others)",
        record.get("format_version"),
    )
    read.expect(record.get("bit_order") == "little", '`bit_order` must be "little"', record.get("bit_order"))
    entries = record.get("tensors")
    read.expect(isinstance(entries, list), "`tensors` must be a list", entries)
    tensors = tuple(read.tensor(entry) for entry in entries or ())
    names = {tensor.name for tensor in tensors}
    read.expect(len(names) == len(tensors), "no tensor may come twice in `tensors`", len(tensors) - len(names))
    aliases = read.mapping(record, "aliases")
    for alias, name in aliases.items():
        fits = isinstance(name, str) and name in names and alias not in names
        read.expect(fits, "an alias must lead from a name that is not stored to one that is", {alias: name})
    tasks = read.mapping(record, "tasks")
    for task in tasks:
        read.expect(bool(TASK_ID.fullmatch(task)), "a task must be named by [A-Za-z0-9._-]{1,64}", task)
    method = read.mapping(record, "method")
    read.expect(method.get("rescale") in RESCALES, f"`rescale` must be one of {RESCALES}", method.get("rescale"))
    return Manifest(
        library=read.text(record, "library"),
        base=read.source(read.mapping(record, "base")),
        unified=read.files(read.mapping(record, "unified")),
        method=method,
        tensors=tensors,
        aliases=aliases,
        tasks={name: read.task(task) for name, task in tasks.items()},
        version=read.text(record, "hf_ext_version"),
        files=read.files(record, OWN_FILE) if "files" in record else {},
    )


def recorded_path(spec: str, folder: str | Path) -> str:
    """How a local checkpoint is written down in an artifact.

    A path that was given relative to the working folder becomes one relative to the artifact, so that it holds from
    any working folder, and after both were moved together. A path that was given absolute stays so.
    """
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
    """Where a local checkpoint is that [`recorded_path`] wrote down.

    Artifacts of earlier versions have paths relative to the working folder of the merge, so a path that leads nowhere
    from the artifact is taken from this working folder.
    """
    path = Path(source).expanduser()
    if path.is_absolute():
        return path
    inside = Path(os.path.realpath(folder)) / path
    return Path(os.path.normpath(inside)) if inside.exists() or not path.exists() else path
