"""Configurations of mergekit: our result is the one that mergekit 0.1.5 gave, and what differs is refused."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hf_ext.errors import DataError, UsageError
from hf_ext.merging.configuration import MergeConfig
from hf_ext.merging.mergekit import MergekitError
from hf_ext_cli.main import main as command
from tests.kit.refusals import refused
from tests.merging.record_mergekit import CASES, LAYERS, MODELS, RECORDED, in_folder


@pytest.fixture(scope="module")
def recorded() -> dict[str, dict[str, torch.Tensor]]:
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, values in load_file(RECORDED).items():
        what, _, name = key.partition("/")
        found.setdefault(what, {})[name] = values
    return found


@pytest.fixture(scope="module")
def models(recorded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    with safe_open(RECORDED, framework="pt") as file:
        config = json.loads(file.metadata()["config"])
    for model in MODELS:
        (folder / model).mkdir()
        save_file(recorded[model], folder / model / "model.safetensors", metadata={"format": "pt"})
        (folder / model / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    return folder


@pytest.mark.parametrize("name", CASES)
def test_the_result_is_that_of_mergekit(models, recorded, tmp_path, name):
    path = tmp_path / "mergekit.yaml"
    path.write_text(yaml.safe_dump(in_folder(CASES[name], models)))
    result = CliRunner().invoke(command, ["merge", str(path), str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    merged, expected = load_file(tmp_path / "out" / "model.safetensors"), recorded[name]
    assert merged.keys() == expected.keys()
    assert not any(all(torch.equal(merged[key], recorded[model][key]) for key in merged) for model in MODELS)
    for key, values in expected.items():
        # a rounding or two of float32
        torch.testing.assert_close(merged[key], values, rtol=1e-6, atol=1e-7)


def read(**fields: Any) -> MergeConfig:
    models = [{"model": "org/a"}, {"model": "runs/b@v1", "parameters": {"weight": 2}}]
    given = {"merge_method": "ties", "base_model": "org/base", "models": models, "parameters": {"weight": 1}}
    return MergeConfig.from_dict({name: value for name, value in (given | fields).items() if value is not None})


def test_models_become_tasks_with_names_of_their_own():
    models = [{"model": model} for model in ("org/a", "other/A", "x/merged", "./folder with spaces/", "org/a@v2")]
    config = read(models=models, dtype="bfloat16", out_dtype="float16", tokenizer_source="base")
    assert list(config.tasks) == ["a", "A-2", "merged-model", "folder-with-spaces", "a-3"]
    assert list(config.tasks.values()) == [entry["model"] for entry in models]
    assert (config.base, config.method, config.dtype) == ("org/base", "ties_by_tensor", "float16")
    assert config.options == {"weight": 1.0, "density": 1.0, "normalize": True, "scale": 1.0}
    assert read().options["weight"] == {"a": 1.0, "b": 2.0}


def test_the_tokenizer_of_the_base_is_taken_and_a_union_refused_by_either_key():
    for fields in ({"tokenizer_source": "union"}, {"tokenizer": {"source": "union"}}):
        with refused(UsageError, "union"):
            read(**fields)
    for fields in ({"tokenizer_source": "org/base"}, {"tokenizer": {"source": "base"}}):
        assert read(**fields) == read()


ATTENTION = [{"filter": "attn", "value": 1}]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mistyped parameter": ({"parameters": {"densty": 0.1}}, "parameter 'densty'; weight, density, lambda"),
    "method": ({"merge_method": "passthrough"}, "merge_method 'passthrough'; supported methods: linear, slerp"),
    "chance": (
        {"merge_method": "dare_ties"},
        "merge_method 'dare_ties'.* random draws would differ here",
    ),
    "key": ({"allow_negative_weights": True}, "'allow_negative_weights'; base_model, chat_template"),
    "template": ({"chat_template": "chatml"}, "chat_template 'chatml'; supported: auto"),
    "tokenizer": ({"tokenizer_source": "org/b"}, "tokenizer_source 'org/b'"),
    "rows of tokens": ({"tokenizer": {"source": "union", "tokens": {}}}, "tokenizer with source, tokens here"),
    "no base": ({"base_model": None}, "a merge by differences without base_model"),
    "adapter": ({"models": [{"model": "org/a+org/lora"}]}, "model 'org/a.org/lora': name a folder"),
    "twice": ({"models": [{"model": "org/a"}, {"model": "org/a"}]}, "a model that comes twice"),
    "base alone": ({"models": [{"model": "org/base"}]}, "0 model.s. beside the base"),
    "two for model_stock": (
        {"merge_method": "model_stock", "models": [{"model": "org/a"}]},
        "1 model.s. beside the base",
    ),
    "three for slerp": ({"merge_method": "slerp"}, "slerp of 3 models"),
    "no weight": ({"parameters": None}, "no weight of org/a, which this method needs"),
    "no weight elsewhere": ({"parameters": {"weight": ATTENTION}}, "no weight of org/a where no filter fits"),
    "rescale": ({"parameters": {"weight": 1, "rescale": True}}, "rescale: true of ties"),
    "models and slices": ({"slices": []}, "`models` and `slices` both"),
    "entry": ({"models": [{"model": "org/a", "layers": 3}]}, "a model with model, layers; it has model, parameters"),
    "no list": ({"models": {"model": "org/a"}}, "models {'model': 'org/a'}, which must be a list"),
    "bad factor": (
        {"merge_method": "task_arithmetic", "parameters": {"weight": 1, "lambda": "x"}},
        "weight of a must be finite; got \"1 times lambda 'x'\"",
    ),
    "method that is a list": ({"merge_method": ["ties"]}, "merge_method .'ties'.; supported methods"),
    "bad weight": ({"parameters": {"weight": "x"}}, "weight of a must be finite; got 'x'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_give_something_else_is_refused(case):
    fields, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        read(**fields)


VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.sampled_from(["org/a", "org/base", "filter", "value", "weight", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["model", "weight", "filter", "value", "lambda", "density"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)


@given(
    st.sampled_from(["linear", "slerp", "task_arithmetic", "ties", "model_stock"]),
    st.sampled_from(["models", "parameters", "base_model", "slices", "dtype", "merge_method", "tokenizer_source"]),
    VALUES,
    st.dictionaries(st.sampled_from(["weight", "lambda", "t", "normalize", "density", "filter_wise"]), VALUES),
)
def test_whatever_is_in_it_is_read_or_refused_in_words(method, key, value, parameters):
    with contextlib.suppress(ValueError):
        read(**{"merge_method": method, "parameters": parameters, key: value})


def sliced(models: Any, *ranges: list[int], weights: tuple[float, ...] = (1, 1, 1), **fields: Any) -> MergeConfig:
    slices = [
        {
            "sources": [{"model": str(models / name), "layer_range": part} for name in "ab"],
            "parameters": {"weight": weight},
        }
        for part, weight in zip(ranges, weights, strict=False)
    ]
    return read(models=None, base_model=str(models / "base"), slices=slices, **fields)


def test_slices_of_equal_layers_are_the_whole_models(models):
    assert sliced(models, [0, 1], [1, LAYERS]) == sliced(models, [0, LAYERS])


@pytest.mark.parametrize(
    ("ranges", "weights", "fact"),
    [
        (([1, LAYERS],), (1,), "layer_range"),
        (([0, LAYERS - 1],), (1,), f"[0, {LAYERS}]"),
        (([0, 1], [0, LAYERS]), (1, 1), "from 1 on"),
        (([0, 1], [1, LAYERS]), (1, 2), "parameters"),
    ],
)
def test_slices_that_leave_layers_out_or_differ_are_refused(models, ranges, weights, fact):
    with refused(MergekitError, fact):
        sliced(models, *ranges, weights=weights)


def test_a_sum_is_taken_and_a_name_and_the_template_of_all(models, recorded, tmp_path):
    entries = [
        {"model": str(models / name), "parameters": {"weight": weight}} for name, weight in (("a", 2), ("b", -1))
    ]
    given = {"merge_method": "linear", "models": entries, "parameters": {"normalize": False}}
    path = tmp_path / "sum.yaml"
    path.write_text(yaml.safe_dump(given | {"name": "a label", "chat_template": "auto"}))
    result = CliRunner().invoke(command, ["merge", str(path), str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    for key, values in load_file(tmp_path / "out" / "model.safetensors").items():
        torch.testing.assert_close(values, 2 * recorded["a"][key] - recorded["b"][key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("lines", "line"),
    [
        ("merge_method: linear\nmodels: [{model: org/a}]\nchat_template: chatml\n", 3),
        ("# merge_method: dare_ties\nmerge_method: dare_ties\n", 2),
        ("merge_method: linear\nmodels:\n  - model: org/a+org/lora\n", 3),
        ("merge_method: linear\nmodels:\n  - model: org/a\n    parameters:\n      wieght: 1\n", 5),
    ],
)
def test_a_refusal_names_the_line(tmp_path, lines, line):
    (tmp_path / "merge.yaml").write_text(lines)
    with refused(DataError, f"merge.yaml, line {line}:"):
        MergeConfig.from_yaml(tmp_path / "merge.yaml")
