"""A fine-tune beside its base: two checkpoints, or a task of a merge beside the base of the merge."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_ext.emr.manifest import find_folder
from hf_ext.emr.weights import TaskWeights
from hf_ext.files import read_json_object
from hf_ext.hub.disclosure import cut_paths

from ..errors import DataError
from .name_matching import match_fine_tune
from .sources import open_weights


@dataclass(frozen=True)
class Pair:
    """A fine-tune beside its base."""

    title: str
    public_name: str  # the same without folders of this machine
    base: str  # where the base is: a folder, or `org/name`
    revision: str | None  # its commit, of a Hub
    base_config: Mapping[str, Any]  # configuration of the base, if known
    files: Mapping[str, Path]  # configuration, tokenizer, processor of the fine-tune
    names: tuple[str, ...]  # tensors of the fine-tune
    base_shapes: Mapping[str, tuple[int, ...]]  # shapes of the base's tensors, by the fine-tune's names
    read: Callable[[str], torch.Tensor]
    read_base: Callable[[str], torch.Tensor]


@contextmanager
def open_task(artifact: str, task: str, base: str | None = None, endpoint: str | None = None) -> Iterator[Pair]:
    """A task of a merge beside the base of the merge."""
    weights = TaskWeights(artifact, base=base, endpoint=endpoint)
    if weights.manifest.library != "transformers":
        raise DataError(f"{artifact} is a merge of {weights.manifest.library}; a LoRA needs a model of transformers")
    names = tuple(weights.entries(task))
    record, origin, held = weights.manifest.tasks[task], weights.manifest.base, weights.base_tensors()
    place, own = base or origin.source, base is None and origin.folder is None
    if base is None and origin.folder is not None:
        place = str((weights.folder / origin.folder).resolve())
    elif own and origin.revision is None:
        place = str(find_folder(origin.source, weights.folder).resolve())
    in_base = {name: record.base_name(name) for name in names if record.base_name(name) in held}
    yield Pair(
        f"task {task!r} of {artifact}",
        f"task {task!r} of {cut_paths(artifact)}",
        place,
        origin.revision if own else None,
        read_json_object(weights.folder / "config.json", optional=True),
        weights.small_files(task),
        names,
        {name: tuple(held[other].shape) for name, other in in_base.items()},
        lambda name: weights.restore(task, name),
        lambda name: held[in_base[name]],
    )


@contextmanager
def open_fine_tune(base: str, fine_tune: str, endpoint: str | None = None) -> Iterator[Pair]:
    """A fine-tune beside its base, both folders or `org/name[@revision]`."""
    with (
        open_weights("base", base, endpoint=endpoint) as first,
        open_weights("the fine-tune", fine_tune, endpoint=endpoint) as own,
    ):
        for source in (first, own):
            if source.library != "transformers":
                raise ValueError(f"{source.spec} is of {source.library}; a LoRA is made of two models of transformers")
        found = match_fine_tune(first, own)
        in_base = {name: found.in_base(name) for name in own.tensors if found.in_base(name) in first.tensors}
        yield Pair(
            fine_tune,
            cut_paths(fine_tune),
            first.repo_id or str(Path(base).expanduser().resolve()),
            first.commit,
            first.config,
            {**own.companions.files, **own.companions.modules},
            tuple(own.tensors),
            {name: first.tensors[other].shape for name, other in in_base.items()},
            own.read,
            lambda name: first.read(in_base[name]),
        )
