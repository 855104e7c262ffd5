"""A commented YAML file for a merge of the user's fine-tunes, written from their headers and cards."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

from ..hub.front_matter import read_front_matter
from ..merging.plan import Plan, make_plan
from ..merging.sources import size_text

# Files, and their keys, that name the base of a fine-tune.
_ORIGINS = (("adapter_config.json", "base_model_name_or_path"), ("training.json", "init_from"))
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_TEXT = """\
# {count} fine-tunes of {base}. Written by `hf-ext init emr`. Show the plan, without reading weights: hf-ext merge
# {file} --dry-run Merge: hf-ext merge {file} {out} Compare with the fine-tunes: hf-ext emr compare {out}
base: {base_text}
# Fine-tunes by name, each a folder or org/name[@revision].
tasks:
{tasks}
# emr: one model, and one bit per weight for each task. Single models: ties, task_arithmetic, average and others.
method: emr
# Scale of each task: global (the paper), official, tensor, l2, tensor_l2, none.
rescale: global
{adapters}# Regular expressions for tensors that each task keeps unmerged. Heads are kept without one.
exclude: []
# {plan}
"""
_EXAMPLE = (
    "# Run `hf-ext init emr` with --data FOLDER of your models, or --data FILE that lists them, to fill this in.\n"
)


def write_merge(folder: Path, data: str | None) -> str:
    """
    Writes the YAML file of a merge.

    Args:
        folder (`Path`): Where the file will lie.
        data (`str`, *optional*):
            A folder with a folder for each model, or a text file with one model per line: `NAME=ID`, or a folder or
            `org/name[@revision]`. The base is the model called `base`, or the one that the fine-tunes name.

    Raises:
        ValueError: If no base is found, or the models cannot be merged.
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
            plan="The plan shows the merged tensors, the tensors that tasks keep, and the sizes.",
        )
    models = _find_models(Path(data).expanduser())
    base = models.pop("base", None) or _named_base(models)
    tasks = {name: source for name, source in models.items() if not _same(source, base)}
    if not tasks:
        raise ValueError(f"{data} contains only the base: add the fine-tunes.")
    adapters = any((Path(source) / "adapter_config.json").is_file() for source in tasks.values())
    config = {"base": base, "tasks": tasks, **({"adapters": "delta"} if adapters else {})}
    # Reads headers only, and refuses models that cannot be merged.
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
        adapters="# Some fine-tunes are peft adapters: merge the full weights that they produce.\nadapters: delta\n"
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
    """The models by name: the subfolders with weights, or the lines of a list."""
    if place.is_dir():
        found = {
            part.name: str(part) for part in sorted(place.iterdir()) if any(any(part.glob(kind)) for kind in _WEIGHTS)
        }
    elif place.is_file():
        try:
            lines = [line.strip() for line in place.read_text(encoding="utf-8").splitlines()]
        except ValueError as error:
            raise ValueError(f"{place} is not a text file with one model per line: {error}.") from error
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
            f"{place} does not exist: give a folder that contains the folders of the models, or a file that lists "
            "them."
        )
    if not found:
        raise ValueError(f"no model in {place}: it needs a folder with safetensors files, or a line, per model.")
    return found


def _named_base(models: dict[str, str]) -> str:
    """The model that most fine-tunes name as their base."""
    origins = Counter(origin for source in models.values() if (origin := _origin(Path(source))) is not None)
    if not origins:
        raise ValueError(
            f"the base of {', '.join(models)} is unknown: name the folder of the base model base, or add a line "
            "base=ID to the list."
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
