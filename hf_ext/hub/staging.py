"""Content of a staged folder: the model or pipeline itself, saved again or copied by name, and its code."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, TypeAlias

from transformers import FeatureExtractionMixin, PreTrainedModel
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.image_processing_base import ImageProcessingMixin

from ..errors import DataError, NotPublished
from ..files import copy_into, read_json, read_json_object
from .checkpoints import PICKLES, common_dtype, open_checkpoint, restore_dtypes
from .diffusers_folders import INDEX, is_pipeline, read_index, save_again
from .folder_kinds import known_kinds
from .header_format import CheckpointError
from .load_check import LOADER, code_references, refuse_kernels, room_code, room_of
from .published_files import (
    MODULES,
    copy_files,
    find_variant,
    is_described,
    is_tokenizer,
    loaded_of,
    read_modules,
    refuse_links,
    walk,
)

# Its presence makes a folder an artifact of EMR-Merging.
MANIFEST = "emr.json"
Processor: TypeAlias = ImageProcessingMixin | FeatureExtractionMixin


def _add_code(out: Path, room: ModuleType) -> None:
    """The files of every class that is named, and what they import; transformers copies those of the saved class."""
    code = room_code(room)
    for path in (out / "config.json", out / "preprocessor_config.json"):
        content = read_json_object(path, optional=True)
        for reference in code_references(content):
            # what else is named is refused by the check of the folder
            first = code.get(f"{reference.partition('.')[0]}.py")
            files = () if first is None else (first, *map(Path, get_relative_import_files(first)))
            copy_into({file.name: file for file in files}, out)


def write_folder(folder: Path, out: Path) -> None:
    """Writes what is published of a model, adapter, artifact or pipeline, with the installed package's code."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; save the model with save_pretrained(folder) first")
    if is_pipeline(folder):
        _write_pipeline(folder, out)
        return
    refuse_links(folder, loaded_of(folder))
    # refuses pickles, and verifies the headers of what is loaded first
    open_checkpoint(folder).close()
    for path in folder.glob("*.safetensors.index*.json"):
        if not isinstance(read_json_object(path).get("metadata"), dict):
            raise CheckpointError(f"{path}: no `metadata` object in it, which loaders want; save the model again.")
    room = room_of(folder)
    if (folder / MANIFEST).is_file():
        _write_artifact(folder, out, room)
    elif (folder / "adapter_config.json").is_file() or (room is None and (folder / "config.json").is_file()):
        _copy_model(folder, out, room)
        if room is not None and (processor := _load_processor(folder, vars(room))) is not None:
            # written again, with the code of the installed package
            processor.save_pretrained(str(out))
    elif room is not None:
        _save_again(folder, out, room)
        copy_files(folder, out, lambda name: is_tokenizer(name) or is_described(name))
    else:
        raise DataError(f"{folder}: neither config.json nor adapter_config.json; check that it is a checkpoint")


def _write_pipeline(folder: Path, out: Path) -> None:
    refuse_links(folder, lambda name: name == INDEX)
    _, components = read_index(folder)
    # diffusers and the tokenizers read whatever lies in the folders of the components
    refuse_links(folder, lambda name: name.partition("/")[0] in components)
    for path in folder.glob("*/config.json"):
        refuse_kernels(read_json_object(path), path)
    save_again(folder, out)
    copy_files(folder, out, is_described)


def _write_artifact(folder: Path, out: Path, room: ModuleType | None) -> None:
    code = {} if room is None else room_code(room)
    # Copies of our code in the folders of base and tasks stay here: the one at the root is the installed package's.
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        if name != LOADER.name and re.sub(r"^(base|tasks/[^/]+)/", "", name) not in code:
            raise NotPublished(f"{folder}: {name} is code, which is never published; remove it first")
    for kind in known_kinds():
        kind.copy_artifact(folder, out)
    if room is not None:
        _add_code(out, room)


