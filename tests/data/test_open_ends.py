"""Words, columns and labels that a library would take for something else are what they say, or are asked for."""

import contextlib
import io
import shutil
import tarfile
from itertools import chain
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pytest
import soundfile
from PIL import Image

from hf_ext.data.files import read_recording
from hf_ext.data.opening import open_source
from hf_ext.data.roles import Hints
from hf_ext.data.source import DataSource
from hf_ext.data.survey import look_at
from hf_ext.errors import DataError
from hf_ext.tasks.restoration import SemanIRTask
from hf_ext.tasks.signals import PixelTask
from tests.kit.own_data import write_pictures
from tests.kit.refusals import refused

from .odd_data import recording_of, say, series_of, texts_of, write, write_table

DATES = ["2024-05-01", "2024-05-01T10:00:00Z", "2024-05-01 10:00:00"]


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


@pytest.mark.parametrize("held", ["", "\n\n", "[]", "a,b\n"])
@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "tsv", "txt"])
def test_an_empty_file_is_refused_in_words(tmp_path, ending, held):
    (tmp_path / f"a.{ending}").write_text(held)
    if ending == "txt" and held:
        return
    with refused(DataError, f"a.{ending}"):
        open_source(DataSource(str(tmp_path / f"a.{ending}")))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("ending", "label"), [("cls", b"1"), ("json", b'{"label": 1}')])
def test_sounds_in_a_tar_file_are_decoded_as_those_of_a_folder(tmp_path, ending, label, streaming):
    soundfile.write(tmp_path / "a.wav", np.linspace(-0.5, 0.5, 40), 8000, subtype="FLOAT")
    with tarfile.open(tmp_path / "train-000.tar", "w") as archive:
        for number in range(3):
            for name, held in (("wav", (tmp_path / "a.wav").read_bytes()), (ending, label)):
                about = tarfile.TarInfo(f"{number}.{name}")
                about.size = len(held)
                archive.addfile(about, io.BytesIO(held))
    names = {"wav": "audio", **({"cls": "label"} if ending == "cls" else {})}
    data = [*open_source(DataSource(str(tmp_path / "train-000.tar"), rename_columns=names, streaming=streaming))]
    assert len(data) == 3
    assert np.allclose(read_recording(data[2]["audio"], 8000), np.linspace(-0.5, 0.5, 40))


@pytest.mark.parametrize("name", ["metadata.jsonl", "about.jsonl"])
def test_dates_beside_pictures_stay_texts(tmp_path, name):
    write_pictures(tmp_path, [""], len(DATES))
    rows = [{"file_name": f"{number}.png", "date": date, "text": date} for number, date in enumerate(DATES)]
    write(tmp_path / name, rows)
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
    write_pictures(tmp_path, [""], 4)
    columns = {"file": [f"{number}.png" for number in range(4)], "label": [*labels]}
    if table == "labels.csv":
        write_table(tmp_path / table, columns)
    else:
        write(tmp_path / table, rows_of(**columns))
    with refused(DataError, table, "label", str(labels[0])) if refuses else contextlib.nullcontext():
        assert len(open_source(DataSource(str(tmp_path))).features["label"].names) == len({*labels})


COUNTED = [[f"t{step}" for step in range(12)], [f"{step / 2} s" for step in range(22)]]
SWAPPED = [["t0", "t1", "t3", "t2", *COUNTED[0][4:]], [*COUNTED[0], "t01"]]
CLOCK = [f"h{hour % 24}:00" for hour in range(18, 30)]
SEVERAL = [[f"{name}{step}" for name in "xy" for step in range(4)], [f"t{step}" for step in range(-4, 5)]]


def steps_of(names: list[str]) -> dict:
    numbers = np.random.default_rng(0).normal(size=(12, len(names)))
    return {"patient": [*"abcdefghijkl"], **dict(zip(names, numbers.T, strict=True)), "label": ["ill", "well"] * 6}


