"""Writes the lower bounds of pyproject.toml as constraints of pip: what CI installs to try the oldest versions.

    python .ci/oldest.py [NAME...] > oldest.txt && pip install -c oldest.txt '.[all]'

NAME is left out, such as torch where one is installed already. A bound that is no released version is an error of pip.
"""

import re
import sys
import tomllib
from pathlib import Path

# Extras of developers: CI takes the newest tools.
TOOLS = ("dev", "docs", "app-dev")
REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?(?:>=([0-9.]+))?")


def oldest_versions(project: dict) -> dict[str, str]:
    """Each library that the package or one of its extras needs, and its lowest allowed version."""
    extras = project["optional-dependencies"]
    lists = [project["dependencies"], *(lines for extra, lines in extras.items() if extra not in TOOLS)]
    found = {}
    for line in sum(lists, []):
        name, version = REQUIREMENT.match(line).groups()
        if name == project["name"]:
            continue
        if version is None:
            sys.exit(f"pyproject.toml: {line!r} has no lower bound; write NAME>=VERSION.")
        if found.setdefault(name, version) != version:
            sys.exit(f"pyproject.toml: {name} has the lower bounds {found[name]} and {version}; write one.")
    return found


if __name__ == "__main__":
    with open(Path(__file__).parents[1] / "pyproject.toml", "rb") as file:
        versions = oldest_versions(tomllib.load(file)["project"])
    print("\n".join(f"{name}=={version}" for name, version in versions.items() if name not in sys.argv[1:]))
