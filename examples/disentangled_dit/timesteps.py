"""Timestep distributions and loss weights beside the plain ones: short equal runs, one evaluation for all.

python examples/disentangled_dit/timesteps.py CIFAR10 WORK
CIFAR10 is the folder of the data set. Each step leaves its result in WORK/results and is skipped when it is there, so
an interrupted study continues. At the end results/timesteps.json and the table in README.md are written.
DIT_BUDGET_SCALE=0.01 makes every run that much shorter, to try the machinery; its results stay in WORK/report.
"""

import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from measuring import CLASSES, Judge, measure_classes
from runs import CLASSIFIER, EXAMPLES, recipe, script
from sets import open_cifar10, plain_rows, write

from hf_ext.training import build_task, train

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from studies import (  # noqa: E402  found through the line above
    Steps,
    launch,
    machine,
    prepare_process,
    read_arguments,
    table,
    write_blocks,
)

STEPS, CLASSIFIER_STEPS = 300, 250
SEEDS = (0, 1, 2)
# Pictures of each class: of the evaluation loss, and generated ones.
EVALUATED, GENERATED = 25, 20
OBJECTIVES = {
    "v_prediction": {"beta_schedule": "squaredcos_cap_v2"},
    "flow": {},
}
# At 16 pixels a base of 8 moves the places as 512 pixels do where 256 are the base.
CHOICES: dict[str, dict[str, Any]] = {
    "uniform, equal": {},
    "logit_normal, equal": {"distribution": "logit_normal"},
    "shifted, equal": {"distribution": "shifted", "base_size": 8},
    "uniform, min_snr": {"loss_weight": "min_snr"},
    # The velocity of flow matching is what it weighs by: nothing changes there.
    "uniform, flow": {"loss_weight": "flow"},
}
NETWORK = {"num_layers": 4, "num_attention_heads": 4, "attention_head_dim": 16, "patch_size": 4, "num_classes": 10}


def rows() -> list[tuple[str, str]]:
    """Objectives with their choices, each a row of the table."""
    pairs = [(objective, choice) for objective in OBJECTIVES for choice in CHOICES]
    return [pair for pair in pairs if pair != ("flow", "uniform, flow")]


def values(cifar10: Path, objective: str, choice: str, seed: int, steps: int) -> dict[str, Any]:
    """What a run changes of the recipe."""
    test = "+".join(f"test[{1000 * label}:{1000 * label + EVALUATED}]" for label in range(CLASSES))
    path = str(cifar10)
    return {
        "data": {"train": {"path": path}, "eval": {"path": path, "split": test}},
        "task.objective": objective,
        "task.noise_schedule": OBJECTIVES[objective],
        "task.timesteps": CHOICES[choice],
        "task.samples_per_class": 1,
        "task.sample_steps": 1,
        "model": NETWORK,
        "seed": seed,
        "max_steps": steps,
        "warmup_steps": steps // 20,
        "ema_decay": 0.99,
        "logging_steps": max(1, steps // 6),
        "eval_steps": steps,
        "save_steps": steps,
        "save_total_limit": 1,
        "report_to": "none",
    }


def train_one(run: Path, given: dict[str, Any]) -> dict[str, float]:
    """Trains in this process; only the snapshot stays."""
    arguments = read_arguments(EXAMPLES / "cifar10_16.yaml", {**given, "output_dir": run})
    metrics = train(build_task(arguments), arguments)
    for name in ("state", "best"):
        shutil.rmtree(run / name, ignore_errors=True)
    return metrics


def make_judge(study: Steps, cifar10: Path, steps: int) -> Judge:
    """A short training of the classifier, and test pictures of 16 x 16 in mixed order."""
    data = study.work / "data"
    if not (data / "test.parquet").is_file():
        source = open_cifar10(cifar10, "test", 2000 + CLASSES * GENERATED)
        write(data / "test.parquet", list(plain_rows(source, 16)), source.features["label"].names)
    path = str(cifar10)
    sources = {"train": {"path": path}, "eval": {"path": path, "split": "test[:100]"}}
    given = {"data": sources, "max_steps": steps, "warmup_steps": steps // 8, "report_to": "none"}
    launch(study.work / "runs" / CLASSIFIER, script(CLASSIFIER), recipe(CLASSIFIER), given)
    return Judge(study.snapshot(CLASSIFIER), data, CLASSES * GENERATED)


def run_name(objective: str, choice: str, seed: int) -> str:
    """Of a run and its folder."""
    return f"{objective}-{choice.replace(', ', '-')}-{seed}"


def train_all(study: Steps, cifar10: Path) -> dict[str, Any]:
    """All runs, a seed after the other."""
    steps = max(2, int(STEPS * (study.scale or 1)))
    found: dict[str, dict[str, list]] = {" | ".join(row): {"loss": []} for row in rows()}
    for seed in SEEDS:
        for objective, choice in rows():
            name, given = run_name(objective, choice, seed), values(cifar10, objective, choice, seed, steps)
            metrics = study.step(name, given, partial(train_one, study.work / "runs" / name, given))
            found[f"{objective} | {choice}"]["loss"].append(metrics["loss"])
    evaluated = CLASSES * EVALUATED
    return {
        "steps": steps,
        "batch": 32,
        "evaluated": evaluated,
        "network": NETWORK,
        "seeds": list(SEEDS),
        "rows": found,
    }


def measure_all(study: Steps, cifar10: Path, result: dict[str, Any]) -> None:
    """What the pictures of all runs are like."""
    judge = make_judge(study, cifar10, max(8, int(CLASSIFIER_STEPS * (study.scale or 1))))
    result["real"] = judge.real()
    for seed in SEEDS:
        for objective, choice in rows():
            name = run_name(objective, choice, seed)
            compute = partial(measure_classes, study.snapshot(name), judge, GENERATED)
            measured = study.step(f"measure-{name}", {"images": CLASSES * GENERATED}, compute)
            for key in ("feature_distance", "kernel_distance", "accuracy"):
                result["rows"][f"{objective} | {choice}"].setdefault(key, []).append(measured[key])


def make_table(result: dict[str, Any]) -> str:
    """Mean and standard deviation over the seeds; a column for what was measured."""
    digits = {"loss": 4, "feature_distance": 2, "kernel_distance": 3}
    keys = [key for key in digits if all(key in row for row in result["rows"].values())]
    lines = []
    for name, row in result["rows"].items():
        cells = [f"{mean(row[key]):.{digits[key]}f} ± {stdev(row[key]):.{digits[key]}f}" for key in keys]
        lines.append([*name.split(" | "), *cells])
    return table(["objective", "distribution, weight", *(key.replace("_", " ") for key in keys)], lines)


def report(study: Steps, result: dict[str, Any]) -> None:
    """Writes results and table; of a trial of the machinery elsewhere."""
    result["seconds"] = study.seconds()
    folder = EXAMPLES / "results" if study.scale == 1 else study.work / "report"
    folder.mkdir(exist_ok=True)
    (folder / "timesteps.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(make_table(result), flush=True)
    if study.scale == 1:
        write_blocks({"timesteps": make_table(result)}, EXAMPLES / "README.md")


def main(cifar10: Path, work: Path) -> None:
    """The losses, and then the pictures."""
    prepare_process()
    study = Steps(work, float(os.environ.get("DIT_BUDGET_SCALE", "1")))
    result = {**machine("hf-ext", "torch", "diffusers"), **train_all(study, cifar10)}
    report(study, result)
    measure_all(study, cifar10, result)
    report(study, result)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*(Path(word).resolve() for word in sys.argv[1:]))
