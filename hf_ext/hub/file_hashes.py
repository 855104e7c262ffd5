"""SHA-256 of local files, computed once for as long as a file stays as it is.

A base of 14 GB takes 10 s to hash, and its hash is asked for on every load. So what was found is kept, in this process
and in a small file in the assets folder of the Hugging Face cache, under device, inode, length and time of the last
change, of the content and of the inode. Whoever writes to the file changes the one; whoever puts another file in its
place changes the other, also where that file got the number of a deleted inode and was copied with its old time.

One case is left: a file that is written to twice within one tick of the file system's clock has the same time after
both. So a hash is only kept if the last change lay at least two seconds back when the hashing began, the coarsest tick
that file systems have (FAT), and if nothing about the file changed meanwhile.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from pathlib import Path

from huggingface_hub import cached_assets_path

from ..files import write_json

_TICK_NS = 2 * 10**9
# The newest are kept; a line has about 120 bytes.
_MAX_ENTRIES = 4096
_lock = threading.Lock()
_known: dict[str, str] = {}


def cache_file() -> Path:
    """Where hashes are kept between processes."""
    return cached_assets_path("hf_ext", namespace="file_hashes") / "sha256.json"


def file_sha256(path: str | Path, *, fresh: bool = False) -> str:
    """The SHA-256 of a file, which is read only if nothing is known of it, or with `fresh`."""
    key = None if fresh else _key(os.stat(path))
    if key is not None and (found := _find(key)) is not None:
        return found
    with open(path, "rb") as file:
        before, begun = os.fstat(file.fileno()), time.time_ns()
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        after = os.fstat(file.fileno())
    if _key(before) == _key(after) and before.st_mtime_ns < begun - _TICK_NS:
        _keep(_key(after), digest)
    return digest


def _key(about: os.stat_result) -> str:
    return f"{about.st_dev}:{about.st_ino}:{about.st_size}:{about.st_mtime_ns}:{about.st_ctime_ns}"


def _find(key: str) -> str | None:
    with _lock:
        if key not in _known:
            _known.update(_read())
        return _known.get(key)


def _keep(key: str, digest: str) -> None:
    with _lock:
        _known[key] = digest
        # Without a place to write to, it is kept in this process only.
        with contextlib.suppress(OSError):
            entries = {**_read(), key: digest}
            write_json(cache_file(), dict(list(entries.items())[-_MAX_ENTRIES:]), indent=0)


def _read() -> dict[str, str]:
    """What is in the file; nothing where it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(cache_file().read_text())
        return (
            {key: value for key, value in found.items() if isinstance(value, str)} if isinstance(found, dict) else {}
        )
    return {}
