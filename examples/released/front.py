"""The figure of the README, one panel a method: `python examples/released/front.py` writes front.png.

The photograph and the noise are the first row of gallery.py; the table is that of six picture tasks over three seeds
(examples/emr/results/pictures); the grid shows the first pictures of the released cifar10, none chosen; the kernels
are those of the last layer of spoken-digits, channel 0.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gallery import ROWS, restore_row
from PIL import Image

import hf_ext
from hf_ext.figures import new_figure
from hf_ext.files import read_json, whole_file
from hf_ext.mrconv import MRConvForAudioClassification

HERE = Path(__file__).resolve().parent
STUDY = HERE.parent / "emr" / "results" / "pictures" / "study.json"
MERGES = {
    "individual": "six fine-tunes",
    "onebit": "base and 1-bit deltas",
    "emr": "EMR-Merging",
    "average": "average",
    "task_arithmetic": "task arithmetic",
    "ties": "TIES",
}


def read_merges() -> list[tuple[str, float, float | None]]:
    """Name, mean accuracy in per cent and megabytes beside the base of each way to keep six tasks."""
    seeds = [seed["rows"] for seed in read_json(STUDY)["seeds"].values()]
    return [
        (title, 100 * float(np.mean([rows[name]["mean"] for rows in seeds])), seeds[0][name]["bytes"] / 1e6)
        for name, title in MERGES.items()
    ]


def show_photo(figure: Any) -> None:
    """Noisy, restored and clean."""
    row = restore_row(*ROWS[0])
    figure.suptitle("SemanIR restores pictures", fontweight="bold")
    titles = f"noise of 25: {row['input']:.1f} dB", f"{row['model']}: {row['psnr']:.1f} dB", "clean"
    for axis, picture, title in zip(figure.subplots(1, 3), row["pictures"], titles, strict=True):
        axis.imshow(np.clip(picture, 0, 1))
        axis.set_title(title, fontsize=9)
        axis.axis("off")


def show_merges(figure: Any) -> None:
    """A table with bars."""
    figure.suptitle("EMR-Merging keeps six fine-tunes in one model", fontweight="bold")
    axis, rows = figure.subplots(), read_merges()
    places = np.arange(len(rows))[::-1]
    axis.barh(places, [row[1] for row in rows], color=["0.7", "tab:blue", "tab:blue", *["0.85"] * 3])
    axis.set_yticks(places, [row[0] for row in rows])
    for place, (_, score, size) in zip(places, rows, strict=True):
        axis.text(1, place, f"{score:.1f} %, {size:.1f} MB", va="center", fontsize=9)
    axis.set_xlabel("mean accuracy of six picture tasks, three seeds (%)", fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def show_grid(figure: Any) -> None:
    """The grid of the card, a row a class turned into a column."""
    figure.suptitle("Disentangled DiT draws classes, 32 × 32 pixels", fontweight="bold")
    axis = figure.subplots()
    with Image.open(Path(hf_ext.released("cifar10")) / "before_after.png") as picture:
        axis.imshow(np.asarray(picture.convert("RGB")))
    axis.axis("off")


Curve = tuple[np.ndarray, np.ndarray]


def contributions(layer: Any, channel: int) -> tuple[list[Curve], Curve]:
    """Lags and values alpha_i s_i k_i of one channel's kernels, and of their sum; lags below 0 look ahead."""
    merged, ahead, _ = layer.merged()
    kernels, backward = layer.branch_kernels()
    scale, _ = layer.branch_scales(kernels, backward)
    wings = [None] * len(kernels) if backward is None else backward
    parts = [
        _two_sided(kernel[channel] * factor[channel], None if wing is None else wing[channel] * factor[channel])
        for kernel, wing, factor in zip(kernels, wings, scale, strict=True)
    ]
    return parts, _two_sided(merged[channel], None if ahead is None else ahead[channel])


def _two_sided(kernel: torch.Tensor, ahead: torch.Tensor | None) -> Curve:
    """Lags and values, the latest input first."""
    wing = kernel[:0] if ahead is None else ahead.flip(0)
    return np.arange(-len(wing), len(kernel)), torch.cat([wing, kernel]).numpy()


def show_kernels(figure: Any) -> None:
    """The kernels of the branches, and the one that they merge into."""
    figure.suptitle("MRConv merges its branches into one convolution", fontweight="bold")
    layer = MRConvForAudioClassification.from_pretrained(hf_ext.released("spoken-digits")).convolutions()[-1]
    with torch.no_grad():
        parts, merged = contributions(layer, 0)
    above, below = figure.subplots(2, 1, sharex=True)
    for number, (lags, values) in reversed(list(enumerate(parts))):
        above.plot(lags, values, linewidth=0.9, label=f"branch {number + 1}")
    below.plot(*merged, linewidth=0.9, color="black", label="merged")
    below.set_xlabel("lag in samples of 8 kHz", fontsize=8)
    for axis in (above, below):
        axis.set_xscale("symlog", linthresh=16)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7, loc="lower right", ncols=3)


def draw() -> Any:
    """The figure, two panels wide and two high."""
    figure = new_figure(11, 7)
    panels: Any = figure.subfigures(2, 2, width_ratios=(1.15, 1), height_ratios=(1, 1.15))
    for panel, show in zip(panels.flat, (show_photo, show_merges, show_grid, show_kernels), strict=True):
        show(panel)
    return figure


if __name__ == "__main__":
    with whole_file(HERE / "front.png") as file:
        draw().savefig(file, format="png", dpi=110)
