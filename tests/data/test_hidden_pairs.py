"""Folders of the same pictures are refused, or told, where a restorer would learn them as clean."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hf_ext.data.roles import Hints
from hf_ext.data.survey import look_at
from hf_ext.errors import DataError
from tests.kit.refusals import refused


def test_days_of_a_fixed_camera_are_no_pairs(tmp_path):
    scene = np.kron(np.random.default_rng(0).integers(0, 255, (4, 4)), np.ones((8, 8)))
    for seed, (day, n) in enumerate((day, n) for day in ("day1", "day2") for n in range(5)):
        (place := tmp_path / day / f"000{n}.png").parent.mkdir(exist_ok=True)
        held = 0.9 * scene + 0.1 * np.random.default_rng(seed).integers(0, 255, (32, 32))
        Image.fromarray(held.astype(np.uint8)).save(place)
    assert "WARNING: day1/ and day2/" in "; ".join(look_at(str(tmp_path)).notes)


def write_pair(folder: Path, names: tuple[str, str], files: tuple[str, str], noise: float) -> None:
    for seed in range(1, 5):
        clean = np.kron(np.random.default_rng(seed).integers(0, 255, (4, 4)), np.ones((8, 8)))
        other = np.random.default_rng(seed + 9).integers(0, 255, (32, 32))
        for name, file, held in zip(names, files, ((1 - noise) * clean + noise * other, clean), strict=True):
            (place := folder / name / file.format(seed)).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(held.astype(np.uint8)).save(place)


@pytest.mark.parametrize(
    ("names", "files", "noise", "told"),
    [
        (("hazy", "clear"), ("{}_0_0.8.png", "{}.png"), 0.1, "equal names"),
        (("LR", "HR"), ("000{}x2.png", "000{}.png"), 1.0, "equal names"),
        (("degraded", "original"), ("{}.jpg", "{}.png"), 0.1, "--pairs degraded,original"),
        (("rainy_image", "ground_truth"), ("{}_3.png", "{}.png"), 0.1, "--pairs ground_truth,rainy_image"),
        (("HR", "LR_bicubic/X2"), ("000{}.png", "000{}x2.png"), 0.1, "--pairs HR,LR_bicubic"),
        # Classes, whose files may be numbered alike.
        (("cat", "dog"), ("{}.png", "{}.png"), 1.0, None),
        (("cat", "dog"), ("cat_a{}.png", "dog{}.png"), 0.1, ""),
        (("low", "high"), ("{}.png", "{}.png"), 0.1, ""),
    ],
)
def test_pairs_of_unknown_folders_are_refused_by_their_pictures_and_told_by_their_names(
    tmp_path, names, files, noise, told
):
    write_pair(tmp_path, names, files, noise)
    if told:
        with refused(DataError, told):
            look_at(str(tmp_path))
    else:
        assert ("WARNING: cat/ and dog/" in "; ".join(look_at(str(tmp_path)).notes)) == (told is None)
    if names[0] == "degraded":
        assert look_at(str(tmp_path), Hints(pairs=names)).kind == "pairs"
    assert look_at(str(tmp_path), restores=False).kind in ("pictures", "pairs")
