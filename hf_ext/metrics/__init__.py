"""Metrics with a stated protocol: of pairs of pictures, also as `evaluate` modules, and of sets of pictures."""

from pathlib import Path

from .distances import FeatureStatistics, FeatureSums, frechet_distance, kernel_distance, kernel_distance_of_subsets
from .features import ClassifierFeatures, CLIPScores, InceptionFeatures
from .psnr import PSNR
from .psnr_b import PsnrB
from .ssim import SSIM

__all__ = [
    "PSNR",
    "SSIM",
    "CLIPScores",
    "ClassifierFeatures",
    "FeatureStatistics",
    "FeatureSums",
    "InceptionFeatures",
    "PsnrB",
    "frechet_distance",
    "kernel_distance",
    "kernel_distance_of_subsets",
    "metric_path",
]


def metric_path(name: str) -> str:
    """
    Path of a metric's script, for `evaluate.load(metric_path("psnr"))`. Sets of pictures are compared by `hf-ext dit
    score`.

    Args:
        name (`str`): `"psnr"`, `"psnr_b"` or `"ssim"`.

    Returns:
        `str`: Absolute path of the Python file.

    Raises:
        ValueError: If there is no such metric.

    Example:
        >>> import evaluate
        >>> import numpy as np
        >>> from hf_ext.metrics import metric_path
        >>> metric = evaluate.load(metric_path("psnr"))
        >>> grey = np.full((8, 8), 100, np.uint8)
        >>> round(metric.compute(predictions=[grey], references=[grey + np.uint8(10)], channel="gray")["psnr"], 2)
        28.13
    """
    names = ("psnr", "psnr_b", "ssim")
    if name not in names:
        raise ValueError(f"unknown metric {name!r}: choose one of {', '.join(names)}")
    return str(Path(__file__).resolve().with_name(f"{name}.py"))
