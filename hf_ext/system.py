"""System calls that only some systems have, with replacements elsewhere, for macOS and Windows."""

# Each is looked for when it is used, so that a test can take it away.
from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import io
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

# Windows opens files as text unless told otherwise, and lets child processes have them or not by another way.
_OPEN_FLAGS = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
# Of `os.open`: refuse a symbolic link. Windows has no such flag, and lets only administrators make links.
NO_LINK = getattr(os, "O_NOFOLLOW", 0)
# Where a file has one position for all, whoever moves it keeps the others out.
_moving = threading.Lock()
# Looked up before a fork, in which another thread may hold the lock of the loader for ever.
_prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def open_descriptor(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """Opens a file for bytes, not for child processes."""
    return os.open(path, flags | _OPEN_FLAGS, mode)


def has_positions() -> bool:
    """Tells whether the system reads and writes at a place of a file: compiled code and threads may do it at once."""
    return hasattr(os, "pread") and hasattr(os, "pwrite")


def read_at(descriptor: int, buffer: memoryview, position: int) -> int:
    """Reads bytes from a place of a file; possibly fewer than asked for. Thread-safe."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [buffer], position)
    with _moving, io.FileIO(descriptor, "rb", closefd=False) as file:
        file.seek(position)
        return file.readinto(buffer) or 0


def write_at(descriptor: int, data: memoryview, position: int) -> int:
    """Writes bytes to a place of a file. Thread-safe."""
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, data, position)
    with _moving:
        os.lseek(descriptor, position, os.SEEK_SET)
        return os.write(descriptor, data)


def reserve(descriptor: int, size: int, path: Path) -> None:
    """Gives a file its length, and its room on the disk where the system can do that."""
    # Where the system cannot reserve, it is asked how much is free; what others write meanwhile is found later.
    missing = size - os.fstat(descriptor).st_size
    os.ftruncate(descriptor, size)
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
    elif missing > free_bytes(path.parent):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def sync_data(descriptor: int) -> None:
    """Waits until what was written to a file is on the disk."""
    getattr(os, "fdatasync", os.fsync)(descriptor)


def sync_directory(folder: str | os.PathLike[str]) -> None:
    """Waits until the names in a folder are on the disk."""
    # Windows opens no folder, and writes names through by itself.
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: str | os.PathLike[str]) -> None:
    """Waits until the contents of a closed file are on the disk."""
    # Windows flushes only what is open for writing.
    with open(path, "rb" if os.name == "posix" else "r+b") as file:
        os.fsync(file.fileno())


def free_bytes(folder: Path) -> int:
    """The bytes that may be written to the disk of a folder."""
    return shutil.disk_usage(folder).free


def count_cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def end_with_parent(parent: int) -> None:
    """Has Linux kill this forked process as soon as the thread ends that forked it, by SIGKILL too."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # It may have ended before it was asked for.
        if os.getppid() != parent:
            os._exit(1)


@contextlib.contextmanager
def import_undisturbed() -> Iterator[None]:
    """Keeps Python from looking for garbage while a new process imports torch and transformers."""
    # They make a million objects that stay, and Python looks through all of them time and again: a fifth of the
    # imports' processor time. Frozen, they are left out of every later look too, and loader processes share their
    # memory. A program that has already imported torch may have garbage of its own: there, nothing is changed.
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
