"""Adapters made of differences: peft loads them on the base, and they answer as the fine-tune within what is told."""

import contextlib
import shutil
import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForSequenceClassification, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hf_ext.emr import EMRModel
from hf_ext.errors import DataError, UsageError
from hf_ext.files import read_json, write_json
from hf_ext.merging.extracting import Pair, cut_matrix, extract_lora, open_fine_tune, open_task, report_lines
from tests.emr.emr_testing import maker, perturb, tiny_adapter, tiny_bert, tiny_gpt2, tiny_unet, write_weights
from tests.emr.use_testing import merge, merge_berts, merge_family
from tests.kit.refusals import refused

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
TOKENS = torch.arange(12).reshape(2, 6)


def load_adapter(base: Any, folder: Path) -> Any:
    """The base with the adapter; what peft says of tied embeddings and of missing biases is known."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)
        warnings.filterwarnings("ignore", "`lora_bias=True` was passed but", UserWarning)
        return PeftModel.from_pretrained(base, folder).eval()


def extract(opened: AbstractContextManager[Pair], out: Path, **how: Any) -> dict[str, Any]:
    with opened as pair:
        return extract_lora(pair, out, **how)


def open_pair(base: Path, tuned: Path) -> AbstractContextManager[Pair]:
    return open_fine_tune(str(base), str(tuned))


def answer(model: Any, **inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(**inputs).logits
    return logits


TEXT = {"input_ids": TOKENS}
PIXELS = {"pixel_values": torch.linspace(-1, 1, 384).reshape(2, 3, 8, 8)}
WORDS, ENDS = {"vocab_size": 30}, {"bos_token_id": 2, "eos_token_id": 3}
HALVES = WORDS | {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1}
BAMBA = MAMBA | {"attn_layer_indices": [0], "num_key_value_heads": 1}
# A class, its settings, and inputs.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, torch.Tensor]]] = {
    # Its file has other names than the model: transformers renames them on loading.
    "vit": ("ViTForImageClassification", {"image_size": 8, "patch_size": 4} | SMALL, PIXELS),
    # Its matrices are [in, out], and its head is tied to its embedding.
    "gpt2": ("GPT2LMHeadModel", WORDS | ENDS | {"n_embd": 16, "n_layer": 2, "n_head": 2}, TEXT),
    # Some linear layers have a bias, others none.
    "qwen2": ("Qwen2ForCausalLM", WORDS | {"num_key_value_heads": 1} | SMALL, TEXT),
    "llama": ("LlamaForCausalLM", WORDS | {"num_key_value_heads": 1, "attention_bias": True} | SMALL, TEXT),
    # One embedding in four modules.
    # Its linear layers are of a class of its own.
    "falcon": ("FalconForCausalLM", WORDS | SMALL, TEXT),
    # Its settings hold infinity.
    "bamba": ("BambaForCausalLM", WORDS | BAMBA | SMALL, TEXT),
    "t5": ("T5ForConditionalGeneration", HALVES, TEXT | {"decoder_input_ids": TOKENS}),
}

PARTLY_BIASED = ("qwen2", "llama")


@pytest.mark.parametrize("name", FAMILIES)
def test_at_full_rank_the_adapter_answers_as_the_task(name: str, tmp_path: Path):
    kind, settings, inputs = getattr(transformers, FAMILIES[name][0]), *FAMILIES[name][1:]
    merged = merge_family(tmp_path, maker(lambda: kind(kind.config_class(**settings))), noise=2e-2)
    report = extract(open_task(str(merged), "a"), tmp_path / "lora", rank=64)
    plain = kind.from_pretrained(tmp_path / "base")
    before, wanted = answer(plain, **inputs), answer(EMRModel.from_pretrained(merged, "a").model, **inputs)
    found = answer(load_adapter(plain, tmp_path / "lora"), **inputs)
    # transformers finds the base by itself
    with warnings.catch_warnings(action="ignore"):
        loaded = kind.from_pretrained(tmp_path / "lora")
    torch.testing.assert_close(answer(loaded, **inputs), found)
    assert (found - wanted).abs().max() < 1e-4 < 1e-3 < (before - wanted).abs().max()
    assert report["left_out"] == [] and report["error"] < 1e-5
    # peft adds biases to layers that have one
    assert ["merge_and_unload" in text for text in report["warnings"]] == [True] * (name in PARTLY_BIASED)
    loaded = load_adapter(kind.from_pretrained(tmp_path / "base"), tmp_path / "lora")
    with refused(RuntimeError, "bias") if name in PARTLY_BIASED else contextlib.nullcontext():
        with warnings.catch_warnings(action="ignore"):
            joined = loaded.merge_and_unload()
        torch.testing.assert_close(answer(joined, **inputs), found)
    # At full rank it is no gain.
    assert report["bytes"] > report["bytes_of_fine_tune"]
    assert any("the fine-tune itself is not larger" in line for line in report_lines(report))
    assert report["bytes"] == (tmp_path / "lora" / "adapter_model.safetensors").stat().st_size
    assert not list((tmp_path / "lora").glob(".*"))


@pytest.fixture(scope="module")
def berts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A merge of classifiers with heads of their own, over a base without one; the fine-tunes lie beside it."""
    place = tmp_path_factory.mktemp("berts")
    merge_berts(place, a={"num_labels": 3, "noise": 2e-2}, b={"num_labels": 4, "noise": 2e-2})
    return place


