"""The cost of a training step of Disentangled DiT in our task and loop, beside the same network in a plain loop.

    OMP_NUM_THREADS=1 python examples/benchmarks/disentangled_dit_training.py
    python examples/benchmarks/disentangled_dit_training.py --preset S --image_size 32 --batch_size 64

The plain loop is what one writes by hand: images mirrored at random, noise at random timesteps, labels and controls
dropped, mean squared error, clipping, our AdamW, a schedule. Both run in turns on the same images; the result is the
median over the pairs of the ratio of their times per step, logging included. The ratio of the processor's time is
given too: on a busy machine it is the steadier of the two.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from timing import describe_machine, write_result
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm
from training_overhead import step_seconds
from transformers import get_scheduler

from hf_ext.pipelines.disentangled_dit import DisentangledDiTTransformer2DModel
from hf_ext.tasks.diffusion import DisentangledDiTTask
from hf_ext.training import TrainingArguments, train
from hf_ext.training.data import IndexedSamples, collate_samples

CLASSES, IMAGES = 10, 64
Times = list[tuple[float, float]]


class TimedTask(DisentangledDiTTask):
    """The task, which notes wall and processor time whenever a loss is asked for."""

    def loss(self, model: torch.nn.Module, batch: dict[str, Any], step: int) -> Tensor:
        self.times.append((time.perf_counter(), time.process_time()))
        return super().loss(model, batch, step)


def make_task(words: argparse.Namespace) -> TimedTask:
    task = TimedTask(image_size=words.image_size)
    task.times = []
    return task


def make_data(size: int) -> datasets.Dataset:
    generator = np.random.default_rng(0)
    pictures = generator.integers(256, size=(IMAGES, size, size, 3), dtype=np.uint8)
    rows = {"image": list(pictures), "label": generator.integers(CLASSES, size=IMAGES).tolist()}
    return datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())


def plain_sample(example: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
    """Pixels in [-1, 1], mirrored or not, with their controls."""
    pixels = np.asarray(example["image"])
    flip = bool(generator.integers(2))
    if flip:
        pixels = pixels[:, ::-1]
    size = torch.tensor(pixels.shape[:2], dtype=torch.float32)
    controls = {"original_size": size, "target_size": size, "crop": torch.zeros(2)}
    controls |= {"flip": torch.tensor([float(flip)]), "aspect_ratio": torch.zeros(1)}
    values = torch.from_numpy(pixels.astype(np.float32).transpose(2, 0, 1) / 127.5 - 1)
    return {"pixels": values, "label": torch.tensor(example["label"]), "controls": controls}


def plain_loss(task: DisentangledDiTTask, model: torch.nn.Module, batch: dict[str, Any]) -> Tensor:
    """Noise prediction, written by hand."""
    clean = batch["pixels"]
    noise = torch.randn_like(clean)
    timesteps = torch.randint(task.scheduler.config.num_train_timesteps, (len(clean),))
    noisy = task.scheduler.add_noise(clean, noise, timesteps)
    without_class = torch.rand(len(clean)) < 0.1
    with_controls = ~without_class & (torch.rand(len(clean)) >= 0.1)
    labels = batch["label"].masked_fill(without_class, CLASSES)
    prediction = model(
        noisy, timesteps, class_labels=labels, controls=batch["controls"], control_mask=with_controls
    ).sample
    return F.mse_loss(prediction.float(), noise)


def plain_loop(data: datasets.Dataset, words: argparse.Namespace) -> Times:
    """A loop as one would write it by hand, on the same network."""
    torch.manual_seed(0)
    task, times = make_task(words), []
    model = task.build_model(model_section(words), None).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    scheduler = get_scheduler("constant", optimizer)
    samples = IndexedSamples(data, plain_sample, 0)
    loader = DataLoader(
        samples, batch_size=words.batch_size, sampler=range(words.steps * words.batch_size), collate_fn=collate_samples
    )
    for batch, _ in loader:
        times.append((time.perf_counter(), time.process_time()))
        loss = plain_loss(task, model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return times


def model_section(words: argparse.Namespace) -> dict[str, Any]:
    return {"preset": words.preset, "num_classes": CLASSES}


def our_loop(folder: Path, output: Path, words: argparse.Namespace) -> Times:
    """The same through [`train`], which logs every ten steps."""
    task = make_task(words)
    arguments = TrainingArguments(
        method="disentangled-dit",
        output_dir=str(output),
        data={"train": {"path": str(folder)}},
        model=model_section(words),
        max_steps=words.steps,
        per_device_train_batch_size=words.batch_size,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        save_steps=words.steps,
        eval_steps=words.steps,
        report_to="none",
    )
    train(task, arguments)
    return task.times


def measure(words: argparse.Namespace) -> list[dict[str, float]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        data = make_data(words.image_size)
        data.to_parquet(f"{folder}/data/train.parquet")
        for pair in tqdm(range(words.pairs + 1), "pairs"):
            runs = {
                "ours": lambda pair=pair: our_loop(Path(folder, "data"), Path(folder, f"run{pair}"), words),
                "plain": lambda: plain_loop(data, words),
            }
            names = sorted(runs, reverse=bool(pair % 2))
            taken = {name: step_seconds(runs[name](), words.warm_up) for name in names}
            (wall, cpu), (plain_wall, plain_cpu) = taken["ours"], taken["plain"]
            row = {"plain": plain_wall, "ours": wall, "ratio": wall / plain_wall}
            rows.append({**row, "plain_cpu": plain_cpu, "ours_cpu": cpu, "cpu_ratio": cpu / plain_cpu})
    # The first pair warms caches.
    return rows[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="tiny", choices=list(DisentangledDiTTransformer2DModel.PRESETS))
    parser.add_argument("--image_size", type=int, default=16)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm_up", type=int, default=9)
    folder = Path(__file__).parent / "results"
    parser.add_argument("--output", type=Path, default=folder / "disentangled_dit_training.json")
    words = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(words)
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    network = DisentangledDiTTransformer2DModel.PRESETS[words.preset]
    content = {
        "median_ratio": medians["ratio"],
        "median_cpu_ratio": medians["cpu_ratio"],
        "median_step_seconds": {name: medians[name] for name in ("plain", "ours")},
        "images_per_second": words.batch_size / medians["ours"],
        "pairs": rows,
        "steps": words.steps,
        "warm_up": words.warm_up,
        "sizes": {"preset": words.preset, "image_size": words.image_size, "batch_size": words.batch_size, **network},
        **describe_machine("torch", "accelerate", "diffusers", "datasets", "hf-ext"),
    }
    write_result(words.output, content)
    print(
        f"ours / plain = {content['median_ratio']:.4f} (processor time {content['median_cpu_ratio']:.4f}), "
        f"steps of {1000 * medians['plain']:.1f} ms: {words.output}"
    )


if __name__ == "__main__":
    main()
