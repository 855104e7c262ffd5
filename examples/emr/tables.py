"""Pictures and README tables of the study, from the results of its three sets alone.

python examples/emr/tables.py     writes tables and pictures again
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from hf_ext.files import read_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments import save_figure, table, version_list, write_blocks

EXAMPLES = Path(__file__).resolve().parent
NAMES = {
    "individual": "individual models",
    "base": "base",
    "average": "weight average",
    "task_arithmetic": "task arithmetic",
    "ties": "TIES",
    "fisher": "Fisher",
    "regmean": "RegMean",
    "elect": "elect only",
    "adamerging": "AdaMerging",
    "emr": "**EMR**",
    "emr tensor": "EMR, λ by `tensor`",
    "emr tensor_l2": "EMR, λ by `tensor_l2`",
    "onebit": "1-bit deltas",
    "ternary": "ternary deltas",
}
LABELS = {
    "tweets": "tweets, MiniLM: macro F1, %",
    "pictures": "pictures, ViT: accuracy, %",
    "texts": "texts, GPT-2: bits per byte, less is better",
}
# What a task lost of its own model's score by what was done to its vector.
LOSSES = {
    "lost_emr": "lost by EMR",
    "lost_signs": "by the mask alone",
    "lost_magnitudes": "by the magnitudes alone",
    "lost_bit": "by 1-bit deltas",
}
Results = dict[str, dict[str, Any]]


def read_results(folder: Path) -> Results:
    """The reports of the sets."""
    return {name: read_json(folder / name / "study.json") for name in LABELS}


def over_seeds(result: dict[str, Any], read: Any) -> tuple[float, float]:
    """Mean and standard deviation over the seeds of what is read of each, in percent where more is better."""
    factor = 100 if result["greater_is_better"] else 1
    values = [factor * read(seed) for seed in result["seeds"].values()]
    return float(np.mean(values)), float(np.std(values, ddof=1))


def digits(result: dict[str, Any]) -> int:
    """Decimals of a score."""
    return 1 if result["greater_is_better"] else 3


def first_seed(result: dict[str, Any]) -> dict[str, Any]:
    """One seed, for what is the same in all."""
    return next(iter(result["seeds"].values()))


def mean_text(result: dict[str, Any], method: str) -> str:
    """The mean over tasks and seeds ± its standard deviation over seeds."""
    if method not in first_seed(result)["rows"]:
        return ""
    mean, deviation = over_seeds(result, lambda seed: seed["rows"][method]["mean"])
    return f"{mean:.{digits(result)}f} ± {deviation:.{digits(result)}f}"


def size_text(result: dict[str, Any], method: str) -> str:
    """MB of what a method leaves; 1-bit and ternary deltas and EMR want the base beside it."""
    seed = first_seed(result)
    size = seed["base_bytes"] if method == "base" else seed["rows"].get(method, {}).get("bytes")
    return "" if size is None else f"{size / 1e6:.2f}" if size < 1e7 else f"{size / 1e6:.1f}"


def summary_table(results: Results) -> str:
    """Every method on every set."""
    rows = [
        [name, *(text for result in results.values() for text in (mean_text(result, key), size_text(result, key)))]
        for key, name in NAMES.items()
    ]
    return table(["", *(text for label in LABELS.values() for text in (label, "MB"))], rows)


def task_table(result: dict[str, Any]) -> str:
    """Every method on every task of a set, means over the seeds."""
    tasks = list(first_seed(result)["rows"]["individual"]["scores"])
    rows = []
    for method in first_seed(result)["rows"]:
        values = [
            over_seeds(result, lambda seed, row=method, task=task: seed["rows"][row]["scores"][task])[0]
            for task in tasks
        ]
        rows.append([NAMES[method], *(f"{value:.{digits(result)}f}" for value in values)])
    return table(["", *tasks], rows)


def task_measures(result: dict[str, Any], task: str) -> dict[str, float]:
    """Reasons of a task's row: means over the seeds of what merging did to its task vector, and of the losses."""
    factor = 100 if result["greater_is_better"] else -1

    def read(seed: dict[str, Any]) -> dict[str, float]:
        rows, parts = seed["rows"], seed["parts"]
        emr, bit = (
            next(entry for entry in rows[method]["measures"] if entry["task"] == task) for method in ("emr", "onebit")
        )
        changed = (rows["emr"], parts["own magnitudes"], parts["own signs"], rows["onebit"])
        lost = [factor * (rows["individual"]["scores"][task] - row["scores"][task]) for row in changed]
        return {
            "norm": emr["norm_to_base"],
            "conflict": emr["sign_conflict"]["task_vector"],
            "error_emr": emr["error"]["global"],
            "error_l2": emr["error"]["tensor_l2"],
            "error_bit": bit["error"]["one_bit"],
            **dict(zip(LOSSES, lost, strict=True)),
        }

    found = [read(seed) for seed in result["seeds"].values()]
    return {key: float(np.mean([values[key] for values in found])) for key in found[0]}


