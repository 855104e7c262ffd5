"""Measurements of generated images: distance to real ones, classes, content drift, the effect of the controls.

Distances are in the features of a classifier that the user names (`feature_distance`, never FID); the claim of
arXiv 2411.03177 is tested by varying the size control alone, with seed and class fixed.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from drift import content_drift, high_frequency_energy

from hf_ext.metrics import ClassifierFeatures, frechet_distance, kernel_distance_of_subsets
from hf_ext.pipelines.disentangled_dit import DisentangledDiTPipeline

# Samples of a kernel distance at once, and how often they are drawn.
SUBSET, SUBSETS = 1000, 20


def generate_images(
    pipeline: DisentangledDiTPipeline,
    conditions: Sequence[int] | Sequence[str],
    *,
    seed: int = 0,
    batch_size: int = 64,
    **options: Any,
) -> np.ndarray:
    """An image [height, width, channels], uint8, for each class or text; `options` are those of a call."""
    # The noise of an image depends on the seed and its place alone: not on the batches, its class or its controls.
    wanted = list(conditions)
    key = "class_labels" if pipeline.transformer.config.joint_attention_dim is None else "prompt"
    images = []
    for start in range(0, len(wanted), batch_size):
        part = range(start, min(start + batch_size, len(wanted)))
        seeds = [int(np.random.SeedSequence((seed, index)).generate_state(1)[0]) for index in part]
        inputs: dict[str, Any] = {**options, key: [wanted[index] for index in part]}
        generators = [torch.Generator().manual_seed(number) for number in seeds]
        output: Any = pipeline(generator=generators, output_type="np", **inputs)
        images.append(np.rint(output.images * 255).astype(np.uint8))
    return np.concatenate(images)


def balance_labels(pipeline: DisentangledDiTPipeline, images_per_class: int) -> np.ndarray:
    """Labels of equally many images of each class; any first part of them is nearly balanced too."""
    return np.tile(np.arange(pipeline.transformer.config.num_classes), images_per_class)


def measure_images(
    images: np.ndarray, labels: np.ndarray, classifier: ClassifierFeatures, reference: np.ndarray
) -> dict[str, float]:
    """
    Distances of generated images to real ones, and the share that shows its class.

    `reference` are the features [samples, dimensions] of real images. `accuracy` is the share of images in which the
    classifier sees the class that was asked for; the Fréchet distance depends on the number of images.
    """
    features, seen = classifier.classify(images)
    subset = min(SUBSET, len(features), len(reference))
    distance, _ = kernel_distance_of_subsets(features, reference, subset_size=subset, subsets=SUBSETS)
    return {
        "feature_distance": frechet_distance(features, reference),
        "kernel_distance": distance,
        "accuracy": float(np.mean(seen == labels)),
        "images": len(images),
    }


def vary_controls(
    pipeline: DisentangledDiTPipeline,
    classifier: ClassifierFeatures,
    settings: Sequence[dict[str, Any]],
    *,
    images_per_class: int = 10,
    **options: Any,
) -> tuple[np.ndarray, dict[str, Any]]:
    """Images [settings, images, ...] of equal noise and class: how far they drift, and whether their class is seen."""
    labels = balance_labels(pipeline, images_per_class)
    images = np.stack([generate_images(pipeline, labels.tolist(), **options, **asked) for asked in settings])
    seen = np.stack([classifier.classify(part)[1] for part in images])
    return images, {**content_drift(images, seen), "accuracy": (seen == labels).mean(1).tolist()}


def evaluate_size_control(
    pipeline: DisentangledDiTPipeline, classifier: ClassifierFeatures, sizes: Sequence[int], **options: Any
) -> dict[str, Any]:
    """Changes by `original_size`, with seed and class fixed: of content, which should stay, and of detail."""
    asked = [{"original_size": (size, size)} for size in sizes]
    images, found = vary_controls(pipeline, classifier, asked, **options)
    energies = [float(high_frequency_energy(part).mean()) for part in images]
    return {**found, "sizes": list(sizes), "high_frequency_energy": energies}
