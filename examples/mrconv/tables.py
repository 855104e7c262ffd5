"""Curves and README tables of the study, from results/study.json alone.

python examples/mrconv/tables.py     writes tables and curves again
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from hf_ext.files import read_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments import save_figure, spread, table, version_list, write_blocks

EXAMPLES = Path(__file__).resolve().parent
RESULT = EXAMPLES / "results" / "study.json"
NAMES = {
    "mrconv": "MRConv, Fourier",
    "s4d": "S4D",
    "transformer": "Transformer encoder (ModernBERT layers)",
    "mrconvnext": "MRConvNeXt",
    "convnext": "ConvNeXt of transformers",
}
TITLES = {
    "digits": "Spoken digits, raw 4 kHz",
    "scifar": "Sequential CIFAR-10, grey",
    "images": "CIFAR-10, small ConvNeXts",
}


def comparison_table(rows: dict[str, Any]) -> str:
    """Test accuracy at each mark that all models have reached, and the samples behind the last of them."""
    marks = [mark for mark in next(iter(rows.values()))["marks"] if all(mark in row["marks"] for row in rows.values())]
    lines = [
        [
            NAMES[model],
            f"{row['parameters']:,}",
            f"{row['rate']:g}",
            *(f"{100 * row['marks'][mark]['accuracy']:.1f}" for mark in marks),
            f"{row['marks'][marks[-1]]['samples']:,}",
        ]
        for model, row in rows.items()
    ]
    header = ["accuracy, % after", "parameters", "rate", *(f"{mark} min" for mark in marks)]
    return table([*header, f"samples in {marks[-1]} min"], lines)


def ablation_table(rows: dict[str, Any]) -> str:
    """Mean and standard deviation over the seeds."""
    lines = []
    for label, row in rows.items():
        seeds = row["seeds"].values()
        accuracy = spread([100 * seed["accuracy"] for seed in seeds], 1)
        minutes = np.mean([seed["core_minutes"] for seed in seeds])
        lines.append([label, f"{row['parameters']:,}", accuracy, str(len(seeds)), f"{minutes:.1f}"])
    return table(["", "parameters", "accuracy, %", "seeds", "core minutes"], lines)


def draw_curves(result: dict[str, Any], path: Path) -> None:
    """Test accuracy against core minutes."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(result["comparisons"]), figsize=(5 * len(result["comparisons"]), 4), squeeze=False
    )
    for axis, (name, rows) in zip(axes[0], result["comparisons"].items(), strict=True):
        for model, row in rows.items():
            points = [(mark["core_minutes"], 100 * mark["accuracy"]) for mark in row["marks"].values()]
            axis.plot(*zip(*points, strict=True), marker="o", label=NAMES[model])
        axis.set(title=TITLES[name], xlabel="core minutes", ylabel="test accuracy, %", xscale="log")
        # The marks in plain numbers; those of a logarithmic axis would be powers.
        marks = sorted({round(mark["core_minutes"]) for row in rows.values() for mark in row["marks"].values()})
        axis.set(xlim=(0.7 * marks[0], 1.4 * marks[-1]))
        axis.set_xticks(marks, [str(mark) for mark in marks])
        axis.minorticks_off()
        axis.legend(fontsize=8)
    save_figure(figure, path)


def blocks(result: dict[str, Any]) -> dict[str, str]:
    """The README's tables by the name of their place."""
    return {
        "budget": f"{result['device']}; {version_list(result)}.",
        **{name: comparison_table(rows) for name, rows in result["comparisons"].items()},
        "curves": "![Test accuracy against core minutes](results/curves.png)",
        "ablation": ablation_table(result["ablation"]),
    }


def write_tables() -> None:
    """Reads the result, draws and fills."""
    result = read_json(RESULT)
    draw_curves(result, EXAMPLES / "results" / "curves.png")
    write_blocks(blocks(result), EXAMPLES / "README.md")


if __name__ == "__main__":
    write_tables()
