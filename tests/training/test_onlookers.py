"""What only looks on ends no run; a process that is killed or busy for too long is lost to the others."""

import json
import signal
import threading
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file
from transformers import TrainerCallback

from hf_ext.errors import UsageError
from hf_ext.training import Callback
from hf_ext.training.state import RunFolder
from tests.kit.refusals import refused

from .launching import fork_pairs
from .tiny import TinyTask, contents, evaluated, make_arguments, run

TRACKERS = "hf_ext.training.loop.start_trackers"


class Broken(Callback):
    """Raises whenever it is told something."""

    def on_log(self, step, *values):
        raise ZeroDivisionError(step)

    on_evaluate = on_begin = on_save = on_log


def broken(*_, **__):
    raise OSError("no answer")


def test_onlookers_that_raise_end_no_run(tmp_path, examples, monkeypatch, capsys):
    data = evaluated(examples)
    run(TinyTask(), make_arguments(tmp_path / "whole", data))
    capsys.readouterr()
    heard = []
    good = SimpleNamespace(name="good", log=lambda values, step: heard.append(step), finish=broken)
    bad = SimpleNamespace(name="bad", log=broken, log_images=broken, finish=broken)

    monkeypatch.setattr(TRACKERS, lambda accelerator, *_: setattr(accelerator, "trackers", [bad, good]))
    monkeypatch.setattr("PIL.Image.Image.save", broken)
    run(TinyTask(), make_arguments(tmp_path / "run", data), None, None, [Broken()])
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    # Each once when it fails first, and once with its count in the end.
    failed = [line for line in said if "data.eval reads" not in line]
    assert len(failed) == 10 and len({*failed}) == 10
    assert heard == [row["step"] for row in RunFolder(tmp_path / "run").read_metrics()]
    with pytest.raises(OSError):
        run(TinyTask(), make_arguments(tmp_path / "strict", data, strict_callbacks=True))


@pytest.mark.parametrize("place", [TRACKERS, "tests.training.tiny.TinyTask.sample_picture"])
def test_a_tracker_that_fails_to_start_and_a_picture_to_be_drawn_end_no_run(tmp_path, examples, monkeypatch, place):
    monkeypatch.setattr(place, broken)
    data = evaluated(examples)
    run(TinyTask(), make_arguments(tmp_path / "run", data, max_steps=2))
    assert RunFolder(tmp_path / "run").read_metrics()[-1]["step"] == 2
    with pytest.raises(OSError):
        run(TinyTask(), make_arguments(tmp_path / "strict", data, max_steps=2, strict_callbacks=True))


def test_several_trackers_are_checked_and_none_is_none(tmp_path, examples):
    one = ["tensorboard"]
    for told, trackers in (("none", []), ("tensorboard", one), ([*one, "none", *one], one)):
        assert make_arguments(tmp_path / "run", examples, report_to=told).trackers == trackers
    run(TinyTask(), make_arguments(tmp_path / "run", examples, report_to=["tensorboard"], max_steps=1))
    assert [*(tmp_path / "run" / "tensorboard").rglob("events*")]


class Spoiler(Callback):
    def on_evaluate(self, step, metrics, model):
        metrics.clear()


@pytest.mark.parametrize("given", [Spoiler(), [Spoiler], [None], [TrainerCallback()], [print]])
def test_what_is_no_list_of_callbacks_is_refused(tmp_path, examples, given):
    with refused(UsageError, "callbacks", "hf_ext.training.Callback"):
        run(TinyTask(), make_arguments(tmp_path / "run", examples), None, None, given)
    run(TinyTask(), make_arguments(tmp_path / "run", evaluated(examples), max_steps=1), None, None, [Spoiler()])


class SlowHub:
    """Takes the place of `push`: each waits until it may go on, and tells what it was given."""

    def __init__(self, monkeypatch, fails: bool = False, answers: int = 0):
        self.pushed, self.may_go, self.fails = [], threading.Semaphore(answers), fails
        monkeypatch.setattr("hf_ext.hub.publish.push", self.push)

    def push(self, folder, repo_id, *, private, commit_message):
        assert self.may_go.acquire(timeout=60)
        state = load_file(folder / "model.safetensors")
        self.pushed.append((commit_message, float(state["leave.bias"].sum())))
        if self.fails:
            raise OSError("no Hub")
        return SimpleNamespace(commit_url=repo_id)


