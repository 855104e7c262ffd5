"""The folder in which a merge grows: weight files, reserved before the work begins and filled in place by any thread
or process, and the journal: which units are finished, with their sums. A merge goes on.

In `.NAME.partial/` beside the result lie `result/`, the `journal/`, `merge.json` (what is merged) and `lock`. The
journal also holds `passes.json`: what the counting passes of TIES have found.

Every process appends to a file of its own, one line for each finished unit, so that nothing is ever rewritten and a
line that a kill cut off is recognised. Another boot of the machine means that what was not flushed may be lost: of
what an earlier boot wrote, only units before a `flushed` line count.

The order makes it safe. A unit's results are written to the file before its line is: a process that is killed between
the two does the unit again, and gets the same bytes. Within one boot the page cache outlives the process, so a line is
enough. For a loss of power the flushing thread notes how many lines there are, then flushes the results, and only then
writes `flushed` with that number: every line that it covers was written after the results that are now on the disk.
"""

import contextlib
import errno
import json
import math
import os
import tempfile
import threading
import uuid
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout

from ..emr.artifact import UNNAMED, mask_bytes, open_masks
from ..emr.manifest import FORMAT, MANIFEST, WEIGHT_STEMS, Manifest
from ..errors import DataError, UsageError
from ..files import read_json_object, recover_folder, require_free
from ..hub.card_rules import read_card
from ..hub.cards import is_written
from ..hub.safetensors_writer import SafetensorsWriter, plan_shards, shard_index
from ..system import open_descriptor, sync_data
from .plan import Plan
from .sources import Source
from .tensors import COMPUTED, EXCLUDED, KEPT

