"""hf-ext models: list of the released models."""

from dataclasses import asdict

import click

from .output import find_terminal, print_json, print_rows


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def models(as_json: bool) -> None:
    """List the released models. Every command that takes a MODEL accepts their names.

    \b
    Examples:
      hf-ext models --json
      hf-ext restore denoise-color photo.jpg --out restored
      hf-ext info denoise-color
    """
    from hf_ext.hub.released import WITHOUT, list_released

    found = list_released()
    if as_json:
        print_json([{key: value for key, value in asdict(model).items() if key != "folder"} for model in found])
        return
    if not found:
        click.echo(f"This version contains no released model: {WITHOUT}.")
    for model in found:
        size = f"{model.parameters / 1e6:.2f} M parameters, {model.bytes / 1e6:.1f} MB"
        size += f", trained for {model.core_hours:g} hours of {model.machine}"
        title = f"{model.name}: {model.task}"
        rows = [("size", size), ("scores", model.scores), ("data", model.data), ("licence", model.license)]
        if not find_terminal():
            # A pipe gets no titles of tables.
            click.echo(title)
        print_rows(rows, title=title)
