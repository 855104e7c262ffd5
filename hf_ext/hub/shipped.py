"""Code files that ship with a checkpoint; the publisher, the check before a push and the test of style ask here."""

from pathlib import Path

# Rooms whose classes transformers loads as code beside a checkpoint.
METHODS = ("mrconv", "semanir")


def shipped_files(room: Path) -> list[Path]:
    """The files of a room that travel with checkpoints: of a method all but `__init__.py`, of other rooms none."""
    return sorted(path for path in room.glob("*.py") if room.name in METHODS and path.name != "__init__.py")
