"""Curves and README tables of the study, from what is measured."""

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments import save_figure, spread, table, version_list

EXAMPLES = Path(__file__).resolve().parent
VARIANTS = {
    "token-weighted": "class as a token, controls weighted by γ(t)",
    "token-constant": "class as a token, controls constant",
    "adaln-weighted": "class in adaLN, controls weighted by γ(t)",
    "adaln-constant": "class in adaLN, controls constant",
}
ALPHAS = {"constant": "constant", **{f"alpha-{a}": f"α = {a}" for a in (1, 2, 4, 8)}}
MEASURES = ["feature distance", "kernel distance", "accuracy"]


def measured(values: dict[str, float]) -> list[str]:
    """The cells of `MEASURES`."""
    numbers = [f"{values['feature_distance']:.2f}", f"{values['kernel_distance']:.3f}"]
    return [*numbers, f"{100 * values['accuracy']:.1f} %"]


def judge_table(row: dict[str, Any]) -> str:
    """The judge on real pictures."""
    lines = []
    for side in ("32", "16"):
        real = row["real"][side]
        lines.append(
            [f"{side} × {side}", f"{100 * row['accuracy'][side]:.1f} %", *measured(real), str(real["images"])]
        )
    header = ["real test pictures", "accuracy on 10,000", *MEASURES, "pictures"]
    return f"{table(header, lines)}\n\n{row['parameters']:,} parameters, {row['steps']:,} steps of 128 pictures."


def control_table(first: str, rows: dict[str, list[dict[str, Any]]], names: dict[str, str]) -> str:
    """A line for each kind of run: its images, and what the size control changes."""
    lines = []
    for name, found in rows.items():
        line = [names[name], str(len(found))]
        line.append(spread([row["measured"]["feature_distance"] for row in found], 2))
        line.append(spread([100 * row["measured"]["accuracy"] for row in found], 1))
        for measure, digits in (("content_distance", 4), ("detail_distance", 4), ("agreement", 3)):
            line.append(spread([row["control"][measure] for row in found], digits))
        lines.append(line)
    header = [first, "seeds", "feature distance", "accuracy, %", "content drift", "detail changed", "same class seen"]
    row = next(iter(rows.values()))[0]
    told = f"{row['steps']:,} steps, {row['measured']['images']} images of each run."
    return f"{table(header, lines)}\n\nMean ± standard deviation over the seeds; {told}"


def size_table(claim: dict[str, Any]) -> str:
    """Detail and accuracy, size by size."""
    lines, real = [], claim["real"]
    sources = {VARIANTS[name]: [row["control"] for row in rows] for name, rows in claim["rows"].items()}
    for name, controls in {**sources, "real pictures reduced to this size": [real]}.items():
        line = [name]
        for index in range(len(real["sizes"])):
            energy = mean(control["high_frequency_energy"][index] for control in controls)
            accuracy = mean(control["accuracy"][index] for control in controls)
            line.append(f"{1000 * energy:.2f} / {100 * accuracy:.0f} %")
        lines.append(line)
    header = [f"original {size} × {size}" for size in real["sizes"]]
    return table(["1000 × high-frequency energy / accuracy", *header], lines)


def transfer_table(rows: dict[str, Any]) -> str:
    """Feature distances on the way."""
    lines = []
    for name, row in rows.items():
        points = [f"{point['feature_distance']:.2f}" for point in row["curve"]]
        lines.append([name, *points, f"{100 * row['curve'][-1]['accuracy']:.1f} %"])
    curve = next(iter(rows.values()))["curve"]
    points = [f"after {point['samples']:,}" for point in curve]
    text = table(["16 → 32: feature distance", *points, "accuracy"], lines)
    return f"{text}\n\nEach point: {curve[-1]['images']} images. One seed."


# The blocks of each part: its name in the README, and what writes it.
BLOCKS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "judge": ("judge", judge_table),
    "claim": ("claim", lambda claim: control_table("conditioning", claim["rows"], VARIANTS)),
    "sizes": ("claim", size_table),
    "alpha": ("alpha", lambda rows: control_table("weight of the sizes", rows, ALPHAS)),
    "transfer": ("transfer", transfer_table),
}


def blocks(result: dict[str, Any]) -> dict[str, str]:
    """The README's tables of the claims that are measured, by the name of their place."""
    made = {name: write(result[part]) for name, (part, write) in BLOCKS.items() if part in result}
    if "judge" in result:
        row = result["judge"]
        made["budget"] = f"{row['hardware']}; {result['seconds'] / 60:.0f} min in all, on a busy machine; "
        made["budget"] += f"{version_list(row)}."
    return made


def draw_convergence(rows: dict[str, Any], path: Path) -> None:
    """Feature distance and accuracy of the transfers."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    for name, row in rows.items():
        samples = [point["samples"] for point in row["curve"]]
        for axis, key in zip(axes, ("feature_distance", "accuracy"), strict=True):
            axis.plot(samples, [point[key] for point in row["curve"]], marker="o", label=name)
    for axis, key in zip(axes, ("feature distance", "accuracy"), strict=True):
        axis.set(title="16 → 32", xlabel="pictures at 32 × 32", ylabel=key)
        axis.legend(fontsize=8)
    save_figure(figure, path)
