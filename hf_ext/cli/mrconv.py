"""hf-ext mrconv: plots of kernels."""

from pathlib import Path

import click

from .errors import loads
from .groups import Group
from .sources import Model
from .terminal import say


@click.group(cls=Group)
def mrconv() -> None:
    """MRConv: plot the kernels of a model.

    `hf-ext train` trains a model, `hf-ext classify` and `hf-ext generate` use it.
    """


@mrconv.command()
@click.argument("source", metavar="MODEL", type=Model())
@click.argument("out", metavar="OUT.png", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--channel", type=click.IntRange(min=0), default=0, show_default=True, help="Channel to plot.")
def plot(source: str, out: Path, channel: int) -> None:
    """Plot the kernels of MODEL, a folder or org/name[@revision] with unmerged branches, to OUT.png.

    The figure shows the weight of each resolution by depth (‖α‖²), and the kernels of one channel: the weighted
    branches and the merged kernel.

    \b
    Examples:
      hf-ext mrconv plot runs/digits/snapshot kernels.png
      hf-ext mrconv plot org/digits@v1 kernels.png --channel 3
    """
    from hf_ext.extras import check_installed

    check_installed("matplotlib")
    from hf_ext.tasks.kernel_plots import load_model, plot_kernels

    if out.suffix.lower() != ".png":
        raise click.BadParameter(f"{out} does not end with .png.", param_hint="OUT.png")
    say(plot_kernels(loads(load_model)(source), out, channel))