@pytest.mark.parametrize("order", [sorted, lambda names: names[::-1]], ids=["as texts", "falling"])
@pytest.mark.parametrize("names", COUNTED)
def test_steps_that_a_program_sorted_are_in_the_order_of_their_numbers(tmp_path, names, order):
    columns = steps_of(order(names))
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
    for part in ("train", "test"):
        write_pictures(tmp_path / "pairs" / part, ["lq", "hq"], 1)
    assert f"--data.eval.path {tmp_path / 'pairs' / 'test'}" in "; ".join(look_at(str(tmp_path / "pairs")).left_out)


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
        with contextlib.nullcontext() if len(inputs) == 1 else refused(DataError, "premise", "hypothesis"):
            look_at(str(place), Hints(inputs=tuple(inputs)))


ADDRESSES = [f"https://a.org/a-long-place/{n}" for n in range(24)]


@pytest.mark.parametrize("beside", [say("x")[0].split(), ["Ann Lee", "Bo Ek", "Cy Ott"], ADDRESSES, range(5)])
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
    with contextlib.nullcontext() if decided else refused(DataError, "shop", "sku", "--series"):
        assert look_at(place).train["series"] == decided


def rows_of(**columns) -> list[dict]:
    return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]


LISTS = [[float(number * step % 7) for step in range(9)] for number in range(1, 25)]
CLASSES = ["a", "b"] * 12
RISING = [[float(number + step) for step in range(9)] for number in range(24)]


@pytest.mark.parametrize("beside", ["token_ids", "scores", "embedding"])
def test_of_texts_and_lists_of_numbers_the_user_chooses(tmp_path, beside):
    rows = rows_of(text=say("this"), **{beside: LISTS}, label=CLASSES)
    place = write(tmp_path / "a.jsonl", rows)
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
    place = write(tmp_path / "a.jsonl", rows_of(**beside, **{label: [[0, 1, 0]] * 24}))
    for hints in (Hints(), Hints(inputs=(*beside,))):
        with refused(DataError, "label", "lists", "--label"):
            look_at(place, hints)


def test_the_time_of_lists_is_no_channel_and_patients_are_told(tmp_path):
    rows = rows_of(patient=["p1", "p2"] * 12, time=RISING, x=LISTS, steps=LISTS, label=CLASSES)
    place = write(tmp_path / "a.jsonl", rows)
    for hints in (Hints(), Hints(time="time")):
        survey = look_at(place, hints)
        # Steps that a watch counted do not rise.
        assert survey.columns == ["x", "steps"]
        assert {"time (the time)", "patient (no input)"} <= {*survey.left_out}
    with refused(DataError, "steps", "rise"):
        look_at(place, Hints(time="steps"))


def write_options(folder: Path, kind: str) -> str:
    classes = ["lq", "hq"] if kind == "pairs" else ["a", "b"]
    write_pictures(folder, classes, 12 if kind in ("pictures", "pairs") else 0)
    if kind in ("lists", "texts"):
        inputs = {"x": LISTS} if kind == "lists" else {"text": say("this")}
        return write(folder / "a.jsonl", rows_of(**inputs, label=CLASSES))
    if kind == "ts":
        lines = [f"{','.join(map(str, row))}:{label}" for row, label in zip(LISTS, CLASSES, strict=True)]
        (folder / "a.ts").write_text("\n".join(["@classLabel true a b", "@data", *lines]))
    elif kind == "arrays":
        np.savez(folder / "a.npz", X=np.array(LISTS), y=np.arange(24) % 2)
    elif kind == "files":
        [np.save(folder / label / f"{n}.npy", LISTS[n]) for n, label in enumerate(CLASSES)]
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
        data = datasets.DatasetDict(train=datasets.Dataset.from_dict(rows, features=kinds))
        data["train"].to_parquet(place / "a.parquet") if form == "parquet" else data.save_to_disk(place)
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
    write_pictures(tmp_path, ["night", "day", "other"], 4)
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
    place = write(tmp_path / "a.jsonl", rows_of(**dict(zip(names, (given, labels), strict=True))))
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
    place = write(tmp_path / "a.jsonl", rows_of(text=say("this"), label=labels))
    assert look_at(place).classes == sorted({*labels})


