"""python examples/disentangled_dit/captions.py CIFAR10 OUT

Writes CIFAR-10 at 32 x 32 pixels with captions of its class names and of attributes that the pixels decide: how light
a picture is, and the colour of its border. Captions have three lengths, so that what follows short ones matters: the
column `text` has any of them, `short` the name alone, `long` all of it.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from sets import SEED, open_cifar10, resized, row, write

SIDE = 32

# Mean of the pixels, 0 to 255, below which a picture is dark, and from which on it is bright.
DARK, BRIGHT = 95, 145
# A border whose channels differ by less has no colour.
COLOURLESS = 24


def lightness(pixels: np.ndarray) -> str:
    """`dark`, `bright` or, between them, `plain`, of a picture [height, width, 3] of uint8."""
    mean = float(pixels.mean())
    return "dark" if mean < DARK else "bright" if mean >= BRIGHT else "plain"


def border_colour(pixels: np.ndarray) -> str:
    """The strongest channel of the outermost pixels, or `grey`."""
    edges = np.concatenate([pixels[0], pixels[-1], pixels[1:-1, 0], pixels[1:-1, -1]]).astype(float)
    red, green, blue = means = edges.mean(0)
    if means.max() - means.min() < COLOURLESS:
        return "grey"
    if min(red, green) - blue >= COLOURLESS:
        return "yellow"
    return ("red", "green", "blue")[int(means.argmax())]


def caption(name: str, pixels: np.ndarray, form: int) -> str:
    """A caption of uint8 [height, width, 3]: of form 0 the class, of 1 also its lightness, of 2 its surroundings."""
    article = "an" if name[0] in "aeiou" else "a"
    if form == 0:
        return f"{article} {name}"
    if form == 1:
        return f"a {lightness(pixels)} photo of {article} {name}"
    return f"a {lightness(pixels)} photo of {article} {name} in front of something {border_colour(pixels)}"


def captioned_rows(data: datasets.Dataset) -> Iterator[dict[str, Any]]:
    """Pictures with captions: one of several forms, the shortest, the longest."""
    names, generator = data.features["label"].names, np.random.default_rng(SEED + 1)
    for example in data:
        small = resized(example["image"], SIDE)
        forms = [caption(names[example["label"]], np.asarray(small), form) for form in range(3)]
        yield row(small, example["label"], text=forms[generator.integers(3)], short=forms[0], long=forms[2])


def main(cifar10: Path, out: Path) -> None:
    """Both splits."""
    for split in ("train", "test"):
        source = open_cifar10(cifar10, split)
        write(out / f"{split}.parquet", list(captioned_rows(source)), source.features["label"].names)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*(Path(word) for word in sys.argv[1:]))
