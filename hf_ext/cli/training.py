"""hf-ext train, hf-ext evaluate and hf-ext data."""

from pathlib import Path

import click

from .groups import Group
from .options import JSON, MODEL, NEW_FILE, TASK
from .output import print_json, print_rows, result_row, say
from .recipes import RecipeFile

CONFIG_FILE = RecipeFile(exists=True, dir_okay=False, path_type=Path)


# Everything after FILE.yaml belongs to the training arguments, --help included.
@click.command(context_settings={"allow_interspersed_args": False}, add_help_option=False)
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

    if show_help or {"-h", "--help"} & {*overrides}:
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


@data.command(name="check", context_settings={"allow_interspersed_args": False})
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
    if as_json:
        print_json(found)
    else:
        say(*map(describe_check, found))
    if any(len(entry["bad"]) > entry["allowed"] for entry in found):
        context.exit(1)
