"""Folders of diffusers pipelines of ours: what they may name and hold, loading them without running code, their files.

`hf_ext.pipelines`, and with it diffusers, is imported only when there is such a folder.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx2
import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

from ..errors import DataError, NotPublished
from ..files import read_json_object
from .checkpoints import (
    PICKLES,
    Checkpoint,
    TensorInfo,
    common_dtype,
    list_files,
    open_checkpoint,
    open_listed,
    restore_dtypes,
    split_revision,
)
from .published_files import find_variant

INDEX = "model_index.json"
_WEIGHTS = {".safetensors", *PICKLES}


def is_pipeline(folder: Path) -> bool:
    return (folder / INDEX).is_file()


def _pipelines() -> Any:
    return import_module("hf_ext.pipelines")


def read_index(folder: Path) -> tuple[str, dict[str, tuple[str, str]]]:
    """Reads what a pipeline consists of, and refuses what would make a loader run code."""
    path = folder / INDEX
    index = read_json_object(path)
    name = class_name(index)
    allowed = _pipelines().__all__
    if name is None or name not in allowed:
        raise DataError(f"{path}: _class_name is {index.get('_class_name')!r}; one of {allowed} is allowed")
    pairs: dict[str, Any] = {}
    ours = room_name(name)
    for key, value in index.items():
        if not isinstance(value, list) or key.startswith("_") or value == [None, None]:
            continue
        if len(value) != 2 or value[0] not in ("diffusers", "transformers", ours) or not isinstance(value[1], str):
            told = f"code that is not shipped; components are of diffusers, transformers or {ours}"
            raise DataError(f"{path}: the component {key} is {value}, which names {told}")
        pairs[key] = tuple(value)
    return name, pairs


def class_name(index: dict[str, Any]) -> str | None:
    """The class that a `model_index.json` names, if need be behind the file `pipeline` that holds it."""
    name = index.get("_class_name")
    if isinstance(name, list) and len(name) == 2 and name[0] == "pipeline":
        name = name[1]
    return name if isinstance(name, str) else None


def room_name(pipeline: str) -> str:
    """The room of a pipeline's class, as diffusers and the card templates call it."""
    return str(getattr(_pipelines(), pipeline).__module__.split(".")[-2])


def pipeline_code(folder: Path) -> dict[str, Path]:
    """The code that travels with a pipeline."""
    name, pairs = read_index(folder)
    room = getattr(_pipelines(), room_name(name))
    components = {
        f"{key}/{library}.py": Path(inspect.getfile(getattr(room, kind)))
        for key, (library, kind) in pairs.items()
        if library == room_name(name)
    }
    return {"pipeline.py": Path(inspect.getfile(getattr(_pipelines(), name))), **components}


def save_again(folder: Path, out: Path) -> None:
    """Loads a pipeline by installed classes, runs no code of its folder, and saves it with code and without paths."""
    name, _ = read_index(folder)
    if found := sorted(path.name for path in folder.rglob("*") if path.suffix in PICKLES):
        raise NotPublished(f"{folder}: {found[0]} is a pickle, which is never published; remove it first")
    variants = {find_variant(part) for part in folder.iterdir() if part.is_dir()} - {None}
    options = {"use_safetensors": True, "local_files_only": True, "variant": next(iter(variants), None)}
    # diffusers would make each network a float32 one
    infos, dtypes = read_headers(folder), {}
    for part in {each.file.partition("/")[0] for each in infos}:
        dtypes[part] = common_dtype(each for each in infos if each.file.startswith(f"{part}/"))
    try:
        pipeline = getattr(_pipelines(), name).from_pretrained(folder, dtype=dtypes or None, **options)
    except (OSError, RuntimeError, TypeError) as error:
        raise ValueError(f"{folder}: does not load as a {name}: {error}; download or save the folder again") from error
    for part in dtypes:
        if isinstance(model := getattr(pipeline, part, None), torch.nn.Module):
            with open_checkpoint(folder / part) as checkpoint:
                restore_dtypes(model, checkpoint)
    pipeline.save_pretrained(out)
    for path in (out / INDEX, *out.glob("*/*config.json")):
        content = read_json_object(path)
        if content.pop("_name_or_path", None) is not None:
            path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_headers(folder: Path) -> list[TensorInfo]:
    """Describes all tensors of a pipeline without reading them."""
    names = (path.relative_to(folder).as_posix() for path in folder.glob("*/*.safetensors"))
    return _read_parts(names, lambda part: open_checkpoint(folder / part))


def read_remote_headers(source: str) -> tuple[list[TensorInfo], str] | None:
    """The same of a pipeline on a Hub, and its commit; `None` if there is no such pipeline."""
    api, (repo_id, revision) = HfApi(), split_revision(source)
    try:
        commit = str(api.model_info(repo_id, revision=revision).sha)
        files = list_files(api, repo_id, commit, recursive=True)
    except (OfflineModeIsEnabled, httpx2.TransportError):
        cached = try_to_load_from_cache(repo_id, INDEX, revision=revision)
        folder = Path(cached).parent if isinstance(cached, str) else None
        return None if folder is None or not _is_whole(folder) else (read_headers(folder), folder.name)
    except (HfHubHTTPError, HFValidationError):
        return None
    if INDEX not in files:
        return None
    return _read_parts(files, lambda part: open_listed(api, repo_id, commit, files, f"{part}/")), commit


def _is_whole(folder: Path) -> bool:
    """True if a cached pipeline has all parts of its index, and weights where there is the config.json of a model."""
    # The class of a pipeline with code of its own is such a pair too.
    index = {key: value for key, value in read_json_object(folder / INDEX).items() if not key.startswith("_")}
    parts = [
        folder / key for key, pair in index.items() if isinstance(pair, list) and [*map(type, pair)] == [str, str]
    ]
    kinds = [{path.suffix for path in part.glob("*")} for part in parts if (part / "config.json").is_file()]
    return all(part.is_dir() for part in parts) and bool(kinds) and all(kind & _WEIGHTS for kind in kinds)


def _read_parts(names: Iterable[str], open_part: Callable[[str], Checkpoint]) -> list[TensorInfo]:
    """The tensors of the folders that hold safetensors files, each with its file by the path in the pipeline."""
    tensors: list[TensorInfo] = []
    for part in sorted({name.partition("/")[0] for name in names if re.fullmatch(r"[^/]+/[^/]+\.safetensors", name)}):
        with open_part(part) as checkpoint:
            tensors += [replace(each, file=f"{part}/{each.file}") for each in map(checkpoint.info, checkpoint)]
    return tensors


def read_config(folder: Path) -> tuple[dict[str, Any], str]:
    """The fields of a pipeline for its card, and the name of the template."""
    name, pairs = read_index(folder)
    index = read_json_object(folder / INDEX)
    config = {key: value for key, value in index.items() if value != [None, None]} | {"architectures": [name]}
    for key in pairs:
        for path in sorted((folder / key).glob("*config.json")):
            config[key] = read_json_object(path)
    transformer = config.get("transformer")
    if not isinstance(transformer, dict):
        raise ValueError(f"{folder}: {INDEX} or transformer/config.json describes no transformer; fetch it again")
    reads_text = transformer.get("joint_attention_dim") is not None
    config["pipeline_tag"] = "text-to-image" if reads_text else "unconditional-image-generation"
    return config, f"{room_name(name)}.md"
