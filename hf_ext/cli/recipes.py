"""hf-ext recipes: list of the recipes of the package, and the parameter type that accepts their names."""

import difflib
import re
from pathlib import Path
from typing import Any, NamedTuple

import click

from .options import JSON, NEW_FILE
from .output import find_terminal, print_json, print_table, say

_FOLDERS = ("disentangled_dit", "emr", "mrconv", "released", "semanir")
# The configuration of a merge, which is not a training.
_MERGE = "emr/merge"


class Recipe(NamedTuple):
    """Summary of a recipe, from its first lines; `what` is the first sentence of its comment."""

    name: str
    method: str
    what: str
    data: str
    path: Path


class RecipeFile(click.Path):
    """A YAML file, or the name of a recipe if there is no such file."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if Path(value).exists() or Path(value).suffix.lower() in (".yaml", ".yml"):
            return super().convert(value, param, ctx)
        try:
            return find_recipe(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command()
@click.argument("name", required=False)
@click.option("--out", type=NEW_FILE, help="Copy the recipe into this new file.")
@JSON
def recipes(name: str | None, out: Path | None, as_json: bool) -> None:
    """List the recipes of the package, or print the recipe NAME.

    `hf-ext train NAME` trains a recipe as it is. `hf-ext init` writes a recipe for your own data.

    \b
    Examples:
      hf-ext recipes
      hf-ext recipes semanir/denoise_color
      hf-ext recipes mrconv/speech_commands --out words.yaml
    """
    if name is None:
        if out is not None:
            raise click.UsageError("--out copies one recipe: give its NAME; `hf-ext recipes` lists them.")
        keys, rows = Recipe._fields[:4], [recipe[:4] for recipe in list_recipes()]
        if as_json:
            print_json([dict(zip(keys, row, strict=True)) for row in rows])
        elif find_terminal():
            print_table(keys, rows, names=4, title="Recipes", legend="Copy one: hf-ext recipes NAME --out FILE")
        else:
            print_table(keys[:3], [row[:3] for row in rows], names=3)
        return
    text = find_recipe(name).read_text(encoding="utf-8")
    if out is None:
        click.echo(text, nl=False)
        return
    from hf_ext.files import whole_file

    if out.exists():
        raise click.BadParameter(f"{out} exists; give a new file.", param_hint="--out")
    with whole_file(out, "w", encoding="utf-8") as file:
        file.write(text)
    say(out)


def list_recipes() -> list[Recipe]:
    """The recipes of this installation by name, without those of studies and scripts in examples/."""
    import hf_ext
    from hf_ext.training.methods import TASKS

    # A wheel contains the recipes beside its modules, a repository in examples/; setup.py copies them.
    package = Path(hf_ext.__file__).parent
    place = package / "recipes" if (package / "recipes").is_dir() else package.parent / "examples"
    files = sorted(path for folder in _FOLDERS for path in (place / folder).glob("*.yaml"))
    found = [_describe(path) for path in files if not path.name.startswith("study")]
    return [recipe for recipe in found if recipe.method in TASKS or recipe.name == _MERGE]


def find_recipe(name: str) -> Path:
    """The file of a recipe by the name that `hf-ext recipes` lists. Raises `UsageError` if there is no such recipe."""
    paths = {recipe.name: recipe.path for recipe in list_recipes()}
    if name in paths:
        return paths[name]
    from hf_ext.errors import UsageError

    # Users may remember only the part after the folder.
    ends = {known.rpartition("/")[2]: known for known in paths} | {known: known for known in paths}
    close = difflib.get_close_matches(name, ends, n=1)
    hint = f" Did you mean {ends[close[0]]!r}?" if close else ""
    raise UsageError(f"{name} is neither a file nor a recipe.{hint} `hf-ext recipes` lists them.")


def _describe(path: Path) -> Recipe:
    from hf_ext.settings import read_yaml

    text = path.read_text(encoding="utf-8")
    comment = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    values: dict[str, Any] = read_yaml(path)
    train = (values.get("data") or {}).get("train") or {}
    place = train.get("path", "") if isinstance(train, dict) else str(train)
    told = re.search(r"\bData: (.+?)(?:\.(?: |$)|;)", comment)
    return Recipe(
        name=f"{path.parent.name}/{path.stem}",
        method=str(values.get("method")),
        what=re.split(r"\. (?=[A-Z`])|; ", comment, maxsplit=1)[0].rstrip("."),
        data=told[1] if told else str(place) or "fine-tunes of one base",
        path=path,
    )
