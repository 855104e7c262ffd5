"""The cost of the training loop beside a bare PyTorch loop on the same model, data and steps, and of its start.

    OMP_NUM_THREADS=1 python examples/benchmarks/training_overhead.py
    OMP_NUM_THREADS=1 python examples/benchmarks/training_overhead.py --before OTHER/bin/python

Both loops load, augment, train, clip, step the schedule and average the weights. They run in turns, so that other load
of the machine hits both; the result is the median over the rounds of the ratio of their processor times a step, with
logging. One of the cases computes next to nothing: there the difference is what the loop itself takes. The start is
the processor time of `hf-ext train` until its first row, with a step a row, and until a wrong key is answered.
`--before` takes the Python of another installation of hf_ext, with which every round is run too.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import psutil
import torch
import yaml
from PIL import Image
from timing import describe_machine, markdown_table, write_result
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import get_scheduler

from hf_ext.tasks.restoration import SemanIRTask
from hf_ext.training import Task, TrainingArguments, train
from hf_ext.training.data import IndexedSamples, collate_samples

DECAY = 0.99
WARM_UP = 10
TINY = {"architecture": "columnar", "embed_dim": 8, "depths": [1], "num_heads": [1], "window_size": 8, "top_k": 8}
# Steps that are counted, side of the patches, model section; without one, the model is a single weight.
CASES: dict[str, tuple[int, int, dict[str, Any] | None]] = {
    "50 ms": (25, 16, {"preset": "columnar-tiny"}),
    "6 ms": (100, 8, TINY),
    "nothing": (400, 8, None),
}
STARTS: dict[str, dict[str, Any]] = {
    "semanir": {"method": "semanir", "task": {"patch_size": 16}, "model": TINY},
    "mrconv": {
        "method": "mrconv-pixels",
        "task": {"image_size": 16, "mean": [0.5] * 3, "std": [0.2] * 3},
        "model": {"hidden_size": 16, "num_hidden_layers": 2, "kernel_size": 8},
    },
    "dit": {"method": "disentangled-dit", "task": {"image_size": 16}, "model": {"preset": "tiny", "num_classes": 10}},
}

# Of each wrong key: what it replaces in the file of SemanIR, and the key.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "wrong key": ({"max_step": 3}, "max_step"),
    "wrong task key": ({"task": {"patch_sise": 16}}, "patch_sise"),
    "wrong model key": ({"model": {"embed_dims": 8}}, "embed_dims"),
}


class NothingTask(Task):
    """A single weight."""

    def build_model(self, config: dict[str, Any], init_from: str | None) -> torch.nn.Module:
        return torch.nn.Linear(1, 1, bias=False)

    def training_sample(self, example: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
        return {"values": torch.ones(1)}

    def loss(self, model: torch.nn.Module, batch: dict[str, Any], step: int) -> torch.Tensor:
        loss: torch.Tensor = model(batch["values"]).sum()
        return loss

    def save_model(self, model: torch.nn.Module, state_dict: dict[str, torch.Tensor], folder: Path) -> None:
        torch.save(state_dict, folder / "model.pt")


def make_task(patch_size: int, is_real: bool) -> tuple[Task, list[tuple[float, float]]]:
    """A task, and the wall and processor times at which its loss is asked for."""
    kind = SemanIRTask if is_real else NothingTask
    times: list[tuple[float, float]] = []

    class Timed(kind):  # type: ignore[misc, valid-type]
        def loss(self, model: torch.nn.Module, batch: dict[str, Any], step: int) -> torch.Tensor:
            times.append((time.perf_counter(), time.process_time()))
            loss: torch.Tensor = super().loss(model, batch, step)
            return loss

    return Timed(patch_size=patch_size) if is_real else Timed(), times


def make_data(side: int = 64) -> datasets.Dataset:
    pixels = np.random.default_rng(0).integers(256, size=(16, side, side, 3), dtype=np.uint8)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=10)})
    rows = {"image": [Image.fromarray(picture) for picture in pixels], "label": [place % 10 for place in range(16)]}
    return datasets.Dataset.from_dict(rows, features=features)


def bare_loop(task: Task, data: datasets.Dataset, model_section: dict[str, Any], steps: int) -> None:
    """A loop as one would write it by hand."""
    torch.manual_seed(0)
    model = task.build_model(model_section, None).train()
    optimizer = torch.optim.AdamW(task.parameter_groups(model, 0.0), lr=2e-4, fused=True)
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=0, num_training_steps=steps)
    samples = IndexedSamples(data, task.training_sample, 0)
    loader = DataLoader(samples, batch_size=1, sampler=range(steps), collate_fn=collate_samples)
    weights = list(model.parameters())
    averages = [weight.detach().clone() for weight in weights]
    for step, (batch, _) in enumerate(loader):
        loss = task.loss(model, batch, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(averages, weights, 1 - DECAY)


def our_loop(task: Task, data: datasets.Dataset, model_section: dict[str, Any], steps: int) -> None:
    """The same through [`train`], which logs every ten steps."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            method="timed",
            output_dir=folder,
            model=model_section,
            max_steps=steps,
            per_device_train_batch_size=1,
            ema_decay=DECAY,
            save_steps=steps,
            eval_steps=steps,
            report_to="none",
        )
        train(task, arguments, data)


