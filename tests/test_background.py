"""Trainings in the background: budgets of core time, marks, pauses, and going on."""

import json
import time
from types import SimpleNamespace

import psutil
import pytest

from .study_testing import EXAMPLES, module_loader

load = module_loader(EXAMPLES)
# Works until it has used so much core time in all; asked to end, it saves that and says "try again", as trainings do.
TRAINING = """
import pathlib, signal, sys, time
name, wanted = sys.argv[1], float(sys.argv[2])
place = pathlib.Path("runs", name + ".txt")
before = float(place.read_text()) if place.exists() else 0.0
def save(*_):
    place.write_text(str(before + time.process_time()))
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("begins at", before, flush=True)
while before + time.process_time() < wanted:
    pass
place.write_text(str(before + time.process_time()))
"""


@pytest.fixture
def background(load):
    return load("background")


def job(background, name, seconds, wanted=1000.0):
    return background.Job(name, lambda: ["-c", TRAINING, name, str(wanted)], seconds)


def work(background, folder, jobs, **options):
    """Runs jobs until each has its core seconds, or has ended by itself."""

    def find_jobs(core_seconds):
        # What a spent run has reached may be looked at: it has saved and ended.
        assert not [child for child in psutil.Process().children() if TRAINING in child.cmdline()]
        done = {path.stem for path in (folder / "runs").glob("*.txt") if float(path.read_text()) >= 0.1}
        return [job for job in jobs if core_seconds.get(job.name, 0.0) < job.core_seconds and job.name not in done]

    return background.work_through(folder, find_jobs, 1, folder / "pause", 0.02, **options)


def read_seconds(folder):
    return json.loads((folder / "core_seconds.json").read_text())


@pytest.mark.slow
def test_runs_end_at_their_budget_and_go_on(background, tmp_path):
    assert work(background, tmp_path, [job(background, "a", 0.05), job(background, "b", 0.05)]) == set()
    first = read_seconds(tmp_path)
    assert min(first.values()) >= 0.05
    # The next mark: what was saved is where it begins.
    assert work(background, tmp_path, [job(background, "a", first["a"] + 0.05)]) == set()
    second = read_seconds(tmp_path)
    assert second["a"] >= first["a"] + 0.05 and second["b"] == first["b"]
    # A run that was asked to end before it listened has saved nothing; the other ones have.
    starts = [float(line.split()[-1]) for line in (tmp_path / "runs" / "a.log").read_text().splitlines()]
    assert starts == sorted(starts)


@pytest.mark.slow
def test_a_run_may_end_by_itself_or_fail(background, tmp_path):
    fails = background.Job("c", lambda: ["-c", "raise SystemExit(3)"])
    assert work(background, tmp_path, [fails, job(background, "a", float("inf"), wanted=0.1)]) == {"c"}
    assert float((tmp_path / "runs" / "a.txt").read_text()) >= 0.1


def test_nothing_begins_while_it_is_paused(background, tmp_path, monkeypatch):
    (tmp_path / "pause").touch()
    looks = []

    def look(seconds):
        looks.append((tmp_path / "runs").exists())
        if len(looks) == 2:
            (tmp_path / "pause").unlink()
        time.sleep(seconds)

    monkeypatch.setattr(background, "time", SimpleNamespace(sleep=look, strftime=time.strftime))
    assert work(background, tmp_path, [job(background, "a", 0.05)]) == set()
    assert looks[:3] == [False, False, True] and read_seconds(tmp_path)["a"] >= 0.05


def test_runs_end_with_the_runner_and_their_time_is_counted(background, tmp_path):
    def interrupt(core_seconds):
        if core_seconds.get("a", 0.0) > 0.05:
            raise KeyboardInterrupt
        return [job(background, "a", float("inf"))]

    with pytest.raises(KeyboardInterrupt):
        background.work_through(tmp_path, interrupt, 2, tmp_path / "pause", 0.02)
    assert float((tmp_path / "runs" / "a.txt").read_text()) > 0.0
    assert read_seconds(tmp_path)["a"] > 0.05
