"""Metrics with a stated protocol, as functions and as `evaluate` modules that work offline."""

from pathlib import Path

from .agreement import Agreement
from .clip_score import CLIPScore
from .content_drift import content_drift, high_frequency_energy, split_frequencies
from .feature_distance import FeatureDistance
from .features import ClassifierFeatures, InceptionFeatures
from .fid import FID
from .frechet import FeatureStatistics, FeatureSums, frechet_distance
from .kernel_distance import kernel_distance, kernel_distance_of_subsets
from .kid import KID
from .psnr import PSNR
from .psnr_b import PsnrB
from .ssim import SSIM

__all__ = [
    "FID",
    "KID",
    "PSNR",
    "SSIM",
    "Agreement",
    "CLIPScore",
    "ClassifierFeatures",
    "FeatureDistance",
    "FeatureStatistics",
    "FeatureSums",
    "InceptionFeatures",
    "PsnrB",
    "content_drift",
    "frechet_distance",
    "high_frequency_energy",
    "kernel_distance",
    "kernel_distance_of_subsets",
    "metric_path",
    "split_frequencies",
]


def metric_path(name: str) -> str:
    """
    Path of a metric's script, for `evaluate.load(metric_path("psnr"))`.

    Args:
        name (`str`): `"agreement"`, `"clip_score"`, `"feature_distance"`, `"fid"`, `"kid"`, `"psnr"`, `"psnr_b"` or
            `"ssim"`.

    Returns:
        `str`: Absolute path of the Python file.

    Raises:
        ValueError: If there is no such metric.

    Example:
        >>> import evaluate
        >>> from hf_ext.metrics import metric_path
        >>> metric = evaluate.load(metric_path("agreement"))
        >>> metric.compute(predictions=[0, 1, 1, 0], references=[0, 1, 0, 0])["accuracy"]
        0.75
    """
    names = ("agreement", "clip_score", "feature_distance", "fid", "kid", "psnr", "psnr_b", "ssim")
    if name not in names:
        raise ValueError(f"unknown metric {name!r}: choose one of {', '.join(names)}")
    return str(Path(__file__).resolve().with_name(f"{name}.py"))
