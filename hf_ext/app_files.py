"""Files of the app, uploads and answers: they have a limit, and go when their page closes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# Bytes of all files, and bytes of the disk that stay free.
TOTAL, FREE = 2 * 2**30, 2**28
# A file counts as one of this size at least: many small ones are slow to list.
LEAST = 2**20
# Seconds after which an unused file may go where there is no room, and the files of a page that was closed.
IDLE, LEFT = 60, 20


class Files:
    """
    The files in the folder where gradio keeps each under the hash of its content.

    A page has the files that its messages name. What is there at the start are examples, which stay.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._examples = folder, set(os.listdir(folder))
        self._named = re.compile(re.escape(str(folder).encode()) + rb"/([0-9a-f]{64})/")
        self._of_pages: dict[str, set[str]] = {}
        self._open: Counter[str] = Counter()
        # Bytes of the uploads that are under way.
        self._coming = 0

    def hold(self, page: str, message: bytes) -> None:
        """Notes that a page uses the files that a message names."""
        for found in self._named.findall(message):
            self._of_pages.setdefault(page, set()).add(found.decode())
            with contextlib.suppress(OSError):
                os.utime(self._folder / found.decode())

    def release(self, page: str) -> None:
        """Deletes the files of a page that no other uses."""
        names = self._of_pages.pop(page, set())
        for name in names.difference(self._examples, *self._of_pages.values()):
            _remove(self._folder / name)

    @contextlib.contextmanager
    def keep_open(self, page: str) -> Iterator[None]:
        """A connection that lasts as long as a page is open, or is opened again soon."""
        self._open[page] += 1
        try:
            yield
        finally:
            self._open[page] -= 1
            asyncio.get_running_loop().call_later(LEFT, self._close, page)

    def _close(self, page: str) -> None:
        if not self._open[page]:
            del self._open[page]
            self.release(page)

    @contextlib.contextmanager
    def reserve(self, size: int) -> Iterator[bool]:
        """Keeps room for an upload or an answer; False if there is none, even without the files that nobody uses."""
        room = self._make_room(size)
        self._coming += size
        try:
            yield room
        finally:
            self._coming -= size

    def _make_room(self, size: int) -> bool:
        listed = sorted(self._list())
        size += self._coming
        taken, free = sum(held for _, held, _ in listed), shutil.disk_usage(self._folder).free
        for used, held, path in listed:
            lacks = taken + size > TOTAL or free - size < FREE
            # A file outside a folder is an upload that broke off, or still comes.
            if time.time() - used >= IDLE and (lacks or not path.is_dir()):
                _remove(path)
                taken, free = taken - held, free + held
        present = set(os.listdir(self._folder))
        self._of_pages = {page: names & present for page, names in self._of_pages.items() if names & present}
        return taken + size <= TOTAL and free - size >= FREE

    def _list(self) -> Iterator[tuple[float, int, Path]]:
        """Time of the last use, size and path of all but the examples."""
        for entry in os.scandir(self._folder):
            if entry.name not in self._examples:
                with contextlib.suppress(FileNotFoundError):
                    files = os.scandir(entry) if entry.is_dir() else [entry]
                    yield entry.stat().st_mtime, max(LEAST, sum(file.stat().st_size for file in files)), Path(entry)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
