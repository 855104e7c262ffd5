"""Fréchet and kernel distance of two sets of feature vectors, whatever network they come from.

Dowson and Landau, "The Fréchet distance between multivariate normal distributions", Journal of Multivariate Analysis
12(3), 1982; Bińkowski, Sutherland, Arbel and Gretton, "Demystifying MMD GANs", ICLR 2018, section 4. With the features
of one particular Inception network they are called FID (Heusel et al., NeurIPS 2017) and KID.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hf_ext.errors import BROKEN_ARCHIVE, DataError
from hf_ext.files import whole_file

# Rows of a kernel matrix at once: 1024 x 50,000 float64 are 400 MB.
ROWS = 1024


def as_features(features: Any, name: str) -> np.ndarray:
    """Checks feature vectors [samples, dimensions]; they come back in float64."""
    if not isinstance(features, np.ndarray) or not np.issubdtype(features.dtype, np.floating):
        what = f"an array of {features.dtype}" if isinstance(features, np.ndarray) else type(features).__name__
        raise TypeError(f"{name} must be a numpy array of floating values [samples, dimensions], got {what}")
    if features.ndim != 2 or 0 in features.shape:
        raise ValueError(f"{name} must have the shape [samples, dimensions], both at least 1; got {features.shape}")
    values = features.astype(np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"{name} has NaN or infinite values: check the images and the network that they went through")
    return values


@dataclass(frozen=True)
class FeatureStatistics:
    """
    Mean [dimensions] and unbiased covariance [dimensions, dimensions] of feature vectors; their number and the hash of
    the network that they come from, which many files that others publish do not tell.
    """

    mean: np.ndarray
    covariance: np.ndarray
    count: int | None = None
    network: str | None = None

    def __post_init__(self) -> None:
        size = self.mean.shape[-1] if self.mean.ndim else 0
        if self.mean.ndim != 1 or self.covariance.shape != (size, size):
            raise ValueError(f"need mean [n], covariance [n, n], got {self.mean.shape} and {self.covariance.shape}")
        if not (np.isfinite(self.mean).all() and np.isfinite(self.covariance).all()):
            raise ValueError("mean or covariance has NaN or infinite values: a covariance needs at least two samples")

    @classmethod
    def of(cls, features: np.ndarray) -> "FeatureStatistics":
        """Statistics of at least two vectors."""
        sums = FeatureSums()
        sums.add(features)
        return sums.statistics()

    @classmethod
    def load(cls, path: str | Path) -> "FeatureStatistics":
        """Reads an `.npz` file with arrays `mu` and `sigma`, as is usual for reference statistics."""
        try:
            # An array alone is no mapping, and no archive to close.
            with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as opened:
                # No text and no complex numbers.
                mean, covariance = (opened[name].astype(np.float64, casting="same_kind") for name in ("mu", "sigma"))
                count = int(opened["count"]) if "count" in opened else None
                network = str(opened["network"]) if "network" in opened else None
                return cls(mean, covariance, count, network)
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, *BROKEN_ARCHIVE) as error:
            told = f"is no .npz file with the statistics mu and sigma ({error})"
            raise DataError(f"{path} {told}: write it with --keep, or give pictures.") from error

    def save(self, path: str | Path) -> None:
        """Writes what [`~FeatureStatistics.load`] reads."""
        about = {"count": self.count, "network": self.network}
        known: dict[str, Any] = {name: np.array(value) for name, value in about.items() if value is not None}
        with whole_file(path) as file:
            np.savez(file, mu=self.mean, sigma=self.covariance, **known)


class FeatureSums:
    """Statistics of feature vectors that come batch by batch: memory does not grow with their number."""

    def __init__(self) -> None:
        self.count = 0
        # Sum of the products of what the vectors differ from their mean by.
        self.mean = self.scatter = np.zeros(())

    def add(self, features: np.ndarray) -> None:
        """Adds vectors [samples, dimensions]."""
        values, part = as_features(features, "features"), FeatureSums()
        part.count, part.mean = len(values), values.mean(0)
        part.scatter = (values - part.mean).T @ (values - part.mean)
        self.join(part)

    def join(self, other: "FeatureSums") -> None:
        """Adds what another one has seen (Chan, Golub and LeVeque, 1979): nothing large is subtracted."""
        if other.count == 0:
            return
        total, apart = self.count + other.count, other.mean - self.mean
        between = np.multiply.outer(apart, apart) * self.count * other.count / total
        self.scatter = self.scatter + other.scatter + between
        self.mean = self.mean + apart * other.count / total
        self.count = total

    def statistics(self) -> FeatureStatistics:
        if self.count < 2:
            raise ValueError(f"a covariance needs at least 2 feature vectors, got {self.count}")
        return FeatureStatistics(self.mean, self.scatter / (self.count - 1), self.count)


def frechet_distance(first: FeatureStatistics | np.ndarray, second: FeatureStatistics | np.ndarray) -> float:
    """
    Squared Fréchet distance of the normal distributions that have the means and covariances of two sets, given as
    statistics or as at least two vectors [samples, dimensions]: `|m1 - m2|² + tr(S1 + S2 - 2 (S1 S2)^(1/2))`.

    With `S = AᵀA` the trace equals the smallest `|A1 - U A2|²` over all orthogonal `U` (Procrustes), and is computed
    as that: no root of a product that is not symmetric, nothing that could turn negative or complex, and no
    cancellation where both sets are alike, singular covariances included. The value falls with the number of samples
    even where the distributions are the same: compare only values of equally many samples.
    """
    means, roots = zip(*(_mean_and_root(item) for item in (first, second)), strict=True)
    _check_dimensions(*map(len, means))
    # Rows of zeros make both roots equally tall.
    rows = max(len(root) for root in roots)
    tall = [np.pad(root, ((0, rows - len(root)), (0, 0))) for root in roots]
    left, _, right = np.linalg.svd(tall[0] @ tall[1].T)
    return float(np.sum((means[0] - means[1]) ** 2) + np.sum((tall[0] - left @ right @ tall[1]) ** 2))


def _check_dimensions(first: int, second: int) -> None:
    if first != second:
        raise ValueError(f"both sets must have features of the same network, got {first} and {second} dimensions")


def _mean_and_root(given: FeatureStatistics | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean [dimensions], and A [rows, dimensions] with AᵀA = covariance."""
    if not isinstance(given, FeatureStatistics):
        features = as_features(given, "features")
        if 2 <= len(features) <= features.shape[1]:
            # Fewer rows than a root of the covariance would have.
            mean = features.mean(0)
            return mean, (features - mean) / np.sqrt(len(features) - 1)
        given = FeatureStatistics.of(features)
    values, vectors = np.linalg.eigh((given.covariance + given.covariance.T) / 2)
    # Rounding makes eigenvalues of singular covariances slightly negative; float32 files have errors of 1e-7.
    if values[0] < -1e-5 * max(values[-1], np.finfo(np.float64).tiny):
        raise ValueError(f"a covariance has no negative eigenvalues, got {values[0]:.3g} (largest {values[-1]:.3g})")
    # What is smaller than its own rounding error is zero: its root would be an error of 1e-8 of the largest.
    kept = values > len(values) * np.finfo(np.float64).eps * values[-1]
    return given.mean, np.sqrt(values[kept])[:, None] * vectors.T[kept]


