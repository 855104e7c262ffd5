"""The tasks' weights of an artifact: fetched, verified, and restored tensor by tensor from the base.

Base, root weights and masks are mapped into memory, so they cost no more than the pages that are in use; on a device
they are kept there.
"""

import logging
import math
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from huggingface_hub import HfApi
from safetensors import safe_open

from ..errors import DataError, UsageError
from ..files import copy_into, parse_json_object, require_free, whole_folder
from ..hub.checkpoints import Checkpoint, TensorInfo, explain_hub, open_checkpoint, split_id
from ..hub.header_format import CheckpointError
from ..hub.published_files import walk
from ..hub.safetensors_writer import SafetensorsWriter, plan_shards, shard_index
from .arithmetic import compute_scales, find_kernels, restore_block
from .artifact import HubFiles, find_fault, open_extras, open_masks, open_unified, read_sums, read_tasks, require
from .manifest import MANIFEST, WEIGHT_STEMS, Manifest, SourceRecord, TaskRecord, artifact_file, find_folder

# What an artifact has and a plain checkpoint does not.
_OWN_FILES = (MANIFEST, "emr_loader.py", "README.md", "report.json", "report.png")


class Uncopied:
    """Base of objects with mapped files, and with a state that a shallow copy would change behind its back."""

    def __reduce__(self) -> Any:
        raise UsageError(
            f"{type(self).__name__} cannot be copied or pickled, because its files are mapped into memory: open it "
            "again where it is needed, with from_pretrained for instance; `copy.deepcopy(em.model)` copies the model "
            "of the current task"
        )


class _MappedFiles:
    """Tensors of safetensors files, mapped into memory; nothing is read until it is used."""

    def __init__(self, checkpoints: Iterable[Checkpoint]) -> None:
        self.infos: dict[str, TensorInfo] = {}
        self._files: dict[str, Any] = {}
        for checkpoint in checkpoints:
            with checkpoint:
                self.infos |= {name: checkpoint.info(name) for name in checkpoint}
                opened = {name: safe_open(about.path, framework="pt") for name, about in checkpoint.files.items()}
                self._files |= {name: opened[checkpoint.info(name).file] for name in checkpoint}
        self._resident: dict[tuple[str, torch.device], torch.Tensor] = {}

    def get(self, name: str, device: torch.device, *, keep: bool = False) -> torch.Tensor:
        """The tensor; on the CPU a view of the file, so it must not be written to."""
        if (name, device) in self._resident:
            return self._resident[name, device]
        tensor: torch.Tensor = self._files[name].get_tensor(name).to(device)
        if keep or device.type == "cpu":
            self._resident[name, device] = tensor
        return tensor


class Parts(NamedTuple):
    """The sources of a merged tensor of a task: flat, and no longer than the merged part."""

    base: torch.Tensor
    unified: torch.Tensor  # the base where the mask holds signs
    mask: torch.Tensor
    scale: float


class _TaskFiles(NamedTuple):
    """The files of one task; its scales, types and shapes by tensor."""

    record: TaskRecord
    masks: _MappedFiles
    extras: _MappedFiles
    scales: dict[str, float]
    entries: dict[str, tuple[torch.dtype, tuple[int, ...]]]


