"""Runs that are killed at any moment go on, and end as if nothing had happened; one run folder, one training."""

import contextlib
import errno
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from hf_ext import files
from hf_ext.files import replace_folder
from hf_ext.training import loop, state
from hf_ext.training.state import RunFolder, read_manifest
from hf_ext.training.stopping import EXIT_CODE
from tests.kit.killing import killed
from tests.kit.refusals import refused

from .stoppable import finish, start
from .tiny import ScoredTask, TinyModel, TinyTask, contents, evaluated, make_arguments, prepare, run

SETTINGS = {"max_steps": 40, "save_steps": 2, "eval_steps": 3, "logging_steps": 3}


def assert_states_complete(folder: Path) -> None:
    """Every state that is there under its final name can be read."""
    names = {"model.safetensors", "optimizer.bin", "custom_checkpoint_2.pkl", "manifest.json"}
    for path in folder.glob("state/step-*[0-9]"):
        assert {file.name for file in path.iterdir()} >= names, path
        assert torch.load(path / "custom_checkpoint_0.pkl")["step"] == int(path.name.split("-")[1])
        assert read_manifest(path) is not None


def assert_snapshots_load(folder: Path) -> None:
    for name in ("snapshot", "best"):
        found, earlier = folder / name, folder / f".{name}.old"
        if found.exists() or earlier.exists():
            TinyModel.from_pretrained(found if found.exists() else earlier)


def leftovers(folder: Path) -> list[Path]:
    """What a writer that was killed left behind."""
    return [*folder.glob("**/*.tmp*"), *folder.glob(".*.old")]


def read_times(folder: Path, pattern: str) -> dict[Path, int]:
    """When the files of this pattern were written."""
    return {path: path.stat().st_mtime_ns for path in folder.glob(pattern)}


def kill_when(process, folder: Path, pattern: str, pause: float) -> bool:
    """Kills the process a pause after a file of this pattern appeared or changed; whether it did."""
    before = read_times(folder, pattern)
    while process.is_alive():
        with contextlib.suppress(FileNotFoundError):
            if read_times(folder, pattern).items() - before.items():
                time.sleep(pause)
                process.kill()
                process.join()
                return process.exitcode == -signal.SIGKILL
        time.sleep(0.0005)
    return False


@pytest.mark.slow
def test_killed_again_and_again(tmp_path, examples, alone):
    moments = ["metrics.jsonl", "state/step-*.tmp", ".best.tmp-*", "metrics.jsonl", ".snapshot.tmp-*"]
    whole, killed, rng = tmp_path / "whole", tmp_path / "killed", random.Random(1)
    finish(start(whole, examples, **SETTINGS))
    kills = 0
    for moment in moments:
        while True:
            (process,) = start(killed, examples, **SETTINGS)
            # At a random moment after the training began, or while a file is being written.
            hit = kill_when(process, killed, moment, rng.random() * 0.6 if moment == "metrics.jsonl" else 0)
            kills += hit
            if not hit:
                finish([process])
            assert_states_complete(killed)
            assert_snapshots_load(killed)
            if kills:
                # Later kills may find the run complete.
                break
            # A machine that is busy elsewhere killed too late: anew, until there is something to continue.
            shutil.rmtree(killed)
    finish(start(killed, examples, **SETTINGS))
    assert contents(killed) == contents(whole)
    assert not leftovers(killed)


