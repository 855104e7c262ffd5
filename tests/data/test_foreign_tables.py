"""Tables in archives, of other encodings and separators, and arrays: understood, or refused."""

import io
import json

import numpy as np
import pandas as pd
import pytest

from hf_ext.data.opening import open_source
from hf_ext.data.roles import Hints
from hf_ext.data.source import DataSource
from hf_ext.data.survey import look_at
from hf_ext.errors import DataError
from tests.data.tables_testing import RNG, STATES, STEPS, WORDS, rows, wide
from tests.kit.own_data import write_files
from tests.kit.refusals import refused


@pytest.mark.parametrize("name", ["texts.csv", "texts.tsv", "folder/train.csv"])
@pytest.mark.parametrize(
    ("encoding", "separator", "note"),
    [
        ("latin-1", ";", "Windows-1252"),
        ("utf-16", ",", "UTF-16"),
        ("utf-16-be", "\t", "UTF-16"),
        ("utf-8", ";", "semi"),
    ],
)
def test_texts_have_any_encoding_and_separator(tmp_path, encoding, separator, note, name):
    """The recipe's own source reads the same texts that `init` looked at."""
    # The first letter that is no ASCII lies far down.
    texts = [f"{'x' * 4000} gehoeren ins Cafe Nummer {number}" for number in range(23)] + ["Füße gehören ins Café"]
    write_files(tmp_path, {name: rows({"text": texts, "label": STATES}, separator).encode(encoding)})
    survey = look_at(str(tmp_path / name.partition("/")[0]))
    assert survey.kind == "texts" and survey.classes == WORDS
    assert any(note in text for text in survey.notes)
    parts = [open_source(DataSource(**part)) for part in (survey.train, survey.eval)]
    assert sorted(text for part in parts for text in part["text"]) == sorted(texts)


@pytest.mark.parametrize("ending", ["zip", "csv.gz", "jsonl", "txt"])
def test_a_table_of_numbers_is_never_taken_for_texts(tmp_path, ending):
    held, place = wide(STEPS, WORDS), tmp_path / f"wide.{ending}"
    if ending == "txt":
        place.write_text(held.replace(",", " "))
    elif ending == "jsonl":
        pd.read_csv(io.StringIO(held)).rename(columns={"label": "state"}).to_json(place, orient="records", lines=True)
    else:
        packing = {"method": "zip", "archive_name": "wide.csv"} if ending == "zip" else "infer"
        pd.read_csv(io.StringIO(held)).to_csv(place, index=False, compression=packing)
    with refused(DataError, place.name, "numbers"):
        look_at(str(place))


@pytest.mark.parametrize("broken", ["objects", "one hot", "apart"])
def test_arrays_that_cannot_be_learned_from_are_refused(tmp_path, broken):
    place, series = tmp_path / "data.npz", RNG.normal(size=(12, 8))
    if broken == "objects":
        np.savez(place, X=np.array([series[0, :3], series[1]], dtype=object), y=[0, 1])
    elif broken == "one hot":
        np.savez(place, X=series, y=np.eye(3)[np.arange(12) % 3])
    else:
        place = tmp_path
        np.save(place / "X_train.npy", series)
        np.save(place / "y_train.npy", np.arange(12) % 2)
    with refused(DataError, {"objects": "parquet", "one hot": "argmax", "apart": "savez"}[broken]):
        look_at(str(place), Hints(label="y" if broken == "one hot" else None))


@pytest.mark.parametrize("labels", [["a", 1], [[["a"]], [["b"]]]])
def test_lists_whose_labels_are_of_several_kinds_are_refused(tmp_path, labels):
    given = [{"values": [1.5, 2.5, number], "label": labels[number % 2]} for number in range(12)]
    write_files(tmp_path, {"lists.json": json.dumps(given)})
    with refused(DataError, "lists.json", "label"):
        look_at(str(tmp_path / "lists.json"))


@pytest.mark.parametrize(
    ("name", "label", "facts"), [("words", 1, ["words"]), ("text", "a", ["label"]), ("text", 2, [])]
)
def test_files_of_one_source_have_the_same_columns(tmp_path, name, label, facts):
    for number, columns in enumerate(({"text": "Satz", "label": 1}, {name: "Satz", "label": label})):
        cells = {key: [f"{cell} {n}" if key != "label" else cell for n in range(9)] for key, cell in columns.items()}
        (tmp_path / f"{number}.csv").write_text(rows(cells, ";"))
    source = DataSource(str(tmp_path / "*.csv"))
    if facts:
        with refused(DataError, "1.csv", *facts):
            open_source(source)
    else:
        assert open_source(source)["label"][:] == [1] * 9 + [2] * 9


ENDINGS = ["mat", "pkl", "feather", "db", "h5", "xml", "toml", "eval", "parquet", "tar", "zip", "csv", "tsv", "jsonl"]
ENDINGS += ["txt", "npy", "npz", "arrow", "lance", "ts", "wav"]


@pytest.mark.parametrize("held", [bytes(range(256)) * 4, b"\x89HDF\r\n\x1a\n\0\0"], ids=["bytes", "head"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_bytes_of_any_ending_are_refused_in_a_line_or_texts(tmp_path, ending, held):
    place = tmp_path / f"data.{ending}"
    place.write_bytes(held)
    try:
        survey = look_at(str(place))
    except DataError as error:
        assert place.name in str(error) and "\n" not in str(error) and len(str(error)) < 700
    else:
        assert survey.kind == "texts"


@pytest.mark.parametrize("place", ["texts.csv", "texts.tsv", "texts.csv.gz", "folder/train.csv"])
@pytest.mark.parametrize("word", ["None", "NA", "null", "nan", "n/a", "#N/A", "NULL"])
def test_words_for_nothing_are_texts_and_classes(tmp_path, place, word):
    (tmp_path / "folder").mkdir()
    frame = pd.DataFrame({"text": [word, "a b", "c d", "e f"] * 5, "label": [word, "other"] * 10})
    frame["stars"] = [1, None] * 10
    frame.to_csv(tmp_path / place, index=False, sep="\t" if ".tsv" in place else ",", na_rep="NA")
    for streaming in (False, True):
        rows = list(open_source(DataSource(str(tmp_path / place.partition("/")[0]), streaming=streaming)))
        assert [(row["text"], row["label"]) for row in rows] == [*zip(frame["text"], frame["label"], strict=True)]
        # A number that is missing stays missing.
        assert [row["stars"] for row in rows] == [1, None] * 10
