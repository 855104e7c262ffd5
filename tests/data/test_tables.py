"""Tables as people have them: of each of many small inputs, what must be understood, or refused."""

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
from tests.data.tables_testing import CASES, HOURS, MIXED, STATES, WORDS, Case, Y, rows
from tests.kit.own_data import open_apart
from tests.kit.refusals import refused


def write(tmp_path, case: Case):
    place = tmp_path / f"table{case.suffix}"
    place.write_bytes(case.text if isinstance(case.text, bytes) else case.text.encode(case.encoding))
    return place


def test_classes_of_texts_are_asked_for(tmp_path):
    columns = {"review": [f"a text with the number {number}" for number in range(24)], "mood": STATES}
    place = tmp_path / "texts.csv"
    place.write_text(rows(columns), encoding="utf-8")
    with refused(DataError, "--label mood", "--inputs review"):
        look_at(str(place))
    assert look_at(str(place), Hints(inputs=("review",))).classes == []
    assert look_at(str(place), Hints(label="mood")).classes == WORDS


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
    for name, expected in (
        ("semicolons and decimal commas", Y),
        ("decimal commas in quotes", Y),
        ("thousands and decimals", [1200000.5 + step for step in range(24)]),
        ("German thousands", [1200000.5 + step for step in range(24)]),
    ):
        frame = read_table(write(tmp_path, CASES[name])).frame
        assert frame["y"].tolist() == expected


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
SERIES = [
    [*CHANNELS],
    [f"{0.5 * index}" for index in range(16)],
    [f"{400 + 2.5 * index} nm" for index in range(16)],
    [f"h{index}:00" for index in range(16)],
    # One is left out.
    [name for name in CHANNELS if name != "ch5"],
]
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


def write_columns(folder, columns: dict) -> str:
    place = folder / "table.csv"
    pd.DataFrame(columns).to_csv(place, index=False)
    return str(place)


def check_series(place: str, steps: np.ndarray) -> None:
    survey = look_at(place)
    assert survey.train["rows"] == "series" and survey.classes == ["a", "b"]
    data = open_source(DataSource(path=place, rows="series"))
    np.testing.assert_allclose(np.stack(data["values"]), steps)


@pytest.mark.parametrize("names", SERIES)
def test_a_row_is_a_series_where_all_numbers_count(tmp_path, names):
    columns = dict(zip(names, NUMBERS.T, strict=False))
    check_series(write_columns(tmp_path, {**columns, "label": LABELS}), NUMBERS[:, : len(names)])


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", BESIDE)
def test_what_does_not_count_is_no_step(tmp_path, name, first):
    beside = {name: BESIDE[name]}
    columns = {**beside, **CHANNELS} if first else {**CHANNELS, **beside}
    place = write_columns(tmp_path, {**columns, "label": LABELS})
    check_series(place, NUMBERS)
    assert any(line.startswith(name) for line in look_at(place).left_out)


@pytest.mark.parametrize("name", EITHER)
def test_what_may_be_steps_or_channels_is_refused_with_the_flag(tmp_path, name):
    values, flag = EITHER[name]
    place = write_columns(tmp_path, {name: values, **CHANNELS, "label": LABELS})
    with refused(DataError, "ch1", "ch16", flag):
        look_at(place)
    option, column = flag.removeprefix("--").split()
    survey = look_at(place, Hints(**{option: column}))
    assert survey.train["rows"] == "positions" and survey.columns == [*CHANNELS]
    # Without it each row is a series.
    check_series(write_columns(tmp_path, {**CHANNELS, "label": LABELS}), NUMBERS)


@pytest.mark.parametrize("first", [True, False])
def test_a_few_that_count_among_many_are_refused(tmp_path, first):
    others = {name: NUMBERS[:, index] for index, name in enumerate(["age", "height", "weight", "pulse", "sugar"])}
    columns = {**others, **CHANNELS} if first else {**CHANNELS, **others}
    with refused(DataError, "ch1", "ch16", "--inputs"):
        look_at(write_columns(tmp_path, {**columns, "label": LABELS}))
    survey = look_at(write_columns(tmp_path, {**columns, "label": LABELS}), Hints(inputs=("ch1", "age")))
    assert survey.train["rows"] == "positions" and survey.columns == ["ch1", "age"]


def test_a_panel_with_times_needs_no_flag(tmp_path):
    place = write_columns(
        tmp_path, {"unit": np.repeat([1, 2], 12), "time": [*range(12)] * 2, **CHANNELS, "label": LABELS}
    )
    survey = look_at(place)
    assert (survey.train["series"], survey.train["time"], survey.columns) == ("unit", "time", [*CHANNELS])
