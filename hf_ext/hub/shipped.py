"""What travels with a checkpoint. The publisher, the check before a push and the test of style all ask here."""

from pathlib import Path

# In these rooms a file travels by standing there.
_WHOLE_ROOMS = ("semanir",)
# In the others it travels by what its name begins with. Of all rooms, earlier versions of a checkpoint's code had such
# names: a push replaces them.
ROLES = (
    "configuration",
    "modeling",
    "ops",
    "kernels",
    "streaming",
    "processing",
    "image_processing",
    "feature_extraction",
    "restoring",
    "pipeline",
)


def shipped_files(room: Path) -> list[Path]:
    """
    The files of a room that travel with checkpoints: each one, but for `__init__.py`.

    Args:
        room (`Path`): The folder of a sub-package of hf_ext.

    Returns:
        `list[Path]`: In the order of their names.
    """
    files = sorted(path for path in room.glob("*.py") if path.name != "__init__.py")
    if room.name in _WHOLE_ROOMS:
        return files
    return [path for path in files if path.name.startswith(tuple(f"{role}_" for role in ROLES))]
