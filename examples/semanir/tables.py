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
NAMES = {"semanir": "SemanIR, k = N/2", "dense": "the same, dense windows (k = N)", "swin2sr": "blocks of Swin2SR"}
# Published, grey, σ = 25: Set12 and BSD68. They are trained for days of a GPU.
YARDSTICKS = {"BM3D": (29.97, 28.57), "DnCNN": (30.43, 29.23), "SwinIR": (31.01, 29.50)}
COLUMNS = ["", "parameters", "same time: PSNR, dB", "SSIM", "samples", "s"]
COLUMNS += ["same samples: PSNR, dB", "SSIM", "samples", "s"]


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
        ["noisy image", f"{result['inputs']['noise']:.2f}", ""],
        *([f"{name}, published", *(f"{value:.2f}" for value in values)] for name, values in YARDSTICKS.items()),
    ]
    gaps = [scores["psnr"] - YARDSTICKS["BM3D"][index] for index, scores in enumerate(found.values())]
    gain = row["scores"]["psnr"] - classical["set12"]
    text = f"{gaps[0]:+.2f} and {gaps[1]:+.2f} dB from BM3D, {gain:+.2f} dB from total variation on Set12; "
    text = f"\n\n{text}{row['samples']:,} patches."
    return table(["grey, σ = 25: PSNR, dB / SSIM", "Set12", "BSD68"], rows) + text


def block_table(rows: dict[str, Any]) -> str:
    """The same network with three kinds of blocks."""
    lines = []
    for model, row in rows.items():
        line = [NAMES[model], f"{row['parameters']:,}"]
        for kind in ("time", "samples"):
            run = row[kind]
            line += [f"{run['scores']['psnr']:.2f}", f"{run['scores']['ssim']:.4f}"]
            line += [f"{run['samples']:,}", f"{run['seconds']:.0f}"]
        lines.append(line)
    return table(COLUMNS, lines)


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


def mixed_table(result: dict[str, Any]) -> str:
    """One model for two degradations beside one for each."""
    rows, inputs = result["mixed"], result["inputs"]
    lines = [
        ["degraded", f"{inputs['noise']:.2f}", f"{inputs['jpeg']:.2f}", ""],
        ["model for noise", f"{rows['noise']['scores']['psnr']:.2f}", "", f"{rows['noise']['seconds']:.0f}"],
        ["model for JPEG", "", f"{rows['jpeg']['scores']['psnr']:.2f}", f"{rows['jpeg']['seconds']:.0f}"],
    ]
    for name in ("both", "both, twice the time"):
        values = [rows[name]["scores"][key] for key in ("psnr_gaussian_noise_25", "psnr_jpeg_10")]
        lines.append([f"model for {name}", *(f"{value:.2f}" for value in values), f"{rows[name]['seconds']:.0f}"])
    return table(["Set12, PSNR in dB", "noise, σ = 25", "JPEG, quality 10", "s"], lines)


def all_runs(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every training by its name."""
    runs = {f"candidate, {name}": row for name, row in result["candidates"]["rows"].items()}
    runs["headline"] = result["headline"]
    for model, row in result["denoising"].items():
        runs |= {f"denoising, {model}, {kind}": row[kind] for kind in ("time", "samples")}
    runs["k drawn at random"] = result["sweep"]["run"]
    return runs | {f"model for {name}": row for name, row in result["mixed"].items() if name != "noise"}


def run_table(result: dict[str, Any]) -> str:
    """Every training with its budget."""
    lines = []
    for name, run in all_runs(result).items():
        arguments = run["arguments"]
        scores = ", ".join(f"{metric} {value:.4g}" for metric, value in run["scores"].items())
        numbers = [f"{run[key]:,.0f}" for key in ("steps", "samples", "seconds")]
        lines.append([name, *numbers, f"{arguments['learning_rate']:g}", str(arguments["seed"]), scores])
    return table(["run", "steps", "patches", "seconds", "learning rate", "seed", "test"], lines)


def draw_curves(result: dict[str, Any], path: Path) -> None:
    """The headline's PSNR on Set12, and the training loss of the comparisons' runs of equal time."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    samples, values = zip(*result["headline"]["psnr"], strict=True)
    axes[0].plot(samples, values, marker="o", label="SemanIR")
    axes[0].axhline(result["total_variation"]["set12"], color="gray", linestyle=":", label="best total variation")
    for (name, published), style in zip(YARDSTICKS.items(), ("--", "-.", "-"), strict=True):
        axes[0].axhline(published[0], color="gray", linestyle=style, linewidth=1, label=f"{name}, published")
    axes[0].set(title="Headline, Set12, σ = 25", xlabel="patches", ylabel="PSNR, dB")
    for model, row in result["denoising"].items():
        samples, losses = zip(*row["time"]["losses"], strict=True)
        axes[1].plot(samples, losses, label=NAMES[model], linewidth=1)
    axes[1].set(title="Other blocks, equal time", xlabel="patches", ylabel="training loss", yscale="log")
    for axis in axes:
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
        "denoising": block_table(result["denoising"]),
        "sweep": sweep_table(result["sweep"]),
        "mixed": mixed_table(result),
        "runs": run_table(result),
    }


if __name__ == "__main__":
    content = read_json(EXAMPLES / "results" / "study.json")
    draw_curves(content, EXAMPLES / "results" / "curves.png")
    draw_sweep(content, EXAMPLES / "results" / "top_k.png")
    write_blocks(blocks(content), EXAMPLES / "README.md")
