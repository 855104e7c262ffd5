"""What windows and keys are worth: windows of 8, 16 and 32 pixels, four numbers of keys, four tasks, three seeds.

python examples/semanir/windows.py DATA WORK   trains what is missing, an hour of a core in all, and writes the table
python examples/semanir/windows.py             writes the table again, from results/steps alone
DATA holds the folders bsds500 (train, test) and set12. All networks have the same parameters: a window has none. All
see the same patches, and each training step draws the number of keys, as the presets do; so one network answers for
every k. Each step of the study leaves its result in examples/semanir/results/steps and is skipped when it is there.
"""

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import input_psnr, load
from runs import EXAMPLES, RECIPE, run_arguments

from hf_ext.training import build_task, evaluate
from hf_ext.training.arguments import DataSource
from hf_ext.training.sources import open_source

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from studies import Steps, launch, machine, prepare_process, table, write_blocks  # noqa: E402  found above

WINDOWS, SEEDS, STEPS = (8, 16, 32), (0, 1, 2), 300
# How many times fewer keys than a window has tokens. Dense windows are not trained, only measured.
SHARES = (8, 4, 2, 1)
TASKS: dict[str, dict[str, Any]] = {
    "noise, σ = 25": {"task.degradation": {"kind": "gaussian_noise", "sigma": 25}},
    "JPEG, quality 10": {"task.degradation": {"kind": "jpeg", "quality": 10}},
    "blur, σ = 1.6": {"task.degradation": {"kind": "blur", "sigma": 1.6}},
    "half the size and back": {"task.degradation": {"kind": "resize", "factor": 0.5}},
}
NETWORK = {
    "model.architecture": "columnar",
    "model.embed_dim": 32,
    "model.depths": [2, 2],
    "model.num_heads": [2, 2],
    "model.refinement_depth": 0,
    # Patches are whole windows of every size.
    "task.patch_size": 64,
    "per_device_train_batch_size": 2,
    "learning_rate": 2.0e-3,
    "max_steps": STEPS,
    "warmup_steps": 20,
}
# The pictures of Set12 with 256 x 256 pixels.
TESTED = "[:7]"
REPEATS = 5


def keys_of(window: int) -> list[int]:
    """What k is measured in windows of this side."""
    return [window**2 // share for share in SHARES]


def find_values(task: str, window: int, seed: int) -> dict[str, Any]:
    """What differs from study.yaml, but for the data."""
    keys = keys_of(window)
    windows = {"model.window_size": window, "model.top_k": window**2 // 2, "model.train_top_k": keys[:-1]}
    return {**NETWORK, **TASKS[task], **windows, "seed": seed}


def find_data(data: Path) -> dict[str, Any]:
    """Photographs to train on, and pictures to test on."""
    train = {"path": str(data / "bsds500"), "split": "train+test"}
    return {"train": train, "eval": {"path": str(data / "set12"), "split": f"train{TESTED}"}}


def train(run: Path, values: dict[str, Any], keys: list[int]) -> dict[str, float]:
    """Trains, and measures the PSNR with every number of keys."""
    launch(run, [EXAMPLES / "train.py"], RECIPE, values)
    task, model = load(run / "snapshot", values)
    source = open_source(DataSource(**values["data"]["eval"]))
    found = {}
    for top_k in keys:
        task.top_k = top_k
        found[str(top_k)] = round(evaluate(task, model, source)["psnr"], 3)
    return found


@torch.no_grad()
def measure_times() -> dict[str, Any]:
    """Processor milliseconds of one thread for a picture of 256 x 256 with each window and number of keys, in turn."""
    pixels, calls = torch.rand(1, 1, 256, 256, generator=torch.Generator().manual_seed(0)), {}
    for window in WINDOWS:
        arguments = run_arguments(find_values("noise, σ = 25", window, 0))
        model = build_task(arguments).build_model(arguments.model, None).eval()
        for top_k in keys_of(window):
            calls[f"{window}, {top_k}"] = partial(model, pixel_values=pixels, top_k=top_k)
    times: dict[str, list[float]] = {name: [] for name in calls}
    # All once to warm up, then in turn: whatever else the machine does is spread over all.
    for turn in range(REPEATS + 1):
        for name, restore in calls.items():
            started = time.process_time()
            restore()
            if turn:
                times[name].append(1000 * (time.process_time() - started))
    return {
        **machine("hf-ext", "torch"),
        "milliseconds": {name: round(float(np.median(values))) for name, values in times.items()},
    }


def measure_inputs(data: dict[str, Any]) -> dict[str, float]:
    """PSNR of what the networks are given."""
    return input_psnr({task: {**find_values(task, 8, 0), "data": data} for task in TASKS})


def compute(steps: Steps, data: dict[str, Any]) -> None:
    """What is missing; the first seed of all tasks and windows comes first."""
    steps.step("window-inputs", {"tasks": TASKS}, partial(measure_inputs, data))
    for seed in SEEDS:
        for index, task in enumerate(TASKS):
            for window in WINDOWS:
                values, name = find_values(task, window, seed), f"window-{index}-{window}-{seed}"
                run, keys = steps.work / "runs" / name, keys_of(window)
                steps.step(name, {"values": values}, partial(train, run, {**values, "data": data}, keys))
    steps.step("window-times", {"network": NETWORK}, measure_times)


def describe_score(steps: Steps, task: str, window: int, top_k: int) -> str:
    """Mean and standard deviation over the seeds that are there."""
    names = [f"window-{list(TASKS).index(task)}-{window}-{seed}" for seed in SEEDS]
    found = [steps.read(name)[str(top_k)] for name in names if steps.read(name) is not None]
    deviation = f" ± {np.std(found, ddof=1):.2f}" if len(found) > 1 else ""
    return f"{np.mean(found):.2f}{deviation}" if found else ""


def make_table(steps: Steps) -> str:
    """A row for each window and number of keys."""
    times = (steps.read("window-times") or {}).get("milliseconds", {})
    inputs = steps.read("window-inputs") or {}
    rows = [["degraded", "", *(f"{inputs[task]:.2f}" if inputs else "" for task in TASKS), ""]]
    for window in WINDOWS:
        for share, top_k in zip(SHARES, keys_of(window), strict=True):
            words = f"{top_k} (N / {share})" if share > 1 else f"{top_k} (dense)"
            scores = [describe_score(steps, task, window, top_k) for task in TASKS]
            rows.append([str(window), words, *scores, f"{times.get(f'{window}, {top_k}', '')}"])
    return table(["window", "k", *TASKS, "ms"], rows)


def main() -> None:
    if len(sys.argv) not in (1, 3):
        sys.exit(__doc__)
    work = Path(sys.argv[2]).resolve() if len(sys.argv) == 3 else Path("unused")
    steps = Steps(work, results=EXAMPLES / "results" / "steps")
    if len(sys.argv) == 3:
        prepare_process()
        compute(steps, find_data(Path(sys.argv[1]).resolve()))
    write_blocks({"windows": make_table(steps)}, EXAMPLES / "README.md")


if __name__ == "__main__":
    main()
