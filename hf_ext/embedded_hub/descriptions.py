"""Descriptions of repositories in the Hub's JSON: files, cards, refs, commits, pull requests."""

from __future__ import annotations

import html
import json
import threading
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

from hf_ext.hub.card_rules import read_front_matter
from hf_ext.hub.header_format import CheckpointError, read_entries

from .errors import HubError
from .objects import OWNER, Commit, Entry, Snapshot, hub_time
from .repository import Repository
from .storage import BlobStore, lfs_pointer

_MAXIMUM_CARD_BYTES = 4 << 20
_MAXIMUM_INDEX_BYTES = 25 << 20
# Limits the processor time for cards that many clients send at once.
_ONE_CARD_AT_A_TIME = threading.Lock()
_BUSY_SECONDS = 20.0
# Card fields that the Hub turns into tags, with the prefix of the tag.
_TAGGED_FIELDS = dict.fromkeys(("library_name", "pipeline_tag", "tags"), "")
_TAGGED_FIELDS |= {"license": "license:", "language": "", "datasets": "dataset:", "base_model": "base_model:"}
# Those of data sets, by which `list_datasets` filters.
_OF_DATASETS = [
    *("language", "language_creators", "annotations_creators", "multilinguality", "size_categories"),
    *("source_datasets", "task_categories", "task_ids"),
]


def repository_url(repository: Repository, base_url: str = "") -> str:
    """Address of a repository for a browser."""
    prefix = "" if repository.kind == "model" else f"{repository.kind}s/"
    return f"{base_url}/{prefix}{repository.id}"


def describe_entry(snapshot: Snapshot, path: str, last: Commit | None = None) -> dict[str, Any]:
    """A file or folder as in a tree listing."""
    entry = snapshot.files.get(path)
    if entry is None:
        described: dict[str, Any] = {"type": "directory", "oid": snapshot.folders[path], "size": 0, "path": path}
    else:
        described = {"type": "file", "oid": entry.oid, "size": entry.size, "path": path, **_describe_lfs(entry, "oid")}
    if last is not None:
        described["lastCommit"] = {"id": last.oid, "title": last.title, "date": hub_time(last.date)}
    return described


def _describe_lfs(entry: Entry, key: str) -> dict[str, Any]:
    """The part of a description that only large files have; listings call their hash in two ways."""
    pointer = lfs_pointer(entry.sha256, entry.size)
    return {"lfs": {key: entry.sha256, "size": entry.size, "pointerSize": len(pointer)}} if entry.lfs else {}


def describe_commit(commit: Commit, formatted: bool) -> dict[str, Any]:
    """A commit as in a commit listing."""
    texts = {"title": commit.title, "message": commit.description}
    escaped = {"formatted": {name: html.escape(text) for name, text in texts.items()}} if formatted else {}
    return {"id": commit.oid, **texts, "authors": [{"user": OWNER}], "date": hub_time(commit.date), **escaped}


def describe_pull(repository: Repository, pull: dict[str, Any]) -> dict[str, Any]:
    """A pull request with its history."""
    number, author = pull["num"], {"name": OWNER}
    merged = {"mergeCommitId": pull["merge_commit"]} if pull["merge_commit"] else {}
    return {
        **{key: pull[key] for key in ("num", "title", "status")},
        "author": author,
        "createdAt": pull["created"],
        "repo": {"name": repository.id, "type": repository.kind},
        "isPullRequest": True,
        "filesWithConflicts": repository.conflicts(pull),
        "changes": {"base": f"refs/heads/{pull['branch']}", **merged},
        "events": [
            {"id": f"{number:08x}{order:08x}", "author": author, **event} for order, event in enumerate(pull["events"])
        ],
    }


