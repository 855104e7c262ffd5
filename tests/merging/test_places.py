"""Where merges are written, where they find their checkpoints again, and what is kept of an interrupted one."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel

from hf_ext.emr import emr_loader
from hf_ext.emr.artifact import verify_artifact
from hf_ext.emr.manifest import Manifest, find_recorded, recorded_path
from hf_ext.emr.weights import TaskWeights
from hf_ext.errors import DataError, OtherRun, UsageError
from hf_ext.files import TakenError, read_json, write_json
from hf_ext.hub.header_format import CheckpointError
from hf_ext.merging import add_task, journal, make_plan, merge_checkpoints, remove_task
from hf_ext.merging.engine import Engine
from hf_ext.merging.vectors import NotFiniteError
from tests.emr.emr_testing import family, tiny_bert, write_weights
from tests.emr.use_testing import equal, restored
from tests.kit.refusals import refused

from .merging import assert_same_files, merge, siblings, write_set


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with checkpoints in `models/`, in which the commands are run."""
    write_set(tmp_path / "project" / "models")
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


@pytest.mark.parametrize(("method", "file"), [("emr", "model.fp16"), ("onebit", "consolidated")])
def test_weights_have_the_names_that_from_pretrained_finds(tmp_path, method, file):
    base = tiny_bert(tmp_path / "base")
    task = tiny_bert(tmp_path / "task", 1, base=base, task_head=False)
    given = base / f"{file}.safetensors"
    os.rename(base / "model.safetensors", given)
    merged = merge({"base": str(given), "tasks": {"a": str(task)}, "method": method}, tmp_path / "merged")
    exported = TaskWeights(merged).export("a", tmp_path / "exported")
    expected = load_file(task / "model.safetensors")
    for name, values in AutoModel.from_pretrained(exported).state_dict().items():
        torch.testing.assert_close(values, expected[name], rtol=0, atol=2e-2)
    assert not verify_artifact(merged).wrong and not verify_artifact(merged).notes


def relative(*names: str, **options: Any) -> dict[str, Any]:
    return {"base": "models/base", "tasks": {name: f"models/{name}" for name in names}, **options}


