"""What a Disentangled DiT makes, measured: distance to real images, classes, content drift and what the controls do.

Distances are in the features of a classifier that the user names (`feature_distance`, never FID); the claim of
arXiv 2411.03177 is tested by varying the size control alone, with seed and class fixed.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from hf_ext.metrics import (
    ClassifierFeatures,
    content_drift,
    frechet_distance,
    high_frequency_energy,
    kernel_distance_of_subsets,
)
from hf_ext.pipelines.disentangled_dit.pipeline import DisentangledDiTPipeline

# Samples of a kernel distance at once, and how often they are drawn.
_SUBSET, _SUBSETS = 1000, 20


def generate_images(
    pipeline: DisentangledDiTPipeline,
    conditions: Sequence[int] | Sequence[str],
    *,
    seed: int = 0,
    batch_size: int = 64,
    show_progress: bool = True,
    **options: Any,
) -> np.ndarray:
    """
    An image for each class or text. The noise of an image depends on `seed` and its place among them alone: not on
    `batch_size`, and not on the class, the text or the controls.

    Args:
        pipeline ([`DisentangledDiTPipeline`]): Makes them.
        conditions (sequence of `int`, or of `str`): Classes of a class model, texts of a text model.
        seed (`int`, *optional*, defaults to 0): Decides the noise.
        batch_size (`int`, *optional*, defaults to 64): Images at once.
        show_progress (`bool`, *optional*, defaults to `True`): A bar that counts images.
        **options: Of the pipeline's call, for all images alike: `num_inference_steps`, `guidance_scale`,
            `original_size`, …

    Returns:
        `numpy.ndarray` of shape `[images, height, width, channels]`, uint8.

    Raises:
        ValueError: If there are no conditions.
    """
    given = list(conditions)
    if not given:
        raise ValueError("conditions is empty: give the class or the text of each image.")
    key = "class_labels" if pipeline.transformer.config.joint_attention_dim is None else "prompt"
    shown = dict(getattr(pipeline, "_progress_bar_config", {}))
    # One bar of all images, not one for each batch.
    pipeline.set_progress_bar_config(disable=True)
    made = []
    try:
        with tqdm(total=len(given), desc="images", disable=not show_progress, leave=False) as bar:
            for start in range(0, len(given), batch_size):
                part = range(start, min(start + batch_size, len(given)))
                seeds = [int(np.random.SeedSequence((seed, index)).generate_state(1)[0]) for index in part]
                inputs: dict[str, Any] = {**options, key: [given[index] for index in part]}
                generators = [torch.Generator().manual_seed(number) for number in seeds]
                output: Any = pipeline(generator=generators, output_type="np", **inputs)
                made.append(np.rint(output.images * 255).astype(np.uint8))
                bar.update(len(part))
    finally:
        pipeline.set_progress_bar_config(**shown)
    return np.concatenate(made)


def _balanced(pipeline: DisentangledDiTPipeline, images_per_class: int) -> np.ndarray:
    """Labels of equally many images of each class; any first part of them is nearly balanced too."""
    if images_per_class < 1:
        raise ValueError(f"images_per_class must be at least 1, got {images_per_class}.")
    count = pipeline.transformer.config.num_classes
    if count is None:
        raise ValueError("the pipeline makes images of texts: only class models are measured by a classifier.")
    return np.tile(np.arange(count), images_per_class)


def measure_images(
    images: np.ndarray, labels: np.ndarray, classifier: ClassifierFeatures, reference: np.ndarray
) -> dict[str, float]:
    """
    How near generated images are to real ones, and whether they show what they were to show.

    Args:
        images (`numpy.ndarray` of shape `[images, height, width, channels]`, uint8): From [`generate_images`].
        labels (`numpy.ndarray` of shape `[images]`, integer): The class that each was to show.
        classifier ([`~hf_ext.metrics.ClassifierFeatures`]): The network whose features are compared.
        reference (`numpy.ndarray` of shape `[samples, dimensions]`, floating): Features of real images.

    Returns:
        `dict[str, float]`: `feature_distance`, the Fréchet distance; `kernel_distance`, its mean over subsets;
        `accuracy`, the share of images in which the classifier sees the class that was asked for; `images`, their
        number, on which the first depends.

    Raises:
        ValueError: If classifier and reference, or images and labels, do not fit.
    """
    if len(images) != len(labels):
        raise ValueError(f"there are {len(images)} images and {len(labels)} labels: give the class of each image.")
    features, seen = classifier.classify(images)
    subset = min(_SUBSET, len(features), len(reference))
    distance, _ = kernel_distance_of_subsets(features, reference, subset_size=subset, subsets=_SUBSETS)
    return {
        "feature_distance": frechet_distance(features, reference),
        "kernel_distance": distance,
        "accuracy": float(np.mean(seen == labels)),
        "images": len(images),
    }


def evaluate_classes(
    pipeline: DisentangledDiTPipeline,
    classifier: ClassifierFeatures,
    reference: np.ndarray,
    *,
    images_per_class: int = 100,
    seed: int = 0,
    batch_size: int = 64,
    show_progress: bool = True,
    **options: Any,
) -> dict[str, float]:
    """
    [`measure_images`] of equally many images of each class.

    Args:
        pipeline ([`DisentangledDiTPipeline`]): A class model whose classes are the classifier's.
        classifier ([`~hf_ext.metrics.ClassifierFeatures`]): The network whose features are compared.
        reference (`numpy.ndarray` of shape `[samples, dimensions]`, floating): Features of real images.
        images_per_class (`int`, *optional*, defaults to 100): Generated images of each class.
        seed, batch_size, show_progress, **options: See [`generate_images`].

    Returns:
        `dict[str, float]`: See [`measure_images`].

    Raises:
        ValueError: If it is no class model, or classifier and reference do not fit.
    """
    labels = _balanced(pipeline, images_per_class)
    images = generate_images(
        pipeline, labels.tolist(), seed=seed, batch_size=batch_size, show_progress=show_progress, **options
    )
    return measure_images(images, labels, classifier, reference)


def evaluate_size_control(
    pipeline: DisentangledDiTPipeline,
    classifier: ClassifierFeatures,
    sizes: Sequence[int],
    *,
    images_per_class: int = 10,
    seed: int = 0,
    batch_size: int = 64,
    show_progress: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """
    What `original_size` changes, with seed and class fixed: content, which it should not, and detail, which it should.

    Args:
        pipeline ([`DisentangledDiTPipeline`]): A class model with that control.
        classifier ([`~hf_ext.metrics.ClassifierFeatures`]): Says what an image shows.
        sizes (sequence of `int`): Sides of the square originals, in pixels, at least two.
        images_per_class (`int`, *optional*, defaults to 10): Images of each class at each size.
        seed, batch_size, show_progress, **options: See [`generate_images`].

    Returns:
        `dict`: What [`~hf_ext.metrics.content_drift`] returns, over all pairs of sizes; and for each size, in lists:
        `sizes`; `high_frequency_energy`, the mean over the images; `accuracy`, the share of images that show their
        class.

    Raises:
        ValueError: If there are fewer than two sizes, or the pipeline is no class model.
    """
    if len(set(sizes)) < 2:
        raise ValueError(f"sizes must be at least two different sides in pixels, got {list(sizes)}.")
    labels = _balanced(pipeline, images_per_class)
    images, seen = [], []
    for size in sizes:
        images.append(
            generate_images(
                pipeline,
                labels.tolist(),
                seed=seed,
                batch_size=batch_size,
                show_progress=show_progress,
                original_size=(size, size),
                **options,
            )
        )
        seen.append(classifier.classify(images[-1])[1])
    return {
        **content_drift(np.stack(images), np.stack(seen)),
        "sizes": list(sizes),
        "high_frequency_energy": [float(high_frequency_energy(made).mean()) for made in images],
        "accuracy": [float(np.mean(classes == labels)) for classes in seen],
    }
