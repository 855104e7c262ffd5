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

STEPS, CLASSIFIER_STEPS = 600, 400
SEEDS = (0, 1, 2)
# Pictures of each class: of the evaluation loss, and generated ones.
EVALUATED, GENERATED = 50, 25
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


def compute(study: Steps, cifar10: Path) -> dict[str, Any]:
    """All runs, a seed after the other, then what their pictures are like."""
    steps = max(2, int(STEPS * (study.scale or 1)))
    found: dict[str, dict[str, list]] = {" | ".join(row): {"loss": []} for row in rows()}
    for seed in SEEDS:
        for objective, choice in rows():
            name = f"{objective}-{choice.replace(', ', '-')}-{seed}"
            given = values(cifar10, objective, choice, seed, steps)
            run = study.work / "runs" / name
            metrics = study.step(name, given, lambda run=run, given=given: train_one(run, given))
            found[f"{objective} | {choice}"]["loss"].append(metrics["loss"])
    judge = make_judge(study, cifar10, max(8, int(CLASSIFIER_STEPS * (study.scale or 1))))
    for seed in SEEDS:
        for objective, choice in rows():
            name = f"{objective}-{choice.replace(', ', '-')}-{seed}"
            measured = study.step(
                f"measure-{name}",
                {"images": CLASSES * GENERATED},
                lambda name=name: measure_classes(study.snapshot(name), judge, GENERATED),
            )
            for key in ("feature_distance", "kernel_distance", "accuracy"):
                found[f"{objective} | {choice}"].setdefault(key, []).append(measured[key])
    return {"steps": steps, "batch": 32, "network": NETWORK, "seeds": list(SEEDS), "real": judge.real(), "rows": found}


def make_table(result: dict[str, Any]) -> str:
    """Mean and standard deviation over the seeds."""
    lines = []
    for name, row in result["rows"].items():
        cells = [
            f"{mean(row[key]):.{digits}f} ± {stdev(row[key]):.{digits}f}"
            for key, digits in (("loss", 4), ("feature_distance", 2), ("kernel_distance", 3))
        ]
        lines.append([*name.split(" | "), *cells])
    return table(["objective", "distribution, weight", "loss", "feature distance", "kernel distance"], lines)


def main(cifar10: Path, work: Path) -> None:
    """All steps, then the table."""
    prepare_process()
    scale = float(os.environ.get("DIT_BUDGET_SCALE", "1"))
    study = Steps(work, scale)
    result = {**machine("hf-ext", "torch", "diffusers"), **compute(study, cifar10), "seconds": study.seconds()}
    report = EXAMPLES / "results" if scale == 1 else work / "report"
    report.mkdir(exist_ok=True)
    (report / "timesteps.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(make_table(result))
    if scale == 1:
        write_blocks({"timesteps": make_table(result)}, EXAMPLES / "README.md")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*(Path(word).resolve() for word in sys.argv[1:]))