def test_a_new_head_goes_along_and_peft_merges_the_adapter(berts: Path, tmp_path: Path):
    report = extract(open_pair(berts / "base", berts / "b"), tmp_path / "lora", error=0)
    wanted = answer(BertForSequenceClassification.from_pretrained(berts / "b"), **TEXT)
    # The folder has the configuration of the task.
    config = BertConfig.from_pretrained(tmp_path / "lora")
    base = BertForSequenceClassification.from_pretrained(berts / "base", config=config)
    assert (answer(load_adapter(base, tmp_path / "lora"), **TEXT) - wanted).abs().max() < 1e-4
    assert "classifier" in report["modules_to_save"] and wanted.shape == (2, 4)


def test_each_matrix_gets_the_smallest_rank_that_keeps_the_error(berts: Path, tmp_path: Path):
    with open_task(str(berts / "merged"), "a") as pair:
        report = extract_lora(pair, tmp_path / "lora", error=0.3)
        name = "bert.encoder.layer.0.intermediate.dense"
        difference = pair.read(f"{name}.weight") - pair.read_base(f"{name}.weight")
    squares = torch.linalg.svdvals(difference.double()).square()
    errors = [float(squares[rank:].sum() / squares.sum()) ** 0.5 for rank in range(len(squares))]
    found = report["matrices"][name]
    assert errors[found["rank"]] <= 0.3 < errors[found["rank"] - 1]
    assert found["error"] == pytest.approx(errors[found["rank"]], rel=1e-3)
    config = read_json(tmp_path / "lora" / "adapter_config.json")
    assert len(set(config["rank_pattern"].values())) > 1 and config["rank_pattern"] == config["alpha_pattern"]
    assert config["r"] == config["lora_alpha"] == max(config["rank_pattern"].values())
    assert all(found["error"] <= 0.3 for found in report["matrices"].values())
    by_rank = {row["rank"]: row["error"] for row in report["by_rank"]}
    assert sorted(by_rank.values(), reverse=True) == list(by_rank.values()) and by_rank[16] < 1e-6


def test_lora_only_leaves_out_what_vllm_does_not_read_and_tells_what_that_costs(berts: Path, tmp_path: Path):
    with open_task(str(berts / "merged"), "a") as pair:
        report = extract_lora(pair, tmp_path / "lora", rank=16, lora_only=True)
        squares = {
            name: float((pair.read(name).double() - pair.read_base(name).double()).square().sum())
            for name in pair.names
            if name in pair.base_shapes
        }
    config = read_json(tmp_path / "lora" / "adapter_config.json")
    assert (config["modules_to_save"], config["lora_bias"], config["rank_pattern"]) == (None, False, {})
    assert config["r"] == config["lora_alpha"] == 16
    names = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in names)
    lost = {item["name"]: item["error"] for item in report["left_out"]}
    assert lost["classifier.weight"] is None and "bert.encoder.layer.0.output.LayerNorm.weight" in lost
    known = {name: error for name, error in lost.items() if error is not None}
    whole = sum(squares.values())
    assert known == {name: pytest.approx((squares[name] / whole) ** 0.5) for name in known}
    assert report["error"] == pytest.approx(sum(error**2 for error in known.values()) ** 0.5, rel=1e-3)


