"""Columns that are texts, lists, labels, times or pairs of pictures are what they say, or are asked for."""

import shutil
from itertools import chain
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pytest
from PIL import Image

from hf_ext.data.opening import open_source
from hf_ext.data.roles import Hints
from hf_ext.data.source import DataSource
from hf_ext.data.survey import look_at
from hf_ext.errors import DataError
from tests.kit.refusals import refused

from .odd_data import recording_of, say, series_of, texts_of, write, write_table


def rows_of(**columns) -> list[dict]:
    return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]


LISTS = [[float(number * step % 7) for step in range(9)] for number in range(1, 25)]
RISING = [[float(number + step) for step in range(9)] for number in range(24)]
CLASSES = ["a", "b"] * 12


@pytest.mark.parametrize("beside", ["token_ids", "scores", "embedding"])
def test_of_texts_and_lists_of_numbers_the_user_chooses(tmp_path, beside):
    rows = rows_of(text=say("this"), **{beside: LISTS}, label=CLASSES)
    place = write(tmp_path / "a.jsonl", rows, "lines")
    with refused(DataError, "--inputs text", f"--inputs {beside}"):
        look_at(place)
    for chosen, other, kind in (("text", beside, "texts"), (beside, "text", "series")):
        survey = look_at(place, Hints(inputs=(chosen,)))
        assert (survey.kind, survey.columns) == (kind, [chosen]) and f"{other} (no input)" in survey.left_out
    with refused(DataError, "text"):
        look_at(place, Hints(inputs=("text", beside)))


@pytest.mark.parametrize("beside", [{"text": say("this")}, {"tokens": [text.split() for text in say("this")]}])
@pytest.mark.parametrize("label", ["label", "labels"])
def test_several_classes_of_a_text_are_refused(tmp_path, beside, label):
    place = write(tmp_path / "a.jsonl", rows_of(**beside, **{label: [[0, 1, 0]] * 24}), "lines")
    for hints in (Hints(), Hints(inputs=(*beside,))):
        with refused(DataError, "label", "lists", "--label"):
            look_at(place, hints)


def test_the_time_of_lists_is_no_channel_and_patients_are_told(tmp_path):
    rows = rows_of(patient=["p1", "p2"] * 12, time=RISING, x=LISTS, steps=LISTS, label=CLASSES)
    place = write(tmp_path / "a.jsonl", rows, "lines")
    for hints in (Hints(), Hints(time="time")):
        survey = look_at(place, hints)
        # Steps that a watch counted do not rise.
        assert survey.columns == ["x", "steps"]
        assert {"time (the time)", "patient (no input)"} <= {*survey.left_out}
    with refused(DataError, "steps", "rise"):
        look_at(place, Hints(time="steps"))


def write_options(folder: Path, kind: str) -> str:
    folder.mkdir()
    if kind == "lists":
        return write(folder / "a.jsonl", rows_of(x=LISTS, label=CLASSES), "lines")
    if kind == "texts":
        return write(folder / "a.jsonl", rows_of(text=say("this"), label=CLASSES), "lines")
    if kind == "ts":
        lines = [f"{','.join(map(str, row))}:{label}" for row, label in zip(LISTS, CLASSES, strict=True)]
        (folder / "a.ts").write_text("\n".join(["@classLabel true a b", "@data", *lines]))
    elif kind == "arrays":
        np.savez(folder / "a.npz", X=np.array(LISTS), y=np.arange(24) % 2)
    for number, label in enumerate(CLASSES if kind in ("files", "pictures", "pairs") else ()):
        place = folder / (("lq", "hq")[number % 2] if kind == "pairs" else label) / f"{number // 2}.png"
        place.parent.mkdir(exist_ok=True)
        if kind == "files":
            np.save(place.with_suffix(".npy"), np.array(LISTS[number]))
        else:
            Image.new("L", (32, 32), number).save(place)
    return str(folder / {"ts": "a.ts", "arrays": "a.npz"}.get(kind, ""))


