"""python examples/semanir/make_pairs.py PHOTOS OUT [--seed 0]

Makes pairs for `deblur.yaml` and `weather.yaml` from a folder of photographs, where the published ones (GoPro,
All-Weather) are not at hand: OUT/deblur (the camera shook) and OUT/weather (rain, snow or drops on the lens, in turn),
each with folders lq/ and hq/. The same photographs and seed make the same pairs. They are made from formulas: a model
of them knows this rain, not yours.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from tqdm.auto import tqdm

from hf_ext.files import whole_folder
from hf_ext.tasks.degradations import blur
from hf_ext.tasks.pictures import in_colours

# Pictures are brightened for the eye by about this power; light adds up before it.
GAMMA = 2.2


def convolve(image: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Each channel with a small kernel of odd sides; the image is mirrored at its edges."""
    reach = kernel.shape[0] // 2, kernel.shape[1] // 2
    padded = np.pad(image, (*zip(reach, reach, strict=True), (0, 0)), "symmetric")
    (height, width), total = image.shape[:2], np.zeros_like(image)
    for row, column in np.argwhere(kernel):
        total += kernel[row, column] * padded[row : row + height, column : column + width]
    return total


def draw_path(points: np.ndarray) -> np.ndarray:
    """A kernel of the time that a moving point spends on each pixel; the path lies about its middle."""
    points = points - points.mean(axis=0)
    reach = int(np.ceil(np.abs(points).max())) + 1
    kernel = np.zeros((2 * reach + 1, 2 * reach + 1))
    share = points - (corner := np.floor(points).astype(int))
    # Each point is shared among the four pixels around it.
    for row in (0, 1):
        for column in (0, 1):
            weight = np.abs(1 - row - share[:, 0]) * np.abs(1 - column - share[:, 1])
            np.add.at(kernel, (corner[:, 0] + row + reach, corner[:, 1] + column + reach), weight)
    return kernel / kernel.sum()


def shake(image: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Light on its way over the sensor: 4 to 14 pixels long, in a direction that wanders."""
    turns = np.cumsum(generator.normal(0, 0.25, 64)) + generator.uniform(0, 2 * np.pi)
    steps = np.stack([np.sin(turns), np.cos(turns)], axis=1) * generator.uniform(4, 14) / 64
    return convolve(image**GAMMA, draw_path(np.cumsum(steps, axis=0))).clip(0, 1) ** (1 / GAMMA)


def rain(image: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Bright streaks in one direction before a thin mist."""
    turn = generator.uniform(-0.4, 0.4)
    line = np.linspace(0, generator.uniform(9, 25), 64)[:, None] * [np.cos(turn), np.sin(turn)]
    seeds = generator.random(image.shape[:2]) < generator.uniform(0.002, 0.008)
    streaks = convolve(seeds[..., None] * generator.uniform(5, 11), draw_path(line)).clip(0, 0.8)
    mist = generator.uniform(0, 0.2)
    return 1 - (1 - (image * (1 - mist) + 0.75 * mist)) * (1 - streaks)


def snow(image: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Soft white flakes of three sizes; near ones are larger and fewer."""
    flakes = np.zeros((*image.shape[:2], 1))
    for sigma, share in ((0.7, 0.006), (1.4, 0.002), (2.4, 0.0006)):
        places = generator.random(image.shape[:2]) < share * generator.uniform(0.4, 1.6)
        flakes = np.maximum(flakes, blur(places[..., None].astype(np.float64), sigma) * 2 * np.pi * sigma**2)
    return 1 - (1 - image) * (1 - 0.9 * flakes.clip(0, 1))


def drops(image: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Drops on the lens show what is about them, upside down, out of focus and a little darker."""
    height, width = image.shape[:2]
    seen, covered = blur(image, 4.0)[::-1, ::-1] * 0.9, np.zeros((height, width, 1))
    rows, columns = np.mgrid[:height, :width]
    for _ in range(generator.integers(12, 30)):
        row, column = generator.uniform(0, height), generator.uniform(0, width)
        radius, flat = generator.uniform(5, 16), generator.uniform(0.8, 1.3)
        distance = np.hypot((rows - row) / flat, columns - column)[..., None]
        covered = np.maximum(covered, ((radius - distance) / 3).clip(0, 1))
    return image * (1 - covered) + seen * covered


Maker = Callable[[np.ndarray, np.random.Generator], np.ndarray]
# Which damage each picture of a folder has, in turn.
MAKERS: dict[str, tuple[Maker, ...]] = {"deblur": (shake,), "weather": (rain, snow, drops)}


def read_photo(path: Path) -> np.ndarray:
    """Pixels of 8 bits and three colours, upright."""
    try:
        with Image.open(path) as file:
            return np.asarray(in_colours(ImageOps.exif_transpose(file), "RGB"))
    except (OSError, ValueError) as error:
        sys.exit(f"{path} is not a picture that can be read ({error}): remove it, or give another folder.")


def write_pairs(
    photos: list[Path], folder: Path, makers: tuple[Maker, ...], seed: tuple[int, ...], title: str
) -> None:
    """Adds pairs to folder/lq and folder/hq: of each photograph, of equal names too, its damage by the next maker."""
    for part in ("lq", "hq"):
        (folder / part).mkdir(exist_ok=True)
    for index, path in enumerate(tqdm(photos, desc=title, unit=" photos")):
        clean = read_photo(path)
        damaged = makers[index % len(makers)](clean / 255, np.random.default_rng((*seed, index)))
        name = f"{path.stem}-{seed[0]}.png"
        while (folder / "hq" / name).exists():
            name = f"{index}-{name}"
        Image.fromarray(clean).save(folder / "hq" / name)
        Image.fromarray(np.rint(damaged * 255).astype(np.uint8)).save(folder / "lq" / name)


def make_pairs(photos: list[Path], out: Path, seed: int) -> None:
    """Writes both sets, each whole or not at all."""
    for kind, (name, makers) in enumerate(MAKERS.items()):
        with whole_folder(out / name, replace=False) as folder:
            write_pairs(photos, folder, makers, (seed, kind), name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path, help="folder of photographs")
    parser.add_argument("out", type=Path, help="folder that gets deblur/ and weather/")
    parser.add_argument("--seed", type=int, default=0)
    words = parser.parse_args()
    photos = sorted(path for path in words.photos.rglob("*") if path.suffix.lower() in Image.registered_extensions())
    if not photos:
        parser.error(f"{words.photos} holds no pictures")
    if taken := [str(words.out / name) for name in MAKERS if (words.out / name).exists()]:
        parser.error(f"{' and '.join(taken)} exist: give another OUT, or remove them")
    make_pairs(photos, words.out, words.seed)


if __name__ == "__main__":
    main()
