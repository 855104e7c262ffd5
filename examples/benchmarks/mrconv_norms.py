"""The normalisation of MRConv's branches: batch, kernel, layer, at equal steps and at equal time.

    unzip aeon-1.6.0-py3-none-any.whl "aeon/datasets/data/*" -d DATA
    python examples/mrconv/study.py SOURCE WORK digits      writes WORK/data/digits; SOURCE holds fsdd and cifar10
    python examples/mrconv/data/make_listops.py WORK/data/listops --train 32000 --min-length 63 --max-length 200
    OMP_NUM_THREADS=1 python examples/benchmarks/mrconv_norms.py --series DATA/aeon/datasets/data \
        --digits WORK/data/digits --images SOURCE/cifar10 --listops WORK/data/listops

Spoken digits and sequential CIFAR-10 by the recipes of the study, two sets of series by that of `mrconv_series.py`,
ListOps of 64 to 199 tokens by a smaller model than that of `listops_short.yaml`. Rows of cases that are not measured
anew stay.
The rates are those chosen with batch normalisation. At equal time the others take as many steps as batch normalisation
needs time for its own, by the median of the seeds. Each model is scored on the test part with its branches, and once
more merged into one kernel, which layer normalisation does not allow.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import mrconv_series
from timing import Content, apart, markdown_table, run

from hf_ext.data.opening import open_source
from hf_ext.data.source import DataSource
from hf_ext.files import read_json
from hf_ext.training import Task, TrainingArguments, build_task, evaluate, train

MRCONV = Path(__file__).resolve().parents[1] / "mrconv"
sys.path[:0] = [str(MRCONV.parent), str(MRCONV)]

from experiments import prepare_process, read_arguments
from study import IMAGES

NORMS = ["batch", "kernel", "layer"]
# Steps of each case at equal steps.
STEPS = {"digits": 130, "OSULeaf": 150, "ACSF1": 150, "listops": 3000, "images": 300}
LISTOPS = {
    "task.max_length": 256,
    "model.hidden_size": 64,
    "model.num_hidden_layers": 2,
    "model.bidirectional": False,
    "per_device_train_batch_size": 16,
    "learning_rate": 8e-3,
    "warmup_steps": 50,
    "ema_decay": 0.98,
    "eval_steps": 100_000,
}
# Recipe, examples that train and that test, and what differs from the recipe.
CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "digits": ("study-digits", "train", "test", {"learning_rate": 4e-3}),
    "images": ("study-scifar", IMAGES["train"], IMAGES["test"], {"learning_rate": 4e-3}),
    "listops": ("listops_short", "train", "test", LISTOPS),
}


def make_run(case: str, places: dict[str, str], folder: str, values: dict[str, Any]) -> tuple[Task, TrainingArguments]:
    """Task and arguments of one training."""
    if case not in CASES:
        return mrconv_series.make_run(Path(places["series"]), case, folder, values)
    recipe, train_part, test_part, changed = CASES[case]
    parts = {"train": train_part, "eval": test_part}
    data = {key: {"path": places[case], "split": part} for key, part in parts.items()}
    arguments = read_arguments(MRCONV / f"{recipe}.yaml", {"data": data, "output_dir": folder, **changed, **values})
    return build_task(arguments), arguments


def score(case: str, places: dict[str, str], norm: str, seed: int, steps: int) -> dict[str, Any]:
    """Accuracy on the test part after one training, with branches and merged."""
    prepare_process()
    with tempfile.TemporaryDirectory() as folder:
        values = {"seed": seed, "max_steps": steps, "model.branch_norm": norm, "save_steps": steps}
        task, arguments = make_run(case, places, f"{folder}/run", values)
        test = DataSource(**arguments.data.pop("eval"))
        train(task, arguments)
        snapshot = Path(folder, "run", "snapshot")
        model = task.model_class.from_pretrained(snapshot)
        found = {"steps": steps, "seconds": read_json(snapshot / "training.json")["seconds"]}
        found |= evaluate(task, model, open_source(test))
        if norm != "layer":
            found["merged"] = evaluate(task, model.reparameterize(), open_source(test))["accuracy"]
    return found


def measure(words: argparse.Namespace) -> Iterator[Content]:
    """All cases: each norm at equal steps, then all but the first at the time that it took."""
    places = {name: str(Path(vars(words)[name]).resolve()) for name in ("series", *CASES)}
    before = read_json(words.output)["rows"] if words.output.is_file() else []
    rows: list[dict[str, Any]] = [row for row in before if row["case"] not in words.cases]
    for case in words.cases:
        took: dict[str, float] = {}
        for equal, norm in [*(("steps", norm) for norm in NORMS), *(("time", norm) for norm in NORMS[1:])]:
            steps = STEPS[case] if equal == "steps" else round(STEPS[case] * took[NORMS[0]] / took[norm])
            for seed in range(words.seeds):
                found = apart(score, case, places, norm, seed, steps)
                rows.append({"case": case, "norm": norm, "seed": seed, "equal": equal, **found})
                yield {"rows": rows}
            if equal == "steps":
                took[norm] = median(row["seconds"] for row in rows[-words.seeds :])


def draw(content: Content) -> str:
    lines = []
    for case in dict.fromkeys(row["case"] for row in content["rows"]):
        for norm in NORMS:
            own = [row for row in content["rows"] if (row["case"], row["norm"]) == (case, norm)]
            # The first norm's time is the one that the others have.
            parts = ("steps", "steps" if norm == NORMS[0] else "time")
            cells = [describe([row for row in own if row["equal"] == part]) for part in parts]
            seconds = [row["seconds"] / row["steps"] for row in own if row["equal"] == "steps"]
            lines.append([case, norm, *cells, f"{1000 * median(seconds):.0f}" if seconds else ""])
    return markdown_table(["data", "norm", "equal steps, %", "equal time, %", "ms a step"], lines)


def describe(rows: list[dict[str, Any]]) -> str:
    """Mean and standard deviation of the accuracy over the seeds, and the steps."""
    found = [100 * row["accuracy"] for row in rows]
    return f"{mean(found):.1f} ± {stdev(found):.1f} ({rows[0]['steps']} steps)" if len(found) > 1 else ""


if __name__ == "__main__":
    run(
        "mrconv_norms", __doc__, measure, draw, series="", digits="", images="", listops="", cases=list(STEPS), seeds=3
    )
