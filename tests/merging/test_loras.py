"""LoRAs of one base as one LoRA: peft's merge of it is the merge of the full weights that they give."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from diffusers import UNet2DModel
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from hf_ext.merging.loras import merge_loras
from hf_ext.merging.merge import merge_checkpoints
from tests.emr.emr_testing import tiny_adapter, tiny_bert, tiny_gpt2, tiny_unet, write_tokenizer
from tests.merging.test_adapters import merged_by_peft

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Adapter 'default':UserWarning"),
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed but:UserWarning"),
]
LAYERS = 2


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("bert") / "base")


@pytest.fixture(scope="module")
def berts(bert, tmp_path_factory) -> tuple[Path, Path]:
    """Of different ranks, scales and modules; one has biases of B."""
    place = tmp_path_factory.mktemp("loras")
    first = tiny_adapter(place / "a", bert, 1, lora_alpha=4, rank_pattern={"layer.1.attention.self.query": 3})
    second = {"r": 5, "use_rslora": True, "lora_bias": True, "target_modules": ["query", "key"]}
    return first, tiny_adapter(place / "b", bert, 2, **second)


def merged_in_full(base: Path, adapters: tuple[Path, ...], weights: tuple[float, ...], out: Path) -> dict:
    """Weights of the merge by task arithmetic of what the adapters give."""
    tasks = {f"t{index}": str(adapter) for index, adapter in enumerate(adapters)}
    options = {"method": "task_arithmetic", "weight": dict(zip(tasks, weights, strict=True)), "adapters": "delta"}
    merge_checkpoints({"base": str(base), "tasks": tasks, **options}, out, progress=False)
    return load_file(out / "model.safetensors")


def test_the_sum_of_the_ranks_is_exact(bert, berts, tmp_path):
    weights = (0.7, -0.4)
    report = merge_loras(list(map(str, berts)), tmp_path / "lora", weights=weights)
    # Who gets the report learns no folder of this machine.
    assert report["adapters"] == ["a", "b"] and str(bert.parent) not in (tmp_path / "lora" / "report.json").read_text()
    ranks = {
        module.rpartition(".")[2]: found["rank"] for module, found in report["matrices"].items() if "1." in module
    }
    assert ranks == {"query": 8, "value": 2, "key": 5} and report["error"] == 0
    found = merged_by_peft(AutoModel.from_pretrained(bert), tmp_path / "lora")
    expected = merged_in_full(bert, berts, weights, tmp_path / "full")
    before = AutoModel.from_pretrained(bert).state_dict()
    moved = {name for name in expected if not expected[name].equal(before[name])}
    assert len(moved) == LAYERS * 5
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6, msg=name)


def test_a_rank_or_an_error_is_the_nearest_sum(bert, berts, tmp_path):
    adapters, name = list(map(str, berts)), "encoder.layer.0.attention.self.query"
    merge_loras(adapters, tmp_path / "exact")
    exact = load_file(tmp_path / "exact" / "adapter_model.safetensors")
    key = f"base_model.model.{name}"
    whole = exact[f"{key}.lora_B.weight"] @ exact[f"{key}.lora_A.weight"]
    values = torch.linalg.svdvals(whole)
    report = merge_loras(adapters, tmp_path / "cut", rank=3)
    cut = load_file(tmp_path / "cut" / "adapter_model.safetensors")
    lost = (cut[f"{key}.lora_B.weight"] @ cut[f"{key}.lora_A.weight"] - whole).norm()
    torch.testing.assert_close(lost, values[3:].norm(), rtol=1e-4, atol=1e-6)
    assert report["rank"] == 3 and report["matrices"][name]["error"] == pytest.approx(float(lost / whole.norm()), 1e-3)
    bounded = merge_loras(adapters, tmp_path / "error", error=0.3)
    expected = next(rank for rank in range(8) if values[rank:].norm() <= 0.3 * values.norm())
    assert bounded["matrices"][name]["rank"] == expected and 0 < bounded["error"] <= 0.3
    assert json.loads((tmp_path / "error" / "report.json").read_text())["matrices"] == bounded["matrices"]


def test_embeddings_the_matrices_of_gpt2_and_convolutions(tmp_path):
    base = tiny_gpt2(tmp_path / "gpt2")
    targets = [["c_attn", "wte"], ["c_attn", "c_proj"]]
    adapters = [
        tiny_adapter(tmp_path / f"g{rank}", base, rank, r=rank, target_modules=names, fan_in_fan_out=True)
        for rank, names in zip((2, 3), targets, strict=True)
    ]
    merge_loras(list(map(str, adapters)), tmp_path / "lora", weights=(1.0, 0.5))
    found = merged_by_peft(AutoModel.from_pretrained(base), tmp_path / "lora")
    expected = merged_in_full(base, tuple(adapters), (1.0, 0.5), tmp_path / "full")
    for name, value in found.items():
        torch.testing.assert_close(value, expected[f"transformer.{name}"], rtol=1e-5, atol=1e-6, msg=name)
    unet = tiny_unet(tmp_path / "unet")
    for rank in (1, 2):
        config = LoraConfig(r=rank, target_modules=["conv1", "conv_shortcut", "to_q"], init_lora_weights=False)
        get_peft_model(UNet2DModel.from_pretrained(unet), config).save_pretrained(tmp_path / f"u{rank}")
    convolutions = [tmp_path / "u1", tmp_path / "u2"]
    report = merge_loras(list(map(str, convolutions)), tmp_path / "conv", rank=2, weights=(1.0, 1.0))
    assert report["rank"] == 2 and report["error"] > 0
    merge_loras(list(map(str, convolutions)), tmp_path / "all", weights=(1.0, 1.0))
    found = merged_by_peft(UNet2DModel.from_pretrained(unet), tmp_path / "all")
    parts = [merged_by_peft(UNet2DModel.from_pretrained(unet), place) for place in convolutions]
    before = UNet2DModel.from_pretrained(unet).state_dict()
    for name, value in found.items():
        wanted = parts[0][name] + parts[1][name] - before[name]
        torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6, msg=name)


def test_heads_are_averaged_or_refused(bert, tmp_path):
    adapters = [tiny_adapter(tmp_path / str(seed), bert, seed, modules_to_save=["pooler"]) for seed in (1, 2)]
    names = list(map(str, adapters))
    merge_loras(names, tmp_path / "average")
    parts = [load_file(folder / "adapter_model.safetensors") for folder in (*adapters, tmp_path / "average")]
    heads = [name for name in parts[0] if "pooler" in name]
    assert heads
    for name in heads:
        torch.testing.assert_close(parts[2][name], (parts[0][name] + parts[1][name]) / 2)
    report = merge_loras([names[0], names[0]], tmp_path / "twice", weights=(0.25, 0.75))
    assert report["adapters"] == ["1", "1"] and report["weights"] == [0.25, 0.75]
    with pytest.raises(ValueError, match="whole in an adapter .* weights add up to 1.*--adapters delta"):
        merge_loras(names, tmp_path / "sum", weights=(1.0, 1.0))
    for folder, words in zip(adapters, ("<a>", "<b>"), strict=True):
        write_tokenizer(folder, ("[UNK]", words))
    with pytest.raises(ValueError, match="different tokens and hold whole tensors, such as '.*pooler"):
        merge_loras(names, tmp_path / "rows")


def test_what_does_not_fit_is_refused_in_words(bert, berts, tmp_path):
    first = str(berts[0])
    for others, message in (
        ((str(bert),), "is no adapter of peft"),
        ((), "two adapters or more"),
        ((str(tiny_adapter(tmp_path / "dora", bert, use_dora=True)),), "uses use_dora"),
        ((str(tiny_adapter(tmp_path / "ia3", bert, kind="ia3")),), "not LoRA"),
    ):
        with pytest.raises(ValueError, match=message):
            merge_loras([first, *others], tmp_path / "out")
    for options, message in (
        ({"weights": (math.nan, 1.0)}, "weights must be finite"),
        ({"rank": 0}, "a rank is at least 1"),
        ({"error": -1.0}, "an error from 0 to 1"),
    ):
        with pytest.raises(ValueError, match=message):
            merge_loras([first, first], tmp_path / "out", **options)
    with pytest.raises(ValueError, match="not both"):
        merge_loras([first, first], tmp_path / "out", rank=1, error=0.1)
    wide = tiny_bert(tmp_path / "wide", hidden_size=64)
    with pytest.raises(ValueError, match="other sides"):
        merge_loras([first, str(tiny_adapter(tmp_path / "w", wide))], tmp_path / "out")
    with pytest.raises(ValueError, match="there is something here"):
        merge_loras([first, first], bert)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_alpha": None}, "lora_alpha must be a finite number, got None"),
        ({"lora_alpha": "8"}, "lora_alpha must be a finite number, got '8'"),
        ({"r": math.inf}, "r must be a finite number, got inf"),
        ({"alpha_pattern": ["x"]}, r"alpha_pattern must be a mapping of names to numbers, got \['x'\]"),
        ({"alpha_pattern": {"(": 1}}, r"alpha_pattern has '\(', which is no pattern"),
        ({"rank_pattern": {"query": True}}, r"rank_pattern\['query'\] must be a finite number, got True"),
    ],
)
def test_a_configuration_without_a_scale_is_refused_by_name(bert, tmp_path, changes, message):
    broken = tiny_adapter(tmp_path / "broken", bert)
    path = broken / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        merge_loras([str(broken), str(broken)], tmp_path / "out")
    with pytest.raises(ValueError, match=message):
        merge_checkpoints({"base": str(bert), "tasks": {"a": str(broken)}, "adapters": "delta"}, tmp_path / "full")
    assert not (tmp_path / "out").exists() and not (tmp_path / "full").exists()


def test_a_matrix_of_rank_0_is_refused(bert, tmp_path):
    empty = tiny_adapter(tmp_path / "empty", bert)
    stored = load_file(empty / "adapter_model.safetensors")
    cut = {name: value[:0] if "lora_A" in name else value[:, :0].contiguous() for name, value in stored.items()}
    save_file(cut, empty / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="a LoRA of rank 0"):
        merge_loras([str(empty), str(empty)], tmp_path / "out")
