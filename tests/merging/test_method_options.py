"""Methods of whole tensors against their plain twins, and options by task, layer and name."""

import runpy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_ext.merging.configuration import MergeConfig
from hf_ext.merging.methods import METHODS, Block
from hf_ext.merging.methods.registry import MethodError, find_depths
from tests.emr.emr_testing import raw_family
from tests.kit.refusals import refused
from tests.merging import reference_methods as twin
from tests.merging.merging import merge, run_method, siblings
from tests.merging.reference_methods import assert_close

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("embed.weight", "layers.0.mlp.weight", "layers.0.attn.weight", "layers.1.mlp.weight", "layers.2.mlp.weight")
ARITHMETIC = {"base": "x", "tasks": {"a": "a", "b": "b"}, "method": "task_arithmetic"}
FISHER = {"method": "fisher", "statistics": {"a": "x", "b": "y"}}
DEPTHS = (0.0, 0.0, 0.0, 0.5, 1.0)


def tensors(count=3, shape=(7, 12), seed=0):
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(shape, generator=generator)
    common = torch.randn(shape, generator=generator)
    return base, [base + 0.1 * common + 0.1 * torch.randn(shape, generator=generator) for _ in range(count)]


TIES = {"density": [0.3, 1.0, 0.05], "scale": 0.7}


@pytest.mark.parametrize(
    ("method", "options"),
    [
        *((name, {"weight": w}) for name in ("average", "task_arithmetic") for w in ([1.0] * 3, [0.5, 0.2, -0.1])),
        *(("ties_by_tensor", {"weight": [1.0] * 3, "normalize": normalize} | TIES) for normalize in (True, False)),
        *(("ties_by_tensor", {"weight": [0.5, 2.0, 0.1], "normalize": on} | TIES) for on in (True, False)),
    ],
)
def test_methods_with_weights_are_their_twins(method, options):
    base, models = tensors()
    assert_close(run_method(method, base, models, **options), getattr(twin, method)(base, models, **options))


def test_ties_of_a_model_of_one_tensor_is_ties_by_tensor_where_the_weights_are_equal():
    base, models = tensors()
    config = MergeConfig.from_dict({"base": "b", "tasks": {"t": "t"}, "method": "ties_by_tensor"})
    shared = run_method("ties_by_tensor", base, models, **config.find_options("w", 0.0, "abc"))
    # What reaches `ties` is trimmed.
    kept = [model - base for model in models]
    kept = [vector * (vector.abs() >= vector.abs().flatten().sort(descending=True).values[15]) for vector in kept]
    block = Block("w", tuple(base.shape), 0, base, kept)
    assert_close(METHODS["ties"].function(block, weight=[1.0] * 3, density=[0.2] * 3), shared.double())


@pytest.mark.parametrize("shape", [(7, 12), (30,), (4, 3, 2)])
@pytest.mark.parametrize("filter_wise", [True, False])
@pytest.mark.parametrize("away", [True, False])
def test_model_stock_is_its_twin(shape, filter_wise, away):
    base, models = tensors(shape=shape)
    # opposed, so that some cosines are negative
    models[2] = base - 1.5 * (models[0] - base)
    options = {"filter_wise": filter_wise, "away": away}
    assert_close(run_method("model_stock", base, models, **options), twin.model_stock(base, models, **options))


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-5])
@pytest.mark.parametrize("filter_wise", [True, False])
def test_model_stock_of_small_differences_is_that_of_mergekit(tmp_path, scale, filter_wise):
    """It divides by no product of norms below 1e-6."""
    base, models = (
        torch.zeros(5, 8),
        [scale * torch.randn(5, 8, generator=torch.Generator().manual_seed(i)) for i in (1, 2)],
    )
    models[1] += models[0]
    first, second = (model if filter_wise else model.view(1, -1) for model in models)
    cosine = (first * second).sum(1) / (first.norm(dim=1) * second.norm(dim=1)).clamp(min=1e-6)
    expected = ((2 * cosine / (1 + cosine))[:, None] * (first + second) / 2).view(5, 8)
    given = {"merge_method": "model_stock", "base_model": "0", "models": [{"model": "a"}, {"model": "b"}]}
    read = MergeConfig.from_dict(given | {"parameters": {"filter_wise": filter_wise}})
    found = run_method("model_stock", base, models, **read.find_options("w", 0.0, ["a", "b"]))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(40, 25), (7,), (1,), ()])
