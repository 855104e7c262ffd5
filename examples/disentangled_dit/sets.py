"""The data of the study, made from CIFAR-10, whose rows lie class by class, and the photographs of BSDS500.

Pictures are stored at the size that counts as their original, since that is where the task reads `original_size`.
"""

import itertools
from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from PIL import Image

from hf_ext.files import whole_file

SEED = 0
PHOTOGRAPH = "photograph"
# Pictures of CIFAR-10 are made so small at least, and crops of photographs are of at most so many pixels.
SMALLEST, LARGEST = 6, 128


def resized(image: Image.Image, side: int) -> Image.Image:
    """A square picture of another size."""
    return image.convert("RGB").resize((side, side), Image.Resampling.BICUBIC)


def row(image: Image.Image, label: int) -> dict[str, Any]:
    """A row with the picture as PNG."""
    content = BytesIO()
    # Hardly larger than with more effort, in half the time.
    image.save(content, format="png", compress_level=1)
    return {"image": {"bytes": content.getvalue(), "path": None}, "label": label}


def write(path: Path, rows: list[dict[str, Any]], names: list[str]) -> None:
    """Rows as one parquet file, whole or not at all."""
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    with whole_file(path) as file:
        datasets.Dataset.from_list(rows, features=features).to_parquet(file)


def resized_rows(data: datasets.Dataset, sides: Iterable[int]) -> list[dict[str, Any]]:
    """Whole pictures, each made small to a side of its own: the smaller, the less detail."""
    return [row(resized(example["image"], side), example["label"]) for example, side in zip(data, sides, strict=False)]


def photograph_rows(folder: Path, count: int, label: int) -> Iterator[dict[str, Any]]:
    """Square parts of photographs, their sides log-uniform."""
    generator = np.random.default_rng(SEED + 3)
    files = sorted(file for file in folder.glob("*/*") if file.suffix.lower() in (".jpg", ".png"))
    if not files:
        raise ValueError(f"{folder} must hold the folders train and test with .jpg or .png files, as bsds500 does.")
    for number in range(count):
        # One file after the other, so that each is opened for as many parts as there are rounds.
        with Image.open(files[number % len(files)]) as photo:
            most = min(LARGEST, *photo.size)
            side = int(np.exp(generator.uniform(np.log(SMALLEST), np.log(most + 1))))
            left, top = (int(generator.integers(length - side + 1)) for length in photo.size)
            yield row(photo.convert("RGB").crop((left, top, left + side, top + side)), label)


def folders(work: Path) -> dict[str, Path]:
    """
    The folders of the sets by their names: `32` and `16`, CIFAR-10 at that size; `varied`, at many sizes, with
    photographs as an eleventh class.
    """
    return {name: work / "data" / f"cifar10-{name}" for name in ("32", "16", "varied")}


def prepare(data: Path, work: Path) -> dict[str, Path]:
    """Writes the sets that are not there yet, of the folders `cifar10` and `bsds500` in `data`; their [`folders`]."""
    made = folders(work)
    for split in ("train", "test"):
        if all((folder / f"{split}.parquet").is_file() for folder in made.values()):
            continue
        source = datasets.load_dataset(str(data / "cifar10"), split=split)
        # An order drawn once.
        source = source.select(np.random.default_rng(SEED).permutation(len(source)))
        names = source.features["label"].names
        photographs = photograph_rows(data / "bsds500", max(1, len(source) // len(names)), len(names))
        # Tests are of one size: what a model is asked to make.
        small, generator = resized_rows(source, itertools.repeat(16)), np.random.default_rng(SEED + 2)
        sides = (int(generator.integers(SMALLEST, 33)) for _ in source)
        varied = [*resized_rows(source, sides), *photographs] if split == "train" else small
        write(made["varied"] / f"{split}.parquet", varied, [*names, PHOTOGRAPH])
        write(made["16"] / f"{split}.parquet", small, names)
        # As it is, but mixed.
        unread = source.cast_column("image", datasets.Image(decode=False))
        write(made["32"] / f"{split}.parquet", list(unread), names)
    return made
