"""Opened inputs of a merge: tensors by header and range, small files on demand, and identity of the weights."""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm.auto import tqdm

from ..emr.artifact import HubFiles, find_code
from ..emr.manifest import MANIFEST
from ..errors import DataError, UsageError
from ..files import hash_file, read_json_object
from ..hub.checkpoints import Checkpoint, TensorInfo, open_checkpoint
from ..hub.file_hashes import file_sha256
from ..hub.header_format import CheckpointError
from .companions import CODE, LEFT_OUT, Companions, find_companions, read_modules
from .loading import OWN_KINDS, build_empty, find_class, find_vocabularies

Library = Literal["transformers", "diffusers", "peft"]

# A bar for a few kilobytes of each checkpoint would hide the plan.
_SILENT: dict[str, Any] = {"tqdm_class": partial(tqdm, disable=True)}
CONFIGURATION_FILES = ("config.json", "adapter_config.json", "model_index.json")
# Keys of configurations that a merge reads.
_READ: dict[str, tuple[type, str]] = {
    "architectures": (list, "a list of texts"),
    "id2label": (dict, "a mapping"),
    "vocab_size": (int, "a whole number"),
    **dict.fromkeys(("auto_map", "auto_mapping"), (dict, "a mapping")),
    **dict.fromkeys(("model_type", "_class_name", "peft_type", "task_type"), (str, "a text")),
}
# Suffixes of tensor names in LoRA files of diffusers and of kohya's scripts.
_LORA_FILE_ENDS = (".lora_down.weight", "lora.down.weight", "lora_linear_layer.down.weight", ".lora_A.weight")
# Tensors that quantised checkpoints store beside packed weights.
_QUANTISED_PARTS = re.compile(
    r"SCB|g_idx|q(weight|zeros)|(nested_)?(absmax|quant_map)|weight_(packed|scale(_inv)?|zero_point)"
)

# What torch.compile, FSDP and activation checkpoints put into the names of a model's tensors.
_WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


