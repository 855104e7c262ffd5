"""Curves and README tables of the study, from study.json alone.

python examples/disentangled_dit/tables.py     writes tables and curves again
"""

import json
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from studies import save_figure, table, version_list, write_blocks  # noqa: E402  found through the line above

EXAMPLES = Path(__file__).resolve().parent
VARIANTS = {"disentangled": "class as a token, controls weighted by γ(t)", "adaln": "class and controls in adaLN"}
PEERS = {
    "ours": "Disentangled DiT",
    "masked": "the same, masked-latent training",
    "unet": "UNet (`UNet2DModel`)",
    "dit": "DiT",
    "pixart": "PixArt-α",
    "sd3": "mmDiT of Stable Diffusion 3",
}
MEASURES = ["feature distance", "kernel distance", "accuracy"]


def measured(values: dict[str, float]) -> list[str]:
    """The cells of `MEASURES`."""
    numbers = [f"{values['feature_distance']:.2f}", f"{values['kernel_distance']:.3f}"]
    return [*numbers, f"{100 * values['accuracy']:.1f} %"]


def budget(row: dict[str, Any]) -> list[str]:
    """Parameters, steps, samples and seconds of a run."""
    return [f"{row['parameters']:,}", f"{row['steps']:,}", f"{row['samples']:,}", f"{row['seconds']:.0f}"]


def spread(values: list[float], digits: int) -> str:
    """Mean and standard deviation over the seeds."""
    return f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}"


def headline_table(result: dict[str, Any]) -> str:
    """CIFAR-10 in pixels beside real images."""
    rows = []
    for size, name in (("16", "pretraining"), ("32", "headline")):
        row, real = result[name], result["classifier"]["real"][size]
        images = row["measured"]["images"]
        rows.append([f"{size} × {size}, {images} generated", *measured(row["measured"]), *budget(row)])
        rows.append([f"{size} × {size}, {real['images']} real test images", *measured(real), "", "", "", ""])
    return table(["images", *MEASURES, "parameters", "steps", "pictures", "s"], rows)


def claim_table(claim: dict[str, Any]) -> str:
    """The two conditionings, means over the seeds."""
    lines = []
    for variant, rows in claim["rows"].items():
        line = [VARIANTS[variant], f"{rows[0]['parameters']:,}"]
        line.append(spread([row["measured"]["feature_distance"] for row in rows], 2))
        line.append(spread([100 * row["measured"]["accuracy"] for row in rows], 1))
        for name, digits in (("content_distance", 4), ("detail_distance", 4), ("agreement", 3)):
            line.append(spread([row["control"][name] for row in rows], digits))
        lines.append(line)
    header = ["conditioning", "parameters", "feature distance", "accuracy, %"]
    text = table([*header, "content drift", "detail changed", "same class seen"], lines)
    rows = next(iter(claim["rows"].values()))
    return f"{text}\n\n{len(rows)} seeds, mean ± standard deviation; {rows[0]['steps']:,} steps each."


def control_table(claim: dict[str, Any]) -> str:
    """What the size control does, size by size."""
    lines, real = [], claim["real"]
    sources = {VARIANTS[name]: [row["control"] for row in rows] for name, rows in claim["rows"].items()}
    for name, controls in {**sources, "real pictures made so small": [real]}.items():
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
        lines.append([name, *points, f"{100 * row['curve'][-1]['accuracy']:.1f} %", f"{row['seconds']:.0f}"])
    curve = next(iter(rows.values()))["curve"]
    points = [f"after {point['samples']:,}" for point in curve]
    text = table(["16 → 32: feature distance", *points, "accuracy", "s"], lines)
    return f"{text}\n\nEach point: {curve[-1]['images']} images."


def text_table(rows: dict[str, Any]) -> str:
    """Three kinds of padding."""
    lines = []
    for padding, row in rows.items():
        shares = [f"{100 * row['measured'][name]:.1f} %" for name in ("lightness", "colour")]
        lines.append(
            [f"`{padding}`", *measured(row["measured"]), *shares, f"{row['steps']:,}", f"{row['seconds']:.0f}"]
        )
    return table(["padding", *MEASURES, "lightness", "colour", "steps", "s"], lines)


