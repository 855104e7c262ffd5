"""The words of the command line: names that are meant, headings of the help, tables on a terminal and in a pipe."""

import io
import re
from functools import partial
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from hf_ext_cli import output
from hf_ext_cli.main import COMMANDS, main
from hf_ext_cli.options import split_names
from hf_ext_cli.output import print_rows, print_table
from tests.kit import command_line

run = partial(command_line.run, code=None, prog_name="hf-ext")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["restor"], "hf-ext restore"),
        (["merg", "a.yaml"], "hf-ext merge"),
        (["emr", "verfy", "x"], "hf-ext emr verify"),
        # what was in a group once, or is in another
        (["dit", "sample", "model", "--out", "a.png"], "hf-ext sample"),
        (["precomput"], "hf-ext dit precompute"),
    ],
)
def test_the_command_that_was_meant_is_named(words, meant):
    result = run(*words)
    assert result.exit_code == 2
    assert result.stderr.endswith(f"did you mean {meant!r}?\n")


def test_a_name_like_no_other_gets_the_list():
    assert "no command 'hf-ext emr zzz'; the commands are add, " in run("emr", "zzz").stderr
    assert "no command 'hf-ext zzz'; the commands are restore, export, sample, classify" in run("zzz").stderr


def test_the_help_has_every_command_under_a_heading():
    text = run("--help").output
    places = [text.index(f"\n{heading}:\n") for heading in COMMANDS]
    assert places == sorted(places)
    assert "\nCommands:\n" not in text


HEADER, ROWS = ("task", "score"), [("a", "1.25"), ("[b]", "12.5")]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def screen(monkeypatch) -> Terminal:
    """A terminal of 60 columns in place of standard output."""
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    # Of the module alone: pytest puts its own standard output in place for each phase of a test.
    monkeypatch.setattr(output, "sys", SimpleNamespace(stdout=terminal, stderr=terminal))
    return terminal


def read(screen: Terminal) -> str:
    """What is seen, without the codes of colours."""
    return re.sub(r"\x1b\[[\d;]*m", "", screen.getvalue())


def test_in_a_pipe_lines_are_plain(capsys):
    print_table(HEADER, ROWS, title="Scores", legend="higher is better")
    print_rows([("source", "[x]"), ("a", 1)], title="What it is")
    assert capsys.readouterr().out == "task  score\na      1.25\n[b]    12.5\nsource  [x]\na       1\n"


def test_on_a_terminal_a_table_has_its_title_and_legend(screen):
    print_table(HEADER, ROWS, title="Scores", legend="higher is better")
    print_rows([("source", "[x]")], title="What it is")
    lines = read(screen).splitlines()
    assert lines[0].split() == ["Scores"] and "higher is better" in read(screen)
    assert [line.split()[1::2] for line in lines if line.startswith("│")] == [["a", "1.25"], ["[b]", "12.5"]]
    assert [line.split() for line in lines[-2:]] == [["What", "it", "is"], ["source", "[x]"]]


def test_columns_that_do_not_fit_stand_below_one_another_with_the_names(screen):
    header = ("task", *(f"number {index}" for index in range(7)))
    print_table(header, [("a task", *map(str, range(7)))], title="Scores", legend="higher is better")
    shown = read(screen)
    assert shown.count("a task") == 2 and shown.count("Scores") == shown.count("higher is better") == 1
    assert all(f"number {index}" in shown for index in range(7))
    assert max(map(len, shown.splitlines())) <= 60


def test_a_released_model_that_is_mistyped_is_named_without_asking_a_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mistyped = ["info", "spoken-digit"], ["restore", "denoise-colr", ".", "--out", "out"], ["sample", "cifra10"]
    for words in (*mistyped, ["info", "Denoise-Color"]):
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 2 and "did you mean" in result.output, (words, result.output)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (" a , b c ", ["a", "b c"]),
        ('"tench, Tinca tinca",hen', ["tench, Tinca tinca", "hen"]),
        ("what's,it", ["what's", "it"]),
        # As `$(cat names.txt)` gives them.
        ("a\nb, c\r\n", ["a", "b", "c"]),
        ('"a\nb",c', ["a\nb", "c"]),
        (None, []),
    ],
)
def test_names_stand_between_commas_and_in_quotes(text, names):
    assert split_names(text) == names


@pytest.mark.parametrize("text", ["", " ", ",", '""', "\n"])
def test_an_option_without_a_name_is_refused(text):
    with pytest.raises(click.UsageError):
        split_names(text)
