"""One task of a merge where a checkpoint is asked for; and the root of a merge, which is the model of no task.

The root loads like any checkpoint and its answers look like answers, but they are nobody's: of a restorer's merge they
were worse than the input. So its `config.json` names the tasks under `emr_tasks`, by which whoever loads it can tell.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..files import read_json, write_json
from .manifest_emr import MANIFEST, Manifest

MARK = "emr_tasks"


def mark_root(folder: Path, tasks: Sequence[str]) -> None:
    """Writes the names of the tasks into the root's `config.json`, as a new file: an artifact may share the old one.

    Nothing is done for diffusers, which complains of keys that it does not know, for adapters, and where a task has no
    `config.json` of its own and so takes the root's.
    """
    path = folder / "config.json"
    if not path.is_file() or not all((folder / "tasks" / task / path.name).is_file() for task in tasks):
        return
    config = read_json(path)
    if not isinstance(config, dict) or "_diffusers_version" in config:
        return
    write_json(path, config | {MARK: list(tasks)})


def read_tasks(source: str | Path) -> list[str] | None:
    """The tasks of a merge."""
    folder = Path(source).expanduser()
    if not folder.exists():
        folder = _fetch_manifest(str(source)) or folder
    return list(Manifest.read(folder).tasks) if (folder / MANIFEST).is_file() else None


def _fetch_manifest(source: str) -> Path | None:
    """The folder in the cache with the manifest of a repository; None if it has none, or cannot be asked."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    name, _, revision = source.partition("@")
    try:
        return Path(hf_hub_download(name, MANIFEST, revision=revision or None)).parent
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError):
        # Whoever loads the checkpoint next says what is wrong with it.
        return None


@contextmanager
def task_checkpoint(source: str, task: str | None) -> Iterator[str]:
    """A checkpoint to load: what was named, or one task of it where that is a merge."""
    tasks = read_tasks(source)
    if tasks is None:
        if task is not None:
            raise ValueError(f"{source} is no merge with task masks, so it has no task {task!r}; leave the task out")
        yield source
        return
    if task is None:
        raise ValueError(
            f"{source} is a merge, and the model at its root is of no task. Name one of its tasks with --task: "
            f"{', '.join(tasks)}; or write one as a plain checkpoint: hf-ext emr export {source} {tasks[0]} FOLDER"
        )
    from .weights_emr import TaskWeights

    # Windows deletes no file that is still mapped into memory.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        yield str(TaskWeights(source).export(task, Path(place, "checkpoint")))
