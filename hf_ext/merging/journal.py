"""The folder in which a merge grows, and its journal: which units are finished, with their sums. A merge goes on.

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

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
import threading
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from hf_ext.emr.manifest import FORMAT, MANIFEST

from ..errors import UsageError
from ..files import read_json_object, recover_folder, require_free
from ..system import open_descriptor, sync_data

PASSES = "passes.json"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


# Position of the line of a unit: its file, its first byte and its length.
_Place = tuple[Path, int, int]


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
        units = ("unit" in _parse(line) for file in folder.glob("*.jsonl") for _, line in _lines(file))
        return read_passes(folder) is not None or any(units)

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
        """The line of every trusted unit."""
        found: dict[int, _Place] = {}
        for file in sorted(self._folder.glob("*.jsonl")):
            trusted, boot = 0, None
            places: list[tuple[int, int, _Place]] = []
            for number, (start, line) in enumerate(_lines(file)):
                record = _parse(line)
                if number == 0:
                    boot = record.get("boot")
                elif "flushed" in record:
                    trusted = max(trusted, int(record["flushed"]))
                elif "unit" in record:
                    places.append((number, record["unit"], (file, start, len(line))))
            found |= {unit: place for number, unit, place in places if number < trusted or boot == self._boot}
        return found


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Every whole line with its first byte."""
    start = 0
    with open(file, "rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield start, line
            start += len(line)


def _parse(line: bytes) -> dict[str, Any]:
    """A record; empty where the line was damaged, by a loss of power for instance."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        record = json.loads(line)
        if isinstance(record, dict) and (
            "unit" not in record or zlib.crc32(bytes.fromhex(record["sums"])) == record["crc"]
        ):
            return record
    return {}


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LOCK = "lock"


def require_target(out: Path, overwrite: bool) -> None:
    """Refuses a target that contains anything except an earlier merge, or that cannot be written."""
    if not out.name:
        raise ValueError(f"{out} is not a folder, and is not replaced; give a folder")
    recover_folder(out)
    require_free(out, overwrite, kind="merge", is_kind=_is_merge)
    _require_writable(out)


def _require_writable(out: Path) -> None:
    """Tests writing by doing it: permissions do not show read-only disks or systems such as /proc."""
    place = next(folder for folder in out.parents if folder.exists())
    try:
        os.rmdir(tempfile.mkdtemp(prefix=f".{out.name[:64]}.", dir=place))
    except OSError as error:
        if error.errno in FULL:
            # That is told later, with the room that is needed.
            return
        raise UsageError(
            f"{out} cannot be written: no folder can be made in {place} ({error.strerror}); choose another folder, or "
            "get permission to write there"
        ) from error


def _is_merge(folder: Path) -> bool:
    """True if a merge wrote a folder, with masks or without."""
    try:
        if (folder / MANIFEST).is_file():
            return bool(read_json_object(folder / MANIFEST).get("format") == FORMAT)
        return "sources" in read_json_object(folder / "report.json", optional=True)
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def lock_partial(partial: Path) -> Iterator[None]:
    """Keeps a second merge out of the partial folder; the system lets go when the process ends, however it ends."""
    lock = FileLock(partial / _LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise UsageError(f"another process is merging into {partial}; wait until it ends, or stop it") from error
    try:
        yield
    finally:
        lock.release()
        # Windows does not delete a file that is open, so the lock may be what is left of a finished merge.
        with contextlib.suppress(OSError):
            if [path.name for path in partial.iterdir()] == [_LOCK]:
                (partial / _LOCK).unlink()
                partial.rmdir()


def read_passes(folder: Path) -> dict[str, Any] | None:
    """The results of the counting passes in a journal; None if none is finished."""
    with contextlib.suppress(OSError, ValueError):
        return read_json_object(folder / PASSES) or None
    return None