def test_a_fine_tune_of_a_low_rank_is_found_again(tmp_path: Path):
    base = tiny_gpt2(tmp_path / "base")
    model: Any = GPT2LMHeadModel.from_pretrained(base)
    generator = torch.Generator().manual_seed(0)
    for block in model.transformer.h:
        weight = block.mlp.c_fc.weight.data
        weight += torch.randn(16, 3, generator=generator) @ torch.randn(3, 64, generator=generator)
    model.save_pretrained(tmp_path / "tuned")
    report = extract(open_pair(base, tmp_path / "tuned"), tmp_path / "lora", error=1e-4)
    ranks = {name: found["rank"] for name, found in report["matrices"].items()}
    assert ranks == {f"transformer.h.{layer}.mlp.c_fc": 3 for layer in (0, 1)}
    assert report["modules_to_save"] == report["biases"] == report["left_out"] == []


def test_files_of_sub_folders_go_along(berts: Path, tmp_path: Path):
    tuned = tiny_bert(tmp_path / "tuned", 3, base=berts / "base", task_head=False)
    write_json(tuned / "modules.json", [{"path": "2_Dense"}])
    write_weights(tuned / "2_Dense", {"linear.weight": torch.ones(2, 16)})
    extract(open_pair(berts / "base", tuned), tmp_path / "lora", rank=2)
    assert load_file(tmp_path / "lora" / "2_Dense" / "model.safetensors")["linear.weight"].sum() == 32


def test_a_fine_tune_of_biases_alone(berts: Path, tmp_path: Path):
    model: Any = BertForSequenceClassification.from_pretrained(berts / "a")
    perturb(model, 5, 0.1, lambda name: name.endswith("dense.bias"))
    model.save_pretrained(tmp_path / "tuned")
    report = extract(open_pair(berts / "a", tmp_path / "tuned"), tmp_path / "lora", rank=4)
    assert report["biases"] and report["modules_to_save"] == [] and report["error"] == 0
    base = BertForSequenceClassification.from_pretrained(berts / "a")
    found = answer(load_adapter(base, tmp_path / "lora"), **TEXT)
    assert (found - answer(model, **TEXT)).abs().max() < 1e-5


def test_buffers_in_layers_whose_biases_the_fine_tune_lacks_are_no_experts_in_another_form(tmp_path: Path):
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_bias=True,
    )
    for folder in ("base", "tuned"):
        LlamaForCausalLM(config).save_pretrained(tmp_path / folder)
    file, layer = tmp_path / "tuned" / "model.safetensors", "model.layers.0.self_attn"
    kept = {name: values for name, values in load_file(file).items() if not name.endswith("proj.bias")}
    buffers = {f"{layer}.rotary_emb.inv_freq": torch.ones(4), f"{layer}.count": torch.arange(3)}
    save_file(kept | buffers, file, metadata={"format": "pt"})
    assert extract(open_pair(tmp_path / "base", tmp_path / "tuned"), tmp_path / "lora", rank=4)["error"] < 1


