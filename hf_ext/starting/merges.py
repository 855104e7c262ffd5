"""A merge of somebody's own fine-tunes as a commented YAML file, found out from headers and cards alone."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

from ..hub.front_matter import read_front_matter
from ..merging.plan import Plan, make_plan
from ..merging.sources import size_text

# What says where a fine-tune came from: a file of its folder, and the key in it.
_ORIGINS = (("adapter_config.json", "base_model_name_or_path"), ("training.json", "init_from"))
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_TEXT = """\
# {count} fine-tunes of {base}. Written by `hf-ext init emr`.
# See the plan first, without a weight being read: hf-ext merge {file} --dry-run
# Merge: hf-ext merge {file} {out}
# Then: hf-ext emr compare {out}
base: {base_text}
# Name and place of each fine-tune: a folder, or org/name[@revision] of a Hub.
tasks:
{tasks}
# emr: one model and a bit a weight for each task. One model for all: ties, task_arithmetic, average and others.
method: emr
# How each task's strength is restored: global (the paper), official, tensor, l2, tensor_l2, none.
rescale: global
{adapters}# Tensors that stay as each task has them, by regular expressions. Heads differ and do so by themselves.
exclude: []
# {plan}
"""
_EXAMPLE = "# With --data FOLDER of your models, or --data FILE that lists them, this is filled in.\n"


def write_merge(folder: Path, data: str | None) -> str:
    """
    A merge for models.

    Args:
        folder (`Path`): Where the file will lie.
        data (`str`, *optional*):
            A folder with a folder for each model, or a text file with a model a line: `NAME=ID`, or a folder or
            `org/name[@revision]`. The base is the one called `base`, or that which the others name as theirs.

    Raises:
        ValueError: If there is no base, or these cannot be merged.
    """
    values = {name: shlex.quote(str(folder / place)) for name, place in (("file", "merge.yaml"), ("out", "merged"))}
    if data is None:
        return _EXAMPLE + _TEXT.format(
            **values,
            count="Your",
            base="one model",
            base_text="./YOUR-BASE",
            tasks="  first: ./YOUR-FIRST-MODEL\n  second: ./YOUR-SECOND-MODEL",
            adapters="",
            plan="The plan says what is merged, what stays with its task, and the sizes.",
        )
    models = _find_models(Path(data).expanduser())
    base = models.pop("base", None) or _named_base(models)
    tasks = {name: source for name, source in models.items() if not _same(source, base)}
    if not tasks:
        raise ValueError(f"{data} has only the base: put the fine-tunes beside it.")
    adapters = any((Path(source) / "adapter_config.json").is_file() for source in tasks.values())
    config = {"base": base, "tasks": tasks, **({"adapters": "delta"} if adapters else {})}
    # Headers alone are read; what cannot be merged is said with what to do.
    with make_plan(config) as plan:
        about = _describe(plan)
    return _TEXT.format(
        **values,
        count=len(tasks),
        base=" ".join(base.split()),
        base_text=json.dumps(base, ensure_ascii=False),
        tasks="\n".join(
            f"  {json.dumps(n, ensure_ascii=False)}: {json.dumps(s, ensure_ascii=False)}" for n, s in tasks.items()
        ),
        adapters="# Some are peft adapters, and are merged as the weights that they give.\nadapters: delta\n"
        if adapters
        else "",
        plan=about,
    )


def _describe(plan: Plan) -> str:
    elements = sum(row.elements for row in plan.merged_rows)
    share = plan.result_bytes / plan.checkpoints_bytes
    return (
        f"{len(plan.merged_rows)} tensors with {elements:,} elements are merged; the result has "
        f"{size_text(plan.result_bytes)}, {share:.0%} of the {len(plan.tasks)} models."
    )


def _find_models(place: Path) -> dict[str, str]:
    """The models by name: of a folder its folders with weights, of a list its lines."""
    if place.is_dir():
        found = {
            part.name: str(part) for part in sorted(place.iterdir()) if any(any(part.glob(kind)) for kind in _WEIGHTS)
        }
    elif place.is_file():
        try:
            lines = [line.strip() for line in place.read_text(encoding="utf-8").splitlines()]
        except ValueError as error:
            raise ValueError(f"{place} is no list of models, a line each: {error}.") from error
        found = {}
        for line in (line for line in lines if line and not line.startswith("#")):
            name, sign, source = line.partition("=")
            source = source.strip() if sign else line
            name = name.strip() if sign else source.partition("@")[0].rstrip("/").rpartition("/")[2]
            if name in found:
                raise ValueError(f"{place}: two models are called {name!r}; write NAME=ID for one of them.")
            found[name] = source
    else:
        raise ValueError(
            f"there is nothing at {place}: name a folder with a folder for each model, or a list of them."
        )
    if not found:
        raise ValueError(f"no model in {place}: it needs a folder for each, with safetensors, or a line for each.")
    return found


def _named_base(models: dict[str, str]) -> str:
    """The model that most of the others name as theirs."""
    origins = Counter(origin for source in models.values() if (origin := _origin(Path(source))) is not None)
    if not origins:
        raise ValueError(
            f"none of {', '.join(models)} says what it was fine-tuned from: call the folder of that model base, or "
            "write a line base=ID into the list."
        )
    return origins.most_common(1)[0][0]


def _origin(folder: Path) -> str | None:
    """The base model that a checkpoint's JSON files name."""
    for name, key in _ORIGINS:
        try:
            value: Any = json.loads((folder / name).read_text(encoding="utf-8")).get(key)
        except (OSError, ValueError, AttributeError):
            continue
        if isinstance(value, str):
            return value
    try:
        base = read_front_matter((folder / "README.md").read_text(encoding="utf-8")).get("base_model")
    except (OSError, ValueError):
        return None
    return base[0] if isinstance(base, list) and base else base if isinstance(base, str) else None


def _same(source: str, base: str) -> bool:
    one, two = Path(source).expanduser(), Path(base).expanduser()
    return source == base or (one.exists() and two.exists() and one.resolve() == two.resolve())
