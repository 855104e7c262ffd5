"""hf-ext info: a checkpoint; hf-ext models: the released ones; hf-ext doctor: this machine, for a bug report."""

import os
import platform
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from hf_ext.terminal import count_of

from .options import JSON, find_released
from .output import aligned_table, decimals, find_terminal, print_json, print_rows, result_row, say

# Small files beside the weights, fetched from a Hub together.
DESCRIPTIONS = ["config.json", "model_index.json", "adapter_config.json", "eval.json", "emr.json", "README.md"]
LIBRARIES = ("torch", "transformers", "diffusers", "peft", "accelerate", "datasets", "evaluate", "huggingface-hub")
# Variables that change what the libraries do and contain no secret.
_TOLD = re.compile(
    "(HF_|HUGGINGFACE_|TRANSFORMERS_|ACCELERATE_|CUDA_VISIBLE|OMP_NUM_THREADS)(?!.*(TOKEN|KEY|SECRET|PASSWORD))"
)
CARD_FIELDS = ("license", "library_name", "pipeline_tag", "base_model", "datasets")


def describe(source: str) -> dict[str, Any]:
    """Describes a checkpoint without reading its tensors; absent values are null or empty."""
    from huggingface_hub import snapshot_download

    from hf_ext.hub.diffusers_folders import class_name

    tensors, commit = read_headers(source)
    path = Path(source).expanduser()
    if path.exists():
        folder = path if path.is_dir() else path.parent
    else:
        repo_id = source.partition("@")[0]
        folder = Path(snapshot_download(repo_id, revision=commit, allow_patterns=DESCRIPTIONS))
    config = read_description(folder / "config.json", architectures=list, model_type=str, auto_map=dict)
    adapter = read_description(folder / "adapter_config.json", peft_type=str, base_model_name_or_path=str)
    if index := read_description(folder / "model_index.json"):
        config = {"architectures": [class_name(index)]}
    dtypes = Counter[str]()
    for tensor in tensors:
        dtypes[str(tensor.dtype).removeprefix("torch.")] += tensor.numbers
    return {
        "source": source,
        "commit": commit,
        "architectures": config.get("architectures") or [],
        "model_type": config.get("model_type"),
        "heads": config.get("auto_map") or {},
        "adapter": {key: adapter.get(key) for key in ("peft_type", "base_model_name_or_path")} if adapter else None,
        "parameters": sum(dtypes.values()),
        "dtypes": dict(dtypes),
        "tensors": len(tensors),
        "bytes": sum(tensor.nbytes for tensor in tensors),
        "files": len({tensor.file for tensor in tensors}),
        "card": read_card(folder / "README.md"),
        "results": read_results(folder / "eval.json"),
        "merge": read_merge(folder),
    }


def read_headers(source: str) -> tuple[list[Any], str | None]:
    """Headers of all tensors of a checkpoint or of a diffusers pipeline, and the commit on a Hub."""
    from hf_ext.hub.checkpoints import open_checkpoint
    from hf_ext.hub.diffusers_folders import is_pipeline, read_headers, read_remote_headers
    from hf_ext.hub.header_format import CheckpointError

    path = Path(source).expanduser()
    if is_pipeline(path):
        return read_headers(path), None
    try:
        with open_checkpoint(source) as checkpoint:
            return [checkpoint.info(name) for name in checkpoint], checkpoint.commit
    except CheckpointError:
        # The weights of a pipeline are in subfolders, which the search for a checkpoint does not cover.
        found = None if path.exists() else read_remote_headers(source)
        if found is None:
            raise
        return found


def read_description(path: Path, **kinds: type) -> dict[str, Any]:
    """The JSON object in a file, empty if there is no such file; checks the types of the given keys if present."""
    from hf_ext.files import read_json_object, require_kinds

    found = read_json_object(path, optional=True)
    require_kinds(found, kinds, path)
    return found


def read_results(path: Path) -> list[dict[str, Any]]:
    """The results of an eval.json, checked for the keys that are printed."""
    from hf_ext.hub.cards import check_results

    results = read_description(path).get("results")
    return [] if results is None else check_results(results, path)


