"""Where a merge is written: the folder that has to be free, and `.NAME.partial/` beside it, in which it grows.

In the partial folder lie `result/`, the `journal/` of finished units, `merge.json` (what is merged), `passes.json`
(what the counting passes of TIES have found) and `lock`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from hf_ext.emr.manifest_emr import FORMAT, MANIFEST

from ..files import read_json, recover_folder, write_json
from ..hub.system_calls import free_bytes
from .plan_table import Plan

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LOCK = "lock"
_PASSES = "passes.json"


def require_free(out: Path, overwrite: bool) -> None:
    """Refuses a target that holds something else than an earlier merge, or that cannot be written."""
    if not out.name:
        raise ValueError(f"{out} cannot be replaced by a merge; name a folder")
    recover_folder(out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        if not overwrite:
            raise FileExistsError(f"{out} exists and is not empty; choose another place, or overwrite it")
        if not _is_merge(out):
            raise FileExistsError(f"{out} exists and is no merge of ours, so it is not replaced; choose another place")
    _require_writable(out)


def _require_writable(out: Path) -> None:
    """Tried, not asked: permissions do not tell of read-only disks or of systems like /proc."""
    place = out.parent
    while not place.exists():
        place = place.parent
    try:
        os.rmdir(tempfile.mkdtemp(prefix=f".{out.name[:64]}.", dir=place))
    except OSError as error:
        if error.errno in FULL:
            # That is told later, with the room that is needed.
            return
        raise ValueError(
            f"{out} cannot be written: no folder can be made in {place} ({error.strerror}); choose another place, or "
            "see to it that you may write there"
        ) from error


def _is_merge(folder: Path) -> bool:
    """Whether a folder was written by a merge, with masks or without."""
    with contextlib.suppress(OSError, ValueError):
        found = read_json(folder / MANIFEST)
        return isinstance(found, dict) and found.get("format") == FORMAT
    with contextlib.suppress(OSError, ValueError):
        found = read_json(folder / "report.json")
        return isinstance(found, dict) and "sources" in found
    return False


@contextlib.contextmanager
def lock_partial(partial: Path) -> Iterator[None]:
    """Keeps a second merge out of the partial folder; the system lets go when the process ends, however it ends."""
    lock = FileLock(partial / _LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(f"another process is merging into {partial}; wait for it, or end it") from error
    try:
        yield
    finally:
        lock.release()
        # Windows does not delete a file that is open, so the lock may be what is left of a finished merge.
        with contextlib.suppress(OSError):
            if [path.name for path in partial.iterdir()] == [_LOCK]:
                (partial / _LOCK).unlink()
                partial.rmdir()


@contextlib.contextmanager
def explain_full_disk(plan: Plan, partial: Path) -> Iterator[None]:
    """Says of a full disk what is needed, and that nothing is lost."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise OSError(
            error.errno,
            f"no room for the merge ({error.strerror}): the result needs {plan.bytes_written:,} bytes in all, "
            f"{free_bytes(partial.parent):,} are free on that disk; make room and run the same command again, "
            f"which goes on from {partial}",
        ) from error


def write_passes(partial: Path, state: dict[str, Any]) -> None:
    """Keeps what the counting passes have found so far, complete or not at all."""
    write_json(partial / _PASSES, state, indent=None)


def read_passes(partial: Path) -> dict[str, Any] | None:
    """Reads what [`write_passes`] kept."""
    with contextlib.suppress(OSError, ValueError):
        state = read_json(partial / _PASSES)
        return state if isinstance(state, dict) else None
    return None


def forget_passes(partial: Path) -> None:
    """Removes what [`write_passes`] kept."""
    (partial / _PASSES).unlink(missing_ok=True)