@pytest.mark.parametrize(
    ("processes", "number"), [(1, signal.SIGKILL), pytest.param(2, signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_signal_in_an_evaluation_costs_no_step(tmp_path, examples, alone, processes, number):
    """A kill loses the scores; of two processes, of which one gets a signal, the scores of both are kept."""
    whole, ended, changes = tmp_path / "whole", tmp_path / "ended", {"max_steps": 6, "eval_steps": 3}
    finish(start(whole, examples, processes, **changes))
    code = -number if number == signal.SIGKILL else EXIT_CODE
    assert finish(start(ended, examples, processes, **changes, signal=number), code) == code
    assert RunFolder(ended).saved_steps() == [3]
    progress = torch.load(ended / "state" / "step-3" / state.PROGRESS)
    scored = {index for rows in progress["scored"].values() for index in rows}
    assert progress["owes_evaluation"] and (scored == set() if number == signal.SIGKILL else scored >= {0, 1, 2, 3})
    finish(start(ended, examples, processes, **changes))
    assert contents(ended) == contents(whole)


# Of each evaluation: the state before it, best/ if it is that, the last snapshot, and the progress after it.
@pytest.mark.parametrize("renames", range(6))
def test_each_state_is_written_once_and_a_kill_around_it_loses_nothing(tmp_path, examples, monkeypatch, renames):
    written, save_state = [], loop.save_state
    monkeypatch.setattr(loop, "save_state", lambda *given: (written.append(given[2]), save_state(*given)))

    def train_in(name):
        task = ScoredTask()
        monkeypatch.setattr(ScoredTask, "scores", [0.5])
        changes = {"max_steps": 4, "eval_steps": 1, "save_steps": 90}
        run(task, make_arguments(tmp_path / name, evaluated(examples), **changes))
        return contents(tmp_path / name)

    whole = train_in("whole")
    # The best, and the last two.
    assert written == [1, 2, 3, 4] and RunFolder(tmp_path / "whole").saved_steps() == [1, 3, 4]
    with killed((files, "replace_folder"), after=renames):
        train_in("killed")
    assert train_in("killed") == whole


@pytest.mark.parametrize("renames", range(3))
def test_a_snapshot_survives_a_kill_between_its_renames(tmp_path, examples, monkeypatch, renames):
    """The calls that change names in replace_folder, each the last one that happens."""
    output = tmp_path / "run"
    arguments = make_arguments(output, examples, max_steps=2)
    run(TinyTask(), arguments)
    expected = (output / "snapshot" / "model.safetensors").read_bytes()
    newer = output / ".snapshot.tmp-01234567"
    shutil.copytree(output / "snapshot", newer)
    with monkeypatch.context() as patch:
        patch.setattr(files, "exchange_folders", lambda first, second: False)
        with killed((files.os, "replace"), (files.shutil, "rmtree"), after=renames):
            replace_folder(newer, output / "snapshot")
    with RunFolder(output) as folder:
        prepare(folder, arguments)
    assert (output / "snapshot" / "model.safetensors").read_bytes() == expected
    TinyModel.from_pretrained(output / "snapshot")
    assert not leftovers(output)


def test_a_kill_before_anything_was_saved_leaves_a_folder_that_can_be_used(tmp_path, examples):
    arguments = make_arguments(tmp_path / "run", examples, max_steps=1)
    for place in ((state.os, "replace"), (state.Path, "mkdir")):
        with RunFolder(tmp_path / "run") as folder, killed(place, after=0):
            prepare(folder, arguments)
    run(TinyTask(), arguments)
    assert RunFolder(tmp_path / "run").saved_steps() == [1]


def test_a_second_holder_is_refused_until_the_first_lets_go(tmp_path):
    arguments = make_arguments(tmp_path, {})
    with RunFolder(tmp_path) as first:
        prepare(first, arguments)
        prepare(first, arguments)
        # It gives back nothing that it does not have.
        for _ in range(2):
            with RunFolder(tmp_path) as second, refused(ValueError, tmp_path):
                prepare(second, arguments)
        assert first.lock.is_locked
    with RunFolder(tmp_path) as second:
        prepare(second, arguments)


def test_a_disk_without_locks_is_named(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)

    def fail():
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(folder.lock, "acquire", fail)
    with refused(OSError, tmp_path / ".lock", "output_dir"):
        prepare(folder, make_arguments(tmp_path, {}))
    assert not folder.lock.is_locked


def test_a_killed_holder_frees_the_folder_though_its_loaders_live(tmp_path):
    ready, done = os.pipe(), os.pipe()
    arguments = make_arguments(tmp_path, {})
    holder = os.fork()
    if not holder:
        folder = RunFolder(tmp_path)
        prepare(folder, arguments)
        if not os.fork():
            # A loader process, which has inherited what the training had open.
            os.write(ready[1], b"1")
            os.read(done[0], 1)
            os._exit(0)
        signal.pause()
    os.read(ready[0], 1)
    with refused(ValueError, tmp_path):
        prepare(RunFolder(tmp_path), arguments)
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    with RunFolder(tmp_path) as folder:
        prepare(folder, arguments)
    os.write(done[1], b"1")
