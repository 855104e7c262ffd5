"""What reaches the terminal: any encoding, no commands of others, and what -q and -v change."""

import io
import json
import logging
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from PIL import Image

from hf_ext.progress import progress
from hf_ext.terminal import escape, guarded_streams
from hf_ext_cli import output
from hf_ext_cli.main import COMMANDS, MODULES, main
from hf_ext_cli.options import split_names
from hf_ext_cli.output import print_rows, print_table
from tests.cli.test_command_line import all_commands
from tests.kit import command_line
from tests.kit.own_data import write_pictures

run = partial(command_line.run, code=None, prog_name="hf-ext")


# A title, a colour, a place in the line, a C1 control and a mark that turns the direction of writing.
NAME = "\x1b]0;title\x07\x1b[31m\r\x9b2J\u202e\u061cgnp"
# And one that begins a line.
ODD = f"a\nforged{NAME}"
SETTINGS = ("HF_EXT_QUIET", "HF_EXT_DEBUG", "TRANSFORMERS_VERBOSITY")
ESCAPED = r"\u001b]0;title\u0007\u001b[31m\u000d\u009b2J\u202e\u061cgnp"


def bytes_of(monkeypatch, encoding, *words):
    """What a command writes to a standard output of an encoding, as Python opens it: strict."""
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding=encoding))
    with pytest.raises(SystemExit) as ended:
        main([*words])
    sys.stdout.flush()
    assert ended.value.code == 0
    return raw.getvalue()


SAID = ["models", "models --json", "recipes --json", "recipes semanir/denoise_color", "--help"]


@pytest.mark.parametrize("said", SAID)
def test_every_encoding_gets_all_that_is_said(monkeypatch, said):
    expected = bytes_of(monkeypatch, "utf-8", *said.split()).decode()
    for encoding in ("cp1252", "latin-1", "cp437", "cp949", "ascii", "utf-16"):
        found = bytes_of(monkeypatch, encoding, *said.split()).decode(encoding)
        if "--json" in said:
            assert json.loads(found) == json.loads(expected), encoding
        else:
            assert found == expected.encode(encoding, "backslashreplace").decode(encoding), encoding


