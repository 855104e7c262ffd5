"""Installs a built wheel into a new environment and uses it there, from a folder that is not the repository.

    python tests/smoke_wheel.py dist/hf_ext-0.2.0-py3-none-any.whl

The repository's own folder would shadow the wheel, and so would an editable installation. The new environment
therefore holds the wheel only and reads the dependencies from the environment of the interpreter that runs this
script, through a path entry: that makes installed packages importable, but not editable ones.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

PROGRAM = """
import sys
from pathlib import Path

import hf_ext
import hf_ext.model_cards
import hf_ext.pipelines
import hf_ext_cli.main

for module in (hf_ext, hf_ext.model_cards, hf_ext.pipelines, hf_ext_cli.main):
    assert Path(module.__file__).is_relative_to(sys.prefix), f"{module.__name__} comes from {module.__file__}"
for name in hf_ext.__all__:
    getattr(hf_ext, name)
assert list(Path(hf_ext.model_cards.__file__).parent.glob("*.md")), "the wheel has no model card template"
assert Path(hf_ext.__file__).with_name("py.typed").is_file(), "the wheel has no py.typed"
from hf_ext_cli.training import find_recipe
assert find_recipe("semanir/denoise_color").is_relative_to(sys.prefix), "the wheel has no recipes"
"""


def run(command: list[str | Path], folder: Path) -> None:
    """Runs a command in a folder, without the variables that could make it find another copy of the package."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run([str(part) for part in command], cwd=folder, env=environment, check=True)


def install(wheel: Path, environment: Path) -> Path:
    """Makes `environment` with the wheel and a view on the running interpreter's packages; returns its scripts."""
    run([sys.executable, "-m", "venv", "--without-pip", environment], wheel.parent)
    scripts = environment / ("Scripts" if os.name == "nt" else "bin")
    run(
        [sys.executable, "-m", "pip", "--python", scripts / "python", "install", "--quiet", "--no-deps", wheel],
        wheel.parent,
    )
    site_packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return scripts


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or not Path(arguments[0]).is_file():
        print(f"usage: {Path(__file__).name} FILE.whl (one wheel that exists), got {arguments}", file=sys.stderr)
        return 2
    wheel = Path(arguments[0]).resolve()
    # resolve(): on macOS the temporary folder is reached through a link, and the program compares real paths.
    with tempfile.TemporaryDirectory(prefix="hf-ext-smoke-") as name:
        folder = Path(name).resolve()
        scripts = install(wheel, folder / "env")
        run([scripts / "hf-ext", "--version"], folder)
        run([scripts / "hf-ext", "--help"], folder)
        run([scripts / "python", "-c", PROGRAM], folder)
    print(f"{wheel.name}: the smoke test passed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
