"""hf-ext mrconv: data, predictions and pictures of MRConv."""

from pathlib import Path

import click

from .errors import loads
from .groups import Group
from .sources import Model


@click.group(cls=Group)
def mrconv() -> None:
    """MRConv: data of ListOps and Pathfinder, values and forecasts of series, kernels drawn.

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
@click.argument("file", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--columns", help="The channels, as the model was trained on: a,b. Default: the columns of the training."
)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="A CSV file for the answer; else it is printed."
)
def predict(source: str, file: Path, columns: str | None, out: Path | None) -> None:
    """Predict by MODEL, a folder or org/name[@revision], from the sequence of numbers in FILE, as CSV.

    FILE is CSV, TSV, parquet or NumPy, each row a position. A model of values answers with one row, one of classes of
    positions with a row for each, a forecast with the rows that come next. A causal model of positions takes files of
    any length. The class of a whole series is told by `hf-ext classify`.

    \b
    Examples:
      hf-ext mrconv predict runs/mrconv-positions/snapshot heart.csv
      hf-ext mrconv predict runs/mrconv-forecast/snapshot load.csv --columns load,temperature --out next.csv
    """
    from hf_ext.files import whole_file
    from hf_ext.tasks.kernel_plots import load_model
    from hf_ext.tasks.predicting import predict_file

    model = loads(load_model)(source)
    names = [name.strip() for name in columns.split(",")] if columns else None
    text = predict_file(model, file, names).to_csv(index=False, lineterminator="\n")
    if out is None:
        click.echo(text, nl=False)
        return
    with whole_file(out, "w", newline="") as written:
        written.write(text)
    click.echo(out)


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
    from hf_ext.tasks.kernel_plots import load_model, plot_kernels

    if out.suffix.lower() != ".png":
        raise click.BadParameter(f"{out} does not end with .png.", param_hint="OUT.png")
    click.echo(plot_kernels(loads(load_model)(source), out, channel))
