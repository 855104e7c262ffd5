"""The cost of the training loop beside a bare PyTorch loop on the same model, data and steps.

    OMP_NUM_THREADS=1 python examples/benchmarks/training_overhead.py

Both loops load, augment, train, clip, step the schedule and average the weights. They run in turns, so that other load
of the machine hits both; the result is the median over the rounds of the ratio of their processor times a step, with
logging. One of the cases computes next to nothing: there the difference is what the loop itself takes.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image
from timing import Content, apart, markdown_table, run
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import get_scheduler

from hf_ext.tasks.diffusion import DisentangledDiTTask
from hf_ext.tasks.restoration import SemanIRTask
from hf_ext.training import Task, TrainingArguments, train
from hf_ext.training.data import IndexedSamples, collate_samples

DECAY = 0.99
WARM_UP = 10
TINY = {"architecture": "columnar", "embed_dim": 8, "depths": [1], "num_heads": [1], "window_size": 8, "top_k": 8}


class NothingTask(Task):
    """One matrix, of a single weight unless the model section gives a width."""

    def build_model(self, config: dict[str, Any], init_from: str | None) -> torch.nn.Module:
        return torch.nn.Linear(config.get("width", 1), 512 if "width" in config else 1, bias=False)

    def training_sample(self, example: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
        return {"values": torch.ones(1)}

    def loss(self, model: torch.nn.Module, batch: dict[str, Any], step: int) -> torch.Tensor:
        loss: torch.Tensor = model(batch["values"].expand(-1, next(model.parameters()).shape[1])).sum()
        return loss

    def save_model(self, model: torch.nn.Module, state_dict: dict[str, torch.Tensor], folder: Path) -> None:
        torch.save(state_dict, folder / "model.pt")


# Steps that are counted, task with its fields, model section.
CASES: dict[str, tuple[int, type[Task], dict[str, Any], dict[str, Any]]] = {
    "SemanIR, 50 ms": (25, SemanIRTask, {"patch_size": 16}, {"preset": "columnar-tiny"}),
    "SemanIR, 6 ms": (100, SemanIRTask, {"patch_size": 8}, TINY),
    "a matrix, 1 ms": (200, NothingTask, {}, {"width": 512}),
    "Disentangled DiT": (50, DisentangledDiTTask, {"image_size": 16}, {"preset": "tiny", "num_classes": 10}),
    "nothing": (400, NothingTask, {}, {}),
}


def make_task(kind: type[Task], fields: dict[str, Any]) -> tuple[Task, list[float]]:
    """A task, and the processor times at which its loss is asked for."""
    times: list[float] = []

    class Timed(kind):  # type: ignore[misc, valid-type]
        def loss(self, model: torch.nn.Module, batch: dict[str, Any], step: int) -> torch.Tensor:
            times.append(time.process_time())
            loss: torch.Tensor = super().loss(model, batch, step)
            return loss

    return Timed(**fields), times


def make_data() -> datasets.Dataset:
    pixels = np.random.default_rng(0).integers(256, size=(16, 64, 64, 3), dtype=np.uint8)
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
        lengths = dict.fromkeys(("max_steps", "save_steps", "eval_steps"), steps)
        told = {"method": "timed", "output_dir": folder, "per_device_train_batch_size": 1, "report_to": "none"}
        train(task, TrainingArguments(**told, **lengths, model=model_section, ema_decay=DECAY), data)


def step_seconds(times: list[float]) -> float:
    """Mean processor time of a step after the first few, so that rare work, such as logging, counts."""
    return (times[-1] - times[WARM_UP]) / (len(times) - 1 - WARM_UP)


def measure_loops(bare_first: bool) -> dict[str, dict[str, float]]:
    """Processor seconds a step of both loops, for each case."""
    torch.set_num_threads(1)
    data, found = make_data(), {}
    for case, (steps, kind, fields, model_section) in CASES.items():
        seconds = {}
        loops = {"bare": bare_loop, "ours": our_loop}
        for name in loops if bare_first else reversed(loops):
            task, times = make_task(kind, fields)
            loops[name](task, data, model_section, steps + WARM_UP)
            seconds[name] = step_seconds(times)
        found[case] = seconds
    return found


def measure(words: argparse.Namespace) -> Iterator[Content]:
    """After each round all rounds so far."""
    loops = []
    for number in tqdm(range(words.rounds), "rounds"):
        loops.append(apart(measure_loops, number % 2 == 0))
        yield {"medians": summarize(loops), "loops": loops}


def summarize(loops: list[dict[str, dict[str, float]]]) -> dict[str, float]:
    """Medians over the rounds."""
    median, found = statistics.median, {}
    for case in CASES:
        pairs = [row[case] for row in loops]
        if case == "nothing":
            found["bookkeeping_ms"] = median((pair["ours"] - pair["bare"]) * 1e3 for pair in pairs)
        else:
            found[f"ratio at {case}"] = median(pair["ours"] / pair["bare"] for pair in pairs)
            found[f"bare_ms at {case}"] = median(pair["bare"] * 1e3 for pair in pairs)
    return found


def markdown(content: Content) -> str:
    rows = [[name, f"{value:.3f}"] for name, value in content["medians"].items()]
    return markdown_table(["processor time", "now"], rows)


if __name__ == "__main__":
    run("training_overhead", __doc__, measure, markdown, rounds=7)