def reason_table(results: Results) -> str:
    """The part of each task's vector that was kept, and the cost of the rest."""
    rows = []
    for name, result in results.items():
        for task in first_seed(result)["rows"]["individual"]["scores"]:
            measures = task_measures(result, task)
            shares = [f"{100 * measures[key]:.0f}" for key in ("norm", "conflict")]
            errors = [f"{measures[key]:.2f}" for key in ("error_emr", "error_l2", "error_bit")]
            losses = [f"{measures[key]:.{digits(result)}f}" for key in LOSSES]
            rows.append([f"{name}: {task}", *shares, *errors, *losses])
    header = ["", "‖τ‖ / ‖W₀‖, %", "signs that lost, %", "error, EMR", "EMR, `tensor_l2`", "1-bit", *LOSSES.values()]
    return table(header, rows)


def draw_scores(results: Results, path: Path) -> None:
    """Mean and standard deviation over seeds of every method, a panel for each set."""
    from matplotlib import pyplot

    figure, (axes,) = pyplot.subplots(1, len(results), figsize=(4 * len(results), 4.2), sharey=True, squeeze=False)
    shown = list(NAMES)[::-1]
    for axis, (name, result) in zip(axes, results.items(), strict=True):
        for place, method in enumerate(shown):
            if method in first_seed(result)["rows"]:
                mean, deviation = over_seeds(result, lambda seed, method=method: seed["rows"][method]["mean"])
                axis.errorbar(mean, place, xerr=deviation, fmt="o", capsize=3, color="C1" if "emr" in method else "C0")
        individual, _ = over_seeds(result, lambda seed: seed["rows"]["individual"]["mean"])
        axis.axvline(individual, color="gray", linestyle=":")
        axis.set_xlabel(LABELS[name], fontsize=9)
    axes[0].set_yticks(range(len(shown)), [NAMES[method].replace("*", "").replace("`", "") for method in shown])
    save_figure(figure, path, dpi=80)


def mean_of_first(seed: dict[str, Any], method: str, count: int) -> float:
    """The mean over the first tasks, merged alone."""
    if method == "individual":
        return float(np.mean(list(seed["rows"][method]["scores"].values())[:count]))
    return float(seed["curve"][str(count)][method])


def draw_curve(results: Results, path: Path) -> None:
    """Means of the first n tasks, merged alone, against n, a panel for each set."""
    from matplotlib import pyplot

    figure, (axes,) = pyplot.subplots(1, len(results), figsize=(4 * len(results), 3.4), squeeze=False)
    for axis, (name, result) in zip(axes, results.items(), strict=True):
        counts = sorted(map(int, first_seed(result)["curve"]))
        for method, style in (("individual", "k:"), ("emr", "C1-"), ("average", "C0-")):
            points = [over_seeds(result, lambda seed, n=n, name=method: mean_of_first(seed, name, n)) for n in counts]
            means, deviations = zip(*points, strict=True)
            axis.errorbar(counts, means, yerr=deviations, fmt=style, capsize=3, label=NAMES[method].replace("*", ""))
        axis.set_xlabel("tasks merged")
        axis.set_xticks(counts)
        axis.set_ylabel(LABELS[name], fontsize=8)
    axes[0].legend(fontsize=8)
    save_figure(figure, path, dpi=80)


def blocks(results: Results) -> dict[str, str]:
    """The README's tables by the name of their place."""
    machine = results["tweets"]
    return {
        "summary": summary_table(results),
        **{name: task_table(result) for name, result in results.items()},
        "reasons": reason_table(results),
        "budget": f"{machine['device']}; seeds {', '.join(machine['seeds'])}; {version_list(machine)}.",
    }


def main() -> None:
    """Reads the results, draws and fills."""
    folder = EXAMPLES / "results"
    results = read_results(folder)
    draw_scores(results, folder / "scores.png")
    draw_curve(results, folder / "curve.png")
    write_blocks(blocks(results), EXAMPLES / "README.md")


if __name__ == "__main__":
    main()
