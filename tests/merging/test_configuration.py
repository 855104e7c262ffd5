"""MergeConfig, also of mergekit's files: what it takes and refuses; our results are those of mergekit 0.1.5."""

import contextlib
import json
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hf_ext.errors import DataError, UsageError
from hf_ext.merging.configuration import MergeConfig, load_config, whole_number
from hf_ext.merging.mergekit import MergekitError
from hf_ext.settings import SettingsError
from tests.kit.command_line import run
from tests.kit.refusals import refused
from tests.merging.record_mergekit import CASES, LAYERS, MODELS, RECORDED, in_folder

BASE: dict[str, Any] = {"base": "org/base", "tasks": {"a": "org/a", "b": "runs/b"}}


def test_a_yaml_file_is_read_with_its_defaults_and_written_back_the_same(tmp_path):
    path = tmp_path / "merge.yaml"
    path.write_text(
        "base: org/base@v1\ntasks:\n  emotion: org/emotion\n  irony: runs/irony\n"
        "method: ties\nweight: 1\ndensity: 3e-1\nexclude: ['.*classifier.*']\nmemory: 0.5 gb\nworkers: 3\n"
    )
    config = MergeConfig.from_yaml(path)
    assert (list(config.tasks), config.with_masks) == (["emotion", "irony"], False)
    assert config.arguments == {"weight": 1.0, "density": 0.3}
    assert (config.memory_bytes, config.shard_bytes) == (500_000_000, 5_000_000_000)
    path.write_text(yaml.safe_dump(config.to_dict()))
    assert MergeConfig.from_yaml(path) == config == MergeConfig.from_dict(config.to_dict()) == load_config(path)
    assert load_config(config) is config and load_config(config.to_dict()) == config


