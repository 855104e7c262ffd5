"""The cost of each merge method: processor time per GB of checkpoints that it reads, and memory, four tasks of GPT-2.

    python examples/benchmarks/emr_methods.py --folder SCRATCH [--quick]

The models are those of `emr_merge.py`, in SCRATCH/full/gpt2. Every merge is a process of its own, methods in turns,
forwards and backwards; the median of the processor time of the merge without its imports counts. Statistics that
fisher and regmean need are made up there. Needs Linux (/proc). `--quick` takes a small model, once.
"""

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from emr_measuring import make_set, prepare, run_program, run_rounds, warm
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from timing import Content, run

from hf_ext.merging.methods import METHODS, Method

TASKS = 4
SHAPES = {"full": {"width": 768, "layers": 12}, "quick": {"width": 128, "layers": 2}}


def write_fisher(model: Path, out: Path) -> None:
    """Squares of the weights, which are as positive as squared gradients."""
    weights = load_file(model / "model.safetensors")
    save_file({name: weight.square() for name, weight in weights.items()}, out, metadata={"kind": "fisher"})


def write_grams(model: Path, out: Path) -> None:
    """XᵀX of random inputs for each Conv1D of a GPT-2."""
    names, found = [], {}
    with safe_open(model / "model.safetensors", "pt") as file:
        for name in sorted(file.keys()):
            shape = file.get_slice(name).get_shape()
            if ".h." in name and name.endswith("weight") and len(shape) == 2:
                inputs = torch.randn(64, shape[0])
                found[name] = inputs.T @ inputs / 64
                names.append(name)
    save_file(found, out, metadata={"kind": "gram", "inputs_first": json.dumps(names)})


def describe_merge(method: Method, models: Path) -> dict[str, Any]:
    """The configuration of a merge by one method, with the statistics that it needs."""
    count = min(TASKS, method.most_tasks or TASKS)
    tasks = {f"task{index}": str(models / f"task{index}") for index in range(1, count + 1)}
    config: dict[str, Any] = {"base": str(models / "base"), "tasks": tasks, "method": method.name}
    if method.takes_merged:
        config["merged"] = tasks["task1"]
    if method.statistics is not None:
        write = write_fisher if method.statistics == "fisher" else write_grams
        config["statistics"] = {}
        for task, model in tasks.items():
            file = models.parent / f"{task}.{method.statistics}.safetensors"
            if not file.is_file():
                write(Path(model), file)
            config["statistics"][task] = str(file)
    return config


def measure(words: argparse.Namespace) -> Iterator[Content]:
    """All methods in turns."""
    scratch = prepare(words)
    shape, log, out = SHAPES["quick" if words.quick else "full"], scratch / "last.log", scratch / "out"
    make_set(scratch / "gpt2", TASKS, **shape)

    def merge(config: dict[str, Any]) -> dict[str, Any]:
        files = [Path(model) / "model.safetensors" for model in (config["base"], *config["tasks"].values())]
        warm([*files, *map(Path, config.get("statistics", {}).values())])
        row = run_program("hf_ext_merge", {"config": config, "out": str(out)}, log)
        gigabytes = sum(file.stat().st_size for file in files) / 1e9
        return {**row, "gigabytes": gigabytes, "processor_seconds_per_gigabyte": row["processor_seconds"] / gigabytes}

    configs = {name: describe_merge(method, scratch / "gpt2") for name, method in METHODS.items()}
    found = run_rounds(
        {name: partial(merge, config) for name, config in configs.items()}, 1 if words.quick else 3, out
    )
    yield {"tasks": TASKS, "model": shape, "methods": found}
    for path in scratch.glob("*.safetensors"):
        path.unlink()


if __name__ == "__main__":
    run("emr_methods", __doc__, measure, None, folder="", quick=False)
