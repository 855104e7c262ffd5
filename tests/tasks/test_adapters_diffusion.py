"""Adapters of a Disentangled DiT: each library reads the same from a snapshot, and what none can hold is refused."""

import peft
import pytest
import torch
from diffusers import DiffusionPipeline

from hf_ext.tasks.diffusion import DisentangledDiTTask
from hf_ext.training.arguments import build
from hf_ext.training.models import add_adapter
from tests.disentangled_dit.dit_testing import make_inputs, shake

from .diffusion_testing import MODEL

# Settings of peft, and whether diffusers' `load_lora_weights` takes such layers.
ADAPTERS = {
    "alpha": ({"lora_alpha": 32}, True),
    "default alpha": ({}, True),
    "rank-stable": ({"use_rslora": True}, True),
    "patterns": ({"alpha_pattern": {"to_q": 64}, "rank_pattern": {"to_v": 4}}, True),
    "dora": ({"use_dora": True}, True),
    "bias": ({"bias": "lora_only"}, False),
    "whole modules": ({"modules_to_save": ["proj_out"]}, False),
    "loha": ({"peft_type": "LOHA"}, False),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_means_the_same_to_diffusers_and_to_peft(tmp_path, name, caplog):
    settings, for_diffusers = ADAPTERS[name]
    task = build(DisentangledDiTTask, {"image_size": 8}, "task")
    task.id2label = {0: "cat", 1: "dog"}
    base = task.build_model(MODEL, None)
    shake(base)
    task.save_model(base, base.state_dict(), tmp_path / "base")
    section = {"peft_type": "LORA", "r": 2, "target_modules": ["to_q", "to_v"], **settings}
    model = add_adapter(base, section, str(tmp_path / "base"))
    shake(torch.nn.ParameterList(value for value in model.parameters() if value.requires_grad))
    task.save_model(model, model.state_dict(), tmp_path / "run")
    written = (tmp_path / "run" / "pytorch_lora_weights.safetensors").exists()
    assert written == for_diffusers == ("peft.PeftModel" not in caplog.text)
    pipelines = [DiffusionPipeline.from_pretrained(tmp_path / "base") for _ in range(2)]
    inputs, answers = make_inputs(base), []
    pipelines[0].transformer = peft.PeftModel.from_pretrained(pipelines[0].transformer, tmp_path / "run")
    if for_diffusers:
        pipelines[1].load_lora_weights(tmp_path / "run", weight_name="pytorch_lora_weights.safetensors")
    with torch.no_grad():
        expected = model.eval()(**inputs).sample
        answers = [pipeline.transformer.eval()(**inputs).sample for pipeline in pipelines]
    for answer, known in zip(answers, (True, for_diffusers), strict=True):
        assert torch.allclose(answer, expected, atol=1e-5) == known