def _kernel_sum(first: np.ndarray, second: np.ndarray) -> float:
    """Sum of (x·y / dimensions + 1)³ over all pairs; without those of a vector with itself where sets are the same."""
    total = 0.0
    for start in range(0, len(first), ROWS):
        values = (first[start : start + ROWS] @ second.T / first.shape[1] + 1.0) ** 3
        total += values.sum()
        if first is second:
            total -= values[:, start : start + ROWS].trace()
    return float(total)


def kernel_distance(first: np.ndarray, second: np.ndarray) -> float:
    """
    Unbiased squared maximum mean discrepancy of two sets [samples, dimensions], with the kernel `k(x, y) = (x·y /
    dimensions + 1)³`: the mean of `k` over pairs of different samples of the first set, plus that of the second, minus
    twice the mean over pairs of one of each. Its expected value is 0 where the distributions are equal, whatever the
    number of samples, so that it can be slightly negative.
    """
    pair = _check(first, second)
    within = sum(_kernel_sum(values, values) / (len(values) * (len(values) - 1)) for values in pair)
    return within - 2 * _kernel_sum(*pair) / (len(pair[0]) * len(pair[1]))


def kernel_distance_of_subsets(
    first: np.ndarray, second: np.ndarray, *, subset_size: int = 1000, subsets: int = 100, seed: int = 0
) -> tuple[float, float]:
    """
    Mean of [`kernel_distance`] over random subsets, and their standard deviation (not that of the mean), the usual way
    to report it. A subset has `subset_size` samples of each set [samples, dimensions], none of them twice.
    """
    pair = _check(first, second)
    if not 2 <= subset_size <= (most := min(map(len, pair))):
        raise ValueError(f"subset_size must be from 2 to the {most} samples of the smaller set, got {subset_size}")
    if subsets < 1:
        raise ValueError(f"subsets must be at least 1, got {subsets}")
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(subsets):
        chosen = [values[generator.choice(len(values), subset_size, replace=False)] for values in pair]
        found.append(kernel_distance(*chosen))
    return float(np.mean(found)), float(np.std(found))


def _check(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    pair = as_features(first, "first"), as_features(second, "second")
    _check_dimensions(pair[0].shape[1], pair[1].shape[1])
    if min(map(len, pair)) < 2:
        raise ValueError(f"both sets need at least 2 samples, got {len(pair[0])} and {len(pair[1])}")
    return pair
