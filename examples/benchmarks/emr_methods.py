"""The cost of each merge method: processor time per GB of checkpoints that it reads, and memory, four tasks of GPT-2.

    python examples/benchmarks/emr_methods.py --folder SCRATCH [--rounds 3] [--quick]

The models are those of `emr_merge.py`, in SCRATCH/full/gpt2. Every merge is a process of its own, methods in turns,
forwards and backwards; the median of the processor time of the merge without its imports counts. Statistics that
fisher and regmean need are made up there. Needs Linux (/proc). `--quick` takes a small model, once.
"""

import argparse
import json
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from emr_measuring import HERE, RunLog, keep_to_cores, remove, run_child, run_program, warm
from emr_results import machine
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hf_ext.files import write_json
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


def measure(folder: Path, rounds: int) -> tuple[RunLog, dict[str, Any]]:
    """Runs every method in turns; what was run before is kept."""
    name = "full" if folder.name == "full" else "quick"
    folder.mkdir(parents=True, exist_ok=True)
    models, out, stderr = folder / "gpt2", folder / "out", folder / "last.log"
    shape = [word for key, value in SHAPES[name].items() for word in (f"--{key}", str(value))]
    run_child([sys.executable, str(HERE / "emr_sets.py"), str(models), "--tasks", str(TASKS), *shape], stderr)
    configs = {method: describe_merge(METHODS[method], models) for method in METHODS}
    settings = {"tasks": TASKS, "model": SHAPES[name]}
    log = RunLog(folder / "methods.jsonl", settings)
    for turn in range(rounds):
        for method in configs if turn % 2 == 0 else reversed(configs):
            if f"{method}/{turn}" in log.rows:
                continue
            remove(out)
            config = configs[method]
            files = [Path(model) / "model.safetensors" for model in (config["base"], *config["tasks"].values())]
            warm([*files, *map(Path, config.get("statistics", {}).values())])
            row = run_program("hf_ext_merge", {"config": config, "out": str(out)}, stderr)
            gigabytes = sum(file.stat().st_size for file in files) / 1e9
            log.add(f"{method}/{turn}", {**row, "gigabytes": gigabytes})
            print(f"{method:16} {row['processor_seconds'] / gigabytes:6.2f} s/GB", flush=True)
    remove(out)
    return log, settings


def summarise(log: RunLog) -> dict[str, dict[str, float]]:
    """Medians by method."""
    found = {}
    for method in METHODS:
        rows = log.named(method)
        found[method] = {
            "processor_seconds_per_gigabyte": statistics.median(
                row["processor_seconds"] / row["gigabytes"] for row in rows
            ),
            "peak_above_imports": statistics.median(row["peak_above_imports"] for row in rows),
            "gigabytes": rows[0]["gigabytes"],
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="scratch folder, outside the repository")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a small model, one round")
    words = parser.parse_args()
    cores = keep_to_cores()
    folder = words.folder.resolve() / ("quick" if words.quick else "full")
    log, settings = measure(folder, 1 if words.quick else words.rounds)
    found = {"settings": settings, "machine": machine(cores), "methods": summarise(log)}
    place = folder if words.quick else HERE / "results"
    write_json(place / "emr_methods.json", found, indent=1)
    for file in folder.glob("*.fisher.safetensors"), folder.glob("*.gram.safetensors"):
        for path in file:
            path.unlink()
    shutil.rmtree(folder / "out", ignore_errors=True)
    for method, row in found["methods"].items():
        peak = row["peak_above_imports"] / 1e6
        print(f"{method:16}{row['processor_seconds_per_gigabyte']:8.2f} s/GB{peak:8.0f} MB above imports")


if __name__ == "__main__":
    main()
