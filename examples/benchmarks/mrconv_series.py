"""Classes of series: MRConv by the recipe that `hf-ext init` writes for a CPU, beside MiniROCKET of aeon.

    unzip aeon-1.6.0-py3-none-any.whl "aeon/datasets/data/*" -d DATA
    OMP_NUM_THREADS=1 python examples/benchmarks/mrconv_series.py --data DATA/aeon/datasets/data

Six sets come with the wheel of aeon. Both learn from the whole official training part and are scored once on the test
part. MRConv takes 600 steps of 16 series on one core, whatever the set. Its recipe was chosen by three folds of the
training parts of OSULeaf and ACSF1. MiniROCKET has its usual 10,000 features and a ridge classifier, and needs series
of one length: shorter ones end in zeros.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from timing import Content, apart, markdown_table, run, time_of

from hf_ext.data.opening import open_source
from hf_ext.data.source import DataSource
from hf_ext.training import Task, TrainingArguments, build_task, train

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments import read_arguments

SETS = ["GunPoint", "ItalyPowerDemand", "OSULeaf", "ACSF1", "BasicMotions", "JapaneseVowels"]
RECIPE = Path(__file__).with_suffix(".yaml")


def read(data: Path, name: str) -> dict[str, tuple[list[np.ndarray], list[str]]]:
    """Both parts: series `[steps, channels]` and their classes."""
    parts = {}
    for part in ("TRAIN", "TEST"):
        rows = open_source(DataSource(str(data / name / f"{name}_{part}.ts"), rows="series"))
        series = [np.asarray(row["values"], dtype=np.float32) for row in rows]
        parts[part] = [each.reshape(len(each), -1) for each in series], [str(row["label"]) for row in rows]
    return parts


def make_run(data: Path, name: str, folder: str, values: dict[str, Any]) -> tuple[Task, TrainingArguments]:
    """Task and arguments of one training; `values` may change fields, those of the model by `model.NAME`."""
    parts, steps = read(data, name), values["max_steps"]
    classes = sorted({*parts["TRAIN"][1]})
    files = {"train": "TRAIN", "eval": "TEST"}
    told = {
        "data": {
            key: {"path": str(data / name / f"{name}_{part}.ts"), "split": "train", "rows": "series"}
            for key, part in files.items()
        },
        "task.num_channels": parts["TRAIN"][0][0].shape[1],
        "task.max_length": max(len(each) for series, _ in parts.values() for each in series),
        "task.num_labels": len(classes),
        "task.label_names": classes,
        "warmup_steps": steps // 20,
        **dict.fromkeys(("eval_steps", "save_steps", "logging_steps"), steps),
    }
    arguments = read_arguments(RECIPE, {"output_dir": folder, **told, **values})
    return build_task(arguments), arguments


def score_mrconv(data: Path, name: str, seed: int, steps: int) -> dict[str, float]:
    """Accuracy on the test part after one training."""
    with tempfile.TemporaryDirectory() as folder:
        task, arguments = make_run(data, name, f"{folder}/run", {"seed": seed, "max_steps": steps})
        found: dict[str, Any] = {}
        seconds = time_of(lambda: found.update(train(task, arguments)))
    return {"accuracy": found["accuracy"], "seconds": seconds}


def score_rocket(data: Path, name: str, seed: int) -> dict[str, float]:
    """The same of MiniROCKET."""
    from aeon.classification.convolution_based import MiniRocketClassifier

    parts = read(data, name)
    # Its kernels have a span of 9.
    length = max(9, *(len(each) for series, _ in parts.values() for each in series))
    arrays = {}
    for part, (series, _) in parts.items():
        arrays[part] = np.zeros((len(series), series[0].shape[1], length), np.float32)
        for row, each in zip(arrays[part], series, strict=True):
            row[:, : len(each)] = each.T
    model = MiniRocketClassifier(random_state=seed, n_jobs=1)
    seconds = time_of(lambda: model.fit(arrays["TRAIN"], np.array(parts["TRAIN"][1])))
    found = model.predict(arrays["TEST"])
    return {"accuracy": float(np.mean(found == np.array(parts["TEST"][1]))), "seconds": seconds}


def measure(words: argparse.Namespace) -> Iterator[Content]:
    """All sets, MRConv and MiniROCKET in turns, a seed after the other."""
    rows: list[dict[str, Any]] = []
    data = Path(words.data).resolve()
    for name in words.sets:
        for seed in range(words.seeds):
            one = {"set": name, "seed": seed, "mrconv": apart(score_mrconv, data, name, seed, words.steps)}
            rows.append({**one, "minirocket": apart(score_rocket, data, name, seed)})
            yield {"steps": words.steps, "rows": rows}


def draw(content: Content) -> str:
    names = list(dict.fromkeys(row["set"] for row in content["rows"]))
    lines, means = [], {}
    for tool in ("mrconv", "minirocket"):
        means[tool] = [mean(row[tool]["accuracy"] for row in content["rows"] if row["set"] == name) for name in names]
    for place, name in enumerate(names):
        rows = [row for row in content["rows"] if row["set"] == name]
        cells = []
        for tool in means:
            seeds = ", ".join(f"{row[tool]['accuracy']:.1%}" for row in rows)
            cells.append(f"{means[tool][place]:.1%} ({seeds})")
        seconds = [f"{mean(row[tool]['seconds'] for row in rows):.0f}" for tool in means]
        lines.append([name, *cells, *seconds])
    lines.append(["mean", *(f"{mean(found):.1%}" for found in means.values()), "", ""])
    header = ["set", "MRConv: mean (seeds)", "MiniROCKET", "MRConv, processor s", "MiniROCKET, processor s"]
    return markdown_table(header, lines)


if __name__ == "__main__":
    run("mrconv_series", __doc__, measure, draw, data="", sets=SETS, seeds=3, steps=600)
