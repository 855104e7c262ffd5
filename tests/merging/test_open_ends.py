"""Merges whose base, tokens or layers are not what they seem."""

from __future__ import annotations

import contextlib
import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file

from hf_ext.emr import EMRModel
from hf_ext.emr.weights import TaskWeights
from hf_ext.errors import DataError
from hf_ext.merging.plan import make_plan
from hf_ext.merging.updating import add_task
from tests.emr.emr_testing import write_weights
from tests.hub.published import contents
from tests.kit.refusals import refused
from tests.merging.merging import CONFIG, merge, siblings

MERGES = [{}, {"method": "onebit"}, {"method": "task_arithmetic", "masks": True}]


@pytest.mark.parametrize("options", MERGES)
def test_a_task_that_was_mirrored_about_the_base_is_not_merged_again(sources, tmp_path, options):
    """The sums of its differences are what they were."""
    place = shutil.copytree(sources, tmp_path / "sources")
    artifact = merge(siblings(place, "a", "b"), tmp_path / "artifact", **options)
    before, base = contents(artifact), load_file(place / "base" / "model.safetensors")
    tensors = load_file(place / "a" / "model.safetensors")
    tensors["odd.weight"] = 2 * base["odd.weight"] - tensors["odd.weight"]
    write_weights(place / "a", tensors, config=CONFIG)
    with refused(DataError, "task 'a'"):
        add_task(artifact, "c", str(place / "c"))
    assert contents(artifact) == before


@pytest.mark.parametrize("options", [{}, {"method": "average", "allow_missing": True}, {"method": "onebit"}])
def test_a_base_between_two_tasks_is_told(sources, tmp_path, options):
    place = shutil.copytree(sources, tmp_path / "sources")
    base, own = (load_file(place / name / "model.safetensors") for name in ("base", "a"))
    mirrored = {name: 2 * base[name] - own[name] for name in base if own[name].shape == base[name].shape}
    write_weights(place / "b", mirrored, config=CONFIG)
    artifact = merge(siblings(place, "a", "b"), tmp_path / "artifact", **options)
    told = json.loads((artifact / "report.json").read_text())["warnings"]
    assert any("cancel" in text and "a and b (-1.00)" in text for text in told)


@pytest.mark.parametrize(
    ("kind", "rows", "refuses"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, 6, True),
        ({"model_type": "llama", "architectures": ["NobodysModel"]}, 6, True),
        # its tokens have rows in a head that is not shared
        ({"model_type": "wav2vec2", "architectures": ["Wav2Vec2Model"]}, 6, False),
    ],
)
def test_tokens_in_rows_that_a_known_class_has_elsewhere_are_refused_in_one_model(tmp_path, kind, rows, refuses):
    for name, token in (("base", "one"), ("a", "two")):
        tensors = {"model.embed_tokens.weight": torch.ones(rows, 2), "model.norm.weight": torch.ones(2)}
        folder = write_weights(tmp_path / name, tensors, config={"vocab_size": 4, "num_hidden_layers": 1} | kind)
        (folder / "tokenizer.model").write_text(token)
    with refused(DataError, "'a'", "vocabulary") if refuses else contextlib.nullcontext():
        make_plan(siblings(tmp_path, "a", method="average")).close()
    make_plan(siblings(tmp_path, "a")).close()


@pytest.mark.parametrize(
    ("config", "refuses"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}, True),
        ({"_class_name": "UNet2DModel", "_diffusers_version": "0.30"}, True),
        ({"model_type": "phi4mm", "architectures": ["Phi4MMForCausalLM"]}, False),
    ],
)
@pytest.mark.parametrize("prefix", ["", "base_model.model."])
def test_adapters_of_any_name_inside_base_and_task_are_refused(tmp_path, config, refuses, prefix):
    """Of a class without such layers; code that is not here may have them."""
    names = [f"{prefix}x.{name}" for name in ("base_layer.weight", "lora_A.mine.weight", "lora_B.mine.weight")]
    for name in ("base", "a"):
        write_weights(tmp_path / name, dict.fromkeys(names, torch.ones(2, 2)), config=config)
    with refused(DataError, "merge_and_unload") if refuses else contextlib.nullcontext():
        make_plan(siblings(tmp_path, "a", method="average")).close()


@pytest.mark.parametrize("wrapper", ["_orig_mod.", "module.", "module._orig_mod.", "_fsdp_wrapped_module.", "net.x."])
def test_names_of_a_wrapper_are_no_names_of_a_task(tmp_path, wrapper):
    """A model with them would have random weights, as would one of a base that has them."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=9))
    model.save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "a")
    expected = {name: value + 0.1 for name, value in model.state_dict().items()}
    inner = f"layers.1.{wrapper.removeprefix('module.') * ('_' in wrapper)}"
    write_weights(tmp_path / "a", {wrapper + name.replace("layers.1.", inner): expected[name] for name in expected})
    out = merge(siblings(tmp_path, "a"), tmp_path / "out")
    TaskWeights(out).export("a", tmp_path / "plain")
    one = merge(siblings(tmp_path, "a", method="average"), tmp_path / "one")
    found = [transformers.LlamaForCausalLM.from_pretrained(place) for place in (tmp_path / "plain", one)]
    for found_model in (EMRModel.from_pretrained(out, "a").model, *found):
        torch.testing.assert_close(dict(found_model.state_dict()), expected, rtol=1e-6, atol=1e-6)
    assert any("wrap" in text for text in json.loads((out / "report.json").read_text())["warnings"])
    with refused(DataError, "base", "wrap"):
        make_plan({"base": str(tmp_path / "a"), "tasks": {"a": str(tmp_path / "base")}}).close()


@pytest.mark.parametrize("architecture", ["BertModel", "BertForMaskedLM"])
def test_a_task_without_tensors_of_its_class_is_no_model(tmp_path, architecture):
    config = transformers.BertConfig(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=1)
    tensors = transformers.BertModel(config, add_pooling_layer=False).state_dict()
    told = config.to_dict() | {"architectures": [architecture]}
    for name in ("base", "a"):
        write_weights(tmp_path / name, tensors, config=told)
    out = merge(siblings(tmp_path, "a"), tmp_path / "out")
    with refused(DataError, "random", "pooler" if architecture == "BertModel" else "cls"):
        EMRModel.from_pretrained(out, "a")
