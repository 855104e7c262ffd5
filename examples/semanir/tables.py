"""Curves and README tables of the study, from study.json alone.

python examples/semanir/tables.py     writes tables and curves again
"""

import sys
from pathlib import Path
from typing import Any

from hf_ext.files import read_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments import save_figure, table, version_list, write_blocks

EXAMPLES = Path(__file__).resolve().parent
# Published, grey, σ = 25: Set12 and BSD68. They are trained for days of a GPU.
YARDSTICKS = {"BM3D": (29.97, 28.57), "DnCNN": (30.43, 29.23), "SwinIR": (31.01, 29.50)}


def candidate_table(candidates: dict[str, Any]) -> str:
    """Networks for the headline after the same seconds."""
    rows = []
    for name, row in candidates["rows"].items():
        marked = f"**{name}**" if name == candidates["chosen"] else name
        facts = [f"{row['parameters']:,}", f"{row['scores']['psnr']:.2f}", f"{row['samples']:,}"]
        rows.append([marked, *facts, f"{1000 * row['seconds_per_step']:.0f}", f"{row['seconds']:.0f}"])
    return table(["network", "parameters", "PSNR, dB", "samples", "ms a step", "s"], rows)


def headline_table(result: dict[str, Any]) -> str:
    """Set12 and BSD68, beside total variation and published numbers."""
    row, classical = result["headline"], result["total_variation"]
    found = {"Set12": row["scores"], "BSD68": row["bsd68"]}
    rows = [
        [
            f"SemanIR, {row['parameters'] / 1e6:.2f} M, {row['seconds'] / 60:.0f} min of one core",
            *(f"**{scores['psnr']:.2f}** / {scores['ssim']:.4f}" for scores in found.values()),
        ],
        [
            f"best total variation, weight {classical['weight']:g}",
            *(f"{classical[key]:.2f}" for key in ("set12", "bsd68")),
        ],
        ["noisy image", f"{result['input']:.2f}", ""],
        *([f"{name}, published", *(f"{value:.2f}" for value in values)] for name, values in YARDSTICKS.items()),
    ]
    gaps = [scores["psnr"] - YARDSTICKS["BM3D"][index] for index, scores in enumerate(found.values())]
    gain = row["scores"]["psnr"] - classical["set12"]
    text = f"{gaps[0]:+.2f} and {gaps[1]:+.2f} dB from BM3D, {gain:+.2f} dB from total variation on Set12; "
    text = f"\n\n{text}{row['samples']:,} patches."
    return table(["grey, σ = 25: PSNR, dB / SSIM", "Set12", "BSD68"], rows) + text


def sweep_table(sweep: dict[str, Any]) -> str:
    """PSNR and time against k."""
    fixed, drawn = (sweep["curves"][name] for name in ("fixed", "random"))
    rows = [
        [f"{one['top_k']}", f"{one['psnr']:.2f}", f"{two['psnr']:.2f}", f"{1000 * one['seconds']:.0f}"]
        for one, two in zip(fixed, drawn, strict=True)
    ]
    names = f"k drawn from {', '.join(map(str, sweep['drawn']))}"
    header = [f"k of N = {sweep['tokens']}", f"trained with k = {sweep['tokens'] // 2}: dB", f"{names}: dB"]
    return table([*header, "ms for the first image"], rows)


def draw_curve(result: dict[str, Any], path: Path) -> None:
    """The headline's PSNR on Set12 during its training."""
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(5, 4))
    samples, values = zip(*result["headline"]["psnr"], strict=True)
    axis.plot(samples, values, marker="o", label="SemanIR")
    axis.axhline(result["total_variation"]["set12"], color="gray", linestyle=":", label="best total variation")
    for (name, published), style in zip(YARDSTICKS.items(), ("--", "-.", "-"), strict=True):
        axis.axhline(published[0], color="gray", linestyle=style, linewidth=1, label=f"{name}, published")
    axis.set(title="Headline, Set12, σ = 25", xlabel="patches", ylabel="PSNR, dB")
    axis.legend(fontsize=7)
    save_figure(figure, path)


def draw_sweep(result: dict[str, Any], path: Path) -> None:
    """PSNR and time against k."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for name, label in (("fixed", "trained with one k"), ("random", "k drawn in each step")):
        rows = result["sweep"]["curves"][name]
        keys = [row["top_k"] for row in rows]
        left.plot(keys, [row["psnr"] for row in rows], marker="o", label=label)
        right.plot(keys, [1000 * row["seconds"] for row in rows], marker="o", label=label)
    left.set(xlabel=f"k of {result['sweep']['tokens']} tokens", ylabel="PSNR on Set12, dB")
    right.set(xlabel=f"k of {result['sweep']['tokens']} tokens", ylabel="ms for the first image", ylim=(0, None))
    for axis in (left, right):
        axis.legend(fontsize=8)
    save_figure(figure, path)


def blocks(result: dict[str, Any]) -> dict[str, str]:
    """The README's tables by the name of their place."""
    versions = version_list(result)
    return {
        "budget": f"{result['device']}; {result['seconds'] / 60:.0f} min in all; seed {result['seed']}; {versions}.",
        "candidates": candidate_table(result["candidates"]),
        "headline": headline_table(result),
        "sweep": sweep_table(result["sweep"]),
    }


if __name__ == "__main__":
    content = read_json(EXAMPLES / "results" / "study.json")
    draw_curve(content, EXAMPLES / "results" / "curve.png")
    draw_sweep(content, EXAMPLES / "results" / "top_k.png")
    write_blocks(blocks(content), EXAMPLES / "README.md")
