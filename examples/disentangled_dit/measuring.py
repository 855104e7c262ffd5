"""Measurements of the study: images of finished models, the pictures that runs drew on their way, real images."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import classifier  # noqa: F401  registers the judge, which is loaded by its name
import datasets
import numpy as np
import peers  # noqa: F401  registers other networks than ours, too
from diffusers import DiffusionPipeline
from drift import high_frequency_energy
from generating import evaluate_size_control, generate_images
from PIL import Image
from safetensors.torch import load_file, save_file
from sets import resized

from hf_ext.files import whole_folder
from hf_ext.metrics import ClassifierFeatures, frechet_distance, kernel_distance_of_subsets
from hf_ext.pipelines.disentangled_dit import DisentangledDiTPipeline
from hf_ext.tasks.diffusion_grids import GAP, LEAST

CLASSES = 10
# Generated images: steps of DDIM and guidance.
SAMPLING: dict[str, Any] = {"num_inference_steps": 20, "guidance_scale": 2.0}
# Real test pictures whose features are compared with; as many images as are generated come from the others.
REFERENCE = 2000
# Samples of a kernel distance at once, and how often they are drawn.
SUBSET, SUBSETS = 1000, 20


class Judge:
    """
    The trained classifier with features of real test pictures of a set, of which `others` are kept apart from the
    reference.
    """

    def __init__(self, folder: Path, data: Path, others: int):
        rows = datasets.load_dataset(str(data), split="test")
        # Where the machinery is tried there are few.
        others = min(others, len(rows) // 2)
        pictures = rows.select(range(min(len(rows), others + REFERENCE)))
        self.labels = np.array(pictures["label"])[:others]
        images = as_arrays(pictures["image"])
        self.others, self.classifier = images[:others], ClassifierFeatures(str(folder))
        self.reference = self.classifier(images[others:])

    def measure(self, images: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """
        Distances to real images in the features of the classifier (never FID), and the share of images in which it
        sees the class that was asked for. The Fréchet distance depends on the number of images.
        """
        features, seen = self.classifier.classify(images)
        subset = min(SUBSET, len(features), len(self.reference))
        distance, _ = kernel_distance_of_subsets(features, self.reference, subset_size=subset, subsets=SUBSETS)
        return {
            "feature_distance": frechet_distance(features, self.reference),
            "kernel_distance": distance,
            "accuracy": float(np.mean(seen == labels)),
            "images": len(images),
        }

    def real(self) -> dict[str, float]:
        """The same of real images: what no model can do better than by chance."""
        return self.measure(self.others, self.labels)


def as_arrays(pictures: Iterable[Image.Image]) -> np.ndarray:
    """uint8 [pictures, height, width, 3] of pictures of one size."""
    return np.stack([np.asarray(picture.convert("RGB")) for picture in pictures])


def keep_judge(snapshot: Path, folder: Path) -> None:
    """Copies a classifier with weights of 16 bits, small enough to be committed; they are read as float32."""
    with whole_folder(folder) as made:
        for path in snapshot.glob("*config.json"):
            shutil.copy(path, made)
        weights = load_file(snapshot / "model.safetensors")
        halves = {name: value.half() if value.is_floating_point() else value for name, value in weights.items()}
        save_file(halves, made / "model.safetensors", metadata={"format": "pt"})


def right_shares(folder: Path, sets: dict[str, Path]) -> dict[str, float]:
    """Of each set's test pictures the share that a classifier names rightly."""
    network, shares = ClassifierFeatures(str(folder), batch_size=250), {}
    for name, data in sets.items():
        rows = datasets.load_dataset(str(data), split="test")
        shares[name] = float(np.mean(network.classify(as_arrays(rows["image"]))[1] == np.array(rows["label"])))
    return shares


def load(snapshot: Path) -> DisentangledDiTPipeline:
    """A run's pipeline, without bars."""
    pipeline: DisentangledDiTPipeline = DiffusionPipeline.from_pretrained(str(snapshot))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def measure_classes(snapshot: Path, judge: Judge, per_class: int, **options: Any) -> dict[str, float]:
    """Equally many images of each of CIFAR-10's classes, by the classifier's eyes; options of a call."""
    labels = np.tile(np.arange(CLASSES), per_class)
    return judge.measure(generate_images(load(snapshot), labels.tolist(), **{**SAMPLING, **options}), labels)


def measure_control(snapshot: Path, judge: Judge, sizes: list[int], per_class: int) -> dict[str, Any]:
    """Changes by the size control, with noise and class fixed."""
    pipeline = load(snapshot)
    found = evaluate_size_control(pipeline, judge.classifier, sizes, images_per_class=per_class, **SAMPLING)
    # The classifier knows CIFAR-10's classes only, and so never sees the class of the photographs.
    share = pipeline.transformer.config.num_classes / CLASSES
    return {**found, "accuracy": [value * share for value in found["accuracy"]]}


def real_sizes(judge: Judge, sizes: list[int]) -> dict[str, Any]:
    """Real test pictures made as small as that and enlarged again: energies, and what the classifier sees."""
    energies, accuracy = [], []
    for size in sizes:
        side = judge.others.shape[1]
        images = as_arrays(resized(resized(Image.fromarray(image), size), side) for image in judge.others)
        energies.append(float(high_frequency_energy(images).mean()))
        accuracy.append(float(np.mean(judge.classifier.classify(images)[1] == judge.labels)))
    return {"sizes": sizes, "high_frequency_energy": energies, "accuracy": accuracy}


def cut_grid(path: Path, side: int, columns: int) -> np.ndarray:
    """The images [rows, columns, side, side, 3] of a sheet that `draw_grid` made, to the bit."""
    sheet = np.asarray(Image.open(path))
    factor = max(1, -(-LEAST // side))
    step = side * factor + GAP
    margin = sheet.shape[1] - columns * step
    rows = [sheet[top : top + side * factor : factor] for top in range(0, sheet.shape[0], step)]
    lefts = range(margin, sheet.shape[1], step)
    return np.stack([np.stack([row[:, left : left + side * factor : factor] for left in lefts]) for row in rows])


def measure_samples(snapshot: Path, judge: Judge, side: int, columns: int, batch_size: int) -> list[dict[str, float]]:
    """The pictures that a run drew of itself, always of the same noise: how near they were at each evaluation."""
    points = []
    drawn = {int(path.stem.partition("-")[2]): path for path in (snapshot.parent / "samples").glob("step-*.png")}
    for step in sorted(drawn):
        made = cut_grid(drawn[step], side, columns)
        labels = np.repeat(np.arange(len(made)), columns)
        points.append({"samples": batch_size * step, **judge.measure(made.reshape(-1, side, side, 3), labels)})
    return points
