"""1-bit and ternary deltas: kernels, artifacts, loader, EMRModel, updates, report and plan."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_ext import EMRModel
from hf_ext.emr import arithmetic
from hf_ext.emr.arithmetic import DTYPES, SUMS, Sums
from hf_ext.emr.artifact import mask_bytes, verify_artifact
from hf_ext.emr.emr_loader import restore
from hf_ext.emr.manifest import Manifest
from hf_ext.emr.report import report_markdown, report_tables
from hf_ext.emr.weights import TaskWeights
from hf_ext.hub.header_format import CheckpointError
from hf_ext.merging.plan import make_plan, plan_lines
from hf_ext.merging.updating import add_task, remove_task
from tests.emr.emr_testing import family, tiny_bert
from tests.emr.reference_ops import relative_error, unpack_mask
from tests.emr.use_testing import alone, assert_rows, copied, edit_manifest, equal
from tests.kit.refusals import refused
from tests.merging.conftest import short_segments
from tests.merging.merging import merge, write_set

METHODS = ("onebit", "ternary")
# Applies to the merges of this file too.
assert short_segments


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Tensors in three types, of odd lengths, longer than a unit."""
    return write_set(tmp_path_factory.mktemp("set"), tasks=4)


def read(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def one_bit(base, task):
    """W_0 ± the mean magnitude of the difference, of one tensor; what did not change goes down."""
    vector = task.double() - base.double()
    return base.double() + torch.where(vector > 0, 1.0, -1.0) * vector.abs().mean()


def ternary(base, task, density):
    """The largest share over all tensors moves by the mean magnitude of those in its tensor."""
    vectors = {name: (task[name].float() - base[name].float()).double() for name in base}
    magnitudes = torch.cat([vector.abs().flatten() for vector in vectors.values()]).sort(descending=True).values
    smallest = magnitudes[max(1, int(density * len(magnitudes))) - 1]
    restored = {}
    for name, vector in vectors.items():
        kept = (vector.abs() >= smallest) & (vector != 0)
        scale = vector.abs()[kept].mean() if kept.any() else 0.0
        restored[name] = base[name].double() + scale * vector.sign() * kept
    return restored


def merged_names(base):
    return [name for name, values in base.items() if values.is_floating_point()]


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("length", [0, 1, 13, 20_003])
def test_directions_are_packed_and_restored(kernels, kind, length):
    generator = torch.Generator().manual_seed(length)
    base = torch.randn(length, generator=generator).to(kind)
    tasks = [(base.float() + 0.1 * torch.randn(length, generator=generator)).to(kind) for _ in range(2)]
    vectors = [task.float() - base.float() for task in tasks]
    kept = [vector * (torch.rand(length, generator=generator) < 0.5) for vector in vectors]
    planes = [torch.zeros(count, 2, mask_bytes(length), dtype=torch.uint8) for count in (1, 2)]
    sums = [Sums.zeros(2), Sums.zeros(2)]
    for moved, packed, found in zip((vectors, kept), planes, sums, strict=True):
        arithmetic.pack_directions(base, tasks, moved, packed, found)
    for index, (vector, part) in enumerate(zip(vectors, kept, strict=True)):
        for direction, packed, found in (
            (torch.where(vector > 0, 1.0, -1.0), planes[0], sums[0]),
            (part.sign(), planes[1], sums[1]),
        ):
            for target in DTYPES:
                out = torch.empty(length, dtype=target)
                arithmetic.find_kernels("cpu").restore_directions(base, packed[:, index], 0.3, out)
                assert torch.equal(out, (base.float() + 0.3 * direction).to(target))
            measured = dict(zip(SUMS, found.tasks[index].tolist(), strict=True))
            exact, moved = vector.double(), float((direction != 0).sum())
            assert measured["abs"] == pytest.approx(float(exact.abs().sum()), rel=1e-12)
            assert measured["square"] == pytest.approx(float(exact.square().sum()), rel=1e-12)
            assert measured["masked_dot"] == pytest.approx(float((exact * direction).sum()), rel=1e-12)
            assert [measured[name] for name in ("mask", "masked_abs", "masked_square")] == [moved] * 3
            assert [measured[name] for name in ("dot", "opposed", "weight_opposed")] == [0] * 3
    for found in sums:
        assert float(found.totals[0]) == pytest.approx(float(base.double().square().sum()), rel=1e-12)
        assert found.totals[1:].tolist() == [0] * 3 and torch.equal(found.gram, sums[0].gram)


@pytest.mark.parametrize("method", METHODS)
def test_an_artifact_restores_what_is_defined(models, tmp_path, method):
    options = {"density": 0.3} if method == "ternary" else {}
    out = merge(models, tmp_path / "out", method=method, **options)
    base, weights = read(Path(models["base"])), TaskWeights(out)
    assert list(out.glob("model*")) == [] and verify_artifact(out).wrong == []
    report = json.loads((out / "report.json").read_text())
    for place, (task, folder) in enumerate(models["tasks"].items()):
        own, names = read(Path(folder)), merged_names(base)
        signs = {name: one_bit(base[name], own[name]) for name in names}
        expected = signs if method == "onebit" else ternary({n: base[n] for n in names}, own, 0.3)
        loaded = restore(out, task)
        assert loaded.keys() == own.keys()
        for name, values in loaded.items():
            assert torch.equal(values, weights.restore(task, name))
            if name in names:
                torch.testing.assert_close(values.double(), expected[name], rtol=1e-6, atol=1e-7)
            else:
                assert torch.equal(values, own[name])
        vectors = [torch.cat([(w[n].double() - base[n].double()).flatten() for n in names]) for w in (own, loaded)]
        error = report["tasks"][place]["error"]
        assert error["rescaled"] == pytest.approx(relative_error(*vectors), rel=1e-4)
        plain = torch.cat([(signs[n] - base[n].double()).flatten() for n in names])
        assert error["one_bit"] == pytest.approx(relative_error(vectors[0], plain), rel=1e-4)
        assert error["unified"] is None and report["tasks"][place]["sign_conflict"]["weights"] is None
    text = str(report_tables(report)) + report_markdown(report)
    assert "nan" not in text.lower() and "unified" not in text
    card = (out / "README.md").read_text()
    assert "There is no model at the root" in card and f"method: {method}" in card


def test_planes_are_bits_of_a_sign_and_of_what_is_kept(models, tmp_path):
    onebit, ternary = (merge(models, tmp_path / method, method=method) for method in METHODS)
    base, own = (read(Path(place)) for place in (models["base"], models["tasks"]["t0"]))
    for name in merged_names(base):
        one, two = (load_file(folder / "tasks" / "t0" / "mask.safetensors")[name] for folder in (onebit, ternary))
        assert len(two) == 2 * len(one) == 2 * mask_bytes(base[name].numel())
        signs, kept = two.view(2, -1)
        # a sign is only where something is kept
        assert not (signs & ~kept).any() and torch.equal(signs, one & kept)
        bits = unpack_mask(one, base[name].numel())
        assert torch.equal(bits, (own[name].float() > base[name].float()).flatten())
    assert Manifest.read(ternary).tasks["t0"].density == pytest.approx(0.4, abs=1e-3)


@pytest.fixture(scope="module", params=METHODS)
def berts(request, tmp_path_factory):
    place = tmp_path_factory.mktemp("berts")
    config = family(place, tiny_bert, ("two", "five")) | {"method": request.param}
    tiny_bert(place / "five", 2, base=place / "base", num_labels=5)
    return config, merge(config, place / "merged")


def test_a_model_turns_into_each_task_and_takes_mixed_batches(berts, tmp_path):
    config, folder = berts
    emr = EMRModel.from_pretrained(folder, task="two")
    first = copied(emr.model)
    ids = torch.randint(5, 20, (4, 7), generator=torch.Generator().manual_seed(0))
    right = alone(emr, {"input_ids": ids}, mixed := ["two", "five"] * 2)
    assert equal(copied(emr.set_task("five").set_task("two").model), first) and right[1].shape == (5,)
    assert_rows(emr(input_ids=ids, task_ids=mixed).logits, right)
    loaded = restore(folder, "five")
    assert equal(read(emr.export("five", tmp_path / "five")), loaded)
    name = next(iter(loaded))
    least = TaskWeights(folder, rescale="tensor_l2")
    assert least.restore("two", name).equal(TaskWeights(folder).restore("two", name))


def test_tasks_are_added_and_removed_without_a_change_of_the_others(berts, tmp_path):
    config, folder = berts
    alone = merge(config | {"tasks": {"two": config["tasks"]["two"]}}, tmp_path / "alone")
    before = restore(alone, "two")
    for frozen in (True, False):
        add_task(alone, "five", config["tasks"]["five"], frozen=frozen)
        assert all(equal(restore(alone, task), restore(folder, task)) for task in ("two", "five"))
        assert "without influence" not in (alone / "README.md").read_text()
        assert remove_task(alone, "five")["tasks"] == ["two"] and verify_artifact(alone).wrong == []
        assert equal(restore(alone, "two"), before)


def test_a_manifest_of_the_other_deltas_is_refused(berts, tmp_path):
    folder = merge(berts[0], tmp_path / "merged")
    planes = Manifest.read(folder).deltas
    edit_manifest(folder, lambda manifest: manifest.update(deltas=3 - planes))
    with refused(CheckpointError, "need"):
        TaskWeights(folder).restore("two", "bert.embeddings.word_embeddings.weight")
    if planes == 1:
        with refused(ValueError, "elements"):
            restore(folder, "two")
    edit_manifest(folder, lambda manifest: manifest["tensors"][0].update(elements=0, dtype="I64"))
    with refused(ValueError, "no merged"):
        restore(folder, "two")


def test_the_plan_warns_of_an_artifact_that_saves_nothing(models, tmp_path):
    two = models | {"tasks": dict(list(models["tasks"].items())[:1])}
    with make_plan(two | {"method": "onebit"}) as plan:
        assert any("this saves no space." in line for line in plan_lines(plan))
        assert "no unified model" in "\n".join(plan_lines(plan))
    # two of the base's own type: the unified model is as large as one of them
    two = models | {"tasks": {name: models["tasks"][name] for name in ("t0", "t3")}}
    with make_plan(two) as plan:
        warned = [text for text in plan.warnings if "this saves no space" in text]
        assert len(warned) == 1 and "Method onebit needs" in warned[0]
    with make_plan(two | {"method": "onebit"}) as plan:
        assert not any("this saves no space" in text for text in plan.warnings)
