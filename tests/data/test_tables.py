"""Tables as people have them: of each of many small inputs, what must be understood, or refused."""

import io
import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import yaml

from hf_ext.data.opening import open_source
from hf_ext.data.roles import Hints
from hf_ext.data.source import DataSource
from hf_ext.data.survey import look_at
from hf_ext.data.tables import read_table
from hf_ext.data.writing import flow
from hf_ext.errors import DataError
from tests.kit.own_data import open_apart, write_files
from tests.kit.refusals import refused

from .odd_data import write_table
from .tables_testing import CASES, HOURS, MIXED, RNG, STATES, STEPS, WORDS, Case, Y, rows, wide


def write(tmp_path, case: Case):
    place = tmp_path / f"table{case.suffix}"
    place.write_bytes(case.text if isinstance(case.text, bytes) else case.text.encode(case.encoding))
    return place


def test_classes_of_texts_are_asked_for(tmp_path):
    columns = {"review": [f"a text with the number {number}" for number in range(24)], "mood": STATES}
    place = write_table(tmp_path / "table.csv", columns)
    with refused(DataError, "--label mood", "--inputs review"):
        look_at(place)
    assert look_at(place, Hints(inputs=("review",))).classes == []
    assert look_at(place, Hints(label="mood")).classes == WORDS


@pytest.mark.parametrize("way", ["the file", "held", "as a source"])
def test_a_table_that_does_not_fit_into_memory_is_refused(way, tmp_path, monkeypatch):
    (tmp_path / "long.csv").write_text(rows({"a": range(66), "label": WORDS * 33}))
    size = (tmp_path / "long.csv").stat().st_size
    read = {
        "the file": lambda: read_table(tmp_path / "long.csv"),
        "held": lambda: read_table("long.csv", held=(tmp_path / "long.csv").read_bytes()),
        "as a source": lambda: open_source(DataSource(str(tmp_path / "long.csv"))),
    }[way]
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=10 * size - 1))
    with refused(DataError, "long.csv", "parquet"):
        read()
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=10 * size))
    read()


@pytest.mark.parametrize("name", CASES)
def test_a_table_is_understood_or_refused(tmp_path, name):
    case = CASES[name]
    place = write(tmp_path, case)
    if case.refused:
        with pytest.raises(ValueError) as error:
            look_at(str(place), case.hints)
        said = str(error.value)
        assert all(word in said for word in case.refused) and "\n" not in said
        assert case.time is None or f"time in {case.time}" in said
        return
    survey = look_at(str(place), case.hints)
    assert survey.kind == "series" and survey.train["rows"] == case.layout
    assert (survey.train.get("time"), survey.train.get("series")) == (case.time, case.series)
    if isinstance(case.inputs, int):
        assert {*survey.lengths} == {case.inputs}
    else:
        assert survey.columns == case.inputs
    assert survey.values if case.values else survey.classes == case.classes
    assert case.notes in "; ".join(survey.notes) and len(survey.lines) == 5
    # Training and evaluation read it as it was understood, also after YAML, and share nothing.
    train, other = (yaml.safe_load(flow(words)) for words in (survey.train, survey.eval))
    parts = open_apart(train, other) if "hold_out" in train else [open_source(DataSource(**train))]
    for row in (part[0] for part in parts):
        lengths = {len(row[column]) for column in survey.columns}
        assert len(lengths) == 1 and all(np.asarray(row[column]).dtype.kind == "f" for column in survey.columns)


def test_steps_are_sorted_by_their_time(tmp_path):
    survey = look_at(str(write(tmp_path, CASES["unsorted"])))
    found = [value for data in open_apart(survey.train, survey.eval) for value in data[0]["y"]]
    assert found == pytest.approx([Y[place] for place in np.argsort(MIXED)], abs=1e-6)


def test_decimal_commas_and_thousands_are_the_numbers_that_were_meant(tmp_path):
    large = [1200000.5 + step for step in range(24)]
    for name, expected in (
        *[("semicolons and decimal commas", Y), ("decimal commas in quotes", Y)],
        *[("thousands and decimals", large), ("German thousands", large)],
    ):
        assert read_table(write(tmp_path, CASES[name])).frame["y"].tolist() == expected


