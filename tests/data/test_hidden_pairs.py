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


def write_folders(folder: Path, names: tuple[str, ...], files: tuple[str, ...], noise: float) -> None:
    """The same pictures in folders; those of all but the last are noisy."""
    for seed in range(1, 5):
        clean = np.kron(np.random.default_rng(seed).integers(0, 255, (4, 4)), np.ones((8, 8)))
        for number, (name, file) in enumerate(zip(names, files, strict=True), 1):
            other = np.random.default_rng(seed + 9 * number).integers(0, 255, (32, 32))
            held = clean if number == len(names) else (1 - noise) * clean + noise * other
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
        (
            ("DIV2K_train_HR", "DIV2K_train_LR_bicubic/X2"),
            ("000{}.png", "000{}x2.png"),
            0.1,
            "--pairs DIV2K_train_HR,",
        ),
        (("rain_training", "norain_training"), ("{}_1.png", "{}.png"), 0.1, "--pairs norain_training,rain_training"),
        (("train_x", "train_y", "valid_x", "valid_y"), ("{}.png",) * 4, 0.1, "--pairs train_x,train_y"),
        (("HR", "LR_x2", "LR_x4"), ("{}.png", "{}x2.png", "{}x4.png"), 0.1, "--pairs HR,LR_x2"),
        (("extra", "lr", "hr"), ("e{}.png", "{}x2.png", "{}.png"), 0.1, "--pairs hr,lr"),
        # Two splits of one folder, of which one is learned.
        *(
            ((one, other), ("{}.png",) * 2, 0.1, "")
            for one, other in (("train/x", "test/x"), ("a_val/x", "a_train/x"))
        ),
        # Classes, whose files may be numbered alike.
        (("cat", "dog"), ("{}.png", "{}.png"), 1.0, "cat/ and dog/"),
        (("cat", "dog", "emu"), ("{}.png",) * 3, 1.0, ""),
        # The same places in other months, bands or light.
        (("2021-01", "2021-02", "2021-03"), ("tile_{}.png",) * 3, 0.1, "2021-01/ and 2021-02/"),
        (("class_a", "class_b", "class_c"), ("{}.png",) * 3, 0.1, "class_a/ and class_b/"),
        (("high_tide", "low_tide", "middle"), ("{}.png",) * 3, 0.1, "high_tide/ and low_tide/"),
        (("LR_x2", "LR_x4", "other"), ("{}.png",) * 3, 1.0, ""),
        (("HR", "LR_x2", "LR_x4"), ("{}.png", "{}x2.png", "{}x4.png"), 1.0, "HR/ and LR_x2/"),
        # Tests, which are not learned beside a split for training.
        (("train/x", "test_clean/x", "test_noisy25/x"), ("a{}.png", "{}.png", "{}.png"), 0.1, ""),
        (("train_clean/x", "test_low/x", "test_high/x"), ("{}.png",) * 3, 0.1, ""),
        (("train/x", "val_lr/x", "val_hr/x"), ("a{}.png", "{}.png", "{}.png"), 0.1, ""),
        (("train_hr", "train_lr", "train_depth"), ("{}.png",) * 3, 0.1, "--pairs train_hr,"),
        (("cat", "dog"), ("cat_a{}.png", "dog{}.png"), 0.1, ""),
        (("low", "high"), ("{}.png", "{}.png"), 0.1, ""),
    ],
)
def test_pairs_of_unknown_folders_are_refused_by_their_pictures_and_told_by_their_names(
    tmp_path, names, files, noise, told
):
    write_folders(tmp_path, names, files, noise)
    if told and "/ and " not in told:
        with refused(DataError, told):
            look_at(str(tmp_path))
    else:
        told_of = [note for note in look_at(str(tmp_path)).notes if "like names" in note]
        assert [told in note for note in told_of] == [True] * bool(told)
    if names[0] == "degraded":
        assert look_at(str(tmp_path), Hints(pairs=names)).kind == "pairs"
    assert look_at(str(tmp_path), restores=False).kind in ("pictures", "pairs")
