"""Image metrics with a stated protocol, as `evaluate` modules that work offline."""

from pathlib import Path

from .psnr import PSNR
from .psnr_b import PsnrB
from .ssim import SSIM

__all__ = ["PSNR", "SSIM", "PsnrB", "metric_path"]


def metric_path(name: str) -> str:
    """
    Path of a metric's script, for `evaluate.load(metric_path("psnr"))`.

    Args:
        name (`str`):
            `"psnr"`, `"psnr_b"` or `"ssim"`.

    Returns:
        `str`: Absolute path of the Python file.

    Raises:
        ValueError: If there is no metric of that name.
    """
    names = ("psnr", "psnr_b", "ssim")
    if name not in names:
        raise ValueError(f"unknown metric {name!r}: choose one of {', '.join(names)}")
    return str(Path(__file__).resolve().with_name(f"{name}.py"))
