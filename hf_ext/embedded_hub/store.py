"""The folder of an embedded Hub: its repositories, the blobs they share, and the rules that keep it whole.

hub-format-1                    marks the folder as ours
serving.lock                    locked while a process serves it
incoming/                       what is being written; emptied on start
blobs/ab/<sha256>               contents of all files
models|datasets|spaces/owner/name/     one folder per repository, see `repository.py`
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from hf_ext.system import NO_LINK, open_descriptor, sync_directory

from .errors import HubError
from .names import check_repository_id
from .objects import Operation
from .repository import Repository
from .storage import BlobStore, git_oid, inside, make_directory

KINDS = {"models": "model", "datasets": "dataset", "spaces": "space"}
_MARKER = "hub-format-1"
# Not the marker: where a system has no locks of its own, the lock is that the file exists.
_LOCK = "serving.lock"


class HubStore:
    """All repositories below one folder. One process at a time may have it open (a file lock)."""

    # Two kinds of locks keep it whole. `_lock` guards which repositories there are: making, moving and deleting one is
    # a rename of its folder. The lock of a repository guards its state; `retire` holds it while the folder is renamed,
    # so that no commit is written into a folder that is about to go.

    def __init__(self, root: str | Path):
        Path(root).mkdir(parents=True, exist_ok=True)
        self.root = Path(os.path.realpath(root))
        present = set(os.listdir(self.root))
        if present and _MARKER not in present:
            raise ValueError(
                f"{self.root} is not empty and is not the folder of an embedded Hub (it has no {_MARKER!r}): "
                "give a new or empty folder"
            )
        os.close(open_descriptor(self.root / _MARKER, os.O_CREAT | os.O_RDWR | NO_LINK, 0o600))
        # Any thread may close what another opened.
        self._serving = FileLock(self.root / _LOCK, timeout=0, thread_local=False, mode=0o600)
        try:
            self._serving.acquire()
        except Timeout as error:
            raise ValueError(f"{self.root} is served by another process: stop it or give another folder") from error
        sync_directory(self.root)
        for name in ("incoming", "blobs", *KINDS):
            make_directory(inside(self.root, name))
        self.incoming = self.root / "incoming"
        # Drop what a killed process was writing; only ever our own folder, and never through a link.
        for entry in os.scandir(self.incoming):
            shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)
        self.blobs = BlobStore(self.root / "blobs", self.incoming)
        self._lock = threading.Lock()
        self._open: dict[tuple[str, str], Repository] = {}

    def close(self) -> None:
        """Let another process open the folder."""
        self._serving.release()

    def repository(self, kind: str, repository_id: str) -> Repository | None:
        """The repository of that kind (`models`, `datasets`, `spaces`) and id, or None."""
        key = (kind, check_repository_id(repository_id))
        with self._lock:
            if key not in self._open:
                folder = self._folder(*key)
                if not folder.is_dir():
                    return None
                self._open[key] = Repository(folder, self.incoming)
            return self._open[key]

    def create(self, kind: str, repository_id: str, private: bool, operations: Sequence[Operation]) -> Repository:
        """Create a repository whose first commit makes the operations."""
        folder = self._folder(kind, check_repository_id(repository_id))
        with tempfile.TemporaryDirectory(dir=self.incoming) as temporary:
            identity = {"kind": KINDS[kind], "private": private}
            draft = Path(temporary, "repository")
            draft.mkdir()
            Repository.initialise(draft, self.incoming, identity, operations)
            make_directory(folder.parent)
            with self._lock:
                if folder.exists():
                    raise HubError(409, f"You already created this {KINDS[kind]} repo: {repository_id}")
                os.rename(draft, folder)
                sync_directory(folder.parent)
                self._open[kind, repository_id] = Repository(folder, self.incoming)
                return self._open[kind, repository_id]

    def delete(self, kind: str, repository: Repository) -> None:
        """Delete a repository in one step. Blobs stay: other repositories may share them."""
        with repository.retire(), self._lock, tempfile.TemporaryDirectory(dir=self.incoming) as temporary:
            os.rename(repository.folder, Path(temporary, "repository"))
            sync_directory(repository.folder.parent)
            del self._open[kind, repository.id]

    def move(self, kind: str, repository: Repository, repository_id: str) -> None:
        """Give a repository another id, in one step. The old id names nothing then."""
        target = self._folder(kind, check_repository_id(repository_id))
        make_directory(target.parent)
        with repository.retire(), self._lock:
            if target.exists():
                raise HubError(409, f"A {KINDS[kind]} repository called {repository_id} already exists")
            os.rename(repository.folder, target)
            sync_directory(target.parent)
            sync_directory(repository.folder.parent)
            del self._open[kind, repository.id]

    def identifiers(self, kind: str) -> list[str]:
        """The ids of all repositories of a kind, sorted."""
        return sorted(f"{folder.parent.name}/{folder.name}" for folder in (self.root / kind).glob("*/*"))

    def repositories(self, kind: str) -> list[Repository]:
        """All repositories of a kind, by their ids."""
        found = (self.repository(kind, identifier) for identifier in self.identifiers(kind))
        return [repository for repository in found if repository is not None]

    def verify(self) -> list[str]:
        """Read everything that a ref can reach and recompute every hash."""
        repositories = [each for kind in KINDS for each in self.repositories(kind)]
        return [fault for repository in repositories for fault in self._faults(repository)]

    def _faults(self, repository: Repository) -> Iterator[str]:
        """What is wrong in one repository."""
        for ref, head in repository.refs.items():
            try:
                for commit in repository.history(head):
                    where = f"{repository.kind} {repository.id}, {ref}, commit {commit.oid}"
                    snapshot = repository.snapshot(commit.oid)
                    if snapshot.folders[""] != commit.tree:
                        yield f"{where}: the snapshot is not {commit.tree}"
                    for path, entry in snapshot.files.items():
                        fault = self.blobs.fault(entry.blob)
                        if fault is None and not entry.lfs:
                            with self.blobs.open(entry.sha256) as file:
                                fault = None if git_oid("blob", file.read()) == entry.oid else "other git id"
                        if fault:
                            yield f"{where}, {path}: {fault}"
            except (HubError, OSError) as error:
                yield f"{repository.kind} {repository.id}, {ref}: {error}"

    def _folder(self, kind: str, repository_id: str) -> Path:
        """Where a repository of a checked id is."""
        return inside(self.root, kind, *repository_id.split("/"))
