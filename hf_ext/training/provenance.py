"""Record of the run that made a published model."""

import functools
import platform
import subprocess
from dataclasses import asdict
from glob import has_magic
from pathlib import Path
from typing import Any

import torch

from .arguments import TrainingArguments, map_paths
from .changes import installed_versions
from .state import Progress


def provenance(
    arguments: TrainingArguments, task: dict[str, Any], progress: Progress, processes: int
) -> dict[str, Any]:
    """The content of `training.json`."""
    libraries = ("hf-ext", "torch", "transformers", "diffusers", "peft", "accelerate", "datasets")
    cpu = f"CPU ({platform.machine()}), {torch.get_num_threads()} thread(s)"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu
    return {
        "arguments": public_arguments(arguments),
        "commit": source_commit(),
        "task": task,
        "hardware": f"{processes} process(es) on {device}",
        "seconds": round(progress.seconds, 1),
        "steps": progress.step,
        "samples": progress.samples,
        "versions": installed_versions(*libraries),
    }


def published_name(path: str | list) -> str:
    """The public name of a data set or model: a local folder by its last name, a Hub id as it is."""
    if isinstance(path, list):
        return " + ".join(published_name(part["path"] if isinstance(part, dict) else part) for part in path)
    local = Path(path).expanduser()
    return local.resolve().name if local.exists() or has_magic(path) else path


def public_arguments(arguments: TrainingArguments) -> dict[str, Any]:
    """Arguments for publication: only the last names of local folders."""
    content = asdict(arguments)
    del content["output_dir"], content["resume_from_checkpoint"]
    content["data"] = map_paths(content["data"], published_name)
    if content["init_from"] is not None:
        content["init_from"] = published_name(content["init_from"])
    # An autoencoder, a text encoder.
    words = {name: value for name, value in content["task"].items() if isinstance(value, str) and value}
    content["task"] |= {name: published_name(value) for name, value in words.items()}
    return content


@functools.cache
def source_commit() -> str | None:
    """The commit of hf_ext, where it runs from its git checkout, as this process found it first."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
