"""Splits of data as people bring them: extra columns, groups, gaps and broken files put no example on both sides."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from datasets import Dataset

from hf_ext.data.found import keep_back
from hf_ext.data.opening import open_source
from hf_ext.data.roles import Hints, find_roles
from hf_ext.data.source import DataSource
from hf_ext.data.splits import choose, hold_out
from hf_ext.data.tables import read_table
from tests.kit.own_data import write_sounds


def require_apart(values: list, chosen: np.ndarray) -> None:
    """Some examples are held out, and none of their values is on the other side."""
    sides = [
        {str(value) for value, held in zip(values, chosen, strict=True) if held == side} for side in (True, False)
    ]
    assert chosen.any() and not sides[0] & sides[1]


TEXTS = [f"sentence number {number} with some words" for number in range(40)] * 4
LABELS = ["good", "bad"] * 80


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"Unnamed: 0": list(range(160))},
        {"date": [f"2024-01-{number % 28 + 1:02d}" for number in range(160)]},
        {"when": [f"2024-01-{number % 28 + 1:02d} 00:{number // 60:02d}:{number % 60:02d}" for number in range(160)]},
        {"comment": [f"remark {number} by somebody" for number in range(160)]},
        {"prompt": ["Tell the mood of this sentence, in a word, please."] * 160},
        {"about": [{"row": number} for number in range(160)]},
        {"review_id": [f"r{number}" for number in range(160)]},
        {"stars": [number % 7 for number in range(160)], "source": ["web", "app", "mail", "shop", "call"] * 32},
    ],
)
def test_equal_texts_are_on_one_side_whatever_stands_beside_them(extra):
    data = Dataset.from_dict({"text": TEXTS, "label": LABELS, **extra})
    require_apart(TEXTS, choose(data, 0.1, 0))


@pytest.mark.parametrize("change", ["full", "one empty label", "a rare class of one speaker", "speakers are numbers"])
def test_speakers_stay_together(change):
    labels = ["a" if number // 10 % 2 else "b" for number in range(100)]
    labels[7] = {"one empty label": None, "a rare class of one speaker": "rare"}.get(change, labels[7])
    speakers = [number % 10 if change == "speakers are numbers" else f"s{number % 10}" for number in range(100)]
    data = Dataset.from_dict(
        {"text": [f"words of example {n}" for n in range(100)], "speaker": speakers, "label": labels}
    )
    held = hold_out(data, 0.1, 0, measures=True)
    assert not {*held["speaker"]} & {*hold_out(data, 0.1, 0, measures=False)["speaker"]}
    assert None not in held["label"] and "rare" not in held["label"]


@pytest.mark.parametrize(
    ("texts", "extra"),
    [
        ([f"word{number % 40}" for number in range(160)], {"key": [f"{number:032x}" for number in range(160)]}),
        ([f"第{number % 40}个句子很长很长" for number in range(160)], {"key": [f"{n:032x}" for n in range(160)]}),
        ([[number % 40, 2.5] for number in range(160)], {"time": [[float(n), n + 1.0] for n in range(160)]}),
    ],
)
def test_equal_inputs_of_other_kinds_are_on_one_side(texts, extra):
    require_apart(texts, choose(Dataset.from_dict({"input": texts, "label": LABELS, **extra}), 0.1, 0))


def test_persons_come_before_their_sessions_and_the_unknown_are_no_group():
    rows = {
        "text": [f"words of example {n}" for n in range(100)],
        "session": [f"{n % 4}" for n in range(100)],
        "speaker": [None if n % 2 else f"s{n % 20}" for n in range(100)],
        "label": ["a" if n // 2 % 2 else "b" for n in range(100)],
    }
    for seed in range(8):
        chosen = choose(Dataset.from_dict(rows), 0.1, seed)
        sides = [{s for s, held in zip(rows["speaker"], chosen, strict=True) if held == side and s} for side in (0, 1)]
        assert 0 < chosen.sum() <= 30 and not sides[0] & sides[1]


def test_speakers_that_are_the_classes_separate_nothing_and_that_is_told():
    rows = {"text": [f"words of example {n}" for n in range(40)], "speaker": ["x", "y"] * 20, "label": ["x", "y"] * 20}
    assert 2 <= choose(Dataset.from_dict(rows), 0.1, 0).sum() <= 6
    (told,) = keep_back({"path": "no such folder"}, Dataset.from_dict(rows))["notes"]
    assert "speaker" in told


@pytest.mark.parametrize("layout", ["wide", "panel"])
@pytest.mark.parametrize("number", [False, True])
def test_groups_of_series_are_kept(tmp_path, layout, number):
    generator = np.random.default_rng(0)
    frame = pd.DataFrame(generator.normal(size=(80, 12)), columns=[f"t{index}" for index in range(12)])
    frame.insert(0, "speaker", [row // 8 if number else f"s{row // 8}" for row in range(80)])
    frame["label"] = ["a", "b"] * 40
    source = DataSource(path=str(tmp_path / "w.csv"), rows="series")
    if layout == "panel":
        rows = [(row, frame["speaker"][row], step, frame[f"t{step}"][row], frame["label"][row])
                for row in range(80) for step in range(12)]  # fmt: skip
        frame = pd.DataFrame(rows, columns=["recording", "speaker", "time", "v", "label"])
        source = DataSource(path=str(tmp_path / "w.csv"), rows="positions", series="recording", time="time")
    frame.to_csv(tmp_path / "w.csv", index=False)
    data = open_source(source)
    held, kept = (hold_out(data, 0.1, 0, measures=measures) for measures in (True, False))
    assert len(held) and not {*map(str, held["speaker"])} & {*map(str, kept["speaker"])}


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("label_id", np.arange(300) % 3),
        ("code", (np.arange(300) % 3) * 10.0),
        ("speaker", np.arange(300) // 30),
        ("patient_id", np.arange(300) // 30),
    ],
)
def test_numbers_that_name_the_class_or_a_group_are_no_inputs(tmp_path, column, values):
    rows = {"time": range(300), "x": np.random.default_rng(0).normal(size=300), column: values}
    pd.DataFrame({**rows, "label": np.tile(["walk", "sit", "run"], 100)}).to_csv(tmp_path / "t.csv", index=False)
    roles = find_roles(read_table(tmp_path / "t.csv"), Hints())
    assert roles.inputs == ["x"]
    assert column in roles.left_out or column == roles.series


def test_broken_sounds_are_not_held_out(tmp_path):
    write_sounds(tmp_path, ["a", "b"], 8, 8000, 0.25)
    for name in "ab":
        for index in range(30, 52):
            (tmp_path / name / f"{index}.wav").write_bytes(b"RIFFbroken" + bytes([index]))
    held = hold_out(open_source(DataSource(path=str(tmp_path))), 0.1, 0, measures=True)
    names = [Path(row["path"]).stem for row in held.with_format("arrow")["audio"].to_pylist()]
    assert names and all(int(name) < 30 for name in names)
