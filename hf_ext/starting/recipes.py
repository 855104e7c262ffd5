"""Recipes of the package: YAML files of trainings with names such as `semanir/lora`."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hf_ext

from ..errors import UsageError
from ..settings import read_yaml
from ..training.methods import TASKS

# A wheel contains the recipes beside its modules, a repository in examples/; setup.py copies them.
_INSTALLED = Path(hf_ext.__file__).parent / "recipes"
FOLDER = _INSTALLED if _INSTALLED.is_dir() else _INSTALLED.parents[1] / "examples"
_FOLDERS = ("disentangled_dit", "emr", "mrconv", "released", "semanir")
# The configuration of a merge, which is not a training.
_MERGE = "emr/merge"


@dataclass(frozen=True)
class Recipe:
    """Summary of a recipe, from its first lines."""

    name: str
    path: Path
    method: str
    # the first sentence of its comment
    what: str
    data: str


def list_recipes() -> list[Recipe]:
    """The recipes of this installation by name, without those of studies and scripts in examples/."""
    files = sorted(path for folder in _FOLDERS for path in (FOLDER / folder).glob("*.yaml"))
    found = [_describe(path) for path in files if not path.name.startswith("study")]
    return [recipe for recipe in found if recipe.method in TASKS or recipe.name == _MERGE]


def find_recipe(name: str) -> Path:
    """
    Finds the file of a recipe.

    Args:
        name (`str`): One of the names that `hf-ext recipes` lists, such as `"semanir/denoise_color"`.

    Raises:
        ValueError: If there is no such recipe.
    """
    paths = {recipe.name: recipe.path for recipe in list_recipes()}
    if name not in paths:
        # Users may remember only the part after the folder.
        ends = {known.rpartition("/")[2]: known for known in paths}
        close = difflib.get_close_matches(name, paths, n=1) or [
            ends[end] for end in difflib.get_close_matches(name, ends, n=1)
        ]
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise UsageError(f"{name} is neither a file nor a recipe.{hint} `hf-ext recipes` lists them.")
    return paths[name]


def _describe(path: Path) -> Recipe:
    text = path.read_text(encoding="utf-8")
    comment = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    values: dict[str, Any] = read_yaml(path)
    train = (values.get("data") or {}).get("train") or {}
    place = train.get("path", "") if isinstance(train, dict) else str(train)
    told = re.search(r"\bData: (.+?)(?:\.(?: |$)|;)", comment)
    return Recipe(
        name=f"{path.parent.name}/{path.stem}",
        path=path,
        method=str(values.get("method")),
        what=re.split(r"\. (?=[A-Z`])|; ", comment, maxsplit=1)[0].rstrip("."),
        data=told[1] if told else str(place) or "fine-tunes of one base",
    )
