"""Adding and removing tasks: equal to a new merge, or nothing else changed."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_ext.emr.manifest import Manifest
from hf_ext.emr.weights import TaskWeights
from hf_ext.errors import UsageError
from hf_ext.merging.merge import merge_checkpoints
from hf_ext.merging.updating import add_task, remove_task
from hf_ext.settings import SettingsError
from tests.hub.published import contents
from tests.kit.refusals import refused
from tests.merging.updating_sources import configuration, merge, weights_of


@pytest.mark.parametrize("options", [{}, {"rescale": "tensor_l2", "tie": "negative"}, {"include_base": True}])
def test_an_added_task_is_merged_with_all_others(sources, tmp_path, options):
    artifact = merge(sources, "ab", tmp_path / "artifact", **options)
    expected = merge(sources, "abc", tmp_path / "expected", **options)
    done = add_task(artifact, "c", str(sources / "c"))
    assert done["how"] == "merged again" and done["scale"] == Manifest.read(expected).tasks["c"].scale
    # late.weight, which none but the third task has merged, among them
    assert weights_of(artifact) == weights_of(expected)
    ours, theirs = (json.loads((folder / "emr.json").read_text()) for folder in (artifact, expected))
    if options == {"include_base": True}:
        # it came from the copy in the artifact
        for record in (ours, theirs):
            del record["base"]["source"]
    assert ours == theirs


def test_of_tasks_that_were_frozen_or_removed_only_those_that_are_there_vote(sources, kept, artifact):
    add_task(artifact, "c", str(sources / "c"), frozen=True)
    remove_task(artifact, "b")
    add_task(artifact, "b", str(sources / "b"))
    assert "elected_from" not in Manifest.read(artifact).method
    expected = merge_checkpoints(configuration(sources, "acb"), artifact.with_name("expected"), progress=False).path
    assert weights_of(artifact) == weights_of(expected)


def restored(folder: Path, task: str) -> dict[str, torch.Tensor]:
    weights = TaskWeights(folder)
    return {name: weights.restore(task, name) for name in weights.entries(task)}


def test_a_frozen_task_changes_nothing_else(sources, kept, artifact):
    before = contents(artifact)
    done = add_task(artifact, "c", str(sources / "c"), frozen=True)
    after = contents(artifact)
    assert done["how"] == "frozen"
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"emr.json", "config.json", "README.md", "report.json", "sums.safetensors"}
    assert json.loads(after["config.json"]) == json.loads(before["config.json"]) | {"emr_tasks": ["a", "b", "c"]}
    assert {name.split("/")[1] for name in after.keys() - before.keys()} == {"c"}
    manifest = Manifest.read(artifact)
    assert manifest.method["elected_from"] == ["a", "b"]
    # by the definition, from the files themselves
    folders = (sources / "base", artifact, sources / "c")
    base, unified, own = (load_file(folder / "model.safetensors") for folder in folders)
    found = restored(artifact, "c")
    assert found["head.weight"].equal(own["head.weight"]) and found["late.weight"].equal(own["late.weight"])
    upper = lower = 0.0
    masks = {}
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
    report = json.loads((artifact / "report.json").read_text())
    whole = json.loads((kept["abc"] / "report.json").read_text())
    assert [entry["error"] for entry in report["tasks"]] == [whole["tasks"][row]["error"] for row in (0, 2)]
    assert report["cosines"][0][1] == whole["cosines"][0][2]
    assert "Merged and removed later: b." in (artifact / "README.md").read_text()
    remove_task(artifact, "a")
    with refused(UsageError, "c"):
        remove_task(artifact, "c")
    with refused(UsageError, "no task 'a'"):
        remove_task(artifact, "a")


def test_a_merge_by_a_method_that_is_not_there_is_refused_in_words(sources, artifact):
    manifest = Manifest.read(artifact)
    dataclasses.replace(manifest, method=manifest.method | {"method": "mine"}).write(artifact)
    with refused(SettingsError, "emr", "mine"):
        add_task(artifact, "c", str(sources / "c"))
