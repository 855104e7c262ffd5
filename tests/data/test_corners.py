"""Files that lie beside examples in people's folders, types and dialects that are nearly the usual ones, and words,
names and places that readers take for others."""

import json
import shutil
import tarfile
import unicodedata
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from hf_ext.data.files import list_files
from hf_ext.data.opening import open_source
from hf_ext.data.roles import Hints
from hf_ext.data.source import DataSource
from hf_ext.data.survey import look_at
from hf_ext.data.tables import read_table
from hf_ext.errors import DataError
from tests.kit.own_data import open_apart, write_files, write_pictures, write_sounds, write_tables
from tests.kit.refusals import refused

TEXTS = {"text": [f"words of the row {row}" for row in range(24)], "label": ["a", "b"] * 12}


@pytest.mark.parametrize("kind", ["pictures", "pairs", "sounds", "texts", "series"])
def test_hidden_files_are_no_data_and_links_are(tmp_path, kind):
    names, place = ["lq", "hq"] if kind == "pairs" else ["cat", "dog"], tmp_path / "held"
    if kind in ("texts", "series"):
        write_tables(place, [f"{name}/{n}" for name in names for n in range(6)], 20)
        [file.rename(file.with_suffix(".txt")) for file in place.rglob("*.csv") if kind == "texts"]
    else:
        (write_sounds(place, names, 6, 8000, 0.1) if kind == "sounds" else write_pictures(place, names, 6))
    before = look_at(str(place))
    for file in sorted(place.rglob("*.*")):
        hidden = {f"._{file.name}": b"\0\5\26\7\0\2", f".ipynb_checkpoints/1{file.suffix}": file.read_bytes()}
        write_files(file.parent, hidden)
    # A link to a folder above leads nowhere new.
    Path(place, names[0], "above").symlink_to(place)
    assert look_at(str(place)).lines == before.lines and len(open_apart(before.train, before.eval)[1])
    Path(tmp_path, "linked").mkdir()
    [Path(tmp_path, "linked", name).symlink_to(place / name) for name in names]
    linked = look_at(str(tmp_path / "linked"))
    assert linked.lines == before.lines and len(open_apart(linked.train, linked.eval)[1])


@pytest.mark.parametrize("name", ["A.CSV", "A.Tsv", "A.JSONL", "A.TXT", "A.Parquet", "folder/A.CSV", "folder/A.Txt"])
def test_endings_of_any_case_are_read(tmp_path, name):
    file, frame = write_files(tmp_path, {name: ""}) / name, pd.DataFrame(TEXTS)
    if file.suffix == ".Parquet":
        frame.to_parquet(file)
    else:
        held = frame.to_csv(index=False, sep="\t" if file.suffix == ".Tsv" else ",")
        held = frame.to_json(orient="records", lines=True) if file.suffix == ".JSONL" else "\ufeff" + held
        # What Windows writes in front is no letter.
        file.write_text("\ufeff" + "\n".join(TEXTS["text"]) if file.suffix.lower() == ".txt" else held)
    survey = look_at(str(tmp_path / name.partition("/")[0]))
    parts = open_apart(survey.train, survey.eval)
    assert sorted(text for part in parts for text in part["text"]) == sorted(TEXTS["text"])


@pytest.mark.parametrize(("separator", "first"), [("\t", "text"), ("\t", "label"), (",", "label"), ("~", "label")])
def test_quotes_that_are_letters_join_no_rows(tmp_path, separator, first):
    texts = ['"so it began', *TEXTS["text"][1:20], 'and ended"', '"again', '5" wide', '"whole"']
    rows = [row if first == "text" else row[::-1] for row in zip(["text", *texts], ["label", *"ab" * 12], strict=True)]
    place = write_files(tmp_path, {"a.csv": "\n".join(map(separator.join, rows))})
    assert open_source(DataSource(str(place / "a.csv"))).to_pandas()["text"].tolist() == texts
    # Quotes are quotes where a text has several lines.
    write_files(tmp_path, {"b.csv": 'text,label\n"two\nlines, at last",a\n'})
    assert open_source(DataSource(str(place / "b.csv")))["text"][0] == "two\nlines, at last"


@pytest.mark.parametrize("key", [9_007_199_254_740_993, 1_700_000_000_000_000_001, 10**21])
def test_keys_of_series_are_no_floats(tmp_path, key):
    frame = pd.DataFrame({"id": np.repeat([key + number for number in range(8)], 10), "time": [*range(10)] * 8})
    frame.assign(y=np.arange(80) % 7, label=np.repeat([*"abababab"], 10)).to_csv(tmp_path / "a.csv", index=False)
    assert look_at(str(tmp_path / "a.csv")).count == 8
    write_files(tmp_path, {"b.csv": (tmp_path / "a.csv").read_bytes()})
    with refused(DataError, "time", str(key)):
        look_at(str(tmp_path))


