"""Files below folders, as people see them."""

import os
from collections.abc import Iterator
from pathlib import Path

_HIDDEN = ("__MACOSX", "Thumbs.db", "desktop.ini")


def is_seen(name: str) -> bool:
    """False for what systems and editors hide: .DS_Store, ._photo.jpg, .ipynb_checkpoints/, __MACOSX/."""
    return name[0] != "." and name not in _HIDDEN


def list_files(*places: Path | str) -> Iterator[Path]:
    """Given files, and those below given folders and below those that links lead to, without hidden ones."""
    yield from (Path(place) for place in places if os.path.isfile(place))
    for place, folders, names in (found for folder in places for found in os.walk(folder, followlinks=True)):
        folders[:] = [name for name in folders if is_seen(name) and not _leads_back(Path(place, name))]
        yield from (file for name in names if is_seen(name) and (file := Path(place, name)).is_file())


def _leads_back(folder: Path) -> bool:
    """True for a link to a folder on the way to it, also by way of other links: it would lead round and round."""
    return folder.is_symlink() and any(place.resolve().is_relative_to(folder.resolve()) for place in folder.parents)


def has_linked_folders(folder: Path) -> bool:
    """True if folders that are seen below a folder are links, which `datasets` does not follow."""
    return any(
        is_seen(name) and Path(place, name).is_symlink() for place, names, _ in os.walk(folder) for name in names
    )
