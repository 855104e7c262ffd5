"""The data of the released models, from folders that the user brings: who trains, who chooses, who tests.

BSDS500 is split once: every 25th of its training photographs chooses rates, 68 of its test photographs are
for tables alone, all others train. Set5, Set12, BSD68 and the official test recordings of FSDD, those numbered 0 to 4,
only ever test; of each digit and speaker the recording after them chooses. Shaken and rainy pictures are made of the
same photographs by `examples/semanir/make_pairs.py`, those that train five times each, with other draws. So are halved
pictures, as people shrink and pass them on. Recordings that train are also there in four variations each.
"""

import shutil
import sys
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from hf_ext.files import whole_folder
from hf_ext.tasks.degradations import jpeg
from hf_ext.tasks.made_pictures import make_picture

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("mrconv", "semanir")]

from make_pairs import Maker, rain, read_photo, shake, write_pairs
from recordings import read_digit, split_digits, vary_digit, write_digits

# Every 25th training photograph: too few to miss, enough to rank two learning rates.
VALIDATION_STEP = 25
# As many photographs as CBSD68 has, every third of the test folder, then the first that are left.
TESTED = 68
# Damaged pictures: how often each training photograph is damaged, and how many made pictures are beside them.
REPEATS, MADE = 5, 120
# Variations of each recording that trains.
VARIATIONS = 4
DAMAGES: dict[str, Maker] = {"deblur": shake, "derain": rain}
# Averages of 2 x 2 pixels, as cameras and OpenCV's INTER_AREA make them, and two filters of editors.
FILTERS = (Image.Resampling.BOX, Image.Resampling.LANCZOS, Image.Resampling.BICUBIC)
# Halves that train: more averages and less JPEG than those that test, because there a run before was weaker.
TRAINED_FILTERS, TRAINED_STORED = (Image.Resampling.BOX, *FILTERS), 0.25


def split_photos(train: list[Path], test: list[Path]) -> dict[str, list[Path]]:
    """The three sets of photographs; a function of the names alone."""
    train, test = sorted(train), sorted(test)
    held = sorted({*test[::3], *test[1:4:3]})[:TESTED]
    chosen = train[::VALIDATION_STEP]
    return {
        "validation": chosen,
        "test": held,
        "train": [file for file in train if file not in chosen] + [file for file in test if file not in held],
    }


def halve_pictures(
    files: list[Path], folder: Path, seeds: range, filters: Sequence[Image.Resampling] = FILTERS, stored: float = 0.5
) -> None:
    """
    Pairs of pictures and their halves in folder/lq and folder/hq: shrunk by one of the filters, a share of them then
    stored as JPEG of quality 75 to 98. MATLAB's bicubic is made in training.
    """
    for part in ("lq", "hq"):
        (folder / part).mkdir()
    for seed in seeds:
        for index, path in enumerate(files):
            generator, clean = np.random.default_rng((seed, index)), read_photo(path)
            # The odd row and column of BSDS500 go first or last: so JPEG's blocks and the pairs of pixels differ.
            top, left = (int(generator.integers(side % 2 + 1)) for side in clean.shape[:2])
            clean = clean[top : top + clean.shape[0] // 2 * 2, left : left + clean.shape[1] // 2 * 2]
            picture, name = Image.fromarray(clean), f"{path.stem}-{seed}.png"
            shrunk_by = filters[int(generator.integers(len(filters)))]
            half = picture.resize((picture.width // 2, picture.height // 2), shrunk_by)
            if generator.random() < stored:
                half = Image.fromarray(jpeg(np.asarray(half), int(generator.integers(75, 98, endpoint=True))))
            picture.save(folder / "hq" / name)
            half.save(folder / "lq" / name)


def prepare_pairs(photos: dict[str, list[Path]], data: Path, runs: Container[str]) -> None:
    """Halved pictures and pairs in data/half, data/halves, data/deblur and data/derain, once, for who reads them."""
    if any(name in runs for name in ("jpeg-color", "photo")) and not (data / "half").is_dir():
        with whole_folder(data / "half") as folder:
            for path in photos["train"]:
                whole = Image.fromarray(read_photo(path))
                half = whole.resize((whole.width // 2, whole.height // 2), Image.Resampling.LANCZOS)
                half.save(folder / f"{path.stem}.png")
    if "super-resolution-x2" in runs:
        trained = (range(5, 8), TRAINED_FILTERS, TRAINED_STORED)
        halves: dict[str, tuple[Any, ...]] = {"train": trained, "validation": (range(3, 4),), "test": (range(4, 5),)}
        for part, given in halves.items():
            if not (data / "halves" / part).is_dir():
                with whole_folder(data / "halves" / part) as folder:
                    halve_pictures(photos[part], folder, *given)
    made = data / "made"
    if not made.is_dir() and any(name in runs for name in DAMAGES):
        with whole_folder(made) as folder:
            for index in range(MADE):
                make_picture(256, np.random.default_rng((6, index))).save(folder / f"made{index}.png")
    for kind, (name, maker) in enumerate(DAMAGES.items()):
        if name not in runs:
            continue
        for part, (seeds, files) in {
            "train": (range(REPEATS), photos["train"] + sorted(made.iterdir())),
            "validation": (range(REPEATS, REPEATS + 1), photos["validation"]),
            "test": (range(REPEATS + 1, REPEATS + 2), photos["test"]),
        }.items():
            if not (data / name / part).is_dir():
                with whole_folder(data / name / part) as folder:
                    for seed in seeds:
                        write_pairs(files, folder, (maker,), (seed, kind), f"{name}, {part}, {seed}")


def prepare(source: Path, work: Path, runs: Container[str]) -> None:
    """Puts what the recipes of these runs read into WORK/data, once."""
    data = work / "data"
    photos = split_photos(*(list((source / "bsds500" / part).glob("*.jpg")) for part in ("train", "test")))
    sets = {f"photos/{name}": files for name, files in photos.items()}
    sets |= {name: sorted((source / name).iterdir()) for name in ("cifar10", "set5", "set12", "bsd68")}
    for name, files in sets.items():
        folder = data / name
        if folder.is_dir():
            continue
        with whole_folder(folder) as made:
            for file in files:
                shutil.copy(file, made)
    for part, files in split_digits(list((source / "fsdd").glob("*.wav")), 50).items():
        if not (data / "fsdd" / f"{part}.parquet").is_file():
            write_digits(data / "fsdd" / f"{part}.parquet", [read_digit(file) for file in files])
        varied = data / "fsdd_varied" / f"{part}.parquet"
        if part == "train" and "spoken-digits" in runs and not varied.is_file():
            generator, rows = np.random.default_rng(7), [read_digit(file) for file in files]
            others = [{**row, "audio": vary_digit(row["audio"], generator)} for row in rows * VARIATIONS]
            write_digits(varied, rows + others)
    prepare_pairs(photos, data, runs)
