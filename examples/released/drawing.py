"""The released model that draws: what a judge sees in its pictures, the pictures, and what a test asks again.

The judge is the classifier of examples/disentangled_dit, trained longer by judge.yaml; its modules are found by their
bare names.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import datasets
import torch
from PIL import Image

DIT = Path(__file__).resolve().parents[1] / "disentangled_dit"
JUDGE = Path(__file__).resolve().parent / "reached" / "judge"
PER_CLASS = 50
# Pixels of a shown picture, at least; pictures of a row.
SHOWN, COLUMNS = 128, 8
# The guidance of `hf-ext sample`; with less, the class is recognised in fewer pictures.
SAMPLING: dict[str, Any] = {"num_inference_steps": 20, "guidance_scale": 4.0}
# Behind this folder, whose modules go first.
sys.path.append(str(DIT))

from measuring import CLASSES, Judge, load, measure_classes

from hf_ext.tasks.diffusion_grids import draw_grid, sample_rows


def judge_pictures(folder: Path, data: Path, per_class: int = PER_CLASS) -> tuple[list[dict[str, Any]], str]:
    """Results of equally many pictures of each class, beside real ones, and the words of the table."""
    with tempfile.TemporaryDirectory() as shuffled:
        # The judge compares with the rest of the test pictures: CIFAR-10's file has class after class.
        rows = datasets.load_dataset(str(data), split="test").shuffle(seed=0)
        rows.to_parquet(Path(shuffled) / "test.parquet")
        judge = Judge(JUDGE, Path(shuffled), 10 * per_class)
    made, real = measure_classes(folder, judge, per_class, **SAMPLING), judge.real()
    pictures = f"{10 * per_class} pictures, {per_class} of each class"
    names = {"accuracy": "class recognised by a classifier", "feature_distance": "feature distance (not FID)"}
    results = [
        {
            "metric": metric,
            "name": name,
            "value": made[metric],
            "dataset": pictures,
            "split": "test",
            "task": "unconditional-image-generation",
            "arguments": SAMPLING,
            "baselines": {"real test pictures": real[metric]},
        }
        for metric, name in names.items()
    ]
    scores = (
        f"{pictures}: a classifier recognises the class in {100 * made['accuracy']:.1f} %, in real pictures in "
        f"{100 * real['accuracy']:.1f} %; feature distance {made['feature_distance']:.2f} "
        f"(real {real['feature_distance']:.2f})"
    )
    return results, scores


def draw(folder: Path) -> Image.Image:
    """A row for each class."""
    pipeline = load(folder)
    names = pipeline.config["id2label"]
    rows = sample_rows(pipeline, list(range(CLASSES)), COLUMNS, 0, num_inference_steps=50, guidance_scale=3.0)
    return draw_grid(rows, [names[str(label)] for label in range(CLASSES)], SHOWN)


# Rows of one noise: sizes that the picture may have had, and places of the part, of a picture of 48 x 48 pixels.
CONTROLS: dict[str, dict[str, Any]] = {
    **{f"size {side}": {"original_size": (side, side)} for side in (8, 12, 16, 24, 32)},
    **{f"top {place}": {"crop": (place, 8)} for place in (2, 14)},
    **{f"left {place}": {"crop": (8, place)} for place in (2, 14)},
}


def draw_controls(folder: Path, label: str = "automobile") -> Image.Image:
    """A row for each value of a control."""
    pipeline = load(folder)
    rows = [sample_rows(pipeline, [label], COLUMNS, 0, **SAMPLING, **asked)[0] for asked in CONTROLS.values()]
    return draw_grid(rows, list(CONTROLS), SHOWN)


def draw_again(folder: Path) -> list[float]:
    """Mean values of a picture of each class, in a few steps from fixed noise: a test asks again without data."""
    pipeline = load(folder)
    classes = list(range(pipeline.transformer.config.num_classes))
    size = pipeline.image_size()
    noise = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(0)).repeat(len(classes), 1, 1, 1)
    images = pipeline(class_labels=classes, latents=noise, num_inference_steps=4, output_type="pt").images
    means: list[float] = images.mean(dim=(1, 2, 3)).tolist()
    return means