@pytest.mark.parametrize(
    ("options", "masks", "arguments"),
    [
        ({}, True, {"tie": "zero"}),
        ({"method": "elect", "tie": "negative"}, False, {"tie": "negative"}),
        ({"method": "task_arithmetic"}, False, {"weight": 0.3}),
        ({"method": "task_arithmetic", "weight": 0.5, "masks": True}, True, {"weight": 0.5}),
        ({"method": "task_arithmetic", "options": {"weight": 0.5}}, False, {"weight": 0.5}),
        ({"method": "given", "merged": "org/merged"}, True, {}),
        ({"method": "average", "weight": None}, False, {"weight": 1.0, "normalize": True}),
    ],
)
def test_masks_and_options_follow_from_the_method(options, masks, arguments):
    config = MergeConfig.from_dict(BASE | options)
    assert (config.with_masks, config.arguments) == (masks, arguments)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"weigth": 1}, "unknown key 'weigth'. Did you mean 'weight'"),
    "unknown method": ({"method": "emrr"}, "method must be one of 'emr', 'elect'"),
    "type": ({"include_base": "perhaps"}, "include_base"),
    "options that are none": ({"options": 5, "tie": "zero"}, "Field 'options' expected a dict, got int"),
    "more memory than there are numbers": ({"memory": "9" * 400 + "GB"}, "memory must be a number and a unit"),
    "tasks as a list": ({"tasks": ["a"]}, "tasks"),
    "no tasks": ({"tasks": {}}, "tasks is empty"),
    "no base": ({"base": " "}, "base is empty"),
    "a task without a source": ({"tasks": {"a": ""}}, "task 'a' has no source"),
    "names that differ in capitals": ({"tasks": {"a": "x", "A": "y"}}, "differ only in upper and lower case"),
    "given without model": ({"method": "given"}, "needs `merged`"),
    "weight that is no number": ({"method": "ties", "weight": ["x"]}, "weight must be finite; got"),
    "density of nothing": ({"method": "ties", "density": 0.0}, r"density must be in \(0, 1\]"),
    "drop of all": ({"drop": 1.0}, r"drop must be in \[0, 1\)"),
    "given without masks": ({"method": "given", "merged": "x", "masks": False}, "would copy `merged`"),
    "rescale without masks": ({"method": "ties", "rescale": "l2"}, "rescale does not go with method 'ties'"),
    "drop of deltas": ({"method": "onebit", "drop": 0.5}, "drop does not go with method 'onebit'"),
    "unknown option": ({"options": {"weigth": 1}}, "no method has it"),
    "emr without masks": ({"masks": False}, "masks: false does not go with method 'emr'"),
    "rescale of deltas": ({"method": "onebit", "rescale": "official"}, "each tensor has its own scale"),
    "adapters of other parts": ({"method": "average", "adapters": "adapter", "allow_missing": True}, "allow_missing"),
    "expression": ({"exclude": ["("]}, "not a valid regular expression"),
    "little memory": ({"memory": "10KB"}, "memory must be at least 1MB"),
    "no workers": ({"workers": 0}, "workers must be a whole number of at least 1"),
    "seed": ({"seed": -1}, "seed must be 0 or more"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_said_with_what_is_allowed(case):
    options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        MergeConfig.from_dict(BASE | options)


def test_bad_yaml_is_refused_with_the_name_of_the_file_as_are_no_file_and_other_types(tmp_path):
    for text, *facts in (
        ("base: a\nbase: b\ntasks: {x: y}\n", "repeated key", "base"),
        ("base: a\n", "missing key", "tasks"),
        ("- base\n", "must hold `key: value` lines"),
        ("base: [a\n", "not usable YAML"),
        ("base: !!python/object/apply:os.getcwd []\ntasks: {x: y}\n", "not usable YAML"),
    ):
        (tmp_path / "merge.yaml").write_text(text)
        with refused(ValueError, "merge.yaml", *facts):
            load_config(str(tmp_path / "merge.yaml"))
    with refused(FileNotFoundError, "nowhere.yaml"):
        load_config(Path("nowhere.yaml"))
    with refused(TypeError, "MergeConfig", "YAML"):
        load_config(3)  # type: ignore[arg-type]


def test_numbers_of_numpy_are_those_of_python():
    given = BASE | {"method": "average", "seed": np.uint8(3), "drop": np.float32(0.5), "masks": np.True_}
    config = MergeConfig(**given, options={"weight": {"a": np.float64(0.5)}, "normalize": np.False_})
    plain = {"method": "average", "seed": 3, "drop": 0.5, "masks": True, "weight": {"a": 0.5}, "normalize": False}
    assert config == MergeConfig.from_dict(BASE | plain) and "np." not in repr(config)
    assert MergeConfig(**BASE, drop=0).drop == 0.0 and whole_number("rank", np.int64(2)) == 2
    for value in (2.0, True, np.True_, "2", 0, None):
        with refused(UsageError, "rank", "at least 1"):
            whole_number("rank", value)


@pytest.mark.parametrize("name", ["..", "a/b", "a\\b", "", "a\n", "x" * 65, "ä", "base", "merged", "C:"])
def test_names_that_are_no_folders_of_their_own_are_refused(name):
    with refused(SettingsError, "task", "name"):
        MergeConfig.from_dict(BASE | {"tasks": {name: "org/a"}})


@given(st.text(st.sampled_from(string.printable + "é中\x00"), max_size=70))
def test_every_name_that_is_taken_stays_in_its_folder(name):
    try:
        MergeConfig.from_dict(BASE | {"tasks": {name: "org/a"}})
    except ValueError:
        return
    folder = Path("/merged/tasks")
    assert Path(folder, name).parent == folder and Path(folder, name).resolve().parent == folder.resolve()
    assert 1 <= len(name) <= 64


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


def merge(folder: Path, configuration: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The weights that `hf-ext merge` makes of a file of mergekit."""
    path = folder / "mergekit.yaml"
    path.write_text(yaml.safe_dump(configuration))
    run("merge", path, folder / "out")
    return load_file(folder / "out" / "model.safetensors")


@pytest.mark.parametrize("name", CASES)
def test_the_result_is_that_of_mergekit(models, recorded, tmp_path, name):
    merged, expected = merge(tmp_path, in_folder(CASES[name], models)), recorded[name]
    assert not any(all(torch.equal(merged[key], recorded[model][key]) for key in merged) for model in MODELS)
    # a rounding or two of float32
    torch.testing.assert_close(merged, expected, rtol=1e-6, atol=1e-7)


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
    # The tokenizer of the base is taken by either key.
    assert read(tokenizer_source="org/base") == read(tokenizer={"source": "base"}) == read()


HEAD = "merge_method: ties\nbase_model: org/base\nparameters: {weight: 1}\n"
ONE = HEAD + "models: [{model: org/a}]\n"
BOTH = "models: [{model: org/a}, {model: org/b}]\n"
# Of each file the line that a refusal names, and a fact.
REFUSED_OF_MERGEKIT: dict[str, tuple[str, int, str]] = {
    "method": (ONE.replace("ties", "passthrough"), 1, "linear, slerp"),
    "chance": ("# merge_method: dare_ties\nmerge_method: dare_ties\n", 2, "random draws"),
    "key": (ONE + "allow_negative_weights: true\n", 5, "allow_negative_weights"),
    "anchor in a key of its own": ("x: &all {weight: 1}\n" + ONE, 1, "'x'"),
    "template": (ONE + "# chat_template: chatml\nchat_template: chatml # as above\n", 6, "chatml"),
    "union of tokens": (ONE + "tokenizer_source: union\n", 5, "union"),
    "tokenizer that is a text": (ONE + "tokenizer: base\n", 5, "'base'"),
    "two tokenizers": (ONE + "tokenizer_source: base\ntokenizer: {source: base}\n", 5, "tokenizer_source"),
    "type": (ONE + "dtype: bf16\n", 5, "bf16"),
    "no base": (ONE.replace("base_model: org/base\n", ""), 1, "base_model"),
    "adapter apart": (ONE.replace("org/base", "{model: {path: org/base}, lora: {path: org/lora}}"), 2, "org/lora"),
    "rows": (ONE + "tokenizer: {source: base, pad_to_multiple_of: 8}\n", 5, "pad_to_multiple_of"),
    "tokens": (ONE + "tokenizer: {source: base, tokens: {a: b}}\n", 5, "tokens"),
    "lambda of layers": (
        ONE.replace("ties", "task_arithmetic").replace("weight: 1", "weight: [1, 2], normalize: true, lambda: 2"),
        *(1, "lambda"),
    ),
    "path of no text": (ONE.replace("org/base", "{model: {path: [org/base], revision: x}}"), 2, "org/base"),
    "adapter": (HEAD + "models:\n  - model: org/a+org/lora\n", 5, "org/lora"),
    "twice": (HEAD + "models:\n  - model: org/a\n  - model: org/a\n", 6, "twice"),
    "two for model_stock": (ONE.replace("ties", "model_stock"), 4, "1 model(s)"),
    "three for slerp": (HEAD.replace("ties", "slerp") + BOTH, 4, "3 models"),
    "no weight": ("merge_method: linear\nmodels:\n  - model: org/a\n", 3, "org/a"),
    "mistyped parameter": (HEAD + "models:\n  - model: org/a\n    parameters:\n      wieght: 1\n", 7, "'wieght'"),
    "one model's flag": (HEAD + "models:\n  - model: org/a\n    parameters: {normalize: false}\n", 6, "'normalize'"),
    "models and slices": (ONE + "slices: []\n", 5, "slices"),
    "no list": (HEAD + "models: {model: org/a}\n", 4, "list"),
    "factor that is a text": (ONE.replace("ties", "task_arithmetic").replace("weight", "lambda: x, weight"), 3, "'x'"),
    "two filters in one": (ONE.replace("weight: 1", "weight: [{filter: [q, k], value: 1}]"), 3, "['q', 'k']"),
    "share": (ONE.replace("weight: 1", "weight: 1, density: 1.5"), 3, "1.5"),
    "tab": ("merge_method: linear\nmodels:\n\t- model: org/a\n", 3, "line 3"),
    "two files in one": (ONE + "---\n" + ONE, 5, "line 5"),
}


@pytest.mark.parametrize("case", REFUSED_OF_MERGEKIT)
def test_what_would_give_something_else_is_refused_with_its_line(tmp_path, case):
    text, line, fact = REFUSED_OF_MERGEKIT[case]
    (tmp_path / "merge.yaml").write_text(text)
    with refused(DataError, "merge.yaml", f"line {line}", fact):
        MergeConfig.from_yaml(tmp_path / "merge.yaml")


@pytest.mark.parametrize(
    "text",
    [
        ONE.replace("{weight: 1}", "{weight: 1, int8_mask: true}"),
        ONE + "dtype: torch.float32\nname: label\nchat_template: auto\n",
        ONE.replace("org/a", "{model: {path: org/a, revision: null}, lora: null}"),
        ONE + "tokenizer: {source: base, tokens: {}, pad_to_multiple_of: null}\n",
        "\ufeff---\n" + ONE.replace("\n", " # a comment\r\n") + "...\n",
        "merge_method: ties\nbase_model: org/base\nmodels:\n  - &one\n    model: org/b\n    parameters: {weight: 1}\n"
        "  - <<: *one\n    model: org/a\n",
    ],
)
def test_other_forms_of_a_file_mean_the_same(tmp_path, text):
    (tmp_path / "merge.yaml").write_bytes(text.encode())
    config = MergeConfig.from_yaml(tmp_path / "merge.yaml")
    assert config.tasks["a"] == "org/a"
    assert config.options == {"weight": 1.0, "density": 1.0, "normalize": True, "scale": 1.0}


WORDS = ["org/a", "org/base", "filter", "value", "weight", "x"]
KEYS = st.sampled_from(["model", "weight", "filter", "value", "lambda", "density"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
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


def test_slices_of_some_of_the_layers_are_refused(models):
    allowed, base = [[0, 1], [1, 2], [2, LAYERS]], str(models / "base")
    cases = [("layer_range", [[1, LAYERS]]), (f"[0, {LAYERS}]", [[0, LAYERS - 1]]), (None, allowed)]
    cases += [("second slice", [[0, 1], [2, LAYERS]]), ("second slice", [[0, 1], [0, LAYERS]])]
    for fact, ranges in cases:
        slices = slices_of(models, ranges)
        with refused(MergekitError, fact) if fact else contextlib.nullcontext():
            plain = [{"model": source["model"]} for source in slices[0]["sources"]]
            assert read(models=None, base_model=base, slices=slices) == read(models=plain, base_model=base)
    weight: Any
    for weight, told in ((2, False), ([{"filter": "mlp", "value": 2}, {"value": 1}], False), ([1, 2], True)):
        with refused(MergekitError, "second slice") if told else contextlib.nullcontext():
            read(models=None, base_model=base, slices=slices_of(models, allowed), parameters={"weight": weight})
    for change in ({"parameters": {"weight": 3}}, {"sources": slices_of(models, [[1, 2]])[0]["sources"][:1]}):
        one, two, three = slices_of(models, allowed)
        with refused(MergekitError, "second slice"):
            read(models=None, base_model=base, slices=[one, two | change, three])


def slices_of(models: Path, ranges: list[list[int]]) -> list[dict[str, Any]]:
    return [{"sources": [{"model": str(models / name), "layer_range": part} for name in "ab"]} for part in ranges]


@pytest.mark.parametrize(("weights", "factor"), [((1, 3), 2), ((2, 2), 0.5), ((3, -1), 1.5)])
def test_a_factor_of_all_differences_scales_their_mean(models, recorded, tmp_path, weights, factor):
    entries = [
        {"model": str(models / name), "parameters": {"weight": own}} for name, own in zip("ab", weights, strict=True)
    ]
    given = {"merge_method": "task_arithmetic", "models": entries, "base_model": str(models / "base")}
    for key, values in merge(tmp_path, given | {"parameters": {"lambda": factor, "normalize": True}}).items():
        base, *parts = (recorded[name][key] for name in ("base", "a", "b"))
        mean = sum(own * (part - base) for own, part in zip(weights, parts, strict=True)) / sum(weights)
        torch.testing.assert_close(values, base + factor * mean, rtol=1e-5, atol=1e-6)


def test_a_sum_is_taken_and_a_name_and_the_template_of_all(models, recorded, tmp_path):
    weights = {"a": 2, "b": -1}
    entries = [{"model": str(models / name), "parameters": {"weight": weight}} for name, weight in weights.items()]
    given = {"merge_method": "linear", "models": entries, "parameters": {"normalize": False}}
    for key, values in merge(tmp_path, given | {"name": "a label", "chat_template": "auto"}).items():
        torch.testing.assert_close(values, 2 * recorded["a"][key] - recorded["b"][key], rtol=1e-5, atol=1e-6)