def test_the_module_is_the_command_in_the_encoding_of_a_pipe():
    environment = {**os.environ, "PYTHONIOENCODING": "cp437", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-m", "hf_ext", "recipes"], env=environment, capture_output=True)
    assert done.returncode == 0 and not done.stderr and b"semanir/denoise_color" in done.stdout
    assert "…".encode() not in done.stdout
    wrong = subprocess.run([sys.executable, "-m", "hf_ext", "recipe"], env=environment, capture_output=True)
    assert wrong.returncode == 2 and b"Traceback" not in wrong.stderr and b"hf-ext" in wrong.stderr


@pytest.fixture
def odd_files(tmp_path, monkeypatch, offline):
    """Files of such a name that are not what they should be, and one picture."""
    monkeypatch.chdir(tmp_path)
    for ending in ("", ".png", ".wav", ".csv", ".jsonl", ".onnx", ".parquet"):
        Path(f"{ODD}{ending}").write_bytes(b"nothing")
    Path(f"folder{ODD}").mkdir()
    for name, content in {
        f"{ODD}.yaml": {"method": ODD, "output_dir": "run", "data": {"train": {"path": "./x"}}},
        f"merge{ODD}.yaml": {"base": ODD, "tasks": {"a": ODD}},
        f"folder{ODD}/config.json": {"model_type": ODD, "architectures": [ODD]},
        "run.yaml": {"method": "mrconv-text", "output_dir": "run", "data": {"train": {"path": f"./{ODD}"}}},
    }.items():
        Path(name).write_text(json.dumps(content))
    Image.new("RGB", (8, 8)).save("a.png")


@pytest.mark.skipif(sys.platform == "win32", reason="no such names there")
@pytest.mark.parametrize(
    "words",
    [
        *("info {}", "info --json folder{}", "info folder{}", "info {}.wav", "card folder{}", "card folder{} --check"),
        *("push folder{} {}", "push folder{} org/name", "recipes {}", "recipes semanir/denoise_color --out new{}"),
        *("merge --base base --task {} --out out", "merge --base {} --task a=folder{} --out out"),
        *("merge merge{}.yaml out", "emr verify folder{}", "emr {}", "{}"),
        *(f"init mrconv out --data {{}}.{kind}" for kind in ("jsonl", "parquet", "csv")),
        *("init semanir out --data {}", "restore denoise-color {}.png --out out", "restore folder{} a.png --out out"),
        *("restore denoise-color a.png --out {}", "export folder{} --onnx {}.onnx"),
        *("classify spoken-digits {}.wav", "classify folder{} {}.wav", "generate folder{} text"),
        *("sample folder{} --class-labels 1 --out a.png", "train {}.yaml", "train run.yaml"),
        *("evaluate folder{} --config {}.yaml", "data check {}.yaml"),
    ],
)
def test_no_name_commands_the_terminal(odd_files, words):
    result = run(*(word.replace("{}", ODD) for word in words.split()))
    assert result.exception is None or isinstance(result.exception, SystemExit)
    # Bars of libraries that other tests imported return to the beginning of their line.
    assert not {*"\x1b\x07\x9b\u202e"} & {*result.output} and "31m\r" not in result.output
    assert not [line for line in result.output.splitlines() if line.startswith("forged")]
    # Some are escaped by Python, as the text of a path in quotes.
    assert re.search(r"(u00|x)1b", result.output)


def make_screen(terminal: bool = True) -> io.StringIO:
    screen = io.StringIO()
    screen.isatty = lambda: terminal
    return screen


def test_a_name_reads_as_it_is_where_tables_have_styles(monkeypatch):
    screen = make_screen()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    with guarded_streams():
        print_rows([("name", NAME)], title=NAME)
        print_table(("name", NAME), [(NAME, "1")], title=NAME, legend=NAME)
    written = screen.getvalue()
    assert "\x1b[1m" in written and written.count(ESCAPED) >= 5
    assert not {"\x1b]", "\x1b[31m", "\x07", "\u202e"} & {written[place : place + size] for size in (1, 2, 5)
                                                         for place in range(len(written))}  # fmt: skip


@pytest.mark.parametrize("terminal", [False, True])
def test_a_name_writes_no_line_of_its_own(monkeypatch, terminal):
    screen = make_screen(terminal)
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("COLUMNS", "200")
    name = "a\nError: b\r\nc"
    with guarded_streams():
        print_rows([("name", name)])
        print_table(("name", "share"), [(name, "1")])
    lines = screen.getvalue().splitlines()
    assert not [line for line in lines if line.lstrip().startswith(("Error", "c"))]
    assert sum("a\\u000aError: b\\u000d\\u000ac" in line for line in lines) == 2


def test_json_stays_json_and_bars_move_and_words_between_do_not():
    assert json.loads(escape(json.dumps({"a": NAME}, ensure_ascii=False))) == {"a": NAME}
    stream = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stderr", stream)
        with guarded_streams():
            for text in ("\r 50%|", "\x1b[A\x1b[A", "\r", "\x1b[A and more", "a\tb\n"):
                sys.stderr.write(text)
    assert stream.getvalue() == "\r 50%|\x1b[A\x1b[A\r\\u001b[A and morea\tb\n"


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_program_without_streams_runs(monkeypatch, closed):
    """As a service starts it: Python then has None for them."""
    monkeypatch.setattr(sys, closed, None)
    with guarded_streams():
        print_rows([("name", "value")], to_stderr=closed == "stderr")
        progress(range(3)).close()
    assert getattr(sys, closed) is None


def test_every_command_has_both_options():
    found = all_commands()
    assert len(found) > len(MODULES)
    for path, command in found.items():
        if isinstance(command, click.Group):
            continue
        words = [word for option in command.params for word in option.opts]
        assert all(words.count(word) == 1 for word in ("-q", "--quiet", "-v", "--verbose")), path
        assert len(set(words)) == len(words), path


@pytest.fixture
def loudness(monkeypatch):
    """A command that tells what it finds set."""
    seen = {}

    def look():
        seen.update({name: os.environ.get(name) for name in SETTINGS})
        seen["level"] = logging.getLogger("hf_ext").getEffectiveLevel()
        warnings.warn("careful", stacklevel=1)
        logging.getLogger("hf_ext.somewhere").info("a detail")
        return []

    monkeypatch.setattr("hf_ext.hub.released.list_released", look)
    return seen


@pytest.mark.filterwarnings("default::UserWarning")
@pytest.mark.parametrize(
    ("option", "found"), [("", (None, None, None)), ("-q", ("1", None, "error")), ("-v", (None, "1", "info"))]
)
def test_what_both_options_set_lasts_for_one_command(loudness, monkeypatch, option, found):
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    logger = logging.getLogger("hf_ext")
    before = dict(os.environ), logger.level, list(logger.handlers)
    result = run("models", "--json", *option.split(), code=0)
    assert json.loads(result.stdout) == [] and tuple(loudness[name] for name in SETTINGS) == found
    assert ("a detail" in result.stderr) == (option == "-v")
    assert (dict(os.environ), logger.level, list(logger.handlers)) == before


def test_quiet_commands_print_results_only_and_verbose_errors_a_traceback(tmp_path):
    assert run("models", "-q", "-v").exit_code == run("models", "--verbose", "--quiet").exit_code == 2
    write_pictures(tmp_path / "photos", [""], 3)
    data = ["--data", tmp_path / "photos"]
    assert run("init", "semanir", tmp_path / "loud", *data).stdout.count("\n") == 7
    assert run("init", "semanir", tmp_path / "mine", "-q", *data).stdout == f"{tmp_path / 'mine' / 'semanir.yaml'}\n"
    result = run("info", "/nowhere/at/all", "-v")
    assert result.exit_code == 2 and "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1] == run("info", "/nowhere/at/all").stderr.splitlines()[-1]


def test_the_command_that_was_meant_is_named_and_a_name_like_no_other_gets_the_list():
    meant = {"restor": "restore", "merg a.yaml": "merge", "emr verfy x": "emr verify"}
    # What was in a group once, or is in another.
    meant |= {"dit sample model --out a.png": "sample", "precomput": "dit precompute"}
    for words, name in meant.items():
        assert run(*words.split(), code=2).stderr.endswith(f"did you mean 'hf-ext {name}'?\n")
    assert "no command 'hf-ext emr zzz'; the commands are add, " in run("emr", "zzz").stderr
    assert "no command 'hf-ext zzz'; the commands are restore, export, sample, classify" in run("zzz").stderr
    # The help has every command under a heading.
    text = run("--help").output
    places = [text.index(f"\n{heading}:\n") for heading in COMMANDS]
    assert places == sorted(places) and "\nCommands:\n" not in text


HEADER, ROWS = ("task", "score"), [("a", "1.25"), ("[b]", "12.5")]


@pytest.fixture
def read(monkeypatch) -> Callable[[], str]:
    """What is seen on a terminal of 60 columns in place of standard output, without the codes of colours."""
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    terminal = make_screen()
    # Of the module alone: pytest puts its own standard output in place for each phase of a test.
    monkeypatch.setattr(output, "sys", SimpleNamespace(stdout=terminal, stderr=terminal))
    return lambda: re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue())


