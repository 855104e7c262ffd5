"""Merges side by side, and reported errors beside those of the restored tasks."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from hf_ext.emr import arithmetic
from hf_ext.emr.weights import TaskWeights
from hf_ext.errors import UsageError
from hf_ext.files import write_json
from hf_ext.hub.header_format import CheckpointError
from hf_ext.merging.compare import compare_merges, comparison_table, read_report
from hf_ext.merging.merge import merge_checkpoints
from hf_ext.merging.plan import plan_lines
from tests.emr.emr_testing import push_folder, raw_family, write_weights
from tests.kit.refusals import refused
from tests.merging.merging import merge, siblings

TASKS = ("red", "green", "blue")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base and three fine-tunes with heads of their own."""
    place = tmp_path_factory.mktemp("compared")
    shapes = {"embeddings.weight": (40, 8), "layer.0.weight": (8, 8), "layer.1.weight": (8, 8), "norm.bias": (8,)}
    found = raw_family(place, shapes, TASKS, 0.01)
    for task in TASKS:
        write_weights(place / task, found[task] | {"classifier.weight": torch.randn(len(task), 8)})
    return place


@pytest.fixture(scope="module")
def merges(folders, tmp_path_factory):
    place = tmp_path_factory.mktemp("merges")
    kinds = {"emr": {}, "least": {"rescale": "l2"}, "ties": {"method": "ties", "measure": True}}
    found = {name: merge(siblings(folders, *TASKS), place / name, **options) for name, options in kinds.items()}
    return found | {"two": merge(siblings(folders, *TASKS[:2]), place / "two")}


def restored_error(folders, merge, task):
    """‖W - Ŵ‖² / ‖W - W0‖² from files and the formula, without the code under test."""
    base, own = (load_file(folders / name / "model.safetensors") for name in ("base", task))
    unified = load_file(merge / "model.safetensors")
    masks = load_file(merge / "tasks" / task / "mask.safetensors")
    scale = json.loads((merge / "emr.json").read_text())["tasks"][task]["scale"]
    distance = norm = 0.0
    for name, mask in masks.items():
        bits = (mask[:, None] >> torch.arange(8)) & 1
        bits = bits.view(-1)[: base[name].numel()].view(base[name].shape)
        restored = base[name] + scale * bits * (unified[name] - base[name])
        distance += float((own[name] - restored).double().square().sum())
        norm += float((own[name] - base[name]).double().square().sum())
    return distance / norm


def test_the_reported_error_is_that_of_the_restored_checkpoint(folders, merges):
    for entry in read_report(merges["emr"])["tasks"]:
        task, reported = entry["task"], entry["error"]["rescaled"]
        assert reported == pytest.approx(restored_error(folders, merges["emr"], task), rel=1e-5)
        assert 0.1 < reported < 1
        # The head is restored exactly.
        own = load_file(folders / task / "model.safetensors")["classifier.weight"]
        assert TaskWeights(merges["emr"]).restore(task, "classifier.weight").equal(own)


def test_merges_side_by_side(merges):
    found = compare_merges([merges["emr"], merges["least"], merges["ties"]])
    emr, least, ties = (read_report(merges[name]) for name in ("emr", "least", "ties"))
    assert [merge["method"] for merge in found["merges"]] == ["emr", "emr", "ties"]
    for index, task in enumerate(found["tasks"]):
        errors = [report["tasks"][index]["error"] for report in (emr, least, ties)]
        assert task["errors"] == [errors[0]["global"], errors[1]["l2"], errors[2]["unified"]]
        assert task["one_bit"] == errors[0]["one_bit"]
        # The least squares are what they say, and one model for all cannot keep up.
        assert task["errors"][1] < task["errors"][0] < task["errors"][2]
    first, second, third = found["merges"]
    assert second["error"] == pytest.approx(least["mean"]["error"]["rescaled"]) and found["warnings"] == []
    assert first["bytes"] == emr["sizes"]["artifact"]
    assert first["bytes_with_base"] == emr["sizes"]["artifact_and_base"]
    assert third["bytes_with_base"] == ties["sizes"]["artifact"]
    json.dumps(found, allow_nan=False)


def test_of_merges_that_differ_in_tasks_the_mean_is_over_those_that_all_have(folders, merges, tmp_path):
    found = compare_merges([merges["emr"], merges["two"]])
    errors = {task["task"]: task["errors"] for task in found["tasks"]}
    assert errors["blue"][1] is None
    assert found["merges"][0]["error"] == pytest.approx((errors["red"][0] + errors["green"][0]) / 2)
    # Other checkpoints of the same name are warned of too.
    swapped = {task: str(folders / other) for task, other in zip(TASKS, ("blue", "green", "red"), strict=True)}
    other = compare_merges([merges["emr"], merge(siblings(folders, *TASKS), tmp_path / "swapped", tasks=swapped)])
    (first,), (second,) = found["warnings"], other["warnings"]
    assert "differ in tasks (blue)" in first and "differ in the task vectors of red, blue" in second


