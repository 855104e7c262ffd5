"""One run folder, one training: a lock that names who holds it."""

# The system's lock (`flock` on `.lock`) opens when its process ends, however it ends. That is all that one machine
# needs, and shared disks that carry locks between machines. Others give each machine a lock of its own. So who trains
# also writes into `.owner` who it is, with a number that changes every BEAT seconds. Who gets the lock and finds there
# an owner on another machine looks for longer than two beats whether the number changes: if it does, the owner lives.
# No clocks are compared, and an owner that lost its power delays its successor by that time and no more. A process
# that ends in order, on a signal too, removes `.owner`: a job that is queued again elsewhere waits for nothing.

import errno
import json
import logging
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..files import write_json

logger = logging.getLogger(__name__)

BEAT = 20.0
# What `flock` says on file systems that do not lock.
_NO_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


class FolderLock:
    """The right to write to a run folder, held until it is released or the process ends."""

    def __init__(self, folder: Path, beat: float = BEAT):
        self.folder = folder
        self.beat = beat
        self._lock = FileLock(folder / ".lock", timeout=0)
        self._owner = folder / ".owner"
        self._since = ""
        self._end = threading.Event()
        self._beats: threading.Thread | None = None

    @property
    def is_held(self) -> bool:
        """Whether this object has the lock."""
        return self._beats is not None

    def acquire(self) -> None:
        """Takes the lock, unless this object has it; refuses with the name of who has it."""
        if self.is_held:
            return
        try:
            self._lock.acquire()
        except Timeout as error:
            raise self._refusal(self._read_owner()) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            raise ValueError(
                f"{self._lock.lock_file} cannot be locked ({error.strerror}): the file system of {self.folder} has no "
                "locks, as some network disks. Choose another output_dir, on a local disk."
            ) from error
        try:
            self._watch_other_machine()
            self._since = time.strftime("%Y-%m-%d %H:%M:%S")
            self._write_owner(beat=0)
        except BaseException:
            self._lock.release()
            raise
        self._end.clear()
        self._beats = threading.Thread(target=self._beat, name="hf-ext-lock", daemon=True)
        self._beats.start()

    def release(self) -> None:
        """Gives the lock back, if this object has it."""
        if self._beats is None:
            return
        self._end.set()
        self._beats.join()
        self._beats = None
        self._owner.unlink(missing_ok=True)
        self._lock.release()

    def _refusal(self, owner: dict[str, Any]) -> ValueError:
        who = f"process {owner['process']} of {owner['host']}, since {owner['since']}" if owner else "it just began"
        return ValueError(
            f"another process trains in {self.folder} ({who}): wait for it, end it, or choose another output_dir."
        )

    def _watch_other_machine(self) -> None:
        owner = self._read_owner()
        if not owner or owner["host"] == socket.gethostname():
            return
        seconds = 2.5 * self.beat
        logger.warning(
            "%s was trained in by %s, which left in disorder: looking for %.0f s whether it is still there",
            self.folder,
            owner["host"],
            seconds,
        )
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(self.beat / 4)
            now = self._read_owner()
            if now and now != owner:
                raise self._refusal(now)

    def _read_owner(self) -> dict[str, Any]:
        """Who wrote last; nothing where nobody did."""
        try:
            owner = json.loads(self._owner.read_text())
            return {name: owner[name] for name in ("host", "process", "since", "beat")}
        except (OSError, ValueError, TypeError, KeyError):
            return {}

    def _write_owner(self, beat: int) -> None:
        owner = {"host": socket.gethostname(), "process": os.getpid(), "since": self._since, "beat": beat}
        write_json(self._owner, owner)

    def _beat(self) -> None:
        beat = 0
        while not self._end.wait(self.beat):
            beat += 1
            try:
                self._write_owner(beat)
            except OSError as error:
                # A full disk ends a run at its next state, not here.
                logger.debug("%s: %s", self._owner, error)
