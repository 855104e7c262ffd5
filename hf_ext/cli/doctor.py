"""hf-ext doctor: versions, devices and Hub for a bug report."""

import os
import platform
import re
import shutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from .options import JSON
from .output import print_json, print_rows

LIBRARIES = ("torch", "transformers", "diffusers", "peft", "accelerate", "datasets", "evaluate", "huggingface-hub")
# Variables that change what the libraries do and contain no secret.
_TOLD = re.compile(
    "(HF_|HUGGINGFACE_|TRANSFORMERS_|ACCELERATE_|CUDA_VISIBLE|OMP_NUM_THREADS)(?!.*(TOKEN|KEY|SECRET|PASSWORD))"
)


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
