"""`make gpu`: the runner on parts made up for it, a training that goes on, the bundle; the rehearsal is slow."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.kit import warm_python
from tests.kit.gpu import GPU, ROOT, load
from tests.kit.refusals import refused

run, bundle = load("run"), load("bundle")
HEAD = {"commit": "a" * 40, "dirty": False}
# A part whose cases do what a file beside its result says.
PART = """
import json, os, subprocess, sys, time, torch
from pathlib import Path
from parts import read_words, run_part

words = read_words()
plan = json.loads(words.output.with_suffix(".plan").read_text())

def case(name):
    def measure():
        with words.output.with_suffix(".calls").open("a") as file:
            file.write(f"{os.getpid()} {name}\\n")
        if plan[name] == "hang":
            child = subprocess.Popen(["sleep", "1000"])
            words.output.with_suffix(".hanging").write_text(str(child.pid))
            time.sleep(1000)
        if plan[name] == "lose":
            raise torch.AcceleratorError("the device is lost")
        if plan[name] == "die":
            os.kill(os.getpid(), 9)
        if plan[name] == "fail":
            raise ValueError(f"{name} is wrong")
        return {"one": {"median": 1.0, "min": 0.5, "max": 2.0, "bytes": 2**20}, "two": {"seen": True}}
    return measure

run_part(words, {name: case(name) for name in plan})
"""


class Parts:
    """Made-up parts in a folder of results."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder = folder
        self.script = folder / "part.py"
        self.script.write_text(PART)
        self.plans: dict[str, dict[str, str]] = {}
        # A copy of the tree without git, whose commit the bundle's lock says.
        self.root = folder / "tree"
        (self.root / ".gpu").mkdir(parents=True)
        (self.root / ".gpu" / "LOCK").write_text(json.dumps({**HEAD, "files": {}}))
        monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(folder))
        monkeypatch.setenv("PYTHONPATH", str(GPU))

    def plan(self, name: str, **cases: str) -> None:
        """Sets what the cases of a part do from now on."""
        self.plans[name] = cases
        (self.folder / f"{name}.plan").write_text(json.dumps(cases))

    def run(self, *words: str) -> int:
        """The exit code of `make gpu DEVICE=cpu`."""
        parts = {part: [str(self.script)] for part in self.plans}
        return run.main(["--device", "cpu", "--results", str(self.folder), *words], parts, self.root)

    def result(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / f"{name}.json").read_text())

    def calls(self, name: str) -> list[list[str]]:
        """Process and case of every measurement since the last look."""
        file = self.folder / f"{name}.calls"
        lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        file.unlink(missing_ok=True)
        return lines


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Parts:
    return Parts(tmp_path, monkeypatch)


@pytest.mark.slow
def test_a_part_that_fails_says_why_and_the_others_go_on(parts: Parts, capsys: pytest.CaptureFixture[str]):
    parts.plan("bad", first="work", second="fail", third="work")
    parts.plan("good", only="work")
    assert parts.run() == 1
    bad, good = parts.result("bad"), parts.result("good")
    assert (bad["complete"], good["complete"]) == (False, True) and "error" not in good
    assert "second is wrong" in bad["error"] and "second is wrong" in capsys.readouterr().out
    keys = [row["key"] for row in bad["rows"]]
    assert keys == ["first / one", "first / two", "second", "third / one", "third / two"]
    assert good["device"].startswith("CPU") and good["commit"] == "a" * 40 and good["versions"]["torch"]
    table = (parts.folder / "README.md").read_text()
    assert "| only / one |  | 1e+03 (500 to 2e+03) | 1.0 |" in table and "second is wrong" in table
    assert [name for _, name in parts.calls("bad")] == ["first", "second", "third"]
    parts.calls("good")

    # The same commit and device: what is complete is skipped, what failed is tried again, alone.
    parts.plan("bad", first="work", second="work", third="work")
    assert parts.run() == 0
    assert [name for _, name in parts.calls("bad")] == ["second"] and parts.calls("good") == []
    assert parts.result("bad")["complete"] and "error" not in parts.result("bad")

    # Of another commit, another device or changed code nothing is left, but for trainings, whose visits add up.
    path = parts.folder / "good.json"
    head = {name: good[name] for name in ("device", "versions", "commit", "dirty")}
    for other in ({"commit": "b" * 40}, {"device": "another"}, {"dirty": True}):
        path.write_text(json.dumps(good))
        assert run.is_done(path, head) and not run.is_done(path, {**head, **other})
        for keeps, rows in ((True, good["rows"]), (False, [])):
            path.write_text(json.dumps(good))
            assert run.begin(path, {**head, **other}, keeps)["rows"] == rows
            assert not json.loads(path.read_text())["complete"]


