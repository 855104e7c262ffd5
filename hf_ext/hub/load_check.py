"""What code may travel with a checkpoint, and the proof that the checkpoint loads without this package.

The code in a folder is run only after each file was found equal to the installed package's, so that a folder that came
from elsewhere is never executed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from huggingface_hub import snapshot_download

from .diffusers_folders import is_pipeline, pipeline_code
from .safetensors_headers import parse_json_object

# The roles whose files travel with a checkpoint; tests, training and references stay at home.
SHIPPED_ROLES = (
    "configuration",
    "modeling",
    "ops",
    "kernels",
    "streaming",
    "processing",
    "image_processing",
    "feature_extraction",
)
# What restores a task of an artifact of EMR-Merging where hf_ext is not installed.
_LOADER = Path(__file__).parents[1] / "emr" / "emr_loader.py"
_TIMEOUT_SECONDS = 3600
_STDERR_TAIL = 2000
_CREDENTIALS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH")


def installed_room(model_type: str) -> ModuleType | None:
    """
    Finds the sub-package of hf_ext that defines a model type.

    Args:
        model_type (`str`): As `config.json` names it.

    Returns:
        `ModuleType` or `None`: For instance `hf_ext.semanir`; `None` when the type is not one of ours.
    """
    # seconds that a merge would wait for
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return None
    package = CONFIG_MAPPING[model_type].__module__.rpartition(".")[0]
    return sys.modules[package] if package.startswith("hf_ext.") else None


def room_of(folder: Path) -> ModuleType | None:
    """
    Finds the sub-package of hf_ext that a checkpoint belongs to.

    Args:
        folder (`Path`): A model with `config.json`, or a peft adapter, which names the library of its base model.

    Returns:
        `ModuleType` or `None`: As for [`installed_room`].
    """
    adapter, config = folder / "adapter_config.json", folder / "config.json"
    if adapter.is_file():
        mapping = _read_json(adapter).get("auto_mapping")
        library = str(mapping.get("parent_library")) if isinstance(mapping, dict) else ""
        if library.startswith("hf_ext."):
            return sys.modules.get(library.rpartition(".")[0])
        # peft leaves that entry out where the configuration has a task_type; our own runs name their method.
        training = folder / "training.json"
        arguments = _read_json(training).get("arguments") if training.is_file() else None
        return installed_room(str(arguments.get("method"))) if isinstance(arguments, dict) else None
    return installed_room(str(_read_json(config).get("model_type"))) if config.is_file() else None


def room_code(room: ModuleType) -> dict[str, Path]:
    """
    The files of a room that travel with checkpoints.

    Args:
        room (`ModuleType`): A sub-package of hf_ext.

    Returns:
        `dict[str, Path]`: The installed files by name.
    """
    assert room.__file__ is not None
    home = Path(room.__file__).parent
    return {file.name: file for role in SHIPPED_ROLES for file in sorted(home.glob(f"{role}_*.py"))}


def verify_code(folder: Path) -> None:
    """
    Checks that a folder holds and names no code except files of the installed package, unchanged.

    Args:
        folder (`Path`): A staged folder.

    Raises:
        ValueError: A `.py` file that is not the installed package's, or a JSON file that names code elsewhere.
    """
    if is_pipeline(folder):
        allowed = pipeline_code(folder)
    else:
        room = room_of(folder)
        allowed = {} if room is None else room_code(room)
    if (folder / "emr.json").is_file():
        allowed[_LOADER.name] = _LOADER
    shipped = set()
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        if name not in allowed or path.read_bytes() != allowed[name].read_bytes():
            raise ValueError(
                f"{path}: not a file of the installed hf_ext, so it is neither run nor uploaded; "
                "remove it, or install the version of hf_ext that wrote it"
            )
        shipped.add(path.stem)
    for path in sorted(folder.rglob("*.json")):
        _verify_references(path, shipped)


def _verify_references(path: Path, shipped: set[str]) -> None:
    """Refuses a JSON file that makes a loader run code from another place than the verified files."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}); write the file again") from error
    if not isinstance(content, dict):
        return
    for reference in _strings(content.get("auto_map", {})):
        module, _, name = reference.partition(".")
        if module not in shipped or not name.isidentifier():
            raise ValueError(f"{path}: auto_map names {reference!r}, code that is not beside it; remove the entry")
    if "custom_pipelines" in content:
        raise ValueError(f"{path}: custom_pipelines names code that is not shipped; remove the entry")
    refuse_kernels(content, path)


