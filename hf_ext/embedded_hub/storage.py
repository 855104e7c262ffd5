"""Files that survive a crash: atomic writes, and blobs named by the SHA-256 of their content."""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hf_ext.files import whole_file
from hf_ext.system import NO_LINK, open_descriptor, sync_directory, sync_file

from .errors import HubError

CHUNK_BYTES = 1 << 20
# Number of files that are waited for at once.
_SYNCS = 16


@dataclass(frozen=True)
class Blob:
    """Content that is stored: its SHA-256 and its length in bytes."""

    sha256: str
    size: int


def git_oid(kind: str, data: bytes) -> str:
    """SHA-1 that git gives an object: of its kind, its length and its content."""
    return hashlib.sha1(f"{kind} {len(data)}\0".encode() + data, usedforsecurity=False).hexdigest()


def lfs_pointer(sha256: str, size: int) -> bytes:
    """The text that git stores in place of a large file."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


def inside(root: Path, *parts: str) -> Path:
    """Join validated names below a root that is already resolved; refuse when a symbolic link is on the way."""
    path = root.joinpath(*parts)
    if os.path.realpath(path) != str(path):
        raise HubError(500, f"{'/'.join(parts)!r} is reached through a symbolic link, which is never followed")
    return path


def make_directory(folder: Path) -> None:
    """Create a folder, and its parents, durably."""
    if not folder.is_dir():
        make_directory(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_directory(folder.parent)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file in one step: readers, and a restart after a crash, see the old or the new content."""
    # It waits for the disk before the rename and after it. Without the first wait the rename may reach the disk before
    # the bytes, and after a loss of power the name belongs to an empty file; without the second a client may be told
    # of a commit that is gone. tests/embedded_hub/test_crash.py records the order, and kills the Hub in between.
    with whole_file(path) as file:
        file.write(data)


class BlobStore:
    """Content-addressed files, shared by all repositories: `ab/<64 digits>`, complete, hashed and on disk."""

    def __init__(self, folder: Path, incoming: Path):
        self.folder = folder
        self.incoming = incoming

    def path(self, sha256: str) -> Path:
        return inside(self.folder, sha256[:2], sha256)

    def size(self, sha256: str) -> int | None:
        """Length in bytes of a stored blob, or None when there is none."""
        path = self.path(sha256)
        return path.stat().st_size if path.is_file() else None

    def open(self, sha256: str) -> BinaryIO:
        return os.fdopen(open_descriptor(self.path(sha256), os.O_RDONLY | NO_LINK), "rb")

    @contextmanager
    def batch(self) -> Iterator[BlobBatch]:
        """Store files together when the `with` block ends, and not at all when it raises."""
        batch = BlobBatch(self)
        try:
            yield batch
            batch.publish()
        finally:
            for temporary in batch.temporary:
                Path(temporary).unlink(missing_ok=True)


class BlobBatch:
    """Files that become durable together."""

    # The order is write, sync, rename, sync the folder: a name promises that its content is on disk. Each step is made
    # for all files before the next one.

    def __init__(self, store: BlobStore):
        self._store = store
        # All that were written, and the last one of each content by its hash.
        self.temporary: list[str] = []
        self._pending: dict[str, str] = {}

    def add(self, source: io.IOBase, expected: Blob | None = None) -> Blob:
        """Take a body or a file in constant memory; content that differs from the announcement is refused."""
        descriptor, temporary = tempfile.mkstemp(dir=self._store.incoming)
        self.temporary.append(temporary)
        digest, size = hashlib.sha256(), 0
        with open(descriptor, "wb") as file:
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                file.write(chunk)
                size += len(chunk)
        blob = Blob(digest.hexdigest(), size)
        if expected is not None and blob != expected:
            told = f"the upload has {blob.size} bytes with SHA-256 {blob.sha256}"
            raise HubError(400, f"{told}, but {expected.size} bytes with SHA-256 {expected.sha256} were announced")
        self._pending[blob.sha256] = temporary
        return blob

    def publish(self) -> None:
        """Give every file its name."""
        # A disk waits for its own journal, with one small file as long as with many that are synced at the same time.
        with ThreadPoolExecutor(_SYNCS) as threads:
            list(threads.map(sync_file, self._pending.values()))
        paths = {self._store.path(sha256): temporary for sha256, temporary in self._pending.items()}
        folders = sorted({path.parent for path in paths})
        for folder in folders:
            make_directory(folder)
        for path, temporary in paths.items():
            os.replace(temporary, path)
        for folder in folders:
            sync_directory(folder)
