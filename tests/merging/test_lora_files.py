"""LoRA files of diffusers and of kohya's scripts: refused, with the way through diffusers, which is taken here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.utils import convert_state_dict_to_diffusers, convert_state_dict_to_kohya
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from safetensors.torch import save_file

from hf_ext.errors import DataError
from hf_ext.merging.plan import make_plan
from tests.kit.refusals import refused

TARGETS = ["to_q", "to_v", "to_out.0"]


def build() -> UNet2DConditionModel:
    torch.manual_seed(0)
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


def write_file(place: Path, form: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """A LoRA file of a U-Net, and what it adds to the weights."""
    model = build()
    inject_adapter_in_model(LoraConfig(r=3, lora_alpha=3, target_modules=TARGETS, init_lora_weights=False), model)
    state = get_peft_model_state_dict(model)
    added = {
        f"{name}.weight": module.get_delta_weight("default").detach()
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    assert len(added) >= 8
    if form == "kohya":
        save_file(
            convert_state_dict_to_kohya({f"unet.{name}": value for name, value in state.items()}),
            place / "lora.safetensors",
        )
        return place / "lora.safetensors", added
    StableDiffusionPipeline.save_lora_weights(place, unet_lora_layers=convert_state_dict_to_diffusers(state))
    return place / "pytorch_lora_weights.safetensors", added


@pytest.mark.parametrize("form", ["diffusers", "kohya"])
def test_a_lora_file_is_refused_and_the_way_that_is_named_works(tmp_path, form):
    build().save_pretrained(tmp_path / "unet")
    file, added = write_file(tmp_path, form)
    config = {"base": str(tmp_path / "unet"), "tasks": {"a": str(file)}, "adapters": "delta"}
    with refused(DataError, "load_lora_weights") as caught:
        make_plan(config)
    steps = ["load_lora_weights", "fuse_lora", "unload_lora_weights", "unet.save_pretrained"]
    assert all(step in str(caught.value) for step in steps)
    pipeline = StableDiffusionPipeline(
        None,
        None,
        None,
        build(),
        DDIMScheduler(steps_offset=1, clip_sample=False),
        None,
        None,
        requires_safety_checker=False,
    )
    pipeline.load_lora_weights(str(file.parent), weight_name=file.name)
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    pipeline.unet.save_pretrained(tmp_path / "fused")
    with make_plan(config | {"tasks": {"a": str(tmp_path / "fused")}}) as plan:
        changed = {row.name: plan.tasks[0].read(str(row.task_names[0])) - plan.base.read(row.name)
                   for row in plan.merged_rows}  # fmt: skip
    for name, value in changed.items():
        torch.testing.assert_close(value, added.get(name, torch.zeros_like(value)), rtol=1e-5, atol=1e-6, msg=name)
    assert added.keys() <= changed.keys()