def test_the_series_of_a_panel_are_whole(tmp_path):
    place = write(tmp_path, CASES["panel of numbers"])
    survey = look_at(str(place))
    frame = pd.read_csv(place)
    data = open_source(DataSource(**{**survey.train, "hold_out": 0.0}))
    assert survey.count == len(data) == 4
    for row, (_, part) in zip(data, frame.groupby("series"), strict=True):
        assert row["y"].tolist() == pytest.approx(part["y"].tolist(), abs=1e-6)
        assert row["label"] == part["label"].iloc[0]


def test_parquet_keeps_its_index_of_dates(tmp_path):
    frame = pd.DataFrame({"y": Y, "label": STATES}, index=pd.Index(HOURS, name="when"))
    frame.to_parquet(tmp_path / "table.parquet")
    survey = look_at(str(tmp_path / "table.parquet"))
    assert survey.columns == ["y"] and survey.train["time"] == "when" and survey.classes == WORDS


COUNT = 24
NUMBERS = np.random.default_rng(0).normal(size=(COUNT, 16)).round(3)
LABELS = ["a", "b"] * (COUNT // 2)
CHANNELS = {f"ch{index + 1}": NUMBERS[:, index] for index in range(16)}
# Names of the steps' columns: all are a row a series.
DAY = pd.Timedelta(days=1)
NAMINGS = (
    *(lambda n: f"ch{n + 1}", lambda n: f"{0.5 * n}", lambda n: f"{400 + 2.5 * n} nm", lambda n: f"h{n}:00"),
    *(lambda n: f"{n - 6}", lambda n: str(HOURS[20] + n * DAY), lambda n: f"{HOURS[0] + 31 * n * DAY:%b %Y}"),
)
# Of the last one is left out.
SERIES = [[naming(n) for n in range(16)] for naming in NAMINGS] + [[name for name in CHANNELS if name != "ch5"]]
# Columns beside 16 that count: left out, and said.
BESIDE = {
    "age": np.arange(COUNT) * 7 % 60,
    "sex": ["m", "f", "f"] * 8,
    # The series themselves are called so.
    "values": ["high", "low"] * 12,
    "clinic": [f"clinic {row}" for row in range(COUNT)],
}
# Columns beside them by which a row may be a step, the flag that decides.
EITHER = {
    "time": (np.arange(COUNT) * 0.1, "--time time"),
    "cycle": (np.arange(COUNT) + 1, "--time cycle"),
    "date": (pd.date_range("2024-01-15", periods=COUNT).astype(str), "--time date"),
    "subject": (np.repeat([1, 2, 3, 4], 6), "--series subject"),
}


def check_series(place: str, steps: np.ndarray) -> None:
    survey = look_at(place)
    assert survey.train["rows"] == "series" and survey.classes == ["a", "b"]
    data = open_source(DataSource(path=place, rows="series"))
    np.testing.assert_allclose(np.stack(data["values"]), steps)


@pytest.mark.parametrize("names", SERIES)
def test_a_row_is_a_series_where_all_numbers_count(tmp_path, names):
    columns = dict(zip(names, NUMBERS.T, strict=False))
    check_series(write_table(tmp_path / "table.csv", {**columns, "label": LABELS}), NUMBERS[:, : len(names)])


@pytest.mark.parametrize("names", [range(4000, 3968, -2), range(1990, 2006), np.arange(400, 408, 0.5), range(-8, 8)])
@pytest.mark.parametrize("labels", [{}, {"label": LABELS}])
def test_numbers_that_count_evenly_are_names(tmp_path, names, labels):
    place = write_table(tmp_path / "table.csv", {**dict(zip(map(str, names), NUMBERS.T, strict=True)), **labels})
    table = read_table(place)
    assert not table.nameless and len(table.frame) == COUNT and [*table.frame] == [*map(str, names), *labels]
    # Without words they may as well be a series.
    assert any("evenly" in note for note in table.notes) != bool(labels)
    if labels:
        check_series(place, NUMBERS[:, np.argsort(names)])
    # In rows that all count, the first is one of them, and so is one with a class that others have.
    for length in (16, 6000):
        ramps = np.arange(1.5, 4 * length + 1).reshape(4, length).tolist()
        for row in ramps:
            row += labels and ["a"]
        (tmp_path / "ramps.csv").write_text("\n".join(",".join(map(str, row)) for row in ramps))
        assert read_table(tmp_path / "ramps.csv").nameless


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", BESIDE)
def test_what_does_not_count_is_no_step(tmp_path, name, first):
    beside = {name: BESIDE[name]}
    columns = {**beside, **CHANNELS} if first else {**CHANNELS, **beside}
    place = write_table(tmp_path / "table.csv", {**columns, "label": LABELS})
    check_series(place, NUMBERS)
    assert any(line.startswith(name) for line in look_at(place).left_out)


@pytest.mark.parametrize("name", EITHER)
def test_what_may_be_steps_or_channels_is_refused_with_the_flag(tmp_path, name):
    values, flag = EITHER[name]
    place = write_table(tmp_path / "table.csv", {name: values, **CHANNELS, "label": LABELS})
    with refused(DataError, "ch1", "ch16", flag):
        look_at(place)
    option, column = flag.removeprefix("--").split()
    survey = look_at(place, Hints(**{option: column}))
    assert survey.train["rows"] == "positions" and survey.columns == [*CHANNELS]
    # Without it each row is a series.
    check_series(write_table(tmp_path / "table.csv", {**CHANNELS, "label": LABELS}), NUMBERS)


@pytest.mark.parametrize("first", [True, False])
def test_a_few_that_count_among_many_are_refused(tmp_path, first):
    others = {name: NUMBERS[:, index] for index, name in enumerate(["age", "height", "weight", "pulse", "sugar"])}
    columns = {**others, **CHANNELS} if first else {**CHANNELS, **others}
    place = write_table(tmp_path / "table.csv", {**columns, "label": LABELS})
    with refused(DataError, "ch1", "ch16", "--inputs"):
        look_at(place)
    survey = look_at(place, Hints(inputs=("ch1", "age")))
    assert survey.train["rows"] == "positions" and survey.columns == ["ch1", "age"]


def test_a_panel_with_times_needs_no_flag(tmp_path):
    times = {"unit": np.repeat([1, 2], 12), "time": [*range(12)] * 2}
    survey = look_at(write_table(tmp_path / "table.csv", {**times, **CHANNELS, "label": LABELS}))
    assert (survey.train["series"], survey.train["time"], survey.columns) == ("unit", "time", [*CHANNELS])


# Tables in archives, of other encodings and separators, arrays, and lines with labels


@pytest.mark.parametrize("name", ["texts.csv", "texts.tsv", "folder/train.csv"])
@pytest.mark.parametrize(
    ("encoding", "separator", "note"),
    [
        *[("latin-1", ";", "Windows-1252"), ("utf-8", ";", "semi")],
        *[("utf-16", ",", "UTF-16"), ("utf-16-be", "\t", "UTF-16")],
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
        *(("a.txt", line, "bad, good, ugly") for line in ("__label__{label} {text}", "{label} :: {text}")),
        *(("a.txt", line, "--inputs text") for line in ("{label}\t{text}", "{text}; {label}")),
        *[("a.txt", "{bit} {text}", "0, 1"), ("a.tsv", "{text}\t{label}", "label and text")],
        *(("a.csv", line, "label and text") for line in ('{label},"{text}"', '"{bit}","A title {number}","{text}"')),
    ],
)
def test_labels_of_other_formats_are_refused_in_words(tmp_path, name, line, fact):
    place = write_lines(tmp_path / name, line)
    with refused(DataError, name, fact):
        look_at(place)


PLAIN = ("{text}. And more.", "ANNA: {text}", "{number} {text}", "Well, {text}", "{label}")


@pytest.mark.parametrize(
    ("line", "inputs"), [*((line, ()) for line in PLAIN), ("{bit} {text}", ("text",)), ("{label}\t{text}", ("text",))]
)
def test_lines_are_plain_of_themselves_or_by_a_flag(tmp_path, line, inputs):
    survey = look_at(write_lines(tmp_path / "a.txt", line), Hints(inputs=inputs))
    assert (survey.kind, survey.columns, survey.classes) == ("texts", ["text"], [])


def test_a_file_of_lines_for_each_class_is_refused_or_said(tmp_path):
    for label in ("good", "bad"):
        for place in (tmp_path / "in folders" / label / "all.txt", tmp_path / f"{label}.txt"):
            write_lines(place, "{text} " + label)
    with refused(DataError, "bad/all.txt"):
        look_at(str(tmp_path / "in folders"))
    assert any("folder for each class" in note for note in look_at(str(tmp_path / "*.txt")).notes)
