"""Pictures and texts with what is said of them: by a table of any name, by folders, or nothing that can be learned."""

import gc
import json
from pathlib import Path

import numpy as np
import pytest
import soundfile

from hf_ext.data.opening import open_source
from hf_ext.data.source import DataSource
from hf_ext.data.survey import look_at
from hf_ext.errors import DataError
from tests.kit.own_data import write_pictures
from tests.kit.refusals import refused

COUNT = 12


def rows_of(count=COUNT, ending=".png", header="image,label") -> str:
    return "\n".join([header, *(f"{index}{ending},{'ab'[index % 2]}" for index in range(count))])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("labels.csv", rows_of()),
        # As Kaggle has them.
        ("trainLabels.csv", rows_of(ending="", header="id,class")),
        ("about.jsonl", "\n".join(json.dumps({"f": f"{i}.png", "label": "ab"[i % 2]}) for i in range(COUNT))),
        ("labels.tsv", rows_of().replace(",", "\t")),
    ],
)
def test_a_table_names_the_classes_of_pictures(tmp_path, name, text):
    write_pictures(tmp_path, [""], COUNT)
    (tmp_path / name).write_text(text)
    (tmp_path / "unrelated.csv").write_text("day,weather\nmonday,rain\n")
    survey = look_at(str(tmp_path))
    assert survey.kind == "pictures" and survey.classes == ["a", "b"] and survey.count == COUNT


# datasets leaves metadata.csv open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ["labels.csv", "metadata.csv"])
def test_pictures_without_a_row_are_said(tmp_path, name):
    write_pictures(tmp_path, [""], COUNT)
    (tmp_path / name).write_text(rows_of(COUNT - 3, header="file_name,label"))
    survey = look_at(str(tmp_path))
    assert survey.count == COUNT - 3 and any(line.startswith("3 files") for line in survey.left_out)
    gc.collect()


def test_two_tables_of_the_same_pictures_are_refused(tmp_path):
    write_pictures(tmp_path, [""], COUNT)
    for name in ("labels.csv", "more.csv"):
        (tmp_path / name).write_text(rows_of())
    with refused(DataError, "labels.csv", "more.csv"):
        look_at(str(tmp_path))


@pytest.mark.parametrize("split", ["", "train"])
@pytest.mark.parametrize("beside", ["masks", "labels", "Annotations"])
def test_masks_are_no_class(tmp_path, beside, split):
    write_pictures(tmp_path / split / "images", [""], COUNT)
    write_pictures(tmp_path / split / beside, [""], COUNT)
    with refused(DataError, beside.lower()):
        look_at(str(tmp_path))
    assert look_at(str(tmp_path / split / "images")).classes == []


def test_nothing_is_left_out_where_all_is_read(tmp_path):
    write_pictures(tmp_path, [""], COUNT)
    (tmp_path / "labels.csv").write_text(rows_of())
    (tmp_path / "readme.txt").write_text("twelve pictures")
    assert look_at(str(tmp_path)).left_out == []
    plain = tmp_path / "plain"
    write_pictures(plain, [""], COUNT)
    (plain / "._0.png").write_bytes(b"of a Mac")
    assert look_at(str(plain)).left_out == []


def write_texts(folder, count=6, encoding="utf-8"):
    for name in ("neg", "pos"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            (folder / name / f"{index}.txt").write_bytes(f"A café, number {index}.\nVery {name}.\n".encode(encoding))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "cp1252"])
def test_texts_in_folders_of_classes_are_examples(tmp_path, encoding):
    write_texts(tmp_path, encoding=encoding)
    survey = look_at(str(tmp_path))
    assert (survey.kind, survey.count, survey.classes, survey.named) == ("texts", 12, ["neg", "pos"], True)
    data = open_source(DataSource(**{**survey.train, "hold_out": 0.0}))
    assert data[0] == {"text": "A café, number 0.\nVery neg.", "label": 0}
    stream = open_source(DataSource(path=str(tmp_path), streaming=True))
    assert [row["label"] for row in stream] == [0] * 6 + [1] * 6


def test_texts_of_a_split_are_those_of_its_folder(tmp_path):
    write_texts(tmp_path / "train")
    write_texts(tmp_path / "validation", 2)
    survey = look_at(str(tmp_path))
    assert survey.count == 12 and survey.eval == {**survey.train, "split": "validation"}
    assert len(open_source(DataSource(path=str(tmp_path), split="validation[:3]"))) == 3


def test_texts_without_folders_are_lines(tmp_path):
    write_texts(tmp_path / "one")
    (tmp_path / "one" / "readme.txt").write_text("a line\nanother\n")
    assert look_at(str(tmp_path / "one")).classes == []
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("a line\n" * 5)
    assert look_at(str(tmp_path / "books")).count == 5


@pytest.mark.parametrize("labels", [[["a"], ["b"]], [["a", "b"], ["a"]], [{"x": 1}, {"x": 2}]])
def test_labels_that_are_no_class_are_refused(tmp_path, labels):
    lines = [json.dumps({"text": f"a text {index}", "label": labels[index % 2]}) for index in range(COUNT)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    with refused(DataError, "texts.jsonl", "label"):
        look_at(str(tmp_path / "texts.jsonl"))


def test_a_folder_of_sounds_leaves_pathlib_as_it_is(tmp_path, monkeypatch):
    """`datasets` replaces `Path` in the module of each builder, by one that takes `a: b` for an address."""
    monkeypatch.chdir(tmp_path)
    for index, name in enumerate(["hello", "goodbye"]):
        (tmp_path / "sounds" / name).mkdir(parents=True)
        soundfile.write(tmp_path / "sounds" / name / "0.wav", np.full(80, 0.1 * index), 8000)
    assert len(open_source(DataSource(path="sounds"))) == 2
    for name in ("cat", "dog"):
        write_pictures(Path("a: zoo", name), [""], COUNT)
    assert look_at("a: zoo").classes == ["cat", "dog"]
