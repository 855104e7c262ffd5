"""Immutable objects of the embedded Hub: a file entry, the snapshot of all files, a commit. Ids are git's."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property

from .errors import HubError, entry_not_found
from .storage import Blob, git_oid, lfs_pointer

# The embedded Hub has one user.
OWNER = "local"
_SIGNATURE = f"{OWNER} <{OWNER}@localhost>"


@dataclass(frozen=True)
class Entry:
    """One file of a snapshot: its git blob id, and the blob that holds its bytes (`lfs`: git has only a pointer)."""

    oid: str
    size: int
    sha256: str
    lfs: bool

    @classmethod
    def of_lfs(cls, blob: Blob) -> Entry:
        """Entry of a large file: git's id is that of the pointer."""
        return cls(git_oid("blob", lfs_pointer(blob.sha256, blob.size)), blob.size, blob.sha256, lfs=True)

    @property
    def etag(self) -> str:
        """Tag that clients compare to see if a file has changed."""
        return self.sha256 if self.lfs else self.oid


@dataclass(frozen=True)
class Operation:
    """One line of a commit: store `entry` at `path`, or delete the file or folder when it is None."""

    path: str
    entry: Entry | None
    folder: bool = False


class Snapshot:
    """All files of one commit."""

    def __init__(self, files: dict[str, Entry]):
        self.files = files

    @cached_property
    def folders(self) -> dict[str, str]:
        """Git's tree id of each folder; of the root, "", too."""
        # Whoever looks for one file in a history does not need them.
        folders = _tree_ids(self.files)
        if shadows := folders.keys() & self.files.keys():
            raise HubError(400, f"{min(shadows)!r} cannot be a file and a folder at once: delete one in this commit")
        return folders

    def children(self, folder: str, recursive: bool) -> list[str]:
        """Sorted paths of the files and folders below a folder."""
        prefix = f"{folder}/" if folder else ""
        below = [path for path in (*self.files, *self.folders) if path and path.startswith(prefix)]
        return sorted(path for path in below if recursive or "/" not in path[len(prefix) :])

    def id_of(self, path: str) -> str | None:
        """Git id of a file or folder, or None when there is none."""
        entry = self.files.get(path)
        return entry.oid if entry else self.folders.get(path)

    def apply(self, operations: Iterable[Operation]) -> Snapshot:
        """The snapshot after operations in their order; deleting an absent file is an error."""
        files = dict(self.files)
        for operation in operations:
            if operation.entry is not None:
                files[operation.path] = operation.entry
                continue
            prefix = f"{operation.path}/"
            # As on the Hub, a folder may be deleted by the name of a file, and after its files were.
            single = operation.path in files and not operation.folder
            doomed = [operation.path] if single else [path for path in files if path.startswith(prefix)]
            if not doomed and not (operation.folder and operation.path in self.folders):
                what = "folder" if operation.folder else "file"
                raise entry_not_found(f"A {what} with this name doesn't exist: {operation.path!r}")
            for path in doomed:
                del files[path]
        return Snapshot(files)

    def dump(self) -> bytes:
        rows = {path: [entry.oid, entry.size, entry.sha256, entry.lfs] for path, entry in sorted(self.files.items())}
        return json.dumps(rows).encode()

    @classmethod
    def load(cls, data: bytes) -> Snapshot:
        return cls({path: Entry(*row) for path, row in json.loads(data).items()})


def _tree_ids(files: dict[str, Entry]) -> dict[str, str]:
    """Git tree id of every folder, deepest first."""
    rows: dict[str, list[tuple[str, str, str]]] = {"": []}
    for path, entry in files.items():
        above = path
        while above := above.rpartition("/")[0]:
            rows.setdefault(above, [])
        folder, _, name = path.rpartition("/")
        rows[folder].append((name, "100644", entry.oid))
    identifiers: dict[str, str] = {}
    for folder in sorted(rows, key=lambda path: path.count("/") + bool(path), reverse=True):
        # Git sorts a folder as if its name ended in a slash.
        lines = sorted(rows[folder], key=lambda row: (row[0] + ("/" if row[1] == "40000" else "")).encode())
        tree = b"".join(f"{mode} {name}".encode() + b"\0" + bytes.fromhex(oid) for name, mode, oid in lines)
        identifiers[folder] = git_oid("tree", tree)
        if folder:
            parent, _, name = folder.rpartition("/")
            rows[parent].append((name, "40000", identifiers[folder]))
    return identifiers


@dataclass(frozen=True)
class Commit:
    """One commit, stored as the bytes of git's commit object."""

    oid: str
    tree: str
    parents: tuple[str, ...]
    title: str
    description: str
    date: datetime

    @staticmethod
    def encode(tree: str, parents: Iterable[str], title: str, description: str, date: datetime) -> bytes:
        """Git's commit object for these fields."""
        stamp = f"{_SIGNATURE} {int(date.timestamp())} +0000"
        lines = [f"tree {tree}", *(f"parent {parent}" for parent in parents), f"author {stamp}", f"committer {stamp}"]
        return ("\n".join(lines) + f"\n\n{title}\n\n{description}").encode()

    @classmethod
    def decode(cls, data: bytes) -> Commit:
        """Read a commit object; its id follows from its bytes."""
        head, _, message = data.decode().partition("\n\n")
        title, _, description = message.partition("\n\n")
        fields = [line.split(" ", 1) for line in head.split("\n")]
        parents = tuple(value for key, value in fields if key == "parent")
        date = datetime.fromtimestamp(int(fields[-1][1].split(" ")[-2]), UTC)
        return cls(git_oid("commit", data), fields[0][1], parents, title, description, date)


def hub_time(moment: datetime) -> str:
    """A time as the Hub writes it: the client reads no other form."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
