"""Progress of long work: lines in a pipe, a bar on a terminal, nothing after -q."""

import io
import time
from types import SimpleNamespace

import pytest
from tqdm import tqdm

from hf_ext import progress as module
from hf_ext.progress import progress, waiting


class Screen(io.StringIO):
    """Standard error as a person sees it."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch):
    """Time that passes when it is told to."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr("tqdm.std.time", lambda: clock.now)
    return clock


def work(clock, stream, monkeypatch, **options):
    """Ten parts of seven seconds each, with a word from somebody else after each."""
    monkeypatch.setattr("sys.stderr", stream)
    for _ in progress(range(10), "measuring", unit=" parts", **options):
        clock.now += 7
        tqdm.write("a word", file=stream)
    return stream.getvalue()


def test_a_pipe_gets_a_line_every_thirty_seconds(clock, monkeypatch):
    written = work(clock, io.StringIO(), monkeypatch)
    lines = [line for line in written.splitlines() if line != "a word"]
    assert lines == [
        "measuring: 50 % (5 of 10 parts), 7.00s/ parts, 00:35 left",
        "measuring: 100 % (10 of 10 parts), 7.00s/ parts, 00:00 left",
    ] and written.count("a word\n") == 10 and not {"\r", "\x1b"} & {*written}  # fmt: skip


def test_work_of_unknown_length_says_how_long_it_took(clock, monkeypatch):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with progress(unit="MP") as bar:
        clock.now += 61
        bar.update(1.23456)
        written = bar.fp.getvalue()
    assert written.startswith("1.23MP, ") and "01:01 so far\n" in written and bar.fp.getvalue() == written
    # Short work leaves no trace.
    monkeypatch.setattr("sys.stderr", io.StringIO())
    bar = progress(range(3), "short")
    assert [*bar] == [0, 1, 2] and bar.fp.getvalue() == ""


def test_a_terminal_has_a_bar(clock, monkeypatch):
    assert "\rmeasuring:  50%|" in work(clock, Screen(), monkeypatch)


@pytest.mark.parametrize("stream", [io.StringIO, Screen])
@pytest.mark.parametrize("how", ["quiet", "another process shows it"])
def test_nothing_is_shown(clock, monkeypatch, stream, how):
    monkeypatch.setenv("HF_EXT_QUIET", "1" if how == "quiet" else "0")
    written = work(clock, stream(), monkeypatch, shown=how == "quiet")
    assert written.replace("a word\n", "") == ""


@pytest.mark.parametrize(("stream", "told"), [(io.StringIO(), True), (Screen(), False)])
def test_a_wait_is_told_in_a_pipe_until_it_ends(stream, told, monkeypatch):
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(module, "_PAUSE", 0.01)
    with waiting("sending 3 files"):
        end = time.monotonic() + (30 if told else 0.1)
        while "\n" not in stream.getvalue() and time.monotonic() < end:
            time.sleep(0.01)
    written = stream.getvalue()
    assert written.startswith("sending 3 files: 0 s so far\n") if told else not written
    time.sleep(0.05)
    assert stream.getvalue() == written
