"""hf-ext mrconv: data and pictures of MRConv."""

from pathlib import Path

import click

from .errors import loads
from .groups import Group
from .sources import Model


@click.group(cls=Group)
def mrconv() -> None:
    """MRConv: data of ListOps and Pathfinder, kernels drawn.

    `hf-ext train` trains a model, `hf-ext classify` and `hf-ext generate` use it.
    """


@mrconv.command(name="make-listops")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--train", type=click.IntRange(min=1), default=96000, show_default=True, help="Training examples.")
@click.option("--validation", type=click.IntRange(min=1), default=2000, show_default=True, help="Validation examples.")
@click.option("--test", type=click.IntRange(min=1), default=2000, show_default=True, help="Test examples.")
@click.option(
    "--seed",
    type=click.IntRange(min=0, max=2**32 - 1),
    default=0,
    show_default=True,
    help="Another seed, other examples.",
)
@click.option("--min-length", type=int, default=500, show_default=True, help="Expressions have more tokens.")
@click.option("--max-length", type=int, default=2000, show_default=True, help="Expressions have fewer tokens.")
@click.option("--max-depth", type=int, default=10, show_default=True, help="Levels of an expression.")
@click.option("--max-arguments", type=int, default=10, show_default=True, help="Most arguments of an operator.")
@click.option("--progress/--no-progress", default=True, help="Show a bar.")
def make_listops(
    out: Path,
    train: int,
    validation: int,
    test: int,
    seed: int,
    min_length: int,
    max_length: int,
    max_depth: int,
    max_arguments: int,
    progress: bool,
) -> None:
    """Write ListOps, with the grammar and limits of Long Range Arena, into the new folder OUT.

    One parquet file for each split, which `datasets` and the training read. An example is a function of seed, split
    and number, so more examples of a seed begin with the same ones. Where OUT exists nothing is written.

    \b
    Examples:
      hf-ext mrconv make-listops data/listops
      hf-ext mrconv make-listops data/short --train 1000 --min-length 50 --max-length 200
    """
    from hf_ext.settings import build
    from hf_ext.tasks.listops import ListOps, write_listops

    values = {
        "seed": seed,
        "min_length": min_length,
        "max_length": max_length,
        "max_depth": max_depth,
        "max_arguments": max_arguments,
    }
    counts = {"train": train, "validation": validation, "test": test}
    click.echo(write_listops(out, counts, build(ListOps, values, "make-listops"), progress))


@mrconv.command(name="make-pathfinder")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--size",
    type=click.Choice(["32", "128"]),
    default="32",
    show_default=True,
    help="Side in pixels: 32 is Pathfinder, 128 Path-X.",
)
@click.option("--train", type=click.IntRange(min=1), default=160000, show_default=True, help="Training examples.")
@click.option(
    "--validation", type=click.IntRange(min=1), default=20000, show_default=True, help="Validation examples."
)
@click.option("--test", type=click.IntRange(min=1), default=20000, show_default=True, help="Test examples.")
@click.option(
    "--seed",
    type=click.IntRange(min=0, max=2**32 - 1),
    default=0,
    show_default=True,
    help="Another seed, other examples.",
)
@click.option(
    "--num-workers",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Processes that draw; the pictures are the same.",
)
@click.option("--progress/--no-progress", default=True, help="Show a bar.")
def make_pathfinder(
    out: Path, size: str, train: int, validation: int, test: int, seed: int, num_workers: int, progress: bool
) -> None:
    """Write Pathfinder or Path-X, drawn by the rules of Long Range Arena, into the new folder OUT.

    One parquet file for each split, which `datasets` and the training read. A picture is a function of seed, split and
    number, so more pictures of a seed begin with the same ones. Where OUT exists nothing is written.

    \b
    Examples:
      hf-ext mrconv make-pathfinder data/pathfinder32
      hf-ext mrconv make-pathfinder data/pathfinder128 --size 128 --num-workers 8
    """
    from hf_ext.tasks.pathfinder import Pathfinder, write_pathfinder

    counts = {"train": train, "validation": validation, "test": test}
    click.echo(write_pathfinder(out, counts, Pathfinder(seed, int(size)), progress, num_workers))


@mrconv.command()
@click.argument("source", metavar="MODEL", type=Model())
@click.argument("out", metavar="OUT.png", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--channel", type=click.IntRange(min=0), default=0, show_default=True, help="Whose kernels to draw.")
def plot(source: str, out: Path, channel: int) -> None:
    """Draw MODEL, a folder or org/name[@revision] that is not merged, into OUT.png.

    How much each resolution counts by depth (‖α‖²), and the kernels of a channel: branches as they contribute, merged.

    \b
    Examples:
      hf-ext mrconv plot runs/digits/snapshot kernels.png
      hf-ext mrconv plot org/digits@v1 kernels.png --channel 3
    """
    from hf_ext.plots.kernels import load_model, plot_kernels

    if out.suffix.lower() != ".png":
        raise click.BadParameter(f"{out} does not end with .png.", param_hint="OUT.png")
    click.echo(plot_kernels(loads(load_model)(source), out, channel))