class Source(AbstractContextManager["Source", None]):
    """
    One opened checkpoint of a merge: the base or a task's fine-tune. Made by [`open_weights`]. Only its header and its
    configuration have been read.

    Tensors of type float64 are given as float32: no arithmetic of a merge is wider.
    """

    origin: tuple[str, str | None] | None = None  # of a copy the original and its commit, which are told in its place

    def __init__(self, label: str, spec: str, checkpoint: Checkpoint, place: Path | HubFiles) -> None:
        self.label, self.spec, self.checkpoint, self.place = label, spec, checkpoint, place
        self.repo_id = place.repo_id if isinstance(place, HubFiles) else None
        self.commit, self.metadata = checkpoint.commit, checkpoint.metadata
        self._stored = {name: checkpoint.info(name) for name in checkpoint}
        folder = place.fetch((*CONFIGURATION_FILES, MANIFEST), **_SILENT) if isinstance(place, HubFiles) else place
        self.library, self.config = _read_configuration(folder)
        self.is_artifact = (folder / MANIFEST).is_file()
        self._in_file, plain = {name: name for name in self._stored}, _without_wrappers(self._stored, self.config)
        # a name that a program wrapped around the model's own, which are read
        self.wrapped = next((name for own, name in plain.items() if own != name), None)
        self.rename(plain)

    @property
    def title(self) -> str:
        return f"{describe_label(self.label)} ({self.spec})"

    @cached_property
    def companions(self) -> Companions:
        """The companions of the model's weights: in the local folder, or in the cache, fetched on first use."""
        if isinstance(self.place, Path):
            alone = not Path(self.spec).expanduser().is_dir()
            return find_companions(self.place, own=self.checkpoint.files, alone=alone)
        self.place.fetch((CODE,), (".*",), **_SILENT)
        folder = self.place.fetch(("*",), LEFT_OUT, **_SILENT)
        if modules := read_modules(folder):
            self.place.fetch([f"{place}/*" for place in modules], **_SILENT)
        return find_companions(folder, own=self.checkpoint.files)

    @property
    def warnings(self) -> list[str]:
        """Warnings about what is not read as it is stored, is not copied, or is not there."""
        wide = any(info.dtype == torch.float64 for info in self._stored.values())
        found = [f"{self.title} holds float64, which is treated as float32"] if wide else []
        if self.wrapped:
            found.append(f"{self.title} has names of a wrapped model ({self.wrapped!r}), read without the wrapper")
        if self.companions.left_out:
            found.append(f"{self.title}: not copied: {', '.join(self.companions.left_out)}")
        absent = sorted(find_code(self.config) - self.companions.files.keys())
        # this package has the code of its own models
        if absent and self.config.get("model_type") not in OWN_KINDS:
            found.append(f"{self.title}: {', '.join(absent)} is not there, which auto_map of its config.json names")
        return found

    @property
    def architecture(self) -> str | None:
        """Name of the model's class, as the configuration tells it."""
        names = self.config.get("architectures") or [self.config.get("_class_name") or self.config.get("peft_type")]
        return str(names[0]) if names[0] else None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as they are stored."""
        return sum(info.nbytes for info in self._stored.values())

    def rename(self, names: Mapping[str, str]) -> None:
        """Gives tensors these names, each with the name that it has. A tensor may have several."""
        self._in_file = {name: self._in_file[own] for name, own in names.items()}
        self.tensors = dict[str, TensorInfo]()
        for name, own in self._in_file.items():
            info = self._stored[own]
            wide = info.dtype == torch.float64
            self.tensors[name] = replace(info, dtype=torch.float32, nbytes=info.nbytes // 2) if wide else info

    def read_into(self, name: str, start: int, stop: int, out: torch.Tensor) -> None:
        """Reads a run of elements of a tensor, in row-major order. Several threads may read at once."""
        name = self._in_file[name]
        if self._stored[name].dtype == torch.float64:
            wide = torch.empty(max(stop - start, 0), dtype=torch.float64)
            self.checkpoint.read_into(name, start, stop, wide)
            out.copy_(wide)
        else:
            self.checkpoint.read_into(name, start, stop, out)

    def read(self, name: str) -> torch.Tensor:
        """Reads a whole tensor, in its shape."""
        info = self.tensors[name]
        out = torch.empty(info.shape, dtype=info.dtype)
        self.read_into(name, 0, out.numel(), out.view(-1))
        return out

    def will_need(self, name: str, start: int, stop: int) -> None:
        """Announces a read, so that the system can prefetch it from the disk."""
        self.checkpoint.will_need(self._in_file[name], start, stop)

    def location(self, name: str) -> tuple[int, int] | None:
        """Descriptor and first byte of a tensor that lies in a local file as `tensors` tells; None if it does not."""
        own = self._in_file[name]
        return None if self._stored[own].dtype == torch.float64 else self.checkpoint.location(own)

    def identity(self, *, hash_files: bool = False) -> dict[str, Any]:
        """The identity of these weights, for `emr.json`."""
        files = {}
        for name, file in self.checkpoint.files.items():
            digest = file_sha256(file.path) if hash_files and file.path and not file.sha256 else file.sha256
            files[name] = {"bytes": file.size, "sha256": digest, "header_sha256": file.header_sha256}
        source, revision = self.origin or (self.repo_id or self.spec, self.commit)
        return {"source": source, "revision": revision, "files": files}

    def fingerprint(self) -> dict[str, Any]:
        """Values that must not change during an interruption: identity, and of a folder times and small files."""
        result = self.identity()
        if self.repo_id is None:
            # To look a hash up in the cache takes longer than to read a configuration.
            result["small_files"] = {
                name: file_sha256(path) if path.stat().st_size > 2**20 else hash_file(path)
                for name, path in self.companions.all.items()
            }
        for name, file in self.checkpoint.files.items():
            if file.path is not None:
                result["files"][name]["mtime_ns"] = os.stat(file.path).st_mtime_ns
        return result

    def close(self) -> None:
        self.checkpoint.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    @cached_property
    def vocabularies(self) -> frozenset[int]:
        return find_vocabularies(self.config)

    @cached_property
    def outline(self) -> torch.nn.Module | None:
        """The model without weights; see [`build_empty`]."""
        return build_empty(self.config)

    @property
    def places(self) -> Mapping[str, torch.Tensor] | None:
        """The tensors of the model, without weights; `None` if its class is unknown or needs more."""
        with suppress(ValueError):
            return None if self.outline is None else dict(self.outline.state_dict())
        return None


def _without_wrappers(names: Collection[str], config: Mapping[str, Any]) -> dict[str, str]:
    """The names of a file by those of the model, without what torch.compile, FSDP or DDP put before or into them."""
    plain = {_WRAPPERS.sub("", name): name for name in names}
    if plain and all(name.startswith("module.") for name in plain) and ("_class_name" in config or find_class(config)):
        plain = {own.removeprefix("module."): name for own, name in plain.items()}
    return plain if len(plain) == len(names) else {name: name for name in names}


def describe_label(label: str) -> str:
    """The label of a source in messages; the space tells it from a task's name."""
    return {"base": "base", "merged": "merged model"}.get(label, label if " " in label else f"task {label!r}")


