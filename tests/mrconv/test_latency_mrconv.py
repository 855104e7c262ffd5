"""examples/benchmarks/mrconv_latency.py measures the versions that it names, and refuses before it measures."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.refusals import refused
from tests.kit.studies import EXAMPLES, module_loader

load = module_loader(EXAMPLES / "benchmarks")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--before", "."], "--before .: there is no hf_ext in it; give the root of a checkout"),
        (["--tokens", "32"], "--contexts and --tokens: give 64 or more"),
        (["--contexts", "1024", "8"], "--contexts and --tokens: give 64 or more"),
    ],
)
def test_wrong_words_are_refused(load, monkeypatch, tmp_path, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    latency = load("mrconv_latency")
    monkeypatch.setattr(latency, "measure", lambda *_: pytest.fail("it measured"))
    monkeypatch.setattr(sys, "argv", ["mrconv_latency.py", *words])
    with pytest.raises(SystemExit):
        latency.main()
    assert message in capsys.readouterr().err


def test_the_folder_of_the_results_is_made_first(load, monkeypatch, tmp_path):
    latency, output = load("mrconv_latency"), tmp_path / "deep" / "er" / "result.json"
    monkeypatch.setattr(latency, "measure", lambda *_: sys.exit("measured" if output.parent.is_dir() else "too early"))
    monkeypatch.setattr(sys, "argv", ["mrconv_latency.py", "--output", str(output)])
    with refused(SystemExit, "measured"):
        latency.main()


def answering(text: str, status: int = 0) -> subprocess.Popen:
    """A process that says something and ends."""
    command = [sys.executable, "-S", "-c", f"import sys; print({text!r}, end=''); sys.exit({status})"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_process_that_ended_or_loaded_another_version_is_named(load):
    latency = load("mrconv_latency")
    # Where it ends before it is asked, its pipe is broken already, which is noticed as late as the pipe is closed.
    with contextlib.suppress(BrokenPipeError), answering("", 3) as worker:
        with refused(SystemExit, "status 3"):
            latency.ask(worker, "64")
        assert worker.poll() == 3
    said = f'{{"prompt_seconds": 1.0, "package": "{latency.PACKAGE.as_posix()}"}}\n'
    with answering(said) as worker:
        assert latency.begin_rows({"now": worker}, {"now": None}) == {"now": {"prompt_seconds": 1.0}}
    with answering(said) as worker, refused(SystemExit, "before"):
        latency.begin_rows({"before": worker}, {"before": Path("elsewhere")})
