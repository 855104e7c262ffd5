"""Settings and data that may change on resume, and whether the resumed run stays bit-exact."""

# `before` is what the state says from which the run goes on, `now` what the run is asked to be. Every difference gets
# a sentence, or the run is refused with all differences that make another run of it. docs/training.md has the table,
# and tests/training/test_changes.py makes each change in the middle of a run, and compares what is promised.

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from glob import has_magic
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import httpx2
import numpy as np
from huggingface_hub import HfApi
from transformers import PreTrainedConfig

from ..data.opening import find_files
from ..errors import OtherRun
from .arguments import SCHEDULES_WITHOUT_END, DataArguments, SourcePart, TrainingArguments, find_paths, map_paths
from .methods import find_inner

# The kind of change of each field, by its name and its section's.
_KINDS = {
    prefix + item.name: item.metadata["change"]
    for prefix, owner in (("", TrainingArguments), ("data.", DataArguments))
    for item in fields(owner)
    if "change" in item.metadata
}
BATCHING = ("processes", *(name for name, kind in _KINDS.items() if kind == "batching"))
SAME = "the result stays equal, bit for bit"
OTHER = "the result is no longer bit-equal"
_DIVIDED = "a stream is divided among the processes and their workers, and their number determines its order"
# What the fingerprint of the data hashes: rows of a table; of a stream shards, and the first rows of each; bytes of a
# picture, a recording or a text.
_ROWS, _SHARDS, _FIRST, _BYTES = 64, 8, 8, 65536


@dataclass
class Changes:
    """Differences of a resumed run in sentences, and the parts of the state that the loop must reset."""

    notes: list[str] = field(default_factory=list)
    new_evaluation: bool = False
    new_data: bool = False
    new_batch_size: bool = False


def describe_run(arguments: TrainingArguments, processes: int, sharding: str | None) -> dict[str, Any]:
    """The settings to compare, as JSON stores them, without data and classes, which are read later."""
    about = {
        "arguments": asdict(arguments),
        "processes": processes,
        "sharding": sharding,
        "versions": {name: version(name) for name in ("hf-ext", "torch", "transformers", "accelerate")},
        "data": None,
        "classes": None,
    }
    return dict(json.loads(json.dumps(about)))


def compare_settings(before: dict[str, Any], now: dict[str, Any], folder: Path, task: Any = object) -> Changes:
    """Lists differences in arguments, processes and versions; refuses those that make another run. `task` is the class
    whose fields are the section of that name."""
    if missing := now.keys() - before.keys():
        told = f"{folder} contains a run of hf-ext {before.get('versions', {}).get('hf-ext')}"
        raise OtherRun(f"{told}, whose states lack {min(missing)}: finish it with that, or choose another output_dir.")
    old, new = _list_settings(before, task), _list_settings(now, task)
    different = [name for name in {**new, **old} if old.get(name) != new.get(name)]
    verdicts = [
        (f"{name}: {old.get(name)!r} → {new.get(name)!r}", *_judge(name, old, new))
        for name in different
        if name not in (*BATCHING, "allow_other_data")
    ]
    if set(BATCHING) & {*different}:
        then, asked = (" × ".join(str(settings[name]) for name in BATCHING) for settings in (old, new))
        verdicts.append((f"processes × batch × accumulation: {then} → {asked}", *_judge_batching(old, new)))
    refused = [f"{text} ({reason})" if reason else text for text, is_allowed, reason in verdicts if not is_allowed]
    if refused:
        advice = "Continue it with the same settings, or choose another output_dir."
        raise OtherRun(f"{folder} contains a run with other settings", refused, advice)
    versions = [
        f"{name} {then} → {now['versions'].get(name)}: perhaps {OTHER}"
        for name, then in before["versions"].items()
        if then != now["versions"].get(name)
    ]
    return Changes(
        notes=[f"{text}: {consequence}" for text, _, consequence in verdicts] + versions,
        new_evaluation=any(name.startswith("data.eval") for name in different),
        new_data=any(name.startswith("data.train.") for name in different),
        new_batch_size="per_device_train_batch_size" in different,
    )


def compare_data(before: dict[str, Any], now: dict[str, Any], folder: Path, changes: Changes) -> None:
    """Adds differences of the training data to the changes; refuses other data unless they are allowed."""
    old, new = (find_paths(about["arguments"]["data"].get("train")) for about in (before, now))
    differences = compare_fingerprints(before["data"], now["data"])
    if differences and not now["arguments"]["allow_other_data"]:
        raise OtherRun(
            f"the training data differ from those of the run in {folder}",
            differences,
            "Restore the data, or continue with the present data: --allow_other_data; or start a new run in another "
            f"output_dir, from these weights with --init_from {folder / 'snapshot'}.",
        )
    settings = now["arguments"]
    if settings["num_train_epochs"] is not None and before["data"]["rows"] != now["data"]["rows"]:
        # Epochs of more or fewer rows are another number of steps.
        is_allowed, reason = _judge("num_train_epochs", settings, settings)
        if not is_allowed:
            raise OtherRun(f"the run in {folder} would get another length", differences, f"{reason.capitalize()}.")
    if differences:
        changes.notes.append(f"other training data ({'; '.join(differences)}): {OTHER}")
        changes.new_data = True
    elif old != new:
        changes.notes.append(f"data.train.path: {', '.join(old)} → {', '.join(new)}: of equal fingerprint, {SAME}")


