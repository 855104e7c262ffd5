"""Puts the recipes of examples/ into the wheel, as hf_ext/recipes, leaves the released models out where it is told to
(HF_EXT_WITHOUT_MODELS=1), and makes sources the same to the byte; everything else is said in pyproject.toml."""

# `package-data` takes no file from outside its package, and examples/ as a package would bring its scripts.
import gzip
import os
import tarfile
from pathlib import Path
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

# A wheel holds the modes of its files: the same ones whoever builds it.
os.umask(0o022)
FOLDERS = ("disentangled_dit", "emr", "mrconv", "released", "semanir")


class MaybeWithoutModels(Distribution):
    """What pyproject.toml says; without models it is code alone, under the licence of the code alone."""

    def parse_config_files(self, *given: Any, **options: Any) -> None:
        super().parse_config_files(*given, **options)
        if os.environ.get("HF_EXT_WITHOUT_MODELS", "0") not in ("", "0"):
            self.metadata.license_expression = "Apache-2.0"
            self.metadata.license_files = ["LICENSE"]
            # Nor what an earlier list of the sources names.
            self.include_package_data = False
            self.package_data["hf_ext.model_cards"] = ["*.md"]


class BuildWithRecipes(build_py):
    """The modules, and beside them the recipes; an editable install reads those of the repository."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for folder in FOLDERS:
            target = Path(self.build_lib, "hf_ext", "recipes", folder)
            self.mkpath(str(target))
            for recipe in sorted(Path("examples", folder).glob("*.yaml")):
                if not recipe.name.startswith("study"):
                    self.copy_file(str(recipe), str(target / recipe.name))


class SameSources(sdist):
    """The sources; of one commit and one SOURCE_DATE_EPOCH they are the same to the byte, as a wheel is by itself."""

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


setup(cmdclass={"build_py": BuildWithRecipes, "sdist": SameSources}, distclass=MaybeWithoutModels)
