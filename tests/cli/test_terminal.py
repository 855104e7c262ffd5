"""What reaches the terminal: any encoding, no commands of others, and what -q and -v change."""

import io
import json
import logging
import os
import re
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import click
import pytest
from PIL import Image

from hf_ext.progress import progress
from hf_ext.terminal import escape, guarded_streams
from hf_ext_cli.main import MODULES, main
from hf_ext_cli.output import print_rows, print_table
from tests.cli.test_command_line import all_commands
from tests.kit import command_line
from tests.kit.own_data import write_pictures

run = partial(command_line.run, code=None)


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
    words = said.split()
    expected = bytes_of(monkeypatch, "utf-8", *words).decode()
    for encoding in ("cp1252", "latin-1", "cp437", "cp949", "ascii", "utf-16"):
        found = bytes_of(monkeypatch, encoding, *words).decode(encoding)
        if "--json" in words:
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
    Path(f"{ODD}.yaml").write_text(
        json.dumps({"method": ODD, "output_dir": "run", "data": {"train": {"path": "./x"}}})
    )
    Path(f"merge{ODD}.yaml").write_text(json.dumps({"base": ODD, "tasks": {"a": ODD}}))
    Path(f"folder{ODD}").mkdir()
    Path(f"folder{ODD}", "config.json").write_text(json.dumps({"model_type": ODD, "architectures": [ODD]}))
    Path("run.yaml").write_text(
        json.dumps({"method": "mrconv-text", "output_dir": "run", "data": {"train": {"path": f"./{ODD}"}}})
    )
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


def test_a_name_reads_as_it_is_where_tables_have_styles(monkeypatch):
    screen = io.StringIO()
    screen.isatty = lambda: True
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
    screen = io.StringIO()
    screen.isatty = lambda: terminal
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("COLUMNS", "200")
    name = "a\nError: b\r\nc"
    with guarded_streams():
        print_rows([("name", name)])
        print_table(("name", "share"), [(name, "1")])
    lines = screen.getvalue().splitlines()
    assert not [line for line in lines if line.lstrip().startswith(("Error", "c"))]
    assert sum("a\\u000aError: b\\u000d\\u000ac" in line for line in lines) == 2


def test_json_stays_json(monkeypatch):
    assert json.loads(escape(json.dumps({"a": NAME}, ensure_ascii=False))) == {"a": NAME}


def test_bars_move_and_words_between_do_not():
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
    "words, quiet, verbose, verbosity",
    [([], None, None, None), (["-q"], "1", None, "error"), (["-v"], None, "1", "info")],
)
def test_what_both_options_set_lasts_for_one_command(loudness, monkeypatch, words, quiet, verbose, verbosity):
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ), logging.getLogger("hf_ext").level, list(logging.getLogger("hf_ext").handlers)
    result = run("models", "--json", *words)
    assert result.exit_code == 0 and json.loads(result.stdout) == []
    assert loudness["HF_EXT_QUIET"] == quiet and loudness["HF_EXT_DEBUG"] == verbose
    assert loudness["TRANSFORMERS_VERBOSITY"] == verbosity
    assert ("a detail" in result.stderr) == (words == ["-v"])
    after = dict(os.environ), logging.getLogger("hf_ext").level, list(logging.getLogger("hf_ext").handlers)
    assert after == before


def test_quiet_commands_print_results_only_and_verbose_errors_a_traceback(tmp_path):
    assert run("models", "-q", "-v").exit_code == run("models", "--verbose", "--quiet").exit_code == 2
    write_pictures(tmp_path / "photos", [""], 3)
    data = ["--data", tmp_path / "photos"]
    assert run("init", "semanir", tmp_path / "loud", *data).stdout.count("\n") == 7
    assert run("init", "semanir", tmp_path / "mine", "-q", *data).stdout == f"{tmp_path / 'mine' / 'semanir.yaml'}\n"
    result = run("info", "/nowhere/at/all", "-v")
    assert result.exit_code == 2 and "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1] == run("info", "/nowhere/at/all").stderr.splitlines()[-1]
