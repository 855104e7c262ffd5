"""Tasks that are peft adapters: LoRA as full weights beside peft's own merge, adapters among themselves, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNet2DModel
from huggingface_hub import close_session
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModel, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from hf_ext.emr.model import EMRModel
from hf_ext.errors import DataError, UsageError
from hf_ext.merging.merge import merge_checkpoints
from hf_ext.merging.plan import make_plan
from hf_ext.merging.plan_table import Plan, plan_lines, plan_values
from hf_ext.merging.tensors import COMPARED, KEPT, SHARED
from tests.emr.emr_testing import push_folder, tiny_adapter, tiny_bert, tiny_gpt2, tiny_unet, write_weights
from tests.kit.refusals import refused

# peft 0.21 asks transformers for a property by its old name, and takes the bias of lora_B for a cut matrix.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Adapter 'default':UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
]


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("bert") / "base")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> Path:
    return tiny_gpt2(tmp_path_factory.mktemp("gpt2") / "base")


@pytest.fixture(autouse=True)
def _clean_client(hub_cache):
    yield
    close_session()


def merged_by_peft(model: Any, adapter: Path) -> dict[str, torch.Tensor]:
    return PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()


def plan_of(base: Path, adapters: str = "delta", **tasks: Path) -> Plan:
    return make_plan({"base": str(base), "tasks": {k: str(v) for k, v in tasks.items()}, "adapters": adapters})


def full_weights(plan: Plan, index: int = 0) -> dict[str, torch.Tensor]:
    """The weights of one task: what it holds, and what it shares with the base."""
    task, base = plan.tasks[index], plan.base
    weights = {name: task.read(name) for name in task.tensors}
    return weights | {item.name: base.read(item.base_name) for item in plan.own_tensors(SHARED) if item.task == index}


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rank-stabilised": {"use_rslora": True, "r": 3, "lora_alpha": 5},
    "patterns": {"rank_pattern": {"query": 4}, "alpha_pattern": {"layer.1.attention.self.value": 32}},
    "bias of B": {"lora_bias": True},
    "all biases": {"bias": "all"},
    "saved module": {"modules_to_save": ["pooler"]},
    "some layers": {"layers_to_transform": [1]},
    "embedding": {"target_modules": ["word_embeddings", "query"]},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_lora_is_the_weights_that_peft_merges(bert, tmp_path, variant):
    adapter = tiny_adapter(tmp_path / "adapter", bert, 1, **VARIANTS[variant])
    if variant in ("all biases", "saved module"):
        stored = load_file(adapter / "adapter_model.safetensors")
        changed = {name: value + 0.25 * ("lora_" not in name) for name, value in stored.items()}
        save_file(changed, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    expected = merged_by_peft(AutoModel.from_pretrained(bert), adapter)
    with plan_of(bert, task=adapter) as plan:
        found = full_weights(plan)
        assert set(found) == set(expected)
        different = {name for name, value in found.items() if not value.equal(plan.base.read(name))}
        assert different and different <= set(plan.tasks[0].tensors)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7, msg=name)
        assert {part.name for part in plan.merged_rows} == set(plan.tasks[0].tensors)
        assert not plan.own_tensors(KEPT) and not plan.own_tensors(COMPARED)


def test_the_transposed_matrices_of_gpt2(gpt2, tmp_path):
    options = {"target_modules": ["c_attn", "c_proj", "wte"], "fan_in_fan_out": True}
    adapter = tiny_adapter(tmp_path / "adapter", gpt2, 1, **options)
    model = AutoModel.from_pretrained(gpt2)
    expected = merged_by_peft(model, adapter)
    with plan_of(gpt2, task=adapter) as plan:
        found = full_weights(plan)
        # the adapter of a GPT2Model, the base of a GPT2LMHeadModel
        assert plan.names[0].base_prefix == "transformer."
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7, msg=name)


def test_a_matrix_that_fits_one_way_only_is_taken_that_way_whatever_the_flag_says(gpt2, tmp_path):
    adapter = tiny_adapter(tmp_path / "adapter", gpt2, 1, target_modules=["c_attn"], fan_in_fan_out=True)
    expected = merged_by_peft(AutoModel.from_pretrained(gpt2), adapter)
    change_configuration(adapter, fan_in_fan_out=False)
    with plan_of(gpt2, task=adapter) as plan:
        for name, value in full_weights(plan).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7, msg=name)


def test_convolutions_of_a_diffusers_model(tmp_path):
    base = tiny_unet(tmp_path / "base")
    config = LoraConfig(r=2, target_modules=["conv1", "conv_shortcut", "to_q"], init_lora_weights=False)
    get_peft_model(UNet2DModel.from_pretrained(base), config).save_pretrained(tmp_path / "adapter")
    expected = merged_by_peft(UNet2DModel.from_pretrained(base), tmp_path / "adapter")
    with plan_of(base, task=tmp_path / "adapter") as plan:
        assert plan.tasks[0].library == "diffusers"
        assert any(len(part.shape) == 4 for part in plan.merged_rows)
        for name, value in full_weights(plan).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)


def change_configuration(adapter: Path, **changes: Any) -> Path:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return adapter


def classifier_adapter(folder: Path, base: Path, seed: int, labels: int) -> Path:
    """A LoRA of a classifier on the bare base, with its head in `modules_to_save`."""
    torch.manual_seed(seed)
    model = BertForSequenceClassification.from_pretrained(base, num_labels=labels)
    options: dict[str, Any] = {"target_modules": ["query"], "task_type": "SEQ_CLS", "init_lora_weights": False}
    get_peft_model(model, LoraConfig(r=2, **options)).save_pretrained(folder)
    return folder


def test_a_classifier_keeps_its_head_its_class_and_its_number_of_labels(bert, tmp_path):
    tasks = {
        "two": classifier_adapter(tmp_path / "two", bert, 1, 2),
        "five": classifier_adapter(tmp_path / "five", bert, 2, 5),
    }
    with plan_of(bert, **tasks) as plan:
        assert [names.task_prefix for names in plan.names] == ["bert.", "bert."]
        assert {item.name for item in plan.own_tensors(KEPT)} == {"classifier.weight", "classifier.bias"}
        assert [task.config["architectures"] for task in plan.tasks] == [["BertForSequenceClassification"]] * 2
        assert "id2label" not in plan.tasks[0].config and len(plan.tasks[1].config["id2label"]) == 5
        # only the adapted matrices are voted on; all else is the base's
        assert {part.name.rpartition(".attention.")[2] for part in plan.merged_rows} == {"self.query.weight"}
        assert plan.result_bytes < plan.base.nbytes + 2 * 1500
        # a matrix read in pieces of any size
        part, task = plan.merged_rows[0], plan.tasks[0]
        name = str(part.task_names[0])
        whole, pieces = task.read(name).flatten(), torch.empty(part.elements)
        for start in range(0, part.elements, 37):
            stop = min(start + 37, part.elements)
            task.read_into(name, start, stop, pieces[start:stop])
        assert pieces.equal(whole)


def test_full_weights_and_adapters_together(bert, tmp_path):
    tasks = {"full": tiny_bert(tmp_path / "full", 1, base=bert), "lora": tiny_adapter(tmp_path / "lora", bert, 2)}
    with plan_of(bert, **tasks) as plan:
        assert len(plan.merged_rows) == len(plan.base.tensors)
        taking_part = [part for part in plan.merged_rows if part.task_names[1] is not None]
        assert len(taking_part) == 4 and all(part.task_names[0] is not None for part in plan.merged_rows)
        shared = plan.own_tensors(SHARED)
        assert len(shared) == len(plan.base.tensors) - 4 and {item.task for item in shared} == {1}


def test_by_default_the_sizes_and_the_break_even_rank_are_told(tmp_path):
    weights = {f"layer.{index}.weight": torch.zeros(256, 512) for index in range(2)}
    base = write_weights(tmp_path / "base", weights, config={})
    factors = {}
    for index in range(2):
        factors[f"base_model.model.layer.{index}.lora_A.weight"] = torch.zeros(4, 512, dtype=torch.bfloat16)
        factors[f"base_model.model.layer.{index}.lora_B.weight"] = torch.zeros(256, 4, dtype=torch.bfloat16)
    adapter = write_weights(tmp_path / "adapter", factors, stem="adapter_model")
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    with refused(UsageError, "adapters", "peft") as caught:
        plan_of(base, "refuse", summaries=adapter)
    message = str(caught.value)
    # 2 · 4 · (256 + 512) · 2 bytes; 2 · 256 · 512 / 8 bytes; 256 · 512 / (16 · (256 + 512))
    for expected in ("'summaries'", "12.3 kB", "32.8 kB", "above rank 11", "has rank 4", "adapters: delta"):
        assert expected in message
    # section 5 of the specification: 128 for 4096 × 4096 in bf16
    assert 4096 * 4096 / (16 * 2 * 4096) == 128


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "use_dora"),
    "pissa": ({"init_lora_weights": "pissa"}, "'pissa'"),
    "tokens": ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    "replicated layers": ({"layer_replication": [[0, 2]]}, "layer_replication"),
    "another kind": ({"peft_type": "VERA"}, "'VERA', not LoRA"),
    "ia3": ({"peft_type": "IA3"}, "adapters: adapter merges"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_base_plus_product_is_refused_by_name(bert, tmp_path, case):
    changes, expected = REFUSED[case]
    adapter = change_configuration(tiny_adapter(tmp_path / "adapter", bert), **changes)
    with pytest.raises(ValueError, match=expected) as caught:
        plan_of(bert, odd=adapter)
    assert "'odd'" in str(caught.value) and "merge_and_unload()" in str(caught.value)


TIED: dict[str, dict[str, Any]] = {
    "saved embedding": {"modules_to_save": ["embed_tokens"]},
    "saved head": {"modules_to_save": ["lm_head"]},
    "embedding": {"target_modules": ["embed_tokens"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
}


def language_adapter(folder: Path, **options: Any) -> tuple[Path, Path]:
    """A Llama whose head is tied to its embedding, and a LoRA of it."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, tie_word_embeddings=True, **sizes))
    model.save_pretrained(folder / "base")
    config = LoraConfig(**{"r": 2, "init_lora_weights": False, "target_modules": ["q_proj"]} | options)
    get_peft_model(model, config).save_pretrained(folder / "adapter")
    return folder / "base", folder / "adapter"


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("case", TIED)
@pytest.mark.parametrize("adapters", ["delta", "adapter"])
def test_a_change_of_one_of_two_tied_tensors_is_refused(tmp_path, case, adapters):
    base, adapter = language_adapter(tmp_path, **TIED[case])
    with refused(DataError, "ties", "'odd'", "ensure_weight_tying"):
        plan_of(base, adapters, odd=adapter)


