"""Files with what is said of them: by a table of any name, by folders or texts beside them, or nothing."""

import gc
import json

import pytest

from hf_ext.data import about
from hf_ext.data.opening import open_source
from hf_ext.data.source import DataSource
from hf_ext.data.survey import look_at
from hf_ext.errors import DataError
from tests.kit.own_data import write_files, write_pictures, write_sounds
from tests.kit.refusals import refused

NAMES = [f"walk{index}" for index in range(12)]
# Pictures are called 0.png to 11.png.
NUMBERS = [f"{index}" for index in range(12)]
CLASSES = {name: "ab"[index % 2] for names in (NAMES, NUMBERS) for index, name in enumerate(names)}


@pytest.fixture
def walks(tmp_path):
    """A folder of twelve series; the first number of each is its number."""
    steps = "".join(f"{step}.0,1.0\n" for step in range(5))
    files = {f"{name}.csv": f"x,y\n{index}.0,1.0\n{steps}" for index, name in enumerate(NAMES)}
    return write_files(tmp_path / "walks", files)


def as_table(names=NAMES, header="file_name,label", ending=".csv") -> str:
    return "\n".join([header, *(f"{name}{ending},{CLASSES[name]}" for name in names)])


def of_pictures(header="image,label", ending=".png", count=12) -> str:
    return as_table(NUMBERS[:count], header, ending)


def as_lines(names=NAMES, key="file_name", ending=".csv") -> str:
    return "\n".join(json.dumps({key: f"{name}{ending}", "label": CLASSES[name]}) for name in names)


TABLES = {
    "metadata.csv": as_table(),
    "metadata.jsonl": as_lines(),
    "a_first_in_the_alphabet.csv": as_table(header="recording,category").replace(",", ";"),
    "reference.tsv": as_table(header="id,target", ending="").replace(",", "\t"),
    "in_other_order.csv": as_table(NAMES[::-1], "name,label"),
    "utf16.csv": as_table().encode("utf-16"),
    "windows.csv": ("\ufeff" + as_table().replace("\n", "\r\n")).encode(),
    "windows_paths.csv": as_table().replace("walk", ".\\walk"),
    "elsewhere.csv": as_table().replace("walk", "/mnt/disk/walks/walk"),
    "with_values.csv": "\n".join(["file,age,label", *(f"{name}.csv,{7.5},{CLASSES[name]}" for name in NAMES)]),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_that_names_the_files_tells_their_classes(walks, name):
    survey = look_at(str(write_files(walks, {name: TABLES[name]})))
    assert survey.classes == ["a", "b"] and survey.columns == ["x", "y"] and survey.count == 12
    data = open_source(DataSource(**{**survey.train, "hold_out": 0.0}))
    assert {f"walk{row['x'][0]:.0f}": str(row["label"]) for row in data} == {name: CLASSES[name] for name in NAMES}


@pytest.mark.parametrize(
    ("name", "text", "fact"),
    [
        ("labels.csv", as_table() + "\nwalk99.csv,a", "walk99.csv"),
        ("labels.csv", as_table() + "\nWALK3.CSV,a", "walk3.csv"),
        ("labels.csv", "file_name,class,target\nwalk0.csv,a,b\nwalk1.csv,b,b", "--label"),
        ("labels.csv", "file_name,label,first_row\nwalk0.csv,a,1\nwalk1.csv,b,1", "first_row"),
        ("labels.csv", as_table() + "\nwalk0.csv,a", "walk0.csv"),
        ("metadata.csv", "file_name,label\nother1,a\nother2,b", "metadata.csv"),
        ("cut.jsonl", as_lines() + '\n{"file_name": "wal', "cut.jsonl"),
        ("lists.jsonl", as_lines().replace('"a"', '["a"]'), "lists.jsonl"),
    ],
)
def test_tables_that_do_not_fit_are_refused(walks, name, text, fact):
    with refused(DataError, name, fact):
        look_at(str(write_files(walks, {name: text})))


def test_a_name_of_several_files_is_no_name(tmp_path):
    names = [f"{folder}/r{index}.csv" for folder in ("one", "two") for index in range(4)]
    write_files(tmp_path / "data", dict.fromkeys(names, "x,y\n1,2\n3,4\n"))
    rows = [f"{name},{'ab'[index % 2]}" for index, name in enumerate(names)]
    table = "\n".join(["name,label", *(row.partition("/")[2] for row in rows[:4])])
    with refused(DataError, "labels.csv", "r0.csv"):
        look_at(str(write_files(tmp_path / "data", {"labels.csv": table})))
    # A file beside the table is meant by its name.
    files = {"r0.csv": "x,y\n1,2\n3,4\n", "labels.csv": "\n".join(["name,label", *rows, "r0.csv,a"])}
    assert look_at(str(write_files(tmp_path / "data", files))).count == 9


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("labels.csv", of_pictures()),
        # As Kaggle has them.
        ("trainLabels.csv", of_pictures("id,class", "")),
        ("about.jsonl", as_lines(NUMBERS, "f", ".png")),
        ("labels.tsv", of_pictures().replace(",", "\t")),
        # As programs of other countries write what `datasets` reads in one dialect alone.
        ("metadata.csv", of_pictures("file_name,label").replace(",", ";")),
        ("metadata.csv", of_pictures("Datei,label").encode("utf-16")),
        ("metadata.csv", of_pictures("file_name,art,label").replace(".png,", ".png,Bär,").encode("cp1252")),
    ],
)
def test_a_table_names_the_classes_of_pictures(tmp_path, name, text):
    write_pictures(tmp_path, [""], 12)
    survey = look_at(str(write_files(tmp_path, {name: text, "unrelated.csv": "day,weather\nmonday,rain\n"})))
    assert survey.kind == "pictures" and survey.classes == ["a", "b"] and survey.count == 12


