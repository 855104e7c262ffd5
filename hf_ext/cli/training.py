"""hf-ext train, evaluate, data and recipes, and the type of parameters that accepts the names of recipes."""

import difflib
import re
from pathlib import Path
from typing import Any, NamedTuple

import click

from .groups import Group
from .options import JSON, MODEL, NEW_FILE, TASK, Place
from .output import find_terminal, print_either, print_json, print_rows, print_table, result_row, say

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


class RecipeFile(Place):
    """A YAML file, or the name of a recipe if there is no such file."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if Path(value).expanduser().exists() or Path(value).suffix.lower() in (".yaml", ".yml"):
            return super().convert(value, param, ctx)
        return find_recipe(str(value))


CONFIG_FILE = RecipeFile(exists=True, dir_okay=False, path_type=Path)


class FileCommand(click.Command):
    """A command of FILE.yaml, whose own flags, such as -v, may also stand among the overrides after it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {name for option in self.get_params(ctx) if isinstance(option, click.Option) for name in option.opts}
        return super().parse_args(ctx, sorted(args, key=lambda word: word not in own))


@click.command(cls=FileCommand, context_settings={"allow_interspersed_args": False}, add_help_option=False)
@click.option("-h", "--help", "show_help", is_flag=True, help="Show this; with FILE.yaml, also its method's fields.")
@click.argument("config", metavar="FILE.yaml", type=CONFIG_FILE, required=False)
@click.argument("overrides", metavar="[--field VALUE]...", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def train(context: click.Context, show_help: bool, config: Path | None, overrides: tuple[str, ...]) -> None:
    """Train a model from a YAML file or a recipe (see `hf-ext recipes`).

    Flags after the file replace its values; a dot separates section and key. The same command resumes an interrupted
    run. The run folder contains metrics, resume states, and snapshot/, the model to load or push.

    \b
    Examples:
      hf-ext train semanir/denoise_color --data.train.path photos/
      hf-ext train denoise.yaml --max_steps 100
      hf-ext train --help denoise.yaml

    \b
    Several GPUs or machines:
      accelerate launch --num_processes 4 -m hf_ext.training FILE.yaml --field value
    """
    from hf_ext.training import main as run
    from hf_ext.training.methods import describe_fields

    if show_help:
        click.echo(f"{context.get_help()}\n\n{describe_fields(config)}", nl=False)
        context.exit()
    if config is None:
        raise click.UsageError("Missing argument 'FILE.yaml': give a file or the name of a recipe.")
    context.exit(run([str(config), *overrides]))


@click.command(context_settings={"ignore_unknown_options": True})
@MODEL
@click.argument("overrides", metavar="[--field VALUE]...", nargs=-1, type=click.UNPROCESSED)
@click.option("--config", required=True, type=CONFIG_FILE, help="YAML file with method, task and data.eval.")
@TASK
@click.option("--output", type=NEW_FILE, help="Also write eval.json to this file.")
@JSON
def evaluate(
    source: str, overrides: tuple[str, ...], config: Path, task: str | None, output: Path | None, as_json: bool
) -> None:
    """Evaluate MODEL, a folder or org/name[@revision], on data.eval of a YAML file.

    Flags after MODEL replace values of the file; a dot separates section and key. A peft adapter is loaded together
    with the base that it names. Processes of `accelerate launch -m hf_ext_cli.main evaluate ...` share the examples.

    \b
    Examples:
      hf-ext evaluate runs/denoise/snapshot --config semanir/denoise_color --data.eval.path CBSD68/
      hf-ext evaluate merged --task sigma25 --config semanir/denoise_color --data.eval.path CBSD68/
      hf-ext evaluate org/name@v1 --config semanir/denoise_color --data.eval.path photos/ --json
    """
    if source.startswith("-"):
        raise click.UsageError(f"MODEL must be the first argument, before the flags for the file; got {source}.")
    from hf_ext.distributed import Ranks
    from hf_ext.training import evaluate_checkpoint

    result = evaluate_checkpoint(source, config, list(overrides), output, task)
    if Ranks().index > 0:
        # Only the first process prints.
        return
    if as_json:
        print_json(result)
    else:
        print_rows([result_row(entry) for entry in result["results"]], title=source)


@click.group(cls=Group)
def data() -> None:
    """Check the data of a training before it begins.

    \b
    Examples:
      hf-ext data check semanir/denoise_color --data.train.path photos/ --data.eval null
    """


@data.command(name="check", cls=FileCommand, context_settings={"allow_interspersed_args": False})
@JSON
@click.argument("config", metavar="FILE.yaml", type=CONFIG_FILE)
@click.argument("overrides", metavar="[--field VALUE]...", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def check(context: click.Context, config: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Read, decode and prepare every example of FILE.yaml once, and list the unusable ones.

    Flags after the file replace its values, as for `hf-ext train`. Nothing is written. The exit code is 1 if more
    training examples are unusable than data.max_bad_examples allows, or if an evaluation example is unreadable.

    \b
    Examples:
      hf-ext data check semanir/denoise_color --data.train.path photos/ --data.eval null
      hf-ext data check --json examples/semanir/denoise_color.yaml
    """
    # Errors in the file are found before torch is imported.
    from hf_ext.training.methods import build_task, read_arguments

    arguments = read_arguments(config, list(overrides), output_dir="")
    import datasets

    from hf_ext.training.data_check import check_data, describe_check

    # Our own progress bar is enough.
    datasets.disable_progress_bars()
    found = check_data(build_task(arguments), arguments)
    print_either(as_json, found, *map(describe_check, found))
    if any(len(entry["bad"]) > entry["allowed"] for entry in found):
        context.exit(1)


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
    """The file of a recipe by the name that `hf-ext recipes` lists."""
    paths = {recipe.name: recipe.path for recipe in list_recipes()}
    if name in paths:
        return paths[name]
    from hf_ext.errors import UsageError

    # Users may remember only the part after the folder.
    ends = {known.rpartition("/")[2]: known for known in paths} | {known: known for known in paths}
    close = difflib.get_close_matches(name, ends, n=1)
    hint = f" Did you mean {ends[close[0]]!r}?" if close else ""
    raise UsageError(f"{name or repr(name)} is neither a file nor a recipe.{hint} `hf-ext recipes` lists them.")


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
