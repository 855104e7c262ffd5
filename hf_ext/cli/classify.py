"""hf-ext classify: the classes of sounds, pictures, texts and series."""

from typing import Any

import click

from .errors import Failed, Unusable, loads
from .library import register_models
from .output import print_json, print_table
from .sources import Model


@click.command()
@click.argument("source", metavar="MODEL", type=Model())
@click.argument("inputs", metavar="INPUT...", nargs=-1, required=True)
@click.option("--task", metavar="NAME", help="Of a merge: the task whose model answers.")
@click.option("--top-k", type=click.IntRange(min=1), default=1, show_default=True, help="Likeliest classes of each.")
@click.option("--columns", help="Of series: the channels, as in the training: a,b.  [default: those of the training]")
@click.option("--device", help="cpu, cuda, cuda:1, ...; the GPU if there is one.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def classify(
    source: str,
    inputs: tuple[str, ...],
    task: str | None,
    top_k: int,
    columns: str | None,
    device: str | None,
    as_json: bool,
) -> None:
    """Say which class each INPUT belongs to, by MODEL: a folder or org/name[@revision].

    MODEL takes sounds, pictures, texts or series of numbers; any classifier of transformers is as good as ours. INPUT
    is a file, a folder with all below it, a pattern, or @FILE for a list of names, one a line (@- reads it from
    standard input). To a model of texts INPUT is the text, and @FILE has a text a line. What cannot be read is
    reported and the others go on; the exit code is then 1. `hf-ext mrconv predict` tells values, forecasts, and
    classes of positions.

    \b
    Examples:
      hf-ext classify spoken-digits digit.wav
      hf-ext classify org/name photos/ --top-k 5 --json
      hf-ext classify org/merged "What a film!" --task sentiment
      hf-ext classify runs/mrconv-sensors/snapshot knock.csv --columns x,y,z
    """
    names = [name.strip() for name in columns.split(",")] if columns else None
    register_models()
    classifier = load_classifier(source, device, task)
    if columns and classifier.kind != "series":
        raise click.UsageError(f"--columns belongs to series; {source} takes {classifier.kind}.")
    found: list[dict[str, Any]] = []
    given = list(classifier.find_inputs(list(inputs)))
    if not given:
        raise Unusable(f"no {classifier.kind} in {', '.join(inputs)}.")
    for item in given:
        try:
            found.append({"input": item.name, "classes": classifier.classify(item, top_k, names)})
        except (ValueError, OSError, RuntimeError, IndexError) as error:
            click.echo(f"{item.name}: {error}", err=True)
    if as_json:
        print_json(found)
    elif found:
        rows = [(item["input"], row["label"], f"{row['score']:.4f}") for item in found for row in item["classes"]]
        print_table(("input", "class", "probability"), rows, names=2, title=source)
    if len(found) < len(given):
        raise Failed(f"{len(given) - len(found)} of {len(given)} could not be classified.")


@loads
def load_classifier(source: str, device: str | None, task: str | None) -> Any:
    """The classifier of a folder or org/name[@revision], of one task if that is a merge."""
    from hf_ext.emr.weights import task_checkpoint
    from hf_ext.tasks.classifying import Classifier

    with task_checkpoint(source, task) as checkpoint:
        return Classifier(checkpoint, device)
