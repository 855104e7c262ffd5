"""Tasks that are peft adapters: refusals that say what to do, and (IA)³ merged among themselves."""

import contextlib
import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModel

from hf_ext.emr.model import EMRModel
from hf_ext.errors import DataError, UsageError
from hf_ext.files import read_json
from hf_ext.merging.plan import Plan, make_plan, plan_lines, plan_values
from hf_ext.merging.tensors import KEPT
from tests.emr.emr_testing import tiny_adapter, tiny_bert, write_weights
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


def plan_of(base: Path, adapters: str, **tasks: Path) -> Plan:
    return make_plan({"base": str(base), "tasks": {k: str(v) for k, v in tasks.items()}, "adapters": adapters})


@pytest.mark.parametrize("how, kind", [("refuse", "LORA"), ("adapter", "IA3")])
@pytest.mark.parametrize("whose", ["base", "odd"])
def test_the_configuration_of_an_adapter_beside_a_whole_model_is_refused(bert, tmp_path, how, kind, whose):
    left = tiny_bert(tmp_path / "left", 1, base=bert)
    (left / "adapter_config.json").write_text(json.dumps({"peft_type": kind, "r": 4, "lora_alpha": 8}))
    with refused(DataError, whose, "adapter_config.json"):
        plan_of(*((left, how) if whose == "base" else (bert, how)), odd=bert if whose == "base" else left)


def test_what_does_not_go_together_is_refused(bert, tmp_path):
    lora, ia3 = (tiny_adapter(tmp_path / kind, bert, 1, kind=kind) for kind in ("lora", "ia3"))
    whole = tiny_bert(tmp_path / "whole", 1, base=bert)
    for base, how, tasks, error, facts in (
        (lora, "refuse", {"task": lora}, DataError, ("adapter", "model")),
        (bert, "refuse", {"a": lora, "b": whole}, UsageError, ("'a'", "merge_and_unload()", "save_pretrained")),
        (bert, "refuse", {"a": ia3, "b": ia3}, UsageError, ("'a', 'b'", "adapters: adapter")),
        (bert, "adapter", {"a": ia3, "b": whole}, UsageError, ("'b'", "merge_and_unload()")),
        (bert, "adapter", {"a": ia3, "b": lora}, UsageError, ("'b'", "add_weighted_adapter")),
    ):
        with refused(error, *facts):
            plan_of(base, how, **tasks)


def test_loras_of_different_ranks_are_refused_with_two_ways_that_take_them(bert, tmp_path):
    loras = {"a": tiny_adapter(tmp_path / "a", bert, 1, r=2), "b": tiny_adapter(tmp_path / "b", bert, 2, r=3)}
    with refused(UsageError, "'a', 'b'", "merge_and_unload()"):
        plan_of(bert, "refuse", **loras)
    with refused(UsageError, "'a'", "add_weighted_adapter", "different ranks by combination_type='cat' or 'svd'"):
        plan_of(bert, "adapter", **loras)
    model = PeftModel.from_pretrained(AutoModel.from_pretrained(bert), loras["a"], adapter_name="a")
    model.load_adapter(loras["b"], "b")
    with pytest.raises(ValueError, match="same r"):
        model.add_weighted_adapter(["a", "b"], [1, 1], "linear", combination_type="linear")
    for kind, rank in (("cat", 5), ("svd", 3)):
        model.add_weighted_adapter(["a", "b"], [1, 1], kind, combination_type=kind)
        assert model.peft_config[kind].r == rank
    for name, folder in loras.items():
        whole = PeftModel.from_pretrained(AutoModel.from_pretrained(bert), folder).merge_and_unload()
        whole.save_pretrained(tmp_path / f"whole-{name}")
    with plan_of(bert, "refuse", a=tmp_path / "whole-a", b=tmp_path / "whole-b") as plan:
        assert len(plan.merged_rows) >= 4


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
        plan_of(base, "refuse", a=file)


INSIDE = {
    "LoRA": ("x.base_layer.w", "x.lora_A.default.weight"),
    "of another name": ("x.base_layer.w", "x.lora_A.speech.weight"),
    "whole modules": ("x.original_module.w", "x.modules_to_save.default.w"),
    "prompts": ("x.w", "prompt_encoder.default.embedding.weight"),
}


@pytest.mark.parametrize("form", INSIDE)
def test_adapters_that_lie_inside_of_weights_are_refused(tmp_path, form):
    names = [f"layer.{index}.w" for index in range(4)]
    base = write_weights(tmp_path / "base", dict.fromkeys([*names, "x.w"], torch.ones(2, 2)))
    inside = [f"base_model.model.{name}" for name in (*names, *INSIDE[form])]
    task = write_weights(tmp_path / "a", dict.fromkeys(inside, torch.ones(2, 2)))
    # a model whose own layers are built so has names of its own
    native = contextlib.nullcontext() if form == "of another name" else refused(DataError, "base", "merge_and_unload")
    for first, expected in ((base, refused(DataError, "'a'", "merge_and_unload")), (task, native)):
        with expected:
            plan_of(first, "refuse", a=task).close()


def test_adapters_are_merged_among_themselves_from_a_base_of_ones_and_restored_as_adapters(bert, tmp_path):
    tasks = {name: tiny_adapter(tmp_path / name, bert, seed, kind="ia3") for seed, name in enumerate("ab")}
    with plan_of(bert, "adapter", **tasks) as plan:
        assert len(plan.merged_rows) == 4 and not plan.copied_rows and not plan.own_tensors(KEPT)
        for part in plan.merged_rows:
            assert plan.base.read(part.name).equal(torch.ones(16, 1))
            assert part.members == {0: part.name, 1: part.name}
        assert "IA3" in "\n".join(plan_lines(plan))
        json.dumps([plan_values(plan), plan.base.identity(), plan.base.fingerprint()])
    merged = merge(bert, tasks, tmp_path / "out", adapters="adapter", rescale="none")
    stored = [load_file(path / "adapter_model.safetensors") for path in tasks.values()]
    unified = load_file(merged / "adapter_model.safetensors")
    assert read_json(merged / "adapter_config.json")["peft_type"] == "IA3"
    assert all(value.eq(1).all() for value in load_file(merged / "base" / "adapter_model.safetensors").values())
    emr = EMRModel.from_pretrained(merged, task="b")
    other, switched = emr.model, copied(emr.model)
    assert emr.set_task("a").model is other and type(other).__name__ == "PeftModel"
    model, own = emr.model.state_dict(), [f"{name}.default" for name in stored[0]]
    assert {name for name, value in model.items() if not value.equal(switched[name])} == set(own)
    exported = PeftModel.from_pretrained(AutoModel.from_pretrained(bert), emr.export("a", tmp_path / "exported"))
    assert all(exported.state_dict()[name].equal(model[name]) for name in own)
    for name, first in stored[0].items():
        vectors = torch.stack([first, stored[1][name]]) - 1
        elected = vectors.sum(0).sign()
        strongest = (vectors * elected).clamp(min=0).amax(0) * elected
        torch.testing.assert_close(unified[name], 1 + strongest, rtol=0, atol=1e-6)
        expected = 1 + torch.where(vectors[0] * elected > 0, strongest, 0)
        torch.testing.assert_close(model[name + ".default"], expected, rtol=0, atol=1e-6)
