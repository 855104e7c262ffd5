"""Kernel distance of two sets of feature vectors: the unbiased maximum mean discrepancy with a polynomial kernel.

Bińkowski, Sutherland, Arbel and Gretton, "Demystifying MMD GANs", ICLR 2018, section 4. With the features of one
particular Inception network it is called KID: that is `kid`.
"""

import numpy as np

from .frechet import as_features

# Rows of a kernel matrix at once: 1024 x 50,000 float64 are 400 MB.
ROWS = 1024


def _kernel_sum(first: np.ndarray, second: np.ndarray, same: bool) -> float:
    """Sum of (x·y / dimensions + 1)³ over all pairs; without those of a vector with itself where sets are the same."""
    total = 0.0
    for start in range(0, len(first), ROWS):
        values = (first[start : start + ROWS] @ second.T / first.shape[1] + 1.0) ** 3
        total += values.sum()
        if same:
            total -= values[:, start : start + ROWS].trace()
    return float(total)


def kernel_distance(first: np.ndarray, second: np.ndarray) -> float:
    """
    Unbiased squared maximum mean discrepancy with the kernel `k(x, y) = (x·y / dimensions + 1)³`: the mean of `k` over
    pairs of different samples of the first set, plus that of the second, minus twice the mean over pairs of one of
    each. Its expected value is 0 where the distributions are equal, whatever the number of samples, so that it can be
    slightly negative.

    Args:
        first, second (`numpy.ndarray` of shape `[samples, dimensions]`, floating):
            The two sets, at least two samples each; their numbers may differ.

    Returns:
        `float`: The estimate.
    """
    pair = _check(first, second)
    counts = [len(values) for values in pair]
    within = sum(
        _kernel_sum(values, values, same=True) / (count * (count - 1))
        for values, count in zip(pair, counts, strict=True)
    )
    return within - 2 * _kernel_sum(*pair, same=False) / (counts[0] * counts[1])


def kernel_distance_of_subsets(
    first: np.ndarray, second: np.ndarray, *, subset_size: int = 1000, subsets: int = 100, seed: int = 0
) -> tuple[float, float]:
    """
    Mean and spread of [`kernel_distance`] over random subsets, the usual way to report it.

    Args:
        first, second (`numpy.ndarray` of shape `[samples, dimensions]`, floating): The two sets.
        subset_size (`int`, *optional*, defaults to 1000): Samples of each set in a subset, drawn without repetition.
        subsets (`int`, *optional*, defaults to 100): Number of subsets.
        seed (`int`, *optional*, defaults to 0): Decides the subsets.

    Returns:
        `tuple[float, float]`: Mean over the subsets, and their standard deviation (not that of the mean).
    """
    pair = _check(first, second)
    if not 2 <= subset_size <= min(len(values) for values in pair):
        raise ValueError(
            f"subset_size must be from 2 to the {min(len(values) for values in pair)} samples of the smaller set, got "
            f"{subset_size}"
        )
    if subsets < 1:
        raise ValueError(f"subsets must be at least 1, got {subsets}")
    generator = np.random.default_rng(seed)
    values = []
    for _ in range(subsets):
        chosen = [values[generator.choice(len(values), subset_size, replace=False)] for values in pair]
        values.append(kernel_distance(*chosen))
    return float(np.mean(values)), float(np.std(values))


def _check(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both sets in float64."""
    pair = as_features(first, "first"), as_features(second, "second")
    if pair[0].shape[1] != pair[1].shape[1]:
        raise ValueError(
            f"both sets must have features of one network, got {pair[0].shape[1]} and {pair[1].shape[1]} dimensions"
        )
    if min(len(values) for values in pair) < 2:
        raise ValueError(f"both sets need at least 2 samples, got {len(pair[0])} and {len(pair[1])}")
    return pair