def _save_again(folder: Path, out: Path, room: ModuleType) -> None:
    """Loads one of our models and its processor by the classes of the installed package, and saves them with code."""
    exported, config = vars(room), read_json_object(folder / "config.json")
    # nothing else in the configuration makes our class run code
    refuse_kernels(config, folder / "config.json")
    heads = {name: item for name, item in exported.items() if _is_class(item, PreTrainedModel)}
    names = config.get("architectures") or [None]
    if not isinstance(names, list) or len(names) != 1 or names[0] not in heads:
        raise DataError(f"{folder}/config.json: architectures is {names}; exactly one of {sorted(heads)} is allowed")
    options: dict[str, Any] = {"use_safetensors": True, "variant": find_variant(folder)}
    with open_checkpoint(folder) as checkpoint:
        options["dtype"] = common_dtype(map(checkpoint.info, checkpoint))
        model, info = heads[names[0]].from_pretrained(folder, output_loading_info=True, **options)
        restore_dtypes(model, checkpoint)
    problems = {key: sorted(map(str, value)) for key, value in info.items() if value}
    if problems:
        raise DataError(f"{folder}: the weights do not fit {names[0]}: {problems}; fetch or save the folder again")
    processor = _load_processor(folder, exported)
    wanted = [item.__name__ for item in exported.values() if _is_class(item, ImageProcessingMixin)]
    if processor is None and wanted and model.main_input_name == "pixel_values":
        told = f"save one, {wanted[0]}(...).save_pretrained(folder)"
        raise DataError(f"{folder}: a {names[0]} is published with its image processor: {told}")
    model.save_pretrained(str(out))
    if processor is not None:
        processor.save_pretrained(str(out))
    _add_code(out, room)


def _load_processor(folder: Path, exported: dict[str, Any]) -> Processor | None:
    path = folder / "preprocessor_config.json"
    if not path.is_file():
        return None
    content = read_json_object(path)
    name = content.get("image_processor_type") or content.get("feature_extractor_type")
    classes = {name: item for name, item in exported.items() if _is_class(item, Processor)}
    if name not in classes:
        raise DataError(f"{path} names the class {name!r}; one of {sorted(classes)} is allowed")
    processor: Processor = classes[name].from_pretrained(folder)
    return processor


def _is_class(item: object, kind: type | UnionType) -> bool:
    return isinstance(item, type) and issubclass(item, kind)


def _copy_model(folder: Path, out: Path, room: ModuleType | None) -> None:
    """Copies the files that a loader reads and those that describe them, of another library's model or an adapter."""
    places = ("", *read_modules(folder))
    for name, _ in walk(folder):
        if name.rpartition("/")[0] in places and name.endswith((*PICKLES, ".py") if room is None else PICKLES):
            what = "code" if name.endswith(".py") else "a pickle"
            raise NotPublished(f"{folder}: {name} is {what}, which is never published; remove it first")
    if (folder / MODULES).is_file():
        _check_modules(folder)
    reads = loaded_of(folder)
    copy_files(folder, out, lambda name: reads(name) or is_described(name))
    if (variant := find_variant(folder)) is not None:
        # Loaders look for the plain names unless they are told; an index names its shards, which keep theirs.
        for suffix in (f"model.{variant}.safetensors", f"model.safetensors.index.{variant}.json"):
            for path in (out / suffix, out / f"diffusion_pytorch_{suffix}"):
                if path.is_file():
                    path.rename(path.with_name(path.name.replace(f".{variant}", "")))
    # loaders may be told to read each of them
    for path in sorted([*out.rglob("*.safetensors"), *out.glob("*.safetensors.index*.json")]):
        open_checkpoint(path).close()
    if not any(out.glob("*.safetensors")):
        told = "do not have the names of transformers, diffusers or peft (such as model.safetensors)"
        raise DataError(f"{folder}: its weights {told}, so no loader finds them; save the model with save_pretrained")


def _check_modules(folder: Path) -> None:
    """Refuses a model of sentence-transformers with modules of which it is not known what they read."""
    modules = read_json(folder / MODULES)
    for module in modules if isinstance(modules, list) else [modules]:
        kind = module.get("type") if isinstance(module, dict) else module
        if not re.fullmatch(r"sentence_transformers\.(?!.*(Router|Asym))[\w.]+", str(kind)):
            told = "only modules of sentence-transformers itself, but for Router and Asym, are published"
            raise NotPublished(f"{folder / MODULES}: got type {kind!r:.80}; {told}; use its own push_to_hub")
