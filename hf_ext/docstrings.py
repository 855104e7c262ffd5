"""Arguments as docstrings describe them, for the help of the command line and the site."""

import inspect
import re
from dataclasses import dataclass

_ENTRY = re.compile(r"^    (\w+(?:, \w+)*) \((.+?)\):(.*)$")


@dataclass
class Entry:
    """A documented argument: its names, what it may be with its default, and its meaning."""

    names: list[str]
    kind: str
    meaning: str


def read_entries(kind: type) -> list[Entry]:
    """The `Args:` of a class and of those that it extends, a field once."""
    found: list[Entry] = []
    for base in kind.__mro__:
        lines = inspect.cleandoc(base.__dict__.get("__doc__") or "").partition("Args:\n")[2].splitlines()
        for line in lines:
            if line and not line.startswith(" "):
                break
            if entry := _ENTRY.match(line):
                names = entry[1].split(", ")
                known = any(name in other.names for other in found for name in names)
                current = Entry(names, entry[2], entry[3].strip())
                found += [] if known else [current]
            elif line.strip():
                current.meaning = f"{current.meaning} {line.strip()}".strip()
    return found