def describe_repository(repository: Repository, commit: str, blobs: BlobStore, sizes: bool) -> dict[str, Any]:
    """A repository at a commit: files, card metadata, tags, and the parameters of its safetensors files."""
    snapshot = repository.snapshot(commit)
    entry = snapshot.files.get("README.md")
    # Empty when there is no metadata that can be read.
    card = {} if entry is None or entry.size > _MAXIMUM_CARD_BYTES else _card_at(blobs.path(entry.sha256))
    siblings: list[dict[str, Any]] = [{"rfilename": path} for path in sorted(snapshot.files)]
    for sibling in siblings if sizes else ():
        entry = snapshot.files[sibling["rfilename"]]
        sibling |= {"size": entry.size, "blobId": entry.oid, **_describe_lfs(entry, "sha256")}
    described: dict[str, Any] = {
        "id": repository.id,
        "author": repository.id.partition("/")[0],
        "sha": commit,
        "createdAt": repository.created,
        "lastModified": hub_time(repository.commit(commit).date),
        "private": repository.private,
        "gated": False,
        "disabled": False,
        "tags": _tags(card, repository.kind),
        "siblings": siblings,
    }
    if card:
        described["cardData"] = card
    if repository.kind == "space" and "sdk" in card:
        described["sdk"] = card["sdk"]
    if repository.kind == "model":
        described |= {"modelId": repository.id, "spaces": []}
        described |= {key: card[key] for key in ("pipeline_tag", "library_name", "model-index") if key in card}
        if parameters := count_parameters(snapshot, blobs):
            described["safetensors"] = {"parameters": parameters, "total": sum(parameters.values())}
    return described


def count_parameters(snapshot: Snapshot, blobs: BlobStore) -> dict[str, int]:
    """Number of parameters of each data type in `model.safetensors`, or in the shards that its index names."""
    names = ["model.safetensors"]
    index = snapshot.files.get("model.safetensors.index.json")
    if index is not None and index.size <= _MAXIMUM_INDEX_BYTES:
        with blobs.open(index.sha256) as file:
            try:
                names = sorted(set(json.load(file)["weight_map"].values()))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                return {}
    counts: Counter[str] = Counter()
    for name in names:
        entry = snapshot.files.get(name) if isinstance(name, str) else None
        counted = None if entry is None else _parameters_of(blobs.path(entry.sha256))
        if counted is None:
            # Without a shard the sum would be of another model.
            return {}
        counts.update(counted)
    return dict(counts)


@lru_cache(maxsize=1024)
def _parameters_of(path: Path) -> Counter[str] | None:
    """Parameters in a safetensors file; None for what is none. A blob's name is its content, so one look is enough."""
    counts: Counter[str] = Counter()
    try:
        _, tensors = read_entries(path)
    except CheckpointError:
        return None
    for tensor in tensors.values():
        counts[tensor.dtype] += tensor.numbers
    return counts


def read_metadata(card: str) -> dict[str, Any]:
    """The metadata of a card, as data that JSON can say; empty when there is none."""
    if not _ONE_CARD_AT_A_TIME.acquire(timeout=_BUSY_SECONDS):
        raise HubError(503, "other cards are being read: try again in some seconds", headers={"Retry-After": "5"})
    try:
        return read_front_matter(card)
    finally:
        _ONE_CARD_AT_A_TIME.release()


@lru_cache(maxsize=64)
def _card_at(path: Path) -> dict[str, Any]:
    """Metadata of a card. A blob's name is its content, so it is read once."""
    try:
        return read_metadata(path.read_text(encoding="utf-8"))
    except ValueError:
        return {}


def _tags(card: dict[str, Any], kind: str) -> list[str]:
    tags: dict[str, None] = {}
    of_kind = {name: f"{name}:" for name in _OF_DATASETS} if kind == "dataset" else {}
    for field, prefix in (_TAGGED_FIELDS | of_kind).items():
        values = card.get(field)
        values = values if isinstance(values, list) else [values]
        tags |= dict.fromkeys(prefix + each for each in values if isinstance(each, str))
    return list(tags)
