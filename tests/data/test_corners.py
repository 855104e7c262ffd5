"""Files that lie beside examples in people's folders, and types and dialects that are nearly the usual ones."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from hf_ext.data.opening import open_source
from hf_ext.data.source import DataSource
from hf_ext.data.survey import look_at
from hf_ext.data.walking import list_files
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