PASSES = "passes.json"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Position of the line of a unit: its file, its first byte and its length.
_Place = tuple[Path, int, int]
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class Journal:
    """Finished units of one merge."""

    def __init__(self, folder: Path, *, boot: str | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        # without a boot id, unflushed units of other processes are not trusted
        self._boot = boot or (_BOOT_ID.read_text().strip() if _BOOT_ID.exists() else uuid.uuid4().hex)
        self.finished = set(self._find())
        self._lock = threading.Lock()
        # lines of this process so far, for `confirm`
        self.lines = 0
        self._path = folder / f"{uuid.uuid4().hex}.jsonl"
        self._descriptor = open_descriptor(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL)
        self._append({"boot": self._boot})

    @staticmethod
    def has_begun(folder: Path) -> bool:
        """True if a folder holds a journal with at least one finished unit or pass."""
        units = ("unit" in record for file in folder.glob("*.jsonl") for record, _ in _read_lines(file))
        return bool(read_passes(folder)) or any(units)

    def add(self, unit: int, sums: np.ndarray) -> None:
        """Notes a unit whose results have been written. Thread-safe."""
        data = np.ascontiguousarray(sums, "<f8").tobytes()
        self._append({"unit": unit, "crc": zlib.crc32(data), "sums": data.hex()})
        self.finished.add(unit)

    def confirm(self, lines: int) -> None:
        """Notes that the results of the first units are on the disk."""
        self._append({"flushed": lines})
        sync_data(self._descriptor)

    def read(self, units: int) -> Iterator[np.ndarray]:
        """Reads the sums of all units, of all processes, in the order of the units."""
        places = self._find()
        if missing := [unit for unit in range(units) if unit not in places]:
            raise UsageError(f"{self._folder}: {len(missing)} of {units} units are not finished; run the merge again")
        for unit in range(units):
            file, start, length = places[unit]
            with open(file, "rb") as lines:
                lines.seek(start)
                yield np.frombuffer(bytes.fromhex(json.loads(lines.read(length))["sums"]), "<f8")

    def close(self) -> None:
        """Closes the file of this process; again changes nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _append(self, record: dict[str, Any]) -> None:
        line = (json.dumps(record, separators=(",", ":")) + "\n").encode()
        with self._lock:
            while line:
                line = line[os.write(self._descriptor, line) :]
            self.lines += 1

    def _find(self) -> dict[int, _Place]:
        found: dict[int, _Place] = {}
        for file in sorted(self._folder.glob("*.jsonl")):
            records = [*_read_lines(file)]
            trusted = max((int(record["flushed"]) for record, _ in records if "flushed" in record), default=0)
            if records and records[0][0].get("boot") == self._boot:
                trusted = len(records)
            found |= {record["unit"]: place for record, place in records[:trusted] if "unit" in record}
        return found


def _read_lines(file: Path) -> Iterator[tuple[dict[str, Any], _Place]]:
    """The record of every whole line, without its sums, and its place; empty where a loss of power damaged it."""
    start = 0
    with open(file, "rb") as lines:
        for line in lines:
            found: dict[str, Any] = {}
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                record = json.loads(line)
                sums = record.pop("sums", None)
                if "unit" not in record or zlib.crc32(bytes.fromhex(sums)) == record["crc"]:
                    found = record
            if line.endswith(b"\n"):
                yield found, (file, start, len(line))
            start += len(line)


@dataclass(frozen=True)
class Copy:
    """A tensor that is copied as it is, at most converted to the type of the file that it goes to."""

    source: Source
    name: str
    writer: SafetensorsWriter
    finite: bool  # False where NaN and infinity are copied too, since the tensor takes no part
    parts: tuple[tuple[Source, str, float], ...] = ()  # what it is the mean of, in place of a copy

    @property
    def elements(self) -> int:
        return math.prod(self.source.tensors[self.name].shape)


class Outputs:
    """Every weight file of the result, open for writing."""

    def __init__(self, folder: Path, plan: Plan, *, resume: bool = False) -> None:
        self.folder, self._plan, self._resume = folder, plan, resume
        self.writers: list[SafetensorsWriter] = []
        self.copies: list[Copy] = []
        self.root: dict[str, SafetensorsWriter] = {}
        self.masks: list[SafetensorsWriter] = []
        try:
            if not plan.config.merge_method.deltas:
                self.root = self._open_shards("", {row.name: (row.dtype, row.shape) for row in plan.rows})
                own = ((row.name, row.parts) for row in plan.copied_rows)
                self.copies += [Copy(plan.base, name, self.root[name], bool(parts), parts) for name, parts in own]
            if plan.config.with_masks:
                self._open_tasks()
            if plan.config.include_base:
                tensors = {name: (info.dtype, info.shape) for name, info in plan.base.tensors.items()}
                copy = self._open_shards("base/", tensors)
                self.copies += [Copy(plan.base, name, copy[name], finite=False) for name in tensors]
        except BaseException:
            self.close(sync=False)
            raise

    def flush(self) -> None:
        for writer in self.writers:
            writer.flush()

    def close(self, *, sync: bool = True) -> None:
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

    def _open_tasks(self) -> None:
        planes = self._plan.config.merge_method.deltas or 1
        for index, task in enumerate(self._plan.tasks):
            rows = [row for row in self._plan.merged_rows if index in row.members]
            layout: Layout = {row.members[index]: (torch.uint8, (planes * mask_bytes(row.elements),)) for row in rows}
            self.masks.append(self._open(f"tasks/{task.label}/mask.safetensors", layout))
            if own := self._plan.own_tensors(KEPT, task=index):
                kept = {extra.name: (extra.dtype, extra.shape) for extra in own}
                writer = self._open(f"tasks/{task.label}/extra.safetensors", kept)
                for extra in own:
                    finite = extra.reason not in (EXCLUDED, COMPUTED)
                    self.copies.append(Copy(task, extra.name, writer, finite))


def masked_names(folder: Path, manifest: Manifest, task: str) -> set[str]:
    """The merged tensors of an artifact in which a task takes part, by their names in the base."""
    with open_masks(folder, manifest, task) as masks:
        return {manifest.tasks[task].base_name(name) for name in masks}


def require_target(out: Path, overwrite: bool) -> None:
    """Refuses a target that contains anything except an earlier merge, or that cannot be written."""
    if not out.name:
        raise ValueError(f"{out} is not a folder, and is not replaced; give a folder")
    # Tried by doing it: permissions do not show read-only disks or systems such as /proc.
    place = next(folder for folder in out.parents if folder.exists())
    try:
        # as long as the name of the partial folder
        os.rmdir(tempfile.mkdtemp(prefix=f".{out.name}", dir=place))
    except OSError as error:
        # A full disk is told later, with the room that is needed.
        if error.errno not in FULL:
            raise UsageError(
                f"{out} cannot be written: no folder can be made in {place} ({error.strerror}); choose another "
                "folder, or get permission to write there"
            ) from error
    recover_folder(out)
    require_free(out, overwrite, kind="merge", is_kind=_is_merge)


def find_own(folder: Path) -> Callable[[str], bool]:
    """Tells by its path whether a file of an earlier merge is the merge's, or its owner's."""
    record, card = folder / MANIFEST, folder / "README.md"
    told = read_json_object(record if record.is_file() else folder / "report.json", optional=True).get("files", ())
    own = {*UNNAMED, *told} - ({card.name} if card.is_file() and is_written(read_card(card)) else set())
    return own.__contains__


def _is_merge(folder: Path) -> bool:
    try:
        if (folder / MANIFEST).is_file():
            return bool(read_json_object(folder / MANIFEST).get("format") == FORMAT)
        return "sources" in read_json_object(folder / "report.json", optional=True)
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def lock_partial(partial: Path) -> Iterator[None]:
    """Keeps a second merge out of the partial folder; the system lets go when the process ends, however it ends."""
    lock = FileLock(partial / "lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise UsageError(f"another process is merging into {partial}; wait until it ends, or stop it") from error
    try:
        yield
    finally:
        lock.release()
        # Windows does not delete a file that is open, so the lock may be what is left of a finished merge.
        # A merge that begins now keeps its files: `rmdir` takes an empty folder only.
        with contextlib.suppress(OSError):
            if [path.name for path in partial.iterdir()] == ["lock"]:
                (partial / "lock").unlink()
                partial.rmdir()


def read_passes(folder: Path) -> dict[str, Any] | None:
    """The results of the counting passes in a journal; None if none is finished."""
    with contextlib.suppress(ValueError):
        return read_json_object(folder / PASSES, optional=True) or None
    return None