@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 0.99])
def test_ties_by_tensor_keeps_its_share_of_equal_elements(dtype, shape, share):
    """As many as mergekit, spread over the tensor."""
    signs = torch.randint(2, shape, generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    for moved in (signs, signs * (1 + torch.arange(signs.numel()).view(shape) % 3)):
        one = (moved / 128).to(dtype).float()
        found = run_method("ties_by_tensor", torch.zeros(shape), [one], weight=[1.0], density=[share])
        kept = found != 0
        assert int(kept.sum()) == max(1, int(share * one.numel())) and torch.equal(found[kept], one[kept])
        assert float(one[kept].abs().min()) >= max(one[~kept].abs().tolist(), default=0.0)
        if one.ndim == 2 and moved is signs:
            rows = kept.sum(1)
            assert int(rows.max() - rows.min()) <= 1
        sparse = one * (torch.arange(one.numel()).view(shape) == 0)
        assert torch.equal(run_method("ties_by_tensor", 0 * one, [sparse], weight=[1.0], density=[share]), sparse)


def test_slerp_is_its_twin_and_straight_where_there_is_no_arc():
    base, models = tensors(count=2)
    for t in (0.0, 0.3, 1.0):
        assert_close(run_method("slerp", base, models, t=t), twin.slerp(*models, t))
        assert_close(run_method("slerp", base, models[:1], t=t), twin.slerp(base, models[0], t))
    for size in (1e-2, 1e-4):
        wanted = twin.slerp(base, size * models[0], 0.5)
        found = run_method("slerp", base, [size * models[0]], t=0.5)
        assert (found.double() - wanted).norm() < 1e-4 * wanted.norm()
    assert_close(run_method("slerp", base, [2 * base], t=0.25), 1.25 * base.double())
    assert_close(run_method("slerp", base, [-base], t=0.25), 0.5 * base.double())
    expected = twin.slerp(torch.eye(2)[0], torch.eye(2)[1], 0.25)[1]
    assert_close(run_method("slerp", torch.zeros(3), [torch.ones(3)], t=0.25), expected.repeat(3))
    # one of two tasks has no such tensor: it is the other's
    assert_close(run_method("slerp", base, models[:1], t=0.25, count=2), models[0].double())


@pytest.mark.parametrize("weight", [[0.0, 0.0, 0.0], [0.1, 0.2, -0.3]])
def test_an_average_of_nothing_is_refused(weight):
    with refused(MethodError, "add"):
        run_method("average", *tensors(), weight=weight)


def test_depths_go_from_the_first_layer_to_the_last_of_each_stack():
    names = [*NAMES, "decoder.block.0.weight", "decoder.block.4.layer.1.weight", "alone.0.weight", "norm"]
    assert list(find_depths(names).values()) == [*DEPTHS, 0.0, 1.0, 1.0, 0.0]
    # a number that is no layer's, and that Python does not read
    assert list(find_depths([f"a.{'1' * 5000}.w", "a.x2.w", "2.w", "5"]).values()) == [0.0, 0.0, 0.4, 1.0]


SETTINGS = {
    "one for all": (0.5, [[0.5, 0.5]] * 5),
    "by layer": ([0.0, 1.0], [[0, 0], [0, 0], [0, 0], [0.5, 0.5], [1, 1]]),
    "between three": ([0, 1, 0], [[0, 0], [0, 0], [0, 0], [1, 1], [0, 0]]),
    "by name": (
        [{"filter": "mlp", "value": [0.2, "4e-1"]}, {"filter": "attn", "value": 9}],
        [[0.3, 0.3], [0.2, 0.2], [9, 9], [0.3, 0.3], [0.4, 0.4]],
    ),
    "by task": ({"b": 2, "a": [1, 3]}, [[1, 2], [1, 2], [1, 2], [2, 2], [3, 2]]),
    "of one task": ({"b": [{"filter": "*", "value": 7}]}, [[0.3, 7]] * 5),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_a_setting_has_a_value_for_each_task_and_tensor(case):
    setting, expected = SETTINGS[case]
    config = MergeConfig.from_dict(ARITHMETIC | {"weight": setting})
    assert MergeConfig.from_dict(config.to_dict()) == config
    for name, depth, values in zip(NAMES, DEPTHS, expected, strict=True):
        assert config.find_options(name, depth, ["a", "b"])["weight"] == pytest.approx(values)
    assert config.find_options(NAMES[0], 0.0, ["b"])["weight"] == pytest.approx(expected[0][1:])


@pytest.mark.parametrize(
    ("fields", "facts"),
    [
        ({"weight": {"c": 1}}, ("weight", "'c'", "a, b")),
        ({"weight": []}, ("weight", "empty list")),
        ({"weight": [1, {"value": 1}]}, ("`value`", "`filter`")),
        ({"weight": [{"filter": "a"}]}, ("`value`",)),
        ({"weight": [{"value": [{"value": 1}]}]}, ("`value` is a number or a list",)),
        ({"method": "ties", "density": {"a": [0.1, 0.2]}}, ("density of a", "whole model")),
        ({**FISHER, "weight": {"a": 0}}, ("weight of a", "more than 0", "got 0")),
        ({"method": "slerp", "t": {"a": 1}}, ("t must be one value for all tasks",)),
        ({"method": "slerp", "t": 1.5}, ("t must be in [0, 1]", "1.5")),
        ({"method": "model_stock", "filter_wise": 1}, ("filter_wise", "true or false", "got 1")),
        ({"method": "slerp", "tasks": {"a": "a", "b": "b", "c": "c"}}, ("'slerp'", "at most 2 tasks", "a, b, c")),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused(fields, facts):
    with refused(ValueError, *facts):
        MergeConfig.from_dict(ARITHMETIC | fields)


def test_checkpoints_are_merged_with_the_values_of_each_layer_and_task(tmp_path):
    base, *tasks = raw_family(tmp_path, dict.fromkeys(NAMES, (9, 40)), "ab", 0.1).values()

    def merged(out, **fields):
        return load_file(merge(siblings(tmp_path, "a", "b"), tmp_path / out, **fields) / "model.safetensors")

    weight = {"a": [0, 1], "b": [{"filter": "attn", "value": 0.9}, {"value": 0.1}]}
    found = merged("out", method="task_arithmetic", weight=weight)
    for name, depth in zip(NAMES, DEPTHS, strict=True):
        weights = [depth, 0.9 if "attn" in name else 0.1]
        assert_close(found[name], twin.task_arithmetic(base[name], [task[name] for task in tasks], weights))
    assert "filter: attn" in (tmp_path / "out" / "README.md").read_text()
    found = merged("slerp", method="slerp", t=[0.2, 0.6])
    for name, depth in zip(NAMES, DEPTHS, strict=True):
        assert_close(found[name], twin.slerp(tasks[0][name], tasks[1][name], 0.2 + 0.4 * depth))
    with refused(MethodError, "add up to 0"):
        merged("bad", method="average", weight={"a": 1, "b": -1})
    # there is nothing to go on from
    assert [path.name for path in tmp_path.iterdir() if "bad" in path.name] == []


def test_every_file_of_the_folder_has_a_method_and_every_method_and_option_is_on_their_page():
    files = {path.stem for path in (ROOT / "hf_ext" / "merging" / "methods").glob("*.py")}
    found = {method.function.__module__.rpartition(".")[2] for method in METHODS.values()}
    assert files - {"__init__", "options", "registry"} <= found
    page = runpy.run_path(str(ROOT / "docs" / "merge_reference.py"))["write_reference"]()
    for name, method in METHODS.items():
        section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert section and all(f"| `{option}` |" in section for option in method.options)
