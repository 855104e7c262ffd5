"""Fréchet distance in the features of an image classifier that the user names, as an `evaluate` module.

It is not FID, and its values can only be compared with others in the features of the same classifier.
"""

from pathlib import Path

import numpy as np

from .features import ClassifierFeatures, FeatureMetric
from .frechet import frechet_distance

# `evaluate` copies the files that a script itself imports.
from .images import describe as describe


class FeatureDistance(FeatureMetric):
    """
    [`frechet_distance`] in the features of a classifier. `compute(reference=…)` returns `feature_distance`.

    Args:
        network (`str`): Folder or `org/name[@revision]` of an image classifier of transformers, for instance one
            trained on the reference images.
    """

    summary = "Fréchet distance of two sets of images in the features of a classifier (not FID)."
    load_network = ClassifierFeatures

    def score(self, features: np.ndarray, reference: np.ndarray | str | Path) -> dict[str, float]:
        """[`frechet_distance`] of both."""
        return {self.name: frechet_distance(features, reference)}
