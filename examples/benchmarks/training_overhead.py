"""What the training loop costs beside a bare PyTorch loop on the same model, data and steps.

    OMP_NUM_THREADS=1 python examples/benchmarks/training_overhead.py

Both loops load, augment, train, clip and step the schedule. They run in turns, so that other load of the machine hits
both; the result is the median over the pairs of the ratio of their times per step, logging included. The ratio of the
processor's time is given too: on a busy machine it is the steadier of the two.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import get_scheduler
from versions import installed_versions

from hf_ext.tasks.restoration import SemanIRTask
from hf_ext.training import TrainingArguments, train
from hf_ext.training.data import IndexedSamples, collate_samples

SIZES = {"batch_size": 1, "patch_size": 16, "images": 16}


class TimedTask(SemanIRTask):
    """SemanIR's task, which notes wall and processor time whenever a loss is asked for."""

    def loss(self, model: torch.nn.Module, batch: dict[str, Any], step: int) -> torch.Tensor:
        self.times.append((time.perf_counter(), time.process_time()))
        return super().loss(model, batch, step)


def make_task() -> TimedTask:
    task = TimedTask(patch_size=SIZES["patch_size"])
    task.times = []
    return task


def make_data() -> datasets.Dataset:
    pictures = np.random.default_rng(0).integers(256, size=(SIZES["images"], 64, 64, 3), dtype=np.uint8)
    return datasets.Dataset.from_dict({"image": list(pictures)}).cast_column("image", datasets.Image())


def bare_loop(task: TimedTask, data: datasets.Dataset, model_section: dict[str, Any], steps: int) -> None:
    """What one would write by hand."""
    torch.manual_seed(0)
    model = task.build_model(model_section, None).train()
    optimizer = torch.optim.AdamW(task.parameter_groups(model, 0.0), lr=2e-4, fused=True)
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=0, num_training_steps=steps)
    samples = IndexedSamples(data, task.training_sample, 0)
    loader = DataLoader(
        samples, batch_size=SIZES["batch_size"], sampler=range(steps * SIZES["batch_size"]), collate_fn=collate_samples
    )
    for step, (batch, _) in enumerate(loader):
        loss = task.loss(model, batch, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def our_loop(task: TimedTask, folder: Path, output: Path, model_section: dict[str, Any], steps: int) -> None:
    """The same through [`train`], which logs every ten steps."""
    arguments = TrainingArguments(
        method="semanir",
        output_dir=str(output),
        data={"train": {"path": str(folder)}},
        model=model_section,
        max_steps=steps,
        per_device_train_batch_size=SIZES["batch_size"],
        save_steps=steps,
        eval_steps=steps,
        report_to="none",
    )
    train(task, arguments)


def step_seconds(times: list[tuple[float, float]], warm_up: int) -> tuple[float, float]:
    """Mean wall and processor time of a step after the first few, so that rare work, such as logging, counts."""
    steps = len(times) - 1 - warm_up
    return (times[-1][0] - times[warm_up][0]) / steps, (times[-1][1] - times[warm_up][1]) / steps


def measure(pairs: int, steps: int, warm_up: int, model_section: dict[str, Any]) -> list[dict[str, float]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        data = make_data()
        data.to_parquet(f"{folder}/data/train.parquet")
        for pair in tqdm(range(pairs + 1), "pairs"):
            ours, bare = make_task(), make_task()
            runs = [
                lambda task=ours, pair=pair: our_loop(
                    task, Path(folder, "data"), Path(folder, f"run{pair}"), model_section, steps
                ),
                lambda task=bare: bare_loop(task, data, model_section, steps),
            ]
            for run in runs if pair % 2 else reversed(runs):
                run()
            (bare_wall, bare_cpu), (our_wall, our_cpu) = (step_seconds(task.times, warm_up) for task in (bare, ours))
            row = {"bare": bare_wall, "ours": our_wall, "ratio": our_wall / bare_wall}
            rows.append({**row, "bare_cpu": bare_cpu, "ours_cpu": our_cpu, "cpu_ratio": our_cpu / bare_cpu})
    # The first pair warms caches.
    return rows[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm_up", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "training_overhead.json")
    words = parser.parse_args()
    torch.set_num_threads(1)
    model_section: dict[str, Any] = {"preset": "columnar-tiny"}
    load_before = os.getloadavg()
    rows = measure(words.pairs, words.steps, words.warm_up, model_section)
    ratio = statistics.median(row["ratio"] for row in rows)
    content = {
        "median_ratio": ratio,
        "median_cpu_ratio": statistics.median(row["cpu_ratio"] for row in rows),
        "median_step_seconds": {name: statistics.median(row[name] for row in rows) for name in ("bare", "ours")},
        "pairs": rows,
        "steps": words.steps,
        "warm_up": words.warm_up,
        "sizes": {**SIZES, "model": model_section},
        "threads": torch.get_num_threads(),
        "device": f"CPU ({platform.machine()}), {os.cpu_count()} cores",
        "load_average": {"before": load_before, "after": os.getloadavg()},
        "versions": installed_versions("torch", "accelerate", "transformers", "datasets", "hf-ext"),
    }
    words.output.parent.mkdir(exist_ok=True)
    words.output.write_text(json.dumps(content, indent=2) + "\n")
    milliseconds = content["median_step_seconds"]["bare"] * 1000
    print(
        f"ours / bare = {ratio:.4f} (processor time {content['median_cpu_ratio']:.4f}), "
        f"steps of {milliseconds:.1f} ms: {words.output}"
    )


if __name__ == "__main__":
    main()
