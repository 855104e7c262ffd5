"""Lines of text that hold a label each are refused; plain lines stay plain texts."""

import pytest

from hf_ext.data.roles import Hints
from hf_ext.data.survey import look_at
from hf_ext.errors import DataError
from tests.kit.own_data import write_files
from tests.kit.refusals import refused

TEXTS = [f"this is the text of number {number}, of some words" for number in range(24)]
LABELS = [["good", "bad", "ugly"][number // 2 % 3] for number in range(24)]


def write(place, line: str) -> str:
    """A file with a line for each text."""
    values = enumerate(zip(TEXTS, LABELS, strict=True))
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
    place = write(tmp_path / name, line)
    with refused(DataError, name, fact):
        look_at(place)


@pytest.mark.parametrize("line", ["{bit} {text}", "{label}\t{text}"])
def test_a_flag_says_that_lines_are_plain(tmp_path, line):
    survey = look_at(write(tmp_path / "a.txt", line), Hints(inputs=("text",)))
    assert survey.columns == ["text"] and survey.classes == []


@pytest.mark.parametrize("line", ["{text}. And more.", "ANNA: {text}", "{number} {text}", "Well, {text}", "{label}"])
def test_plain_lines_stay_plain(tmp_path, line):
    survey = look_at(write(tmp_path / "a.txt", line))
    assert (survey.kind, survey.classes) == ("texts", [])


def test_a_file_of_lines_for_each_class_is_refused_or_said(tmp_path):
    for label in ("good", "bad"):
        for place in (tmp_path / "in folders" / label / "all.txt", tmp_path / f"{label}.txt"):
            write(place, "{text} " + label)
    with refused(DataError, "bad/all.txt"):
        look_at(str(tmp_path / "in folders"))
    assert any("folder for each class" in note for note in look_at(str(tmp_path / "*.txt")).notes)
