"""Training and evaluation share no example and no group, whatever the data are: proved by what is in them."""

import contextlib
import json
import shutil
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pytest
import soundfile

from hf_ext.data.opening import SourceError, open_source
from hf_ext.data.roles import Hints, find_roles
from hf_ext.data.source import DataSource
from hf_ext.data.splits import compare_splits, count_shared, hash_inputs, hold_out, read_splits, split_examples
from hf_ext.data.survey import look_at
from hf_ext.data.tables import read_table
from hf_ext.errors import DataError
from hf_ext.settings import SettingsError, build
from hf_ext.training import TrainingArguments
from hf_ext.training.data_check import check_data, describe_check
from tests.kit.own_data import write_files, write_pictures, write_sounds, write_tables
from tests.kit.pictures import encode, noise
from tests.kit.refusals import refused
from tests.training.tiny import TinyTask, evaluated, make_arguments, run

from .odd_data import series_of, texts_of, write_table

RNG = np.random.default_rng(0)


def write_tar(file: Path) -> None:
    write_pictures(file.parent / "held", [""], 24)
    write_files(file.parent / "held", {f"{number}.cls": str(number % 2) for number in range(24)})
    shutil.make_archive(str(file.with_suffix("")), "tar", file.parent / "held")


def write_rows(file: Path) -> None:
    # Sorted by class, with numbers that tell nothing of it.
    rows = datasets.Dataset.from_list([{"text": f"note {n} of {n * n}", "label": int(n > 7)} for n in range(24)])
    getattr(rows, {".jsonl": "to_json", ".csv": "to_csv", ".parquet": "to_parquet"}[file.suffix])(file)


KINDS = {
    **dict.fromkeys(("rows.jsonl", "rows.csv", "rows.parquet"), write_rows),
    "texts.txt": lambda place: place.write_text("".join(f"line {n}\n" for n in range(24))),
    "shard.tar": write_tar,
    "arrays.npz": lambda file: np.savez(file, values=RNG.normal(size=(24, 5, 2)), label=np.arange(24) % 2),
    "classes": lambda place: write_pictures(place, ["cat", "dog"], 12),
    "photos": lambda place: write_pictures(place, [""], 24),
    "sounds": lambda place: write_sounds(place, ["cat", "dog"], 12, 8000, 0.01),
    "series": lambda place: write_tables(place, [f"{name}/{n}" for name in ("calm", "wild") for n in range(12)], 5),
    "pairs": lambda place: write_pictures(place, ["lq", "hq"], 24),
}


def require_apart(values: list, chosen: np.ndarray) -> None:
    """Some examples are held out, and none of their values is on the other side."""
    sides = [{str(value) for value, own in zip(values, chosen, strict=True) if own == side} for side in (True, False)]
    assert chosen.any() and not sides[0] & sides[1]


@pytest.mark.parametrize("kind", KINDS)
def test_what_measures_is_not_trained_on(tmp_path, kind):
    place = tmp_path / kind
    KINDS[kind](place)
    words = {"path": str(place), "hold_out": 0.25, "rows": "positions" if kind == "series" else "examples"}
    whole = open_source(DataSource(**{**words, "hold_out": 0.0}))
    learned, measured = (open_source(DataSource(**words, split=split)) for split in ("train", "validation"))
    keys = [Counter(hash_inputs(data)) for data in (learned, measured, whole)]
    assert not keys[0] & keys[1] and keys[0] + keys[1] == keys[2]
    assert (len(learned), len(measured)) == (18, 6)
    # Again the same ones; of another seed others.
    again = open_source(DataSource(**words, split="validation"))
    assert hash_inputs(again) == hash_inputs(measured)
    other = open_source(DataSource(**words, split="validation", hold_out_seed=1))
    assert hash_inputs(other) != hash_inputs(measured)
    if "label" in whole.column_names:
        shares = Counter(measured["label"][:])
        expected = {0: 2, 1: 4} if kind.startswith("rows") else dict.fromkeys(shares, 3)
        assert shares == expected and len(shares) == 2


def test_a_test_is_for_the_end(tmp_path):
    for split in ("two/train", "two/test", "three/train", "three/test", "three/validation"):
        write_pictures(tmp_path / split, ["cat", "dog"], 12)
    two, three = look_at(str(tmp_path / "two")), look_at(str(tmp_path / "three"))
    assert two.eval["split"] == three.eval["split"] == "validation"
    assert two.eval["hold_out"] and "hold_out" not in three.eval
    test = {*hash_inputs(open_source(DataSource(str(tmp_path / "two"), split="test")))}
    assert not test & {*hash_inputs(open_source(DataSource(**two.eval)))}


