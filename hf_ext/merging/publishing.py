"""A merge as it is published: its card, and a copy of its own files without paths of this machine."""

import json
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..emr import emr_loader
from ..emr.artifact import hash_files, open_extras, open_masks, open_unified
from ..emr.manifest import MANIFEST, Manifest, SourceRecord
from ..emr.report import report_markdown
from ..errors import DataError, UsageError
from ..files import copy_into, parse_json_object, read_json_object, same_bytes, stays_inside, write_json
from ..hub.disclosure import is_path, last_name
from ..hub.folder_kinds import CardPart, FolderKind
from ..hub.header_format import CheckpointError
from ..hub.published_files import LICENCES, is_described, is_loaded, walk
from .compare import REPORT, explain_damage
from .configuration import RUNNING, MergeConfig
from .methods import METHODS

# In the manifest's method: the tasks that voted, once they are not simply all tasks.
VOTED = "elected_from"
# What a folder of an artifact has beside what loaders of other libraries read; the state of the merge stays behind.
_OWN = (MANIFEST, "mask.safetensors", "extra.safetensors", "sums.safetensors")


@dataclass(frozen=True)
class Merge:
    """Record of a merge, read from the folder that it wrote."""

    library: str  # `transformers`, `diffusers` or `peft`
    base: SourceRecord  # the pretrained model
    tasks: dict[str, SourceRecord]  # the fine-tuned models
    method: dict[str, Any]  # options that decided the numbers
    manifest: Manifest | None  # of an artifact with masks


def read_merge(folder: Path) -> Merge | None:
    if (folder / MANIFEST).is_file():
        manifest = Manifest.read(folder)
        tasks = {name: task.origin for name, task in manifest.tasks.items()}
        return Merge(manifest.library, manifest.base, tasks, manifest.method, manifest)
    report = read_json_object(folder / REPORT, optional=True)
    if "sources" not in report:
        return None
    with explain_damage(folder / REPORT):
        base, tasks = report["sources"]["base"], report["sources"]["tasks"]
        records = {name: SourceRecord(**task) for name, task in tasks.items()}
        return Merge(str(report["library"]), SourceRecord(**base), records, dict(report["method"]), None)


def describe(folder: Path) -> CardPart | None:
    """The part of a card that describes a merge; `None` if the folder is not a merge."""
    if (merge := read_merge(folder)) is None:
        return None
    sources = [merge.base, *merge.tasks.values()]
    models = list(dict.fromkeys(source.source.partition("@")[0] for source in sources if source.revision))
    related = {"base_model": models, "base_model_relation": "merge"} if models else {}
    ours = ["emr-merging"] if merge.manifest is not None or merge.method.get("method") == "elect" else []
    metadata = {"library_name": merge.library, "tags": ["merge", "model-merging", *ours], **related}
    return CardPart("emr.md", metadata, lambda config, repo_id: _card_values(merge, folder, config, repo_id))


def _card_values(merge: Merge, folder: Path, config: Mapping[str, Any], repo_id: str) -> dict[str, Any]:
    """The values that the template `emr.md` shows in addition to those of every card."""
    manifest, method = merge.manifest, str(merge.method.get("method"))
    tasks = [{"name": name, "link": _link(source)} for name, source in merge.tasks.items()]
    for shown, record in zip(tasks, manifest.tasks.values() if manifest else (), strict=False):
        scales = record.scales.values()
        between = f"{min(scales):.4f} to {max(scales):.4f}" if scales else "none"
        scale = between if record.scale is None else f"{record.scale:.4f}"
        shown |= {"architecture": record.architecture or "", "scale": scale, "density": f"{record.density:.4f}"}
    report = read_json_object(folder / REPORT, optional=True)
    with explain_damage(folder / REPORT):
        measured = report_markdown(report) if report else ""
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
        "report": measured,
    }


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
    voted, notes = find_voters(merge.method, merge.tasks), []
    if frozen := ", ".join(name for name in merge.tasks if name not in voted):
        notes.append(
            f"Added later, without influence on the unified model: {frozen}. The unified model and the other tasks "
            "were not changed; a new merge of all tasks would restore these more accurately."
        )
    if gone := ", ".join(name for name in voted if name not in merge.tasks):
        notes.append(f"Merged and removed later: {gone}. They still influence the unified model.")
    return notes