@pytest.mark.parametrize("case", ["saved embedding", "embedding"])
def test_a_change_of_both_tied_tensors_is_one_change(tmp_path, case):
    base, adapter = language_adapter(tmp_path, **TIED[case], ensure_weight_tying=True)
    with plan_of(base, task=adapter) as plan:
        found = full_weights(plan)
    model = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), adapter)
    value = found["model.embed_tokens.weight"]
    torch.testing.assert_close(value, model.get_input_embeddings()(torch.arange(32)))
    torch.testing.assert_close(value.T, model.get_output_embeddings()(torch.eye(16)))


@pytest.mark.parametrize("how", ["refuse", "delta", "adapter"])
@pytest.mark.parametrize("kind", ["LORA", "IA3"])
@pytest.mark.parametrize("whose", ["base", "odd"])
def test_the_configuration_of_an_adapter_beside_a_whole_model_is_refused(bert, tmp_path, how, kind, whose):
    left = tiny_bert(tmp_path / "left", 1, base=bert)
    (left / "adapter_config.json").write_text(json.dumps({"peft_type": kind, "r": 4, "lora_alpha": 8}))
    with refused(DataError, whose, "adapter_config.json"):
        plan_of(*((left,) if whose == "base" else (bert,)), how, odd=bert if whose == "base" else left)


