"""hf-ext emr extract-lora: a task as a LoRA."""

from typing import Any

import click

from .errors import loads
from .library import register_models
from .output import print_json
from .sources import Model, NewFolder, find_released
from .terminal import say


@click.command("extract-lora")
@click.argument("places", metavar="(ARTIFACT TASK | FINE_TUNE) OUT", nargs=-1, required=True)
@click.option("--rank", type=click.IntRange(min=1), help="Rank of every matrix.")
@click.option("--error", type=click.FloatRange(0, 1), help="Largest relative error of a matrix, in place of --rank.")
@click.option(
    "--base", metavar="ID", type=Model(), help="Base model: required with FINE_TUNE, optional if ARTIFACT names it."
)
@click.option("--lora-only", is_flag=True, help="Store matrices of linear layers only, as vLLM requires.")
@click.option("--endpoint", help="Address of the Hub.  [default: HF_ENDPOINT]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def extract_lora(
    places: tuple[str, ...],
    rank: int | None,
    error: float | None,
    base: str | None,
    lora_only: bool,
    endpoint: str | None,
    as_json: bool,
) -> None:
    """Write TASK of ARTIFACT, or a FINE_TUNE of --base, as a LoRA that peft loads on the base.

    The difference from the base is approximated by a low rank, matrix by matrix; a table shows error and size of other
    ranks. Norms, embeddings and heads are stored whole, unless --lora-only leaves them out.

    \b
    Examples:
      hf-ext emr extract-lora merged a lora-a --rank 16
      hf-ext emr extract-lora runs/a lora-a --base org/base --error 0.1 --lora-only
    """
    if len(places) not in (2, 3):
        raise click.UsageError(f"Expected ARTIFACT TASK OUT, or FINE_TUNE OUT --base; got {len(places)} arguments.")
    if len(places) == 2 and base is None:
        raise click.UsageError("Missing option --base for FINE_TUNE OUT; for a merge, give ARTIFACT TASK OUT.")
    if (rank is None) == (error is None):
        raise click.UsageError("Give either --rank or --error.")
    *words, out = places
    NewFolder().convert(out, None, None)
    task = words[1] if len(words) == 2 else None
    report = write_lora(
        find_released(words[0]), task, out, base, endpoint, rank=rank, error=error, lora_only=lora_only
    )
    if as_json:
        print_json(report)
    else:
        from hf_ext.merging.extracting import report_lines

        say(*report_lines(report), f"adapter: {report['path']}")


@loads
def write_lora(
    source: str, task: str | None, out: str, base: str | None, endpoint: str | None, **how: Any
) -> dict[str, Any]:
    """Opens the fine-tune or the task, and writes its adapter."""
    register_models()
    from hf_ext.merging import extracting

    if task is None:
        opened = extracting.open_fine_tune(str(base), source, endpoint)
    else:
        opened = extracting.open_task(source, task, base, endpoint)
    with opened as pair:
        return extracting.extract_lora(pair, out, **how)