def keep_tasks(value: Any, tasks: Collection[str]) -> Any:
    """A value of an option; of one for each task, those of tasks that were not removed."""
    return {task: own for task, own in value.items() if task in tasks} if isinstance(value, dict) else value


def _configuration(merge: Merge) -> str:
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


def copy_artifact(folder: Path, out: Path) -> None:
    """Copies what belongs to an artifact, verified, into an empty folder; hidden files stay behind."""
    manifest = Manifest.read(folder)
    if manifest.base.revision is None and manifest.base.folder is None:
        raise DataError(
            f"{folder}: its tasks are restored from the base {manifest.base.source}, a folder on this "
            "machine. Merge again with include_base: true (--include-base), which stores the base in the artifact; or "
            "push the base to the Hub and merge again with its org/name"
        )
    loader, installed = folder / "emr_loader.py", Path(emr_loader.__file__)
    if loader.is_file() and not same_bytes(loader, installed):
        raise UsageError(
            f"{loader}: not the loader of the installed hf_ext, so it is not published; remove it (the installed one "
            "is published), or install the version of hf_ext that wrote it"
        )
    if not manifest.deltas:
        open_unified(folder, manifest).close()
    for task in manifest.tasks:
        open_masks(folder, manifest, task).close()
        if (extras := open_extras(folder, manifest, task)) is not None:
            extras.close()
    # What the merge wrote or took along; code is taken from installed packages.
    chosen = {name: folder / name for name in manifest.files if not name.endswith(".py")}
    for place in ("", *(f"tasks/{task}/" for task in manifest.tasks), *(["base/"] if manifest.base.folder else [])):
        for name, path in walk(folder / place):
            described = name in LICENCES if place else is_described(name)
            if is_loaded(name) or name in _OWN or described:
                chosen[place + name] = path
    chosen = {name: path for name, path in chosen.items() if path.is_file()}
    for path in chosen.values():
        if not stays_inside(folder, path):
            raise ValueError(f"{path}: a link out of the folder, which is not published; copy the file into it")
    copy_into(chosen, out)
    # The root is no task's model, so its configuration offers no pipeline; those of the tasks do.
    path = out / "config.json"
    if path.is_file() and "custom_pipelines" in (config := read_json_object(path)):
        del config["custom_pipelines"]
        write_json(path, config)
    shutil.copyfile(installed, out / loader.name)


def hide_paths(folder: Path) -> None:
    """Cuts paths of this machine in a merge's JSON files to their last part, and hashes what is published."""
    merge = read_merge(folder)
    if merge is None:
        return
    paths = {source.source for source in (merge.base, *merge.tasks.values()) if source.revision is None}
    with explain_damage(folder / REPORT):
        given = filter(None, (merge.method.get("merged"), *merge.method.get("statistics", {}).values()))
        # `org/name` stays as it is
        paths |= {place for place in given if is_path(place)}
    # the longest first: one may begin another
    ordered = sorted((path for path in paths if re.search(r"[\\/]", path)), key=len, reverse=True)
    for file in (MANIFEST, REPORT):
        path = folder / file
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            for hidden in ordered:
                # as they stand between quotes in a JSON file
                told, shown = (json.dumps(part, ensure_ascii=False)[1:-1] for part in (hidden, last_name(hidden)))
                text = text.replace(told, shown)
            content = parse_json_object(text.encode(), str(path))
            if file == MANIFEST and merge.manifest is not None and merge.manifest.files:
                # Weights are copies, and keep the hashes of the merge, by which a fault of the copy is noticed;
                # configurations may have been changed for publication.
                content["files"] = hash_files(folder, known=merge.manifest.files)
            write_json(path, content, indent=1)


MERGES = FolderKind(describe, hide_paths, copy_artifact)
