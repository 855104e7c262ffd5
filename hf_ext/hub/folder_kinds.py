"""Registry of folders that other rooms publish and describe.

Such a room enters itself here; nothing of it is imported before a folder is published or described.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class CardPart(NamedTuple):
    """The part of a card that is special to one kind of folder."""

    template: str  # name of the file in `model_cards`
    metadata: Mapping[str, Any]  # front matter
    values: Callable[[Mapping[str, Any], str], Mapping[str, Any]]  # what the template shows, by configuration and name


class FolderKind(NamedTuple):
    """Handlers for folders of one kind. For others `describe` returns `None`, and `hide_paths` does nothing."""

    describe: Callable[[Path], CardPart | None]
    hide_paths: Callable[[Path], None]  # cuts paths of this machine to their last part
    copy_artifact: Callable[[Path, Path], None]  # copies what is published into an empty folder


_LOADERS: list[Callable[[], FolderKind]] = []


# Enters a kind, by a function that imports it.
register = _LOADERS.append


def known_kinds() -> list[FolderKind]:
    return [load() for load in _LOADERS]


def describe(folder: Path) -> CardPart | None:
    """The special part of a folder's card, if its kind is registered."""
    return next((part for kind in known_kinds() if (part := kind.describe(folder)) is not None), None)
