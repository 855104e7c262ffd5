"""Data whose words a library would take for something else: dates, classes with zeros, fractions."""

import contextlib
import errno
import io
import tarfile

import datasets
import numpy as np
import pandas as pd
import pytest
import soundfile
from huggingface_hub.errors import OfflineModeIsEnabled
from PIL import Image

from hf_ext.data import opening
from hf_ext.data.caching import CacheError
from hf_ext.data.files import read_recording
from hf_ext.data.opening import open_source
from hf_ext.data.roles import Hints
from hf_ext.data.source import DataSource
from hf_ext.data.survey import look_at
from hf_ext.errors import FAILED, DataError, classify
from hf_ext.tasks.signals import PixelTask
from tests.kit.refusals import refused

from .odd_data import recording_of, say, series_of, texts_of, write, write_table

DATES = ["2024-05-01", "2024-05-01T10:00:00Z", "2024-05-01 10:00:00"]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("form", ["lines", "list"])
def test_dates_in_json_stay_the_texts_that_they_are(tmp_path, form, streaming):
    rows = [{"text": date, "label": 0, "about": {"day": date, "days": [date]}} for date in DATES]
    path = write(tmp_path / "a.jsonl", rows, form)
    assert [*open_source(DataSource(path, streaming=streaming))] == rows
    # Only some of them, and in a folder with another file.
    write(tmp_path / "b.jsonl", [{**rows[0], "text": "none", "label": 2}], form)
    data = open_source(DataSource(str(tmp_path), streaming=streaming))
    assert sorted(row["text"] for row in data) == sorted([*DATES, "none"])


@pytest.mark.parametrize("held", ["", "\n\n", "[]", "a,b\n"])
@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "tsv", "txt"])
def test_an_empty_file_is_refused_in_words(tmp_path, ending, held):
    (tmp_path / f"a.{ending}").write_text(held)
    if ending == "txt" and held:
        return
    with refused(DataError, f"a.{ending}"):
        open_source(DataSource(str(tmp_path / f"a.{ending}")))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("ending", "label"), [("cls", b"1"), ("json", b'{"label": 1}')])
def test_sounds_in_a_tar_file_are_decoded_as_those_of_a_folder(tmp_path, ending, label, streaming):
    soundfile.write(tmp_path / "a.wav", np.linspace(-0.5, 0.5, 40), 8000, subtype="FLOAT")
    with tarfile.open(tmp_path / "train-000.tar", "w") as archive:
        for number in range(3):
            for name, held in (("wav", (tmp_path / "a.wav").read_bytes()), (ending, label)):
                about = tarfile.TarInfo(f"{number}.{name}")
                about.size = len(held)
                archive.addfile(about, io.BytesIO(held))
    names = {"wav": "audio", **({"cls": "label"} if ending == "cls" else {})}
    data = [*open_source(DataSource(str(tmp_path / "train-000.tar"), rename_columns=names, streaming=streaming))]
    assert len(data) == 3
    assert np.allclose(read_recording(data[2]["audio"], 8000), np.linspace(-0.5, 0.5, 40))


@pytest.mark.parametrize("name", ["metadata.jsonl", "about.jsonl"])
def test_dates_beside_pictures_stay_texts(tmp_path, name):
    for number in range(len(DATES)):
        Image.new("L", (8, 8), number).save(tmp_path / f"{number}.png")
    rows = [{"file_name": f"{number}.png", "date": date, "text": date} for number, date in enumerate(DATES)]
    write(tmp_path / name, rows, "lines")
    data = open_source(DataSource(str(tmp_path)))
    assert sorted(data["date"]) == sorted(data["text"]) == sorted(DATES)


@pytest.mark.parametrize(
    ("names", "value", "place"),
    [
        (["01", "02", "03"], 1, 0),
        (["01", "02", "10"], 10, 2),
        (["000", "001"], 1, 1),
        (["000", "001"], 0, 0),
        (["01", "02"], "02", 1),
        # Places, as before, where no name is this number.
        (["cat", "dog"], 1, 1),
        (["5", "1"], 1, 1),
    ],
)
def test_a_class_of_a_tar_file_is_the_name_with_its_zeros(names, value, place):
    assert PixelTask(num_labels=len(names), label_names=names).read_class(value) == place


