"""Models whose weights transformers changes on loading: experts that it fuses are switched where they are."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

from hf_ext.emr import EMRModel, building
from tests.emr.emr_testing import perturb
from tests.emr.use_testing import copied, equal, merge

SIZES = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "num_experts_per_tok": 2}
MIXTRAL = MixtralConfig(**SIZES, intermediate_size=24, num_local_experts=4)
QWEN = Qwen2MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=8, shared_expert_intermediate_size=12)
FAMILIES = {"mixtral": (MixtralForCausalLM, MIXTRAL), "qwen2-moe": (Qwen2MoeForCausalLM, QWEN)}
TOKENS = torch.randint(4, 30, (4, 5), generator=torch.Generator().manual_seed(0))


def make_merge(folder: Path, model_class: Any, config: Any) -> Path:
    torch.manual_seed(0)
    base = model_class(copy.deepcopy(config))
    with torch.no_grad():
        # Two experts of equal weights: which is which must not be told by what they hold.
        experts = base.model.layers[0].mlp.experts
        experts.down_proj[1] = experts.down_proj[0]
    base.save_pretrained(folder / "base")
    for seed, name in enumerate("ab", 1):
        model = copy.deepcopy(base)
        perturb(model, seed, 0.1)
        if name == "a":
            with torch.no_grad():
                model.model.layers[0].mlp.experts.down_proj[1] = model.model.layers[0].mlp.experts.down_proj[0]
        model.save_pretrained(folder / name)
    return merge(folder / "base", {name: folder / name for name in "ab"}, folder / "merged")


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_experts_are_switched_in_place(family: str, tmp_path: Path):
    merged = make_merge(tmp_path, *FAMILIES[family])
    emr = EMRModel.from_pretrained(merged, "a")
    fused = [place for place in emr._built.places.values() if place.part is not None]
    assert fused, "this version of transformers fuses no experts: the test says nothing"
    model, first = emr.model, copied(emr.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    second = copied(EMRModel.from_pretrained(merged, "b").model)
    assert not equal(first, second)
    assert emr.set_task("b").model is model
    assert equal(copied(model), second)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert equal(copied(emr.set_task("a").model), first)
    loaded = FAMILIES[family][0].from_pretrained(emr.export("b", tmp_path / "out"))
    assert equal(copied(loaded), second)


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_experts_in_a_mixed_batch(family: str, tmp_path: Path):
    emr = EMRModel.from_pretrained(make_merge(tmp_path, *FAMILIES[family]), "a")
    before, alone = copied(emr.model), {}
    for task in "ab":
        with emr.task(task) as model, torch.no_grad():
            alone[task] = model(input_ids=TOKENS).logits
    with pytest.warns(UserWarning, match="fused on loading"):
        mixed = emr(input_ids=TOKENS, task_ids=["a", "b", "b", "a"]).logits
    for row, task in enumerate("abba"):
        torch.testing.assert_close(mixed[row], alone[task][row], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(alone["a"], alone["b"], atol=1e-2)
    assert equal(copied(emr.model), before)


def test_what_cannot_be_switched_in_place_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("transformers.core_model_loading.revert_weight_conversion", lambda *arguments: {})
    emr = EMRModel.from_pretrained(make_merge(tmp_path, *FAMILIES["mixtral"]), "a")
    model = emr.model
    with pytest.warns(UserWarning, match="MixtralForCausalLM are changed on loading.*every switch .* new `model`"):
        emr.set_task("b")
    assert emr.model is not model
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        emr.set_task("a")
    assert equal(copied(emr.model), copied(model))


def test_a_conversion_that_moves_values_has_no_place():
    numbers = torch.arange(24)
    view = numbers.view(4, 6)
    assert building.find_even_spacing(view[:, 1:3], numbers) == ((4, 2), (6, 1), 1)
    assert building.find_even_spacing(view[2].clone(), numbers) == ((6,), (1,), 12)
    assert building.find_even_spacing(view.T.contiguous(), numbers) == ((6, 4), (1, 6), 0)
    assert building.find_even_spacing(view[torch.tensor([0, 1, 3])], numbers) is None
    assert building.find_even_spacing(view.flip(1), numbers) is None
    assert building.find_even_spacing(view + 3, numbers) is None
