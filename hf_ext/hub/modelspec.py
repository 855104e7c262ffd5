"""What weights say of themselves: https://github.com/Stability-AI/ModelSpec, in the headers of safetensors files."""

import json
import os
import shutil
from pathlib import Path

import yaml
from huggingface_hub import ModelCard

from ..files import whole_file
from .diffusers_folders import is_pipeline
from .load_check import installed_room
from .safetensors_headers import header_length, parse_header, parse_json_object, read_json_object

_VERSION = "1.0.1"
# Data starts at a multiple of this, as `safetensors` writes it.
_ALIGNMENT = 8


def describe_weights(folder: Path, repo_id: str) -> None:
    """
    Adds title, architecture, author and licence to the headers of a model or a pipeline of ours, beside what is there:
    without transformers' `format` its loader would refuse the file. Files of other libraries stay as they are, and of
    a merge, whose hashes its manifest has.

    Args:
        folder (`Path`): A staged folder with its card.
        repo_id (`str`): Where it will be published: `org/name`, or a name.
    """
    if is_pipeline(folder):
        place, architecture = folder / "transformer", "disentangled-dit"
    elif (folder / "config.json").is_file() and not (folder / "emr.json").exists():
        place, architecture = folder, str(read_json_object(folder / "config.json").get("model_type"))
        if installed_room(architecture) is None:
            return
    else:
        return
    owner, _, title = repo_id.rpartition("/")
    told = {
        "sai_model_spec": _VERSION,
        "architecture": architecture,
        "implementation": "hf-ext",
        "title": title,
        "author": owner,
        "license": _read_licence(folder / "README.md"),
    }
    metadata = {f"modelspec.{name}": str(value) for name, value in told.items() if value}
    for path in sorted(place.glob("*.safetensors")):
        add_metadata(path, metadata)


def _read_licence(card: Path) -> str | None:
    """That of a card; `None` where its author has written no metadata that can be read."""
    try:
        return ModelCard.load(card).data.get("license")
    except (ValueError, yaml.YAMLError):
        return None


def add_metadata(path: Path, metadata: dict[str, str]) -> None:
    """Adds texts to the header of a safetensors file; its tensors are copied as they lie."""
    size = os.path.getsize(path)
    with open(path, "rb") as source:
        header = source.read(header_length(source.read(8), size, str(path)))
        # Offsets in the header count from its end: they stay when it grows.
        _, before = parse_header(header, size, str(path))
        content = {**parse_json_object(header, str(path)), "__metadata__": {**before, **metadata}}
        text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        with whole_file(path) as target:
            target.write(len(text).to_bytes(8, "little") + text)
            shutil.copyfileobj(source, target)
