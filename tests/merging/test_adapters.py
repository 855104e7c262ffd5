"""Tasks that are peft adapters: LoRA as full weights beside peft's own merge, (IA)³ among themselves, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNet2DModel
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModel, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from hf_ext.emr.model import EMRModel
from hf_ext.errors import DataError, UsageError
from hf_ext.merging.plan import make_plan
from hf_ext.merging.plan_table import Plan, plan_lines, plan_values
from hf_ext.merging.tensors import COMPARED, KEPT, SHARED
from tests.emr.emr_testing import push_folder, tiny_adapter, tiny_bert, tiny_gpt2, tiny_unet, write_weights
from tests.emr.use_testing import copied, merge
from tests.kit.refusals import refused

# peft 0.21 asks transformers for a property by its old name, and takes the bias of lora_B for a cut matrix.
pytestmark = [
    pytest.mark.usefixtures("own_cache"),
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


def merged_by_peft(model: Any, adapter: Path) -> dict[str, torch.Tensor]:
    return PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()


def plan_of(base: Path, adapters: str = "delta", **tasks: Path) -> Plan:
    return make_plan({"base": str(base), "tasks": {k: str(v) for k, v in tasks.items()}, "adapters": adapters})


def full_weights(plan: Plan, index: int = 0) -> dict[str, torch.Tensor]:
    """The weights of one task: what it holds, and what it shares with the base."""
    task, base = plan.tasks[index], plan.base
    weights = {name: task.read(name) for name in task.tensors}
    return weights | {item.name: base.read(item.base_name) for item in plan.own_tensors(SHARED) if item.task == index}


def peft_adapter(folder: Path, model: Any, **options: Any) -> Path:
    get_peft_model(model, LoraConfig(**{"r": 2, "init_lora_weights": False} | options)).save_pretrained(folder)
    return folder
    return folder


# A family, options of its LoRA, and changes of the adapter's configuration that make no other weights.
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("bert", {}, {}),
    "rank-stabilised": ("bert", {"use_rslora": True, "r": 3, "lora_alpha": 5}, {}),
    "patterns": ("bert", {"rank_pattern": {"query": 4}, "alpha_pattern": {"layer.1.attention.self.value": 32}}, {}),
    "bias of B": ("bert", {"lora_bias": True}, {}),
    "all biases": ("bert", {"bias": "all"}, {}),
    "saved module": ("bert", {"modules_to_save": ["pooler"]}, {}),
    "some layers": ("bert", {"layers_to_transform": [1]}, {}),
    "embedding": ("bert", {"target_modules": ["word_embeddings", "query"]}, {}),
    "transposed": ("gpt2", {"target_modules": ["c_attn", "c_proj", "wte"], "fan_in_fan_out": True}, {}),
    # a matrix that fits one way only is taken that way, whatever the flag says
    "one way": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True}, {"fan_in_fan_out": False}),
    "convolutions": ("unet", {"target_modules": ["conv1", "conv_shortcut", "to_q"]}, {}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_lora_is_the_weights_that_peft_merges(bert, gpt2, tmp_path, variant):
    family, options, changes = VARIANTS[variant]
    base = tiny_unet(tmp_path / "base") if family == "unet" else bert if family == "bert" else gpt2
    kind = UNet2DModel if family == "unet" else AutoModel
    options = {"target_modules": ["query", "value"]} | options
    adapter = peft_adapter(tmp_path / "adapter", kind.from_pretrained(base), **options)
    if variant in ("all biases", "saved module"):
        stored = load_file(adapter / "adapter_model.safetensors")
        changed = {name: value + 0.25 * ("lora_" not in name) for name, value in stored.items()}
        save_file(changed, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    expected = merged_by_peft(kind.from_pretrained(base), adapter)
    change_configuration(adapter, **changes)
    with plan_of(base, task=adapter) as plan:
        found = full_weights(plan)
        assert set(expected) <= set(found)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)
        own = plan.tasks[0].tensors
        in_base = plan.names[0].in_base
        assert any(not found[name].equal(plan.base.read(in_base(name))) for name in own)
        assert len(plan.merged_rows) == len(own)
        assert not plan.own_tensors(KEPT) and not plan.own_tensors(COMPARED)
        # the adapter of a GPT2Model, the base of a GPT2LMHeadModel
        assert plan.names[0].base_prefix == ("transformer." if family == "gpt2" else "")
        assert plan.tasks[0].library == ("diffusers" if family == "unet" else "transformers")


def change_configuration(adapter: Path, **changes: Any) -> Path:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return adapter


def classifier_adapter(folder: Path, base: Path, seed: int, labels: int) -> Path:
    """A LoRA of a classifier on the bare base, with its head in `modules_to_save`."""
    torch.manual_seed(seed)
    model = BertForSequenceClassification.from_pretrained(base, num_labels=labels)
    return peft_adapter(folder, model, target_modules=["query"], task_type="SEQ_CLS")


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


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "use_dora"),
    "pissa": ({"init_lora_weights": "pissa"}, "'pissa'"),
    "tokens": ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    "another kind": ({"peft_type": "VERA"}, "'VERA', not LoRA"),
    "ia3": ({"peft_type": "IA3"}, "adapters: adapter merges"),
    "no number": ({"lora_alpha": "8"}, "lora_alpha"),
    "no pattern": ({"alpha_pattern": {"(": 8}}, "alpha_pattern"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_base_plus_product_is_refused_by_name(bert, tmp_path, case):
    changes, fact = REFUSED[case]
    adapter = change_configuration(tiny_adapter(tmp_path / "adapter", bert), **changes)
    with refused(ValueError, "'odd'", fact):
        plan_of(bert, odd=adapter)


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
    return folder / "base", peft_adapter(folder / "adapter", model, **{"target_modules": ["q_proj"]} | options)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("case", TIED)
def test_a_change_of_one_of_two_tied_tensors_is_refused(tmp_path, case):
    base, adapter = language_adapter(tmp_path, **TIED[case])
    with refused(DataError, "ties", "'odd'", "ensure_weight_tying"):
        plan_of(base, odd=adapter)


@pytest.mark.parametrize("case", ["saved embedding", "embedding"])
def test_a_change_of_both_tied_tensors_is_one_change(tmp_path, case):
    base, adapter = language_adapter(tmp_path, **TIED[case], ensure_weight_tying=True)
    with plan_of(base, task=adapter) as plan:
        value = full_weights(plan)["model.embed_tokens.weight"]
    model = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), adapter)
    torch.testing.assert_close(value, model.get_input_embeddings()(torch.arange(32)))
    torch.testing.assert_close(value.T, model.get_output_embeddings()(torch.eye(16)))


@pytest.mark.parametrize("how, kind", [("refuse", "LORA"), ("delta", "LORA"), ("adapter", "IA3")])
@pytest.mark.parametrize("whose", ["base", "odd"])
def test_the_configuration_of_an_adapter_beside_a_whole_model_is_refused(bert, tmp_path, how, kind, whose):
    left = tiny_bert(tmp_path / "left", 1, base=bert)
    (left / "adapter_config.json").write_text(json.dumps({"peft_type": kind, "r": 4, "lora_alpha": 8}))
    with refused(DataError, whose, "adapter_config.json"):
        plan_of(*((left, how) if whose == "base" else (bert, how)), odd=bert if whose == "base" else left)


def test_what_does_not_go_together_is_refused(bert, gpt2, tmp_path):
    lora, ia3 = (tiny_adapter(tmp_path / kind, bert, 1, kind=kind) for kind in ("lora", "ia3"))
    whole, wider = tiny_bert(tmp_path / "whole", 1, base=bert), tiny_bert(tmp_path / "wider", hidden_size=32)
    dora = change_configuration(tiny_adapter(tmp_path / "dora", bert, use_dora=True), use_dora=False)
    for base, how, tasks, error, facts in (
        (bert, "delta", {"odd": dora}, DataError, ("lora_magnitude_vector",)),
        (gpt2, "delta", {"task": lora}, DataError, ("adapter", "trained")),
        (wider, "delta", {"task": lora}, DataError, ("base",)),
        (lora, "delta", {"task": lora}, DataError, ("adapter", "model")),
        (bert, "refuse", {"a": ia3, "b": ia3}, UsageError, ("adapters: adapter", "adapters: delta")),
        (bert, "adapter", {"a": ia3, "b": whole}, UsageError, ("adapters: adapter", "'b'")),
        (bert, "adapter", {"a": ia3, "b": lora}, UsageError, ("adapters: adapter", "'b'")),
    ):
        with refused(error, *facts):
            plan_of(base, how, **tasks)


LORA_FILES = {
    "diffusers": "unet.down.attn.to_q.lora_A.weight",
    "earlier diffusers": "unet.down.attn.processor.to_q.lora_linear_layer.down.weight",
    "kohya": "lora_unet_down_attn_to_q.lora_down.weight",
}


@pytest.mark.parametrize("form", LORA_FILES)
def test_a_lora_file_of_another_program_is_refused_with_the_way_through_diffusers(tmp_path, form):
    base = write_weights(tmp_path / "base", {"w": torch.ones(2, 2)})
    file = write_weights(tmp_path / "lora", {LORA_FILES[form]: torch.ones(2, 2)}) / "model.safetensors"
    with refused(DataError, "load_lora_weights", "fuse_lora", "unload_lora_weights", "unet.save_pretrained"):
        plan_of(base, a=file)


# Factors that give no weight, of a (rank, inputs) and b (outputs, rank): their ranks differ, or one is missing.
OTHER_RANKS: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor | None, torch.Tensor | None]]] = {
    "more rows in A": lambda a, b: (torch.zeros(9, *a.shape[1:]), b),
    "exchanged": lambda a, b: (b, a),
    "A is a vector": lambda a, b: (a[0], b),
    "B is a number": lambda a, b: (a, torch.tensor(1.0)),
    "B has one side too many": lambda a, b: (a, b[None]),
    "no A": lambda a, b: (None, b),
    "no B": lambda a, b: (a, None),
}


@pytest.mark.parametrize("kind", OTHER_RANKS)
def test_factors_without_a_common_rank_are_refused(bert, tmp_path, kind):
    folder = tiny_adapter(tmp_path / "a", bert, 1)
    file = folder / "adapter_model.safetensors"
    stored = load_file(file)
    first = next(name for name in stored if name.endswith("query.lora_A.weight"))
    second = first.replace("lora_A", "lora_B")
    a, b = OTHER_RANKS[kind](stored.pop(first), stored.pop(second))
    changed = {name: value.clone() for name, value in ((first, a), (second, b)) if value is not None}
    save_file(stored | changed, file, metadata={"format": "pt"})
    with refused(DataError, "'a'", "query.lora_"):
        plan_of(bert, a=folder)


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
    merged = merge(bert, {"a": adapter}, tmp_path / "out", adapters="delta")
    assert not (merged / "tasks" / "a" / "adapter_config.json").exists()
    expected = merged_by_peft(AutoModel.from_pretrained(bert), adapter)
    found = EMRModel.from_pretrained(merged, task="a").model.state_dict()
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6, msg=name)


def test_adapters_merged_among_themselves_are_restored_as_adapters(bert, tmp_path):
    tasks = {name: tiny_adapter(tmp_path / name, bert, seed, kind="ia3") for seed, name in enumerate("ab")}
    merged = merge(bert, tasks, tmp_path / "out", adapters="adapter", rescale="none")
    stored = [load_file(path / "adapter_model.safetensors") for path in tasks.values()]
    unified = load_file(merged / "adapter_model.safetensors")
    assert json.loads((merged / "adapter_config.json").read_text())["peft_type"] == "IA3"
    assert all(value.eq(1).all() for value in load_file(merged / "base" / "adapter_model.safetensors").values())
    emr = EMRModel.from_pretrained(merged, task="b")
    other, switched = emr.model, copied(emr.model)
    assert emr.set_task("a").model is other and type(other).__name__ == "PeftModel"
    model = emr.model.state_dict()
    changed = {name for name, value in model.items() if not value.equal(switched[name])}
    assert changed == {f"{name}.default" for name in stored[0]}
    exported = PeftModel.from_pretrained(AutoModel.from_pretrained(bert), emr.export("a", tmp_path / "exported"))
    assert all(exported.state_dict()[f"{name}.default"].equal(model[f"{name}.default"]) for name in stored[0])
    for name, first in stored[0].items():
        vectors = torch.stack([first, stored[1][name]]) - 1
        elected = vectors.sum(0).sign()
        strongest = (vectors * elected).clamp(min=0).amax(0) * elected
        torch.testing.assert_close(unified[name], 1 + strongest, rtol=0, atol=1e-6)
        expected = 1 + torch.where(vectors[0] * elected > 0, strongest, 0)
        torch.testing.assert_close(model[name + ".default"], expected, rtol=0, atol=1e-6)
