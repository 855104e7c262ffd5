"""Folders: finished ones on the disk, one put in the place of another in a single step, and links out of them."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from pathlib import Path

from .system_calls import sync_file

# Of linux/fcntl.h and linux/fs.h.
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# How the cache of huggingface_hub calls the folders of repositories.
_CACHED = ("models--", "datasets--", "spaces--")


def sync_folder(folder: Path) -> None:
    """
    Waits until every file of a folder is on the disk.

    Args:
        folder (`Path`): A folder; the folders in it count too.
    """
    for path in folder.rglob("*"):
        if path.is_file():
            sync_file(path)


def replace_folder(new: Path, out: Path) -> None:
    """
    Puts a finished folder in its place; an earlier one is deleted only after that.

    Where the system can exchange two folders (Linux), `out` is at every moment the whole old or the whole new folder.
    Elsewhere there is a moment between two renames in which the old one is called `.NAME.old`; see
    [`recover_folder`].

    Args:
        new (`Path`): The finished folder, on the same file system as `out`.
        out (`Path`): Its place; may hold an earlier folder.

    Raises:
        OSError: It could not be moved; `out` is as it was.
    """
    if not out.exists():
        os.replace(new, out)
    elif _exchange(new, out):
        shutil.rmtree(new)
    else:
        aside = out.with_name(f".{out.name}.old")
        os.replace(out, aside)
        try:
            os.replace(new, out)
        except OSError:
            os.replace(aside, out)
            raise
        shutil.rmtree(aside)


def recover_folder(out: Path) -> None:
    """
    Finishes or takes back a [`replace_folder`] that was killed.

    Args:
        out (`Path`): The place that was written to.
    """
    aside = out.with_name(f".{out.name}.old")
    if aside.is_dir() and not out.exists():
        os.replace(aside, out)
    elif aside.is_dir():
        shutil.rmtree(aside)


def _exchange(first: Path, second: Path) -> bool:
    """Exchanges two folders in one step; False where the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    if rename is None:
        return False
    done: int = rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    return done == 0


def stays_inside(folder: Path, path: Path) -> bool:
    """
    Whether a path of a folder really lies in it, and is not a link to somewhere else.

    The cache of `huggingface_hub` keeps the files of a repository in `models--org--name/blobs/`, or in a `blobs/` that
    all repositories share, and `models--org--name/snapshots/<commit>/` holds links to them. Such links stay inside,
    however deep in the commit the folder lies. Everything that follows a path of a folder asks this function;
    `emr_loader.py`, which travels alone, has a copy that is tested against the same cases.

    Args:
        folder (`Path`): The folder.
        path (`Path`): The path, as found in the folder.

    Returns:
        `bool`: Whether it may be followed.
    """
    home, target = folder.resolve(), path.resolve()
    allowed = [home]
    for commit in (home, *home.parents):
        repository = commit.parent.parent
        if commit.parent.name == "snapshots" and repository.name.startswith(_CACHED):
            allowed += [repository / "blobs", repository.parent / "blobs"]
    return any(target.is_relative_to(place) for place in allowed)
