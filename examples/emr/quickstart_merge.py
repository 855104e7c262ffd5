"""The quickstart's step with merging: three fine-tunes of its denoiser, made on the spot, merged into one artifact.

python examples/emr/quickstart_merge.py [FOLDER]     (FOLDER: what examples/quickstart.py wrote; default quickstart)
The base removes noise of σ = 75; short trainings make of it one for σ = 15, one for σ = 50 and one for JPEG.
They are merged, and the artifact is switched from task to task.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import quickstart

from hf_ext import EMRModel, SemanIRForImageRestoration, merge_checkpoints
from hf_ext.tasks.degradations import jpeg
from hf_ext.tasks.restoration import SemanIRTask
from hf_ext.training import TrainingArguments, train

STEPS, QUALITY, SIDE = 20, 10, 96
NOISE = {"sigma15": 15, "sigma50": 50}
TASKS = (*NOISE, "jpeg")


def degrade(photo: np.ndarray, task: str, seed: int) -> np.ndarray:
    """The input of a task's model, white at 1."""
    if task == "jpeg":
        return jpeg(photo, QUALITY).astype(np.float32) / 255
    return quickstart.add_noise(photo, seed, NOISE[task])


def fine_tune(folder: Path, task: str) -> Path:
    """A short training from the quickstart's model, in this process; its snapshot."""
    run = folder / "fine-tunes" / task
    if not (run / "snapshot" / "training.json").is_file():
        arguments = TrainingArguments(
            method="semanir",
            output_dir=str(run),
            init_from=str(folder / "run" / "snapshot"),
            data={"train": {"path": str(folder / quickstart.PHOTOS), "split": "train"}},
            max_steps=STEPS,
            per_device_train_batch_size=4,
            learning_rate=3e-4,
            warmup_steps=5,
            ema_decay=0.9,
        )
        noise = {"kind": "gaussian_noise", "sigma": NOISE.get(task)}
        train(SemanIRTask({"kind": "jpeg", "quality": QUALITY} if task == "jpeg" else noise), arguments)
    return run / "snapshot"


@torch.no_grad()
def decibels(model: torch.nn.Module | None, task: str) -> float:
    """Mean PSNR over the unseen photographs; without a model, of the degraded ones."""
    scores = []
    for seed, photo in enumerate(quickstart.unseen_photos().values()):
        clean = quickstart.middle(photo, SIDE)
        restored = degrade(clean, task, seed)
        if model is not None:
            pixels = torch.from_numpy(restored.transpose(2, 0, 1))[None]
            restored = model(pixel_values=pixels).reconstruction[0].permute(1, 2, 0).numpy()
        scores.append(quickstart.score(restored, clean))
    return float(np.mean(scores))


def main(folder: Path) -> None:
    """Fine-tunes, merges, switches and prints the table."""
    started = time.monotonic()
    logging.disable_progress_bar()
    base = folder / "run" / "snapshot"
    if not base.is_dir():
        sys.exit(f"no model in {base}: run examples/quickstart.py first.")
    tasks = {task: str(fine_tune(folder, task)) for task in TASKS}
    config = {"base": str(base), "tasks": tasks}
    merge_checkpoints({**config, "method": "average"}, folder / "average", overwrite=True, progress=False)
    merge_checkpoints(config, folder / "merged", overwrite=True, progress=False)

    merged = EMRModel.from_pretrained(folder / "merged", task=TASKS[0])
    table: dict[str, dict[str, float]] = {"degraded": {task: decibels(None, task) for task in TASKS}}
    for name, source in {"base": base, "average": folder / "average"}.items():
        model = SemanIRForImageRestoration.from_pretrained(source).eval()
        table[name] = {task: decibels(model, task) for task in TASKS}
    table["fine-tunes"] = {
        task: decibels(SemanIRForImageRestoration.from_pretrained(source).eval(), task)
        for task, source in tasks.items()
    }
    table["merged (EMR)"] = {}
    for task in TASKS:
        merged.set_task(task)
        table["merged (EMR)"][task] = decibels(merged.model, task)
    (folder / "merge.json").write_text(json.dumps(table, indent=2) + "\n")

    print(f"\nPSNR in dB, three tasks from one artifact\n{'':14}" + "".join(f"{task:>9}" for task in TASKS))
    for name, row in table.items():
        print(f"{name:14}" + "".join(f"{row[task]:9.2f}" for task in TASKS))
    sizes = [sum(path.stat().st_size for path in Path(source).rglob("*.safetensors")) for source in tasks.values()]
    size = sum(path.stat().st_size for path in (folder / "merged").rglob("*.safetensors"))
    print(f"{size / 1e6:.2f} MB instead of {sum(sizes) / 1e6:.2f} MB; {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "quickstart"))
