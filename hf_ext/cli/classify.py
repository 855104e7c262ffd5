"""hf-ext classify: classes of sounds, pictures, texts and series, and values. hf-ext generate: texts go on."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import click

from hf_ext.terminal import count_of

from . import register_models
from .errors import Failed, Unusable, loading
from .options import AT_LEAST_1, DEVICE, JSON, MODEL, TASK, shown, split_names
from .output import decimals, print_json, print_table, say

SHARE = click.FloatRange(0, 1, min_open=True)
# Columns of the table for each kind of answer.
_HEADERS = {
    "classes": ("input", "class", "probability"),
    "values": ("input", "target", "value"),
    "positions": ("input", "position", "class", "probability"),
}


@click.command()
@MODEL
@click.argument("inputs", metavar="INPUT...", nargs=-1, required=True)
@TASK
@shown("--top-k", type=AT_LEAST_1, default=1, help="Number of most likely classes to print.")
@click.option("--columns", help="Channels of series, or both texts of a pair: a,b.  [default: as trained]")
@click.option("--series", metavar="NAME", help="Column that names the series of a row.  [default: found by name]")
@click.option("--time", metavar="NAME", help="Column of the time, in tables.  [default: found by name]")
@DEVICE
@JSON
def classify(source: str, inputs: tuple[str, ...], task: str | None, device: str | None, **how: Any) -> None:
    """Classify each INPUT with MODEL, a folder or org/name[@revision].

    MODEL is any classifier of transformers for sounds, pictures or texts, or an MRConv model of series, or of pairs of
    texts, whose INPUT is a table with a pair in each row. INPUT is a
    file, a folder with its subfolders, a pattern, or @FILE for a list of names, one per line (@- reads the list from
    standard input). For a text model INPUT is the text itself, and @FILE has one text per line. Unreadable inputs are
    reported, the others are classified, and the exit code is 1. A regression model prints values; a model of positions
    prints a class for each row, and a causal one of these accepts files of any length. Other texts and series that are
    too long for the model are cut, with a warning. A file with several series gets one answer per series. Long sounds
    are split into windows, and the answers are averaged.

    \b
    Examples:
      hf-ext classify spoken-digits digit.wav
      hf-ext classify org/name photos/ --top-k 5 --json
      hf-ext classify org/merged "What a film!" --task sentiment
      hf-ext classify runs/mrconv-sensors/snapshot knock.csv --columns x,y,z
      hf-ext classify runs/mrconv-positions/snapshot heart.csv --json
      hf-ext classify runs/sales/snapshot sales.csv --series shop
    """
    top_k, as_json, columns = how.pop("top_k"), how.pop("as_json"), split_names(how.pop("columns")) or None
    register_models()
    from hf_ext.answers.classifying import Classifier
    from hf_ext.data.roles import Hints

    classifier = load_task(source, task, Classifier, device)
    if any(how.values()) and classifier.kind != "series":
        raise click.UsageError(f"--series and --time are for models of series, not for {classifier.kind}.")
    if columns and classifier.kind not in ("series", "pairs"):
        raise click.UsageError(f"--columns is for models of series and of pairs of texts, not for {classifier.kind}.")
    found: list[dict[str, Any]] = []
    given = list(classifier.find_inputs(list(inputs)))
    if not given:
        raise Unusable(f"no {classifier.kind} found in {', '.join(inputs)}.")
    failed = 0
    for item in given:
        try:
            answers = classifier.classify(item, top_k, columns, Hints(**how))
        except (ValueError, OSError, RuntimeError, IndexError) as error:
            say(f"{item.name}: {error}", to_stderr=True)
            failed += 1
            continue
        found += [{"input": name, classifier.answer: answer} for name, answer in answers.items()]
    if as_json:
        print_json(found)
    elif found:
        header = _HEADERS[classifier.answer]
        rows = [
            (item["input"], *(decimals(value) if isinstance(value, float) else str(value) for value in row.values()))
            for item in found
            for row in item[classifier.answer]
        ]
        print_table(header, rows, names=len(header) - 1, title=source)
    if failed:
        raise Failed(f"{failed} of {count_of(len(given), 'input')} could not be classified.")


def load_task(source: str, task: str | None, load: Callable[..., Any], device: str | None) -> Any:
    """Loads the model of a folder or org/name[@revision], or of one task of a merge."""
    from hf_ext.emr.weights import task_checkpoint

    with loading(source), task_checkpoint(source, task) as checkpoint:
        return load(checkpoint, device)


@click.command()
@MODEL
@click.argument("prompt")
@TASK
@shown("--max-new-tokens", type=AT_LEAST_1, default=200, help="Number of tokens to generate.")
@shown("--temperature", type=click.FloatRange(min=0), default=0.8, help="Of sampling; 0 takes the likeliest token.")
@shown("--top-p", type=SHARE, default=1.0, help="Sample from the likeliest tokens with this total probability.")
@shown("--seed", type=click.IntRange(0, 2**32 - 1), default=0, help="Seed of the sampling.")
@DEVICE
def generate(source: str, prompt: str, task: str | None, device: str | None, **options: Any) -> None:
    """Continue the text PROMPT with the language model MODEL, a folder or org/name[@revision].

    PROMPT and its continuation are printed as they are generated. If PROMPT is -, it is read from standard input. An
    MRConv model streams: the cost of a token does not grow with the length of the text.

    \b
    Examples:
      hf-ext generate runs/mrconv-lm/snapshot "The list "
      hf-ext generate org/name "The " --temperature 0 --max-new-tokens 50
      cat begin.txt | hf-ext generate org/merged - --task poems --seed 3
    """
    from hf_ext.answers.continuing import continue_text, load_language_model

    register_models()
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    model, tokenizer = load_task(source, task, load_language_model, device)
    # The options have the names of the arguments of continue_text.
    continue_text(model, tokenizer, text, partial(click.echo, nl=False), **options)
    click.echo()
