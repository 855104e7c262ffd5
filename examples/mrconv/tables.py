"""Scores, curves and README tables of the study.

python examples/mrconv/tables.py DATA [WORK]   scores and keeps what study.py has reached, once it is stopped; as below
python examples/mrconv/tables.py               writes tables and curves again, from results/study.json alone
What an earlier table had and WORK has not, as on another machine, stays.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from keeping import bring_back, keep
from measuring import choose_rate, score
from runs import COMPARISONS, MARKS, Run, ablations, candidates, count_parameters, find_mark
from study import find_data

from hf_ext.files import read_json, write_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from background import WORK  # noqa: E402  found through the line above
from studies import (  # noqa: E402  found above
    machine,
    prepare_process,
    save_figure,
    table,
    version_list,
    write_blocks,
)

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


def describe_mark(study: Path, data: dict[str, str], run: Run, minutes: int) -> dict[str, float]:
    """What a run had behind it at a mark, and its test scores."""
    mark = find_mark(study, run, minutes)
    training = read_json(mark / "training.json")
    return {
        "core_minutes": round(read_json(mark / "mark.json")["core_seconds"] / 60, 2),
        "samples": training["samples"],
        **score(study, data, run, minutes, "test"),
    }


def describe_model(study: Path, data: dict[str, str], comparison: str, name: str) -> dict[str, Any]:
    """The losses that chose the rate, and every mark of the run that went on."""
    runs, first = candidates(comparison, name), MARKS[comparison][0]
    chosen = choose_rate(study, data, comparison, name)
    reached = [minutes for minutes in MARKS[comparison] if find_mark(study, chosen, minutes).is_dir()]
    return {
        "parameters": count_parameters(chosen, data),
        "rates": {f"{run.rate:g}": score(study, data, run, first, "validation")["loss"] for run in runs},
        "rate": chosen.rate,
        "marks": {str(minutes): describe_mark(study, data, chosen, minutes) for minutes in reached},
    }


def is_chosen(study: Path, comparison: str) -> bool:
    """Whether every candidate of every model has reached the first mark."""
    runs = [run for name in COMPARISONS[comparison].models for run in candidates(comparison, name)]
    return all(find_mark(study, run, MARKS[comparison][0]).is_dir() for run in runs)


def collect(study: Path, data: dict[str, str], before: dict[str, Any]) -> dict[str, Any]:
    """Everything that is reached, over what an earlier table had."""
    comparisons: dict[str, Any] = before.get("comparisons", {})
    ablation: dict[str, Any] = before.get("ablation", {})
    for name in [name for name in COMPARISONS if is_chosen(study, name)]:
        old = comparisons.setdefault(name, {})
        for model in COMPARISONS[name].models:
            row = describe_model(study, data, name, model)
            kept = old[model]["marks"] if model in old and old[model]["rate"] == row["rate"] else {}
            old[model] = {**row, "marks": {**kept, **row["marks"]}}
    if is_chosen(study, "digits"):
        for label, run in ablations(choose_rate(study, data, "digits", "mrconv").rate):
            if find_mark(study, run, 0).is_dir():
                changed = ablation.setdefault(label, {"parameters": count_parameters(run, data), "seeds": {}})
                changed["seeds"][str(run.seed)] = describe_mark(study, data, run, 0)
    return {"comparisons": comparisons, "ablation": ablation}


def percent(value: float) -> str:
    """A share in percent."""
    return f"{100 * value:.1f}"


def comparison_table(rows: dict[str, Any]) -> str:
    """Test accuracy at each mark that all models have reached, and the samples behind the last of them."""
    marks = [mark for mark in next(iter(rows.values()))["marks"] if all(mark in row["marks"] for row in rows.values())]
    lines = [
        [
            NAMES[model],
            f"{row['parameters']:,}",
            f"{row['rate']:g}",
            *(percent(row["marks"][mark]["accuracy"]) for mark in marks),
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
        values = [100 * seed["accuracy"] for seed in seeds]
        deviation = f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
        minutes = np.mean([seed["core_minutes"] for seed in seeds])
        lines.append(
            [label, f"{row['parameters']:,}", f"{np.mean(values):.1f}{deviation}", str(len(values)), f"{minutes:.1f}"]
        )
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
    made = {name: comparison_table(rows) for name, rows in result["comparisons"].items()}
    if made:
        made["curves"] = "![Test accuracy against core minutes](results/curves.png)"
    if result["ablation"]:
        made["ablation"] = ablation_table(result["ablation"])
    return {
        "budget": f"{result['device']}; {version_list(result)}.",
        **made,
    }


def main() -> None:
    if len(sys.argv) > 3:
        sys.exit(__doc__)
    result = read_json(RESULT) if RESULT.is_file() else {}
    if len(sys.argv) > 1:
        prepare_process()
        study = (Path(sys.argv[2]).resolve() if len(sys.argv) == 3 else WORK) / "mrconv"
        bring_back(study)
        data = find_data(Path(sys.argv[1]), study)
        result = {**machine("hf-ext", "torch", "transformers"), **collect(study, data, result)}
        write_json(RESULT, result, 1)
        keep(study, data)
    if result["comparisons"]:
        draw_curves(result, EXAMPLES / "results" / "curves.png")
    write_blocks(blocks(result), EXAMPLES / "README.md")


if __name__ == "__main__":
    main()
