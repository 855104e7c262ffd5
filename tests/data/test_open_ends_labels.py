"""Labels, marks and groups as people write them: each is understood, refused, or told."""

import json

import numpy as np
import pandas as pd
import pytest

from hf_ext.data.opening import open_source
from hf_ext.data.roles import Hints
from hf_ext.data.source import DataSource
from hf_ext.data.survey import look_at
from hf_ext.errors import DataError
from tests.kit.own_data import write_pictures
from tests.kit.refusals import refused

from .odd_data import say, series_of, texts_of, write, write_table
from .test_open_ends import CLASSES, LISTS, rows_of

TENTHS = [f"{n}.{n % 7}" for n in range(24)]
AMOUNTS = {
    "units": [f"{cell} mg/dl" for cell in TENTHS],
    "signs": [f"{cell}%" for cell in TENTHS],
    "money": [f"$ {n * n + 7}" for n in range(24)],
    "commas": [f"{cell.replace('.', ',')} µg/m3" for cell in TENTHS],
    "a limit": ["<5", *TENTHS[1:]],
    "a word": [*TENTHS[:20], "bad", *TENTHS[21:]],
    "a unit": [*TENTHS[:9], "9 kg", *TENTHS[10:]],
    "repeated": [f"8.{n % 9}%" for n in range(24)],
}


@pytest.mark.parametrize("make", [texts_of, series_of])
@pytest.mark.parametrize("labels", AMOUNTS.values(), ids=AMOUNTS)
def test_numbers_with_units_and_cells_that_spoil_values_are_no_classes(tmp_path, make, labels):
    place = write_table(tmp_path / "a.csv", {**make("train", "ab"), "label": labels})
    with refused(DataError, "is no number", "--classes"):
        look_at(place)
    assert len(look_at(place, Hints(values=False)).classes) == len({*labels})


NAMES = {
    "doses": ["0.5 mg", "1.5 mg", "3 mg"], "stars": ["1 star", "2 stars", "3 stars"], "ages": ["18-25", "<18", ">25"],
    "shares": ["5%", "10%", "20%", "50%"], "codes": ["01", "02", "17", "X1"], "rows": ["1A", "1B", "2A", "2B"],
    "sizes": ["640x480", "1280x720"], "limits": ["<5", ">5"], "decades": ["1980s", "1990s"], "places": ["1st", "2nd"],
    "NAICS": [*map(str, range(11, 24)), "31-33", "44-45", "48"],
    "ICD": [f"{n}.{n % 7}" for n in range(250, 262)] + ["V58.61"],
}  # fmt: skip


@pytest.mark.parametrize("make", [texts_of, series_of])
@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_classes_with_numbers_in_their_names_are_classes(tmp_path, make, names):
    labels = (names * 24)[:24]
    assert look_at(write_table(tmp_path / "a.csv", {**make("train", "ab"), "label": labels})).classes == sorted(names)


@pytest.mark.parametrize("mark", [-999, -9999, 9999])
@pytest.mark.parametrize("form", ["wide", "panel", "lists", "arrays", "files", "label", "classes"])
def test_numbers_that_may_mean_none_are_told(tmp_path, mark, form):
    values = np.random.default_rng(0).normal(size=(24, 10, 2)).round(3)
    # Of two channels whose numbers differ, that one which has the mark.
    values[..., 1] *= 1e5
    values[::5, 3, 0] = mark if form not in ("label", "classes") else 0
    wide, place = pd.DataFrame(values[..., 0], columns=[f"t{n}" for n in range(10)]), tmp_path / "a.csv"
    scores = [n % 5 + 0.5 for n in range(23)] + [mark]
    if form in ("wide", "label", "classes"):
        write_table(place, wide.assign(label={"label": scores, "wide": CLASSES, "classes": CLASSES}[form]))
    elif form == "panel":
        steps = {"series": np.repeat(range(24), 10), "time": [*range(10)] * 24, "y": values[..., 0].ravel()}
        write_table(place, {**steps, "label": np.repeat(CLASSES, 10)})
    elif form == "lists":
        place = write(tmp_path / "a.jsonl", rows_of(x=values[..., 0].tolist(), label=CLASSES))
    elif form == "arrays":
        np.savez(place := tmp_path / "a.npz", X=values, y=np.arange(24) % 2)
    else:
        place = tmp_path / "files"
        for n, label in enumerate(CLASSES):
            (place / label).mkdir(parents=True, exist_ok=True)
            pd.DataFrame(values[n], columns=["x", "y"]).to_csv(place / label / f"{n}.csv", index=False)
    told = [note for note in look_at(str(place)).notes if note.startswith(f"WARNING: {mark} in ")]
    assert len(told) == (form != "classes")


@pytest.mark.parametrize("name", ["patient", "subject_id", "user", "case", "Customer No"])
def test_a_group_beside_steps_has_a_name_that_keeps_it(tmp_path, name):
    steps = {f"t{n}": np.random.default_rng(n).normal(size=24) for n in range(10)}
    columns = {name: [f"p{n % 6}" for n in range(24)], **steps, "label": CLASSES}
    with refused(DataError, code := f"{name.partition('_')[0].partition(' ')[0]}_code"):
        look_at(write_table(tmp_path / "a.csv", columns))
    columns[code] = columns.pop(name)
    survey = look_at(write_table(tmp_path / "a.csv", columns))
    assert f"examples of one {code} stay together" in survey.notes and survey.lengths == [10] * 24


@pytest.mark.parametrize(
    "names",
    [
        [f"fold{n}" for n in range(1, 9)],
        ["patient_1", "patient_2"],
        ["Session 1", "Session 2"],
        ["speaker1", "speaker2"],
    ],
)
@pytest.mark.parametrize("kind", ["pictures", "files", "column"])
def test_classes_that_are_named_as_groups_are_doubted(tmp_path, names, kind):
    if kind == "pictures":
        write_pictures(tmp_path, names, 6)
    for n, name in enumerate(names * 6 if kind == "files" else ()):
        (tmp_path / name).mkdir(exist_ok=True)
        np.save(tmp_path / name / f"{n}.npy", LISTS[n % 24])
    if kind == "column":
        write_table(tmp_path / "a.csv", {"text": say("this"), "label": (names * 24)[:24]})
    notes = look_at(str(tmp_path)).notes
    assert [names[0] in note for note in notes if "as groups" in note] == [True] * (names[0] != "speaker1")


def test_shards_whose_columns_have_another_order_are_read(tmp_path):
    write_table(tmp_path / "1.csv", texts_of("this", "ab"))
    columns = texts_of("that", "ab")
    write_table(tmp_path / "2.csv", {name: columns[name] for name in reversed(columns)})
    data = open_source(DataSource(str(tmp_path)))
    assert len(data) == 48 and {*data["label"]} == {"a", "b"}


def test_rows_in_a_key_of_json_are_refused(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"version": "1.0", "data": rows_of(text=say("this"), label=CLASSES)}))
    with refused(DataError, "'data'", "24", "save this list alone"):
        look_at(str(tmp_path / "a.json"))


def test_few_whole_numbers_that_measure_are_values_as_all_are(tmp_path):
    place = write_table(tmp_path / "a.csv", {**series_of("train", "ab"), "label": [n * n + 18 for n in range(24)]})
    survey = look_at(place)
    assert survey.values and not [note for note in survey.notes if note.startswith("WARNING")]
