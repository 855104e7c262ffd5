"""What people's folders and files hold beside examples, and types and dialects that are nearly the usual ones."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from hf_ext.data.opening import open_source
from hf_ext.data.source import DataSource
from hf_ext.data.survey import look_at
from hf_ext.errors import DataError
from tests.kit.own_data import open_apart, write_files, write_pictures, write_sounds, write_tables
from tests.kit.refusals import refused

TEXTS = {"text": [f"words of the row {row}" for row in range(24)], "label": ["a", "b"] * 12}
LISTS = [{"values": [[row, 1.5], [2.5, 3.5]], "label": "ab"[row % 2]} for row in range(24)]


@pytest.mark.parametrize("kind", ["pictures", "pairs", "captions", "sounds", "texts", "series"])
def test_hidden_files_are_no_data_and_links_are(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    names = {"pairs": ["lq", "hq"], "captions": [""]}.get(kind, ["cat", "dog"])
    if kind in ("texts", "series"):
        write_tables("held", [f"{name}/{n}" for name in names for n in range(6)], 20)
        [file.rename(file.with_suffix(".txt")) for file in Path("held").rglob("*.csv") if kind == "texts"]
    else:
        (write_sounds("held", names, 6, 8000, 0.1) if kind == "sounds" else write_pictures("held", names, 6))
    [Path("held", f"{n}.txt").write_text(f"number {n}") for n in range(6) if kind == "captions"]
    before = look_at("held")
    for file in sorted(file for file in Path("held").rglob("*.*") if file.is_file()):
        file.with_name(f"._{file.name}").write_bytes(b"\0\5\26\7\0\2")
        write_files(file.parent, {f".ipynb_checkpoints/{file.stem}-checkpoint{file.suffix}": file.read_bytes()})
    # A link to a folder above leads nowhere new.
    Path("held", names[0], "above").symlink_to(tmp_path / "held")
    assert look_at("held").lines == before.lines and len(open_apart(before.train, before.eval)[1])
    if kind in ("pairs", "series"):
        Path("linked").mkdir()
        [Path("linked", name).symlink_to(tmp_path / "held" / name) for name in names]
        assert look_at("linked").lines == before.lines


@pytest.mark.parametrize("name", ["A.CSV", "A.Tsv", "A.JSONL", "A.TXT", "A.Parquet", "folder/A.CSV", "folder/A.Txt"])
def test_endings_of_any_case_are_read(tmp_path, name):
    file, frame = write_files(tmp_path, {name: ""}) / name, pd.DataFrame(TEXTS)
    # A mark of Windows in front is no letter.
    plain = "\ufeff" + ("\n".join(TEXTS["text"]) if file.suffix.lower() == ".txt" else frame.to_csv(index=False))
    plain = plain.replace(",", "\t") if file.suffix == ".Tsv" else plain
    file.write_text(frame.to_json(orient="records", lines=True) if file.suffix == ".JSONL" else plain)
    if file.suffix == ".Parquet":
        frame.to_parquet(file)
    survey = look_at(str(tmp_path / name.partition("/")[0]))
    assert sorted(text for part in open_apart(survey.train, survey.eval) for text in part["text"]) == sorted(
        TEXTS["text"]
    )


@pytest.mark.parametrize("first", ["text", "label"])
@pytest.mark.parametrize("suffix", [".tsv", ".csv"])
def test_quotes_that_are_letters_join_no_rows(tmp_path, first, suffix):
    texts = ['"so it began', *TEXTS["text"][1:20], 'and ended"', '"again', '5" wide', '"whole"']
    columns = [first, "label" if first == "text" else "text"]
    frame = pd.DataFrame({**TEXTS, "text": texts})[columns]
    rows = ["\t".join(columns), *("\t".join(row) for row in frame.itertuples(index=False))]
    file = write_files(tmp_path, {f"a{suffix}": "\n".join(rows).replace("\t", "\t" if suffix == ".tsv" else ",")})
    assert open_source(DataSource(str(file / f"a{suffix}"))).to_pandas()["text"].tolist() == texts
    # Quotes are quotes where a text has several lines.
    frame.assign(text=["two\nlines, at last", *texts[1:]]).to_csv(file / "b.csv", index=False)
    assert open_source(DataSource(str(file / "b.csv")))["text"][0] == "two\nlines, at last"


@pytest.mark.parametrize("key", [9_007_199_254_740_993, 1_700_000_000_000_000_001, 10**21])
def test_keys_of_series_are_no_floats(tmp_path, key):
    names = np.repeat([key + number for number in range(8)], 10)
    frame = pd.DataFrame({"id": names, "time": [*range(10)] * 8, "y": np.arange(80) % 7})
    frame.assign(label=np.repeat([*"abababab"], 10)).to_csv(tmp_path / "a.csv", index=False)
    assert look_at(str(tmp_path / "a.csv")).count == 8
    frame.assign(label=np.repeat([*"abababab"], 10)).to_csv(tmp_path / "b.csv", index=False)
    with refused(DataError, "time", str(key)):
        look_at(str(tmp_path))


@pytest.mark.parametrize("label", ["Int64", "string", "boolean"])
def test_nullable_types_are_read(tmp_path, label):
    frame = pd.DataFrame({f" t{step} ": pd.array([*range(24)], dtype="Int64") for step in range(10)})
    frame["label"] = pd.array([0, 1] * 12, dtype="Int64").astype(label)
    frame.loc[2, [" t3 ", "label"]] = pd.NA
    frame.to_parquet(tmp_path / "a.parquet")
    survey = look_at(str(tmp_path / "a.parquet"))
    assert len(survey.classes) == 2 and survey.count == 24 and "1 of 24" in survey.left_out[0]


@pytest.mark.parametrize("empty", [None, []])
@pytest.mark.parametrize("place", [0, 3])
def test_series_without_numbers_are_counted_and_measure_nothing(tmp_path, empty, place):
    rows = [{**row, "values": empty} if number == place else row for number, row in enumerate(LISTS)]
    write_files(tmp_path, {"a.jsonl": "\n".join(map(json.dumps, rows)), "b.jsonl": '{"values": [], "label": "a"}\n'})
    survey = look_at(str(tmp_path / "a.jsonl"))
    assert survey.channels == 2 and "1 of 24" in survey.left_out[0] and survey.broken
    for seed in range(4):
        assert all(map(len, open_source(DataSource(**{**survey.eval, "hold_out_seed": seed}))["values"]))
    with refused(DataError, "b.jsonl"):
        look_at(str(tmp_path / "b.jsonl"))


@pytest.mark.parametrize("kind", [">f4", np.longdouble, "datetime64[D]"])
def test_arrays_of_rare_types_are_read(tmp_path, kind):
    np.savez(tmp_path / "a.npz", X=np.ones((12, 8)), y=np.arange(12) % 2, other=np.arange(12).astype(kind))
    assert look_at(str(tmp_path / "a.npz")).count == 12


def test_a_column_without_a_cell_fits_every_file_and_pictures_are_not_lost_for_a_sound(tmp_path):
    for number, cell in enumerate(("", "seen")):
        pd.DataFrame({**TEXTS, "comment": cell}).to_csv(tmp_path / f"{number}.csv", index=False)
    assert open_source(DataSource(str(tmp_path)))["comment"][:] == [None] * 24 + ["seen"] * 24
    write_pictures(tmp_path / "both", ["cat", "dog"], 4)
    write_sounds(tmp_path / "both", ["cat"], 1, 8000, 0.1)
    with refused(DataError, "8 .png files", "sounds"):
        look_at(str(tmp_path / "both"))
