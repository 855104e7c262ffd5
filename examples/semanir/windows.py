"""Windows and keys: windows of 8, 16 and 32 pixels, four numbers of keys, four tasks, three seeds.

python examples/semanir/windows.py DATA WORK   trains what is missing, an hour of a core in all, and writes the table
python examples/semanir/windows.py             writes the table again, from results/steps alone
DATA holds the folders bsds500 (train, test) and set12. All networks have the same parameters: a window has none. All
see the same patches, and each training step draws the number of keys, as the presets do; so one network answers for
every k. Each run leaves a file in examples/semanir/results/steps and is skipped where that is there.
"""

import itertools
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import EXAMPLES, RECIPE, input_psnr, load, run_arguments
from study import CANDIDATES
from timing import in_turns, time_of

from hf_ext.data.opening import open_source
from hf_ext.files import read_json
from hf_ext.training import build_task, evaluate
from hf_ext.training.arguments import DataSource

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments import keep, machine, prepare_process, spread, table, train_run, write_blocks

RESULTS = EXAMPLES / "results" / "steps"
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
    **CANDIDATES["columnar, width 32, 2 x 2 layers"],
    # Patches are whole windows of every size.
    "task.patch_size": 64,
    "per_device_train_batch_size": 2,
    "max_steps": STEPS,
    "warmup_steps": 20,
}
# The pictures of Set12 with 256 x 256 pixels.
TESTED = "[:7]"
REPEATS = 5


def keys_of(window: int) -> list[int]:
    """Numbers of keys that are measured in windows of this side."""
    return [window**2 // share for share in SHARES]


def find_values(task: str, window: int, seed: int) -> dict[str, Any]:
    """Fields that differ from study.yaml, but for the data."""
    keys = keys_of(window)
    windows = {"model.window_size": window, "model.top_k": window**2 // 2, "model.train_top_k": keys[:-1]}
    return {**NETWORK, **TASKS[task], **windows, "seed": seed}


def find_data(data: Path) -> dict[str, Any]:
    """Photographs to train on, and pictures to test on."""
    train = {"path": str(data / "bsds500"), "split": "train+test"}
    return {"train": train, "eval": {"path": str(data / "set12"), "split": f"train{TESTED}"}}


def train(run: Path, values: dict[str, Any], keys: list[int]) -> dict[str, float]:
    """Trains, and measures the PSNR with every number of keys."""
    train_run(run, RECIPE, values)
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
    # The first round warms up; whatever else the machine does is spread over all.
    times = in_turns([*calls], REPEATS + 1, lambda name: time_of(calls[name]))
    milliseconds = {name: round(1000 * float(np.median(values[1:]))) for name, values in times.items()}
    return {**machine("hf-ext", "torch"), "milliseconds": milliseconds}


def measure_inputs(data: dict[str, Any]) -> dict[str, float]:
    """PSNR of what the networks are given."""
    return input_psnr({task: {**find_values(task, 8, 0), "data": data} for task in TASKS})


def name_run(task: str, window: int, seed: int) -> str:
    """The name of a run, and of its file."""
    return f"window-{list(TASKS).index(task)}-{window}-{seed}"


def compute(data: dict[str, Any], work: Path, results: Path = RESULTS) -> None:
    """Runs that are missing; the first seed of all tasks and windows comes first."""
    keep(results / "window-inputs.json", partial(measure_inputs, data))
    for seed, task, window in itertools.product(SEEDS, TASKS, WINDOWS):
        name, values = name_run(task, window, seed), {**find_values(task, window, seed), "data": data}
        keep(results / f"{name}.json", partial(train, work / "runs" / name, values, keys_of(window)))
    keep(results / "window-times.json", measure_times)


def make_table(results: Path = RESULTS) -> str:
    """A row for each window and number of keys: mean and standard deviation over the seeds."""

    def read(name: str) -> Any:
        return read_json(results / f"{name}.json")["result"]

    times, inputs = read("window-times")["milliseconds"], read("window-inputs")
    rows = [["degraded", "", *(f"{inputs[task]:.2f}" for task in TASKS), ""]]
    for window in WINDOWS:
        for share, top_k in zip(SHARES, keys_of(window), strict=True):
            words = f"{top_k} (N / {share})" if share > 1 else f"{top_k} (dense)"
            scores = [spread([read(name_run(task, window, seed))[str(top_k)] for seed in SEEDS], 2) for task in TASKS]
            rows.append([str(window), words, *scores, f"{times[f'{window}, {top_k}']}"])
    return table(["window", "k", *TASKS, "ms"], rows)


if __name__ == "__main__":
    if len(sys.argv) not in (1, 3):
        sys.exit(__doc__)
    if len(sys.argv) == 3:
        prepare_process()
        compute(find_data(Path(sys.argv[1]).resolve()), Path(sys.argv[2]).resolve())
    write_blocks({"windows": make_table()}, EXAMPLES / "README.md")
