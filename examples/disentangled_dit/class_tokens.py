"""A class as one token and as several of its own, beside adaLN: equal steps, equal noise.

python examples/disentangled_dit/class_tokens.py DATA WORK
DATA holds the folder cifar10. A small network sees its pictures at 16 x 16 pixels, without controls. Of test pictures
with fixed noise the gap is the loss with a wrong class less that with the right one, and the accuracy how often the
right class has the least loss. Each run leaves a file in WORK/results and is skipped where that is there; at the end
results/class_tokens.json and the table in README.md are written.
"""

import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from diffusers import DDIMScheduler
from sets import resized
from torch import Tensor

from hf_ext.files import write_json
from hf_ext.pipelines.disentangled_dit import DisentangledDiTTransformer2DModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments import count_seconds, keep, machine, prepare_process, spread, table, write_blocks

EXAMPLES = Path(__file__).resolve().parent
STEPS, WARM_UP, BATCH, RATE, SEEDS = 500, 50, 32, 2e-3, (0, 1, 2)
CLASSES, SIDE, SEEN, JUDGED = 10, 16, 20_000, 300
TIMESTEPS = (150, 350, 550, 750)
SCHEDULER = DDIMScheduler(beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction")
NETWORK = {
    "sample_size": SIDE,
    "patch_size": 4,
    "in_channels": 3,
    "num_layers": 4,
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "num_classes": CLASSES,
    "control_alpha": {},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "1 token": {},
    "8 tokens": {"num_class_tokens": 8},
    "in adaLN": {"conditioning": "adaln"},
}


@cache
def pictures(data: Path, split: str, count: int) -> tuple[Tensor, Tensor]:
    """Values in [-1, 1] and classes, drawn from a split."""
    rows = datasets.load_dataset(str(data / "cifar10"), split=split).shuffle(seed=0).select(range(count))
    values = np.stack([np.asarray(resized(picture, SIDE)) for picture in rows["image"]])
    return torch.from_numpy(values).permute(0, 3, 1, 2) / 127.5 - 1, torch.tensor(rows["label"])


def noisy(clean: Tensor, generator: torch.Generator, timesteps: Tensor) -> tuple[Tensor, Tensor]:
    """Pictures with noise, and the velocity that is to be predicted."""
    noise = torch.randn(clean.shape, generator=generator)
    return SCHEDULER.add_noise(clean, noise, timesteps), SCHEDULER.get_velocity(clean, noise, timesteps)


def train(data: Path, network: dict[str, Any], seed: int) -> DisentangledDiTTransformer2DModel:
    """A network after all steps; a seed draws the same pictures, noise and dropped classes for every variant."""
    torch.manual_seed(seed)
    model, generator = DisentangledDiTTransformer2DModel(**NETWORK, **network), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, (STEPS - step) / (STEPS - WARM_UP))
    )
    images, classes = pictures(data, "train", SEEN)
    for _ in range(STEPS):
        chosen = torch.randint(len(images), (BATCH,), generator=generator)
        timesteps = torch.randint(1000, (BATCH,), generator=generator)
        dropped = torch.rand(BATCH, generator=generator) < model.config.condition_dropout
        mirrored = torch.rand(BATCH, 1, 1, 1, generator=generator) < 0.5
        clean = torch.where(mirrored, images[chosen].flip(3), images[chosen])
        inputs, velocity = noisy(clean, generator, timesteps)
        labels = classes[chosen].masked_fill(dropped, CLASSES)
        loss = F.mse_loss(model(inputs, timesteps, class_labels=labels).sample, velocity)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def measure(model: DisentangledDiTTransformer2DModel, data: Path) -> dict[str, float]:
    """Loss, gap and accuracy of test pictures, each said to be of every class."""
    images, labels = pictures(data, "test", JUDGED)
    losses, generator = torch.zeros(CLASSES, JUDGED), torch.Generator().manual_seed(5)
    for timestep in TIMESTEPS:
        inputs, velocity = noisy(images, generator, torch.tensor([timestep]))
        for label in range(CLASSES):
            found = model(inputs, timestep, class_labels=torch.full((JUDGED,), label)).sample
            losses[label] += (found - velocity).square().mean(dim=(1, 2, 3)) / len(TIMESTEPS)
    right = losses.gather(0, labels[None])[0]
    wrong = (losses.sum(0) - right) / (CLASSES - 1)
    accuracy = (losses.argmin(0) == labels).float().mean()
    return {"loss": float(right.mean()), "gap": float((wrong - right).mean()), "accuracy": float(accuracy)}


def make_table(results: dict[str, list[dict[str, float]]]) -> str:
    """Mean and standard deviation over the seeds."""
    kinds = (("loss", 1, 4), ("gap", 1000, 2), ("accuracy", 100, 1))
    lines = [
        [name, *(spread([scale * row[key] for row in rows], digits) for key, scale, digits in kinds)]
        for name, rows in results.items()
    ]
    text = table(["class", "loss", "gap × 1000", "accuracy, %"], lines)
    return f"{text}\n\n{len(SEEDS)} seeds, mean ± standard deviation; {STEPS} steps of {BATCH} pictures."


def main(data: Path, work: Path) -> None:
    prepare_process()
    kept, results = work / "results", {name: [] for name in VARIANTS}
    for seed in SEEDS:
        for name, network in VARIANTS.items():
            compute = partial(lambda network, seed: measure(train(data, network, seed), data), network, seed)
            results[name].append(keep(kept / f"tokens-{name}-{seed}.json", compute))
    content = {"results": results, "network": NETWORK, "steps": STEPS, "batch": BATCH, "learning_rate": RATE}
    content |= {"judged": JUDGED, "seconds": count_seconds(kept), **machine("hf-ext", "torch", "diffusers")}
    write_json(EXAMPLES / "results" / "class_tokens.json", content, 1)
    write_blocks({"tokens": make_table(results)}, EXAMPLES / "README.md")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
