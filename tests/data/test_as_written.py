"""Words, names and places that readers of tables and patterns take for others: they stay as they are written."""

import tarfile
import unicodedata

import pytest

from hf_ext.data.opening import open_source
from hf_ext.data.roles import Hints
from hf_ext.data.source import DataSource
from hf_ext.data.survey import look_at
from hf_ext.data.tables import read_table
from hf_ext.errors import DataError
from tests.kit.own_data import write_files, write_pictures, write_sounds
from tests.kit.refusals import refused

WORDS = ["NA,EU", "None,x", "01,02", "1e5,2e5", "true,false", "nan,null", "+49,+1", "1_12,112", "007,7x", "1.0,1.10x"]


@pytest.mark.parametrize("words", [*WORDS, "2024-01-01,2024-01-02", "ä,B"])
@pytest.mark.parametrize("kind", [".png", ".wav", "png", "wav", "label", "zip"])
def test_classes_and_names_of_files_stay_as_they_are_written(tmp_path, kind, words):
    pair = words.split(",")
    if kind in ("label", "zip"):
        rows = [f"{pair[row % 2]},{row},{row}.5,{row * row},1,2,3,4,{-row}" for row in range(12)]
        write_files(tmp_path, {"a.csv": "\n".join([f"{kind},t0,t1,t2,t3,t4,t5,t6,t7", *rows])})
        # Truth values of other columns are those of pandas.
        expected = ["False", "True"] if kind == "zip" and words == "true,false" else sorted(pair)
        assert look_at(str(tmp_path / "a.csv"), Hints(label=kind)).classes == expected
        return
    write_pictures(tmp_path, [""], 8) if "png" in kind else write_sounds(tmp_path, [""], 8, 8000, 0.02)
    names = [f"{name}.{kind[-3:]}" for name in (*pair, *"cdefgh")]
    [(tmp_path / f"{number}.{kind[-3:]}").rename(tmp_path / name) for number, name in enumerate(names)]
    # Without endings, and with umlauts of two signs, as other programs write them.
    shown = names if kind[0] == "." else [unicodedata.normalize("NFD", name[:-4]) for name in names]
    rows = [f"{name},{pair[number % 2]}" for number, name in enumerate(shown)]
    write_files(tmp_path, {"metadata.csv": "\n".join(["file_name,label", *rows])})
    assert look_at(str(tmp_path)).classes == sorted(pair)
    data = open_source(DataSource(str(tmp_path))).with_format("arrow")[:].to_pylist()
    files = (row["image" if "png" in kind else "audio"]["path"] for row in data)
    assert [file.rpartition("/")[2] for file in files] == names


@pytest.mark.parametrize("kind", ["pictures", "pairs", "sounds", "tables"])
@pytest.mark.parametrize("name", ["a[b", "a[0-9]b", "a*b", "a?b", "a::b", "linked"])
def test_signs_of_patterns_and_links_to_folders_are_read(tmp_path, kind, name):
    classes = ["lq", "hq"] if kind == "pairs" else ["cat", "dog"]
    for place in (tmp_path / "plain", tmp_path / name, tmp_path / "a1b"):
        if kind == "tables":
            write_files(place, {f"{one}/rows[1].csv": f"text,label\nsome words,{one}\n" for one in classes})
        else:
            write_sounds(place, classes, 4, 8000, 0.02) if kind == "sounds" else write_pictures(place, classes, 4)
    if name == "linked":
        (tmp_path / name / classes[0]).rename(tmp_path / "cat")
        (tmp_path / name / classes[0]).symlink_to(tmp_path / "cat")
    for streaming in (False, True):
        sources = [DataSource(str(tmp_path / place), streaming=streaming) for place in ("plain", name)]
        if name == "a::b" and kind != "pairs":
            with refused(DataError, name):
                open_source(sources[1])
            continue
        expected, rows = ([[*row, row.get("label")] for row in open_source(source)] for source in sources)
        assert expected and rows == expected
        if kind == "tables":
            places = "plain/cat/rows[1].csv", "pl?in/c[a]t/*[[]1?.csv"
            assert all([*open_source(DataSource(f"{tmp_path}/{place}", streaming=streaming))] for place in places)


def test_what_is_nearly_a_number_or_begins_as_one_is_a_name_in_a_whole_column(tmp_path):
    rows = [f"{name},{step},{step},{'ab'[len(name) % 2]}" for name in ("1_12", "11_2", "112") for step in range(5)]
    long = "user,x\n" + "007,1\n" * 300_000 + "abc,1\n"
    write_files(tmp_path, {"a.csv": "\n".join(["subject,time,x,label", *rows]), "long.csv": long})
    assert look_at(str(tmp_path / "a.csv")).count == 3
    assert read_table(tmp_path / "long.csv").frame["user"].iloc[0] == "007"


@pytest.mark.parametrize("missing", [0, 3])
def test_a_missing_caption_is_refused_and_unused_options_are_told(tmp_path, missing):
    write_pictures(tmp_path, [""], 8)
    write_files(tmp_path, {f"{number}.txt": "words" for number in range(8) if number != missing})
    with refused(DataError, f"{missing}.png"):
        look_at(str(tmp_path))
    (tmp_path / f"{missing}.png").unlink()
    assert "--time" in look_at(str(tmp_path), Hints(time="t")).left_out[0]
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        [tar.add(file, file.name) for file in sorted(tmp_path.glob("*.*[gt]"))]
    assert look_at(str(tmp_path / "a.tar")).captions == "txt"