@pytest.mark.parametrize("scale", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("more", [(-1, 0), (0, 0), (1, 0), (1, 3), (2, 2)])
def test_pairs_that_a_survey_takes_are_learned_from(tmp_path, scale, more):
    large = 12 * scale + more[0], 10 * scale + more[1]
    for name, size in (("lq", (12, 10)), ("hq", large)):
        write_pictures(tmp_path, [name], 20, size=size)
    task, fits = SemanIRTask(degradation={"kind": "paired"}), all(0 <= each < scale for each in more) and scale < 5
    with contextlib.nullcontext() if fits else refused(DataError, "2, 3, 4 times"):
        assert look_at(str(tmp_path)).scale == scale
    if scale == 5:
        # No model has it.
        return
    task.config.scale = scale
    example = open_source(DataSource(str(tmp_path)))[0]
    with contextlib.nullcontext() if fits else refused(ValueError, "differs in size"):
        lq, hq = task._images(example, task.trained[0])
        assert hq.shape == (lq.shape[0] * scale, lq.shape[1] * scale, 3)
        assert np.array_equal(hq, np.asarray(example["hq"])[: hq.shape[0], : hq.shape[1]])


def saved_texts(count: int, start: int = 0, split: str | None = None) -> datasets.Dataset:
    rows = {"text": [f"text {start} has words {n}" for n in range(count)], "label": ["a", "b"] * (count // 2)}
    return datasets.Dataset.from_dict(rows, split=split and datasets.NamedSplit(split))


@pytest.mark.parametrize("change", ["map", "filter", "shuffle"])
@pytest.mark.parametrize("form", ["dict", "folders", "alone"])
def test_of_saved_data_the_caches_beside_them_are_no_rows(tmp_path, form, change):
    parts = {"train": saved_texts(40), "test": saved_texts(10, 1)}
    place = tmp_path / "saved"
    if form == "dict":
        datasets.DatasetDict(parts).save_to_disk(place)
    else:
        for name, part in list(parts.items())[: 1 if form == "alone" else 2]:
            part.save_to_disk(place if form == "alone" else place / name)
    for folder in [*place.rglob("state.json")]:
        kept = datasets.load_from_disk(folder.parent)
        work = {"map": lambda row: {"text": row["text"].upper()}, "filter": lambda row: True}
        kept.shuffle(seed=1) if change == "shuffle" else getattr(kept, change)(work[change])
    assert len([*place.rglob("cache-*.arrow")]) == (1 if form == "alone" else 2)
    survey = look_at(str(place))
    assert survey.count == 40 and ("test" in str(survey.left_out)) == (form != "alone")
    assert sorted(open_source(DataSource(str(place)))["text"]) == sorted(parts["train"]["text"])
    if form != "alone":
        assert open_source(DataSource(str(place), split="test[:50%]"))["text"][:] == parts["test"]["text"][:5]
        for split, count in (("train+test", 50), ("train[:50%]+test", 30), ("all", 50)):
            assert len(open_source(DataSource(str(place), split=split))) == count


@pytest.mark.parametrize(
    ("said", "split"),
    [(None, "train"), ("train[:50%]", "train"), ("train+test", "train"), ("train[:5]+train[8:]", "train"),
     ("test[:50%]", "test"), ("clean", "clean"), ("validation", "validation")],
)  # fmt: skip
def test_a_part_that_was_saved_alone_is_of_the_split_it_says(tmp_path, said, split):
    saved_texts(40, split=said).save_to_disk(tmp_path / "saved")
    source = DataSource(str(tmp_path / "saved"), split=split)
    assert len(open_source(source)) == 40
    with refused(DataError, "no split 'test'" if split != "test" else "no split 'validation'", "data.train.split"):
        open_source(DataSource(source.path, split="validation" if split == "test" else "test"))


@pytest.mark.parametrize("split", ["unsupervised", "train_sft"])
def test_a_shard_of_a_split_with_a_name_of_its_own_is_read(tmp_path, split):
    saved_texts(40).to_parquet(place := tmp_path / f"{split}-00000-of-00001.parquet")
    assert len(open_source(DataSource(str(place), split=split))) == 40
