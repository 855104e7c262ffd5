"""The quickstart's last step: three fine-tunes of its denoiser, made on the spot, merged into one artifact.

python examples/emr/quickstart_merge.py [FOLDER]     (FOLDER: what examples/quickstart.py wrote; default quickstart)
The base removes noise of σ = 25; a minute of training makes of it one for σ = 15, one for σ = 50 and one for JPEG.
They are merged, and the artifact is switched from task to task.
"""

import io
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import quickstart  # noqa: E402  found through the line above

from hf_ext import EMRModel, SemanIRForImageRestoration, merge_checkpoints  # noqa: E402

STEPS, QUALITY, SIDE = 75, 10, 128
NOISE = {"sigma15": 15, "sigma50": 50}
TASKS = (*NOISE, "jpeg")


def as_jpeg(photo: np.ndarray) -> np.ndarray:
    """A photograph after JPEG at a low quality."""
    buffer = io.BytesIO()
    Image.fromarray(photo).save(buffer, "JPEG", quality=QUALITY)
    return np.asarray(Image.open(io.BytesIO(buffer.getvalue())))


def degrade(photo: np.ndarray, task: str, seed: int) -> np.ndarray:
    """What a task's model is given, white at 1."""
    if task == "jpeg":
        return as_jpeg(photo).astype(np.float32) / 255
    noise = np.random.default_rng(seed).standard_normal(photo.shape, dtype=np.float32)
    return photo.astype(np.float32) / 255 + np.float32(NOISE[task] / 255) * noise


def fine_tune(folder: Path, task: str) -> Path:
    """A short training from the quickstart's model; its snapshot."""
    run = folder / "fine-tunes" / task
    if (run / "snapshot" / "training.json").is_file():
        return run / "snapshot"
    changes = {**quickstart.photo_source(folder), "output_dir": run, "init_from": folder / "run" / "snapshot"}
    changes |= {"max_steps": STEPS}
    changes |= {"learning_rate": 5e-4, "warmup_steps": 10, "ema_decay": 0.9, "data.eval": "null"}
    if task == "jpeg":
        changes |= {"task.degradation": "{kind: paired}", "data.train.path": write_pairs(folder)}
    else:
        changes |= {"task.degradation.sigma": NOISE[task]}
    quickstart.train("semanir", changes)
    return run / "snapshot"


def write_pairs(folder: Path) -> Path:
    """The training tiles as lq/hq pairs."""
    pairs = folder / "jpeg-pairs"
    for side in ("lq", "hq"):
        (pairs / side).mkdir(parents=True, exist_ok=True)
    for path in sorted((folder / quickstart.PHOTOS / "train").glob("*.png")):
        with Image.open(path) as image:
            tile = np.asarray(image.convert("RGB"))
        Image.fromarray(as_jpeg(tile)).save(pairs / "lq" / path.name)
        Image.fromarray(tile).save(pairs / "hq" / path.name)
    return pairs


def middle(photo: np.ndarray) -> np.ndarray:
    """The middle of a photograph."""
    top, left = ((length - SIDE) // 2 for length in photo.shape[:2])
    return photo[top : top + SIDE, left : left + SIDE]


@torch.no_grad()
def decibels(model: torch.nn.Module | None, task: str) -> float:
    """Mean PSNR over the unseen photographs; without a model, of the degraded ones."""
    scores = []
    for seed, photo in enumerate(quickstart.unseen_photos().values()):
        clean = middle(photo)
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
