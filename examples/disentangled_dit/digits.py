"""python examples/disentangled_dit/digits.py quickstart/dit/data

Writes the handwritten digits that ship inside scikit-learn, with the names of their classes, for digits.yaml.
"""

import sys
from pathlib import Path

import datasets
import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

# The digits lie in the order of their writers, so that the last ones were written by others than the first.
TEST = 500


def write_digits(folder: Path, count: int | None = None) -> Path:
    """One parquet file for each split; of each at most `count` digits."""
    folder.mkdir(parents=True, exist_ok=True)
    data = load_digits()
    pictures = [Image.fromarray((picture * (255 / 16)).round().astype(np.uint8)) for picture in data.images]
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    for part, wanted in (("train", slice(0, -TEST)), ("test", slice(-TEST, None))):
        columns = {"image": pictures[wanted][:count], "label": data.target[wanted][:count]}
        datasets.Dataset.from_dict(columns, features=features).to_parquet(str(folder / f"{part}.parquet"))
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(write_digits(Path(sys.argv[1])))