def test_a_fine_tune_that_computes_otherwise_than_its_base_is_warned_of(berts: Path, tmp_path: Path):
    tuned = shutil.copytree(berts / "a", tmp_path / "a")
    base, config = berts / "base", read_json(tuned / "config.json")
    write_json(tuned / "config.json", config | {"hidden_act": "relu", "hidden_dropout_prob": 0.3, "use_cache": False})
    merged = merge(base, {"a": tuned}, tmp_path / "merged")
    for index, opened in enumerate((open_pair(base, tuned), open_task(str(merged), "a"))):
        report = extract(opened, tmp_path / f"lora{index}", rank=2)
        (warning,) = report["warnings"]
        assert "has other values of hidden_act than the base" in warning and "config.json" in warning
        assert f"warning: {warning}" in report_lines(report)
        assert read_json(tmp_path / f"lora{index}" / "report.json")["warnings"] == [warning]
    # Another head and other labels are no other model, and a key that one file lacks has its default.
    del config["hidden_act"], config["layer_norm_eps"]
    write_json(tuned / "config.json", config)
    assert extract(open_pair(base, tuned), tmp_path / "same", rank=2)["warnings"] == []
    write_json(tuned / "config.json", config | {"model_type": "roberta"})
    with refused(DataError, "roberta", "bert"):
        extract(open_pair(base, tuned), tmp_path / "other", rank=2)


def test_random_projections_are_near_the_best_and_the_same_every_time():
    difference = torch.randn(1100, 1200, generator=torch.Generator().manual_seed(0))
    a, b, squares = cut_matrix(difference, 8, None)
    again = cut_matrix(difference, 8, None)
    assert a.equal(again[0]) and b.equal(again[1]) and len(squares) == 8
    best = float(torch.linalg.svdvals(difference).square()[8:].sum()) ** 0.5
    assert best <= float((difference - b @ a).norm()) * (1 + 1e-5) <= best * 1.005


def test_what_cannot_be_extracted_is_refused_in_words(berts: Path, tmp_path: Path):
    base, a = berts / "base", berts / "a"

    def refuse(fact: str, base: Path, tuned: Path, out: str = "lora", **options: Any) -> None:
        with refused(ValueError, fact):
            extract(open_pair(base, tuned), tmp_path / out, **(options or {"rank": 1}))

    for options in ({"rank": 1, "error": 0.1}, {"error": -1}, {"error": 1.5}, {"error": float("nan")}, {"error": "1"}):
        refuse("give either a rank", base, a, **options)
    for rank in (0, 2.0, True):
        refuse("rank must be a whole number", base, a, rank=rank)
    refuse("no linear layer differs from the base", a, a)
    refuse("is of peft", base, tiny_adapter(tmp_path / "adapter", berts / "base"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    refuse("is not empty", base, a, "full")
    refuse("they cannot come from one model", tiny_gpt2(tmp_path / "gpt2"), a)
    raw = write_weights(tmp_path / "raw", load_file(berts / "a" / "model.safetensors"))
    refuse("config.json, which names the class of the model, is missing", base, raw)
    own = read_json(a / "config.json") | {"model_type": "own", "auto_map": {"AutoModel": "modeling_own.Own"}}
    for name in ("base", "a"):
        write_json(shutil.copytree(berts / name, tmp_path / "own" / name) / "config.json", own)
    refuse("modeling_own.Own", tmp_path / "own" / "base", tmp_path / "own" / "a")
    with refused(DataError, "diffusers"), open_task(str(merge_family(tmp_path / "unets", tiny_unet, "a")), "a"):
        pass
    with refused(UsageError, "x"), open_task(str(berts / "merged"), "x"):
        pass
    assert not (tmp_path / "lora").exists()


@pytest.mark.parametrize("kind", ["Mamba", "FalconMamba"])
@pytest.mark.parametrize("lora_only", [False, True])
def test_an_adapter_that_peft_does_not_load_is_refused(tmp_path: Path, kind: str, lora_only: bool):
    config = getattr(transformers, f"{kind}Config")(hidden_size=16, num_hidden_layers=1, vocab_size=30, state_size=4)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.save_pretrained(tmp_path / "base")
    perturb(model, 1, 0.1)
    model.save_pretrained(tmp_path / "a")
    with refused(DataError, "peft", "out_proj"):
        extract(open_pair(tmp_path / "base", tmp_path / "a"), tmp_path / "lora", rank=2, lora_only=lora_only)
    assert not (tmp_path / "lora").exists()