@pytest.mark.parametrize("option", ["label", "time", "series", "inputs", "values"])
@pytest.mark.parametrize("kind", ["lists", "texts", "ts", "arrays", "files", "pictures", "pairs"])
def test_no_option_is_ignored_in_silence(tmp_path, kind, option):
    place = write_options(tmp_path / "data", kind)
    value = {"inputs": ("nothing",), "values": True}.get(option, "nothing")
    try:
        survey = look_at(place, Hints(**{option: value}))
    except DataError as error:
        assert str(value if option == "label" else "nothing") in str(error) or "--" in str(error)
    else:
        assert survey.values or f"--{option}" in "; ".join(survey.left_out)


def test_a_label_in_the_table_beside_the_files_has_the_name_that_is_given(tmp_path):
    for number in range(8):
        pd.DataFrame({"x": LISTS[number]}).to_csv(tmp_path / f"{number}.csv", index=False)
    write_table(tmp_path / "about.csv", {"file": [f"{n}.csv" for n in range(8)], "gait": ["up", "down"] * 4})
    assert look_at(str(tmp_path), Hints(label="gait")).classes == ["down", "up"]


def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (32, 32, 3), dtype=np.uint8))


SCENES = [f"train/S{scene}/{{}}/{number}.png" for scene in range(2) for number in range(4)]
MIXED = {
    "folders of scenes": (SCENES, ("blur", "sharp")),
    "names in folders": (["train/{}_" + f"{number}.png" for number in range(8)], ("NOISY_SRGB", "GT_SRGB")),
    "capitals, several sizes": (["DIV_{}/" + f"{number}.png" for number in range(8)], ("LR", "HR")),
    "unequal names": (["{0}/{0}-" + f"{number}.png" for number in range(8)], ("rain", "norain")),
    "three folders": (["{}/" + f"{number}.png" for number in range(8)], ("noisy", "clean", "other")),
}


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(("names", "words"), MIXED.values(), ids=MIXED)
def test_pairs_that_lie_elsewhere_are_not_learned_as_clean(tmp_path, names, words, zipped):
    folder = tmp_path / "rain"
    for seed, name in enumerate(name.format(word) for name in names for word in words):
        place = folder / (name.replace("/", "_") if zipped else name)
        place.parent.mkdir(parents=True, exist_ok=True)
        picture(seed).save(place)
    place = shutil.make_archive(str(tmp_path / "a"), "zip", folder) if zipped else str(folder)
    with refused(DataError, "two folders", words[1].partition("_")[0].lower()):
        look_at(place)
    assert look_at(place, restores=False).kind == "pictures"


TIDES = {f"{word}_tide/{number}" for word in ("low", "high") for number in range(8)}
BLUR = {f"{word}_{name}" for word, name in zip(["blur", "sharp"] * 4, "abcdefgh", strict=True)}
STREETS = {"low tide", "low sun", "high tide", "high sun", *(f"rain, noisy street {number}" for number in range(20))}


@pytest.mark.parametrize("names", [TIDES, BLUR, STREETS])
def test_words_of_photographs_are_no_pairs(tmp_path, names):
    for name in sorted(names):
        (place := tmp_path / f"{name}.png").parent.mkdir(exist_ok=True)
        picture(len(name)).save(place)
    assert look_at(str(tmp_path)).kind == "pictures"


