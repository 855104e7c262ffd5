"""Adding and removing tasks: equal to a new merge; what is refused, fails or is killed changes nothing."""

import dataclasses
import json
import os
import shutil
import signal
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from hf_ext.emr.manifest import Manifest
from hf_ext.emr.weights import TaskWeights
from hf_ext.errors import DataError, UsageError
from hf_ext.files import read_json, write_json
from hf_ext.hub.cards import write_card
from hf_ext.hub.header_format import CheckpointError
from hf_ext.merging import updating
from hf_ext.merging.configuration import MergeConfig
from hf_ext.merging.updating import add_task, remove_task
from hf_ext.settings import SettingsError
from tests.emr.emr_testing import write_weights
from tests.emr.use_testing import restored
from tests.hub.published import contents
from tests.kit import warm_python
from tests.kit.refusals import refused
from tests.merging.merging import CONFIG, merge, siblings, vectors, weights_of


@pytest.mark.parametrize("options", [{}, {"rescale": "tensor_l2", "tie": "negative"}, {"include_base": True}])
def test_an_added_task_is_merged_with_all_others(sources, tmp_path, options):
    artifact = merge(siblings(sources, *"ab"), tmp_path / "artifact", **options)
    expected = merge(siblings(sources, *"abc"), tmp_path / "expected", **options)
    done = add_task(artifact, "c", str(sources / "c"))
    assert done["how"] == "merged again" and done["scale"] == Manifest.read(expected).tasks["c"].scale
    # late.weight, which none but the third task has merged, among them
    assert weights_of(artifact) == weights_of(expected)
    # the base is named by where it came from first, not by its copy in the artifact
    assert read_json(artifact / "emr.json") == read_json(expected / "emr.json")


def test_of_tasks_that_were_frozen_or_removed_only_those_that_are_there_vote(sources, kept, artifact):
    add_task(artifact, "c", str(sources / "c"), frozen=True)
    remove_task(artifact, "b")
    add_task(artifact, "b", str(sources / "b"))
    assert "elected_from" not in Manifest.read(artifact).method
    expected = merge(siblings(sources, *"acb"), artifact.with_name("expected"))
    assert weights_of(artifact) == weights_of(expected)
    # another one under the name of one that voted
    remove_task(artifact, "b")
    add_task(artifact, "b", str(sources / "c"), frozen=True)
    assert Manifest.read(artifact).method["elected_from"] == ["a", "c", "b (removed)"]
    assert "without influence on the unified model: b." in (artifact / "README.md").read_text()


def test_a_frozen_task_changes_nothing_else(sources, kept, artifact):
    before = contents(artifact)
    done = add_task(artifact, "c", str(sources / "c"), frozen=True)
    after = contents(artifact)
    assert done["how"] == "frozen"
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"emr.json", "config.json", "README.md", "report.json", "sums.safetensors"}
    assert json.loads(after["config.json"]) == json.loads(before["config.json"]) | {"emr_tasks": ["a", "b", "c"]}
    assert {name.split("/")[1] for name in after.keys() - before.keys()} == {"c"}
    assert Manifest.read(artifact).method["elected_from"] == ["a", "b"]
    # by the definition, from the files themselves
    folders = (sources / "base", artifact, sources / "c")
    base, unified, own = (load_file(folder / "model.safetensors") for folder in folders)
    found, masks, upper, lower = restored(TaskWeights(artifact), "c"), {}, 0.0, 0.0
    assert found["head.weight"].equal(own["head.weight"]) and found["late.weight"].equal(own["late.weight"])
    for name in ("large.weight", "odd.weight", "norm.bias"):
        delta, common = own[name].double() - base[name].double(), unified[name].double() - base[name].double()
        masks[name] = delta * common > 0
        upper += delta.abs().sum().item()
        lower += (masks[name] * common.abs()).sum().item()
    assert done["scale"] == pytest.approx(upper / lower, rel=1e-12)
    for name, mask in masks.items():
        moved = base[name] + torch.tensor(done["scale"], dtype=torch.float32) * (unified[name] - base[name])
        assert found[name].equal(torch.where(mask, moved, base[name]))
    card = (artifact / "README.md").read_text()
    assert "Added later, without influence on the unified model: c." in card and "saves no space" not in card