def test_comparison_table(merges):
    names = [merges["emr"], merges["ties"], merges["two"]]
    found = compare_merges(names)
    header, lines = comparison_table(found)
    rows = {line[0]: line[1:-1] if line[-1] == "" else line[1:] for line in lines}
    assert header[1:4] == ["emr", "ties", "two"] and rows["blue"][2] == "-" and found["warnings"]
    assert rows["red"][1] == f"{found['tasks'][0]['errors'][1]:.3f}"
    assert (rows["method"], rows["rescale"]) == (["emr", "ties", "emr"], ["global", "-", "global"])
    # Two folders of one name are told apart by their paths.
    twice, _ = comparison_table(compare_merges([names[0], names[0]]))
    assert twice[1:3] == [str(names[0])] * 2


def test_a_report_of_a_hub(merges, url):
    push_folder(url, "org/merged", merges["emr"])
    assert read_report("org/merged", endpoint=url) == read_report(merges["emr"] / "report.json")
    assert compare_merges([merges["emr"], "org/merged"], endpoint=url)["warnings"] == []


def test_what_was_not_measured_is_said_and_changes_no_weight(folders, tmp_path, monkeypatch):
    for method in ("ties", "slerp"):
        given = siblings(folders, "red", "green", method=method)
        with monkeypatch.context() as patch:
            # neither plan nor merge asks for kernels, whose import takes a second
            patch.setattr(arithmetic, "compiled_kernels", pytest.fail)
            found = merge_checkpoints(given, tmp_path / method, progress=False, show=plan_lines)
        measured = merge_checkpoints(given | {"measure": True}, tmp_path / f"{method}-measured", progress=False)
        weights = [(out.path / "model.safetensors").read_bytes() for out in (found, measured)]
        assert weights[0] == weights[1] and measured.report["mean"]["error"]["unified"] > 0
        assert found.report["measured"] is False and found.report["tasks"] == [{"task": "red"}, {"task": "green"}]
        assert found.report["sizes"] == measured.report["sizes"]
        for card, told in ((found.path, True), (measured.path, False)):
            assert ("`--measure`" in (card / "README.md").read_text()) == told
        with refused(CheckpointError, found.path, "--measure"):
            compare_merges([measured.path, found.path])
    # this one has the sums anyway
    elected = merge_checkpoints(siblings(folders, *TASKS, method="elect"), tmp_path / "elect", progress=False)
    assert elected.report["measured"] is True


@pytest.mark.parametrize("method", ["average", "ties", "slerp", "task_arithmetic"])
def test_without_measure_a_sample_warns_of_far_and_of_equal_tasks(tmp_path, method):
    """Blocks, passes, whole tensors and dropped elements: the sample is of the weights as they are stored."""
    found = raw_family(tmp_path, {"wide.weight": (1100, 1000), "norm.bias": (9,)}, ("near", "other"), 0.01)
    generator = torch.Generator().manual_seed(5)
    far = {name: 0.5 * torch.randn(value.shape, generator=generator) for name, value in found["base"].items()}
    twin = {name: value + 1e-3 * torch.randn(value.shape) for name, value in found["near"].items()}
    for name, tensors in (("far", far), ("twin", twin)):
        write_weights(tmp_path / name, tensors, config={"model_type": "bert", "architectures": ["BertModel"]})

    def merged(*tasks, **more):
        given = siblings(tmp_path, *tasks, method=method, **more)
        given |= {"drop": 0.9} if method == "task_arithmetic" else {}
        return merge_checkpoints(given, tmp_path / "out", overwrite=True, progress=False).report

    assert merged("near", "other")["warnings"] == []
    (warning,) = merged("near", "far")["warnings"]
    assert "far is farther from the base" in warning
    measured = next(entry for entry in merged("near", "far", measure=True)["tasks"] if entry["task"] == "far")
    assert float(warning.split("‖W0‖ ")[1].split()[0]) == pytest.approx(measured["norm_to_base"], rel=0.03)
    (warning,) = merged("near", "twin")["warnings"]
    assert "nearly coincide in a sample: near and twin (0.9" in warning or "near and twin (1.00)" in warning
    for name in ("copy", "same"):
        shutil.copytree(tmp_path / "base", tmp_path / name)
    for other, named in (("near", ["copy"]), ("same", ["copy", "same"])):
        # An average may have the base among its models.
        expected = [] if method == "average" else named
        assert [text.split()[0] for text in merged("copy", other)["warnings"]] == expected


def test_what_is_no_merge_is_refused(folders, tmp_path, url):
    with refused(UsageError, "least", "merge"):
        compare_merges([])
    for source in (folders / "red", "nowhere", "org/nothing"):
        with refused(CheckpointError, source, "report.json"):
            read_report(source, endpoint=url)
    for report in ({"format_version": 2, "tasks": []}, {"format_version": 1, "tasks": [{"task": "a"}]}):
        write_json(tmp_path / "report.json", report)
        with refused(CheckpointError, tmp_path):
            compare_merges([tmp_path])