def refuse_kernels(config: dict[str, Any], path: Path) -> None:
    """
    Refuses a configuration that makes transformers fetch and run a kernel: that is code from elsewhere.

    Args:
        config (`dict`): The configuration.
        path (`Path`): Where it was read, for the message.

    Raises:
        ValueError: An attention or experts implementation is named as `org/name`.
    """
    for key in ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"):
        if any("/" in value for value in _strings(config.get(key, {}))):
            raise ValueError(f"{path}: {key} names a kernel on the Hub, which is code; remove the entry")


def _strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.values() for text in _strings(item)]
    if isinstance(value, list):
        return [text for item in value for text in _strings(item)]
    return [value] if isinstance(value, str) else []


def check_loads(folder: str | Path, *, endpoint: str | None = None, token: str | bool | None = None) -> None:
    """
    Loads a staged folder in a new process that cannot import hf_ext, has no network and no token.

    The class that was saved and the base class are loaded, the other heads that `auto_map` names are imported (an
    adapter: its configuration and weights are loaded), then the image processor or feature extractor and the
    tokenizer. Of a pipeline all components are loaded. The class that was saved must find all of its weights, and the
    file no others. Of an artifact of EMR-Merging the merged model is loaded, and its first task restored by
    `emr_loader.py`: for that, a base on a Hub is downloaded if it is not in the cache.

    Args:
        folder (`str` or `Path`): A folder that [`stage`] wrote.
        endpoint (`str`, *optional*): Address of the Hub, for the base of an artifact. Defaults to `HF_ENDPOINT`.
        token (`str` or `bool`, *optional*): Token of that Hub.

    Raises:
        ValueError: The folder holds code that is not the installed package's (nothing was run), or it does not load;
            the message ends with what the process wrote.
    """
    folder = Path(folder).resolve()
    verify_code(folder)
    base = _fetch_base(folder, endpoint, token)
    probe = Path(__file__).with_name("load_probe.py").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as home:
        environment = {key: value for key, value in os.environ.items() if key not in _CREDENTIALS}
        environment |= {
            "HF_HOME": home,
            "HF_HUB_CACHE": f"{home}/hub",
            "HF_MODULES_CACHE": f"{home}/modules",
            "HF_HUB_OFFLINE": "1",
        }
        try:
            result = subprocess.run(
                [sys.executable, "-c", probe, str(folder), *([str(base)] if base else [])],
                cwd=home,
                env=environment,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise ValueError(f"{folder}: did not load without hf_ext within {_TIMEOUT_SECONDS} s") from error
    if result.returncode != 0:
        raise ValueError(
            f"{folder}: does not load where hf_ext is not installed; nothing was uploaded. The process said:\n"
            f"{result.stderr[-_STDERR_TAIL:].strip()}"
        )


def _fetch_base(folder: Path, endpoint: str | None, token: str | bool | None) -> Path | None:
    """The weights that tasks of an artifact are restored from, where they are on a Hub."""
    if not (folder / "emr.json").is_file():
        return None
    base = _read_json(folder / "emr.json")["base"]
    if base["folder"] is not None:
        return None
    repo_id = base["source"].partition("@")[0]
    options: dict[str, Any] = {"endpoint": endpoint, "token": token, "allow_patterns": list(base["files"])}
    return Path(snapshot_download(repo_id, revision=base["revision"], **options))


def _read_json(path: Path) -> dict[str, Any]:
    return parse_json_object(path.read_bytes(), str(path))
