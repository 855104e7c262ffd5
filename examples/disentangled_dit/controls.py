"""Measures what each control of a class model changes, and what it should not: pictures of equal noise and class.

python examples/disentangled_dit/controls.py MODEL [--judge FOLDER] [--per-class N] [--out FILE.json]
original_size: fine detail should grow with it. crop: what is seen should move against it, pixel by pixel. flip: the
mirror image of a mirrored picture should be the plain one. All: the judge should see the same class. A control that
the model lacks is named and left out.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from generating import evaluate_size_control, vary_controls
from measuring import SAMPLING, load

from hf_ext.errors import run_script
from hf_ext.files import write_json
from hf_ext.metrics import ClassifierFeatures

JUDGE = Path(__file__).resolve().parent / "results" / "judge"
SIZES = (8, 12, 16, 24, 32)
# Of pictures of 48 x 48 pixels the middle one of these places is the middle.
PLACES = (2, 5, 8, 11, 14)


def centres(images: np.ndarray) -> np.ndarray:
    """Row and column [..., 2] of the centre of what differs from the median colour, of [..., height, width, 3]."""
    values = images.astype(np.float64)
    weights = np.square(values - np.median(values, (-3, -2), keepdims=True)).sum(-1)
    # An image of one colour has its centre in the middle.
    weights += 1e-9
    rows, columns = (np.arange(side) for side in weights.shape[-2:])
    total = weights.sum((-2, -1))
    return np.stack([weights.sum(-1) @ rows / total, weights.sum(-2) @ columns / total], axis=-1)


def correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Mean correlation of the images of two arrays [images, height, width, channels]."""
    one, other = (part.reshape(len(part), -1).astype(np.float64) for part in (first, second))
    one, other = (part - part.mean(1, keepdims=True) for part in (one, other))
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return float(np.mean((one * other).sum(1) / np.maximum(norms, 1e-9)))


def measure_shift(images: np.ndarray, places: Sequence[int], axis: int) -> dict[str, Any]:
    """Centres of [places, images, ...] along an axis, and their slope: -1 where the content moves with the crop."""
    found = centres(images)[..., axis]
    mean = found.mean(1)
    slope, error = np.polyfit(places, found, 1)[0], 0.0
    if len(slope) > 1:
        error = float(slope.std(ddof=1) / np.sqrt(len(slope)))
    return {"places": list(places), "centre": mean.tolist(), "slope": float(slope.mean()), "standard_error": error}


def measure_mirror(plain: np.ndarray, mirrored: np.ndarray) -> dict[str, float]:
    """Correlation of plain pictures with those that `flip` asked for, turned back, and as they are."""
    return {"turned_back": correlation(plain, mirrored[:, :, ::-1]), "as_they_are": correlation(plain, mirrored)}


def measure_controls(
    pipeline: Any, judge: Any, *, sizes: Sequence[int] = SIZES, places: Sequence[int] = PLACES, **options: Any
) -> dict[str, Any]:
    """The measures of each control that the model has; `judge` has a method `classify`, as ClassifierFeatures."""
    known, middle = pipeline.transformer.config.control_alpha, places[len(places) // 2]

    def measure(control: str) -> dict[str, Any]:
        if control == "original_size":
            found = evaluate_size_control(pipeline, judge, sizes, **options)
            energies = found["high_frequency_energy"]
            grows, ratio = bool((np.diff(energies) > 0).all()), energies[-1] / max(energies[0], 1e-12)
            return {**found, "grows": grows, "ratio": ratio}
        if control == "flip":
            images, found = vary_controls(pipeline, judge, [{"flip": False}, {"flip": True}], **options)
            return {**found, **measure_mirror(*images)}
        axis = ("crop_down", "crop_right").index(control)
        asked = [{"crop": (middle, place) if axis else (place, middle)} for place in places]
        images, found = vary_controls(pipeline, judge, asked, **options)
        return {**found, **measure_shift(images, places, axis)}

    controls = {"original_size": "original_size", "crop_down": "crop", "crop_right": "crop", "flip": "flip"}
    return {
        "control_alpha": {name: float(known[name]) for name in dict.fromkeys(controls.values()) if name in known},
        "left_out": [name for name in dict.fromkeys(controls.values()) if name not in known],
        **{name: measure(name) for name, control in controls.items() if control in known},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", type=Path)
    parser.add_argument("--judge", type=Path, default=JUDGE, help="a folder of classifier.py; ours for CIFAR-10")
    parser.add_argument("--per-class", type=int, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    judge = ClassifierFeatures(str(options.judge))
    found = measure_controls(load(options.model), judge, images_per_class=options.per_class, **SAMPLING)
    if options.out is not None:
        write_json(options.out, found)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    run_script(main)