def stop_when_hanging(parts: Parts, name: str) -> Callable[..., int]:
    """In place of waiting for the limit: until the part hangs."""
    waited = subprocess.Popen.wait

    def wait(process: subprocess.Popen, timeout: float | None = None) -> int:
        file = parts.folder / f"{name}.hanging"
        while timeout is not None and process.poll() is None:
            if file.exists() and file.read_text():
                raise subprocess.TimeoutExpired("part", timeout)
            time.sleep(0.05)
        return waited(process)

    return wait


def is_running(process: str) -> bool:
    status = Path(f"/proc/{process}/stat")
    # Killed and not yet collected by whoever collects orphans is as good as gone.
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
def test_a_part_killed_at_its_limit_keeps_its_rows_and_goes_on(parts: Parts, monkeypatch: pytest.MonkeyPatch):
    parts.plan("slow", first="work", second="hang", third="work")
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "wait", stop_when_hanging(parts, "slow"))
        assert parts.run() == 0
        parts.plan("both", first="fail", second="hang")
        patch.setattr(subprocess.Popen, "wait", stop_when_hanging(parts, "both"))
        assert parts.run("--part", "both") == 1
        assert parts.result("both")["error"] == "first: ValueError: first is wrong"
        del parts.plans["both"]
    found = parts.result("slow")
    assert not found["complete"] and "error" not in found and len(found["rows"]) == 2
    child = (parts.folder / "slow.hanging").read_text()
    deadline = time.monotonic() + 60
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)
    assert "slow: not complete" in (parts.folder / "README.md").read_text()

    parts.calls("slow")
    parts.plan("slow", first="work", second="work", third="work")
    assert parts.run() == 0
    assert [name for _, name in parts.calls("slow")] == ["third", "second"]
    assert parts.result("slow")["complete"] and parts.result("slow")["seconds"] > found["seconds"]


def test_a_part_that_brings_nothing_until_its_limit_has_failed(parts: Parts, monkeypatch: pytest.MonkeyPatch):
    parts.plan("stuck", first="hang")
    monkeypatch.setattr(subprocess.Popen, "wait", stop_when_hanging(parts, "stuck"))
    assert parts.run() == 1
    assert parts.result("stuck")["error"].startswith("no row within 480 seconds")


@pytest.mark.slow
def test_a_process_that_lost_the_device_or_died_is_replaced(parts: Parts):
    parts.plan("lost", first="lose", second="work", third="die", fourth="work")
    assert parts.run() == 1
    calls = parts.calls("lost")
    assert [name for _, name in calls] == ["first", "second", "third", "fourth"]
    assert len({process for process, _ in calls}) == 3
    error = parts.result("lost")["error"]
    assert error == "first: AcceleratorError: the device is lost; third: the process was ended by signal 9"