def test_a_removed_task_leaves_the_others_as_they_are(kept, tmp_path):
    artifact = Path(shutil.copytree(kept["abc"], tmp_path / "artifact"))
    before = contents(artifact)
    assert remove_task(artifact, "b") == {"removed": "b", "tasks": ["a", "c"], "path": str(artifact)}
    after = contents(artifact)
    assert {name for name in before if name not in after} == {name for name in before if name.startswith("tasks/b/")}
    kept_weights = {name: data for name, data in weights_of(kept["abc"]).items() if "tasks/b/" not in name}
    assert weights_of(artifact) == kept_weights
    manifest, earlier = Manifest.read(artifact), Manifest.read(kept["abc"])
    assert manifest.tasks == {name: earlier.tasks[name] for name in ("a", "c")}
    assert manifest.method["elected_from"] == ["a", "b", "c"]
    report, whole = (read_json(folder / "report.json") for folder in (artifact, kept["abc"]))
    assert [entry["error"] for entry in report["tasks"]] == [whole["tasks"][row]["error"] for row in (0, 2)]
    assert report["cosines"][0][1] == whole["cosines"][0][2]
    assert "Merged and removed later: b." in (artifact / "README.md").read_text()
    # its files are lost
    shutil.rmtree(artifact / "tasks" / "a")
    remove_task(artifact, "a")
    for task, fact in (("c", "c"), ("a", "no task 'a'")):
        with refused(UsageError, fact):
            remove_task(artifact, task)


def test_the_card_of_what_is_left_has_a_merge_that_can_be_made(sources, tmp_path):
    options = {"method": "task_arithmetic", "masks": True, "weight": {"a": 0.5, "b": 0.2}}
    artifact = merge(siblings(sources, *"ab", **options), tmp_path / "artifact")
    remove_task(artifact, "a")
    written = yaml.safe_load((artifact / "README.md").read_text().split("```yaml")[1].split("```")[0])
    assert MergeConfig.from_dict(written).options == {"weight": {"b": 0.2}}


def test_what_was_told_of_the_other_tasks_is_still_told(sources, tmp_path):
    places = Path(shutil.copytree(sources, tmp_path / "sources"))
    for seed, name in enumerate("abc", 1):
        write_json(places / name / "config.json", CONFIG | {"layer_norm_eps": seed * 1e-3})
    artifact = merge(siblings(places, *"ab"), tmp_path / "artifact")

    def find_told() -> list[str]:
        card, report = (artifact / "README.md").read_text(), read_json(artifact / "report.json")
        assert all(text in card for text in report["warnings"])
        told = [text for text in report["warnings"] if "layer_norm_eps" in text]
        assert ("saves no space" in card) == (report["sizes"]["artifact_and_base"] >= report["sizes"]["checkpoints"])
        return [text.split("'")[1] for text in told]

    assert find_told() == ["a", "b"]
    add_task(artifact, "c", str(places / "c"), frozen=True)
    assert find_told() == ["a", "b", "c"] and f"({places}" not in (artifact / "README.md").read_text()
    remove_task(artifact, "a")
    assert find_told() == ["b", "c"]
    remove_task(artifact, "c")
    assert find_told() == ["b"]


def test_merging_again_needs_the_same_checkpoints(sources, kept, tmp_path):
    place = Path(shutil.copytree(sources, tmp_path / "sources"))
    artifact = merge(siblings(place, *"ab"), tmp_path / "artifact")
    before, moved = contents(artifact), shutil.copytree(artifact, tmp_path / "moved")
    # Only the base may have moved.
    os.rename(place / "base", place / "elsewhere")
    with refused(DataError, "base"):
        add_task(moved, "c", str(place / "c"))
    add_task(moved, "c", str(place / "c"), base=str(place / "elsewhere"))
    assert weights_of(moved) == weights_of(kept["abc"])
    os.rename(place / "elsewhere", place / "base")
    shutil.rmtree(place / "b")
    with refused(ValueError, "'c'", "task 'b'", "--frozen"):
        add_task(artifact, "c", str(place / "c"))
    write_weights(place / "b", {**vectors(2), "other.weight": torch.zeros(3)}, config=CONFIG)
    with refused(DataError, "b"):
        add_task(artifact, "c", str(place / "c"))
    assert contents(artifact) == before
    assert add_task(artifact, "c", str(place / "c"), frozen=True)["how"] == "frozen"


