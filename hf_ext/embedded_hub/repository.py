"""A repository of the embedded Hub on disk: immutable snapshots and commits, and a state file that is replaced.

    repository.json     everything that changes: refs, pull requests, visibility; replaced atomically
    commits/<oid>       git commit objects
    trees/<oid>.json    snapshots, named by their git tree id

A commit is written before the state that names it, so it becomes visible in the one step that moves its ref.
"""

from __future__ import annotations

import copy
import heapq
import json
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from hf_ext.files import remove_leftovers
from hf_ext.system import sync_directory

from .errors import HubError, revision_not_found
from .names import check_ref_name
from .objects import Commit, Operation, Snapshot, hub_time
from .storage import inside, write_atomically

_STATE = "repository.json"
_SNAPSHOTS_IN_MEMORY = 8
_CHANGES_IN_MEMORY = 4
_SHORT_COMMIT = re.compile(r"[0-9a-f]{7,39}")


@dataclass(frozen=True)
class Change:
    """Content of a commit to be made; `parent` is the commit that it believes to be the latest."""

    title: str
    description: str
    operations: Sequence[Operation]
    parent: str | None = None


class Repository:
    """A repository with branches, tags and pull requests. Writers are serialised; readers never wait."""

    # Readers use `_state` as it is: it is replaced, never changed. A writer holds the lock, changes a copy
    # (`change_state`), puts it on disk in one step, and only then lets it be the state. A process that is killed
    # leaves the old state, and commits that nobody can name. tests/embedded_hub/test_crash.py kills it at each step.

    def __init__(self, folder: Path):
        self.folder = folder
        for place in (folder, folder / "commits", folder / "trees"):
            remove_leftovers(place)
        self._lock = threading.RLock()
        self._state: dict[str, Any] = json.loads(inside(folder, _STATE).read_bytes())
        # `model`, `dataset` or `space`, and the time of creation: they never change.
        self.kind, self.created = str(self._state["kind"]), str(self._state["created"])
        self._deleted = False
        self._snapshot = lru_cache(maxsize=_SNAPSHOTS_IN_MEMORY)(
            lambda tree: Snapshot.load(inside(folder, "trees", f"{tree}.json").read_bytes())
        )
        # A listing by pages asks for the changes of one commit again and again.
        self.last_changes = lru_cache(maxsize=_CHANGES_IN_MEMORY)(self._find_changes)
        # All commits that a ref can reach, or could when it was deleted. One that a crash left without a ref is not in
        # here, and so cannot be named by its hash.
        self._visible = {commit.oid for commit in self.history(*self.refs.values(), *self._state["kept"])}

    @classmethod
    def initialise(cls, folder: Path, identity: dict[str, Any], operations: Sequence[Operation]) -> None:
        """Fill an empty folder: the state `identity` and a first commit on `main`."""
        for name in ("commits", "trees"):
            (folder / name).mkdir()
        state = {**identity, "created": hub_time(datetime.now(UTC)), "refs": {}, "kept": [], "pulls": []}
        write_atomically(folder / _STATE, json.dumps(state).encode())
        repository = cls(folder)
        with repository.change_state() as draft:
            first = repository.write_commit(Snapshot({}).apply(operations), (), "initial commit", "")
            draft["refs"]["refs/heads/main"] = first.oid
        sync_directory(folder)

    @property
    def id(self) -> str:
        """`owner/name`."""
        # Not in the state: moving a repository is one step, the renaming of its folder.
        return f"{self.folder.parent.name}/{self.folder.name}"

    @property
    def private(self) -> bool:
        """Reading needs a token."""
        return bool(self._state["private"])

    @property
    def refs(self) -> dict[str, str]:
        """Commit of each ref by its full name: `refs/heads/main`, `refs/tags/v1`, `refs/pr/1`."""
        return dict(self._state["refs"])

    @property
    def pulls(self) -> list[dict[str, Any]]:
        """The pull requests in the order of their numbers, which start at 1. They are the state's own: read only."""
        return list(self._state["pulls"])

    def pull(self, number: int) -> dict[str, Any]:
        return _pull(self.pulls, number)

    def conflicts(self, pull: dict[str, Any]) -> list[str]:
        """Files for which a pull request that is not merged and its branch disagree."""
        target = self.refs.get(f"refs/heads/{pull['branch']}")
        if pull["merge_commit"] or target is None:
            return []
        return self._compare(pull["base"], target, self.refs[f"refs/pr/{pull['num']}"])[1]

    def resolve(self, revision: str) -> str:
        """Commit hash of a branch, tag, full ref name or visible commit, of which 7 digits are enough."""
        refs = self._state["refs"]
        for name in (f"refs/heads/{revision}", f"refs/tags/{revision}", revision):
            if name in refs:
                return str(refs[name])
        if revision in self._visible:
            return revision
        if _SHORT_COMMIT.fullmatch(revision):
            found = [oid for oid in tuple(self._visible) if oid.startswith(revision)]
            if len(found) == 1:
                return found[0]
        raise revision_not_found(revision)

    def commit(self, oid: str) -> Commit:
        """The commit of that hash, which is checked against its bytes."""
        commit = Commit.decode(inside(self.folder, "commits", oid).read_bytes())
        if commit.oid != oid:
            raise HubError(500, f"commit {oid} of {self.id!r} is damaged on disk")
        return commit

    def snapshot(self, commit: str) -> Snapshot:
        return self._snapshot(self.commit(commit).tree)

    def history(self, *starts: str) -> Iterator[Commit]:
        """Some commits and their ancestors, each once, latest first and never before a child that led to it."""
        seen: set[str] = set()
        queue: list[tuple[float, int, Commit]] = []
        pending: Sequence[str] = starts
        while True:
            for oid in pending:
                if oid not in seen:
                    seen.add(oid)
                    commit = self.commit(oid)
                    # The count breaks ties, so that commits are never compared.
                    heapq.heappush(queue, (-commit.date.timestamp(), len(seen), commit))
            if not queue:
                return
            latest = heapq.heappop(queue)[2]
            pending = latest.parents
            yield latest

    def _find_changes(self, commit: str, paths: frozenset[str] | None = None) -> dict[str, Commit]:
        """For each file and folder, or some, the latest commit that gave it its present content."""
        found, snapshot = dict[str, Commit](), self.snapshot(commit)
        wanted = {*snapshot.files, *snapshot.folders} if paths is None else set(paths)
        for entry in self.history(commit):
            before = [self.snapshot(parent) for parent in entry.parents]
            here = self.snapshot(entry.oid)
            for path in list(wanted):
                present = snapshot.id_of(path)
                if here.id_of(path) == present and all(parent.id_of(path) != present for parent in before):
                    found[path] = entry
                    wanted.remove(path)
            if not wanted:
                break
        return found

    def append(self, revision: str, change: Change) -> Commit:
        """Commit to a branch or an open pull request; a tag or a commit, which cannot move, is refused."""
        with self.change_state() as state:
            ref = f"refs/heads/{revision}" if f"refs/heads/{revision}" in state["refs"] else revision
            if ref not in state["refs"] or ref.startswith("refs/tags/"):
                self.resolve(revision)
                raise HubError(400, f"{revision!r} is not a branch or pull request: only these can be changed")
            commit = self._apply(state["refs"][ref], change)
            state["refs"][ref] = commit.oid
            if ref.startswith("refs/pr/"):
                pull = _pull(state["pulls"], int(ref.rpartition("/")[2]), "open", "draft")
                pull["events"].append(_event("commit", {"subject": commit.title, "oid": commit.oid}))
            return commit

    def open_pull(self, revision: str, title: str, description: str, change: Change | None) -> dict[str, Any]:
        """Open a pull request against a branch, with a first commit if there is a change."""
        with self.change_state() as state:
            if f"refs/heads/{revision}" not in state["refs"]:
                raise revision_not_found(revision)
            base = state["refs"][f"refs/heads/{revision}"]
            head = self._apply(base, change) if change else self.commit(base)
            number = len(state["pulls"]) + 1
            events = [_event("comment", {"edited": False, "hidden": False, "latest": {"raw": description}})]
            if change:
                events.append(_event("commit", {"subject": head.title, "oid": head.oid}))
            pull = {"num": number, "title": title, "branch": revision, "base": base, "merge_commit": None}
            pull |= {"status": "open" if change else "draft", "created": hub_time(datetime.now(UTC)), "events": events}
            state["pulls"].append(pull)
            state["refs"][f"refs/pr/{number}"] = head.oid
            return pull

    def merge_pull(self, number: int) -> Commit:
        with self.change_state() as state:
            pull = _pull(state["pulls"], number, "open", "draft")
            ref, head = f"refs/heads/{pull['branch']}", state["refs"][f"refs/pr/{number}"]
            if ref not in state["refs"]:
                raise revision_not_found(pull["branch"])
            target = state["refs"][ref]
            changed, conflicts = self._compare(pull["base"], target, head)
            if conflicts:
                raise HubError(409, f"pull request {number} conflicts with {pull['branch']!r} in {conflicts}")
            ours, theirs = self.snapshot(target).files, self.snapshot(head).files
            merged = {path: entry for path, entry in ours.items() if path not in changed}
            merged |= {path: theirs[path] for path in changed if path in theirs}
            commit = self.write_commit(Snapshot(merged), (target, head), f"{pull['title']} (#{number})", "")
            state["refs"][ref] = commit.oid
            pull |= {"status": "merged", "merge_commit": commit.oid}
            pull["events"].append(_event("status-change", {"status": "merged"}))
            return commit

    def set_pull_status(self, number: int, status: str) -> None:
        """Open or close a pull request that is not merged."""
        if status not in ("open", "closed"):
            raise HubError(400, f"status must be 'open' or 'closed', got {status!r}")
        with self.change_state() as state:
            pull = _pull(state["pulls"], number, "open", "draft", "closed")
            pull["status"] = status
            pull["events"].append(_event("status-change", {"status": status}))

    def create_ref(self, namespace: str, name: str, revision: str) -> None:
        """Create a branch (`refs/heads`) or tag (`refs/tags`) at a revision; status 409 when it exists."""
        with self.change_state() as state:
            commit, ref = self.resolve(revision), f"{namespace}/{check_ref_name(name)}"
            if taken := {f"refs/heads/{name}", f"refs/tags/{name}"} & state["refs"].keys():
                raise HubError(409, f"Reference {sorted(taken)[0]} already exists")
            if _SHORT_COMMIT.fullmatch(name) and any(oid.startswith(name) for oid in self._visible):
                raise HubError(409, f"{name} is the beginning of a commit's hash, which a reference would hide")
            state["refs"][ref] = commit

    def delete_ref(self, namespace: str, name: str) -> None:
        """Delete a branch or tag. Its commits stay readable by their hashes."""
        ref = f"{namespace}/{name}"
        if ref == "refs/heads/main":
            raise HubError(403, "Cannot delete refs/heads/main: every repository has it")
        with self.change_state() as state:
            if ref not in state["refs"]:
                raise revision_not_found(name)
            state["kept"].append(state["refs"].pop(ref))

    @contextmanager
    def retire(self) -> Iterator[None]:
        """Block all writers while the folder is moved away, and refuse them afterwards."""
        with self._lock:
            self._check_present()
            yield
            self._deleted = True

    @contextmanager
    def change_state(self) -> Iterator[dict[str, Any]]:
        """Give a draft of the state; publish it atomically unless the block raises."""
        with self._lock:
            self._check_present()
            draft = copy.deepcopy(self._state)
            yield draft
            write_atomically(inside(self.folder, _STATE), json.dumps(draft).encode())
            self._state = draft
            self._visible.update(draft["refs"].values())

    def _check_present(self) -> None:
        """Refuse to write to a repository that was deleted while the request was on its way."""
        if self._deleted:
            raise HubError(404, f"repository {self.id!r} was deleted", "RepoNotFound")

    def _apply(self, head: str, change: Change) -> Commit:
        """Write the commit that a change makes of a head; the head itself when nothing changes."""
        if change.parent is not None and change.parent != head:
            told = "The branch was updated since you opened this page. Please refresh and try again."
            raise HubError(412, f"{told} The parent is {change.parent}, but the head is {head}")
        before, after = self.snapshot(head), self.snapshot(head).apply(change.operations)
        if after.files == before.files:
            return self.commit(head)
        return self.write_commit(after, (head,), change.title, change.description)

    def _compare(self, base: str, target: str, head: str) -> tuple[list[str], list[str]]:
        """Files that `head` changed since `base`, and those of them that `target` changed in another way."""
        before, ours, theirs = (self.snapshot(oid).files for oid in (base, target, head))
        changed = sorted(path for path in before.keys() | theirs.keys() if before.get(path) != theirs.get(path))
        return changed, [path for path in changed if ours.get(path) not in (before.get(path), theirs.get(path))]

    def write_commit(self, snapshot: Snapshot, parents: tuple[str, ...], title: str, description: str) -> Commit:
        """Put a snapshot and its commit on disk; no ref names them yet."""
        tree = snapshot.folders[""]
        data = Commit.encode(tree, parents, title, description, datetime.now(UTC))
        commit = Commit.decode(data)
        write_atomically(inside(self.folder, "trees", f"{tree}.json"), snapshot.dump())
        write_atomically(inside(self.folder, "commits", commit.oid), data)
        return commit


def _pull(pulls: list[dict[str, Any]], number: int, *allowed: str) -> dict[str, Any]:
    """The pull request of that number, which must have one of the allowed states if there are any."""
    if not 1 <= number <= len(pulls):
        raise HubError(404, f"there is no pull request {number}")
    pull = pulls[number - 1]
    if allowed and pull["status"] not in allowed:
        raise HubError(409, f"pull request {number} is {pull['status']}; it must be {' or '.join(allowed)}")
    return pull


def _event(kind: str, data: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, "createdAt": hub_time(datetime.now(UTC)), "data": data}
