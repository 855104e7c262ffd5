"""Adapters of a Disentangled DiT: each library reads the same from a snapshot, and what none can hold is refused."""

import contextlib

import peft
import pytest
import torch
from diffusers import DiffusionPipeline

from hf_ext.errors import DataError
from hf_ext.tasks.diffusion import DisentangledDiTTask
from hf_ext.tasks.diffusion_data import load_autoencoder
from hf_ext.tasks.diffusion_transfer import is_part_of
from hf_ext.training.arguments import build
from hf_ext.training.models import add_adapter, refuse_lost_fields
from tests.disentangled_dit.dit_testing import make_inputs, shake
from tests.disentangled_dit.pipeline_testing import make_encoder, make_tokenizer, make_vae
from tests.kit.refusals import refused

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


# What a run changes of its base, and what the refusal names; a size alone a call can give.
KEPT = {"image_size": 8, "max_text_length": 8, "text_encoder": "A"}
CHANGES = {
    "nothing": ({}, None),
    "size": ({"image_size": 16, "transfer": {"schedule": False}}, None),
    "schedule": ({"image_size": 16}, "task.transfer.schedule"),
    "positions": ({"image_size": 16, "transfer": {"schedule": False, "positions": False}}, "pos_embed_base_size"),
    "length": ({"max_text_length": 9}, "max_text_length (8 → 9)"),
    "padding": ({"text_padding": "zeros"}, "text_padding (noisy_replicate → zeros)"),
    "encoder": ({"text_encoder": "B"}, "text_encoder"),
    "autoencoder": ({"vae": "B"}, "vae"),
    "copied autoencoder": ({"vae": "A"}, None),
    "classes": ({"text_encoder": None}, "num_classes (None → 2)"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_an_adapter_cannot_hold_is_refused(tmp_path, name):
    changes, fact = CHANGES[name]
    for part, model in (("text_encoder", make_encoder()), ("vae", make_vae())):
        for place in "AB":
            model.save_pretrained(tmp_path / f"{part} {place}")
            make_tokenizer().save_pretrained(tmp_path / f"{part} {place}")
            shake(model)
    parts = {"vae": "A"} if "vae" in changes else {}

    def made(settings, init_from):
        given = [part for part in ("vae", "text_encoder") if settings.get(part)]
        places = {part: str(tmp_path / f"{part} {settings[part]}") for part in given}
        task = build(DisentangledDiTTask, {**settings, **places}, "task")
        task.id2label = {0: "cat", 1: "dog"}
        return task, task.build_model({} if init_from else MODEL, init_from)

    task, model = made({**KEPT, **parts}, None)
    base = str(tmp_path / "base")
    task.save_model(model, model.state_dict(), tmp_path / "base")
    task, model = made({**KEPT, **parts, **changes}, base)
    with refused(DataError, fact, base) if fact else contextlib.nullcontext():
        refuse_lost_fields(model, {}, base, task.changes_beside(base))


def test_parts_from_the_base_itself_are_not_opened_again(tmp_path, vae, monkeypatch):
    task = build(DisentangledDiTTask, {"image_size": 16, "vae": str(vae)}, "task")
    task.id2label = {0: "cat", 1: "dog"}
    model, base = task.build_model(MODEL, None), str(tmp_path / "base")
    task.save_model(model, model.state_dict(), tmp_path / "base")
    part = load_autoencoder(base)
    assert is_part_of(base, "vae", part, str(vae))
    monkeypatch.setattr("hf_ext.tasks.diffusion_transfer.open_checkpoint", None)
    assert is_part_of(base, "vae", part, f"{base}/")
    assert is_part_of(base, "text_encoder", part, str(vae))