def compare_classes(before: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """Refuses classes that have other numbers than in the run."""
    then, names = (about["classes"] or [] for about in (before, now))
    if any(name in then and then.index(name) != names.index(name) for name in names):
        raise OtherRun(
            f"the classes have other numbers than in the run in {folder}",
            [f"classes: {then} → {names}"],
            "Finish the run with its data; or start a new run in another output_dir, from these weights with "
            f"--init_from {folder / 'snapshot'}.",
        )


def _list_settings(about: dict[str, Any], task: Any) -> dict[str, Any]:
    """Settings by dotted names, without the places of the data, and what a section gives as it is by default."""
    # An argument that the version before did not have has its default.
    settings = {**_read_defaults(TrainingArguments), **about["arguments"]}
    settings |= {"processes": about["processes"], "sharding": about["sharding"]}
    data = _read_defaults(DataArguments) | settings["data"]
    # Of a list of sources their number and their weights stay.
    data["train"] = map_paths(_shorten_source(data["train"]), lambda path: "PATH")
    inner = {name: _read_defaults(kind) for name, kind in find_inner(task).items()}
    parts = {name: _shorten(part, inner.get(name, {})) for name, part in settings["task"].items()}
    settings |= {"data": data | {"eval": _shorten_source(data["eval"])}, "task": _shorten(parts, _read_defaults(task))}
    kind, model = getattr(task, "config_class", None), settings["model"]
    # A checkpoint has other defaults, and a task from elsewhere may have.
    known = settings["init_from"] is None and task.__module__.startswith("hf_ext.")
    if known and isinstance(kind, type) and issubclass(kind, PreTrainedConfig):
        settings["model"] = _shorten(model, _read_defaults(kind) | task.presets.get(model.get("preset"), {}))
    return _join_names(settings)


def _read_defaults(kind: type) -> dict[str, Any]:
    """The defaults of the fields of a dataclass, as JSON stores them."""
    items = fields(kind) if is_dataclass(kind) else ()
    found = {item.name: item.default_factory() for item in items if item.default_factory is not MISSING}
    found |= {item.name: item.default for item in items if item.default is not MISSING}
    return dict(json.loads(json.dumps(found, default=str)))


def _shorten(section: Any, defaults: dict[str, Any]) -> Any:
    """A section, or each of a list, without the values that are its defaults."""
    if isinstance(section, list):
        return [_shorten(item, defaults) for item in section]
    if not isinstance(section, dict):
        return section
    return {name: value for name, value in section.items() if name not in defaults or value != defaults[name]}


def _shorten_source(section: Any) -> Any:
    """A source, or each of several by name, without defaults and what a part has from its list."""
    if not isinstance(section, dict):
        return section
    if "path" not in section:
        return {name: _shorten_source(part) for name, part in section.items()}
    if isinstance(section["path"], list) and len(section["path"]) == 1 and not section.get("streaming"):
        # The same examples in the same order; a stream's state would be another.
        (part,) = section["path"]
        section = {**section, **(part if isinstance(part, dict) else {"path": part})}
    shared = {name: value for name, value in section.items() if name not in ("path", "name", "shuffle_buffer")}
    defaults = _read_defaults(SourcePart)
    path = _shorten(section["path"], defaults | shared) if isinstance(section["path"], list) else section["path"]
    return _shorten({**section, "path": path}, defaults)


def _join_names(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _join_names(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _judge(name: str, old: dict[str, Any], new: dict[str, Any]) -> tuple[bool, str]:
    """Tells of a setting if it may change, and what follows, or why not."""
    kind, schedule = _KINDS.get(".".join(name.split(".")[:2])), new["lr_scheduler_type"]
    if kind == "workers" and new.get("data.train.streaming") and _workers(old) != _workers(new):
        return False, _DIVIDED
    if kind == "length" and schedule not in SCHEDULES_WITHOUT_END:
        return False, (
            f"the schedule {schedule} depends on it: finish this run unchanged, or start another one with --init_from "
            f"and its snapshot; a run with {' or '.join(SCHEDULES_WITHOUT_END)} can be made longer"
        )
    allowed = {
        "free": SAME,
        "workers": SAME,
        "eval": f"{SAME}, except the choice of the best state, which starts again",
        "length": f"{SAME}, step by step",
        **({"train": OTHER} if new["allow_other_data"] else {}),
    }
    if kind in allowed:
        return True, allowed[kind]
    return False, "states of sharded weights cannot be loaded without the same sharding" if name == "sharding" else ""


def _workers(settings: dict[str, Any]) -> int:
    """Readers of a stream: without a loader process the training process is the only one."""
    return max(1, settings.get("data.num_workers") or 0)


def _judge_batching(old: dict[str, Any], new: dict[str, Any]) -> tuple[bool, str]:
    before, now = (math.prod(settings[name] for name in BATCHING) for settings in (old, new))
    if before != now:
        return False, (
            f"each step had {before} examples and would have {now}: choose per_device_train_batch_size and "
            "gradient_accumulation_steps so that the product stays the same"
        )
    other_processes = old["processes"] != new["processes"]
    if other_processes and new["sharding"] == "DEEPSPEED":
        return False, "a state of DeepSpeed can only be resumed with the same number of processes"
    other_batch = old["per_device_train_batch_size"] != new["per_device_train_batch_size"]
    if new.get("data.train.streaming") and (other_processes or (other_batch and _workers(new) > 1)):
        return False, _DIVIDED
    return True, f"every step has the same examples, but sums, dropout masks and batch statistics differ: {OTHER}"


# A run goes on exactly only with the data it began with: order and augmentation are functions of the position of an
# example. To hash a million pictures at every start would take longer than many runs. So the fingerprint is the number
# of rows, the names of the columns, the commit of what comes from a Hub, and a hash of some rows. Rows that were taken
# out or added are found for sure where their number is known; what was sorted anew or exchanged is found where it
# touches the rows that are hashed. Files count by their last name and their content, so that data may move.


def fingerprint(data: datasets.Dataset | datasets.IterableDataset, section: Any) -> dict[str, Any]:
    """The fingerprint of opened data and of the section of a run that names its places."""
    is_stream = isinstance(data, datasets.IterableDataset)
    digest = hashlib.sha256()
    for row in _find_rows(data):
        digest.update(repr(_plain(row)).encode())
    return {
        "rows": None if is_stream else len(data),
        "shards": data.num_shards if is_stream else None,
        "columns": sorted(data.column_names or []),
        "commits": {place: commit for place in find_paths(section) if (commit := _commit(place)) is not None},
        "sample": digest.hexdigest(),
    }


def compare_fingerprints(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The differences, in words; a value that one side lacks counts as equal."""
    then, found = (
        {name: about[name] for name in ("rows", "shards", "columns")}
        | {f"commit of {place}": commit for place, commit in about["commits"].items()}
        for about in (before, now)
    )
    differences = [
        f"{name}: {value} → {found[name]}"
        for name, value in then.items()
        if None not in (value, found.get(name)) and value != found[name]
    ]
    if before["sample"] != now["sample"] and not differences:
        differences.append("the compared rows have other contents")
    return differences


def _commit(place: str) -> str | None:
    """The commit of a data set of a Hub; nothing of a local one, or where the Hub cannot be asked."""
    if find_files(place) or place.startswith((".", "/", "~")) or has_magic(place):
        return None
    name, _, revision = place.partition("@")
    try:
        return HfApi().dataset_info(name, revision=revision or None).sha
    # Offline, or from the cache.
    except (OSError, ValueError, httpx2.TransportError):
        return None


def _find_rows(data: datasets.Dataset | datasets.IterableDataset) -> Iterator[dict[str, Any]]:
    """Rows from the whole of a table; of a stream the first of some shards."""
    if isinstance(data, datasets.Dataset):
        raw = data.with_format("arrow")
        for index in np.unique(np.linspace(0, max(0, len(data) - 1), _ROWS).astype(int)):
            yield from raw[int(index) : int(index) + 1].to_pylist()
        return
    stream = data.decode(False) if data.features else data
    for index in np.unique(np.linspace(0, data.num_shards - 1, _SHARDS).astype(int)):
        yield from stream.shard(data.num_shards, int(index)).take(_FIRST)


def _plain(value: Any) -> Any:
    """A value without the folder that a file lies in; texts and contents by their length and beginning."""
    if isinstance(value, dict) and {"path", "bytes"} == set(value):
        path, content = Path(value["path"] or ""), value["bytes"]
        if content is None and path.is_file():
            with path.open("rb") as file:
                return path.name, (path.stat().st_size, file.read(_BYTES))
        # Nothing of a place in an archive or on a Hub, whose commit is known.
        return path.name, _plain(content)
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return (len(value), value[:_BYTES]) if isinstance(value, (bytes, str)) else value
