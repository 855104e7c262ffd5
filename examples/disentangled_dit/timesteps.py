"""Timestep distributions and loss weights beside the plain ones: short runs of equal steps, one evaluation for all.

python examples/disentangled_dit/timesteps.py CIFAR10 WORK
CIFAR10 is the folder of the data set. Runs of a seed have equal initial weights and see equal batches. Each leaves a
file in WORK/results and is skipped where that is there. At the end results/timesteps.json and the table in README.md
are written.
"""

import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sets import open_cifar10
from torch.utils.data import default_collate

from hf_ext.files import write_json
from hf_ext.settings import build
from hf_ext.tasks.diffusion import DisentangledDiTTask
from hf_ext.training import evaluate

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments import count_seconds, keep, machine, prepare_process, spread, table, write_blocks

EXAMPLES = Path(__file__).resolve().parent
STEPS, BATCH, LEARNING_RATE = 400, 32, 2e-3
SEEDS = (0, 1, 2)
# Training pictures, which are cut once, and test pictures of the evaluation.
PICTURES, EVALUATED = 4000, 500
# The objectives with their schedules.
OBJECTIVES: dict[str, dict[str, Any]] = {"v_prediction": {"beta_schedule": "squaredcos_cap_v2"}, "flow": {}}
PLAIN = "uniform, equal"
# At 16 pixels a base of 8 moves the places as it does at 512 where 256 is the base.
CHOICES: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "logit_normal, equal": {"distribution": "logit_normal"},
    "shifted, equal": {"distribution": "shifted", "base_size": 8},
    "uniform, min_snr": {"loss_weight": "min_snr"},
    # Of flow matching it is what the plain one is.
    "uniform, flow": {"loss_weight": "flow"},
}
NETWORK = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, "patch_size": 4, "num_classes": 10}


def make_task(objective: str, choice: str) -> DisentangledDiTTask:
    """The task of a row."""
    settings = {"image_size": 16, "objective": objective, "noise_schedule": OBJECTIVES[objective]}
    return build(DisentangledDiTTask, {**settings, "timesteps": CHOICES[choice]}, "task")


@cache
def cut_pictures(cifar10: Path, count: int) -> list[dict[str, Any]]:
    """Training samples, which are the same for all rows."""
    task = make_task("flow", PLAIN)
    task.build_model(NETWORK, None)
    generator = np.random.default_rng(0)
    return [task.training_sample(example, generator) for example in open_cifar10(cifar10, "train", count)]


def train_one(cifar10: Path, objective: str, choice: str, seed: int) -> dict[str, float]:
    """Trains a network and evaluates it, with uniform timesteps and equal weights."""
    torch.manual_seed(seed)
    task = make_task(objective, choice)
    model: Any = task.build_model(NETWORK, None)
    optimizer = torch.optim.AdamW(task.parameter_groups(model.train(), 0.0), lr=LEARNING_RATE, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, STEPS, pct_start=0.05, cycle_momentum=False
    )
    samples, order = cut_pictures(cifar10, min(PICTURES, BATCH * STEPS)), np.random.default_rng(seed)
    for step in range(STEPS):
        batch = default_collate([samples[index] for index in order.integers(len(samples), size=BATCH)])
        torch.manual_seed(1_000_003 * seed + step)
        task.loss(model, batch, step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return evaluate(task, model, open_cifar10(cifar10, "test", EVALUATED))


def train_all(cifar10: Path, results: Path) -> dict[str, Any]:
    """All runs, a seed after the other."""
    rows = [(objective, choice) for objective in OBJECTIVES for choice in CHOICES]
    rows.remove(("flow", "uniform, flow"))
    found: dict[str, list[float]] = {" | ".join(row): [] for row in rows}
    for seed in SEEDS:
        for objective, choice in rows:
            path = results / f"{objective}-{choice.replace(', ', '-')}-{seed}.json"
            metrics = keep(path, partial(train_one, cifar10, objective, choice, seed))
            found[f"{objective} | {choice}"].append(metrics["loss"])
    told = {"steps": STEPS, "batch": BATCH, "seeds": list(SEEDS), "network": NETWORK, "loss": found}
    return {**machine("hf-ext", "torch", "diffusers"), **told, "seconds": count_seconds(results)}


def make_table(result: dict[str, Any]) -> str:
    """Mean and standard deviation over the seeds, of the losses and of what each is more than the plain one's."""
    lines = []
    for name, losses in result["loss"].items():
        objective, choice = name.split(" | ")
        plain = result["loss"][f"{objective} | {PLAIN}"]
        cells = [spread(losses, 4), ""]
        if choice != PLAIN:
            cells[1] = spread([1000 * (loss - base) for loss, base in zip(losses, plain, strict=True)], 1, "+")
        lines.append([f"{objective}, {choice}", *cells])
    return table(["objective, distribution, weight", "loss", "1000 × more than the plain one"], lines)


def main(cifar10: Path, work: Path) -> None:
    """All runs, then the table."""
    prepare_process()
    result = train_all(cifar10, work / "results")
    write_json(EXAMPLES / "results" / "timesteps.json", result, 1)
    write_blocks({"timesteps": make_table(result)}, EXAMPLES / "README.md")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*(Path(word).resolve() for word in sys.argv[1:]))
