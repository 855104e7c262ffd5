"""Generated images, and what the controls change in them: content drift, classes, detail.

The claim of arXiv 2411.03177 is tested by varying the size control alone, with seed and class fixed.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from drift import content_drift, high_frequency_energy

from hf_ext.metrics import ClassifierFeatures
from hf_ext.pipelines.disentangled_dit import DisentangledDiTPipeline
from hf_ext.tasks.diffusion_grids import draw_pictures


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
    seeds = [int(np.random.SeedSequence((seed, index)).generate_state(1)[0]) for index in range(len(conditions))]
    pictures = draw_pictures(pipeline, [*conditions], seeds, batch_size, **options)
    images = np.stack([np.asarray(picture) for picture in pictures])
    return images.reshape(*images.shape[:3], -1)


def vary_controls(
    pipeline: DisentangledDiTPipeline,
    classifier: ClassifierFeatures,
    settings: Sequence[dict[str, Any]],
    *,
    images_per_class: int = 10,
    **options: Any,
) -> tuple[np.ndarray, dict[str, Any]]:
    """Images [settings, images, ...] of equal noise and class: how far they drift, and whether their class is seen."""
    # Any first part of the labels is nearly balanced too.
    labels = np.tile(np.arange(pipeline.transformer.config.num_classes), images_per_class)
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