class TaskWeights(Uncopied):
    """The weights of every task of an artifact. Opening takes the root files and the base; those of a task are fetched
    when they are first needed. Names, lengths, types, links and hashes are checked, the base's too."""

    # The largest file of an export, as `save_pretrained` has it.
    shard_bytes = 5 * 10**9

    def __init__(
        self,
        source: str | Path,
        *,
        base: str | Path | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        endpoint: str | None = None,
        rescale: str | None = None,
    ) -> None:
        self._api = HfApi(endpoint=endpoint, token=token)
        self._rescale = rescale
        self._tasks: dict[str, _TaskFiles] = {}
        self._read: dict[tuple[str, str], dict[str, Any]] = {}
        self._repository: HubFiles | None = None
        self.folder = Path(source).expanduser()
        if not self.folder.exists():
            self._repository = HubFiles(*self._resolve(str(source), revision), token, endpoint)
            self.folder = self._repository.fetch([MANIFEST])
        elif revision is not None:
            raise UsageError(f"revision={revision!r} has no meaning for the local path {self.folder}; leave it out")
        self.manifest = Manifest.read(self.folder)
        self._merged = self.manifest.merged
        if self.manifest.deltas and rescale not in (None, "tensor_l2"):
            raise UsageError(
                f"rescale is {rescale!r}, and {self.folder} holds signs of differences, of which each tensor has its "
                "own scale; leave rescale out, or give 'tensor_l2'"
            )
        if self._repository:
            skipped = ["sums.safetensors", "report.json", "report.png", "README.md", ".*"]
            self._repository.fetch(["*"], [*skipped, "tasks/*", "base/*"])
        roots = [] if self.manifest.deltas else [open_unified(self.folder, self.manifest)]
        self._unified = _MappedFiles(roots)
        self._base = _MappedFiles(self._open_base(base))
        for tensor in self._merged.values():
            info = self._base.infos.get(tensor.name)
            found = "none" if info is None else info.shape
            what = f"tensor {tensor.name!r} {tensor.shape} was merged, and the base has {found}"
            require(found == tensor.shape, self.folder, what)

    def entries(self, task: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return dict(self._open(task).entries)

    def restore(
        self, task: str, name: str, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Restores one tensor of a task: Ŵ = W_0 + λ·M ⊙ (W_uni - W_0), or the task's own where it was not merged."""
        own, shape = self._open(task).entries[name]
        out = torch.empty(shape, dtype=dtype or own, device=device)
        self.restore_into(task, name, out)
        return out

    def restore_into(self, task: str, name: str, out: torch.Tensor) -> None:
        """[`~TaskWeights.restore`] into a tensor that is there, converted if that is of another type."""
        opened, device, deltas = self._open(task), out.device, self.manifest.deltas
        parts = self.find_parts(task, name, device)
        if parts is None:
            own, base_name = name in opened.extras.infos, opened.record.base_name(name)
            values = opened.extras.get(name, device) if own else self._base.get(base_name, device, keep=True)
            self.require_range(task, name, out.copy_(values), [values])
            return
        dtype, count = opened.entries[name][0], len(parts.base)
        direct = out.dtype == dtype and out.is_contiguous()
        whole = out if direct else torch.empty(out.shape, dtype=dtype, device=device)
        flat = whole.view(-1)
        base = parts.base.float() if parts.base.dtype == torch.float64 else parts.base
        if deltas:
            planes = parts.mask.view(deltas, -1)
            find_kernels(base.device.type).restore_directions(base, planes, parts.scale, flat[:count])
        else:
            restore_block(base, parts.unified, parts.mask, parts.scale, flat[:count])
        if len(flat) > count:
            flat[count:] = opened.extras.get(name, device)
        if not direct:
            out.copy_(whole)
        # a merge looks at its own rescaler and type alone
        self.require_range(task, name, out)

    def require_range(self, task: str, name: str, found: torch.Tensor, given: Iterable[torch.Tensor] = ()) -> None:
        """Refuses infinity in float16 where it comes of values that are finite."""
        if found.dtype != torch.float16 or bool(found.isfinite().all()):
            return
        if all(bool(values.isfinite().all()) for values in given):
            raise DataError(
                f"{self.folder}: {name!r} of task {task!r} exceeds the range of float16: choose another rescale or "
                "dtype, or merge again with dtype float32"
            )

    def find_parts(self, task: str, name: str, device: torch.device) -> Parts | None:
        """The sources of a tensor of a task; `None` if it is the task's own or the base's."""
        opened = self._open(task)
        if name not in opened.masks.infos:
            return None
        tensor = self._merged[opened.record.base_name(name)]
        base, unified = (
            files.get(tensor.name, device, keep=True).view(-1)[: tensor.elements]
            for files in (self._base, self._base if self.manifest.deltas else self._unified)
        )
        return Parts(base, unified, opened.masks.get(name, device), opened.scales[name])

    def base_tensors(self) -> dict[str, torch.Tensor]:
        """The base's tensors by name, as views of its files."""
        return {name: self._base.get(name, torch.device("cpu")) for name in self._base.infos}

    def small_files(self, task: str) -> dict[str, Path]:
        """Lists what a plain checkpoint of a task has beside its weights."""
        absent, files = self._open(task).record.absent, dict[str, Path]()
        folders = {name.partition("/")[0] for name in self.manifest.files}
        for place in (self.folder, self.folder / "tasks" / task):
            for name, path in walk(place):
                top, nested, _ = name.partition("/")
                weights = not nested and name.endswith((".safetensors", ".safetensors.index.json"))
                # An export into the artifact, say, is not the model's.
                strange = bool(folders) and top not in folders
                of_root = name in absent or (bool(nested) and (strange or top in ("tasks", "base")))
                own = name in _OWN_FILES or (place == self.folder and of_root)
                if path.is_file() and not weights and not own and not any(part[0] == "." for part in name.split("/")):
                    files[name] = artifact_file(self.folder, path.relative_to(self.folder).as_posix())
        return files

    def read_small_file(self, task: str, name: str) -> dict[str, Any]:
        """The content of one of these that is JSON; empty if there is none."""
        if (task, name) not in self._read:
            path = self.small_files(task).get(name)
            found = {} if path is None else parse_json_object(path.read_bytes(), str(path), CheckpointError)
            self._read[task, name] = found
        return self._read[task, name]

    def read_config(self, task: str) -> dict[str, Any]:
        """The content of `config.json` of a task; of an adapter, that of peft's file."""
        name = "adapter_config.json" if self.manifest.library == "peft" else "config.json"
        if not (config := self.read_small_file(task, name)):
            raise CheckpointError(f"{self.folder}: task {task!r} has no {name} with its class: add it to tasks/{task}")
        return config

    def export(self, task: str, out: str | Path) -> Path:
        """Writes a plain checkpoint of a task, tensor by tensor; the folder appears whole or not at all."""
        out = Path(out).expanduser()
        require_free(out)
        files, entries = self.small_files(task), self.entries(task)
        # A name of its own: beside it there may be a merge into the same folder that was interrupted.
        with whole_folder(out) as partial:
            copy_into(files, partial)
            sizes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in entries.items()}
            stem = WEIGHT_STEMS.get(self.manifest.library, "model")
            shards = plan_shards(sizes, self.shard_bytes, stem)
            for file, names in shards.items():
                with closing(SafetensorsWriter(partial / file, {name: entries[name] for name in names})) as writer:
                    for name in names:
                        writer.write(name, 0, self.restore(task, name))
            if len(shards) > 1:
                index = partial / f"{stem}.safetensors.index.json"
                index.write_text(shard_index(shards, sizes), encoding="utf-8")
        return out

    def fetch_all(self) -> None:
        if self._repository:
            self._repository.fetch(["*"], [".*"])
        for task in self.manifest.tasks:
            self._open(task)

    def copy_artifact(self, out: str | Path) -> Path:
        """Copies the artifact's files; the folder appears whole or not at all."""
        out = Path(out).expanduser()
        require_free(out)
        self.fetch_all()
        base = self.manifest.base
        if base.folder is None and base.revision is None and not Path(base.source).expanduser().is_absolute():
            told = "%s: the base is %s from the artifact; pass `base` where the copy is loaded"
            logging.getLogger(__name__).warning(told, out, base.source)
        with whole_folder(out) as partial:
            shutil.copytree(self.folder, partial, ignore=shutil.ignore_patterns(".*"), dirs_exist_ok=True)
        return out

    def _open(self, task: str) -> _TaskFiles:
        if task in self._tasks:
            return self._tasks[task]
        if task not in self.manifest.tasks:
            known = ", ".join(map(repr, self.manifest.tasks))
            raise UsageError(f"there is no task {task!r} in {self.folder}; choose one of {known}")
        if self._repository:
            self._repository.fetch([f"tasks/{task}/*"], [] if self._rescale else ["*/sums.safetensors"])
        record = self.manifest.tasks[task]
        masks = _MappedFiles([open_masks(self.folder, self.manifest, task)])
        checkpoint = open_extras(self.folder, self.manifest, task)
        extras = _MappedFiles([checkpoint] if checkpoint else [])
        entries = {name: (info.dtype, info.shape) for name, info in extras.infos.items()}
        for name in masks.infos:
            tensor = self._merged[record.base_name(name)]
            entries[name] = (tensor.dtype, record.tails.get(name, tensor.shape))
        for name in record.shared:
            what = f"{name!r} of task {task!r} is said to be the base's, which has no such tensor"
            require(record.base_name(name) in self._base.infos, self.folder, what)
            info = self._base.infos[record.base_name(name)]
            entries[name] = (info.dtype, info.shape)
        opened = _TaskFiles(record, masks, extras, self._scales(task, record, masks), entries)
        return self._tasks.setdefault(task, opened)

    def _scales(self, task: str, record: TaskRecord, masks: _MappedFiles) -> dict[str, float]:
        if self._rescale is None:
            return {name: record.scales[name] if record.scale is None else record.scale for name in masks.infos}
        named = {record.base_name(name): name for name in masks.infos}
        part = np.array([[name in named] for name in self._merged], dtype=bool).reshape(-1, 1)
        elements = np.array([tensor.elements for tensor in self._merged.values()], dtype=np.int64)
        sums = read_sums(self.folder, self.manifest, task)[:, None, :]
        scales = np.broadcast_to(compute_scales(sums, elements, part, self._rescale), part.shape)[:, 0].tolist()
        return {named[name]: scale for name, scale in zip(self._merged, scales, strict=True) if name in named}

    def _open_base(self, given: str | Path | None) -> list[Checkpoint]:
        base = self.manifest.base
        named = base.source + (f" at commit {base.revision}" if base.revision else "")
        hub = given is None and base.folder is None and base.revision is not None
        place = find_folder(base.source, self.folder) if given is None else find_folder(str(given), Path())
        if given is None and base.folder is not None:
            if self._repository:
                self._repository.fetch([f"{base.folder}/*"])
            place = self.folder / base.folder
        elif hub or (given is not None and not place.exists()):
            where = (base.source, str(base.revision)) if hub else self._resolve(str(given), None)
            place = HubFiles(*where, self._api.token, self._api.endpoint).fetch(base.files)
        if not place.is_dir():
            raise CheckpointError(
                f"the base of this merge, {named}, is not at {place}, and the tasks are restored from it: pass its "
                "folder or Hub id as `base`."
            )
        self.base_folder = place
        # What came at its commit from a Hub need not be read to be believed.
        return [_open_verified(place, file, base, named, not hub) for file in base.files]

    def _resolve(self, source: str, revision: str | None) -> tuple[str, str]:
        name, written = split_id(source)
        if written and revision is not None and written != revision:
            raise ValueError(f"two revisions for {name}: {written!r} and {revision!r}; give one")
        if not re.fullmatch(r"[\w\-][\w.\-]*/[\w\-][\w.\-]*", name):
            raise CheckpointError(f"{source}: no such folder, and not of the form org/name or org/name@revision.")
        with explain_hub(source, self._api.endpoint):
            return name, str(self._api.resolve_revision(name, revision=written or revision).resolved)


def _open_verified(folder: Path, file: str, base: SourceRecord, named: str, complete: bool) -> Checkpoint:
    """Opens a file of the base if it is the one of the merge; `complete`: its hash is compared too."""
    path, expected = folder / file, base.files[file]
    fault = find_fault(path, expected if complete else {"bytes": expected["bytes"]})
    if fault is None:
        checkpoint = open_checkpoint(artifact_file(folder, file))
        (found,) = checkpoint.files.values()
        if expected.get("header_sha256") in (None, found.header_sha256):
            return checkpoint
        checkpoint.close()
        fault = "other tensors: its header has another SHA-256"
    raise CheckpointError(f"{path}: not the base of this merge, which is {named} ({fault}); pass that one as `base`.")


@contextmanager
def task_checkpoint(source: str, task: str | None) -> Iterator[str]:
    """A checkpoint to load: what was named, or one task of it where that is a merge."""
    tasks = read_tasks(source)
    if tasks is None:
        if task is not None:
            raise ValueError(f"{source} is no merge with task masks, so it has no task {task!r}; leave the task out")
        yield source
        return
    if task is None:
        raise ValueError(
            f"{source} is a merge, and the model at its root is of no task. Name one of its tasks with --task: "
            f"{', '.join(tasks)}; or write one as a plain checkpoint: hf-ext emr export {source} {tasks[0]} FOLDER"
        )
    # Windows deletes no file that is still mapped into memory.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        yield str(TaskWeights(source).export(task, Path(place, "checkpoint")))
