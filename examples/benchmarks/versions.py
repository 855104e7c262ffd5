"""What a benchmark says of the libraries that it ran with."""

import platform
from importlib.metadata import PackageNotFoundError, version


def installed_versions(*names: str) -> dict[str, str]:
    """Python's version and those of libraries, some of which may be missing."""
    return {"python": platform.python_version(), **{name: _version_of(name) for name in names}}


def _version_of(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
