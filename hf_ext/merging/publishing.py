"""A merge as it is published: its card, and a copy of its own files without paths of this machine."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hf_ext.emr import emr_loader
from hf_ext.emr.artifact import hash_files, open_extras, open_masks, open_unified
from hf_ext.emr.manifest import MANIFEST, Manifest, SourceRecord, TaskRecord
from hf_ext.emr.report import report_markdown

from ..errors import DataError, UsageError
from ..files import copy_into, parse_json_object, read_json_object, stays_inside, write_json
from ..hub.disclosure import is_path, last_name
from ..hub.folder_kinds import CardPart, FolderKind
from ..hub.header_format import CheckpointError
from ..hub.published_files import LICENCES, is_described, is_loaded, walk
from .compare import REPORT, explain_damage
from .configuration import RUNNING, MergeConfig
from .methods import METHODS

# In the manifest's method: the tasks that voted, once they are not simply all tasks.
VOTED = "elected_from"
LOADER = "emr_loader.py"
# The one that travels with artifacts.
_LOADER_HERE = Path(emr_loader.__file__)
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
    frozen = ", ".join(name for name in merge.tasks if name not in voted)
    gone = ", ".join(name for name in voted if name not in merge.tasks)
    added = (
        f"Added later, without influence on the unified model: {frozen}. The unified model and the other tasks were "
        "not changed; a new merge of all tasks would restore these more accurately."
    )
    removed = f"Merged and removed later: {gone}. They still influence the unified model."
    return [text for names, text in ((frozen, added), (gone, removed)) if names]


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
    """Copies what belongs to an artifact, verified, into an empty folder.

    Tasks that `emr.json` does not name, hidden files and the state of the merge stay behind.
    """
    manifest = Manifest.read(folder)
    if manifest.base.revision is None and manifest.base.folder is None:
        raise DataError(
            f"{folder}: its tasks are restored from the base {manifest.base.source}, a folder on this "
            "machine. Merge again with include_base: true (--include-base), which stores the base in the artifact; or "
            "push the base to the Hub and merge again with its org/name"
        )
    loader = folder / LOADER
    if loader.is_file() and loader.read_bytes() != _LOADER_HERE.read_bytes():
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
    places = [Path(), *(Path("tasks", task) for task in manifest.tasks)]
    if manifest.base.folder is not None:
        places.append(Path(manifest.base.folder))
    for place in places:
        (out / place).mkdir(parents=True, exist_ok=True)
        files = manifest.base.files if place == Path("base") else manifest.unified
        stems = {re.sub(r"-\d{5}-of-\d{5}$", "", name.removesuffix(".safetensors")) for name in files}
        weights = {*files, *(f"{stem}.safetensors.index.json" for stem in stems)}
        # What the merge took along beside what loaders read; code is taken from installed packages.
        inner = "" if place == Path() else f"{place.as_posix()}/"
        along = {name.removeprefix(inner) for name in manifest.files if name.startswith(inner)}
        chosen = {*_OWN, *weights, *(name for name in along if not re.match(r"(tasks|base)/|.*\.py$", name))}
        for name, path in walk(folder / place):
            described = name in LICENCES if place.parts else is_described(name)
            if not (is_loaded(name) or name in chosen or described) or not path.is_file():
                continue
            if not stays_inside(folder, path):
                raise ValueError(
                    f"{path}: a link out of the folder, which is not published; copy the file into the folder"
                )
            copy_into({name: path}, out / place)
    # The root is no task's model, so its configuration offers no pipeline; those of the tasks do.
    path = out / "config.json"
    if path.is_file() and "custom_pipelines" in (config := read_json_object(path)):
        del config["custom_pipelines"]
        write_json(path, config)
    shutil.copyfile(_LOADER_HERE, out / LOADER)


def hide_paths(folder: Path) -> None:
    """Cuts the paths of this machine in `emr.json` and `report.json` of a merge to their last part, and lets the
    hashes be those of the files that are published."""
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
                text = text.replace(_escape(hidden), _escape(last_name(hidden)))
            content = parse_json_object(text.encode(), str(path))
            if file == MANIFEST and merge.manifest is not None and merge.manifest.files:
                # Weights are copies, and keep the hashes of the merge, by which a fault of the copy is noticed;
                # configurations may have been changed for publication.
                content["files"] = hash_files(folder, known=merge.manifest.files)
            write_json(path, content, indent=1)


def _escape(text: str) -> str:
    """The text as it stands between quotes in a JSON file."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


MERGES = FolderKind(describe, hide_paths, copy_artifact)