def test_tensors_of_other_variants_are_refused_by_name(bert, tmp_path):
    adapter = tiny_adapter(tmp_path / "adapter", bert, use_dora=True)
    change_configuration(adapter, use_dora=False)
    with refused(DataError, "lora_magnitude_vector"):
        plan_of(bert, odd=adapter)


def test_an_adapter_of_another_model_is_refused(bert, gpt2, tmp_path):
    adapter = tiny_adapter(tmp_path / "adapter", bert)
    with refused(DataError, "adapter", "trained"):
        plan_of(gpt2, task=adapter)
    wider = tiny_bert(tmp_path / "wider", hidden_size=32)
    with refused(DataError, "base"):
        plan_of(wider, task=adapter)
    with refused(DataError, "adapter", "model"):
        plan_of(adapter, task=adapter)


def with_common_factor(folder: Path, base: Path, seed: int, first: Path | None = None, **options: Any) -> Path:
    tiny_adapter(folder, base, seed, **options)
    if first is not None:
        stored, common = (load_file(item / "adapter_model.safetensors") for item in (folder, first))
        stored |= {name: value for name, value in common.items() if "lora_A" in name}
        save_file(stored, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def test_loras_with_one_common_factor_are_merged_among_themselves(bert, tmp_path):
    a = with_common_factor(tmp_path / "a", bert, 1)
    b = with_common_factor(tmp_path / "b", bert, 2, a)
    with plan_of(bert, "adapter", a=a, b=b) as plan:
        assert plan.base.library == "peft" and plan.config.include_base
        assert {part.name.partition(".lora_")[2] for part in plan.merged_rows} == {"B.weight"}
        assert {item.name.partition(".lora_")[2] for item in plan.copied_rows} == {"A.weight"}
        assert len(plan.own_tensors(SHARED)) == 2 * len(plan.copied_rows) and not plan.own_tensors(KEPT)
        stored = load_file(a / "adapter_model.safetensors")
        for part in plan.merged_rows:
            assert not plan.base.read(part.name).any()
            assert plan.tasks[0].read(part.name).equal(stored[part.name])
        for item in plan.copied_rows:
            assert plan.base.read(item.name).equal(stored[item.name])
        assert "adapter_config.json" in plan.base.companions.files


def test_other_factors_and_other_settings_are_refused_among_adapters(bert, tmp_path):
    a = with_common_factor(tmp_path / "a", bert, 1)
    with refused(DataError, "lora_A.weight"):
        plan_of(bert, "adapter", a=a, b=with_common_factor(tmp_path / "b", bert, 2))
    c = with_common_factor(tmp_path / "c", bert, 2, a, lora_alpha=64)
    with refused(DataError, "c", "lora_alpha", "a"):
        plan_of(bert, "adapter", a=a, c=c)
    with refused(UsageError, "full"):
        plan_of(bert, "adapter", a=a, full=tiny_bert(tmp_path / "full", 1, base=bert))
    biased = with_common_factor(tmp_path / "d", bert, 2, a, lora_bias=True)
    with refused(DataError, "adapters", "merged"):
        plan_of(bert, "adapter", d=biased)


def of_other_rank(a: torch.Tensor, b: torch.Tensor) -> dict[str, tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Factors that give no weight: their ranks differ, a side is missing, or one of them."""
    return {
        "more rows in A": (torch.zeros(9, *a.shape[1:]), b),
        "fewer columns in B": (a, b[:, :1].clone()),
        "exchanged": (b, a),
        "A is a vector": (a[0].clone(), b),
        "B is a vector": (a, b[:, 0].clone()),
        "A is a number": (torch.tensor(1.0), b),
        "B is a number": (a, torch.tensor(1.0)),
        "B has one side too many": (a, b[None].clone()),
        "no A": (None, b),
        "no B": (a, None),
    }


@pytest.mark.parametrize("kind", of_other_rank(torch.zeros(2, 3), torch.zeros(3, 2)))
@pytest.mark.parametrize("adapters", ["delta", "adapter"])
def test_factors_without_a_common_rank_are_refused(bert, tmp_path, adapters, kind):
    folder = tiny_adapter(tmp_path / "a", bert, 1)
    file = folder / "adapter_model.safetensors"
    stored = load_file(file)
    first = next(name for name in stored if name.endswith("query.lora_A.weight"))
    second = first.replace("lora_A", "lora_B")
    changed = dict(zip((first, second), of_other_rank(stored[first], stored[second])[kind], strict=True))
    kept = {name: value.contiguous() for name, value in (stored | changed).items() if value is not None}
    save_file(kept, file, metadata={"format": "pt"})
    with refused(DataError, "'a'", "query.lora_"):
        plan_of(bert, adapters, a=folder, b=folder)


def test_ia3_is_merged_from_a_base_of_ones(bert, tmp_path):
    tasks = {name: tiny_adapter(tmp_path / name, bert, seed, kind="ia3") for seed, name in enumerate("ab")}
    with plan_of(bert, "adapter", **tasks) as plan:
        assert len(plan.merged_rows) == 4 and not plan.copied_rows and not plan.own_tensors(KEPT)
        for part in plan.merged_rows:
            assert plan.base.read(part.name).equal(torch.ones(16, 1))
            assert part.task_names == (part.name, part.name)
        assert "IA3" in "\n".join(plan_lines(plan))
        json.dumps([plan_values(plan), plan.base.identity(), plan.base.fingerprint()])


def test_an_adapter_that_names_another_base_is_told(bert, tmp_path, hub):
    push_folder(hub.url, "org/base", bert)
    adapter = tiny_adapter(tmp_path / "adapter", bert)
    change_configuration(adapter, base_model_name_or_path="other/model")
    config = {"base": "org/base", "tasks": {"a": str(adapter)}, "adapters": "delta"}
    with make_plan(config, endpoint=hub.url, token=False) as plan:
        (told, size) = plan.warnings
        assert "'other/model' by its configuration, not from 'org/base'" in told and "this saves no space" in size


def test_one_adapter_merged_as_full_weights_is_what_peft_merges(bert, tmp_path):
    adapter = tiny_adapter(tmp_path / "adapter", bert, 1, use_rslora=True)
    config = {"base": str(bert), "tasks": {"a": str(adapter)}, "adapters": "delta"}
    merged = merge_checkpoints(config, tmp_path / "out", progress=False)
    assert not (merged.path / "tasks" / "a" / "adapter_config.json").exists()
    expected = merged_by_peft(AutoModel.from_pretrained(bert), adapter)
    found = EMRModel.from_pretrained(merged.path, task="a").model.state_dict()
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6, msg=name)


def test_adapters_merged_among_themselves_are_restored_as_adapters(bert, tmp_path):
    tasks = {name: str(tiny_adapter(tmp_path / name, bert, seed, kind="ia3")) for seed, name in enumerate("ab")}
    config = {"base": str(bert), "tasks": tasks, "adapters": "adapter", "rescale": "none"}
    merged = merge_checkpoints(config, tmp_path / "out", progress=False)
    stored = [load_file(Path(path) / "adapter_model.safetensors") for path in tasks.values()]
    unified = load_file(merged.path / "adapter_model.safetensors")
    assert json.loads((merged.path / "adapter_config.json").read_text())["peft_type"] == "IA3"
    assert all(value.eq(1).all() for value in load_file(merged.path / "base" / "adapter_model.safetensors").values())
    emr = EMRModel.from_pretrained(merged.path, task="a")
    model = emr.model.state_dict()
    exported = PeftModel.from_pretrained(AutoModel.from_pretrained(bert), emr.export("a", tmp_path / "exported"))
    assert all(exported.state_dict()[f"{name}.default"].equal(model[f"{name}.default"]) for name in stored[0])
    for name, first in stored[0].items():
        vectors = torch.stack([first, stored[1][name]]) - 1
        elected = vectors.sum(0).sign()
        strongest = (vectors * elected).clamp(min=0).amax(0) * elected
        torch.testing.assert_close(unified[name], 1 + strongest, rtol=0, atol=1e-6)
        expected = 1 + torch.where(vectors[0] * elected > 0, strongest, 0)
        torch.testing.assert_close(model[name + ".default"], expected, rtol=0, atol=1e-6)
