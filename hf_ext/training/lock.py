"""Lock of a run folder for one training; the system releases it when the process ends."""

import errno
from pathlib import Path

from filelock import FileLock, Timeout

# What `flock` says on file systems that do not lock.
_NO_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


class FolderLock:
    """The right to write to a run folder, held until it is released or the process ends."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._lock = FileLock(folder / ".lock", timeout=0)

    @property
    def is_held(self) -> bool:
        """True while this object has the lock."""
        return self._lock.is_locked

    def acquire(self) -> None:
        """Takes the lock, unless this object has it; refuses where another process has it."""
        if self.is_held:
            return
        try:
            self._lock.acquire()
        except Timeout as error:
            raise ValueError(
                f"another process trains in {self.folder}: wait until it ends, stop it, or choose another output_dir."
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            raise ValueError(
                f"{self._lock.lock_file} cannot be locked ({error.strerror}): the file system of {self.folder} has no "
                "locks, as some network disks. Choose another output_dir, on a local disk."
            ) from error

    def release(self) -> None:
        """Gives the lock back, if this object has it."""
        self._lock.release()
