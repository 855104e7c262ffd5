"""Kernel Inception distance as an `evaluate` module; the Inception network comes from a file that the user provides.

Bińkowski, Sutherland, Arbel and Gretton, "Demystifying MMD GANs", ICLR 2018.
"""

from pathlib import Path

import numpy as np

from .features import FeatureMetric, InceptionFeatures
from .frechet import as_features

# `evaluate` copies the files that a script itself imports.
from .images import describe as describe
from .kernel_distance import kernel_distance_of_subsets


class KID(FeatureMetric):
    """
    [`kernel_distance_of_subsets`] in the features of the Inception network of 2015. `compute(reference=…)` returns
    `kid`, the mean over the subsets, and `kid_standard_deviation`; it takes `subset_size`, `subsets` and `seed`.

    Args:
        network (`str`): Path of its TorchScript file, or `org/name/file.pt[@revision]`; see [`InceptionFeatures`].
    """

    summary = "Kernel Inception distance of two sets of images."
    load_network = InceptionFeatures

    def score(
        self,
        features: np.ndarray,
        reference: np.ndarray | str | Path,
        *,
        subset_size: int = 1000,
        subsets: int = 100,
        seed: int = 0,
    ) -> dict[str, float]:
        """[`kernel_distance_of_subsets`] of both; a file with means and covariances is not enough."""
        other = as_features(reference, "reference")
        mean, spread = kernel_distance_of_subsets(features, other, subset_size=subset_size, subsets=subsets, seed=seed)
        return {self.name: mean, f"{self.name}_standard_deviation": spread}
