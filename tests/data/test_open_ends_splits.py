"""Splits in folders, files and columns, at any depth, are found by one rule."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hf_ext.data.opening import open_source
from hf_ext.data.roles import Hints
from hf_ext.data.source import DataSource
from hf_ext.data.survey import look_at
from hf_ext.errors import DataError
from tests.kit.own_data import write_files
from tests.kit.refusals import refused

from .odd_data import series_of, texts_of, write_table


def write_pairs_of(folder: Path, names: list[str]) -> None:
    for side in ("noisy", "clean"):
        write_captions_of(folder / side, names)


def test_folders_of_pairs_are_called_by_splits_with_other_words(tmp_path):
    for part in ("train_set", "val_set", "test_set"):
        write_pairs_of(tmp_path / part, [f"{n}" for n in range(4)])
    survey = look_at(str(tmp_path))
    assert survey.eval["path"] == str(tmp_path / "val_set") and str(tmp_path / "test_set") in "; ".join(
        survey.left_out
    )


def test_folders_of_photographs_are_called_by_splits_with_other_words(tmp_path):
    for place, part in enumerate(("train_images", "val_images")):
        for n in range(4):
            (tmp_path / part).mkdir(exist_ok=True)
            Image.new("L", (24, 24), 9 * n + place).save(tmp_path / part / f"{n}.png")
    survey = look_at(str(tmp_path))
    assert (survey.classes, survey.count, survey.eval["split"]) == (
        [],
        4,
        "validation",
    ) and not survey.left_out + survey.notes
    with refused(DataError, "are splits"):
        look_at(str(tmp_path), restores=False)


def write_captions_of(folder: Path, names: list[str]) -> None:
    for name in names:
        pixels = np.random.default_rng(list(f"{folder}{name}".encode())).integers(0, 256, (24, 24, 3), dtype=np.uint8)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(f"what {name} shows")


def write_texts_of(folder: Path, names: list[str]) -> None:
    for place, name in enumerate(names):
        at = Path(name)
        write_files(folder, {f"{at.parent}/{'ab'[place % 2]}/{at.name}.txt": f"this is the text of {name}"})


def write_series_of(folder: Path, names: list[str]) -> None:
    for place, name in enumerate(names):
        rows = np.random.default_rng(list(name.encode())).normal(size=9)
        held = "x\n" + "".join(f"{number:.3f}\n" for number in rows)
        write_files(folder, {f"{Path(name).parent}/{'ab'[place % 2]}/{Path(name).name}.csv": held})


PLACES = [
    "{}/{n}", "data/{}/{n}", "a/b/{}/{n}", "a/{}/x/{n}", "my_{}/{n}", "{}_2/c/{n}", "{}_{n}", "x/{}_{n}", "{}/{}/{n}",
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("write", [write_texts_of, write_series_of, write_captions_of, write_pairs_of])
def test_what_is_called_test_is_trained_on_at_no_depth_and_told(tmp_path, write, place):
    write(
        tmp_path,
        [place.format(*[part] * 2, n=n) for part in ("train", "test") for n in range(12 if part == "train" else 4)],
    )
    survey = look_at(str(tmp_path))
    assert (survey.kind == "pairs") == (write is write_pairs_of)
    parts = [open_source(DataSource(**{**survey.train, "split": part, "hold_out": 0.0})) for part in ("train", "test")]
    assert [*map(len, parts)] == [12, 4] and survey.learned < 12
    assert (survey.classes == ["a", "b"]) == (write in (write_texts_of, write_series_of))
    assert "--data.eval.split test" in "; ".join(survey.left_out)


@pytest.mark.parametrize("write", [write_texts_of, write_series_of])
def test_classes_whose_names_have_words_for_splits_are_classes(tmp_path, write):
    names = ["cycling", "strength_training", "walk_test"]
    write(tmp_path, [f"{n}" for n in range(18)])
    for place in (place for side in "ab" for place in [*(tmp_path / side).iterdir()]):
        (to := tmp_path / names[int(place.stem) % 3]).mkdir(exist_ok=True)
        place.rename(to / place.name)
    for side in "ab":
        (tmp_path / side).rmdir()
    assert (survey := look_at(str(tmp_path))).classes == names and survey.count == 18


def test_a_class_of_texts_may_be_called_train(tmp_path):
    names = [f"{part}/{name}/{n}.txt" for part in ("train", "val") for name in ("bus", "train") for n in range(6)]
    write_files(tmp_path, {name: f"this is the text of {name}" for name in names})
    survey = look_at(str(tmp_path))
    assert (survey.classes, survey.count, survey.eval["split"]) == (["bus", "train"], 12, "validation")


@pytest.mark.parametrize("write", [write_captions_of, write_series_of])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_table_of_files_that_are_called_by_splits_keeps_them(tmp_path, write, reverse):
    names = [f"{part}_{n}" for part, count in {"train": 12, "test": 6}.items() for n in range(count)]
    write(tmp_path, names)
    rows = [f"{name},{'xyz'[place % 3]}" for place, name in enumerate(names)][:: -1 if reverse else 1]
    write_files(tmp_path, {"about.csv": "\n".join(["file,class", *rows])})
    survey = look_at(str(tmp_path))
    assert (survey.count, survey.classes) == (12, ["x", "y", "z"]) and "split test" in "; ".join(survey.left_out)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["train/1", "train/2", "train/val/1", "train/val/2"], "val"),
        (["p/train/1", "p/train/2", "q/train/1", "q/train/2", "p/test/1"], "several folders"),
        (["x/test/1", "x/test/2", "1", "2"], "no folder 'train'"),
        (["x/Train/1", "x/Train/2", "x/Test/1", "x/Test/2"], "small letters"),
    ],
)
@pytest.mark.parametrize("write", [write_texts_of, write_series_of, write_captions_of])
def test_what_may_belong_to_two_splits_or_to_none_is_refused(tmp_path, write, names, told):
    write(tmp_path, names)
    with refused(DataError, told):
        look_at(str(tmp_path))


@pytest.mark.parametrize("others", [["other"], ["a", "b", "c"], ["sample_submission"]])
@pytest.mark.parametrize(("make", "count"), [(texts_of, 24), (series_of, 24)])
@pytest.mark.parametrize("ends", [("train", "test"), ("Wafer_TRAIN", "Wafer_TEST")])
def test_a_table_beside_those_of_the_splits_joins_nothing(tmp_path, others, make, count, ends):
    for name in (*ends, *others):
        write_table(tmp_path / f"{name}.csv", make(name, "ab") if name in ends or make is series_of else {"n": [1, 2]})
    if make is texts_of and ends[0] != "train":
        with refused(DataError, "small letters"):
            look_at(str(tmp_path))
        return
    survey = look_at(str(tmp_path))
    assert survey.count == count and "--data.eval.split test" in "; ".join(survey.left_out)
    assert make is texts_of or f"{others[0]}.csv" in "; ".join(survey.left_out)


@pytest.mark.parametrize("names", [["tap_test_1", "a", "b"], ["test_tube", "beaker"], ["a_train", "b_test", "c", "d"]])
def test_a_word_in_a_name_alone_is_no_split(tmp_path, names):
    write_series_of(tmp_path, [f"{name}_{n}" for name in names for n in range(4)])
    assert look_at(str(tmp_path)).count == 4 * len(names)


def test_arrays_of_the_splits_are_a_file_each(tmp_path):
    counts = {"train": 20, "test": 8}
    arrays = {f"X_{part}": np.random.default_rng(count).normal(size=(count, 9, 2)) for part, count in counts.items()}
    arrays |= {f"y_{part}": np.arange(count) % 2 for part, count in counts.items()}
    np.savez(tmp_path / "all.npz", **arrays)
    with refused(DataError, "train.npz"):
        look_at(str(tmp_path / "all.npz"))
    (tmp_path / "all.npz").unlink()
    for part in counts:
        np.savez(tmp_path / f"{part}.npz", X=arrays[f"X_{part}"], y=arrays[f"y_{part}"])
    for hints in (Hints(), Hints(label="y")):
        survey = look_at(str(tmp_path), hints)
        assert survey.count == 20 and survey.columns == ["X"] and "--data.eval.split test" in survey.left_out[0]
        assert len(open_source(DataSource(**{**survey.train, "split": "test", "hold_out": 0.0}))) == 8