def step_seconds(times: list[tuple[float, float]], warm_up: int) -> tuple[float, float]:
    """Mean wall and processor time of a step after the first few, so that rare work, such as logging, counts."""
    steps = len(times) - 1 - warm_up
    return (times[-1][0] - times[warm_up][0]) / steps, (times[-1][1] - times[warm_up][1]) / steps


def measure_loops(bare_first: bool) -> dict[str, dict[str, float]]:
    """Processor seconds a step of both loops, for each case."""
    torch.set_num_threads(1)
    data, found = make_data(), {}
    for case, (steps, patch_size, model_section) in CASES.items():
        seconds = {}
        loops = {"bare": bare_loop, "ours": our_loop}
        for name in loops if bare_first else reversed(loops):
            task, times = make_task(patch_size, model_section is not None)
            loops[name](task, data, model_section or {}, steps + WARM_UP)
            seconds[name] = step_seconds(times, WARM_UP)[1]
        found[case] = seconds
    return found


def in_process(python: str, bare_first: bool) -> dict[str, dict[str, float]]:
    """[`measure_loops`] in a process of an installation."""
    command = [python, __file__, "--loops", str(int(bare_first))]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def start_seconds(python: str, folder: Path, name: str) -> float:
    """Processor seconds of `hf-ext train` until its first row is written."""
    config, run = folder / f"{name}.yaml", folder / f"run-{time.monotonic_ns()}"
    config.write_text(
        yaml.safe_dump({**STARTS[name], "data": {"train": {"path": str(folder / "data")}}, "logging_steps": 1})
    )
    command = [python, "-m", "hf_ext_cli.main", "train", str(config), "--output_dir", str(run)]
    # In a folder without code: `-m` takes what lies in the folder where it is called before what is installed.
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=folder
    ) as process:
        watched, rows = psutil.Process(process.pid), run / "metrics.jsonl"
        while not (rows.is_file() and rows.stat().st_size):
            if process.poll() is not None:
                raise RuntimeError(process.communicate()[1])
            time.sleep(0.002)
        used = watched.cpu_times()
        process.kill()
    return float(used.user + used.system)


def wrong_key_seconds(python: str, folder: Path, wrong: dict[str, Any], key: str) -> float:
    """Processor seconds until a wrong key is answered; a wrong answer is an error."""
    config = folder / "wrong.yaml"
    data = {"train": {"path": str(folder / "data")}}
    config.write_text(
        yaml.safe_dump({**STARTS["semanir"], "output_dir": str(folder / "never"), "data": data, **wrong})
    )
    before = os.times()
    done = subprocess.run(
        [python, "-m", "hf_ext_cli.main", "train", str(config)],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        cwd=folder,
    )
    after = os.times()
    assert done.returncode == 2 and "unknown key" in done.stderr and key in done.stderr, done.stderr
    return after.children_user + after.children_system - before.children_user - before.children_system


def measure(rounds: int, pythons: dict[str, str]) -> Iterator[dict[str, dict[str, list[Any]]]]:
    """After each round all rounds of all measurements so far, of each installation."""
    found: dict[str, dict[str, list[Any]]] = {label: {"loops": [], "starts": []} for label in pythons}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "data").mkdir()
        make_data(16).to_parquet(str(folder / "data" / "train.parquet"))
        for number in tqdm(range(rounds), "rounds"):
            for label, python in pythons.items():
                starts = {method: start_seconds(python, folder, method) for method in STARTS}
                starts |= {name: wrong_key_seconds(python, folder, *wrong) for name, wrong in WRONG.items()}
                found[label]["starts"].append(starts)
                found[label]["loops"].append(in_process(python, bare_first=number % 2 == 0))
            yield found


def summarize(rows: dict[str, list[Any]]) -> dict[str, float]:
    """Medians over the rounds."""
    median = statistics.median
    loops, found = rows["loops"], {}
    for case in CASES:
        pairs = [row[case] for row in loops]
        if case == "nothing":
            found["bookkeeping_ms"] = median((pair["ours"] - pair["bare"]) * 1e3 for pair in pairs)
        else:
            found[f"ratio at {case}"] = median(pair["ours"] / pair["bare"] for pair in pairs)
            found[f"bare_ms at {case}"] = median(pair["bare"] * 1e3 for pair in pairs)
    for name in rows["starts"][0]:
        found[f"start_seconds {name}"] = median(row[name] for row in rows["starts"])
    return found


def draw_table(medians: dict[str, dict[str, float]]) -> str:
    names = next(iter(medians.values()))
    rows = [[name, *(f"{values[name]:.3f}" for values in medians.values())] for name in names]
    return markdown_table(["processor time", *medians], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--before", metavar="PYTHON", help="Python of another installation, measured in turns.")
    parser.add_argument("--loops", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "training_overhead.json")
    words = parser.parse_args()
    if words.loops is not None:
        print(json.dumps(measure_loops(bool(words.loops))))
        return
    pythons = ({"before": words.before} if words.before else {}) | {"now": sys.executable}
    for rows in measure(words.rounds, pythons):
        medians = {label: summarize(found) for label, found in rows.items()}
        machine = describe_machine("torch", "accelerate", "transformers", "datasets", "hf-ext")
        content = {"medians": medians, "rounds": rows, "cases": CASES, "starts": STARTS, **machine}
        write_result(words.output, content, draw_table(medians))


if __name__ == "__main__":
    main()