CHANGED = {
    "odd.weight": lambda tensors: tensors["odd.weight"][0, 0].add_(0.25),
    "norm.bias": lambda tensors: tensors["norm.bias"].neg_().sub_(0.5),
    "extra.safetensors": lambda tensors: tensors["head.weight"].add_(1),
    "ids": lambda tensors: tensors["ids"].add_(1),
    "config.json": lambda tensors: None,
}


@pytest.mark.parametrize("options", [{}, {"method": "onebit"}])
@pytest.mark.parametrize("named", CHANGED)
def test_a_task_that_changed_under_its_header_is_not_merged_again(sources, tmp_path, named, options):
    place = Path(shutil.copytree(sources, tmp_path / "sources"))
    for name in ("base", "a"):
        write_weights(place / name, load_file(place / name / "model.safetensors") | {"ids": torch.arange(3)})
    artifact = merge(siblings(place, *"ab"), tmp_path / "artifact", **options)
    before, tensors = contents(artifact), load_file(place / "a" / "model.safetensors")
    CHANGED[named](tensors)
    write_weights(place / "a", tensors, config=CONFIG | ({"id2label": {}} if named == "config.json" else {}))
    with refused(DataError, "task 'a'", named):
        add_task(artifact, "c", str(place / "c"))
    assert contents(artifact) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["artifact", "sources"]


def test_what_cannot_be_added_is_refused_and_nothing_changes(sources, artifact, tmp_path):
    before = contents(artifact)
    for name, fact in (("a", "has a task 'a'"), ("A", "has a task 'a'"), ("x/y", "'x/y' is not allowed")):
        with refused(ValueError, fact):
            add_task(artifact, name, str(sources / "c"))
    bad = vectors(3)
    bad["odd.weight"][2, 3] = float("nan")
    write_weights(tmp_path / "bad", bad, config=CONFIG)
    (tmp_path / "pickled").mkdir()
    torch.save(vectors(3), tmp_path / "pickled" / "pytorch_model.bin")
    for frozen in (False, True):
        with refused(ValueError, "odd.weight", "NaN"):
            add_task(artifact, "c", str(tmp_path / "bad"), frozen=frozen)
    for source in (artifact, tmp_path / "nowhere", tmp_path / "pickled"):
        with pytest.raises(DataError, match=source.name) as caught:
            add_task(artifact, "c", str(source))
        assert "--frozen" not in str(caught.value) and "'c'" in str(caught.value)
    other = vectors(0)
    other["odd.weight"] += 1
    write_weights(tmp_path / "other", other, config=CONFIG)
    with refused(DataError, "sha256") as caught:
        add_task(artifact, "c", str(sources / "c"), base=str(tmp_path / "other"))
    assert "--frozen" not in str(caught.value)
    assert contents(artifact) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["artifact", "bad", "other", "pickled"]


@pytest.mark.parametrize("step", ["merge_checkpoints", "rewrite_report", "replace_folder"])
def test_an_addition_that_fails_leaves_the_artifact_as_it_was(sources, kept, artifact, tmp_path, monkeypatch, step):
    """Right after each step, and instead of the last one."""
    before, run = contents(artifact), getattr(updating, step)

    def fail(*arguments, **options):
        if step != "replace_folder":
            run(*arguments, **options)
        raise OSError("the disk is full")

    monkeypatch.setattr(updating, step, fail)
    with refused(OSError, "disk", "full"):
        add_task(artifact, "c", str(sources / "c"), frozen=True)
    assert contents(artifact) == before and [path.name for path in tmp_path.iterdir()] == ["artifact"]