def in_pairs(line: str) -> str:
    return "\n".join(line.format(2 * row, 2 * row + 1) for row in range(6))


# datasets leaves metadata.csv open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ["labels.csv", "metadata.csv"])
def test_pictures_without_a_row_are_said(tmp_path, name):
    write_pictures(tmp_path, [""], 12)
    survey = look_at(str(write_files(tmp_path, {name: of_pictures("file_name,label", count=9)})))
    assert survey.count == 9 and any(line.startswith("3 files") for line in survey.left_out)
    gc.collect()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("name", "held", "left"),
    [
        ("metadata.csv", of_pictures("file_name,label", count=9), 3),
        ("metadata.csv", of_pictures("file_name,label"), 0),
        ("metadata.jsonl", "".join(f'{{"file_name": "{index}.png", "label": 1}}\n' for index in range(4)), 8),
        ("metadata.csv", "a_file_name,b_file_name\n0.png,1.png\n2.png,3.png\n", 8),
        ("metadata.jsonl", in_pairs('{{"file_name": "{}.png", "mask_file_name": "{}.png"}}'), 0),
        ("metadata.jsonl", in_pairs('{{"file_names": ["{}.png", "{}.png"]}}'), 0),
    ],
)
def test_pictures_that_a_metadata_file_lacks_are_told(tmp_path, monkeypatch, name, held, left):
    told = []
    monkeypatch.setattr(about.logger, "warning", told.append)
    write_pictures(tmp_path, [""], 12)
    open_source(DataSource(str(write_files(tmp_path, {name: held}))))
    assert [f"{left} of 12" in text for text in told] == [True] * bool(left)
    gc.collect()


def test_a_column_that_is_called_as_the_files_themselves_is_refused(tmp_path):
    write_pictures(tmp_path, [""], 12)
    rows = "".join(f"{index}.png,{'ab'[index % 2]},x\n" for index in range(12))
    write_files(tmp_path, {"labels.csv": f"file,label,image\n{rows}"})
    with refused(DataError, "labels.csv", "'image'"):
        look_at(str(tmp_path))


def test_two_tables_of_the_same_files_are_refused(tmp_path, walks):
    write_pictures(tmp_path / "pictures", [""], 12)
    for folder, text in ((tmp_path / "pictures", of_pictures()), (walks, as_table())):
        for names in (["labels.csv", "more.csv"], ["metadata.csv", "metadata.jsonl"]):
            write_files(folder, dict.fromkeys(names, text))
            with refused(DataError, *names):
                look_at(str(folder))


@pytest.mark.parametrize("split", ["", "train"])
@pytest.mark.parametrize("beside", ["masks", "labels", "Annotations"])
def test_masks_are_no_class(tmp_path, beside, split):
    write_pictures(tmp_path / split / "images", [""], 12)
    write_pictures(tmp_path / split / beside, [""], 12)
    with refused(DataError, beside.lower()):
        look_at(str(tmp_path))
    assert look_at(str(tmp_path / split / "images")).classes == []


def write_texts(folder, encoding="utf-8"):
    for name in ("neg", "pos"):
        texts = (f"A café, number {index}.\nVery {name}.\n" for index in range(6))
        write_files(folder, {f"{name}/{index}.txt": text.encode(encoding) for index, text in enumerate(texts)})


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
    write_files(tmp_path, {f"one/{n}.txt": "a line\nanother\n" for n in range(12)} | {"books/a.txt": "a line\n" * 5})
    assert look_at(str(tmp_path / "one")).classes == [] and look_at(str(tmp_path / "books")).count == 5


@pytest.mark.parametrize("labels", [[["a"], ["b"]], [["a", "b"], ["a"]], [{"x": 1}, {"x": 2}]])
def test_labels_that_are_no_class_are_refused(tmp_path, labels):
    lines = [json.dumps({"text": f"a text {index}", "label": labels[index % 2]}) for index in range(12)]
    with refused(DataError, "texts.jsonl", "label"):
        look_at(str(write_files(tmp_path, {"texts.jsonl": "\n".join(lines)}) / "texts.jsonl"))


def test_a_folder_of_sounds_leaves_pathlib_as_it_is(tmp_path, monkeypatch):
    """`datasets` replaces `Path` in the module of each builder, by one that takes `a: b` for an address."""
    monkeypatch.chdir(tmp_path)
    write_sounds("sounds", ["hello", "goodbye"], 1, 8000, 0.01)
    assert len(open_source(DataSource(path="sounds"))) == 2
    write_pictures("a: zoo", ["cat", "dog"], 12)
    assert look_at("a: zoo").classes == ["cat", "dog"]
