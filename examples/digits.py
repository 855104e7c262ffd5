"""python examples/digits.py FOLDER

Writes the handwritten digits that ship inside scikit-learn, 8 × 8 pixels with the names of their classes, as a data
set: what two steps of the quickstart learn from.
"""

import sys
from pathlib import Path

import datasets
import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

# The digits lie in the order of their writers, so that the last ones were written by others than the first.
TEST = 500
NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Pictures [number, 8, 8], uint8, and what they show; the last `TEST` are for tests."""
    data = load_digits()
    return (data.images * (255 / 16)).round().astype(np.uint8), data.target


def write_digits(folder: Path) -> Path:
    """One parquet file for each split."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures, classes = digits()
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)})
    for part, wanted in (("train", slice(0, -TEST)), ("test", slice(-TEST, None))):
        columns = {"image": [Image.fromarray(picture) for picture in pictures[wanted]], "label": classes[wanted]}
        datasets.Dataset.from_dict(columns, features=features).to_parquet(str(folder / f"{part}.parquet"))
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(write_digits(Path(sys.argv[1])))