@pytest.mark.slow
def test_after_a_kill_the_artifact_is_as_it_was_and_the_next_addition_succeeds(sources, kept, artifact, tmp_path):
    """Killed when everything is written and nothing yet in its place."""
    before = contents(artifact)
    script = """
        import os, signal, sys
        from hf_ext.merging import updating
        updating.replace_folder = lambda *places: os.kill(os.getpid(), signal.SIGKILL)
        updating.add_task(*sys.argv[1:], frozen=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(artifact), "c", str(sources / "c")]
    done = warm_python.run(command, env=os.environ, cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert contents(artifact) == before
    assert {path.name for path in tmp_path.iterdir()} == {"artifact", ".artifact.update"}
    add_task(artifact, "c", str(sources / "c"), frozen=True)
    assert list(Manifest.read(artifact).tasks) == ["a", "b", "c"]
    assert [path.name for path in tmp_path.iterdir()] == ["artifact"]


def test_a_kill_between_two_renames_is_put_right_first(kept, artifact):
    """Where folders cannot be exchanged, there is a moment in which the artifact has another name."""
    before = contents(artifact)
    os.rename(artifact, artifact.with_name(".artifact.old"))
    remove_task(artifact, "a")
    assert set(Manifest.read(artifact).tasks) == {"b"}
    assert contents(artifact)["model.safetensors"] == before["model.safetensors"]


def test_files_are_shared_with_the_earlier_artifact_but_never_written_to(sources, kept, artifact, monkeypatch):
    """What a reader has opened, or a hard link elsewhere, keeps its content."""
    linked = shutil.copytree(artifact, artifact.with_name("linked"), copy_function=os.link)
    # What a link of the artifact leads to is somebody's too.
    (artifact / "report.json").rename(mine := artifact.with_name("mine.json"))
    (artifact / "report.json").symlink_to(mine)
    before, told = contents(linked), mine.read_bytes()
    remove_task(artifact, "a")
    assert mine.read_bytes() == told != (artifact / "report.json").read_bytes()
    add_task(artifact, "a2", str(sources / "a"), frozen=True)
    assert contents(linked) == before and (artifact / "emr_loader.py").samefile(linked / "emr_loader.py")

    def refuse(*names, **options):
        raise OSError("no links")

    monkeypatch.setattr(updating.os, "link", refuse)
    remove_task(linked, "a")
    assert not (artifact / "emr_loader.py").samefile(linked / "emr_loader.py")
    assert contents(linked)["model.safetensors"] == before["model.safetensors"]


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (
            lambda folder: remove_task(folder, "a"),
            [{"sources": 5}, {"sources": {"tasks": [1]}}, {"plan_warnings": [1]}],
        ),
        (lambda out: write_card(out, repo_id="org/merged"), [{"tasks": None}, {"mean": "x"}, {"method": [1]}]),
    ],
)
def test_a_damaged_report_is_named_and_nothing_changes(artifact, change, parts):
    report = read_json(artifact / "report.json")
    for part in parts:
        write_json(artifact / "report.json", report | part)
        before = contents(artifact)
        with refused(CheckpointError, "report.json", "damaged"):
            change(artifact)
        assert contents(artifact) == before


def test_what_is_no_artifact_to_change_is_refused(sources, artifact, tmp_path):
    plain = merge(siblings(sources, *"ab"), tmp_path / "plain", method="average", allow_missing=True)
    with refused(CheckpointError, "emr.json"):
        remove_task(plain, "a")
    manifest = Manifest.read(artifact)
    for method in ("mine", ["emr"]):
        dataclasses.replace(manifest, method=manifest.method | {"method": method}).write(artifact)
        with refused(SettingsError, "method", str(method)):
            add_task(artifact, "c", str(sources / "c"))
    dataclasses.replace(manifest, method=manifest.method | {"elected_from": 5}).write(artifact)
    with refused(CheckpointError, "elected_from", "5"):
        remove_task(artifact, "a")
    cached = tmp_path / "models--org--name" / "snapshots" / ("0" * 40)
    cached.parent.mkdir(parents=True)
    os.rename(artifact, cached)
    with refused(UsageError, "changed", "cache"):
        remove_task(cached, "a")