@pytest.mark.parametrize(
    ("labels", "refuses"),
    [([0.13, 0.5, 0.77, 0.9], True), ([0.5, 1.5, 0.5, 1.5], False), ([1.0, 2.0, 3.0, 4.0], False), ("abab", False)],
)
@pytest.mark.parametrize("table", ["labels.csv", "labels.jsonl"])
def test_fractions_are_no_classes_of_pictures(tmp_path, labels, refuses, table):
    for number in range(4):
        Image.new("L", (8, 8), number).save(tmp_path / f"{number}.png")
    if table == "labels.csv":
        rows = [f"{number}.png,{label}" for number, label in enumerate(labels)]
        (tmp_path / table).write_text("\n".join(["file,label", *rows]))
    else:
        write(tmp_path / table, [{"file": f"{n}.png", "label": label} for n, label in enumerate(labels)], "lines")
    with refused(DataError, table, "label", str(labels[0])) if refuses else contextlib.nullcontext():
        assert len(open_source(DataSource(str(tmp_path))).features["label"].names) == len({*labels})


COUNTED = [[f"t{step}" for step in range(12)], [f"{step / 2} s" for step in range(22)]]
SWAPPED = [["t0", "t1", "t3", "t2", *COUNTED[0][4:]], COUNTED[0][::-1], [*COUNTED[0], "t01"]]
CLOCK = [f"h{hour % 24}:00" for hour in range(18, 30)]
SEVERAL = [[f"{name}{step}" for name in "xy" for step in range(4)], [f"t{step}" for step in range(-4, 5)]]


def steps_of(names: list[str]) -> dict:
    numbers = np.random.default_rng(0).normal(size=(12, len(names)))
    return {"patient": [*"abcdefghijkl"], **dict(zip(names, numbers.T, strict=True)), "label": ["ill", "well"] * 6}


@pytest.mark.parametrize("names", COUNTED)
def test_steps_that_a_program_sorted_as_texts_are_in_the_order_of_their_numbers(tmp_path, names):
    columns = steps_of(sorted(names))
    survey = look_at(write_table(tmp_path / "a.csv", columns))
    assert survey.train["rows"] == "series" and f"{names[0]} to {names[-1]}" in "; ".join(survey.notes)
    data = open_source(DataSource(**survey.train | {"hold_out": 0.0}))
    np.testing.assert_allclose(np.stack(data["values"]), np.stack([columns[name] for name in names], 1))


@pytest.mark.parametrize("names", [*SWAPPED, CLOCK, *SEVERAL])
def test_steps_in_another_order_or_of_several_channels_are_asked_for(tmp_path, names):
    place = write_table(tmp_path / "a.csv", steps_of(names))
    with refused(DataError, "--inputs NAME,NAME"):
        look_at(place)
    assert look_at(place, Hints(inputs=tuple(names))).train["rows"] == "positions"


@pytest.mark.parametrize("others", [["test"], ["validation"], ["test", "validation"]])
@pytest.mark.parametrize("make", [texts_of, series_of, recording_of])
def test_a_validation_split_chooses_and_a_test_split_is_told_with_what_no_training_knows(tmp_path, make, others):
    write_table(tmp_path / "train.csv", make("train", "ab"))
    for part in others:
        write_table(tmp_path / f"{part}.csv", make(part, "abc" if part == "test" else "ab"))
    survey = look_at(str(tmp_path))
    assert survey.classes == ["a", "b"] and survey.count in (1, 24)
    told, warned = ("; ".join(lines) for lines in (survey.left_out, survey.notes))
    assert ("--data.eval.split test" in told) == ("no training example is of c" in warned) == ("test" in others)
    assert ("hold_out" in survey.eval or survey.eval["split"] == "train[80%:]") != ("validation" in others)
    if "test" in others:
        assert len(open_source(DataSource(**{**survey.eval, "split": "test", "hold_out": 0.0}))) in (1, 24)


def test_a_validation_split_without_labels_and_a_test_split_of_pairs_are_told(tmp_path):
    write_table(tmp_path / "train.csv", texts_of("train", "ab"))
    write_table(tmp_path / "validation.csv", {"text": texts_of("validation", "ab")["text"]})
    assert "no evaluation example has a label" in "; ".join(look_at(str(tmp_path)).notes)
    for place in (tmp_path / "pairs" / part / side for part in ("train", "test") for side in ("lq", "hq")):
        place.mkdir(parents=True)
        Image.new("L", (32, 32)).save(place / "1.png")
    assert f"--data.eval.path {tmp_path / 'pairs' / 'test'}" in "; ".join(look_at(str(tmp_path / "pairs")).left_out)