def size_text(count: int) -> str:
    power = min((len(str(count)) - 1) // 3, 4)
    return f"{count / 1000**power:.{min(power, 1)}f} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def open_weights(
    label: str, spec: str | Path, *, token: str | bool | None = None, endpoint: str | None = None
) -> Source:
    """Opens a checkpoint that takes part in a merge, by its header and its configuration; refuses a quantised one."""
    path = Path(spec).expanduser()
    with ExitStack() as opened:
        try:
            if (path / "model_index.json").is_file():
                raise CheckpointError(
                    f"{path}: a diffusers pipeline; merge its models one by one, such as {path / 'unet'}."
                )
            checkpoint = opened.enter_context(open_checkpoint(spec, token=token, endpoint=endpoint))
            place: Path | HubFiles = path if path.is_dir() else path.parent
            if checkpoint.commit is not None and not path.exists():
                place = HubFiles(str(spec).partition("@")[0], checkpoint.commit, token, endpoint)
            source = Source(label, str(spec), checkpoint, place)
            _refuse_quantised(source)
        except ValueError as error:
            raise CheckpointError(f"{describe_label(label)}: {error}") from error
        opened.pop_all()
        return source


def _read_configuration(folder: Path) -> tuple[Library, dict[str, Any]]:
    config = read_json_object(folder / "config.json", optional=True)
    adapter = read_json_object(folder / "adapter_config.json", optional=True)
    for name, told in (("config.json", config), ("adapter_config.json", adapter)):
        for key, (kind, words) in _READ.items():
            value = told.get(key)
            texts = value if isinstance(value, list) else []
            if value is not None and not (isinstance(value, kind) and all(isinstance(text, str) for text in texts)):
                raise CheckpointError(f"{folder / name}: {key} must be {words}, got {value!r:.80}; correct it.")
        level: list[Any] = [told]
        for _ in range(100):
            parts = [part for found in level for part in (found.values() if isinstance(found, dict) else found)]
            level = [part for part in parts if isinstance(part, dict | list)]
        if level:
            raise CheckpointError(f"{folder / name}: nested more than 100 levels deep; fetch the file again.")
    if adapter:
        return "peft", adapter
    return ("diffusers" if "_diffusers_version" in config else "transformers"), config


def _refuse_quantised(source: Source) -> None:
    """Refuses a checkpoint whose numbers are codes of something else."""
    reasons, method = list[str](), source.config.get("quantization_config")
    if method:
        told = method.get("quant_method") if isinstance(method, dict) else method
        reasons.append(f"its configuration has a quantization_config ({told})")
    for name, info in source.tensors.items():
        last = name.rpartition(".")[2]
        if info.dtype.itemsize == 1 and info.dtype.is_floating_point:
            reasons.append(f"tensor {name!r} is {info.dtype}")
        elif _QUANTISED_PARTS.fullmatch(last) or ".quant_state." in name:
            reasons.append(f"tensor {name!r} belongs to a quantised weight")
        elif info.dtype in (torch.int8, torch.uint8) and last == "weight":
            reasons.append(f"weight {name!r} is {info.dtype}")
    if reasons:
        raise CheckpointError(
            f"{source.spec} is quantised: {reasons[0]}. Its differences from the base would be meaningless; merge "
            "the checkpoint that it was made from, or dequantise it: model.dequantize(), model.save_pretrained(…)."
        )


