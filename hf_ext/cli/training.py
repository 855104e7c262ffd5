"""hf-ext train and hf-ext evaluate."""

from pathlib import Path
from typing import Any

import click

from .library import import_without_models
from .output import print_json, print_rows, result_row
from .sources import Model

CONFIG_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


# Everything after FILE.yaml belongs to the training arguments, --help included.
@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("config", metavar="FILE.yaml", type=CONFIG_FILE)
@click.argument("overrides", metavar="[--field VALUE]...", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def train(context: click.Context, config: Path, overrides: tuple[str, ...]) -> None:
    """Train a model as a YAML file says.

    Values after the file replace those in it; sections take dots. The same command continues a run that was
    interrupted. The run folder holds the curves, resume states, and snapshot/, which loads and can be pushed.

    \b
    Examples:
      hf-ext train examples/semanir/denoise_color.yaml
      hf-ext train examples/semanir/denoise_color.yaml --max_steps 100 --data.train.path photos/

    \b
    Several GPUs or machines:
      accelerate launch --num_processes 4 -m hf_ext.training FILE.yaml --field value
    """
    # A mistake in the file is found before torch is imported.
    import_without_models()
    from hf_ext.training import main as run

    context.exit(run([str(config), *overrides]))


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("source", metavar="MODEL", type=Model())
@click.argument("overrides", metavar="[--field VALUE]...", nargs=-1, type=click.UNPROCESSED)
@click.option("--config", required=True, type=CONFIG_FILE, help="YAML file that names the method, task and data.eval.")
@click.option("--task", metavar="NAME", help="Of a merge: the task whose model is evaluated.")
@click.option("--output", type=click.Path(path_type=Path), help="Also write the result to this file (eval.json).")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON; a number that is not finite is null.")
def evaluate(
    source: str, overrides: tuple[str, ...], config: Path, task: str | None, output: Path | None, as_json: bool
) -> None:
    """Evaluate MODEL, a folder or org/name[@revision], on the data.eval of a YAML file.

    Values after MODEL replace those in the file; sections take dots. A peft adapter is put on the model that it names.

    \b
    Examples:
      hf-ext evaluate runs/denoise/snapshot --config examples/semanir/denoise_color.yaml --data.eval.path CBSD68/
      hf-ext evaluate merged --task sigma25 --config examples/semanir/denoise_color.yaml --data.eval.path CBSD68/
      hf-ext evaluate org/name@v1 --config examples/semanir/denoise_color.yaml --data.eval.path photos/ --json
    """
    from hf_ext.training import evaluate_checkpoint

    if source.startswith("-"):
        raise click.UsageError(f"MODEL comes before the values that replace those of the file, got {source} first.")
    result: dict[str, Any] = evaluate_checkpoint(source, config, list(overrides), output, task)
    if as_json:
        print_json(result)
    else:
        print_rows([result_row(entry) for entry in result["results"]])
