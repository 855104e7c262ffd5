"""hf-ext recipes: list of the recipes of the package, and the parameter type that accepts their names."""

from pathlib import Path
from typing import Any

import click

from .library import import_without_models
from .output import find_terminal, print_json, print_table
from .terminal import say


class RecipeFile(click.Path):
    """A YAML file, or the name of a recipe if there is no such file."""

    def __init__(self) -> None:
        super().__init__(exists=True, dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if Path(value).exists() or Path(value).suffix.lower() in (".yaml", ".yml"):
            return super().convert(value, param, ctx)
        import_without_models()
        from hf_ext.starting.recipes import find_recipe

        try:
            return find_recipe(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command()
@click.argument("name", required=False)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Copy the recipe into this new file.")
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def recipes(name: str | None, out: Path | None, as_json: bool) -> None:
    """List the recipes of the package, or print the recipe NAME.

    `hf-ext train NAME` trains a recipe as it is. `hf-ext init` writes a recipe for your own data.

    \b
    Examples:
      hf-ext recipes
      hf-ext recipes semanir/denoise_color
      hf-ext recipes mrconv/speech_commands --out words.yaml
    """
    import_without_models()
    from hf_ext.starting.recipes import find_recipe, list_recipes

    if name is None:
        if out is not None:
            raise click.UsageError("--out copies one recipe: give its NAME; `hf-ext recipes` lists them.")
        found = list_recipes()
        keys = ("name", "method", "what", "data")
        if as_json:
            print_json([{key: getattr(recipe, key) for key in keys} for recipe in found])
        elif find_terminal():
            rows = [[getattr(recipe, key) for key in keys] for recipe in found]
            print_table(keys, rows, names=4, title="Recipes", legend="Copy one: hf-ext recipes NAME --out FILE")
        else:
            print_table(keys[:3], [[recipe.name, recipe.method, recipe.what] for recipe in found], names=3)
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
