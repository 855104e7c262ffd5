"""`make gpu`: the runner on parts made up for it; the rehearsal is slow."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.studies import EXAMPLES, module_loader

ROOT = EXAMPLES.parent
load = module_loader(EXAMPLES / "benchmarks" / "gpu")
# A part whose cases do what a file beside its result says.
PART = """
import json, os, subprocess, time, torch
from parts import read_words, run_part

words = read_words()
plan = json.loads(words.output.with_suffix(".plan").read_text())

def case(name):
    def measure():
        with words.output.with_suffix(".calls").open("a") as file:
            file.write(f"{name}\\n")
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

    def __init__(self, folder: Path, main: Callable[..., int]):
        self.folder, self.main, self.parts = folder, main, dict[str, Path]()
        (folder / "part.py").write_text(PART)

    def plan(self, name: str, **cases: str) -> None:
        """Sets what the cases of a part do from now on."""
        self.parts[name] = self.folder / "part.py"
        (self.folder / f"{name}.plan").write_text(json.dumps(cases))

    def run(self, *words: str) -> int:
        """The exit code of `make gpu DEVICE=cpu`."""
        return self.main(["--device", "cpu", "--results", str(self.folder), *words], self.parts)

    def result(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / f"{name}.json").read_text())

    def calls(self, name: str) -> list[str]:
        """The case of every measurement since the last look."""
        file = self.folder / f"{name}.calls"
        lines = file.read_text().split() if file.exists() else []
        file.unlink(missing_ok=True)
        return lines


@pytest.fixture
def run(load: Callable[[str], Any]) -> Any:
    return load("run")


@pytest.fixture
def parts(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Parts:
    monkeypatch.setattr(run, "source_state", lambda: {"commit": "a" * 40, "dirty": False})
    return Parts(tmp_path, run.main)


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
    assert good["device"].startswith("CPU") and good["versions"]["torch"]
    table = (parts.folder / "README.md").read_text()
    assert "| only / one |  | 1e+03 (500 to 2e+03) | 1.0 |" in table and "second is wrong" in table
    assert parts.calls("bad") == ["first", "second", "third"] and parts.calls("good") == ["only"]

    # The same commit and device: what is complete is skipped, what failed is tried again, alone.
    parts.plan("bad", first="work", second="work", third="work")
    assert parts.run() == 0
    assert parts.calls("bad") == ["second"] and parts.calls("good") == []
    assert parts.result("bad")["complete"] and "error" not in parts.result("bad")


def test_rows_of_another_commit_or_device_or_of_changed_code_go(run: Any, tmp_path: Path):
    head = {"device": "GPU", "commit": "a" * 40, "dirty": False}
    content = {**head, "rows": [{"case": "x"}], "seconds": 1.0, "complete": True}
    (tmp_path / "part.json").write_text(json.dumps(content))
    assert run.begin(tmp_path / "part.json", head) == content
    for other in ({"commit": "b" * 40}, {"device": "another"}, {"dirty": True}):
        found = run.begin(tmp_path / "part.json", {**head, **other})
        assert found["rows"] == [] and not found["complete"]


def is_running(process: str) -> bool:
    status = Path(f"/proc/{process}/stat")
    # Killed and not yet collected by whoever collects orphans is as good as gone.
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
def test_a_part_killed_at_its_limit_keeps_its_rows_and_goes_on(parts: Parts, monkeypatch: pytest.MonkeyPatch):
    parts.plan("slow", first="work", second="hang", third="work")
    waited, hanging = subprocess.Popen.wait, parts.folder / "slow.hanging"

    def wait(process: subprocess.Popen, timeout: float | None = None) -> int:
        """In place of waiting for the limit: until the part hangs."""
        while timeout is not None and process.poll() is None:
            if hanging.exists() and hanging.read_text():
                raise subprocess.TimeoutExpired("part", timeout)
            time.sleep(0.05)
        return waited(process)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "wait", wait)
        assert parts.run() == 0
    found = parts.result("slow")
    assert not found["complete"] and "error" not in found and len(found["rows"]) == 2
    deadline = time.monotonic() + 60
    while is_running(hanging.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(hanging.read_text())
    assert "slow: not complete" in (parts.folder / "README.md").read_text()

    parts.calls("slow")
    parts.plan("slow", first="work", second="work", third="work")
    assert parts.run() == 0
    assert parts.calls("slow") == ["third", "second"]
    assert parts.result("slow")["complete"] and parts.result("slow")["seconds"] > found["seconds"]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "told"), [("lose", "the device is lost"), ("die", "exit code -9 at first")])
def test_after_a_process_that_lost_the_device_or_died_another_one_goes_on(parts: Parts, fault: str, told: str):
    parts.plan("lost", first=fault, second="work")
    assert parts.run() == 1
    assert parts.calls("lost") == ["first"] and told in parts.result("lost")["error"]
    parts.plan("lost", first="work", second="work")
    assert parts.run() == 0 and parts.calls("lost") == ["second", "first"]


def test_without_a_device_nothing_runs(run: Any, parts: Parts, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert run.main(["--results", str(parts.folder)]) == 2
    assert "make gpu DEVICE=cpu" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        parts.run("--part", "unknown")
    assert "allowed: " in capsys.readouterr().err


def test_where_there_is_no_git_the_environment_names_the_commit(run: Any, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert run.source_state() == {"commit": "unknown", "dirty": True}
    monkeypatch.setenv("COMMIT", "a" * 40)
    assert run.source_state() == {"commit": "a" * 40, "dirty": False}


@pytest.mark.slow
def test_the_rehearsal_runs_to_its_end(run: Any, tmp_path: Path):
    words = ["DEVICE=cpu", f"PY={sys.executable}", f"RESULTS={tmp_path / 'results'}"]
    ran = subprocess.run(["make", "gpu", *words], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    results = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "results").glob("*.json")}
    assert set(results) == set(run.PARTS)
    assert all(result["complete"] and result["rows"] for result in results.values())
    assert not [row for result in results.values() for row in result["rows"] if "error" in row]