@pytest.mark.parametrize("label", ["Int64", "string", "boolean"])
def test_nullable_types_of_parquet_and_rare_ones_of_arrays_are_read(tmp_path, label):
    frame = pd.DataFrame({f" t{step} ": pd.array([*range(24)], dtype="Int64") for step in range(10)})
    frame["label"] = pd.array([0, 1] * 12, dtype="Int64").astype(label)
    frame.loc[2, [" t3 ", "label"]] = pd.NA
    frame.to_parquet(tmp_path / "a.parquet")
    survey = look_at(str(tmp_path / "a.parquet"))
    assert len(survey.classes) == 2 and survey.count == 24 and "1 of 24" in survey.left_out[0]
    rare = {"Int64": ">f4", "string": np.longdouble, "boolean": "datetime64[D]"}[label]
    np.savez(tmp_path / "a.npz", X=np.ones((12, 8)), y=np.arange(12) % 2, other=np.arange(12).astype(rare))
    assert look_at(str(tmp_path / "a.npz")).count == 12


@pytest.mark.parametrize(("empty", "place"), [(None, 0), ([], 3), ([[None] * 2], 0), ([[1e39] * 2], 3)])
def test_series_without_numbers_are_counted_and_measure_nothing(tmp_path, empty, place):
    given = [empty if row == place else [[row, 1.5], [2.5, 3.5]] for row in range(24)]
    rows = [json.dumps({"values": values, "label": "ab"[row % 2]}) for row, values in enumerate(given)]
    write_files(tmp_path, {"a.jsonl": "\n".join(rows), "b.jsonl": '{"values": [], "label": "a"}\n'})
    survey = look_at(str(tmp_path / "a.jsonl"))
    assert survey.channels == 2 and "1 of 24" in survey.left_out[0] and survey.broken
    for seed in range(4):
        measured = open_source(DataSource(**{**survey.eval, "hold_out_seed": seed}))["values"]
        assert all(len(values) and (np.abs(values) < 1e38).all() for values in measured)
    with refused(DataError, "b.jsonl"):
        look_at(str(tmp_path / "b.jsonl"))


def test_a_column_without_a_cell_fits_every_file_and_pictures_are_not_lost_for_a_sound(tmp_path):
    for number, cell in enumerate(("", "seen")):
        pd.DataFrame({**TEXTS, "comment": cell}).to_csv(tmp_path / f"{number}.csv", index=False)
    assert open_source(DataSource(str(tmp_path)))["comment"][:] == [None] * 24 + ["seen"] * 24
    write_pictures(tmp_path / "both", ["cat", "dog"], 4)
    write_sounds(tmp_path / "both", ["cat"], 1, 8000, 0.1)
    with refused(DataError, "8 .png files", "sounds"):
        look_at(str(tmp_path / "both"))


@pytest.mark.parametrize("links", [{"a/up": "."}, {"a/self": "a"}, {"a/b": "b", "b/a": "a"}, {"a/out": "../out"}])
def test_links_are_followed_and_never_round_and_round(links, tmp_path, monkeypatch):
    """A link to a folder above, to its own, two to each other: a folder is read once on each way."""
    for place in ("data/a", "data/b", "out"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "one.txt").touch()
    for link, target in links.items():
        (tmp_path / "data" / link).symlink_to(tmp_path / "data" / target)
    monkeypatch.chdir(tmp_path)
    found = [file.as_posix() for file in list_files("data")]
    own = ["data/a/one.txt", "data/b/one.txt"]
    mutual = [f"data/{link}/one.txt" for link in links if not link.endswith(("up", "self"))]
    assert sorted(found) == sorted([*own, *mutual])


PAIRS = ["NA,EU", "None,x", "01,02", "1e5,2e5", "true,false", "nan,null", "+49,+1", "1_12,112", "007,7x", "1.0,1.10x"]


@pytest.mark.parametrize("words", [*PAIRS, "2024-01-01,2024-01-02", "ä,B"])
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


@pytest.mark.parametrize(("tables", "column"), [(["00000", "00001"], "png"), (["train", "00001"], "caption")])
def test_tables_of_the_names_of_tar_files_tell_of_these(tmp_path, tables, column):
    """As img2dataset writes them: a table and counts beside each tar file."""
    write_pictures(tmp_path / "pictures", [""], 4)
    for number in range(2):
        with tarfile.open(tmp_path / f"0000{number}.tar", "w") as tar:
            [tar.add(file, file.name) for file in sorted((tmp_path / "pictures").glob("*.png"))[2 * number :][:2]]
        pd.DataFrame({"caption": ["a", "b"]}).to_parquet(tmp_path / f"{tables[number]}.parquet")
    write_files(tmp_path, {f"0000{number}_stats.json": '{"count": 2}' for number in range(2)})
    shutil.rmtree(tmp_path / "pictures")
    for streaming in (False, True):
        rows = [*open_source(DataSource(str(tmp_path), streaming=streaming))]
        assert column in rows[0] and (column == "caption" or len(rows) == 4)