def test_without_a_device_nothing_runs(parts: Parts, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert run.main(["--results", str(parts.folder)]) == 2
    assert "make gpu DEVICE=cpu" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        parts.run("--part", "unknown")
    assert "allowed: " in capsys.readouterr().err


SCRIPT = """
import os, runpy, sys
del sys.argv[0]
sys.path[:0] = [os.path.dirname(sys.argv[0]), os.path.dirname(os.path.dirname(sys.argv[0]))]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_visits_of_a_training_add_up(tmp_path: Path):
    output = tmp_path / "results" / "train-scifar.json"
    words = ["--task", "scifar", "--device", "cpu", "--tiny", "--output", str(output)]
    # No time is left after the first step, so that a visit ends where a state is saved, every second step of four.
    command = [sys.executable, "-c", SCRIPT, str(GPU / "train.py"), *words, "--limit", "0"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "DATA": ""}
    first = warm_python.run(command, env=environment, cwd=ROOT)
    assert first.returncode == 4, first.stderr[-3000:]
    second = warm_python.run(command, env=environment, cwd=ROOT)
    assert second.returncode == 0, second.stderr[-3000:]
    rows = json.loads(output.read_text())["rows"]
    assert [row["case"] for row in rows] == ["steps 0 to 2", "steps 2 to 4"]
    assert all(row["samples_per_second"] > 0 and row["largest_state_file"] < 16 * 2**20 for row in rows)
    assert rows[1]["eval_accuracy"] >= 0
    # Nothing in the state depends on where it lies: another machine goes on from it.
    arguments = (output.parent / "state" / "train-scifar" / "args.json").read_text()
    assert str(tmp_path) not in arguments


@pytest.mark.parametrize("task", ["denoise", "scifar", "cifar10"])
def test_states_of_the_trainings_fit(task: str):
    """AdamW's two moments are the largest file; what comes back from a visit has 16 MiB a file at most."""
    import argparse

    import torch

    from hf_ext.training import build_task

    train = load("train")
    data = {"train": {"path": "data"}, "eval": {"path": "data", "split": "test"}}
    arguments = train.make_arguments(task, data, argparse.Namespace(tiny=False))
    with torch.device("meta"):
        model = build_task(arguments).build_model(arguments.model, None)
    assert 8 * sum(value.numel() for value in model.parameters()) < 15 * 2**20


# In place of the programs pip and build: a wheel of so many bytes, and the words that they were called with.
PROGRAM = """
import json, sys
from pathlib import Path

folder = sys.argv[sys.argv.index("--{option}") + 1]
Path(folder, "{name}.whl").write_bytes(b"w" * {count})
Path(__file__).with_name("words.json").write_text(json.dumps(sys.argv[1:]))
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a pip and a build that make wheels up."""
    for program, option, name, count in (("pip", "dest", "transformers", 2**20), ("build", "outdir", "hf_ext", 1)):
        (tmp_path / "programs" / program).mkdir(parents=True)
        text = PROGRAM.format(option=option, name=name, count=count)
        (tmp_path / "programs" / program / "__init__.py").touch()
        (tmp_path / "programs" / program / "__main__.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "programs"))
    return tmp_path / "programs"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree of one MiB that git knows."""
    (tmp_path / "tree" / "hf_ext").mkdir(parents=True)
    (tmp_path / "tree" / "hf_ext" / "code.py").write_bytes(b"#" * 2**20)
    own = ("-c", "user.name=me", "-c", "user.email=me@localhost")
    for words in (["init", "-q"], ["add", "."], [*own, "commit", "-qm", "all"]):
        subprocess.run(["git", *words], cwd=tmp_path / "tree", check=True)
    return tmp_path / "tree"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Pictures of two data sets."""
    for name, count in (("bsds500/train/{}.jpg", 8), ("bsds500/test/{}.jpg", 4), ("cifar10/{}.parquet", 2)):
        for index in range(count):
            file = tmp_path / "data" / name.format(index)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(os.urandom(2**18))
    return tmp_path / "data"


def test_the_bundle_has_a_lock_and_keeps_to_its_size(data: Path, programs: Path, tree: Path, tmp_path: Path):
    folder = tmp_path / ".gpu"
    (folder / "old").mkdir(parents=True)
    # Wheels of 1 MiB, CIFAR-10 of half of one; of three MiB of photographs every second one fits.
    limit = 4 * 2**20 + 2**19
    taken = bundle.bundle(folder, str(data), limit, tree)
    words = json.loads((programs / "pip" / "words.json").read_text())
    assert words[0] == "download" and {"--no-deps", "--only-binary=:all:"} < set(words)
    assert {word.partition("==")[0] for word in words if "==" in word} == set(bundle.BRING)
    assert taken <= limit and not (folder / "old").exists()
    lock = json.loads((folder / "LOCK").read_text())
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tree, capture_output=True, text=True, check=True).stdout
    assert lock["commit"] == head.strip() and lock["dirty"] is False
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    assert set(lock["files"]) == set(files) - {"LOCK"}
    for name, facts in lock["files"].items():
        content = files[name].read_bytes()
        assert facts == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert len([name for name in files if name.startswith("data/bsds500/train")]) == 4
    assert len([name for name in files if name.startswith("data/cifar10")]) == 2

    with refused(SystemExit, "bring"):
        bundle.bundle(folder, "", 2**19, tree)


# What a machine for work with GPUs has: large, or in need of nothing that we could bring.
THERE = {"jinja2", "matplotlib", "numba", "numpy", "packaging", "pandas", "pillow", "psutil", "pyarrow", "pyyaml"}
# rich comes with typer.
THERE |= {"requests", "rich", "safetensors", "tensorboard", "torch", "tqdm", "typer"}


def test_what_is_brought_needs_nothing_else():
    """Wheels are installed there without their requirements: nothing would say that one is missing."""
    environment = {"python_version": "3.12", "python_full_version": "3.12.3", "sys_platform": "linux", "extra": ""}
    environment |= {"platform_machine": "x86_64", "platform_system": "Linux"}
    brought = {canonicalize_name(name) for name in bundle.BRING}
    for name in ("hf-ext", *bundle.BRING):
        needed = [Requirement(text) for text in requires(name) or []]
        needed = [item for item in needed if item.marker is None or item.marker.evaluate(environment)]
        assert {canonicalize_name(item.name) for item in needed} <= brought | THERE, name


def test_where_there_is_no_git_the_lock_names_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert run.source_state(tmp_path) == {"commit": "unknown", "dirty": True}
    (tmp_path / ".gpu").mkdir()
    (tmp_path / ".gpu" / "LOCK").write_text(json.dumps({**HEAD, "files": {}}))
    assert run.source_state(tmp_path) == HEAD


@pytest.mark.slow
def test_the_rehearsal_runs_to_its_end(tmp_path: Path):
    words = ["DEVICE=cpu", f"PY={sys.executable}", f"RESULTS={tmp_path / 'results'}", "DATA="]
    ran = subprocess.run(["make", "gpu", *words], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    results = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "results").glob("*.json")}
    assert set(results) == set(run.PARTS)
    assert all(result["complete"] and result["rows"] for result in results.values())
    assert not [row for result in results.values() for row in result["rows"] if "error" in row]