def push_run(folder, examples, hub, strategy):
    class LastStep(Callback):
        """Lets the Hub answer after the last step."""

        def on_log(self, step, values):
            if step == 4 and "loss" in values:
                hub.copies = len([*(folder / ".push").glob("step-*")])
                hub.may_go.release(100)

    values = {"save_steps": 1, "eval_steps": 1, "logging_steps": 1, "max_steps": 4, "hub_model_id": "me/run"}
    arguments = make_arguments(folder, evaluated(examples), **values, hub_strategy=strategy)
    run(TinyTask(), arguments, None, None, [LastStep()])
    return [message for message, _ in hub.pushed]


@pytest.mark.parametrize(
    ("strategy", "pushed"),
    [
        # The second one waits and is replaced while the first one is under way.
        ("every_save", ["Model, step 1", "Model, step 3", "Model, step 4"]),
        ("end", ["Model, step 4"]),
        ("best", [f"Best model, step {step}" for step in (1, 2, 3, 4)]),
    ],
)
def test_a_slow_hub_holds_up_no_step_and_gets_the_newest(tmp_path, examples, monkeypatch, strategy, pushed):
    hub = SlowHub(monkeypatch)
    found = push_run(tmp_path / "run", examples, hub, strategy)
    # One that is pushed, and one that waits.
    assert hub.copies <= 2
    assert "Model, step 2" not in found and {*found} <= {*pushed}
    assert found[0] == pushed[0] and (strategy == "best" or found[-1] == pushed[-1])
    assert not [*(tmp_path / "run" / ".push").iterdir()]
    last = load_file(tmp_path / "run" / ("best" if strategy == "best" else "snapshot") / "model.safetensors")
    assert hub.pushed[-1][1] == float(last["leave.bias"].sum())


def test_a_push_that_fails_is_a_row_and_begins_anew_with_the_same_command(tmp_path, examples, monkeypatch, capsys):
    hub = SlowHub(monkeypatch, fails=True)
    push_run(tmp_path / "run", examples, hub, "end")
    rows = RunFolder(tmp_path / "run").read_metrics()
    assert [row["step"] for row in rows if "push_error" in row] == [4]
    assert "no Hub" in capsys.readouterr().err
    # A killed process leaves the same: what was to be pushed.
    assert [path.name for path in (tmp_path / "run" / ".push").iterdir()] == ["step-4"]
    hub = SlowHub(monkeypatch, answers=100)
    assert push_run(tmp_path / "run", examples, hub, "end") == ["Model, step 4"]
    assert not [*(tmp_path / "run" / ".push").iterdir()]


@pytest.mark.parametrize("strategy", ["end", "every_save", "best"])
def test_what_a_killed_process_did_not_begin_to_push_is_pushed_once(tmp_path, examples, monkeypatch, strategy):
    run(TinyTask(), make_arguments(tmp_path / "run", evaluated(examples), save_steps=1, eval_steps=1, max_steps=4))
    hub = SlowHub(monkeypatch, answers=100)
    # After its last state; then the same command.
    for _ in range(2):
        assert push_run(tmp_path / "run", examples, hub, strategy)[0].endswith("odel, step 4")
    assert len(hub.pushed) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "code", "lost"),
    # Who is busy is alive, and who gave up waiting for it was not killed. What the first does alone has no limit.
    [("kill", signal.SIGKILL, "process 1"), ("busy", 0, "another process"), ("patient", 0, "")],
)
def test_a_process_that_was_killed_or_is_busy_for_too_long_is_a_lost_one(tmp_path, examples, case, code, lost):
    fork_pairs("tests.training.two_processes", ([0, code], [str(tmp_path), case]))
    ended = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("ended-*.json"))]
    assert {each["kind"] for each in ended} == {"LostProcessError" if lost else ""}
    assert {each["process"] for each in ended} == {lost}