@pytest.mark.parametrize("names", [("lq", "hq"), ("Noisy", "clean"), ("lq_image", "gt_image"), ("before", "after")])
@pytest.mark.parametrize("form", ["parquet", "dict", "table"])
def test_pairs_in_columns_are_pairs(tmp_path, names, form):
    place = tmp_path / "data"
    place.mkdir()
    rows = {name: [picture(number + 50 * side) for number in range(8)] for side, name in enumerate(names)}
    if form == "table":
        files = {f"{name}_file_name": [f"{name}{number}.png" for number in range(8)] for name in names}
        for file, image in zip(chain(*files.values()), chain(*rows.values()), strict=True):
            image.save(place / file)
        write_table(place / "metadata.csv", files)
    else:
        kinds = datasets.Features(dict.fromkeys(names, datasets.Image()))
        data = datasets.Dataset.from_dict(rows, features=kinds)
        data.to_parquet(place / "a.parquet") if form == "parquet" else datasets.DatasetDict(train=data).save_to_disk(
            place
        )
    hints = Hints(pairs=names if names[0] == "before" else ())
    survey = look_at(str(place), hints)
    data = open_source(DataSource(**{**survey.train, "hold_out": 0.0}))
    assert survey.kind == "pairs" and {"lq", "hq"} <= {*data.column_names}
    for number, row in enumerate(data):
        for side, name in zip(("lq", "hq"), names, strict=True):
            np.testing.assert_array_equal(row[side], rows[name][number])
    # Of several columns one is chosen, and the other is told.
    survey = look_at(str(place), Hints(inputs=(names[1],)))
    assert survey.columns == [names[1]] and f"{names[0]} (no input)" in survey.left_out
    if hints.pairs:
        for wrong, told in ((Hints(), "--pairs before,after"), (Hints(pairs=("before", "x")), "before")):
            with refused(DataError, told):
                look_at(str(place), wrong)


def test_folders_beside_pairs_are_told(tmp_path):
    for place in (tmp_path / side / f"{number}.png" for side in ("night", "day", "other") for number in range(4)):
        place.parent.mkdir(exist_ok=True)
        picture(len(str(place))).save(place)
    assert "other" in "; ".join(look_at(str(tmp_path), Hints(pairs=("night", "day"))).left_out)


@pytest.mark.parametrize("word", ["none", "-", "?", "NA", "n.d.", "null"])
@pytest.mark.parametrize("make", [texts_of, series_of, recording_of])
@pytest.mark.parametrize("label", ["label", "grade"])
def test_a_word_beside_classes_that_are_numbers_is_one_and_is_doubted(tmp_path, word, make, label):
    columns = make("train", "abcd")
    cells = pd.Series(columns.pop("label")).map({"a": word, "b": "1", "c": "2", "d": "3"})
    survey = look_at(write_table(tmp_path / "a.csv", {**columns, label: cells}), Hints(label=label))
    assert survey.classes == sorted(["1", "2", "3", word]) and not survey.broken
    assert f"WARNING: {word} is read as a class" in "; ".join(survey.notes)


@pytest.mark.parametrize(("cells", "values"), [(["0.5", "1.25", "n.d."], True), (["1", "2", "nan"], False)])
def test_a_word_beside_values_and_nan_say_that_a_label_is_missing(tmp_path, cells, values):
    survey = look_at(write_table(tmp_path / "a.csv", {**series_of("train", "ab"), "label": cells * 8}))
    assert survey.values == values and survey.classes == ([] if values else ["1", "2"])
    assert "8 of 24 examples without a label" in survey.left_out


FREE = {
    "each differs": say("that"),
    "names": [f"L{number}" for number in range(24)],
    "some are alike": [f"that says something {number % 20}" for number in range(24)],
}


@pytest.mark.parametrize("labels", FREE.values(), ids=FREE)
@pytest.mark.parametrize("names", [("source", "target"), ("text", "label"), ("review", "answer"), ("x", "label")])
def test_texts_and_names_that_are_no_classes_are_refused(tmp_path, names, labels):
    given = LISTS if names[0] == "x" else say("this")
    place = write(tmp_path / "a.jsonl", rows_of(**dict(zip(names, (given, labels), strict=True))), "lines")
    chosen = None if names[1] == "label" else names[1]
    if chosen and len({*labels}) < len(labels):
        assert len(look_at(place, Hints(label=chosen)).classes) == 20
        return
    with refused(DataError, "labels", "--classes"):
        look_at(place, Hints(label=chosen))
    assert look_at(place, Hints(label=chosen, values=False)).classes == sorted({*labels})


@pytest.mark.parametrize(
    "labels",
    [["very good film", "very bad film"] * 12, [*"abcdefgh"] * 3, [f"ask for {n}" for n in say("it")[:6]] * 4],
)
def test_classes_of_several_words_and_many_small_ones_are_classes(tmp_path, labels):
    place = write(tmp_path / "a.jsonl", rows_of(text=say("this"), label=labels), "lines")
    assert look_at(place).classes == sorted({*labels})