def peer_table(result: dict[str, Any]) -> str:
    """One recipe, one budget."""
    lines = [
        [
            PEERS[name],
            *measured(row["measured"]),
            *budget(row),
            f"{1000 * row['seconds_per_step']:.0f}",
        ]
        for name, row in result["peers"].items()
    ]
    real = result["classifier"]["real"]["16"]
    lines.append([f"real, {real['images']} test images", *measured(real), *[""] * 5])
    return table(["16 × 16", *MEASURES, "parameters", "steps", "pictures", "s", "ms a step"], lines)


def all_runs(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every training by its name."""
    runs = {"classifier": result["classifier"], "pre-training, 16 × 16": result["pretraining"]}
    runs["headline"] = result["headline"]
    for variant, rows in result["claim"]["rows"].items():
        runs |= {f"{variant}, seed {index}": row for index, row in enumerate(rows)}
    runs |= {f"transfer, {name}": row for name, row in result["transfer"].items()}
    runs |= {f"text, {name}": row for name, row in result["text"].items()}
    return runs | {f"comparison, {name}": row for name, row in result["peers"].items()}


def run_table(result: dict[str, Any]) -> str:
    """Every training with its budget."""
    lines = []
    for name, run in all_runs(result).items():
        arguments = run["arguments"]
        scores = ", ".join(f"{metric} {value:.4g}" for metric, value in run["scores"].items())
        numbers = [*budget(run), f"{1000 * run['seconds_per_step']:.0f}"]
        batch = str(arguments["per_device_train_batch_size"])
        lines.append([name, *numbers, batch, f"{arguments['learning_rate']:g}", str(arguments["seed"]), scores])
    header = ["run", "parameters", "steps", "pictures", "s", "ms a step", "batch", "learning rate", "seed"]
    return table([*header, "250 test pictures"], lines)


def draw_curves(result: dict[str, Any], path: Path) -> None:
    """The headline's loss and feature distance, and the losses of the comparison."""
    from matplotlib import pyplot
    from matplotlib.ticker import EngFormatter

    figure, (losses, distances, others) = pyplot.subplots(1, 3, figsize=(15, 4))
    losses.plot(*zip(*result["headline"]["losses"], strict=True), linewidth=1)
    losses.set(title="Headline, 32 × 32", xlabel="pictures", ylabel="training loss", yscale="log")
    points = result["headline"]["curve"]
    samples = [point["samples"] for point in points]
    distances.plot(samples, [point["feature_distance"] for point in points], marker="o", label="feature distance")
    distances.set(title=f"Headline, {points[-1]['images']} images", xlabel="pictures", ylabel="feature distance")
    right = distances.twinx()
    right.plot(samples, [100 * point["accuracy"] for point in points], marker="s", color="gray", label="accuracy")
    right.set(ylabel="accuracy, %", ylim=(0, 100))
    for name, row in result["peers"].items():
        others.plot(*zip(*row["losses"], strict=True), linewidth=1, label=PEERS[name])
    others.set(title="One recipe, planned for equal time", xlabel="pictures", ylabel="training loss", yscale="log")
    others.legend(fontsize=7)
    for axis in (losses, distances, others):
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    save_figure(figure, path)


def draw_convergence(result: dict[str, Any], path: Path) -> None:
    """Feature distance and accuracy of the four transfers."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    for name, row in result["transfer"].items():
        samples = [point["samples"] for point in row["curve"]]
        for axis, key in zip(axes, ("feature_distance", "accuracy"), strict=True):
            axis.plot(samples, [point[key] for point in row["curve"]], marker="o", label=name)
    for axis, key in zip(axes, ("feature distance", "accuracy"), strict=True):
        axis.set(title="16 → 32", xlabel="pictures at 32 × 32", ylabel=key)
        axis.legend(fontsize=8)
    save_figure(figure, path)


def blocks(result: dict[str, Any]) -> dict[str, str]:
    """The README's tables by the name of their place."""
    return {
        "budget": f"{result['device']}; {result['seconds'] / 60:.0f} min in all; {version_list(result)}.",
        "headline": headline_table(result),
        "claim": claim_table(result["claim"]),
        "control": control_table(result["claim"]),
        "transfer": transfer_table(result["transfer"]),
        "text": text_table(result["text"]),
        "peers": peer_table(result),
        "runs": run_table(result),
    }


if __name__ == "__main__":
    content = json.loads((EXAMPLES / "results" / "study.json").read_text(encoding="utf-8"))
    draw_curves(content, EXAMPLES / "results" / "curves.png")
    draw_convergence(content, EXAMPLES / "results" / "transfer.png")
    write_blocks(blocks(content), EXAMPLES / "README.md")