def test_folders_of_patients_stay_together(tmp_path):
    # Their classes stand in a table.
    write_pictures(tmp_path, names := [f"patient{n}" for n in range(8)], 3)
    labels = {f"{name}/{number}.png": "ill" if name < "patient4" else "well" for name in names for number in range(3)}
    rows = [json.dumps({"file_name": name, "label": label}) for name, label in labels.items()]
    write_files(tmp_path, {"metadata.jsonl": "\n".join(rows)})
    data = [open_source(DataSource(str(tmp_path), hold_out=0.25, split=split)) for split in ("train", "validation")]
    raw = [part.cast_column("image", datasets.Image(decode=False)) for part in data]
    learned, measured = ({Path(row["path"]).parent.name for row in part["image"]} for part in raw)
    assert len(learned) == 6 and len(measured) == 2 and not learned & measured


def with_pictures(seeds: list[int], paths: list, labels: list) -> datasets.Dataset:
    """Rows of pictures, which are alike where their seeds are."""
    named = zip(seeds, paths, strict=True)
    held = [{"bytes": encode(noise(6, 7, 3, seed=seed)), "path": path} for seed, path in named]
    return datasets.Dataset.from_dict({"image": held, "label": labels}).cast_column("image", datasets.Image())


@pytest.mark.parametrize("named", [False, True])
def test_equal_pictures_stay_together(named):
    paths = [f"{n}.png" if named else None for n in range(30)]
    data = with_pictures([n // 2 for n in range(30)], paths, [n // 2 % 2 for n in range(30)])
    require_apart([n // 2 for n in range(30)], split_examples(data, 0.2, 0)[0])
    # Of given parts, each copy is counted.
    assert count_shared(data.select(range(0, 30, 2)), data.select(range(1, 30, 2))) == 15


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("patient{g:02}_slice{i:02}", True), ("IMG_202401{g:02}_10{i:02}15", True), ("{g:08x}_nohash_{i}", True),
        ("2024-01-{g:02}_10-0{i}-00", True), ("call{g}_{i}.0s-{i}.9s", True), ("cat_{g:03}_{i}", True),
        ("{g:03}_jpg.rf.{i}abc12de", True), ("cat_{g}{i}", False), ("DSC{g:03}{i}", False), ("{g}{i}-a", False),
    ],
)  # fmt: skip
def test_files_whose_names_begin_alike_stay_together(name, kept):
    paths = [f"{name.format(g=n // 4, i=n % 4)}.png" for n in range(96)]
    chosen, told = split_examples(with_pictures([*range(96)], paths, ["a"] * 48 + ["b"] * 48), 0.1, 0)
    assert any(paths[0] in line for line in told) == kept
    if kept:
        require_apart([n // 4 for n in range(96)], chosen)


def test_given_parts_that_share_examples_or_persons_are_told():
    rows = {"text": [f"message {n * 7919} of today" for n in range(40)], "speaker": [n // 4 for n in range(40)]}
    data = datasets.Dataset.from_dict({**rows, "label": ["a", "b"] * 20})
    learned = data.select(range(30))
    assert compare_splits(learned, data.select(range(32, 40))) == []
    told = compare_splits(learned, data.select(range(28, 40)))
    assert len(told) == 2 and "2 of 12" in told[0] and "speaker" in told[1] and "4 of 12" in told[1]


@pytest.mark.parametrize(
    ("groups", "classes", "largest"), [(12, 6, 40), (40, 6, 30), (5, 3, 45), (12, 2, 30), (100, 4, 25), (20, 60, 45)]
)
def test_of_groups_of_several_classes_a_fair_share_measures_in_whatever_order_they_are(groups, classes, largest):
    draws = np.random.default_rng(groups)
    rows = {"user": draws.integers(0, groups, 200), "label": [f"c{n}" for n in draws.integers(0, classes, 200)]}
    data = datasets.Dataset.from_dict({"text": [f"message {n * 7919} of today" for n in range(200)], **rows})
    found = []
    for order in (range(200), np.argsort(data["label"]), np.argsort(data["user"])):
        sides = [hold_out(data.select(order), 0.1, 0, measures=side) for side in (True, False)]
        assert not {*sides[0]["user"]} & {*sides[1]["user"]} and 10 <= len(sides[0]) <= largest
        if classes < 10:
            assert {*sides[1]["label"]} == {*data["label"]} == {*sides[0]["label"]}
        found.append({*sides[0]["text"]})
    assert found[0] == found[1] == found[2]


COPIES = [("", "_flip", "_rot90"), ("", "_crop1"), ("", "-noise", " (pitch)"), ("", ".2", ".3", ".4")]


@pytest.mark.parametrize("name", ["cat{}", "IMG_{:04}", "scan-{}-left", "holiday{}"])
@pytest.mark.parametrize("copies", COPIES)
def test_an_original_and_its_copies_stay_together(name, copies):
    paths = [f"{name.format(n)}{copy}.png" for n in range(24) for copy in copies]
    groups = [n for n in range(24) for _ in copies]
    data = with_pictures([*range(len(paths))], paths, ["a" if n < 12 else "b" for n in groups])
    chosen, told = split_examples(data, 0.1, 0)
    assert f"files such as {paths[0]} and {paths[1]} stay together" in told
    require_apart(groups, chosen)


@pytest.mark.parametrize("names", [["dawn", "dusk", "noon"], ["sea", "hill", "wood_a", "wood_b"]])
def test_words_that_begin_few_names_alike_are_no_copies(names):
    paths = [f"{name}{n}.png" for n in range(24) for name in names]
    assert split_examples(with_pictures([*range(len(paths))], paths, ["a", "b"] * (len(paths) // 2)), 0.1, 0)[1] == []


def test_a_copy_in_one_folder_joins_no_pictures_of_two():
    paths = [f"{name}/{n:03}.png" for n in range(24) for name in ("cat", "dog")] + ["cat/001 (1).png"]
    data = with_pictures([*range(len(paths))], paths, [path[:3] for path in paths])
    assert split_examples(data, 0.1, 0)[1] == []


def test_many_small_classes_give_a_share_and_few_give_one_each():
    for classes, held in ((200, 20), (30, 30)):
        count = range(2 * classes)
        rows = {"text": [f"message {n * 7919} of today" for n in count], "label": [f"c{n % classes}" for n in count]}
        data = datasets.Dataset.from_dict(rows)
        chosen, _ = split_examples(data, 0.05, 0)
        assert chosen.sum() == held
        assert {*data.select(np.flatnonzero(~chosen))["label"]} == {*data["label"]}


@pytest.mark.parametrize(
    ("words", "counts"),
    [(["train", "TEST"], [36, 4]), (["train", "train", "val", "test"], [40, 20]), (["train-1", " dev"], [40, 40])],
)
def test_a_column_of_splits_decides_and_its_tests_choose_nothing(tmp_path, words, counts):
    rows = [{"text": f"words {n}", "split": words[n % len(words)], "label": "abba"[n // 4 % 4]} for n in range(80)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    survey, has_test = look_at(str(tmp_path / "a.jsonl")), words[-1].lower() == "test"
    parts = [open_source(DataSource(**source)) for source in (survey.train, survey.eval)]
    assert [*map(len, parts)] == [survey.learned, survey.count - survey.learned] == counts
    assert has_test == ("hf-ext evaluate` with --data.eval.split test;" in f"{survey.lines[-1]};")
    with contextlib.nullcontext() if has_test else pytest.raises(SourceError):
        assert {cell.lower() for cell in open_source(DataSource(**survey.eval | {"split": "test"}))["split"]} == {
            "test"
        }
    assert not {"test", "TEST"} & {*parts[0]["split"], *parts[1]["split"]}


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        (["train"] * 9 + ["test"] * 9 + [None], "row 19, holds nothing"),
        (["train"] * 9 + ["test"] * 9 + ["unlabeled"], "unlabeled"),
        ([None] * 9 + ["test"], "row 1, holds nothing"),
        (["val"] * 9 + ["test"] * 9, "no train"),
        ([["train", "test"], ["test", "test"]], "train.csv"),
        ([["train", "test"]], "train.csv"),
        ([["test"] * 3, ["train"] * 3, []], "row 3"),
    ],
)
def test_a_column_of_splits_that_is_not_clear_is_refused(cells, told):
    rows = {"text": [f"words {n}" for n, _ in enumerate(cells)], "split": cells}
    with refused(DataError, "'split'", told):
        split_examples(datasets.Dataset.from_dict(rows), 0.1, 0)


OTHERS = [[{"a": "train"}, {"a": "test"}], [[["train"]], [["test"]]], ["train/bus", "fox"], ["train", None]]
ONE = [["train"] * 20, ["a", "b"] * 10, [0, 1] * 10, [["test"]] * 20]


@pytest.mark.parametrize(
    ("name", "cells"),
    [(name, cells) for name in ("subset", "set") for cells in (*OTHERS, ["val", "test"])]
    + [("split", cells) for cells in ONE],
)
def test_a_column_of_other_things_or_of_one_split_decides_nothing(name, cells):
    assert read_splits(datasets.Dataset.from_dict({name: cells})) is None


@pytest.mark.parametrize(
    ("cells", "tests"),
    [
        (["train"] * 20 + ["test"] * 4, 4),
        (["Training"] * 18 + ["VAL"] * 2 + ["Testing"] * 4, 4),
        # Classes, and words of which none is train.
        (["car", "bus", "train"] * 8, 0),
        (["train"] * 24, 0),
        (["test", "dev"] * 12, 0),
    ],
)
@pytest.mark.parametrize("name", ["dataset", "phase", "type", "fold", "Usage"])
@pytest.mark.parametrize("make", [texts_of, series_of])
def test_a_column_of_words_for_splits_alone_is_one_whatever_its_name(tmp_path, make, name, cells, tests):
    survey = look_at(write_table(tmp_path / "a.csv", {**make("x", "ab"), name: cells}), Hints(label="label"))
    assert survey.count == 24 - tests and ("split test" in "; ".join(survey.left_out)) == bool(tests)
    if tests:
        assert len(open_source(DataSource(**{**survey.eval, "split": "test"}))) == tests
        with refused(DataError, name, "row 24", "leave out"):
            look_at(write_table(tmp_path / "a.csv", {**make("x", "ab"), name: [*cells[:-1], None]}))


@pytest.mark.parametrize("split", ["test", "validation", "test[:50%]"])
@pytest.mark.parametrize("kind", ["rows.jsonl", "texts.txt", "arrays.npz", "pairs"])
def test_a_split_that_is_none_is_refused(tmp_path, kind, split):
    place = tmp_path / kind
    KINDS[kind](place)
    with pytest.raises(SourceError):
        open_source(DataSource(str(place), split=split))


def test_files_that_are_called_as_a_split_are_that(tmp_path):
    for name in ("test.jsonl", "test-00001.jsonl", "test/a.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_rows(tmp_path / name)
        assert len(open_source(DataSource(str(tmp_path / name), split="test"))) == 24
    write_rows(tmp_path / "latest.jsonl")
    with pytest.raises(SourceError):
        open_source(DataSource(str(tmp_path / "latest.jsonl"), split="test"))


def test_what_cannot_be_split_is_refused(tmp_path):
    (tmp_path / "one.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "same.jsonl").write_text('{"text": "a"}\n' * 9)
    for name in ("one", "same"):
        with pytest.raises(SourceError):
            open_source(DataSource(str(tmp_path / f"{name}.jsonl"), hold_out=0.1))
        assert look_at(str(tmp_path / f"{name}.jsonl")).eval is None
    for words in ({"hold_out": 1.0}, {"hold_out": 0.1, "split": "test[:5]"}, {"hold_out": 0.1, "streaming": True}):
        with pytest.raises(SettingsError):
            build(DataSource, {"path": "x", **words})


def test_scores_of_what_is_trained_on_are_said(tmp_path, images, capsys):
    data = evaluated(images)
    run(TinyTask(), make_arguments(tmp_path / "run", data))
    assert "data.eval reads examples of data.train" in capsys.readouterr().err
    arguments = TrainingArguments("tiny", "run", {**data, "eval": {"path": str(images), "split": "train[:1]"}})
    found = check_data(TinyTask(), arguments)
    assert [row["shared"] for row in found] == [0, 1]
    assert all(told in describe_check(found[1]) for told in ("1 example of", "1 is a training example too"))


SENTENCES = [f"sentence number {number} with some words" for number in range(40)] * 4
BESIDE = [
    {},
    {"Unnamed: 0": list(range(160))},
    {"when": [f"2024-01-{number % 28 + 1:02d} 00:{number // 60:02d}:{number % 60:02d}" for number in range(160)]},
    {"comment": [f"remark {number} by somebody" for number in range(160)]},
    {"prompt": ["Tell the mood of this sentence, in a word, please."] * 160},
    {"about": [{"row": number} for number in range(160)]},
    {"stars": [number % 7 for number in range(160)], "source": ["web", "app", "mail", "shop", "call"] * 32},
]
PARCELS = [f'The "parcel" {n} wasn\'t late.' for n in range(60)]
WRITINGS = [
    str.upper, lambda text: f"{text} ", lambda text: text.replace(" ", "\u00a0 "), lambda text: text.rstrip("."),
    lambda text: text.replace("'", "’"), lambda text: text.replace('"', "&quot;"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("same", "rows"),
    [(SENTENCES, {"text": SENTENCES, **extra}) for extra in BESIDE]
    + [(PARCELS * 2, {"text": [*PARCELS, *map(change, PARCELS)], "id": [*range(120)]}) for change in WRITINGS],
)
def test_equal_texts_are_on_one_side_however_they_are_written_and_whatever_stands_beside_them(same, rows):
    data = datasets.Dataset.from_dict({**rows, "label": ["good", "bad"] * (len(same) // 2)})
    require_apart(same, split_examples(data, 0.1, 0)[0])


@pytest.mark.parametrize("label", [None, "rare"])
def test_a_missing_label_and_a_class_of_one_speaker_measure_nothing(label):
    labels = ["a" if number // 10 % 2 else "b" for number in range(100)]
    labels[7] = label
    rows = {"text": [f"words of example {n}" for n in range(100)], "speaker": [f"s{n % 10}" for n in range(100)]}
    data = datasets.Dataset.from_dict({**rows, "label": labels})
    held, kept = (hold_out(data, 0.1, 0, measures=measures) for measures in (True, False))
    assert not {*held["speaker"]} & {*kept["speaker"]}
    assert None not in held["label"] and "rare" not in held["label"]


@pytest.mark.parametrize("layout", ["wide", "panel"])
@pytest.mark.parametrize("number", [False, True])
def test_groups_of_series_are_kept(tmp_path, layout, number):
    frame = pd.DataFrame(RNG.normal(size=(80, 12)), columns=[f"t{index}" for index in range(12)])
    frame.insert(0, "speaker", [row // 8 if number else f"s{row // 8}" for row in range(80)])
    frame["label"] = ["a", "b"] * 40
    source = DataSource(path=str(tmp_path / "w.csv"), rows="series")
    if layout == "panel":
        rows = [(row, frame["speaker"][row], step, frame[f"t{step}"][row], frame["label"][row])
                for row in range(80) for step in range(12)]  # fmt: skip
        frame = pd.DataFrame(rows, columns=["recording", "speaker", "time", "v", "label"])
        source = DataSource(path=str(tmp_path / "w.csv"), rows="positions", series="recording", time="time")
    frame.to_csv(tmp_path / "w.csv", index=False)
    data = open_source(source)
    held, kept = (hold_out(data, 0.1, 0, measures=measures) for measures in (True, False))
    assert len(held) and not {*map(str, held["speaker"])} & {*map(str, kept["speaker"])}


@pytest.mark.parametrize(
    ("column", "values"),
    [("label_id", np.arange(300) % 3), ("scaled", (np.arange(300) % 3) - 0.5), ("patient_id", np.arange(300) // 30)],
)
def test_numbers_that_name_the_class_or_a_group_are_no_inputs(tmp_path, column, values):
    rows = {"time": range(300), "x": np.random.default_rng(0).normal(size=300), column: values}
    pd.DataFrame({**rows, "label": np.tile(["walk", "sit", "run"], 100)}).to_csv(tmp_path / "t.csv", index=False)
    roles = find_roles(read_table(tmp_path / "t.csv"), Hints())
    assert roles.inputs == ["x"]
    assert column in roles.left_out or column == roles.series


def test_broken_sounds_are_not_held_out(tmp_path):
    write_sounds(tmp_path, ["a", "b"], 8, 8000, 0.25)
    for name in "ab":
        for index in range(30, 52):
            (tmp_path / name / f"{index}.wav").write_bytes(b"RIFFbroken" + bytes([index]))
            # One without samples.
            soundfile.write(tmp_path / name / f"{index + 30}.wav", np.zeros(0), 8000 + index)
    held = hold_out(open_source(DataSource(path=str(tmp_path))), 0.1, 0, measures=True)
    names = [Path(row["path"]).stem for row in held.with_format("arrow")["audio"].to_pylist()]
    assert names and all(int(name) < 30 for name in names)


def test_a_set_of_many_columns_of_texts_is_looked_up_once_a_column_at_most(monkeypatch):
    looks, whole = [], datasets.Dataset.with_format
    monkeypatch.setattr(datasets.Dataset, "with_format", lambda *words, **options: looks.append(1) or whole(*words))
    found = []
    for count in (20, 40):
        rows = [f"a text of {row} words" for row in range(4)]
        looks.clear()
        split_examples(datasets.Dataset.from_dict({f"c{column}": rows for column in range(count)}), 0.3, 0)
        found.append(len(looks))
    # A look at one column copies what is known of all: several for each took most of the time.
    assert 0 < found[1] - found[0] <= 20
