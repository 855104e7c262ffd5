"""Adding and removing tasks: equal to a new merge, or nothing else changed."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hf_ext.emr.artifact_emr import read_sums
from hf_ext.emr.manifest_emr import Manifest
from hf_ext.emr.ops_emr import SEGMENT, SUMS
from hf_ext.emr.sums_emr import read_totals
from hf_ext.emr.weights_emr import TaskWeights
from hf_ext.merging.merge import merge_checkpoints
from hf_ext.merging.updating import add_task, add_task_frozen, remove_task
from tests.emr.emr_testing import write_weights
from tests.hub.published import contents
from tests.merging.updating_sources import (
    CONFIG,
    NAMES,
    artifact,
    configuration,
    kept,
    merge,
    sources,
    vectors,
    weights_of,
    without_pictures,
)

__all__ = ["artifact", "kept", "sources", "without_pictures"]


def test_the_sources_make_ties_zeros_and_several_segments(sources, kept):
    manifest = Manifest.read(kept["ab"])
    assert manifest.merged["large.weight"].elements > SEGMENT
    assert "late.weight" not in manifest.merged and "late.weight" in Manifest.read(kept["abc"]).merged
    base, first, second = (load_file(sources / name / "model.safetensors")["large.weight"] for name in ("base", *"ab"))
    total = (first.float() - base.float()) + (second.float() - base.float())
    assert ((total == 0) & (first != base)).any() and (first == base).any()


@pytest.mark.parametrize(
    ("rescale", "tie"), [("global", "zero"), ("official", "negative"), ("tensor", "negative"), ("none", "zero")]
)
def test_a_task_added_with_state_equals_a_merge_of_all(sources, tmp_path, rescale, tie):
    options = {"rescale": rescale, "tie": tie, "keep_state": True}
    artifact = merge(sources, "ab", tmp_path / "artifact", **options)
    expected = merge(sources, "abc", tmp_path / "expected", **options)
    done = add_task(artifact, "c", str(sources / "c"))
    assert (done["how"], done["why"]) == ("state", None)
    # late.weight, which none but the third task has merged, among them
    assert weights_of(artifact) == weights_of(expected)
    assert manifest_but_sums(artifact) == manifest_but_sums(expected)
    assert contents(artifact).keys() == contents(expected).keys()


def manifest_but_sums(folder: Path) -> dict:
    """What `emr.json` says; products with the vectors of older tasks are not known after an addition."""
    record = json.loads((folder / "emr.json").read_text())
    record["files"] = {name: about for name, about in record["files"].items() if "sums.safetensors" not in name}
    return record


def test_sums_are_those_of_a_merge_of_all_as_far_as_signs_tell(sources, kept, artifact):
    add_task(artifact, "c", str(sources / "c"))
    manifest, whole = Manifest.read(artifact), Manifest.read(kept["abc"])
    unknown = np.isin(SUMS, ("masked_dot", "dot", "weight_opposed"))
    for task in NAMES:
        found, expected = read_sums(artifact, manifest, task), read_sums(kept["abc"], whole, task)
        assert (found[:, ~unknown] == expected[:, ~unknown]).all()
        merged = expected[:, SUMS.index("abs")] > 0
        own = unknown if task == "c" else np.zeros(len(SUMS), bool)
        assert (found[:, own] == expected[:, own]).all()
        assert np.isnan(found[merged][:, unknown]).all() == (task != "c")
    found_totals, gram = read_totals(artifact, manifest)
    expected_totals, expected_gram = read_totals(kept["abc"], whole)
    assert (found_totals == expected_totals).all()
    assert gram[0, 1] == expected_gram[0, 1] and gram[2, 2] == expected_gram[2, 2] and np.isnan(gram[0, 2])


def test_after_an_addition_the_report_says_what_is_not_known(sources, artifact):
    before = json.loads((artifact / "report.json").read_text())
    add_task(artifact, "c", str(sources / "c"))
    report = json.loads((artifact / "report.json").read_text())
    first, _, last = report["tasks"]
    assert before["tasks"][0]["error"]["rescaled"] is not None
    assert first["error"]["rescaled"] is None and last["error"]["rescaled"] is not None
    assert any("errors of a, b are not known" in warning for warning in report["warnings"])
    assert list(report["sources"]["tasks"]) == list(NAMES)
    with pytest.raises(ValueError, match="rescale 'l2' needs the checkpoint of 'a' since another task was added"):
        TaskWeights(artifact, rescale="l2").restore("a", "odd.weight")
    assert TaskWeights(artifact, rescale="official").restore("a", "odd.weight").shape == (5, 13)


def test_tasks_are_added_one_after_another(sources, kept, tmp_path):
    artifact = merge(sources, "a", tmp_path / "artifact", keep_state=True)
    for name in "bc":
        assert add_task(artifact, name, str(sources / name))["how"] == "state"
    assert weights_of(artifact) == weights_of(kept["abc"])
    assert manifest_but_sums(artifact) == manifest_but_sums(kept["abc"])


def test_a_task_of_a_wider_type_widens_the_state(sources, tmp_path):
    write_weights(tmp_path / "c", vectors(3, torch.float32), config=CONFIG)
    for name, seed in (("base", 0), ("a", 1), ("b", 2)):
        write_weights(tmp_path / name, vectors(seed, torch.bfloat16), config=CONFIG)
    wide = load_file(tmp_path / "c" / "model.safetensors")
    # no bfloat16 number is near enough to be taken for it
    write_weights(tmp_path / "c", {name: tensor * 1.0001 for name, tensor in wide.items()}, config=CONFIG)
    artifact = merge(tmp_path, "ab", tmp_path / "artifact", keep_state=True)
    add_task(artifact, "c", str(tmp_path / "c"))
    assert weights_of(artifact) == weights_of(merge(tmp_path, "abc", tmp_path / "expected", keep_state=True))
    assert load_file(artifact / "state.safetensors")["highest.odd.weight"].dtype == torch.float32


def restored(folder: Path, task: str) -> dict[str, torch.Tensor]:
    weights = TaskWeights(folder)
    return {name: weights.restore(task, name) for name in weights.entries(task)}


def test_a_frozen_task_changes_nothing_else(sources, kept, artifact):
    before = contents(artifact)
    done = add_task_frozen(artifact, "c", str(sources / "c"))
    after = contents(artifact)
    assert done["how"] == "frozen"
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"emr.json", "config.json", "README.md", "report.json", "report.png", "sums.safetensors"}
    assert json.loads(after["config.json"]) == json.loads(before["config.json"]) | {"emr_tasks": ["a", "b", "c"]}
    assert {name.split("/")[1] for name in after.keys() - before.keys()} == {"c"}
    manifest = Manifest.read(artifact)
    assert manifest.method["elected_from"] == ["a", "b"]
    # by the definition, from the files themselves
    base, unified, own = (
        load_file(folder / "model.safetensors") for folder in (sources / "base", artifact, sources / "c")
    )
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
    assert "Added later, without a vote in the unified model: c." in card


def test_an_addition_after_a_frozen_one_lets_only_the_new_one_vote(sources, kept, artifact):
    """c is there without a vote; then b2, equal to b, is added exactly: a, b, b2 vote, and c is masked again."""
    add_task_frozen(artifact, "c", str(sources / "c"))
    add_task(artifact, "b2", str(sources / "b"))
    assert Manifest.read(artifact).method["elected_from"] == ["a", "b", "b2"]
    tasks = {name: str(sources / name[0]) for name in ("a", "b", "b2")}
    expected = merge_checkpoints(
        configuration(sources, "") | {"tasks": tasks, "keep_state": True},
        artifact.with_name("expected"),
        progress=False,
    ).path
    ours, theirs = weights_of(artifact), weights_of(expected)
    assert {name: data for name, data in ours.items() if "tasks/c/" not in name} == theirs
    frozen = add_task_frozen(expected, "c", str(sources / "c"))
    assert weights_of(artifact) == weights_of(expected)
    assert Manifest.read(artifact).tasks["c"] == Manifest.read(expected).tasks["c"]
    assert frozen["scale"] == Manifest.read(artifact).tasks["c"].scale


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
    assert "Merged, and removed later: b." in (artifact / "README.md").read_text()
    remove_task(artifact, "a")
    with pytest.raises(ValueError, match="'c' is the last task of .*; delete the folder instead"):
        remove_task(artifact, "c")
    with pytest.raises(ValueError, match="has no task 'a'; it has c"):
        remove_task(artifact, "a")


def test_a_removed_task_cannot_vote_twice(sources, kept, tmp_path):
    artifact = Path(shutil.copytree(kept["abc"], tmp_path / "artifact"))
    remove_task(artifact, "c")
    done = add_task(artifact, "c", str(sources / "c"))
    assert done["how"] == "merged again" and "its vote would count twice" in done["why"]
    assert weights_of(artifact) == weights_of(kept["abc"])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"keep_state": True, "rescale": "tensor_l2"}, "rescale tensor_l2 needs the products"),
        ({}, "the merge kept no state"),
    ],
)
def test_where_the_state_does_not_suffice_all_is_merged_again(sources, tmp_path, options, why):
    artifact = merge(sources, "ab", tmp_path / "artifact", **options)
    done = add_task(artifact, "c", str(sources / "c"))
    assert done["how"] == "merged again" and why in done["why"]
    expected = merge(sources, "abc", tmp_path / "expected", **options)
    assert weights_of(artifact) == weights_of(expected)
    assert (artifact / "emr.json").read_bytes() == (expected / "emr.json").read_bytes()


def test_baselines_with_masks_take_frozen_tasks(sources, tmp_path):
    artifact = merge(sources, "ab", tmp_path / "artifact", method="average", masks=True, rescale="l2")
    before = weights_of(artifact)
    add_task_frozen(artifact, "c", str(sources / "c"))
    after = weights_of(artifact)
    assert {name: after[name] for name in before} == before
    # least squares: the rest of what was masked in is orthogonal to it
    base, unified, own = (
        load_file(folder / "model.safetensors") for folder in (sources / "base", artifact, sources / "c")
    )
    upper = lower = 0.0
    for name in ("large.weight", "odd.weight", "norm.bias"):
        delta, common = own[name].double() - base[name].double(), unified[name].double() - base[name].double()
        mask = delta * common > 0
        upper, lower = upper + (mask * delta * common).sum().item(), lower + (mask * common * common).sum().item()
    assert Manifest.read(artifact).tasks["c"].scale == pytest.approx(upper / lower, rel=1e-12)
    assert dataclasses.asdict(Manifest.read(artifact))["method"]["elected_from"] == ["a", "b"]
