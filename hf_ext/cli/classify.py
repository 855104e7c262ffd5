"""hf-ext classify: classes of sounds, pictures, texts and series, and values of series."""

from typing import Any

import click

from hf_ext.terminal import count_of

from .errors import Failed, Unusable, loads
from .library import register_models
from .options import split_names
from .output import print_json, print_table
from .sources import Model
from .terminal import say

# Columns of the table for each kind of answer.
_HEADERS = {
    "classes": ("input", "class", "probability"),
    "values": ("input", "target", "value"),
    "positions": ("input", "position", "class", "probability"),
}


@click.command()
@click.argument("source", metavar="MODEL", type=Model())
@click.argument("inputs", metavar="INPUT...", nargs=-1, required=True)
@click.option("--task", metavar="NAME", help="Task of a merge.")
@click.option(
    "--top-k", type=click.IntRange(min=1), default=1, show_default=True, help="Number of most likely classes to print."
)
@click.option("--columns", help="Channels of series, such as a,b.  [default: those of the training]")
@click.option("--series", metavar="NAME", help="Column that names the series of a row.  [default: found by name]")
@click.option("--time", metavar="NAME", help="Column of the time, in tables.  [default: found by name]")
@click.option("--device", help="cpu, cuda, cuda:1, ...  [default: the GPU if there is one]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def classify(
    source: str, inputs: tuple[str, ...], task: str | None, top_k: int, device: str | None, as_json: bool, **roles: Any
) -> None:
    """Classify each INPUT with MODEL, a folder or org/name[@revision].

    MODEL is any classifier of transformers for sounds, pictures or texts, or an MRConv model of series. INPUT is a
    file, a folder with its subfolders, a pattern, or @FILE for a list of names, one per line (@- reads the list from
    standard input). For a text model INPUT is the text itself, and @FILE has one text per line. Unreadable inputs are
    reported, the others are classified, and the exit code is 1. A regression model prints values; a model of positions
    prints a class for each row. A causal model accepts files of any length. A file with several series gets one answer
    per series. Long sounds are split into windows, and the answers are averaged.

    \b
    Examples:
      hf-ext classify spoken-digits digit.wav
      hf-ext classify org/name photos/ --top-k 5 --json
      hf-ext classify org/merged "What a film!" --task sentiment
      hf-ext classify runs/mrconv-sensors/snapshot knock.csv --columns x,y,z
      hf-ext classify runs/mrconv-positions/snapshot heart.csv --json
      hf-ext classify runs/sales/snapshot sales.csv --series shop
    """
    names = split_names(roles.pop("columns")) or None
    register_models()
    classifier = load_classifier(source, device, task)
    if (names or any(roles.values())) and classifier.kind != "series":
        raise click.UsageError(
            f"--columns, --series and --time are for models of series; {source} classifies {classifier.kind}."
        )
    from hf_ext.data.roles import Hints

    hints = Hints(**roles)
    found: list[dict[str, Any]] = []
    given = list(classifier.find_inputs(list(inputs)))
    if not given:
        raise Unusable(f"no {classifier.kind} found in {', '.join(inputs)}.")
    failed = 0
    for item in given:
        try:
            answers = classifier.classify(item, top_k, names, hints)
        except (ValueError, OSError, RuntimeError, IndexError) as error:
            say(f"{item.name}: {error}", to_stderr=True)
            failed += 1
            continue
        found += [{"input": name, classifier.answer: answer} for name, answer in answers.items()]
    if as_json:
        print_json(found)
    elif found:
        header = _HEADERS[classifier.answer]
        rows = [(item["input"], *map(_cell, row.values())) for item in found for row in item[classifier.answer]]
        print_table(header, rows, names=len(header) - 1, title=source)
    if failed:
        raise Failed(f"{failed} of {count_of(len(given), 'input')} could not be classified.")


@loads
def load_classifier(source: str, device: str | None, task: str | None) -> Any:
    """Loads the classifier of a folder or org/name[@revision], or of one task of a merge."""
    from hf_ext.answers.classifying import Classifier
    from hf_ext.emr.weights import task_checkpoint

    with task_checkpoint(source, task) as checkpoint:
        return Classifier(checkpoint, device)


def _cell(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
