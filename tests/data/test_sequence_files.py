"""Sequences in files: what is read of folders, tables and arrays, and what is said of those that cannot be."""

import os

import numpy as np
import pandas as pd
import pytest

from hf_ext.data.opening import SourceError, open_source
from hf_ext.data.survey import look_at
from hf_ext.errors import DataError
from hf_ext.settings import SettingsError
from hf_ext.tasks.series import PositionsTask, SeriesClassificationTask
from hf_ext.training import DataSource
from hf_ext.training.arguments import build
from tests.kit.own_data import write_files
from tests.kit.refusals import refused


def read(place, split: str = "train", **options):
    return open_source(DataSource(str(place), split=split, rows="positions", **options), "data.train")


@pytest.fixture
def walks(tmp_path):
    """Four files of two channels in folders of two classes, of two splits."""
    for name in ("train/{}/0", "train/{}/1", "test/{}/0"):
        for kind, start in (("walk", 0), ("run", 10)):
            lines = [f"{start + place},{place / 2}\n" for place in range(3 + int(name[-1]))]
            write_files(tmp_path / "walks", {f"{name.format(kind)}.csv": "x,y\n" + "".join(lines)})
    return tmp_path / "walks"


def test_each_file_of_a_folder_is_an_example_named_by_its_folder(walks):
    data = read(walks)
    assert list(data["label"]) == ["run", "run", "walk", "walk"] and data.split == "train"
    assert [row["x"].tolist() for row in data][1:3] == [[10, 11, 12, 13], [0, 1, 2]]
    assert data[1]["file"]["path"].endswith("1.csv")
    assert list(read(walks, "test")["label"]) == ["run", "walk"]
    assert list(read(walks, "train[:50%]")["label"]) == ["run", "run"]
    # No other names of classes than those of the task, in whatever order the folders are.
    task = SeriesClassificationTask(columns=["x", "y"], max_length=8, num_labels=2, label_names=["walk", "run"])
    assert [int(task.encode(row)["labels"]) for row in data] == [1, 1, 0, 0]


def test_a_table_says_what_is_known_of_each_file(tmp_path):
    files = dict.fromkeys(("b/2.tsv", "a.tsv"), "x\ty\n1\t2\n3\t4\n")
    files["metadata.csv"] = "file_name,rate,kind\na.tsv,61.5,one\nb/2.tsv,70,two\n"
    data = read(write_files(tmp_path / "data", files))
    assert list(data["rate"]) == [61.5, 70.0] and list(data["kind"]) == ["one", "two"]
    assert "label" not in data.column_names


def test_columns_of_a_file_may_be_classes_and_times(tmp_path):
    text = "time,x,label\n2024-01-01 10:00,1,\n2024-01-01 10:01,2,beat\n"
    row = read(write_files(tmp_path / "data", {"one/1.csv": text}))[0]
    # The folder is no class then.
    assert list(row["label"]) == ["", "beat"]
    assert np.diff(row["time"]).tolist() == pytest.approx([60], abs=128)
    task = PositionsTask(columns=["x"], max_length=3, num_labels=2, label_names=["rest", "beat"])
    assert task.encode(row)["labels"].tolist() == [-100, 1, -100]


def test_other_splits_and_folders_of_a_pattern_are_not_taken(tmp_path):
    names = "data/a.csv", "data/test/b.csv", "data/validation/c.csv", "sets/patient1/a.csv", "sets/patient2/b.csv"
    write_files(tmp_path, dict.fromkeys(names, "x\n1\n2\n"))
    with refused(SourceError, "test", "train"):
        read(tmp_path / "data")
    assert len(read(tmp_path / "data", "test")) == 1
    write_files(tmp_path, {"data/train/a.csv": "x\n1\n2\n"})
    (tmp_path / "data" / "validation").rename(tmp_path / "data" / "val")
    assert len(read(tmp_path / "data", "validation")) == len(read(tmp_path / "data", "val")) == 1
    with refused(SourceError, "patient1"):
        read(tmp_path / "sets" / "patient*")
    assert len(read(tmp_path / "sets" / "patient*" / "*.csv")) == 2


