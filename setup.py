"""Puts the recipes of examples/ into the wheel, as hf_ext/recipes, and leaves the released models out where it is told
to (HF_EXT_WITHOUT_MODELS=1); everything else is said in pyproject.toml."""

# `package-data` takes no file from outside its package, and examples/ as a package would bring its scripts.
import os
from pathlib import Path
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

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


setup(cmdclass={"build_py": BuildWithRecipes}, distclass=MaybeWithoutModels)
