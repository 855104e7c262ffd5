"""Fetches transformers' own test suite, of the installed version, into a folder that git ignores.

The suite is in the source distribution only, and not all of it: the modules that it imports but does not ship are
replaced here by ones that hold the names it asks for.

    python tests/conformance/download.py
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "conformance"

# What the shared tests import from folders that the source distribution leaves out.
SHIMS = {
    **{f"tests/{folder}__init__.py": "" for folder in ("", "exporters/", "generation/", "utils/", "models/")},
    "tests/exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "tests/generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "tests/utils/test_configuration_utils.py": "config_common_kwargs = {}\n",
    "fetch_hub_objects_for_ci.py": "def url_to_local_path(url, *args, **kwargs):\n    return url\n",
    # Without a configuration of its own, pytest would read the one of this project, which encloses the folder.
    "pytest.ini": "[pytest]\n",
}


def transformers_tests() -> Path:
    """The folder to put on the path, with transformers' `tests` package, downloaded on first use with pip."""
    name = f"transformers-{version('transformers')}"
    folder = CACHE / name
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    # Made aside and renamed when whole: an interrupted download is started again.
    with tempfile.TemporaryDirectory(dir=CACHE) as place:
        requirement = name.replace("-", "==")
        options = ["--no-deps", "--no-build-isolation", "--no-binary", ":all:", "--dest", place]
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *options, requirement], check=True)
        with tarfile.open(Path(place, f"{name}.tar.gz")) as archive:
            members = [member for member in archive if member.name.startswith(f"{name}/tests/")]
            archive.extractall(place, members=members, filter="data")
        for path, text in SHIMS.items():
            target = Path(place, name, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                target.write_text(text, encoding="utf-8")
        shutil.move(Path(place, name), folder)
    return folder


if __name__ == "__main__":
    print(transformers_tests())
