"""Curves and README tables of the study, from study.json alone.

python examples/mrconv/tables.py     writes tables and curves again
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from studies import save_figure, table, version_list, write_blocks  # noqa: E402  found through the line above

EXAMPLES = Path(__file__).resolve().parent
NAMES = {
    "fourier": "MRConv, Fourier",
    "dilated": "MRConv, dilated",
    "sparse": "MRConv, sparse",
    "fourier_sparse": "MRConv, Fourier + sparse",
    "implicit": "MRConv, implicit (MLP)",
    "transformer": "Transformer encoder (ModernBERT layers)",
    "mamba2": "Mamba 2, slow path",
}
TITLES = {
    "digits": "Spoken digits, raw 8 kHz",
    "scifar-grey": "Sequential CIFAR-10, grey",
    "scifar-colour": "Sequential CIFAR-10, colour",
    "listops": "ListOps",
}
SPLITS = {"fsdd": "official (recordings 0-4)", "unseen": "unseen speaker (theo)"}


def percent(scores: dict[str, float]) -> str:
    """Accuracy in percent."""
    return f"{100 * scores['accuracy']:.1f}"


def headline_table(headline: dict[str, Any]) -> str:
    """Spoken digits."""
    rows = []
    for name, row in headline.items():
        seconds = row["merged"]["seconds_per_recording"]
        rows.append(
            [
                SPLITS[name],
                percent(row["scores"]),
                percent(row["decimated"]),
                percent(row["merged"]["scores"]),
                f"{1000 * seconds['branches']:.1f}",
                f"{1000 * seconds['merged']:.1f}",
                f"{row['merged']['difference']:.1e}",
                f"{row['samples']:,}",
                f"{row['seconds'] / 60:.1f}",
            ]
        )
    header = ["split", "8 kHz, %", "4 kHz, not trained again, %", "merged, %", "ms a recording", "merged, ms"]
    return table([*header, "relative difference of logits", "samples", "minutes"], rows)


def comparison_table(rows: dict[str, Any]) -> str:
    """One data set: every model for the same seconds and for the same samples."""
    decimated = any("decimated" in row for row in rows.values())
    lines = []
    for model, row in rows.items():
        timed, same = row["time"], row["samples"]
        lines.append(
            [
                NAMES[model],
                f"{row['parameters']:,}",
                percent(timed["scores"]),
                *([percent(row["decimated"]) if "decimated" in row else ""] if decimated else []),
                f"{timed['samples']:,}",
                f"{timed['seconds']:.0f}",
                percent(same["scores"]),
                f"{same['samples']:,}",
                f"{same['seconds']:.0f}",
            ]
        )
    header = ["", "parameters", "same time: accuracy, %", *(["at 4 kHz, %"] if decimated else [])]
    return table([*header, "samples", "s", "same samples: accuracy, %", "samples", "s"], lines)


def ablation_table(rows: dict[str, Any]) -> str:
    """Parts changed one at a time."""
    lines = [
        [
            name,
            f"{row['parameters']:,}",
            percent(row["scores"]),
            f"{row['scores']['loss']:.3f}",
            f"{row['samples']:,}",
            f"{row['seconds']:.0f}",
        ]
        for name, row in rows.items()
    ]
    return table(["", "parameters", "accuracy, %", "cross entropy", "samples", "s"], lines)


def language_table(row: dict[str, Any]) -> str:
    """The language model and its generation."""
    made = row["generation"]
    equal, seconds = made["equal"], made["seconds_per_token"]
    lines = [[name, "yes" if equal[name] else "**no**", f"{1000 * seconds[name]:.1f}"] for name in equal]
    facts = (
        f"{row['parameters']:,} parameters, {row['samples']:,} windows of 512 bytes in {row['seconds']:.0f} s: "
        f"{row['scores']['bits_per_byte']:.3f} bits per byte on topics that were kept back. Largest relative "
        f"difference of logits from the full forward: {made['difference']['streaming']:.1e} streaming, "
        f"{made['difference']['merged']:.1e} merged.\n\n"
    )
    sample = "\n".join(f"> {line}".rstrip() for line in made["texts"][0].splitlines())
    heading = ["generation", "equals the full forward, token by token", "ms a token, 3 texts at once"]
    return f"{facts}{table(heading, lines)}\n\nA sample, greedy:\n\n{sample}"


def all_runs(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every training by its name."""
    runs = {SPLITS[name]: row for name, row in result["headline"].items()}
    for name, rows in result["comparisons"].items():
        for model, row in rows.items():
            runs |= {f"{name}, {model}, {kind}": row[kind] for kind in ("time", "samples")}
    runs |= {f"ablation, {name}": row for name, row in result["ablation"].items()}
    return {**runs, "language model": result["language_model"]}


def run_table(result: dict[str, Any]) -> str:
    """Every training with its budget."""
    lines = []
    for name, run in all_runs(result).items():
        arguments = run["arguments"]
        lines.append(
            [
                name,
                *(f"{run[key]:,.0f}" for key in ("steps", "samples", "seconds")),
                f"{arguments['learning_rate']:g}",
                str(arguments["seed"]),
                ", ".join(f"{metric} {value:.3g}" for metric, value in run["scores"].items()),
            ]
        )
    return table(["run", "steps", "samples", "seconds", "learning rate", "seed", "test"], lines)


def draw_curves(result: dict[str, Any], path: Path) -> None:
    """Training loss against samples, of the headline and of the comparisons' runs of equal time."""
    from matplotlib import pyplot

    panels = {"Spoken digits, headline": {SPLITS[name]: row for name, row in result["headline"].items()}}
    for name, rows in result["comparisons"].items():
        panels[TITLES[name]] = {NAMES[model]: row["time"] for model, row in rows.items()}
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.6 * len(panels), 4))
    for axis, (title, runs) in zip(axes, panels.items(), strict=True):
        for label, run in runs.items():
            samples, losses = zip(*run["losses"], strict=True)
            axis.plot(samples, losses, label=label, linewidth=1)
        axis.set(title=title, xlabel="samples", ylabel="training loss", xscale="log")
        axis.legend(fontsize=7)
    save_figure(figure, path)


def blocks(result: dict[str, Any]) -> dict[str, str]:
    """The README's tables by the name of their place."""
    versions = version_list(result)
    return {
        "budget": f"{result['device']}; {result['seconds'] / 60:.0f} min in all; seed {result['seed']}; {versions}.",
        "headline": headline_table(result["headline"]),
        **{name: comparison_table(rows) for name, rows in result["comparisons"].items()},
        "ablation": ablation_table(result["ablation"]),
        "language": language_table(result["language_model"]),
        "runs": run_table(result),
    }


if __name__ == "__main__":
    content = json.loads((EXAMPLES / "results" / "study.json").read_text(encoding="utf-8"))
    draw_curves(content, EXAMPLES / "results" / "curves.png")
    write_blocks(blocks(content), EXAMPLES / "README.md")
