"""The journal of a merge: which units of work are finished, and their sums; a killed merge goes on from it.

Every process appends to a file of its own, one line for each finished unit, so that nothing is ever rewritten and a
line that a kill cut off is recognised. Another boot of the machine means that what was not flushed may be lost: of
what an earlier boot wrote, only units before a `flushed` line count.

The order makes it safe. A unit's results are written to the file before its line is: a process that is killed between
the two does the unit again, and gets the same bytes. Within one boot the page cache outlives the process, so a line is
enough. For a loss of power the flushing thread notes how many lines there are, then flushes the results, and only then
writes `flushed` with that number: every line that it covers was written after the results that are now on the disk.
"""

from __future__ import annotations

import json
import os
import threading
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..hub.system_calls import open_descriptor, sync_data

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _Place(NamedTuple):
    """Where the line of a unit lies."""

    file: Path
    start: int
    length: int


class Journal:
    """
    Finished units of one merge.

    Args:
        folder (`Path`): Folder of the journal; created if it is not there.
        boot (`str`, *optional*): Tells this boot of the machine from others. Defaults to what the system says.

    Attributes:
        finished (`set[int]`): Units that this and earlier processes finished, as of the opening and `add`.
    """

    def __init__(self, folder: Path, *, boot: str | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        # where the system does not tell, nothing unflushed of another process is believed
        self._boot = boot or (_BOOT_ID.read_text().strip() if _BOOT_ID.exists() else uuid.uuid4().hex)
        self.finished = set(self._find())
        self._lock = threading.Lock()
        self._lines = 0
        self._path = folder / f"{uuid.uuid4().hex}.jsonl"
        self._descriptor = open_descriptor(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL)
        self._append({"boot": self._boot})

    @staticmethod
    def any_finished(folder: Path) -> bool:
        """Whether a folder holds a journal with at least one finished unit."""
        return any("unit" in _parse(line) for file in folder.glob("*.jsonl") for _, line in _lines(file))

    def add(self, unit: int, sums: np.ndarray) -> None:
        """Notes a unit whose results have been written. Thread-safe."""
        data = np.ascontiguousarray(sums, "<f8").tobytes()
        self._append({"unit": unit, "crc": zlib.crc32(data), "sums": data.hex()})
        self.finished.add(unit)

    @property
    def lines(self) -> int:
        """Number of lines of this process so far, for [`~Journal.confirm`]."""
        return self._lines

    def confirm(self, lines: int) -> None:
        """Notes that the results of the first units are on the disk."""
        self._append({"flushed": lines})
        sync_data(self._descriptor)

    def read(self, units: int) -> Iterator[np.ndarray]:
        """Reads the sums of all units, of all processes, in the order of the units."""
        places = self._find()
        missing = [unit for unit in range(units) if unit not in places]
        if missing:
            raise ValueError(f"{self._folder}: {len(missing)} of {units} units are not finished; run the merge again")
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
            written = os.write(self._descriptor, line)
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
            self._lines += 1

    def _find(self) -> dict[int, _Place]:
        """The line of every unit that is to be believed."""
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
                    places.append((number, record["unit"], _Place(file, start, len(line))))
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
    try:
        record = json.loads(line)
        if isinstance(record, dict) and (
            "unit" not in record or zlib.crc32(bytes.fromhex(record["sums"])) == record["crc"]
        ):
            return record
    except (ValueError, KeyError, TypeError):
        pass
    return {}