@pytest.mark.parametrize("width", [0, 1, 5, 19, 20, 80])
def test_no_width_of_a_terminal_hides_anything(read, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    print_table(HEADER, ROWS, title="Scores", legend="higher is better")
    print_rows([("source", "[x]")], title="What it is")
    assert all(word in read() for word in ("Scores", "12.5", "[b]", "better", "source", "[x]"))


@pytest.mark.parametrize("words", ["models", "doctor --offline", "recipes", "info denoise-color"])
def test_a_list_is_printed_at_once_for_a_reader_of_its_first_line(monkeypatch, words):
    told, echo = list[str](), click.echo
    monkeypatch.setattr(click, "echo", lambda text="", **options: (told.append(text), echo(text, **options)))
    run(*words.split(), code=0)
    assert len(told) == 1 and "\n" in told[0]


def test_in_a_pipe_lines_are_plain(capsys):
    print_table(HEADER, ROWS, title="Scores", legend="higher is better")
    print_rows([("source", "[x]"), ("a", 1)], title="What it is")
    assert capsys.readouterr().out == "task  score\na      1.25\n[b]    12.5\nsource  [x]\na       1\n"


def test_on_a_terminal_a_table_has_its_title_and_legend(read):
    print_table(HEADER, ROWS, title="Scores", legend="higher is better")
    print_rows([("source", "[x]")], title="What it is")
    lines = read().splitlines()
    assert lines[0].split() == ["Scores"] and "higher is better" in read()
    assert [line.split()[1::2] for line in lines if line.startswith("│")] == [["a", "1.25"], ["[b]", "12.5"]]
    assert [line.split() for line in lines[-2:]] == [["What", "it", "is"], ["source", "[x]"]]
    # Columns that do not fit stand below one another with the names.
    header = ("task", *(f"number {index}" for index in range(7)))
    print_table(header, [("a task", *map(str, range(7)))], title="Scores", legend="higher is better")
    shown = read()[len("\n".join(lines)) :]
    assert shown.count("a task") == 2 and shown.count("Scores") == shown.count("higher is better") == 1
    assert all(f"number {index}" in shown for index in range(7))
    assert max(map(len, shown.splitlines())) <= 60


def test_a_released_model_that_is_mistyped_is_named_without_asking_a_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mistyped = ["info", "spoken-digit"], ["restore", "denoise-colr", ".", "--out", "out"], ["sample", "cifra10"]
    for words in (*mistyped, ["info", "Denoise-Color"]):
        assert "did you mean" in run(*words, code=2).output, words


def test_names_stand_between_commas_and_in_quotes():
    for text, names in (
        (" a , b c ", ["a", "b c"]),
        ('"tench, Tinca tinca",hen', ["tench, Tinca tinca", "hen"]),
        ("what's,it", ["what's", "it"]),
        # As `$(cat names.txt)` gives them.
        ("a\nb, c\r\n", ["a", "b", "c"]),
        ('"a\nb",c', ["a\nb", "c"]),
        (None, []),
    ):
        assert split_names(text) == names
    for text in ("", " ", ",", '""', "\n"):
        with pytest.raises(click.UsageError):
            split_names(text)


SHOWN = {
    0.0: "0.0000",
    -1.4e-06: "-1.4e-06",
    0.0046123: "0.004612",
    0.5: "0.5000",
    31.25: "31.2500",
    -75.5: "-75.5000",
}
SHOWN |= {123456.75: "123456.7500", float("inf"): "inf", float("nan"): "nan"}


@pytest.mark.parametrize(("value", "text"), SHOWN.items())
def test_a_small_number_is_not_shown_as_nothing(value, text):
    assert output.decimals(value) == text
    assert output.result_row({"metric": "mae", "dataset": "d", "value": value}) == ("mae", f"{text} on d")
