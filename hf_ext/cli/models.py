"""hf-ext models: the models that travel with the package."""

from dataclasses import asdict

import click

from .output import find_terminal, print_json, print_table


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def models(as_json: bool) -> None:
    """List the models that travel with hf-ext. Every command that takes a MODEL takes their names.

    \b
    Examples:
      hf-ext models --json
      hf-ext restore denoise-color photo.jpg --out restored
      hf-ext info denoise-color
    """
    from hf_ext.hub.released import list_released

    found = list_released()
    if as_json:
        print_json([{key: value for key, value in asdict(model).items() if key != "folder"} for model in found])
        return
    if not found:
        click.echo("No model travels with this version.")
    if find_terminal():
        header = ("model", "task", "scores", "parameters", "licence")
        rows = [(one.name, one.task, one.scores, f"{one.parameters / 1e6:.2f} M", one.license) for one in found]
        print_table(header, rows, names=3, title="Models that travel with hf-ext", legend="--json tells more.")
        return
    for model in found:
        size = (
            f"{model.parameters / 1e6:.2f} M parameters, {model.bytes / 1e6:.1f} MB, {model.core_hours:g} core-hours"
        )
        click.echo(f"{model.name}: {model.task}")
        for name, value in (
            ("size", size),
            ("scores", model.scores),
            ("data", model.data),
            ("licence", model.license),
        ):
            click.echo(f"  {name:<8}{value}")
