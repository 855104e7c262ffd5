"""Companions of a model's weights: code, tokenizer, processor, templates, and modules with weights of their
own. All files are taken except those on a list of exclusions, since libraries have files that no list could name.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..errors import DataError
from ..files import read_json, same_bytes, stays_inside
from ..hub.disclosure import find_secret
from ..hub.published_files import LICENCES, REPORTS, is_loaded, walk

_WEIGHTS = (
    *("*.safetensors", "*.safetensors.index*.json", "*.bin", "*.bin.index*.json", "*.pt", "*.pth", "*.ckpt", "*.pkl"),
    *("*.pickle", "*.h5", "*.msgpack*", "*.ot", "*.onnx", "*.onnx?data", "*.gguf", "*.ggml", "*.tflite", "*.pb"),
    *("*.np[yz]", "*.mlmodel", "*.pte"),
)
# The same model for other programs, and states of a training.
_STATES = (
    *("onnx/*", "openvino/*", "original/*", "coreml/*", "checkpoint-*/*", "global_step*/*"),
    *("trainer_state.json", "*_results.json", "*.lock", "*.tmp", "*.partial", "*.py[co]"),
)
_LOGS = ("*.log", "*tfevents*", "runs/*", "logs/*", "wandb/*", "mlruns/*")
# What a card shows, and data.
_SHOWN = (
    *("*.png", "*.jp*g", "*.gif", "*.webp", "*.svg", "*.mp[34]", "*.webm", "*.wav", "*.flac", "*.pdf", "*.ipynb"),
    *("*.parquet", "*.arrow", "*.csv", "*.tsv", "*.jsonl", "*.zip", "*.tar", "*.gz"),
)
_SECRETS = (
    *(".*", "*/.*", "*.pem", "*.key", "*.p12", "*.pfx", "id_rsa*", "id_ed25519*", "*credential*", "*secret*"),
    *("token", "*.token", "*_token.txt", "api_key*"),
)
# A merge writes its own.
_OWN = ("README.md", "emr.json", "emr_loader.py", "tasks/*", "base/*", *REPORTS)
LEFT_OUT = (*_WEIGHTS, *_STATES, *_LOGS, *_SHOWN, *_SECRETS, *_OWN)
MODULES = "modules.json"
# Chat templates and generation settings. A single model gets those of its tasks if all tasks agree.
_SPOKEN = ("generation_config.json", "chat_template.jinja", "chat_template.json", "additional_chat_templates/*")


@dataclass(frozen=True)
class Companions:
    """The files beside the weights of a checkpoint, by their paths in its folder."""

    files: Mapping[str, Path]
    modules: Mapping[str, Path]  # weights of modules of their own, such as a dense layer of sentence-transformers
    left_out: tuple[str, ...] = ()  # what is not taken though a model may need it, with the reason


def find_companions(folder: Path, *, alone: bool = False) -> Companions:
    """
    Lists what belongs to a model.

    Args:
        folder (`Path`): Where its weights lie.
        alone (`bool`, *optional*, defaults to `False`):
            Whether the weights were given as a file: then only what loaders read beside it is the model's.
    """
    inner = read_modules(folder)
    files: dict[str, Path] = {}
    modules: dict[str, Path] = {}
    others: set[str] = set()
    for name, path in walk(folder):
        place = PurePosixPath(name).parent.as_posix()
        if not path.is_file() or not stays_inside(folder, path):
            continue
        if place in inner and _is(name, _WEIGHTS):
            modules[name] = path
        elif place != "." and _is(name, _WEIGHTS) and not _is(name, (*_STATES, *_OWN)):
            others.add(place)
        elif not _is(name, LEFT_OUT) and (not alone or is_loaded(name)):
            files[name] = path
    # A folder with weights that no list of modules names is another model.
    files = {name: path for name, path in files.items() if PurePosixPath(name).parent.as_posix() not in others}
    left_out = [f"{place}/ (weights of their own, which {MODULES} does not name)" for place in sorted(others)]
    for name, path in list(files.items()):
        if not is_loaded(name) and name not in LICENCES and (kind := find_secret(path)) is not None:
            del files[name]
            left_out.append(f"{name} ({kind})")
    return Companions(files, modules, tuple(left_out))


def read_modules(folder: Path) -> list[str]:
    """Sub-folders of the modules of a sentence-transformers model."""
    told = read_json(folder / MODULES) if (folder / MODULES).is_file() else []
    paths = [item.get("path") for item in told if isinstance(item, dict)] if isinstance(told, list) else []
    return [path for path in paths if isinstance(path, str) and path and ".." not in path.split("/")]


def _is(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def same_content(first: Path, second: Path) -> bool:
    """Compares two files; JSON may be formatted differently."""
    if first.suffix != ".json":
        return same_bytes(first, second)
    ours, theirs = first.read_bytes(), second.read_bytes()
    try:
        return ours == theirs or bool(json.loads(ours) == json.loads(theirs))
    except (ValueError, RecursionError):
        return False


@dataclass(frozen=True)
class Joined:
    """The files of one model beside its weights."""

    files: Mapping[str, Path]
    told: list[str]  # what of the tasks is not among them, in words
    modules: tuple[str, ...] = ()  # weights in folders of their own, which differ and are merged by themselves


def join_companions(base: Companions, tasks: Mapping[str, Companions]) -> Joined:
    """
    The files of one model that is merged of several.

    They are the base's; where it has none, and for what a model is spoken to with, those in which all tasks agree.

    Args:
        base ([`Companions`]): The base's.
        tasks (`Mapping[str, Companions]`): Those of the tasks, by how messages name them.

    Returns:
        [`Joined`]: Files by name, what of the tasks is not among them, and modules to merge.

    Raises:
        DataError: Weights of a module are in some of the models only, or are no safetensors.
    """
    ours = {**base.files, **base.modules}
    joined, differing, modules = dict(ours), dict[str, list[str]](), list[str]()
    for name in dict.fromkeys(name for own in tasks.values() for name in (*own.files, *own.modules)):
        held = [own.modules.get(name) or own.files.get(name) for own in tasks.values()]
        first = next(path for path in held if path is not None)
        agreed = all(path is not None and same_content(first, path) for path in held)
        if agreed and (name not in ours or _is(name, _SPOKEN)):
            joined[name] = first
            continue
        for title, path in zip(tasks, held, strict=True):
            if path is None or (name in ours and same_content(ours[name], path)):
                continue
            if name not in tasks[title].modules:
                differing.setdefault(title, []).append(name)
            elif all(name in own.modules for own in (base, *tasks.values())) and name.endswith("/model.safetensors"):
                modules += [name] if name not in modules else []
                joined.pop(name, None)
            else:
                raise DataError(
                    f"{title}: {name} contains weights of a separate module that differ from the base's, and cannot "
                    "be merged because base and tasks do not all have it as model.safetensors. Save it in this form "
                    "everywhere, or choose a method with masks, with which each task keeps its module."
                )
    told = [
        f"{title} has its own {', '.join(names)}, or some tasks lack it; the merged model gets the base's"
        for title, names in differing.items()
    ]
    return Joined(joined, told, tuple(modules))
