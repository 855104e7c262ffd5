"""Tables in archives, of other encodings and separators, arrays, and lines with labels: understood, or refused."""

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


SENTENCES = [f"this is the text of number {number}, of some words" for number in range(24)]
MOODS = [["good", "bad", "ugly"][number // 2 % 3] for number in range(24)]


def write_lines(place, line: str) -> str:
    """A file with a line for each text."""
    values = enumerate(zip(SENTENCES, MOODS, strict=True))
    lines = [line.format(text=text, label=label, number=number, bit=number % 2) for number, (text, label) in values]
    write_files(place.parent, {place.name: "\n".join([*lines, "", ""])})
    return str(place)


@pytest.mark.parametrize(
    ("name", "line", "fact"),
    [
        ("a.txt", "__label__{label} {text}", "bad, good, ugly"),
        ("a.txt", "{label}\t{text}", "--inputs text"),
        ("a.txt", "{label} :: {text}", "bad, good, ugly"),
        ("a.txt", "{text}; {label}", "--inputs text"),
        ("a.txt", "{bit} {text}", "0, 1"),
        ("a.tsv", "{text}\t{label}", "label and text"),
        ("a.csv", '{label},"{text}"', "label and text"),
        ("a.csv", '"{bit}","A title {number}","{text}"', "label and text"),
    ],
)
def test_labels_of_other_formats_are_refused_in_words(tmp_path, name, line, fact):
    place = write_lines(tmp_path / name, line)
    with refused(DataError, name, fact):
        look_at(place)


@pytest.mark.parametrize("line", ["{bit} {text}", "{label}\t{text}"])
def test_a_flag_says_that_lines_are_plain(tmp_path, line):
    survey = look_at(write_lines(tmp_path / "a.txt", line), Hints(inputs=("text",)))
    assert survey.columns == ["text"] and survey.classes == []


@pytest.mark.parametrize("line", ["{text}. And more.", "ANNA: {text}", "{number} {text}", "Well, {text}", "{label}"])
def test_plain_lines_stay_plain(tmp_path, line):
    survey = look_at(write_lines(tmp_path / "a.txt", line))
    assert (survey.kind, survey.classes) == ("texts", [])


def test_a_file_of_lines_for_each_class_is_refused_or_said(tmp_path):
    for label in ("good", "bad"):
        for place in (tmp_path / "in folders" / label / "all.txt", tmp_path / f"{label}.txt"):
            write_lines(place, "{text} " + label)
    with refused(DataError, "bad/all.txt"):
        look_at(str(tmp_path / "in folders"))
    assert any("folder for each class" in note for note in look_at(str(tmp_path / "*.txt")).notes)