def test_an_artifact_finds_its_base_from_any_folder(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = merge(relative("t0", "t1"), Path("out/merged"))
    manifest = Manifest.read(folder)
    assert manifest.base.source == os.path.join("..", "..", "models", "base")
    assert manifest.tasks["t1"].origin.source == os.path.join("..", "..", "models", "t1")
    assert read_json(folder / "report.json")["sources"]["base"]["source"] == manifest.base.source
    expected = emr_loader.restore(folder, "t1")

    def assert_found(place: Path) -> None:
        weights = TaskWeights(place)
        assert equal(restored(weights, "t1"), expected) and equal(emr_loader.restore(place, "t1"), expected)
        for task in weights.manifest.tasks.values():
            assert (find_recorded(task.origin.source, place) / "model.safetensors.index.json").is_file()

    assert_found(folder)
    monkeypatch.chdir(tmp_path)
    assert_found(folder)
    # Both were moved together.
    os.rename(project, tmp_path / "moved")
    monkeypatch.chdir("/")
    assert_found(tmp_path / "moved" / "out" / "merged")
    # The artifact alone was moved: where the base was looked for is said, and it can be given.
    models = tmp_path / "moved" / "models"
    os.rename(tmp_path / "moved" / "out" / "merged", tmp_path / "alone")
    with refused(CheckpointError, "folder", "merge"):
        TaskWeights(tmp_path / "alone")
    TaskWeights(tmp_path / "alone", base=models / "base")
    for frozen in (False, True):
        # Nobody answers there: what is gone is not looked for on a Hub.
        with refused(DataError, "no such file or folder"):
            add_task(tmp_path / "alone", "t2", str(models / "t2"), frozen=frozen, endpoint="http://127.0.0.1:9")


def test_tasks_are_added_from_any_folder(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    again, frozen = (merge(relative("t0", "t1"), Path(name)) for name in ("again", "frozen"))
    whole = merge(relative("t0", "t1", "t2"), Path("whole"))
    monkeypatch.chdir(project / "models")
    for place in (again, frozen):
        add_task(place, "t2", "t2", frozen=place == frozen)
        manifest = Manifest.read(place)
        sources = {"base": manifest.base, **{name: task.origin for name, task in manifest.tasks.items()}}
        assert all(found.source == os.path.join("..", "models", name) for name, found in sources.items())
    assert equal(*(load_file(folder / "model.safetensors") for folder in (again, whole)))


@pytest.mark.parametrize(("method", "found"), [("emr", "nothing"), ("average", "a merge")])
def test_a_link_in_the_place_of_the_result_stays_and_what_it_leads_to_is_replaced(
    config: dict[str, Any], tmp_path: Path, method: str, found: str
):
    real, link = tmp_path / "far" / "real", tmp_path / "link"
    real.mkdir(parents=True)
    link.symlink_to(real)
    if found == "a merge":
        merge(config, real, method="average")
    result = merge_checkpoints(config | {"method": method}, link, overwrite=found == "a merge", progress=False)
    assert link.is_symlink() and result.path == real and (link / "emr.json").exists() == (method == "emr")
    assert sorted(path.name for place in (tmp_path, real.parent) for path in place.glob(".*")) == []


@pytest.mark.parametrize("letters", [246, 247, 250, 252, 255])
def test_a_name_is_refused_in_words_if_that_of_the_partial_folder_would_be_too_long(
    config: dict[str, Any], tmp_path: Path, letters: int
):
    out = tmp_path / ("n" * letters)
    if letters > 246:
        with refused(UsageError, out, os.strerror(errno.ENAMETOOLONG)):
            merge(config, out, method="average")
    else:
        assert merge(config, out, method="average") == out


def test_what_stands_in_the_place_of_the_result_is_named(config: dict[str, Any], tmp_path: Path):
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    (tmp_path / "full" / "mine").mkdir(parents=True)
    told = set()
    for name in ("link", "file", "full"):
        with refused(TakenError, path=tmp_path / name) as caught:
            merge(config, tmp_path / name)
        told.add(str(caught.value).replace(name, ""))
    assert len(told) == 3


def test_how_paths_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real/deep")
    out = tmp_path / "link" / "out"
    # `link/out/../..` is real/, whatever it looks like.
    source = recorded_path("base", out)
    (tmp_path / "base").mkdir()
    out.mkdir()
    assert find_recorded(source, out).samefile(tmp_path / "base")
    assert recorded_path("/somewhere/base", out) == "/somewhere/base"
    # The name of the base is shown on cards, so it has to be in the path.
    assert recorded_path(".", tmp_path / "out") == str(tmp_path)
    # Something that could be a name on a Hub would be taken for one.
    assert Path(recorded_path("link/out/inside/base", out)).is_absolute()


def test_no_warning_that_is_kept_names_a_place(project: Path):
    """A warning names a task and where it lies; what is kept and published of it has the task alone."""
    for name, width in (("base", 4), ("t0", 8)):
        path = project / "models" / name / "config.json"
        write_json(path, read_json(path) | {"num_attention_heads": width})
    given = relative("t0", "t1")
    with make_plan(given) as plan:
        assert any("(models/t0) has num_attention_heads 8" in text for text in plan.warnings)
    folder = merge(given, Path("out/merged"))
    assert any("task 't0' has num_attention_heads 8" in text for text in read_json(folder / "report.json")["warnings"])
    for name in ("report.json", "README.md"):
        assert "(models/" not in (folder / name).read_text(encoding="utf-8")


def test_the_two_writers_of_a_report_agree(config: dict[str, Any], tmp_path: Path):
    some = config | {"tasks": {name: config["tasks"][name] for name in ("t0", "t1")}}
    expected = read_json(merge(some, tmp_path / "two") / "report.json")
    grown = merge(some, tmp_path / "grown")
    add_task(grown, "t2", config["tasks"]["t2"], frozen=True)
    remove_task(grown, "t2")
    found = read_json(grown / "report.json")
    assert found.keys() == expected.keys() and found["sizes"] == expected["sizes"]
    assert found["sizes"]["base"] == sum(path.stat().st_size for path in Path(config["base"]).glob("*.safetensors"))
    assert found["sources"]["tasks"] == expected["sources"]["tasks"]


@pytest.mark.parametrize("finished", [0, 1, 2])
def test_counting_goes_on_after_the_last_finished_pass(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: int
):
    ties = config | {"method": "ties", "density": 0.3, "masks": True}
    expected = merge(ties, tmp_path / "merged-expected")
    count, passes, kill = Engine.count, [], True

    def counted(self: Engine, index: int, units: Any) -> np.ndarray:
        if kill and len(passes) == finished:
            raise KeyboardInterrupt
        passes.append(index)
        return count(self, index, units)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "count", counted)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            merge(ties, tmp_path / "merged-out")
    kill = False
    assert passes == list(range(finished))
    partial = tmp_path / ".merged-out.partial"
    assert (journal.read_passes(partial / "journal") or {"passes": 0})["passes"] == finished
    if finished:
        with refused(OtherRun, "config.density", "0.3", "0.5"):
            merge(ties | {"density": 0.5}, tmp_path / "merged-out")
    else:
        # damaged ones are counted again
        (partial / "journal" / "passes.json").write_text('{"passes": ')
        assert journal.read_passes(partial / "journal") is None
    assert_same_files(merge(ties, tmp_path / "merged-out"), expected)
    assert passes == [0, 1]
    assert not partial.exists()


def test_a_merge_is_loaded_in_the_type_that_it_was_written_in(tmp_path: Path):
    given = family(tmp_path, tiny_bert) | {"method": "average"}
    base = tmp_path / "base"
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        config = read_json(base / "config.json")
        write_json(base / "config.json", config | {"dtype": "float32" if name == "bfloat16" else "bfloat16"})
        folder = merge(given | {"dtype": name}, tmp_path / f"merged-{name}")
        masked = merge(given | {"dtype": name, "method": "emr"}, tmp_path / f"masked-{name}")
        exported = TaskWeights(masked).export("a", tmp_path / f"exported-{name}")
        for place in (folder, masked, exported):
            assert AutoModel.from_pretrained(place, dtype="auto").dtype == dtype


@pytest.mark.parametrize("method", ["emr", "average"])
def test_finite_weights_that_are_too_far_from_the_base(tmp_path: Path, method: str):
    base, far = torch.randn(70000), torch.randn(70000)
    base[65536 + 5], far[65536 + 5] = -3e38, 3e38
    for name, values in (("base", base), ("near", base + 0.1), ("far", far)):
        write_weights(tmp_path / name, {"w": values}, config={})
    with refused(NotFiniteError, "'far'", "'w'"):
        merge(siblings(tmp_path, "near", "far", method=method), tmp_path / "merged")
