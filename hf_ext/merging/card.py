"""Card of a merge: sources, rescalers, sizes, how to load it, and the report."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hf_ext.emr.manifest import MANIFEST, Manifest, SourceRecord, TaskRecord
from hf_ext.emr.report import report_markdown

from ..files import read_json_object
from ..hub.disclosure import last_name
from ..hub.folder_kinds import CardPart
from ..hub.safetensors_headers import CheckpointError
from .compare import REPORT, explain_damage
from .configuration import RUNNING, MergeConfig
from .methods import METHODS

# In the manifest's method: the tasks that voted, once they are not simply all tasks.
VOTED = "elected_from"


@dataclass(frozen=True)
class Merge:
    """Record of a merge, read from the folder that it wrote."""

    library: str  # `transformers`, `diffusers` or `peft`
    base: SourceRecord  # the pretrained model
    tasks: dict[str, SourceRecord]  # the fine-tuned models
    method: dict[str, Any]  # options that decided the numbers
    manifest: Manifest | None  # of an artifact with masks


def read_merge(folder: Path) -> Merge | None:
    """Reads the record of the merge that wrote a folder."""
    if (folder / MANIFEST).is_file():
        manifest = Manifest.read(folder)
        tasks = {name: task.origin for name, task in manifest.tasks.items()}
        return Merge(manifest.library, manifest.base, tasks, manifest.method, manifest)
    report = read_json_object(folder / REPORT, optional=True)
    if "sources" not in report:
        return None
    with explain_damage(folder / REPORT):
        base, tasks = report["sources"]["base"], report["sources"]["tasks"]
        records = {name: _source(task) for name, task in tasks.items()}
        return Merge(str(report["library"]), _source(base), records, dict(report["method"]), None)


def _source(record: Mapping[str, Any]) -> SourceRecord:
    return SourceRecord(str(record["source"]), record.get("revision"), dict(record.get("files") or {}))


def describe(folder: Path) -> CardPart | None:
    """The part of a card that describes a merge; `None` if the folder is not a merge."""
    merge = read_merge(folder)
    if merge is None:
        return None
    return CardPart("emr.md", _metadata(merge), lambda config, repo_id: _card_values(merge, folder, config, repo_id))


def _metadata(merge: Merge) -> dict[str, Any]:
    """The front matter of the card that the merge decides."""
    sources = [merge.base, *merge.tasks.values()]
    models = list(dict.fromkeys(source.source.partition("@")[0] for source in sources if source.revision))
    related = {"base_model": models, "base_model_relation": "merge"} if models else {}
    ours = ["emr-merging"] if merge.manifest is not None or merge.method.get("method") == "elect" else []
    return {"library_name": merge.library, "tags": ["merge", "model-merging", *ours], **related}


def _card_values(merge: Merge, folder: Path, config: Mapping[str, Any], repo_id: str) -> dict[str, Any]:
    """The values that the template `emr.md` shows in addition to those of every card."""
    manifest, method = merge.manifest, str(merge.method.get("method"))
    records = manifest.tasks if manifest else {}
    tasks = [
        {"name": name, "link": _link(source)} | (_task_row(records[name]) if name in records else {})
        for name, source in merge.tasks.items()
    ]
    report = read_json_object(folder / REPORT, optional=True)
    with explain_damage(folder / REPORT):
        shown = report_markdown(report) if report else ""
    return {
        "masks": manifest is not None,
        "deltas": 0 if manifest is None else manifest.deltas,
        # heads and what else the tasks keep as they are
        "exact": any(folder.glob("tasks/*/extra.safetensors")),
        "method": {"name": METHODS[method].label if method in METHODS else method},
        "base": {
            "link": _link(merge.base),
            "source": merge.base.source.partition("@")[0],
            "revision": merge.base.revision,
            "folder": merge.base.folder,
            "beside": merge.base.revision is None and merge.base.source.startswith(".."),
        },
        "tasks": tasks,
        "first": tasks[0],
        "second": tasks[1] if len(tasks) > 1 else None,
        "loading": _task_loading(merge, tasks[0]) if manifest else _model_loading(merge, config, repo_id),
        "notes": _notes(merge),
        "configuration": _configuration(merge),
        "report": shown,
    }


def _task_row(task: TaskRecord) -> dict[str, str]:
    if task.scale is not None:
        scale = f"{task.scale:.4f}"
    else:
        scale = f"{min(task.scales.values()):.4f} to {max(task.scales.values()):.4f}" if task.scales else "none"
    return {"architecture": task.architecture or "", "scale": scale, "density": f"{task.density:.4f}"}


def _link(source: SourceRecord) -> str:
    """The model on the Hub at its commit, or the name of a folder; never a path of this machine."""
    if source.revision is None:
        return f"`{public_name(source)}`"
    name = source.source.partition("@")[0]
    return f"[{name}](https://huggingface.co/{name}/tree/{source.revision})"


def public_name(source: SourceRecord) -> str:
    """The public name of a source: a Hub id, or the last part of a path."""
    return source.source if source.revision else last_name(source.source)


def _task_loading(merge: Merge, task: Mapping[str, Any]) -> dict[str, str]:
    """Lines that make a model of restored weights, for classes that a library has."""
    architecture, name = str(task["architecture"]), task["name"]
    if _is_in_transformers(merge, architecture):
        return {
            "imports": f"from transformers import AutoConfig, {architecture}",
            "code": f'config = AutoConfig.from_pretrained(f"{{folder}}/tasks/{name}")\n'
            f"model = {architecture}.from_pretrained(None, config=config, state_dict=weights)",
        }
    if merge.library == "diffusers":
        return {
            "imports": f"from diffusers import {architecture}",
            "code": f'model = {architecture}.from_config({architecture}.load_config(f"{{folder}}/tasks/{name}"))\n'
            "model.load_state_dict(weights)",
        }
    return {"imports": "", "code": ""}


def _model_loading(merge: Merge, config: Mapping[str, Any], repo_id: str) -> dict[str, str]:
    library = "diffusers" if merge.library == "diffusers" else "transformers"
    architecture = str(config.get("_class_name") or (config.get("architectures") or ["AutoModel"])[0])
    if library == "transformers" and not _is_in_transformers(merge, architecture):
        library = "hf_ext"
    return {
        "imports": f"from {library} import {architecture}",
        "code": f'model = {architecture}.from_pretrained("{repo_id}")',
    }


def _is_in_transformers(merge: Merge, architecture: str) -> bool:
    """Without importing transformers, which takes longer than a merge; code on a Hub has an `auto_map`."""
    from .. import __all__ as own

    return merge.library == "transformers" and architecture not in own and architecture != "None"


def find_voters(method: Mapping[str, Any], tasks: Collection[str]) -> list[str]:
    """The tasks that voted: those that a manifest names, or all of its tasks."""
    voted = method.get(VOTED) or list(tasks)
    if not isinstance(voted, list) or not all(isinstance(name, str) for name in voted):
        raise CheckpointError(f"{MANIFEST}: {VOTED} must be a list of tasks, got {voted!r:.80}; fetch it again.")
    return voted


def _notes(merge: Merge) -> list[str]:
    """Notes on later changes of the artifact and their effect on its tasks."""
    voted = find_voters(merge.method, merge.tasks)
    frozen = [name for name in merge.tasks if name not in voted]
    gone = [name for name in voted if name not in merge.tasks]
    notes = []
    if frozen:
        notes.append(
            f"Added later, without influence on the unified model: {', '.join(frozen)}. The unified model and the "
            "other tasks were not changed; a new merge of all tasks would restore these more accurately."
        )
    if gone:
        notes.append(f"Merged and removed later: {', '.join(gone)}. They still influence the unified model.")
    return notes


def keep_tasks(value: Any, tasks: Collection[str]) -> Any:
    """A value of an option; of one for each task, those of tasks that were not removed."""
    return {task: own for task, own in value.items() if task in tasks} if isinstance(value, dict) else value


def _configuration(merge: Merge) -> str:
    """The YAML file that merges again."""

    def spec(source: SourceRecord) -> str:
        name = public_name(source).partition("@")[0]
        return f"{name}@{source.revision}" if source.revision else name

    method = str(merge.method.get("method", "emr"))
    plain = MergeConfig(base="base", tasks={"task": "task"}).to_dict()
    defaults = {name: value for name, value in plain.items() if name not in RUNNING}
    if method in METHODS:
        defaults |= {name: option.default for name, option in METHODS[method].options.items()}
    chosen = {
        key: keep_tasks(value, merge.tasks)
        for key, value in merge.method.items()
        if key in defaults and value is not None and value != defaults[key]
    }
    fields = {"base": spec(merge.base), "tasks": {name: spec(task) for name, task in merge.tasks.items()}}
    return yaml.safe_dump({**fields, "method": method, **chosen}, sort_keys=False).strip()
