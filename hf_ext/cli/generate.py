"""hf-ext generate: continuation of a text."""

import sys
from functools import partial
from typing import Any

import click

from .classify import load_task
from .library import register_models
from .sources import Model


@click.command()
@click.argument("source", metavar="MODEL", type=Model())
@click.argument("prompt")
@click.option("--task", metavar="NAME", help="Task of a merge.")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=200,
    show_default=True,
    help="Number of tokens to generate.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.8,
    show_default=True,
    help="Temperature of sampling; 0 takes the most likely token.",
)
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="Sample from the most likely tokens with this total probability.",
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Seed of the sampling.")
@click.option("--device", help="cpu, cuda, cuda:1, ...  [default: the GPU if there is one]")
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
