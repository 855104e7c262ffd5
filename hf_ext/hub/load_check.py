"""Check of the code beside a checkpoint, and proof that the checkpoint loads with this package and without it.

The code in a folder is run only after each file was found equal to the installed package's, so that a folder that came
from elsewhere is never executed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

from huggingface_hub import snapshot_download

from ..errors import DataError, NotPublished
from ..files import read_json, read_json_object
from .diffusers_folders import is_pipeline, pipeline_code
from .published_files import walk

# What restores a task of an artifact of EMR-Merging where hf_ext is not installed.
LOADER = Path(__file__).parents[1] / "emr" / "emr_loader.py"
# Rooms whose classes transformers loads as code beside a checkpoint.
_METHODS = ("mrconv", "semanir")
TIMEOUT_SECONDS = 3600
# Of the repository that the check makes up.
_COMMIT = "0" * 40
_STDERR_TAIL = 2000
_CREDENTIALS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH")


def installed_room(model_type: str) -> ModuleType | None:
    """The sub-package of hf_ext that defines a model type; `None` when the type is not one of ours."""
    # seconds that a merge would wait for
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return None
    package = CONFIG_MAPPING[model_type].__module__.rpartition(".")[0]
    return sys.modules[package] if package.startswith("hf_ext.") else None


def room_of(folder: Path) -> ModuleType | None:
    """The sub-package of hf_ext that a checkpoint belongs to, of an adapter that of its base model."""
    if not (folder / "adapter_config.json").is_file():
        return installed_room(str(read_json_object(folder / "config.json", optional=True).get("model_type")))
    mapping = read_json_object(folder / "adapter_config.json").get("auto_mapping")
    library = str(mapping.get("parent_library")) if isinstance(mapping, dict) else ""
    if library.startswith("hf_ext."):
        return sys.modules.get(library.rpartition(".")[0])
    # peft leaves that entry out where the configuration has a task_type; our own runs name their method.
    arguments = read_json_object(folder / "training.json", optional=True).get("arguments")
    return installed_room(str(arguments.get("method"))) if isinstance(arguments, dict) else None


def shipped_files(room: Path) -> list[Path]:
    """The files of a room that travel with checkpoints: of a method all but `__init__.py`, of other rooms none."""
    return sorted(path for path in room.glob("*.py") if room.name in _METHODS and path.name != "__init__.py")


def room_code(room: ModuleType) -> dict[str, Path]:
    """The files of a room that travel with checkpoints, by name."""
    return {file.name: file for file in shipped_files(Path(str(room.__file__)).parent)}


def verify_code(folder: Path) -> None:
    """Checks that a folder holds and names no code except files of the installed package, unchanged."""
    from transformers.dynamic_module_utils import get_relative_imports

    if is_pipeline(folder):
        allowed = pipeline_code(folder)
    else:
        room = room_of(folder)
        allowed = {} if room is None else room_code(room)
    if (folder / "emr.json").is_file():
        allowed[LOADER.name] = LOADER
    shipped = set()
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        if name not in allowed or path.read_bytes() != allowed[name].read_bytes():
            told = "so neither run nor uploaded; remove it, or install the version of hf_ext that wrote it"
            raise DataError(f"{path}: not a file of the installed hf_ext, {told}")
        # where the loader has to fetch it, transformers does not say which one is missing
        for needed in sorted(get_relative_imports(path)):
            if not path.with_name(f"{needed}.py").is_file():
                raise DataError(f"{path}: imports {needed}.py, which is not in the folder; stage the folder again")
        shipped.add(path.stem)
    # Nor may a JSON file make a loader run code from another place than the verified files.
    for path in sorted(folder.rglob("*.json")):
        if not isinstance(content := read_json(path), dict):
            continue
        for key in ("auto_map", "custom_pipelines"):
            for reference in code_references({key: content.get(key)}):
                module, _, name = reference.partition(".")
                if module not in shipped or not name.isidentifier():
                    told = f"{path}: {key} names {reference!r}, code that is not in the folder"
                    raise DataError(f"{told}; remove the entry")
        refuse_kernels(content, path)


def code_references(config: dict[str, Any]) -> list[str]:
    """The classes of code beside a configuration that loaders of transformers run."""
    pipelines = config.get("custom_pipelines") or {}
    items = pipelines.values() if isinstance(pipelines, dict) else [pipelines]
    named = [item.get("impl", "") if isinstance(item, dict) else item for item in items]
    return _strings(config.get("auto_map", {})) + [name if isinstance(name, str) else repr(name) for name in named]


def refuse_kernels(config: dict[str, Any], path: Path) -> None:
    """Refuses a configuration that makes transformers fetch and run a kernel: that is code from elsewhere."""
    for key in ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"):
        if any("/" in value for value in _strings(config.get(key, {}))):
            raise DataError(f"{path}: {key} names a kernel on the Hub, which is code; remove the entry")


def _strings(value: Any) -> list[str]:
    items = list(value.values()) if isinstance(value, dict) else value
    if isinstance(items, list):
        return [text for item in items for text in _strings(item)]
    return [value] if isinstance(value, str) else []


def check_loads(
    folder: str | Path,
    *,
    repo_id: str | None = None,
    endpoint: str | None = None,
    token: str | bool | None = None,
    seconds: float = TIMEOUT_SECONDS,
) -> None:
    """Loads a staged folder as those do who pull it: from a Hub's cache, in new processes, offline, without token."""
    # In the first process hf_ext cannot be imported, so the code beside the weights is what loads; in the second, for
    # what is ours, it is imported and its classes load. The ways are those that the card shows; see `load_probe`. The
    # class that was saved must find all of its weights, and the file no others.
    folder = Path(folder).resolve()
    verify_code(folder)
    repo_id = repo_id or "org/" + (re.sub(r"[^A-Za-z0-9]+", "-", folder.name).strip("-") or "model")
    base = _fetch_base(folder, endpoint, token)
    own = is_pipeline(folder) or room_of(folder) is not None or (folder / "emr.json").is_file()
    probe = Path(__file__).with_name("load_probe.py").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as home:
        cache = Path(home, "hub")
        fill_cache(cache, repo_id, _COMMIT, {name: path for name, path in walk(folder) if path.is_file()})
        arguments = [repo_id] if base is None else [repo_id, str(fill_cache(cache, *base))]
        _run_probe(folder, [probe, "absent", *arguments], home, seconds, "where hf_ext is not installed")
        if own:
            _run_probe(folder, [probe, "installed", *arguments], home, seconds, "where hf_ext is installed")