def read_adapters(how: str, base: Source, tasks: Sequence[Source]) -> tuple[Source, tuple[Source, ...]]:
    """Base and tasks with the base of adapters in place of their model, as `adapters` of the configuration says."""
    for source in (base, *tasks):
        _refuse_other_files(source)
    if base.library == "peft":
        raise DataError(f"{base.title} is an adapter; give the model that it was trained on as base.")
    adapters = [task for task in tasks if task.library == "peft"]
    if not adapters:
        return base, tuple(tasks)
    if how == "refuse":
        raise UsageError(
            f"{', '.join(repr(task.label) for task in adapters)} are peft adapters, exact and mostly smaller than a "
            "mask: keep them. To merge the full weights that they give, let peft write them, PeftModel.from_pretrained"
            "(MODEL, ADAPTER).merge_and_unload().save_pretrained(FOLDER), and give that folder as the task. adapters: "
            "adapter merges (IA)³ among themselves."
        )
    others = [task.title for task in tasks if task.library != "peft" or task.config.get("peft_type") != "IA3"]
    if others:
        raise UsageError(
            f"adapters: adapter merges (IA)³ among themselves, and {others[0]} is none: use peft's "
            "add_weighted_adapter, which joins LoRA (of different ranks by combination_type='cat' or 'svd'), or "
            "merge_and_unload(), which writes full weights."
        )
    base.close()
    return BaseOfOnes(base, tasks), tuple(tasks)


def _refuse_other_files(source: Source) -> None:
    """Refuses an artifact, an adapter's configuration beside other weights, and a LoRA in another form than peft's."""
    if source.is_artifact:
        raise DataError(
            f"{source.title} is a merge with masks, whose folder is not the model of a task: write a task with hf-ext "
            "emr export, and give that folder."
        )
    kind = source.config.get("peft_type", "LORA") if source.library == "peft" else None
    if kind in ("LORA", "IA3") and not any(map(_is_adapter_part, source.tensors)):
        raise DataError(
            f"{source.title} has an adapter_config.json, and its weights are no adapter. Remove that file if it was "
            "left over, or give the adapter's folder."
        )
    if kind is None and any(name.endswith(_LORA_FILE_ENDS) for name in source.tensors):
        raise DataError(
            f"{source.title} is a LoRA file of diffusers or of another program, and only adapters of peft are read. "
            "Let diffusers convert it: pipeline.load_lora_weights(FILE), pipeline.fuse_lora(), "
            "pipeline.unload_lora_weights(), then save the model that it changes, such as "
            "pipeline.unet.save_pretrained(FOLDER), and give that folder as the task."
        )


class BaseOfOnes(Source):
    """The (IA)³ adapter that changes nothing, as the base of adapters; its elements are in no file."""

    def __init__(self, base: Source, tasks: Sequence[Source]) -> None:
        super().__init__("base", base.spec, tasks[0].checkpoint, tasks[0].place)
        self.repo_id, self.commit = base.repo_id, base.commit
        parts = {name: info for task in reversed(tasks) for name, info in task.tensors.items()}
        self._stored = {name: info for name, info in parts.items() if _is_adapter_part(name)}
        self._in_file = {name: name for name in self._stored}
        self.rename(self._in_file)

    def read_into(self, name: str, start: int, stop: int, out: torch.Tensor) -> None:
        out.fill_(1.0)

    def location(self, name: str) -> tuple[int, int] | None:
        return None

    def will_need(self, name: str, start: int, stop: int) -> None:
        """As [`Source.will_need`]: there is nothing to fetch."""

    def identity(self, *, hash_files: bool = False) -> dict[str, Any]:
        return {"source": self.spec, "revision": None, "files": {}}

    def fingerprint(self) -> dict[str, Any]:
        return self.identity()

    def close(self) -> None:
        """Nothing to close: the files are the tasks'."""


def _is_adapter_part(name: str) -> bool:
    return ".lora_" in name or name.endswith("ia3_l")