TEXTS = {"premise": say("this"), "hypothesis": say("that")}


@pytest.mark.parametrize("ending", [".csv", ".jsonl"])
@pytest.mark.parametrize("label", ["label", "is_duplicate"])
def test_of_several_texts_the_user_chooses_one_or_a_pair(tmp_path, label, ending):
    place = tmp_path / f"a{ending}"
    frame = pd.DataFrame({**TEXTS, label: ["same", "other"] * 12})
    frame.to_csv(place, index=False) if ending == ".csv" else frame.to_json(place, orient="records", lines=True)
    with refused(DataError, "--inputs premise", "--inputs premise,hypothesis", *["--label"] * (label != "label")):
        look_at(str(place))
    for inputs in (("hypothesis",), ("premise", "hypothesis")):
        survey = look_at(str(place), Hints(label=label, inputs=inputs))
        assert survey.columns == [*inputs] and survey.classes == ["other", "same"]
    for inputs in (["premise", "nothing"], [*TEXTS][: 1 + (label != "label")], [*TEXTS, label]):
        told = contextlib.nullcontext() if len(inputs) == 1 else refused(DataError, "premise", "hypothesis")
        with told:
            look_at(str(place), Hints(inputs=tuple(inputs)))


@pytest.mark.parametrize(
    "beside",
    [
        say("x")[0].split(),
        ["Ann Lee", "Bo Ek", "Cy Ott"],
        [f"https://a.org/a-long-place/{n}" for n in range(24)],
        range(5),
    ],
)
def test_what_a_classifier_of_texts_leaves_out_is_said(tmp_path, beside):
    cells = [*beside] * 24
    columns = {"beside": cells[:24], "text": say("this"), "label": ["a", "b"] * 12}
    survey = look_at(write_table(tmp_path / "a.csv", columns))
    assert survey.columns == ["text"] and any(line.startswith("beside") for line in survey.left_out)


@pytest.mark.parametrize(("shops", "decided"), [(["a", "a", "a", "b", "b", "b"], "sku"), (["a", "b", "c"] * 2, None)])
def test_of_two_names_of_series_the_time_decides_where_it_differs_in_one_alone(tmp_path, shops, decided):
    columns = {"sku": list("uvwxyz"), "shop": shops, "label": list("abbaab")}
    frame = pd.DataFrame({name: [cell for cell in cells for _ in range(4)] for name, cells in columns.items()})
    frame = frame.assign(week=[*range(4)] * 6, y=np.random.default_rng(0).normal(size=24))
    if decided is None:
        frame["week"] = range(24)
    place = write_table(tmp_path / "a.csv", frame)
    if decided:
        assert look_at(place).train["series"] == decided
    else:
        with refused(DataError, "shop", "sku", "--series"):
            look_at(place)


def raising(error, cause=None):
    def fail(*words, **options):
        raise error from cause

    return fail


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("kind", ["in the way", "full", "full below", "too small"])
def test_a_cache_that_cannot_be_written_is_no_fault_of_the_data(tmp_path, monkeypatch, kind, parts):
    (place := tmp_path / "a.csv").write_text("text,label\na,b\n")
    (tmp_path / "cache").touch()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache" / "datasets"))
    if kind != "in the way":
        cause = datasets.exceptions.DatasetGenerationError("An error occurred"), FULL
        errors = {"full": (FULL,), "full below": cause, "too small": (OSError("Not enough disk space. Needed: 1 B"),)}
        monkeypatch.setattr(opening, "_build", raising(*errors[kind]))
    with refused(CacheError, "cache", "set HF_HOME or HF_DATASETS_CACHE") as caught:
        open_source(DataSource([{"path": str(place)}] * 2 if parts else str(place)), "data.train")
    assert classify(caught.value).exit_code == FAILED and "data.train" not in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (lambda *words, **options: False, "the Hub confirms no data set of that name"),
        (raising(OfflineModeIsEnabled("offline")), "the Hub was not asked for one, or gave no answer"),
        (raising(ConnectionError("refused")), "the Hub was not asked for one, or gave no answer"),
    ],
)
def test_the_hub_confirms_only_what_it_was_asked(monkeypatch, answer, told):
    monkeypatch.setattr(opening.HfApi, "repo_exists", answer)
    with refused(DataError, told):
        open_source(DataSource("nowhere"))
