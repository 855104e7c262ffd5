"""Tables whose columns count: each row a series, channels of a step, or refused with the flag that decides."""

import numpy as np
import pandas as pd
import pytest

from hf_ext.data.opening import open_source
from hf_ext.data.roles import Hints
from hf_ext.data.source import DataSource
from hf_ext.data.survey import look_at
from hf_ext.errors import DataError
from tests.kit.refusals import refused

ROWS = 24
NUMBERS = np.random.default_rng(0).normal(size=(ROWS, 16)).round(3)
LABELS = ["a", "b"] * (ROWS // 2)


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
    "age": np.arange(ROWS) * 7 % 60,
    "sex": ["m", "f", "f"] * 8,
    # The series themselves are called so.
    "values": ["high", "low"] * 12,
    "clinic": [f"clinic {row}" for row in range(ROWS)],
}
# Columns beside them by which a row may be a step, the flag that decides.
EITHER = {
    "time": (np.arange(ROWS) * 0.1, "--time time"),
    "cycle": (np.arange(ROWS) + 1, "--time cycle"),
    "date": (pd.date_range("2024-01-15", periods=ROWS).astype(str), "--time date"),
    "subject": (np.repeat([1, 2, 3, 4], 6), "--series subject"),
}


def write(folder, columns: dict) -> str:
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
    check_series(write(tmp_path, {**columns, "label": LABELS}), NUMBERS[:, : len(names)])


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", BESIDE)
def test_what_does_not_count_is_no_step(tmp_path, name, first):
    beside = {name: BESIDE[name]}
    columns = {**beside, **CHANNELS} if first else {**CHANNELS, **beside}
    place = write(tmp_path, {**columns, "label": LABELS})
    check_series(place, NUMBERS)
    assert any(line.startswith(name) for line in look_at(place).left_out)


@pytest.mark.parametrize("name", EITHER)
def test_what_may_be_steps_or_channels_is_refused_with_the_flag(tmp_path, name):
    values, flag = EITHER[name]
    place = write(tmp_path, {name: values, **CHANNELS, "label": LABELS})
    with refused(DataError, "ch1", "ch16", flag):
        look_at(place)
    option, column = flag.removeprefix("--").split()
    survey = look_at(place, Hints(**{option: column}))
    assert survey.train["rows"] == "positions" and survey.columns == [*CHANNELS]
    # Without it each row is a series.
    check_series(write(tmp_path, {**CHANNELS, "label": LABELS}), NUMBERS)


@pytest.mark.parametrize("first", [True, False])
def test_a_few_that_count_among_many_are_refused(tmp_path, first):
    others = {name: NUMBERS[:, index] for index, name in enumerate(["age", "height", "weight", "pulse", "sugar"])}
    columns = {**others, **CHANNELS} if first else {**CHANNELS, **others}
    with refused(DataError, "ch1", "ch16", "--inputs"):
        look_at(write(tmp_path, {**columns, "label": LABELS}))
    survey = look_at(write(tmp_path, {**columns, "label": LABELS}), Hints(inputs=("ch1", "age")))
    assert survey.train["rows"] == "positions" and survey.columns == ["ch1", "age"]


def test_a_panel_with_times_needs_no_flag(tmp_path):
    place = write(tmp_path, {"unit": np.repeat([1, 2], 12), "time": [*range(12)] * 2, **CHANNELS, "label": LABELS})
    survey = look_at(place)
    assert (survey.train["series"], survey.train["time"], survey.columns) == ("unit", "time", [*CHANNELS])
