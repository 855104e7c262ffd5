"""Files with what is said of them: by a table of any name, by folders or texts beside them, or nothing."""

import gc
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import soundfile

from hf_ext.data.opening import open_source
from hf_ext.data.source import DataSource
from hf_ext.data.survey import look_at
from hf_ext.errors import DataError
from tests.kit.own_data import write_pictures
from tests.kit.refusals import refused

NAMES = [f"walk{index}" for index in range(12)]
CLASSES = {name: "ab"[index % 2] for index, name in enumerate(NAMES)}


@pytest.fixture
def walks(tmp_path):
    """A folder of twelve series; the first number of each is its number."""
    folder = tmp_path / "walks"
    folder.mkdir()
    for index, name in enumerate(NAMES):
        pd.DataFrame({"x": [float(index), *np.arange(5.0)], "y": np.ones(6)}).to_csv(
            folder / f"{name}.csv", index=False
        )
    return folder


def as_table(names, header=("file_name", "label"), separator=",", ending=".csv") -> str:
    lines = [separator.join(header), *(f"{name}{ending}{separator}{CLASSES[name]}" for name in names)]
    return "\n".join(lines)


def as_lines(names) -> str:
    return "\n".join(json.dumps({"file_name": f"{name}.csv", "label": CLASSES[name]}) for name in names)


TABLES = {
    "metadata.csv": as_table(NAMES),
    "metadata.jsonl": as_lines(NAMES),
    "a_first_in_the_alphabet.csv": as_table(NAMES, ("recording", "category"), ";"),
    "reference.tsv": as_table(NAMES, ("id", "target"), "\t", ""),
    "in_other_order.csv": as_table(NAMES[::-1], ("name", "label")),
    "utf16.csv": as_table(NAMES).encode("utf-16"),
    "windows.csv": ("\ufeff" + as_table(NAMES).replace("\n", "\r\n")).encode(),
    "windows_paths.csv": as_table(NAMES).replace("walk", ".\\walk"),
    "elsewhere.csv": as_table(NAMES).replace("walk", "/mnt/disk/walks/walk"),
    "with_values.csv": "\n".join(["file,age,label", *(f"{name}.csv,{7.5},{CLASSES[name]}" for name in NAMES)]),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_that_names_the_files_tells_their_classes(walks, name):
    held = TABLES[name]
    (walks / name).write_bytes(held if isinstance(held, bytes) else held.encode())
    survey = look_at(str(walks))
    assert survey.classes == ["a", "b"] and survey.columns == ["x", "y"] and survey.count == 12
    data = open_source(DataSource(**{**survey.train, "hold_out": 0.0}))
    assert {f"walk{row['x'][0]:.0f}": str(row["label"]) for row in data} == CLASSES


@pytest.mark.parametrize(
    ("name", "text", "fact"),
    [
        ("labels.csv", as_table(NAMES) + "\nwalk99.csv,a", "walk99.csv"),
        ("labels.csv", as_table(NAMES) + "\nWALK3.CSV,a", "walk3.csv"),
        ("labels.csv", "file_name,class,target\nwalk0.csv,a,b\nwalk1.csv,b,b", "--label"),
        ("labels.csv", "file_name,label,first_row\nwalk0.csv,a,1\nwalk1.csv,b,1", "first_row"),
        ("metadata.csv", "file_name,label\nother1,a\nother2,b", "metadata.csv"),
        ("cut.jsonl", as_lines(NAMES) + '\n{"file_name": "wal', "cut.jsonl"),
        ("lists.jsonl", as_lines(NAMES).replace('"a"', '["a"]'), "lists.jsonl"),
    ],
)
def test_tables_that_do_not_fit_are_refused(walks, name, text, fact):
    (walks / name).write_text(text)
    with refused(DataError, name, fact):
        look_at(str(walks))


def test_a_name_of_several_files_is_no_name(tmp_path):
    for folder in ("one", "two"):
        for index in range(4):
            place = tmp_path / "data" / folder / f"r{index}.csv"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text("x,y\n1,2\n3,4\n")
    table = tmp_path / "data" / "labels.csv"
    table.write_text("name,label\n" + "".join(f"r{index}.csv,{'ab'[index % 2]}\n" for index in range(4)))
    with refused(DataError, "labels.csv", "r0.csv"):
        look_at(str(tmp_path / "data"))
    lines = [f"{folder}/r{index}.csv,{'ab'[index % 2]}" for folder in ("one", "two") for index in range(4)]
    # A file beside the table is meant by its name.
    (tmp_path / "data" / "r0.csv").write_text("x,y\n1,2\n3,4\n")
    table.write_text("\n".join(["name,label", *lines, "r0.csv,a"]))
    assert look_at(str(tmp_path / "data")).count == 9


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


def test_two_tables_of_the_same_files_are_refused(tmp_path, walks):
    write_pictures(tmp_path / "pictures", [""], COUNT)
    for folder, text in ((tmp_path / "pictures", rows_of()), (walks, as_table(NAMES))):
        for name in ("labels.csv", "more.csv"):
            (folder / name).write_text(text)
        with refused(DataError, "labels.csv", "more.csv"):
            look_at(str(folder))


@pytest.mark.parametrize("split", ["", "train"])
@pytest.mark.parametrize("beside", ["masks", "labels", "Annotations"])
def test_masks_are_no_class(tmp_path, beside, split):
    write_pictures(tmp_path / split / "images", [""], COUNT)
    write_pictures(tmp_path / split / beside, [""], COUNT)
    with refused(DataError, beside.lower()):
        look_at(str(tmp_path))
    assert look_at(str(tmp_path / split / "images")).classes == []


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
