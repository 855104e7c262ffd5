"""Pictures and README tables of the study, from study.json alone.

python examples/emr/tables.py     writes the tables again
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from studies import save_figure, table, version_list, write_blocks  # noqa: E402  found through the line above

EXAMPLES = Path(__file__).resolve().parent
NAMES = {
    "average": "weight average",
    "task_arithmetic": "task arithmetic",
    "ties": "TIES",
    "dare_ties": "DARE-TIES",
    "elect": "elect only",
}


def draw_curve(curve: dict[str, Any], individual: dict[str, float], path: Path) -> None:
    """Mean macro F1 of the first n tasks against n."""
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6.4, 4))
    counts = [int(count) for count in curve]
    axis.plot(counts, [individual[str(count)] for count in counts], "k--", label="individual models")
    names = [name for name in curve["2"] if name not in ("bytes", "seconds")]
    for name in names:
        label = "weight average" if name == "average" else f"EMR, rescale {name}"
        axis.plot(counts, [curve[str(count)][name] for count in counts], marker="o", label=label)
    axis.set(xlabel="tasks merged (smallest first)", ylabel="mean macro F1 of these tasks", ylim=(0, None))
    axis.legend()
    save_figure(figure, path, dpi=110)


def draw_features(features: dict[str, Any], path: Path) -> None:
    """One t-SNE picture for each step of the merge; colours are the true classes."""
    from matplotlib import pyplot

    places, labels = features["places"], features["labels"]
    figure, axes = pyplot.subplots(1, len(places), figsize=(3.2 * len(places), 3.4))
    for axis, (name, points) in zip(axes, places.items(), strict=True):
        axis.scatter(*zip(*points, strict=True), c=labels, cmap="tab10", vmin=0, vmax=9, s=6)
        axis.set_title(f"{features['task']}: {name}", fontsize=10)
        axis.axis("off")
    save_figure(figure, path, dpi=110)


def percent(value: float) -> str:
    """Macro F1 in percent."""
    return f"{100 * value:.1f}"


def megabytes(value: float) -> str:
    """Bytes in MB."""
    return f"{value / 1e6:.1f}"


def score_rows(tweets: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The rows of the main table in their order."""
    rows = [("individual", tweets["individual"])]
    rows += [(NAMES[name] + chosen_setting(row), row) for name, row in tweets["single"].items()]
    return rows + [(f"**EMR**, rescale `{mode}`", row) for mode, row in tweets["emr"].items()]


def chosen_setting(row: dict[str, Any]) -> str:
    """The numbers that were chosen on the validation tweets."""
    config = row["config"]
    parts = [f"{name} {config[name]}" for name in ("weight", "drop") if name in config]
    return f" ({', '.join(parts)})" if parts else ""


def main_table(tweets: dict[str, Any]) -> str:
    """Macro F1 of each task for each method."""
    individual = tweets["individual"]
    tasks = list(individual["scores"])
    rows = []
    for name, row in score_rows(tweets):
        share = 100 * row["mean"] / individual["mean"]
        rows.append([name, *(percent(row["scores"][task]) for task in tasks), percent(row["mean"]), f"{share:.1f} %"])
    return table(["", *tasks, "mean", "of individual"], rows)


def size_table(tweets: dict[str, Any]) -> str:
    """What each way weighs and how long the merge from the Hub took."""
    models = sum(tweets["checkpoint_bytes"].values())
    single, emr = tweets["single"], tweets["emr"]["global"]
    base, seconds = tweets["base_bytes"], tweets["merge_seconds"]
    rows = [[f"{len(tweets['checkpoint_bytes'])} fine-tunes", megabytes(models), ""]]
    rows += [
        [NAMES[name] + " (encoder only)", megabytes(row["bytes"]), f"{seconds[name]:.1f}"]
        for name, row in single.items()
    ]
    rows.append(["EMR artifact: unified model, masks, heads", megabytes(emr["bytes"]), f"{seconds['emr']:.1f}"])
    rows.append(["EMR artifact and the base that it needs", megabytes(emr["bytes"] + base), ""])
    return table(["", "MB", "merge from the Hub, s"], rows)


