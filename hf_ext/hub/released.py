"""Released models: small models in the package, found by a name without a slash."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from hf_ext.errors import UsageError

FOLDER = Path(str(resources.files("hf_ext.model_cards"))) / "released"
# Known without the models too, so that a command can say where they are.
_NAMES = """
cifar10 deblur demosaick denoise-color denoise-gray derain jpeg-color photo restore-tasks spoken-digits
super-resolution-x2
"""
WITHOUT = (
    "this hf-ext was built without the released models (HF_EXT_WITHOUT_MODELS=1). Install the wheel with them, or "
)
WITHOUT += "give the folder model_cards/released/NAME of the source; their licences differ from that of the code"


@dataclass(frozen=True)
class ReleasedModel:
    """Description of a released model, from the `released` section of its `training.json`."""

    name: str
    folder: Path
    task: str
    scores: str  # its main result, and beside it the baseline
    data: str
    license: str
    parameters: int
    bytes: int  # of its weights on disk
    steps: int
    core_hours: float  # of the training, on the machine
    machine: str = "one core"


def list_released() -> list[ReleasedModel]:
    """The models that travel with this installation, by name."""
    return [_describe(folder) for folder in _folders().values()]


def released(name: str) -> Path:
    """
    The folder of a released model, for `from_pretrained`.

    Args:
        name (`str`): One of the names that `hf-ext models` lists, such as `"denoise-color"`.

    Returns:
        `Path`: A folder with configuration, weights, code and card.

    Raises:
        UsageError: If there is no such model.
        ValueError: If the package was installed without its models.

    Example:
        >>> import hf_ext
        >>> from transformers import AutoModelForImageToImage
        >>> model = AutoModelForImageToImage.from_pretrained(hf_ext.released("denoise-color"))
        >>> model.config.model_type
        'semanir'
    """
    folders = _folders()
    if name not in folders:
        close = difflib.get_close_matches(name, folders, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        if not folders:
            raise ValueError(f"{name!r}: {WITHOUT}")
        raise UsageError(f"no released model is called {name!r}.{hint} Released: {', '.join(folders)}.")
    return folders[name]


def find_model(source: str) -> str:
    """The folder of a released model if its name was typed and is no file or folder here; else what was typed."""
    if "/" in source or Path(source).expanduser().exists():
        return source
    folders = _folders()
    if not folders and source in _NAMES.split():
        raise ValueError(f"{source!r}: {WITHOUT}")
    return str(folders.get(source, source))


def _folders() -> dict[str, Path]:
    return {folder.name: folder for folder in sorted(FOLDER.glob("*")) if (folder / "training.json").is_file()}


def _describe(folder: Path) -> ReleasedModel:
    values: dict[str, Any] = json.loads((folder / "training.json").read_text(encoding="utf-8"))["released"]
    size = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    told = {field.name: values[field.name] for field in fields(ReleasedModel) if field.name in values}
    return ReleasedModel(name=folder.name, folder=folder, bytes=size, **told)
