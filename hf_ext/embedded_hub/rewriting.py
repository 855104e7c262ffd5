"""Changes to the history of a repository: squashing a branch, and taking large files out of every commit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .errors import HubError
from .objects import Commit, Entry, Snapshot
from .repository import Repository


def squash_history(repository: Repository, revision: str, message: str) -> Commit:
    """Replace the history of a branch or pull request by one commit of what it holds."""
    title, _, description = message.strip().partition("\n")
    if not title.strip():
        raise HubError(400, "field 'message' must not be empty")
    with repository.change_state() as state:
        ref = repository.find_branch(state, revision)
        snapshot = repository.snapshot(state["refs"][ref])
        commit = repository.write_commit(snapshot, (), title.strip(), description.strip())
        state["refs"][ref] = commit.oid
    repository.forget_unreachable()
    return commit


def list_large_files(repository: Repository) -> Iterator[tuple[str, str, Entry, Commit]]:
    """Every large file that a ref can reach, once: ref, path, entry and the commit that brought it."""
    seen: set[tuple[str, str]] = set()
    for ref, head in sorted(repository.refs.items()):
        found: dict[tuple[str, str], tuple[str, str, Entry, Commit]] = {}
        for commit in repository.history(head):
            for path, entry in repository.snapshot(commit.oid).files.items():
                if entry.lfs and (path, entry.oid) not in seen:
                    # Older commits come later: the last one that has it is the first that had it.
                    found[path, entry.oid] = (ref, path, entry, commit)
        seen |= found.keys()
        yield from found.values()


def remove_large_files(repository: Repository, oids: set[str]) -> None:
    """Take files out of all commits that any ref can reach."""
    # A commit that never had them keeps its hash; all others, and those after them, get a new one. The bytes stay on
    # disk, as those of other repositories.
    renamed: dict[str, str] = {}
    with repository.change_state() as state:
        for start in [*state["refs"].values(), *state["kept"], *(pull["base"] for pull in state["pulls"])]:
            _rewrite(repository, start, oids, renamed)
        state["refs"] = {ref: renamed[oid] for ref, oid in state["refs"].items()}
        state["kept"] = [renamed[oid] for oid in state["kept"]]
        for pull in state["pulls"]:
            pull["base"] = renamed[pull["base"]]
            _rename_events(pull, renamed)
    repository.forget_unreachable()


def _rewrite(repository: Repository, start: str, oids: set[str], renamed: dict[str, str]) -> None:
    """Write the commits that lead to one without some files, parents first, and note their new hashes."""
    pending = [start]
    while pending:
        commit = repository.commit(pending[-1])
        missing = [parent for parent in commit.parents if parent not in renamed]
        if missing:
            pending += missing
            continue
        pending.pop()
        if commit.oid not in renamed:
            files = repository.snapshot(commit.oid).files
            kept = {path: entry for path, entry in files.items() if not (entry.lfs and entry.oid in oids)}
            parents = tuple(renamed[parent] for parent in commit.parents)
            if len(kept) == len(files) and parents == commit.parents:
                renamed[commit.oid] = commit.oid
            else:
                again = repository.write_commit(Snapshot(kept), parents, commit.title, commit.description, commit.date)
                renamed[commit.oid] = again.oid


def _rename_events(pull: dict[str, Any], renamed: dict[str, str]) -> None:
    """Put the new hashes into what a pull request tells of its commits."""
    pull["merge_commit"] = renamed.get(pull["merge_commit"], pull["merge_commit"])
    for event in pull["events"]:
        if "oid" in event["data"]:
            event["data"]["oid"] = renamed.get(event["data"]["oid"], event["data"]["oid"])
