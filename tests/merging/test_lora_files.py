"""LoRA files of diffusers and kohya as tasks: the weights are those that peft merges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from diffusers.utils import convert_state_dict_to_diffusers, convert_state_dict_to_kohya
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModel

from hf_ext.merging.plan import make_plan
from hf_ext_cli.main import main

TARGETS = {
    "unet": ["to_q", "to_v", "to_out.0", "proj_in", "conv1"],
    "text_encoder": ["q_proj", "out_proj", "fc1"],
}


def build(part: str) -> Any:
    torch.manual_seed(0)
    if part == "unet":
        return UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(8, 8),
            layers_per_block=1,
            norm_num_groups=4,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=16,
            attention_head_dim=4,
        )
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return CLIPTextModel(CLIPTextConfig(vocab_size=30, max_position_embeddings=8, **sizes))


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory) -> Path:
    """Two models, the LoRAs that peft put on them, and what peft merges: `expected` by name."""
    place = tmp_path_factory.mktemp("pipeline")
    for part, targets in TARGETS.items():
        model = build(part)
        model.save_pretrained(place / part)
        torch.manual_seed(1)
        config = LoraConfig(r=3, lora_alpha=3, target_modules=targets, init_lora_weights=False)
        inject_adapter_in_model(config, model)
        save_file(get_peft_model_state_dict(model), place / f"{part}.lora")
        merged = {}
        for name, module in model.named_modules():
            if hasattr(module, "get_delta_weight"):
                merged[f"{name}.weight"] = module.get_delta_weight("default").contiguous()
        assert len(merged) >= 4
        save_file(merged, place / f"{part}.deltas")
    return place


def write_diffusers(place: Path, out: Path, **more: Any) -> Path:
    layers = {f"{part}_lora_layers": load_file(place / f"{part}.lora") for part in TARGETS}
    layers = {name: convert_state_dict_to_diffusers(state) for name, state in layers.items()}
    StableDiffusionPipeline.save_lora_weights(out, **layers, **more)
    return out


def write_kohya(place: Path, file: Path, alpha: float) -> Path:
    state = {f"{part}.{name}": value for part in TARGETS for name, value in load_file(place / f"{part}.lora").items()}
    named = convert_state_dict_to_kohya(state)
    alphas = {name: torch.tensor(alpha) for name in named if name.endswith(".alpha")}
    assert len(alphas) > 8 and all(name.startswith(("lora_unet_", "lora_te1_")) for name in named)
    save_file({name: value.half() for name, value in named.items()} | alphas, file)
    return file


def differences(base: Path, task: Path) -> dict[str, torch.Tensor]:
    """What the task changes, as the plan reads it."""
    with make_plan({"base": str(base), "tasks": {"t": str(task)}, "adapters": "delta"}) as plan:
        return {row.name: plan.tasks[0].read(str(row.task_names[0])) - plan.base.read(row.name)
                for row in plan.merged_rows}  # fmt: skip


def require_equal(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], scale: float, close: float
) -> None:
    # transformers and its files may differ by a prefix
    expected = {next(own for own in found if own.endswith(name)): value for name, value in expected.items()}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value * scale, rtol=close, atol=close, msg=name)


@pytest.mark.parametrize("part", TARGETS)
def test_a_file_of_diffusers(pipeline, tmp_path, part):
    folder = write_diffusers(pipeline, tmp_path / "lora")
    expected = load_file(pipeline / f"{part}.deltas")
    require_equal(differences(pipeline / part, folder), expected, 1.0, 1e-6)
    require_equal(differences(pipeline / part, folder / "pytorch_lora_weights.safetensors"), expected, 1.0, 1e-6)


def test_the_scale_that_diffusers_writes_into_the_header_counts(pipeline, tmp_path):
    told = {"r": 3, "lora_alpha": 6, "target_modules": TARGETS["unet"]}
    folder = write_diffusers(pipeline, tmp_path / "lora", unet_lora_adapter_metadata=told)
    expected = load_file(pipeline / "unet.deltas")
    require_equal(differences(pipeline / "unet", folder), expected, 2.0, 1e-6)


@pytest.mark.parametrize("part", TARGETS)
def test_a_file_of_kohya_with_its_alphas(pipeline, tmp_path, part):
    file = write_kohya(pipeline, tmp_path / "style.safetensors", alpha=1.5)
    require_equal(differences(pipeline / part, file), load_file(pipeline / f"{part}.deltas"), 0.5, 2e-3)


def test_files_of_both_kinds_merge_into_one_model(pipeline, tmp_path):
    first = write_diffusers(pipeline, tmp_path / "lora")
    second = write_kohya(pipeline, tmp_path / "style.safetensors", alpha=3)
    words = ["--base", pipeline / "unet", "--task", f"a={first}", "--task", f"b={second}", "--adapters", "delta"]
    words += ["--method", "average", "--out", tmp_path / "merged"]
    result = CliRunner().invoke(main, ["merge", *map(str, words)])
    assert result.exit_code == 0, result.output
    merged = UNet2DConditionModel.from_pretrained(tmp_path / "merged").state_dict()
    base = UNet2DConditionModel.from_pretrained(pipeline / "unet").state_dict()
    for name, value in load_file(pipeline / "unet.deltas").items():
        torch.testing.assert_close(merged[name] - base[name], value, rtol=2e-3, atol=2e-3, msg=name)


@pytest.mark.parametrize("told", ["[]", "5", "{", "null"])
def test_a_header_that_is_no_object_is_refused_by_name(pipeline, tmp_path, told):
    file = write_diffusers(pipeline, tmp_path / "lora") / "pytorch_lora_weights.safetensors"
    save_file(load_file(file), file, metadata={"lora_adapter_metadata": told})
    with pytest.raises(ValueError, match=r"lora_adapter_metadata"):
        make_plan({"base": str(pipeline / "unet"), "tasks": {"a": str(file)}, "adapters": "delta"})


def test_what_does_not_fit_is_refused_in_words(pipeline, tmp_path):
    file = write_kohya(pipeline, tmp_path / "style.safetensors", alpha=3)
    config = {"base": str(pipeline / "unet"), "tasks": {"a": str(file)}}
    with pytest.raises(ValueError, match="'a' are peft adapters, and adapters: refuse is set"):
        make_plan(config)
    state = load_file(file)
    name = next(name for name in state if name.startswith("lora_unet_") and name.endswith("lora_up.weight"))
    text = {name: value for name, value in state.items() if name.startswith("lora_te1_")}
    cases: list[tuple[dict[str, torch.Tensor], str]] = [
        (state | {"lora_unet_x.hada_w1_a": torch.ones(1)}, "is of a variant"),
        (text, "is a LoRA file for text_encoder, and none of these is"),
        (state | {"lora_unet_x.alpha": torch.ones(())}, "'lora_unet_x.alpha' has no factors"),
        ({key: value for key, value in state.items() if key != name}, "has no factors|does not know its names"),
        ({key.replace("to_q", "to_z"): value for key, value in state.items()}, "which base .* does not have"),
    ]
    for number, (tensors, message) in enumerate(cases):
        wrong = tmp_path / f"{number}.safetensors"
        save_file(tensors, wrong)
        with pytest.raises(ValueError, match=message):
            make_plan({**config, "tasks": {"a": str(wrong)}, "adapters": "delta"})
