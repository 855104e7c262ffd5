"""Long runs judged at equal steps: does attention to the class meet adaLN?

python examples/disentangled_dit/long_pair.py DATA WORK MODEL...
Each MODEL is a pipeline of ten classes at 32 x 32 whose training.json tells its steps: a snapshot of a run, or what
examples/released keeps of one. Its row is added to results/long_pair.json, and the table in README.md is written. DATA
and WORK are those of study.py.
"""

import sys
from pathlib import Path
from typing import Any

from measuring import Judge, measure_classes
from sets import prepare

from hf_ext.files import read_json, write_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments import prepare_process, table, write_blocks

EXAMPLES = Path(__file__).resolve().parent
RESULTS = EXAMPLES / "results"
PER_CLASS, OTHERS = 30, 300
NAMES = {"attention": "class as a token", "adaln": "class in adaLN"}


def count_steps(folder: Path) -> int:
    """Steps behind a model: of a snapshot those of its run, of a released model those that it tells."""
    told = read_json(folder / "training.json")
    return int(told["released"]["steps"] if "released" in told else told["steps"])


def judge_model(folder: Path, judge: Judge, per_class: int) -> dict[str, Any]:
    """The row of a model."""
    config = read_json(folder / "transformer" / "config.json")
    measured = measure_classes(folder, judge, per_class)
    return {"conditioning": config["conditioning"], "steps": count_steps(folder), **measured}


def add_row(rows: list[dict[str, Any]], row: dict[str, Any]) -> list[dict[str, Any]]:
    """All rows by their steps, one for each way of the class and number of steps."""

    def key(one: dict[str, Any]) -> tuple[int, str]:
        return one["steps"], one["conditioning"]

    return sorted([*(one for one in rows if key(one) != key(row)), row], key=key)


def make_table(rows: list[dict[str, Any]]) -> str:
    """Both ways of the class by their steps."""
    lines = [
        [
            NAMES[row["conditioning"]],
            f"{row['steps']:,}",
            f"{row['feature_distance']:.2f}",
            f"{row['kernel_distance']:.3f}",
            f"{100 * row['accuracy']:.1f} %",
        ]
        for row in rows
    ]
    header = ["32 × 32", "steps", "feature distance", "kernel distance", "accuracy"]
    return f"{table(header, lines)}\n\n{rows[0]['images']} images of each. One seed."


def main(data: Path, work: Path, models: list[Path]) -> None:
    """Judges all models."""
    prepare_process()
    judge = Judge(RESULTS / "judge", prepare(data, work)["32"], OTHERS)
    path = RESULTS / "long_pair.json"
    rows: list[dict[str, Any]] = read_json(path) if path.is_file() else []
    for model in models:
        rows = add_row(rows, judge_model(model, judge, PER_CLASS))
        write_json(path, rows)
        write_blocks({"pair": make_table(rows)}, EXAMPLES / "README.md")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*(Path(word).resolve() for word in sys.argv[1:3]), [Path(word) for word in sys.argv[3:]])