def test_a_part_of_a_long_table_keeps_its_lines(tmp_path):
    pd.DataFrame({"x": np.arange(10.0)}).to_parquet(tmp_path / "long.parquet")
    assert read(tmp_path / "long.parquet", "train[:80%]")[0]["x"].tolist() == list(range(8))
    assert read(tmp_path / "long.parquet", "train[80%:]")[0]["x"].tolist() == [8, 9]
    folder = write_files(tmp_path / "folder", {"long.csv": "x,y\n" + "1,2\n" * 8 + "inf,2\n1,2\n"})
    # In a folder alone, too.
    assert len(read(folder, "train[80%:]")[0]["x"]) == 2
    with refused(DataError, "long.csv", "line 10"):
        SeriesClassificationTask(columns=["x"]).encode(read(folder / "long.csv", "train[50%:]")[0] | {"label": 0})


def test_arrays_are_examples_or_sequences(tmp_path):
    values = np.random.default_rng(0).normal(size=(6, 5, 2)).astype(np.float32)
    np.savez(tmp_path / "all.npz", values=values, label=np.arange(6) % 2, kind=np.array(["a", "b"] * 3))
    data = open_source(DataSource(str(tmp_path / "all.npz"), split="train[2:]"))
    assert len(data) == 4 and data["label"][0] == 0 and data["kind"][0] == "a"
    task = SeriesClassificationTask(num_channels=2, max_length=5, num_labels=2)
    np.testing.assert_array_equal(task.encode(data[1])["input_values"], values[3])
    np.save(tmp_path / "all.npy", values)
    assert len(open_source(DataSource(str(tmp_path / "all.npy")))) == 6
    for index in range(2):
        (tmp_path / "each" / "ab"[index]).mkdir(parents=True)
        np.save(tmp_path / "each" / "ab"[index] / "x.npy", values[index, : 3 + index])
    each = read(tmp_path / "each")
    np.testing.assert_array_equal(task.encode(each[1] | {"label": 1})["input_values"][:4], values[1, :4])
    assert list(each["label"]) == ["a", "b"]


def test_a_changed_file_is_read_again(walks):
    before = read(walks)[0]["x"].tolist()
    os.utime(write_files(walks, {"train/run/0.csv": "x,y\n7,1\n"}) / "train/run/0.csv", ns=(1, 1))
    assert before != [7.0] and read(walks)[0]["x"].tolist() == [7.0]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("train/run/1.csv", "x,y\n1,2\n3,oops\n", r"1\.csv, line 3: column 'y' holds 'oops', and .*numbers"),
        ("train/run/1.csv", "x,z\n1,2\n", r"1\.csv has the columns x, z; .*0\.csv has x, y"),
        ("train/run/1.csv", "", r"1\.csv cannot be read: No columns"),
        ("train/run/1.csv", "x,y\n1,2,3\n4,5,6\n", r"1\.csv cannot be read: .*more cells than the line of names"),
        ("train/run/1.npz", "PK\3\4 no archive", r"1\.npz cannot be read: "),
        ("train/run/1.npy", "no array", r"1\.npy cannot be read: "),
        ("train/labels.csv", "f,x\nrun/0.csv,1\nrun/1.csv,1\nwalk/0.csv,2\nwalk/1.csv,2\n", "a column 'x', the name"),
    ],
)
def test_files_that_cannot_be_used_are_named_with_their_line(walks, name, text, words):
    with pytest.raises(ValueError, match=words):
        read(write_files(walks, {name: text}))


def test_endings_may_be_capitals(tmp_path):
    files = {f"{'ab'[number % 2]}/{number}.CSV": f"x,y\n{number},2\n3,4\n" for number in range(6)}
    assert look_at(str(write_files(tmp_path, files))).classes == ["a", "b"]


def test_places_without_sequences_are_named(tmp_path, walks):
    (tmp_path / "empty").mkdir()
    words = write_files(tmp_path, {"words.txt": "a"}) / "words.txt"
    for place, split, *facts in (
        (tmp_path / "empty", "train", "sequence", "empty"),
        *((walks, split, split) for split in ("validation", "train[:0]")),
        (words, "train", "sequence", "csv"),
    ):
        with refused(SourceError, *facts):
            read(place, split)
    with refused(SettingsError, "lines", "examples", "positions", "series"):
        build(DataSource, {"path": "x", "rows": "lines"})
    with refused(SettingsError, "positions", "streaming"):
        build(DataSource, {"path": "x", "rows": "positions", "streaming": True})
