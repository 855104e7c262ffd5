"""python examples/disentangled_dit/captions.py CIFAR10 OUT

Writes CIFAR-10 at 32 x 32 pixels with captions of its class names and of attributes that the pixels decide: how light
a picture is, and the colour of its border. Captions have three lengths, so that what follows short ones matters: the
column `text` has any of them, `short` the name alone, `long` all of it.
"""

import sys
from pathlib import Path

import numpy as np

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


def main(cifar10: Path, out: Path) -> None:
    """Both splits."""
    # Not above: `sets` takes the captions from here.
    from sets import captioned_rows, open_cifar10, write

    for split in ("train", "test"):
        source = open_cifar10(cifar10, split, None)
        write(out / f"{split}.parquet", list(captioned_rows(source, 32)), source.features["label"].names)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*(Path(word) for word in sys.argv[1:]))