def ablation_table(tweets: dict[str, Any]) -> str:
    """The steps of the method, and mask and rescale after other merges."""
    emr, after = tweets["emr"], tweets["mask_and_rescale_after"]
    rows = [
        ["elect", percent(tweets["single"]["elect"]["mean"])],
        ["elect, rescale", percent(tweets["ablation"]["elect_rescale"]["mean"])],
        ["elect, mask", percent(emr["none"]["mean"])],
        ["elect, mask, rescale: EMR", percent(emr["global"]["mean"])],
    ]
    for name, row in after.items():
        rows.append([f"{NAMES[name]}, as above", percent(tweets["single"][name]["mean"])])
        rows.append([f"{NAMES[name]}, mask, rescale", percent(row["mean"])])
    return table(["", "mean macro F1"], rows)


def curve_table(tweets: dict[str, Any]) -> str:
    """The curve in numbers."""
    curve = tweets["curve"]["merged"]
    individual = tweets["curve"]["individual"]
    names = [name for name in curve["2"] if name not in ("bytes", "seconds")]
    labels = ["weight average" if name == "average" else f"EMR `{name}`" for name in names]
    rows = [
        [count, percent(individual[count]), *(percent(row[name]) for name in names), megabytes(row["bytes"])]
        for count, row in curve.items()
    ]
    return table(["tasks", "individual", *labels, "artifact, MB"], rows)


def grid_table(tweets: dict[str, Any]) -> str:
    """What was tried for the baselines."""
    rows = []
    for method, grid in tweets["validation_grids"].items():
        for entry in grid:
            setting = ", ".join(f"{name} {entry[name]}" for name in ("weight", "drop") if name in entry)
            rows.append([f"{NAMES[method]}, {setting}", percent(entry["mean"])])
    return table(["", "mean macro F1, validation"], rows)


def router_table(tweets: dict[str, Any]) -> str:
    """The router beside the oracle."""
    rows = [
        [task, *(percent(row[key]) for key in ("found", "routed", "told"))]
        for task, row in [*tweets["router"]["tasks"].items(), ("mean", tweets["router"]["mean"])]
    ]
    return table(["", "tweets that find their task, %", "macro F1, routed", "macro F1, task told"], rows)


def restorer_table(restorers: dict[str, Any]) -> str:
    """PSNR of the four restorers."""
    rows = restorers["rows"]
    names = list(rows["individual"]["scores"])
    lines = [
        [NAMES.get(name, name), *(f"{row['scores'][key]:.2f}" for key in names), f"{row['mean']:.2f}"]
        for name, row in rows.items()
    ]
    return table(["PSNR, dB", *names, "mean"], lines)


def run_table(runs: dict[str, Any]) -> str:
    """Every training with its budget."""
    rows = [
        [
            name,
            *(f"{run[key]:,.0f}" for key in ("steps", "samples", "seconds")),
            f"{run['learning_rate']:g}",
            str(run["seed"]),
            run["mixed_precision"],
            ", ".join(f"{metric} {value:.3g}" for metric, value in run["validation"].items()),
        ]
        for name, run in runs.items()
    ]
    header = [
        "run",
        "steps",
        "samples",
        "seconds",
        "learning rate",
        "seed",
        "mixed precision",
        "at the end, validation",
    ]
    return table(header, rows)


def blocks(result: dict[str, Any]) -> dict[str, str]:
    """The README's tables by the name of their place."""
    tweets = result["tweets"]
    minutes = {name: f"{seconds / 60:.0f} min" for name, seconds in result["seconds"].items()}
    return {
        "scores": main_table(tweets),
        "sizes": size_table(tweets),
        "ablation": ablation_table(tweets),
        "curve": curve_table(tweets),
        "grids": grid_table(tweets),
        "router": router_table(tweets),
        "restorers": restorer_table(result["restorers"]),
        "runs": run_table(result["runs"]),
        "budget": f"{result['device']}; training {minutes['training']}, merging and scoring "
        f"{minutes['merging_and_scoring']}; seed {result['seed']}; {version_list(result)}.",
    }


if __name__ == "__main__":
    content = json.loads((EXAMPLES / "results" / "study.json").read_text(encoding="utf-8"))
    write_blocks(blocks(content), EXAMPLES / "README.md")
