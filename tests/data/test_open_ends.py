"""Data whose words a library would take for something else: dates, classes with zeros, fractions."""

import contextlib
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from hf_ext.data.opening import open_source
from hf_ext.data.roles import Hints
from hf_ext.data.source import DataSource
from hf_ext.data.survey import look_at
from hf_ext.errors import DataError
from hf_ext.tasks.signals import PixelTask
from tests.kit.own_data import write_files
from tests.kit.refusals import refused

DATES = ["2024-05-01", "2024-05-01T10:00:00Z", "2024-05-01 10:00:00"]


def write(path: Path, rows: list, form: str) -> str:
    texts = map(json.dumps, rows)
    path.write_text(json.dumps(rows) if form == "list" else "\n".join(texts), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("form", ["lines", "list"])
def test_dates_in_json_stay_the_texts_that_they_are(tmp_path, form, streaming):
    rows = [{"text": date, "label": 0, "about": {"day": date, "days": [date]}} for date in DATES]
    path = write(tmp_path / "a.jsonl", rows, form)
    assert [*open_source(DataSource(path, streaming=streaming))] == rows
    # Only some of them, and in a folder with another file.
    write(tmp_path / "b.jsonl", [{**rows[0], "text": "none", "label": 2}], form)
    data = open_source(DataSource(str(tmp_path), streaming=streaming))
    assert sorted(row["text"] for row in data) == sorted([*DATES, "none"])


@pytest.mark.parametrize("name", ["metadata.jsonl", "about.jsonl"])
def test_dates_beside_pictures_stay_texts(tmp_path, name):
    for number in range(len(DATES)):
        Image.new("L", (8, 8), number).save(tmp_path / f"{number}.png")
    rows = [{"file_name": f"{number}.png", "date": date, "text": date} for number, date in enumerate(DATES)]
    write(tmp_path / name, rows, "lines")
    data = open_source(DataSource(str(tmp_path)))
    assert sorted(data["date"]) == sorted(data["text"]) == sorted(DATES)


@pytest.mark.parametrize(
    ("names", "value", "place"),
    [
        (["01", "02", "03"], 1, 0),
        (["01", "02", "10"], 10, 2),
        (["000", "001"], 1, 1),
        (["000", "001"], 0, 0),
        (["01", "02"], "02", 1),
        # Places, as before, where no name is this number.
        (["cat", "dog"], 1, 1),
        (["5", "1"], 1, 1),
    ],
)
def test_a_class_of_a_tar_file_is_the_name_with_its_zeros(names, value, place):
    assert PixelTask(num_labels=len(names), label_names=names).read_class(value) == place


@pytest.mark.parametrize(
    ("labels", "refuses"),
    [([0.13, 0.5, 0.77, 0.9], True), ([0.5, 1.5, 0.5, 1.5], False), ([1.0, 2.0, 3.0, 4.0], False), ("abab", False)],
)
@pytest.mark.parametrize("table", ["labels.csv", "labels.jsonl"])
def test_fractions_are_no_classes_of_pictures(tmp_path, labels, refuses, table):
    for number in range(4):
        Image.new("L", (8, 8), number).save(tmp_path / f"{number}.png")
    if table == "labels.csv":
        rows = [f"{number}.png,{label}" for number, label in enumerate(labels)]
        (tmp_path / table).write_text("\n".join(["file,label", *rows]))
    else:
        write(tmp_path / table, [{"file": f"{n}.png", "label": label} for n, label in enumerate(labels)], "lines")
    with refused(DataError, table, "label", str(labels[0])) if refuses else contextlib.nullcontext():
        assert len(open_source(DataSource(str(tmp_path))).features["label"].names) == len({*labels})


def write_table(path: Path, columns: dict) -> str:
    pd.DataFrame(columns).to_csv(path, index=False)
    return str(path)


COUNTED = [[f"t{step}" for step in range(12)], [f"{step / 2} s" for step in range(22)]]
SWAPPED = [["t0", "t1", "t3", "t2", *COUNTED[0][4:]], COUNTED[0][::-1], [*COUNTED[0], "t01"]]
CLOCK = [f"h{hour % 24}:00" for hour in range(18, 30)]
SEVERAL = [[f"{name}{step}" for name in "xy" for step in range(4)], [f"t{step}" for step in range(-4, 5)]]


def steps_of(names: list[str]) -> dict:
    numbers = np.random.default_rng(0).normal(size=(12, len(names)))
    return {"patient": [*"abcdefghijkl"], **dict(zip(names, numbers.T, strict=True)), "label": ["ill", "well"] * 6}


@pytest.mark.parametrize("names", COUNTED)
def test_steps_that_a_program_sorted_as_texts_are_in_the_order_of_their_numbers(tmp_path, names):
    columns = steps_of(sorted(names))
    survey = look_at(write_table(tmp_path / "a.csv", columns))
    assert survey.train["rows"] == "series" and f"{names[0]} to {names[-1]}" in "; ".join(survey.notes)
    data = open_source(DataSource(**survey.train | {"hold_out": 0.0}))
    np.testing.assert_allclose(np.stack(data["values"]), np.stack([columns[name] for name in names], 1))


@pytest.mark.parametrize("names", [*SWAPPED, CLOCK, *SEVERAL])
def test_steps_in_another_order_or_of_several_channels_are_asked_for(tmp_path, names):
    place = write_table(tmp_path / "a.csv", steps_of(names))
    with refused(DataError, "--inputs NAME,NAME"):
        look_at(place)
    assert look_at(place, Hints(inputs=tuple(names))).train["rows"] == "positions"


def texts_of(part: str, classes: str) -> dict:
    return {"text": [f"{part} has some words {n}" for n in range(24)], "label": [*classes] * (24 // len(classes))}


def series_of(part: str, classes: str) -> dict:
    numbers = np.random.default_rng(len(part)).normal(size=(9, 24))
    return {**{f"t{step}": row for step, row in enumerate(numbers)}, "label": [*classes] * (24 // len(classes))}


def recording_of(part: str, classes: str) -> dict:
    return {"time": range(24), "x": series_of(part, classes)["t0"], "label": sorted(classes * (24 // len(classes)))}


@pytest.mark.parametrize("others", [["test"], ["validation"], ["test", "validation"]])
@pytest.mark.parametrize("make", [texts_of, series_of, recording_of])
def test_a_validation_split_chooses_and_a_test_split_is_told_with_what_no_training_knows(tmp_path, make, others):
    write_table(tmp_path / "train.csv", make("train", "ab"))
    for part in others:
        write_table(tmp_path / f"{part}.csv", make(part, "abc" if part == "test" else "ab"))
    survey = look_at(str(tmp_path))
    assert survey.classes == ["a", "b"] and survey.count in (1, 24)
    told, warned = ("; ".join(lines) for lines in (survey.left_out, survey.notes))
    assert ("--data.eval.split test" in told) == ("no training example is of c" in warned) == ("test" in others)
    assert ("hold_out" in survey.eval or survey.eval["split"] == "train[80%:]") != ("validation" in others)
    if "test" in others:
        assert len(open_source(DataSource(**{**survey.eval, "split": "test", "hold_out": 0.0}))) in (1, 24)


def test_a_validation_split_without_labels_and_a_test_split_of_pairs_are_told(tmp_path):
    write_table(tmp_path / "train.csv", texts_of("train", "ab"))
    write_table(tmp_path / "validation.csv", {"text": texts_of("validation", "ab")["text"]})
    assert "no evaluation example has a label" in "; ".join(look_at(str(tmp_path)).notes)
    for place in (tmp_path / "pairs" / part / side for part in ("train", "test") for side in ("lq", "hq")):
        place.mkdir(parents=True)
        Image.new("L", (32, 32)).save(place / "1.png")
    assert f"--data.eval.path {tmp_path / 'pairs' / 'test'}" in "; ".join(look_at(str(tmp_path / "pairs")).left_out)


def say(word: str) -> list[str]:
    return [f"{word} number {n} says something about {chr(97 + n)}" for n in range(24)]


TEXTS = {"premise": say("this"), "hypothesis": say("that")}


@pytest.mark.parametrize("ending", [".csv", ".jsonl"])
@pytest.mark.parametrize("label", ["label", "is_duplicate"])
def test_of_several_texts_the_user_chooses_one_or_a_pair(tmp_path, label, ending):
    place = tmp_path / f"a{ending}"
    frame = pd.DataFrame({**TEXTS, label: ["same", "other"] * 12})
    frame.to_csv(place, index=False) if ending == ".csv" else frame.to_json(place, orient="records", lines=True)
    with refused(DataError, "--inputs premise", "--inputs premise,hypothesis", *["--label"] * (label != "label")):
        look_at(str(place))
    for inputs in (("hypothesis",), ("premise", "hypothesis")):
        survey = look_at(str(place), Hints(label=label, inputs=inputs))
        assert survey.columns == [*inputs] and survey.classes == ["other", "same"]
    for inputs in (["premise", "nothing"], [*TEXTS][: 1 + (label != "label")], [*TEXTS, label]):
        told = contextlib.nullcontext() if len(inputs) == 1 else refused(DataError, "premise", "hypothesis")
        with told:
            look_at(str(place), Hints(inputs=tuple(inputs)))


@pytest.mark.parametrize(
    "beside",
    [
        say("x")[0].split(),
        ["Ann Lee", "Bo Ek", "Cy Ott"],
        [f"https://a.org/a-long-place/{n}" for n in range(24)],
        range(5),
    ],
)
def test_what_a_classifier_of_texts_leaves_out_is_said(tmp_path, beside):
    cells = [*beside] * 24
    columns = {"beside": cells[:24], "text": say("this"), "label": ["a", "b"] * 12}
    survey = look_at(write_table(tmp_path / "a.csv", columns))
    assert survey.columns == ["text"] and any(line.startswith("beside") for line in survey.left_out)


@pytest.mark.parametrize(("shops", "decided"), [(["a", "a", "a", "b", "b", "b"], "sku"), (["a", "b", "c"] * 2, None)])
def test_of_two_names_of_series_the_time_decides_where_it_differs_in_one_alone(tmp_path, shops, decided):
    columns = {"sku": list("uvwxyz"), "shop": shops, "label": list("abbaab")}
    frame = pd.DataFrame({name: [cell for cell in cells for _ in range(4)] for name, cells in columns.items()})
    frame = frame.assign(week=[*range(4)] * 6, y=np.random.default_rng(0).normal(size=24))
    if decided is None:
        frame["week"] = range(24)
    place = write_table(tmp_path / "a.csv", frame)
    if decided:
        assert look_at(place).train["series"] == decided
    else:
        with refused(DataError, "shop", "sku", "--series"):
            look_at(place)


def write_pairs_of(folder: Path, names: list[str]) -> None:
    for side in ("noisy", "clean"):
        write_captions_of(folder / side, names)


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
