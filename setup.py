"""Puts the recipes of examples/ into the wheel, as hf_ext/recipes, leaves the released models out where it is told to
(HF_EXT_WITHOUT_MODELS=1), and makes sources the same to the byte; everything else is said in pyproject.toml."""

# `package-data` takes no file from outside its package, and examples/ as a package would bring its scripts.
import gzip
import os
import re
import shutil
import tarfile
from pathlib import Path
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

FOLDERS = ("disentangled_dit", "emr", "mrconv", "released", "semanir")
# Nor do the sources of the code alone have models that were steps to others, and pictures of what models made.
OF_MODELS = re.compile(
    r"model_cards/released/|examples/released/reached/|(?:docs|examples)/.*(?:/judge/.*|\.(?:safetensors|png|jpg))$"
)
# On demand, and where the sources have no models.
CODE_ALONE = os.environ.get("HF_EXT_WITHOUT_MODELS", "0") not in ("", "0") or not Path("model_cards/released").is_dir()


class MaybeWithoutModels(Distribution):
    """What pyproject.toml says; without models it is code alone, under the licence of the code alone."""

    def parse_config_files(self, *given: Any, **options: Any) -> None:
        super().parse_config_files(*given, **options)
        if CODE_ALONE:
            self.metadata.license_expression = "Apache-2.0"
            self.metadata.license_files = ["LICENSE"]
            # Nor what an earlier list of the sources names.
            self.include_package_data = False
            self.package_data["hf_ext.model_cards"] = ["*.md"]


class BuildWithRecipes(build_py):
    """The modules, and beside them the recipes; an editable install reads those of the repository."""

    def run(self) -> None:
        if not self.editable_mode and Path(self.build_lib).resolve() != Path.cwd():
            # An earlier build may have left models there, and modules that are gone.
            for package in ("hf_ext", "hf_ext_cli"):
                shutil.rmtree(Path(self.build_lib, package), ignore_errors=True)
        super().run()
        if self.editable_mode:
            return
        for folder in FOLDERS:
            target = Path(self.build_lib, "hf_ext", "recipes", folder)
            self.mkpath(str(target))
            for recipe in sorted(Path("examples", folder).glob("*.yaml")):
                if not recipe.name.startswith("study"):
                    self.copy_file(str(recipe), str(target / recipe.name))


class SameModes(bdist_wheel):
    """A wheel holds the modes of its files: the same ones whatever the tree and the umask of who builds it."""

    def write_wheelfile(self, *given: Any, **options: Any) -> None:
        # The last step before it is packed; modules, data and licences are there.
        super().write_wheelfile(*given, **options)
        for path in Path(self.bdist_dir).rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)


class SameSources(sdist):
    """The sources; of one commit and one SOURCE_DATE_EPOCH they are the same to the byte, as a wheel is by itself."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        kept = [file for file in files if not (CODE_ALONE and OF_MODELS.match(Path(file).as_posix()))]
        super().make_release_tree(base_dir, kept)

    def make_archive(self, base_name: str, format: str | None = None, *given: Any, **options: Any) -> str:
        time, base = os.environ.get("SOURCE_DATE_EPOCH"), options.get("base_dir")
        if time is None or format != "gztar" or base is None:
            return str(super().make_archive(base_name, format, *given, **options))

        def without_machine(entry: tarfile.TarInfo) -> tarfile.TarInfo:
            entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = int(time), 0, 0, "", ""
            entry.mode = 0o755 if entry.mode & 0o100 else 0o644
            return entry

        path = f"{base_name}.tar.gz"
        with (
            open(path, "wb") as raw,
            gzip.GzipFile("", "wb", fileobj=raw, mtime=int(time)) as packed,
            tarfile.open(fileobj=packed, mode="w") as archive,
        ):
            # It goes through folders in the order of their names.
            archive.add(base, filter=without_machine)
        return path


COMMANDS = {"build_py": BuildWithRecipes, "bdist_wheel": SameModes, "sdist": SameSources}
setup(cmdclass=COMMANDS, distclass=MaybeWithoutModels)