def _run_probe(folder: Path, command: list[str], home: str, seconds: float, how: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in _CREDENTIALS}
    environment |= {"HF_HOME": home, "HF_HUB_CACHE": f"{home}/hub", "HF_MODULES_CACHE": f"{home}/modules"}
    try:
        result = subprocess.run(
            [sys.executable, "-c", *command],
            cwd=home,
            env=environment | {"HF_HUB_OFFLINE": "1"},
            # where code had to be trusted, transformers would ask the user
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise DataError(f"{folder}: did not load {how} within {seconds} s") from error
    if result.returncode != 0:
        said = textwrap.indent(result.stderr[-_STDERR_TAIL:].strip(), "  ")
        raise NotPublished(f"{folder}: does not load {how}; nothing was uploaded. The process said:\n{said}")


def fill_cache(cache: Path, repo_id: str, commit: str, files: dict[str, Path]) -> Path:
    """Lays files out as the cache of huggingface_hub does, as links to blobs; returns their folder."""
    repository = cache / f"models--{repo_id.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    for place in (repository / "refs", repository / "blobs", snapshot):
        place.mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit, encoding="utf-8")
    for number, (name, path) in enumerate(files.items()):
        blob, link = repository / "blobs" / f"{number:040x}", snapshot / name
        try:
            os.link(path.resolve(), blob)
        except OSError:
            shutil.copyfile(path, blob)
        link.parent.mkdir(parents=True, exist_ok=True)
        try:
            link.symlink_to(os.path.relpath(blob, link.parent))
        except OSError:
            # as huggingface_hub does where the system has no links for everybody
            shutil.copyfile(blob, link)
    return snapshot


def _fetch_base(
    folder: Path, endpoint: str | None, token: str | bool | None
) -> tuple[str, str, dict[str, Path]] | None:
    """Repository, commit and files of the weights that tasks of an artifact are restored from, if not inside it."""
    base = read_json_object(folder / "emr.json", optional=True).get("base")
    if base is None or base["folder"] is not None:
        return None
    repo_id = base["source"].partition("@")[0]
    options: dict[str, Any] = {"endpoint": endpoint, "token": token, "allow_patterns": list(base["files"])}
    place = Path(snapshot_download(repo_id, revision=base["revision"], **options))
    return repo_id, base["revision"], {name: place / name for name in base["files"]}
