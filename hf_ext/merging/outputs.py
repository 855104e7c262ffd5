"""Weight files of a merge: reserved before the work begins, and filled in place by any thread or process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_ext.emr.artifact import mask_bytes, open_masks
from hf_ext.emr.manifest import WEIGHT_STEMS, Manifest

from ..errors import DataError
from ..hub.safetensors_writer import SafetensorsWriter, plan_shards, shard_index
from .plan import Plan
from .sources import Source
from .tensors import COMPUTED, EXCLUDED, KEPT, Row

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class Copy:
    """A tensor that is copied as it is, at most converted to the type of the file that it goes to."""

    source: Source
    name: str
    writer: SafetensorsWriter
    finite: bool  # False where NaN and infinity are copied too, since the tensor takes no part

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.source.tensors[self.name].shape)


class Outputs:
    """Every weight file of the result, open for writing."""

    def __init__(self, folder: Path, plan: Plan, *, resume: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._resume = resume
        self.folder = folder
        self.writers: list[SafetensorsWriter] = []
        self.copies: list[Copy] = []
        self.root: dict[str, SafetensorsWriter] = {}
        self.masks: list[SafetensorsWriter] = []
        self._plan = plan
        try:
            if not plan.config.merge_method.deltas:
                self.root = self._open_shards("", {row.name: (row.dtype, row.shape) for row in plan.rows})
                self._copy_base([row.name for row in plan.copied_rows], self.root)
            if plan.config.with_masks:
                self._open_tasks()
            if plan.config.include_base:
                tensors = {name: (info.dtype, info.shape) for name, info in plan.base.tensors.items()}
                self._copy_base(tensors, self._open_shards("base/", tensors))
        except BaseException:
            self.close(sync=False)
            raise

    def flush(self) -> None:
        """Waits until what was written so far is on the disk."""
        for writer in self.writers:
            writer.flush()

    def close(self, *, sync: bool = True) -> None:
        """Closes all files."""
        for writer in self.writers:
            writer.close(sync=sync)

    def _open(self, place: str, layout: Layout) -> SafetensorsWriter:
        path = self.folder / place
        found = path.stat().st_size if path.is_file() else None
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = SafetensorsWriter(path, layout)
        self.writers.append(writer)
        if self._resume and found != writer.size:
            # once opened it has its whole length, for which it must not be taken later
            writer.close(sync=False)
            path.unlink()
            raise DataError(f"{path} is gone or cut, so that the merge cannot go on: remove {self.folder.parent}")
        return writer

    def _open_shards(self, folder: str, layout: Layout) -> dict[str, SafetensorsWriter]:
        """Weights as `from_pretrained` finds them, in as many files as `max_shard_size` asks for."""
        sizes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in layout.items()}
        stem = WEIGHT_STEMS[self._plan.base.library]
        shards = plan_shards(sizes, self._plan.config.shard_bytes, stem)
        found: dict[str, SafetensorsWriter] = {}
        for file, names in shards.items():
            writer = self._open(folder + file, {name: layout[name] for name in names})
            found |= dict.fromkeys(names, writer)
        if len(shards) > 1:
            (self.folder / f"{folder}{stem}.safetensors.index.json").write_text(shard_index(shards, sizes))
        return found

    def _copy_base(self, names: Iterable[str], writers: Mapping[str, SafetensorsWriter]) -> None:
        self.copies += [Copy(self._plan.base, name, writers[name], finite=False) for name in names]

    def _open_tasks(self) -> None:
        for index, task in enumerate(self._plan.tasks):
            masks = masked_rows(self._plan, index)
            planes = self._plan.config.merge_method.deltas or 1
            sizes = {name: planes * mask_bytes(row.elements) for name, row in masks.items()}
            layout: Layout = {name: (torch.uint8, (size,)) for name, size in sizes.items()}
            self.masks.append(self._open(f"tasks/{task.label}/mask.safetensors", layout))
            if own := self._plan.own_tensors(KEPT, task=index):
                kept = {extra.name: (extra.dtype, extra.shape) for extra in own}
                writer = self._open(f"tasks/{task.label}/extra.safetensors", kept)
                self.copies += [
                    Copy(task, extra.name, writer, finite=extra.reason not in (EXCLUDED, COMPUTED)) for extra in own
                ]


def masked_rows(plan: Plan, task: int) -> dict[str, Row]:
    """The merged tensors in which a task takes part."""
    return {row.members[task]: row for row in plan.merged_rows if task in row.members}


def masked_names(folder: Path, manifest: Manifest, task: str) -> set[str]:
    """The same of an artifact: their names in the base."""
    with open_masks(folder, manifest, task) as masks:
        return {manifest.tasks[task].base_name(name) for name in masks}
