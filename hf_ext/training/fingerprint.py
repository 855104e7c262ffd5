"""Fingerprint of the training data, made without reading all of it."""

# A run goes on exactly only with the data it began with: order and augmentation are functions of the position of an
# example. To hash a million pictures at every start would take longer than many runs. So it is: the number of rows,
# the names of the columns, the commit of what comes from a Hub, and a hash of some rows, of a stream the first of some
# shards. Rows that were removed or added are found for sure where their number is known; what was sorted anew or
# exchanged is found where it touches the rows that are hashed. Files count by their last name and their content, so
# that data may move.

import hashlib
from collections.abc import Iterator
from glob import has_magic
from pathlib import Path
from typing import Any

import datasets
import httpx2
import numpy as np
from huggingface_hub import HfApi

from ..data.opening import find_files
from .arguments import find_paths

# Rows of indexed data; of a stream shards, and the first rows of each.
_ROWS, _SHARDS, _FIRST = 64, 8, 8
# Bytes of a picture, a recording or a text that are hashed.
_BYTES = 65536


def fingerprint(data: datasets.Dataset | datasets.IterableDataset, section: Any) -> dict[str, Any]:
    """The fingerprint of opened data and of the section of a run that names its places."""
    is_stream = isinstance(data, datasets.IterableDataset)
    digest = hashlib.sha256()
    for row in _find_rows(data):
        digest.update(repr(_plain(row)).encode())
    return {
        "rows": None if is_stream else len(data),
        "shards": data.num_shards if is_stream else None,
        "columns": sorted(data.column_names or []),
        "commits": {place: commit for place in find_paths(section) if (commit := _commit(place)) is not None},
        "sample": digest.hexdigest(),
    }


def compare_fingerprints(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The differences, in words; a value that one side lacks counts as equal."""
    differences = [
        f"{name}: {before[name]} → {now[name]}"
        for name in ("rows", "shards", "columns")
        if before[name] != now[name] and None not in (before[name], now[name])
    ]
    differences += [
        f"commit of {place}: {before['commits'][place]} → {commit}"
        for place, commit in now["commits"].items()
        if before["commits"].get(place, commit) != commit
    ]
    if before["sample"] != now["sample"] and not differences:
        differences.append("the compared rows have other contents")
    return differences


def _commit(place: str) -> str | None:
    """The commit of a data set of a Hub; nothing of a local one, or where the Hub cannot be asked."""
    if find_files(place) or place.startswith((".", "/", "~")) or has_magic(place):
        return None
    name, _, revision = place.partition("@")
    try:
        return HfApi().dataset_info(name, revision=revision or None).sha
    # Offline, or from the cache.
    except (OSError, ValueError, httpx2.TransportError):
        return None


def _find_rows(data: datasets.Dataset | datasets.IterableDataset) -> Iterator[dict[str, Any]]:
    """Rows from the whole of a table; of a stream the first of some shards."""
    if isinstance(data, datasets.Dataset):
        raw = data.with_format("arrow")
        for index in np.unique(np.linspace(0, max(0, len(data) - 1), _ROWS).astype(int)):
            yield from raw[int(index) : int(index) + 1].to_pylist()
        return
    stream = data.decode(False) if data.features else data
    for index in np.unique(np.linspace(0, data.num_shards - 1, _SHARDS).astype(int)):
        yield from stream.shard(data.num_shards, int(index)).take(_FIRST)


def _plain(value: Any) -> Any:
    """A value without the folder that a file lies in; texts and contents by their length and beginning."""
    if isinstance(value, dict) and {"path", "bytes"} == set(value):
        content = _content(value["path"]) if value["bytes"] is None else _beginning(value["bytes"])
        return Path(value["path"] or "").name, content
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return _beginning(value) if isinstance(value, (bytes, str)) else value


def _beginning(value: bytes | str) -> tuple[int, bytes | str]:
    return len(value), value[:_BYTES]


def _content(path: str | None) -> Any:
    """Length and beginning of a local file; nothing of a place in an archive or on a Hub, whose commit is known."""
    if path is None or not Path(path).is_file():
        return None
    with open(path, "rb") as file:
        return Path(path).stat().st_size, file.read(_BYTES)