def read_card(path: Path) -> dict[str, Any] | None:
    """The metadata of a model card, or None if there is no card."""
    from hf_ext.hub.card_rules import read_front_matter

    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            # More of a card is not read: its metadata are far shorter.
            metadata = read_front_matter(file.read(10_000_000).decode("utf-8", "replace"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return {name: metadata[name] for name in CARD_FIELDS if metadata.get(name) is not None}


def read_merge(folder: Path) -> dict[str, Any] | None:
    """The tasks in the manifest of a merge, or None if the folder is not an artifact."""
    if not (folder / "emr.json").is_file():
        return None
    from hf_ext.emr.manifest import Manifest

    manifest = Manifest.read(folder)

    def pick(record: Any, *names: str) -> dict[str, Any]:
        return {name: getattr(record, name) for name in names}

    return {
        **{name: manifest.method.get(name) for name in ("method", "rescale")},
        "deltas": manifest.deltas,
        "base": pick(manifest.base, "source", "revision"),
        "tasks": {
            name: pick(task.origin, "source", "revision") | pick(task, "architecture", "scale", "density")
            for name, task in manifest.tasks.items()
        },
    }


def merge_rows(merge: dict[str, Any]) -> list[tuple[str, str]]:
    """The summary of a merge: its method, its base and its tasks."""

    def place(source: dict[str, Any]) -> str:
        return f"{source['source']}@{source['revision']}" if source["revision"] else str(source["source"])

    how = f"{merge['method'] or 'not stated'}, rescale {merge['rescale']}"
    rows = [("merged by", how), ("base", place(merge["base"]))]
    for name, task in merge["tasks"].items():
        scale = "by tensor" if task["scale"] is None else decimals(task["scale"])
        kept = "kept" if merge["deltas"] else "mask density"
        rows.append((f"task {name}", f"λ {scale}, {kept} {task['density']:.4f}, from {place(task)}"))
    return rows


@click.command()
@click.argument("source", metavar="SOURCE", type=find_released)
@JSON
def info(source: str, as_json: bool) -> None:
    """Describe SOURCE: a folder, a safetensors file, or org/name[@revision].

    Only headers, configuration and card are read; the weights are not downloaded. The number of parameters counts all
    stored values, including buffers.

    \b
    Examples:
      hf-ext info runs/denoise/snapshot
      hf-ext info org/name@v1 --json
    """
    found = describe(source)
    if as_json:
        print_json(found)
        return
    rows = [
        ("source", source if found["commit"] is None else f"{source} (commit {found['commit']})"),
        ("architecture", ", ".join(map(str, found["architectures"])) or "not stated"),
        ("model type", found["model_type"] or "not stated"),
        ("parameters", f"{found['parameters']:,}"),
        ("dtypes", ", ".join(f"{dtype} {count:,}" for dtype, count in found["dtypes"].items())),
        ("tensors", f"{found['tensors']:,} in {count_of(found['files'], 'file')}, {found['bytes']:,} bytes"),
        *((f"loads as {head}", code) for head, code in found["heads"].items()),
        *((f"adapter {key}", value) for key, value in (found["adapter"] or {}).items()),
        *((f"card {key}", value) for key, value in (found["card"] or {"": "none"}).items()),
        *(result_row(entry) for entry in found["results"]),
        *(merge_rows(found["merge"]) if found["merge"] else []),
    ]
    print_rows(rows, title="Checkpoint")


@click.command()
@JSON
def models(as_json: bool) -> None:
    """List the released models. Every command that takes a MODEL accepts their names.

    \b
    Examples:
      hf-ext models --json
      hf-ext restore denoise-color photo.jpg --out restored
      hf-ext info denoise-color
    """
    from hf_ext.hub.released import WITHOUT, list_released

    found = list_released()
    if as_json:
        print_json([{key: value for key, value in asdict(model).items() if key != "folder"} for model in found])
        return
    if not found:
        click.echo(f"This version contains no released model: {WITHOUT}.")
    lines: list[str] = []
    for model in found:
        size = f"{model.parameters / 1e6:.2f} M parameters, {model.bytes / 1e6:.1f} MB"
        size += f", trained for {model.core_hours:g} hours of {model.machine}"
        title = f"{model.name}: {model.task}"
        rows = [("size", size), ("scores", model.scores), ("data", model.data), ("licence", model.license)]
        if find_terminal():
            print_rows(rows, title=title)
        else:
            # A pipe gets no titles of tables.
            lines += [title, *aligned_table(rows[0], rows[1:], names=2)]
    say(*lines)


@click.command()
@JSON
@click.option("--offline", is_flag=True, help="Do not contact the Hub.")
def doctor(as_json: bool, offline: bool) -> None:
    """Print versions, devices, extras, cache and Hub, for a bug report. No token is printed.

    \b
    Examples:
      hf-ext doctor
      hf-ext doctor --offline --json
    """
    found = {
        "hf-ext": installed_version("hf-ext"),
        "python": f"{platform.python_version()}, {platform.platform()}",
        "libraries": {name: installed_version(name) for name in LIBRARIES},
        "extras": attempt(describe_extras),
        "devices": attempt(describe_devices),
        "cache": attempt(describe_cache),
        "hub": attempt(describe_hub, offline),
        "environment": {name: hide_secrets(value) for name, value in os.environ.items() if _TOLD.match(name)},
    }
    if as_json:
        print_json(found)
        return
    rows = []
    for name, value in found.items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        rows += [(name if place == 0 else "", f"{key} {item}".strip()) for place, (key, item) in enumerate(parts)]
    print_rows(rows, title="Environment")


def attempt(describe: Callable[..., Any], *arguments: Any) -> Any:
    """The description of a part of the machine, or the error, since of a broken machine a report is wanted most."""
    try:
        return describe(*arguments)
    except Exception as error:
        return hide_secrets(f"no: {type(error).__name__}: {error}".splitlines()[0])


def installed_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def describe_extras() -> dict[str, str]:
    from hf_ext.extras import EXTRAS

    found = dict.fromkeys(sorted(EXTRAS.values()), "installed")
    for name, extra in EXTRAS.items():
        if find_spec(name) is None:
            found[extra] = f"without {name}" if found[extra] == "installed" else f"{found[extra]}, {name}"
    return found


def describe_devices() -> dict[str, str]:
    import psutil
    import torch

    memory = psutil.virtual_memory().total / 2**30
    found = {"cpu": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads of torch, {memory:.0f} GiB"}
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        found[f"cuda:{index}"] = f"{device.name}, {device.total_memory / 2**30:.0f} GiB"
    if torch.backends.mps.is_available():
        found["mps"] = "there"
    return found


def describe_cache() -> str:
    from huggingface_hub.constants import HF_HUB_CACHE

    place = Path(HF_HUB_CACHE)
    there = next(folder for folder in (place, *place.parents) if folder.exists())
    return f"{place}, {shutil.disk_usage(there).free / 1e9:.1f} GB free"


def describe_hub(offline: bool) -> dict[str, Any]:
    """Address of the Hub, its reachability, and the presence of a token."""
    from huggingface_hub import constants, get_session, get_token

    def ask() -> str:
        if offline or constants.HF_HUB_OFFLINE:
            return "not asked"
        return f"yes, {get_session().get(f'{constants.ENDPOINT}/api/models?limit=1', timeout=5).status_code}"

    token = attempt(lambda: "there" if get_token() else "none")
    return {"at": hide_secrets(constants.ENDPOINT), "token": token, "answers": attempt(ask)}


def hide_secrets(text: str) -> str:
    """The text without user names and passwords in its URLs; nothing of one that contains another secret."""
    from hf_ext.hub.secret_shapes import find_secrets

    # Up to the last @: passwords may contain @ and /.
    told = re.sub(r"//\S*@", "//...@", text)
    return "(hidden: it contains a secret)" if any(find_secrets(told)) else told
