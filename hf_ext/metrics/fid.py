"""Fréchet Inception distance as an `evaluate` module; the Inception network comes from a file that the user provides.

Heusel, Ramsauer, Unterthiner, Nessler and Hochreiter, "GANs trained by a two time-scale update rule converge to a
local Nash equilibrium", NeurIPS 2017.
"""

from pathlib import Path

import numpy as np

from .features import FeatureMetric, InceptionFeatures
from .frechet import frechet_distance

# `evaluate` copies the files that a script itself imports.
from .images import describe as describe


class FID(FeatureMetric):
    """
    [`frechet_distance`] in the features of the Inception network of 2015. `compute(reference=…)` returns `fid`.

    Args:
        network (`str`): Path of its TorchScript file, or `org/name/file.pt[@revision]`; see [`InceptionFeatures`].
    """

    summary = "Fréchet Inception distance of two sets of images."
    load_network = InceptionFeatures

    def score(self, features: np.ndarray, reference: np.ndarray | str | Path) -> dict[str, float]:
        """[`frechet_distance`] of both."""
        return {self.name: frechet_distance(features, reference)}
