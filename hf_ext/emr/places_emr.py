"""Where the checkpoints of a merge are, as its manifest says: paths that go with the artifact when both are moved."""

from __future__ import annotations

import os
from pathlib import Path


def recorded_path(spec: str, folder: str | Path) -> str:
    """How a local checkpoint is written down in an artifact.

    A path that was given relative to the working folder becomes one relative to the artifact, so that it holds from
    any working folder, and after both were moved together. A path that was given absolute stays so.
    """
    path = Path(spec).expanduser()
    if path.is_absolute():
        return str(path)
    # Links are followed first: `..` after a link leads elsewhere than it looks.
    real = os.path.realpath(path)
    try:
        relative = os.path.relpath(real, os.path.realpath(folder))
    except ValueError:
        # Another drive of Windows.
        return real
    # Whatever is told apart from `org/name`, and has a name of its own at the end.
    return relative if relative.startswith("..") and Path(relative).name != ".." else real


def find_recorded(source: str, folder: str | Path) -> Path:
    """Where a local checkpoint is that [`recorded_path`] wrote down.

    Artifacts of earlier versions have paths relative to the working folder of the merge, so a path that leads nowhere
    from the artifact is taken from this working folder.
    """
    path = Path(source).expanduser()
    if path.is_absolute():
        return path
    inside = Path(os.path.realpath(folder)) / path
    return Path(os.path.normpath(inside)) if inside.exists() or not path.exists() else path
