"""An EMRModel is used like a model: eval, to, configuration, saving, publishing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GPT2LMHeadModel

from hf_ext.emr import EMRModel
from hf_ext.files import TakenError
from tests.emr.test_mixed import GPT2, SAME, make_family
from tests.emr.use_testing import copied, equal
from tests.kit.refusals import refused

TASKS = ["a", "b", "b", "c"]
PROMPTS = torch.randint(4, 30, (4, 3), generator=torch.Generator().manual_seed(0))


def test_what_a_model_has(tmp_path: Path):
    emr = make_family(tmp_path, GPT2LMHeadModel, GPT2, SAME)
    assert emr.config is emr.model.config and emr.device.type == "cpu" and emr.dtype == torch.float32
    assert not emr.model.training and emr.train().model.training and not emr.eval().model.training
    assert torch.equal(emr.forward(PROMPTS).logits, emr(PROMPTS).logits)
    assert "task='a'" in repr(emr) and "GPT2LMHeadModel" in repr(emr) and str(emr.tasks) in repr(emr)
    emr.to(torch.bfloat16)
    second = emr.set_task("b").model
    assert emr.dtype == torch.bfloat16
    plain = EMRModel.from_pretrained(emr.weights.folder, "b").model.to(torch.bfloat16)
    assert equal(copied(second), copied(plain))
    mixed = emr(input_ids=PROMPTS, task_ids=TASKS).logits
    with emr.task("c") as model, torch.no_grad():
        torch.testing.assert_close(mixed[3:], model(PROMPTS[3:]).logits, atol=0.05, rtol=0)


def test_options_of_from_pretrained(tmp_path: Path):
    folder = make_family(tmp_path, GPT2LMHeadModel, GPT2, SAME).weights.folder
    assert EMRModel.from_pretrained(folder, attn_implementation="eager").config._attn_implementation == "eager"
    for option, message in (("device_map", "pass device"), ("quantization_config", "quantise"), ("else", "takes no")):
        with pytest.raises(TypeError, match=message):
            EMRModel.from_pretrained(folder, **{option: "auto"})


def test_the_artifact_is_copied(tmp_path: Path):
    emr = make_family(tmp_path, GPT2LMHeadModel, GPT2, SAME)
    out = emr.save_pretrained(tmp_path / "copies" / "one")
    again = EMRModel.from_pretrained(out, "b")
    assert equal(copied(again.model), copied(emr.set_task("b").model))
    with refused(TakenError, "exists"):
        emr.save_pretrained(out)


def test_publishing_goes_through_the_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    emr, seen = make_family(tmp_path, GPT2LMHeadModel, GPT2, SAME), []
    monkeypatch.setattr("hf_ext.hub.publish.push", lambda *given, **options: seen.append((given, options)))
    emr.push_to_hub("org/name", private=True)
    assert seen == [((emr.weights.folder, "org/name"), {"private": True})]
