"""What only looks on ends no run; a process that fails is named by the others."""

import json
import signal

import pytest

from hf_ext.training import Callback
from hf_ext.training.callbacks import Onlookers

from .launching import fork_pairs
from .tiny import TinyTask, contents, make_arguments, run


class Broken(Callback):
    """Raises whenever it is told something."""

    def on_log(self, step, *values):
        raise ZeroDivisionError(step)

    on_evaluate = on_begin = on_save = on_log


def broken(*_, **__):
    raise OSError("no answer")


def test_onlookers_that_raise_end_no_run(tmp_path, examples, monkeypatch, capsys):
    data = {"train": {"path": str(examples)}, "eval": {"path": str(examples)}}
    run(TinyTask(), make_arguments(tmp_path / "whole", data))
    capsys.readouterr()
    monkeypatch.setattr("accelerate.Accelerator.log", broken)
    monkeypatch.setattr("hf_ext.training.loop.plot_curves", broken)
    monkeypatch.setattr("PIL.Image.Image.save", broken)
    run(TinyTask(), make_arguments(tmp_path / "run", data), None, None, [Broken()])
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    # Each once when it fails first, and once with its count in the end.
    assert len(said) == 8 and len({*said}) == 8
    with pytest.raises(OSError):
        run(TinyTask(), make_arguments(tmp_path / "strict", data, strict_callbacks=True))


def test_failures_are_counted_and_strict_ones_raised(capsys):
    onlookers = Onlookers(strict=False)
    for name in ("a", "b", "a"):
        with onlookers.guard(name):
            raise KeyError(name)
    assert onlookers.failures == {"a": 2, "b": 1}
    assert len(capsys.readouterr().err.splitlines()) == 2
    with pytest.raises(KeyError), Onlookers(strict=True).guard("a"):
        raise KeyError("a")
    with pytest.raises(KeyboardInterrupt), onlookers.guard("a"):
        raise KeyboardInterrupt


def endings(tmp_path, case, codes):
    fork_pairs("tests.training.failing", (codes, [str(tmp_path), case]))
    return {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("ended-*.json")}


def test_a_process_that_fails_is_named_by_the_others(tmp_path, examples):
    found = endings(tmp_path, "error", [0, 0])
    assert found["ended-1"]["kind"] == "ValueError"
    assert found["ended-0"]["kind"] == "FailedElsewhereError"
    lines = [line for line in found["ended-0"]["said"].splitlines() if "process 1 of 2" in line]
    assert len(lines) == 1 and "its disk is gone" in lines[0]
    # The note of that failure is not one of the next.
    assert not [*(tmp_path / "run" / "state").glob("*.json")]


@pytest.mark.slow
def test_a_process_that_was_killed_is_a_lost_one(tmp_path, examples):
    assert endings(tmp_path, "kill", [0, signal.SIGKILL])["ended-0"]["kind"] == "LostProcessError"


@pytest.mark.slow
def test_processes_wait_as_long_as_they_are_told(tmp_path, examples):
    kinds = {ending["kind"] for ending in endings(tmp_path, "busy", [0, 0]).values()}
    assert kinds == {"LostProcessError"}
