"""The data of the released models, from folders that the user brings: who trains, who chooses, who tests.

BSDS500 is split once: every 25th of its training photographs chooses rates, 68 of its test photographs are
for tables alone, all others train. Set5, Set12, BSD68 and the official test recordings of FSDD, those numbered 0 to 4,
only ever test; of each digit and speaker the recording after them chooses. Shaken and rainy pictures are made of the
same photographs by `examples/semanir/make_pairs.py`, those that train five times each, with other draws.
"""

import shutil
import sys
from collections.abc import Container
from pathlib import Path

import numpy as np

from hf_ext.files import whole_folder
from hf_ext.tasks.made_pictures import make_picture

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("mrconv", "semanir")]

from make_pairs import Maker, rain, shake, write_pairs
from recordings import read_digit, split_digits, write_digits

# Every 25th training photograph: too few to miss, enough to rank two learning rates.
VALIDATION_STEP = 25
# As many photographs as CBSD68 has, every third of the test folder, then the first that are left.
TESTED = 68
# Damaged pictures: how often each training photograph is damaged, and how many made pictures are beside them.
REPEATS, MADE = 5, 120
DAMAGES: dict[str, Maker] = {"deblur": shake, "derain": rain}


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


def prepare_pairs(photos: dict[str, list[Path]], data: Path, runs: Container[str]) -> None:
    """Pairs of damaged and clean pictures in data/deblur and data/derain, once, for the runs that read them."""
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
    prepare_pairs(photos, data, runs)
