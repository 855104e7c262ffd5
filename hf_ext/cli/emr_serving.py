"""hf-ext emr extract-lora and merge-loras: tasks as LoRAs."""

from typing import Any

import click

from .errors import loads
from .library import register_models
from .output import print_json


@click.command("extract-lora")
@click.argument("places", metavar="(ARTIFACT TASK | FINE_TUNE) OUT", nargs=-1, required=True)
@click.option("--rank", type=click.IntRange(min=1), help="Rank of every matrix.")
@click.option("--error", type=click.FloatRange(0, 1), help="Or the largest relative error of a matrix's difference.")
@click.option("--base", metavar="ID", help="The base: needed with FINE_TUNE, or if not found as ARTIFACT names it.")
@click.option("--lora-only", is_flag=True, help="Leave out all but matrices of linear layers, as vLLM needs it.")
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

    The difference from the base is cut to a rank, matrix by matrix; the table shows error and size of other ranks.
    Norms, embeddings and heads go along whole, unless --lora-only leaves them out.

    \b
    Examples:
      hf-ext emr extract-lora merged a lora-a --rank 16
      hf-ext emr extract-lora runs/a lora-a --base org/base --error 0.1 --lora-only
    """
    if len(places) not in (2, 3):
        raise click.UsageError(f"Expected ARTIFACT TASK OUT, or FINE_TUNE OUT with --base; got {len(places)} words.")
    if len(places) == 2 and base is None:
        raise click.UsageError("Missing option --base for FINE_TUNE OUT; of a merge, give ARTIFACT TASK OUT.")
    if (rank is None) == (error is None):
        raise click.UsageError("Give one of --rank and --error.")
    *words, out = places
    task = words[1] if len(words) == 2 else None
    report = write_lora(words[0], task, out, base, endpoint, rank=rank, error=error, lora_only=lora_only)
    if as_json:
        print_json(report)
    else:
        from hf_ext.merging.extracting import report_lines

        click.echo("\n".join([*report_lines(report), f"adapter: {report['path']}"]))


@loads
def write_lora(
    source: str, task: str | None, out: str, base: str | None, endpoint: str | None, **how: Any
) -> dict[str, Any]:
    """Opens what was named and writes its adapter."""
    register_models()
    from hf_ext.merging.extracting import extract_lora as run
    from hf_ext.merging.pairs import open_fine_tune, open_task

    opened = open_fine_tune(str(base), source, endpoint) if task is None else open_task(source, task, base, endpoint)
    with opened as pair:
        return run(pair, out, **how)


@click.command("merge-loras")
@click.argument("adapters", metavar="ADAPTER...", nargs=-1, required=True)
@click.option("--out", required=True, type=click.Path(file_okay=False), help="The folder to write.")
@click.option("--weight", "weights", type=float, multiple=True, help="Once for each ADAPTER.  [default: the average]")
@click.option("--rank", type=click.IntRange(min=1), help="Largest rank of a matrix.  [default: the sum, exact]")
@click.option("--error", type=click.FloatRange(0, 1), help="Or the largest relative error of a matrix's sum.")
@click.option("--endpoint", help="Address of the Hub.  [default: HF_ENDPOINT]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def merge_loras(adapters: tuple[str, ...], out: str, weights: tuple[float, ...], as_json: bool, **how: Any) -> None:
    """Merge LoRAs of one base, of any ranks, alphas and modules, into one LoRA that peft loads.

    Their weighted sum is exact at the sum of the ranks. The base is not read.

    \b
    Examples:
      hf-ext emr merge-loras lora-a lora-b --out lora-ab
      hf-ext emr merge-loras lora-a lora-b --out lora-ab --weight 1 --weight 0.5 --rank 16
    """
    if len(adapters) < 2:
        raise click.UsageError("Expected two adapters or more.")
    if weights and len(weights) != len(adapters):
        raise click.UsageError(f"Expected --weight once for each of {len(adapters)} adapters; got {len(weights)}.")
    if how["rank"] is not None and how["error"] is not None:
        raise click.UsageError("Give one of --rank and --error, or neither.")
    from hf_ext.merging.loras import merge_loras as run

    report = run(adapters, out, weights=weights or None, **how)
    if as_json:
        print_json(report)
        return
    ranks = [found["rank"] for found in report["matrices"].values()]
    chosen = f"{min(ranks)} to {max(ranks)}" if min(ranks) < max(ranks) else str(max(ranks))
    click.echo(f"{len(ranks)} matrices of rank {chosen}, error {report['error']:.4f}, {report['bytes']:,} bytes")
    for warning in report["warnings"]:
        click.echo(f"warning: {warning}")
    click.echo(f"adapter: {report['path']}")
