"""The folder of an embedded Hub: its repositories, the blobs they share, and the rules that keep it whole.

hub-format-1                    marks the folder as ours
serving.lock                    locked while a process serves it
moved.json                      new ids of repositories that were moved, by kind and old id
incoming/                       what is being written; emptied on start
blobs/ab/<sha256>               contents of all files
models|datasets|spaces/owner/name/     one folder per repository, see `repository.py`
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from errno import EISDIR, ENOENT, ENOTDIR
from pathlib import Path

from filelock import FileLock, Timeout

from hf_ext.files import remove_leftovers
from hf_ext.system import NO_LINK, open_descriptor, sync_directory

from .errors import HubError
from .names import check_repository_id
from .objects import Operation
from .repository import Repository
from .storage import BlobStore, inside, make_directory, write_atomically

KINDS = {"models": "model", "datasets": "dataset", "spaces": "space"}
_MARKER = "hub-format-1"
# Not the marker: where a system has no locks of its own, the lock is that the file exists.
_LOCK = "serving.lock"
_MOVED = "moved.json"


class HubStore:
    """All repositories below one folder. One process at a time may have it open (a file lock)."""

    # Two kinds of locks keep it whole. `_lock` guards which repositories there are: making, moving and deleting one is
    # a rename of its folder. The lock of a repository guards its state; `retire` holds it while the folder is renamed,
    # so that no commit is written into a folder that is about to go.

    def __init__(self, root: str | Path):
        # Other users of the machine must not read private repositories.
        Path(root).mkdir(mode=0o700, parents=True, exist_ok=True)
        self.root = Path(os.path.realpath(root))
        present = set(os.listdir(self.root))
        if present and _MARKER not in present:
            told = f"{self.root} is not empty and is not the folder of an embedded Hub (it has no {_MARKER!r})"
            raise ValueError(f"{told}: give a new or empty folder")
        os.close(open_descriptor(self.root / _MARKER, os.O_CREAT | os.O_RDWR | NO_LINK, 0o600))
        # Any thread may close what another opened.
        self._serving = FileLock(self.root / _LOCK, timeout=0, thread_local=False, mode=0o600)
        try:
            self._serving.acquire()
        except Timeout as error:
            raise ValueError(f"{self.root} is served by another process: stop it, or give another folder") from error
        sync_directory(self.root)
        remove_leftovers(self.root)
        for name in ("incoming", "blobs", *KINDS):
            make_directory(inside(self.root, name))
        self.incoming = self.root / "incoming"
        # Drop what a killed process was writing; only ever our own folder, and never through a link.
        for entry in os.scandir(self.incoming):
            shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)
        self.blobs = BlobStore(self.root / "blobs", self.incoming)
        self._lock = threading.Lock()
        self._open: dict[tuple[str, str], Repository] = {}
        moved = inside(self.root, _MOVED)
        self._moved: dict[str, str] = json.loads(moved.read_bytes()) if moved.exists() else {}

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
                self._open[key] = Repository(folder)
            return self._open[key]

    def moved(self, kind: str, repository_id: str) -> str | None:
        """The id that a repository was moved to, or None; an id may be given to another repository meanwhile."""
        return self._moved.get(f"{kind}/{repository_id}")

    def create(self, kind: str, repository_id: str, private: bool, operations: Sequence[Operation]) -> Repository:
        folder = self._folder(kind, check_repository_id(repository_id))
        with tempfile.TemporaryDirectory(dir=self.incoming) as temporary:
            identity = {"kind": KINDS[kind], "private": private}
            draft = Path(temporary, "repository")
            draft.mkdir()
            Repository.initialise(draft, identity, operations)
            make_directory(folder.parent)
            with self._lock:
                if folder.exists():
                    raise HubError(409, f"You already created this {KINDS[kind]} repo: {repository_id}")
                self._record_move(kind, repository_id, None)
                os.rename(draft, folder)
                sync_directory(folder.parent)
                self._open[kind, repository_id] = Repository(folder)
                return self._open[kind, repository_id]

    def delete(self, kind: str, repository: Repository) -> None:
        """Delete a repository in one step. Blobs stay: other repositories may share them."""
        with repository.retire(), self._lock, tempfile.TemporaryDirectory(dir=self.incoming) as temporary:
            os.rename(repository.folder, Path(temporary, "repository"))
            sync_directory(repository.folder.parent)
            self._record_move(kind, repository.id, None)
            del self._open[kind, repository.id]

    def move(self, kind: str, repository: Repository, repository_id: str) -> None:
        """Give a repository another id, in one step. Requests for the old id are redirected to the new one."""
        target = self._folder(kind, check_repository_id(repository_id))
        make_directory(target.parent)
        with repository.retire(), self._lock:
            if target.exists():
                raise HubError(409, f"A {KINDS[kind]} repository called {repository_id} already exists")
            # First: after a crash between the two the old id still names the repository, which goes before.
            self._record_move(kind, repository.id, repository_id)
            os.rename(repository.folder, target)
            sync_directory(target.parent)
            sync_directory(repository.folder.parent)
            del self._open[kind, repository.id]

    def _record_move(self, kind: str, old_id: str, new_id: str | None) -> None:
        """Note where a repository goes, or that its id is free for another one."""
        # No repository has the new id, or no longer the old one: what leads there leads to one that was deleted.
        gone, moved = new_id or old_id, dict(self._moved)
        for key, value in self._moved.items():
            of_kind, _, identifier = key.partition("/")
            if of_kind == kind and gone in (identifier, value):
                del moved[key]
            elif of_kind == kind and value == old_id:
                # Of a repository that moves again, each earlier id leads to the last one.
                moved[key] = str(new_id)
        if new_id is not None:
            moved[f"{kind}/{old_id}"] = new_id
        if moved != self._moved:
            write_atomically(inside(self.root, _MOVED), json.dumps(moved).encode())
            self._moved = moved

    def identifiers(self, kind: str) -> list[str]:
        """The ids of all repositories of a kind, sorted."""
        # File managers leave files and folders (.DS_Store, @eaDir), which are none.
        return sorted("/".join(state.parts[-3:-1]) for state in (self.root / kind).glob("*/*/repository.json"))

    def repositories(self, kind: str, wanted: Callable[[str], bool] = lambda _: True) -> Iterator[Repository]:
        """The repositories of a kind whose id is wanted, by their ids; one that is damaged is left out, and logged."""
        for identifier in filter(wanted, self.identifiers(kind)):
            try:
                if (repository := self.repository(kind, identifier)) is not None:
                    yield repository
            except Exception as error:
                # Of the disk or the process, not of a repository: the others would be missed, too.
                if isinstance(error, OSError) and error.errno not in (ENOENT, ENOTDIR, EISDIR):
                    raise
                logging.getLogger(__name__).error("%s/%s is damaged: %r", kind, identifier, error)

    def _folder(self, kind: str, repository_id: str) -> Path:
        return inside(self.root, kind, *repository_id.split("/"))
