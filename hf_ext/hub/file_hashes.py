"""SHA-256 of local files, cached until a file changes.

A base of 14 GB takes 10 s to hash, and its hash is asked for on every load. So what was found is kept, in this process
and in a small file in the assets folder of the Hugging Face cache, under device, inode, length and time of the last
change, of the content and of the inode: who writes to the file or puts another one in its place changes one of them.

A file that is written to twice within one tick of the clock has the same time after both. So a hash is only kept if
the last change lay two seconds back when the hashing began, the coarsest tick that file systems have (FAT).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from pathlib import Path

from huggingface_hub import cached_assets_path

from ..files import read_json_object, write_json

_TICK_NS = 2 * 10**9
# The newest entries stay, of about 120 bytes each.
_MOST = 4096
_known: dict[str, str] = {}
_lock = threading.Lock()


def cache_file() -> Path:
    """The file that keeps hashes between processes."""
    return cached_assets_path("hf_ext", namespace="file_hashes") / "sha256.json"


def file_sha256(path: str | Path, *, fresh: bool = False) -> str:
    """The SHA-256 of a file, which is read only if nothing is known of it, or with `fresh`."""
    key = _key(os.stat(path))
    with _lock:
        if key not in _known:
            _known.update(_read())
        if key in _known and not fresh:
            return _known[key]
    with open(path, "rb") as file:
        before, begun = os.fstat(file.fileno()), time.time_ns()
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        after = os.fstat(file.fileno())
    if _key(before) == _key(after) and before.st_mtime_ns < begun - _TICK_NS:
        with _lock:
            _known[_key(after)] = digest
            # Without a place to write to, it is kept in this process only.
            with contextlib.suppress(OSError):
                entries = {**_read(), _key(after): digest}
                write_json(cache_file(), dict(list(entries.items())[-_MOST:]), indent=0)
    return digest


def _read() -> dict[str, str]:
    """The hashes in the file; none where it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError):
        return {key: value for key, value in read_json_object(cache_file()).items() if isinstance(value, str)}
    return {}


def _key(about: os.stat_result) -> str:
    return f"{about.st_dev}:{about.st_ino}:{about.st_size}:{about.st_mtime_ns}:{about.st_ctime_ns}"
