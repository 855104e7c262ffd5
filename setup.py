"""Puts the recipes of examples/ into the wheel, as hf_ext/recipes; everything else is said in pyproject.toml."""

# `package-data` takes no file from outside its package, and examples/ as a package would bring its scripts.
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

FOLDERS = ("disentangled_dit", "emr", "mrconv", "released", "semanir")


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


setup(cmdclass={"build_py": BuildWithRecipes})
