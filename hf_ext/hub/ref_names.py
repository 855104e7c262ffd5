"""Names that git and a Hub accept for branches and tags."""

import re

_LONGEST = 255
_FORBIDDEN = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_ref_name(name: str) -> bool:
    """True for the name of a branch or tag by git's rules for refs, which is not a commit hash."""
    components = name.split("/")
    return not (
        _FORBIDDEN.search(name)
        or not name.isprintable()
        or len(name.encode()) > _LONGEST
        or components[0] == "refs"
        or any(not part or part[0] in ".-" or part.endswith((".", ".lock")) for part in components)
        or _COMMIT.fullmatch(name)
        or name in ("@", "HEAD")
    )
