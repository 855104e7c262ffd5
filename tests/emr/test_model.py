"""EMRModel: the tasks' own models, switched in place, exported; experts that transformers fuses on loading."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from diffusers import UNet2DModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, BertModel

from hf_ext import EMRModel, MRConvConfig, MRConvForSequenceClassification
from hf_ext.emr.weights import TaskWeights
from hf_ext.errors import UsageError
from hf_ext.files import TakenError
from hf_ext.hub.header_format import CheckpointError
from hf_ext.semanir import SemanIRForImageRestoration, SemanIRImageProcessor
from tests.emr.emr_testing import perturb, tiny_bert, tiny_gpt2, tiny_semanir, tiny_unet, write_code, write_weights
from tests.emr.use_testing import alone, assert_rows, copied, equal, merge, merge_berts, merge_family
from tests.kit.refusals import refused

TOKENS = torch.tensor([[2, 5, 6, 3], [2, 9, 8, 3]])


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return merge_berts(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return merge_family(tmp_path_factory.mktemp("gpt2"), tiny_gpt2)


@pytest.fixture
def emr(bert: Path) -> EMRModel:
    return EMRModel.from_pretrained(bert, "two")


def test_each_task_has_its_own_class_head_and_labels(bert: Path):
    emr = EMRModel.from_pretrained(bert)
    model = emr.model
    assert (emr.tasks, emr.current) == (["two", "five", "plain"], "two")
    assert type(model) is transformers.BertForSequenceClassification and not model.training
    assert model.config.id2label == {0: "seed1-0", 1: "seed1-1"}
    assert emr.set_task("five").model is model
    assert model.config.id2label == {index: f"seed2-{index}" for index in range(5)}
    assert model.config.label2id == transformers.AutoConfig.from_pretrained(bert.parent / "five").label2id
    assert model.num_labels == model.config.num_labels == model.classifier.out_features == 5
    assert model(TOKENS).logits.shape == (2, 5)
    assert model(TOKENS, labels=torch.tensor([0, 4])).loss.isfinite()
    # A model of another class cannot be put into this one.
    assert type(emr.set_task("plain").model) is BertModel
    assert emr(TOKENS).last_hidden_state.shape == (2, 4, 16)


def test_switching_back_and_forth_changes_no_bit(emr: EMRModel, bert: Path):
    right = {task: copied(EMRModel.from_pretrained(bert, task).model) for task in ("two", "five", "plain")}
    assert not torch.equal(right["two"]["bert.pooler.dense.weight"], right["five"]["bert.pooler.dense.weight"])
    for task in ("five", "two", "plain", "two", "five"):
        assert equal(copied(emr.set_task(task).model), right[task])
    assert emr.model.training is False
    # For a while, whatever happens then.
    with pytest.raises(ZeroDivisionError), emr.task("two") as model:
        assert emr.current == "two" and model is emr.model
        _ = 1 / 0
    assert emr.current == "five" and equal(copied(emr.model), right["five"])
    # What was changed in place stays until another task comes.
    with torch.no_grad():
        emr.model.classifier.weight.add_(1)
    emr.set_task("five")
    assert torch.equal(emr.model.classifier.weight, right["five"]["classifier.weight"] + 1)
    assert equal(copied(emr.set_task("two").set_task("five").model), right["five"])


def test_what_a_model_has(gpt2: Path):
    emr = EMRModel.from_pretrained(gpt2, "a")
    assert emr.config is emr.model.config and emr.device.type == "cpu" and emr.dtype == torch.float32
    assert not emr.model.training and emr.train().model.training and not emr.eval().model.training
    assert "task='a'" in repr(emr) and "GPT2LMHeadModel" in repr(emr) and str(emr.tasks) in repr(emr)
    emr(TOKENS, task_ids=["a", "b"])
    emr.to(torch.bfloat16)
    mixed = emr(TOKENS, task_ids=["a", "b"]).logits
    second = emr.set_task("b").model
    with torch.no_grad():
        torch.testing.assert_close(mixed[1], second(TOKENS).logits[1], atol=0.05, rtol=0)
    assert emr.dtype == torch.bfloat16
    assert equal(copied(second), copied(EMRModel.from_pretrained(gpt2, "b").model.to(torch.bfloat16)))


def test_the_artifact_is_copied_and_published(gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    emr, seen = EMRModel.from_pretrained(gpt2, "b"), []
    out = emr.save_pretrained(tmp_path / "copies" / "one")
    again = EMRModel.from_pretrained(out, "b", base=gpt2.parent / "base")
    assert equal(copied(again.model), copied(emr.model))
    with refused(TakenError, "exists"):
        emr.save_pretrained(out)
    monkeypatch.setattr("hf_ext.hub.publish.push", lambda *given, **options: seen.append((given, options)))
    emr.push_to_hub("org/name", private=True)
    assert seen == [((gpt2, "org/name"), {"private": True})]


def test_tied_weights_stay_tied(gpt2: Path):
    emr = EMRModel.from_pretrained(gpt2, "a")
    model, before, tied = emr.model, copied(emr.model), emr.model.lm_head.weight
    assert tied is model.transformer.wte.weight and emr.set_task("b").model is model
    assert model.lm_head.weight is model.transformer.wte.weight is tied
    assert not torch.equal(before["lm_head.weight"], tied)
    assert equal(copied(emr.set_task("a").model), before) and model.generation_config.eos_token_id == 3


@pytest.mark.parametrize("task", ["two", "five"])
def test_an_export_is_a_plain_checkpoint(bert: Path, task: str, tmp_path: Path):
    emr = EMRModel.from_pretrained(bert, task)
    folder = emr.export(task, tmp_path / "out")
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in folder.iterdir()} == names
    loaded, report = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()) and type(loaded) is type(emr.model)
    assert loaded.config.id2label == emr.model.config.id2label and equal(copied(loaded), copied(emr.model))
    assert AutoTokenizer.from_pretrained(folder)("a b")["input_ids"] == [4, 5]
    with refused(TakenError, "exists"):
        emr.export(task, folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_a_large_export_is_sharded(gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TaskWeights, "shard_bytes", 10_000)
    emr = EMRModel.from_pretrained(gpt2, "b")
    folder = emr.export("b", tmp_path / "out")
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
    assert equal(copied(AutoModelForCausalLM.from_pretrained(folder)), copied(emr.model))


@pytest.mark.parametrize(
    "make, load", [(tiny_unet, UNet2DModel), (tiny_semanir, SemanIRForImageRestoration)], ids=["diffusers", "ours"]
)
def test_models_of_diffusers_and_ours(make, load, tmp_path: Path):
    emr = EMRModel.from_pretrained(merge_family(tmp_path, make))
    model, first = emr.model, copied(emr.model)
    assert type(model) is load and emr.set_task("b").model is model
    loaded = load.from_pretrained(emr.export("b", tmp_path / "out"))
    assert equal(copied(loaded), copied(model)) and not equal(first, copied(model))
    assert equal(copied(emr.set_task("a").model), first)
    if load is SemanIRForImageRestoration:
        assert isinstance(SemanIRImageProcessor.from_pretrained(tmp_path / "out"), SemanIRImageProcessor)


def test_other_types(emr: EMRModel, bert: Path):
    half = EMRModel.from_pretrained(bert, "two", dtype=torch.bfloat16)
    assert {value.dtype for value in half.model.parameters()} == {torch.bfloat16}
    with pytest.raises(TypeError, match="int8"):
        emr.to(torch.int8)
    # The next model is not of that type either: `plain` is of another class.
    assert emr.set_task("plain").dtype == torch.float32
    exact = copied(emr.set_task("five").model)
    assert equal(copied(half.set_task("five").model), {name: value.bfloat16() for name, value in exact.items()})


def test_checkpoints_in_bfloat16_and_shards(tmp_path: Path):
    make = functools.partial(tiny_bert, dtype=torch.bfloat16, max_shard_size="4KB")
    emr = EMRModel.from_pretrained(merge_family(tmp_path, make, given={"max_shard_size": "4KB"}), "a")
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 1
    assert emr.model.dtype == torch.bfloat16
    loaded = AutoModelForSequenceClassification.from_pretrained(emr.export("b", tmp_path / "out"))
    assert equal(copied(loaded), copied(emr.set_task("b").model))


def test_what_is_not_there_or_not_alike_is_refused(emr: EMRModel, bert: Path, tmp_path: Path):
    base, task = (write_weights(tmp_path / name, {"weight": torch.ones(2)}) for name in ("base", "a"))
    raw = merge(base, {"a": task}, tmp_path / "merged")
    for kind, facts, call in (
        (UsageError, ("six", "two", "five"), lambda: EMRModel.from_pretrained(bert, "six")),
        (UsageError, ("../two",), lambda: emr.set_task("../two")),
        (CheckpointError, ("emr.json",), lambda: EMRModel.from_pretrained(bert.parent / "base")),
        (UsageError, ("main",), lambda: EMRModel.from_pretrained(bert, revision="main")),
        (CheckpointError, ("'a'", "config.json"), lambda: EMRModel.from_pretrained(raw)),
        (UsageError, ("BertModel",), lambda: emr(TOKENS, task_ids=["two", "plain"], return_dict=False)),
        (UsageError, ("(none)",), lambda: emr(TOKENS, task_ids=["two", "plain"])),
    ):
        with refused(kind, *facts):
            call()
    assert emr.current == "two"


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets so many restorations of weights fail, after some more that succeed."""
    restore, still = TaskWeights.restore_into, iter(())

    def restore_into(weights: TaskWeights, *given: Any) -> None:
        if next(still, False):
            raise OSError("the disk is gone")
        restore(weights, *given)

    def fail(after: int, times: int) -> None:
        nonlocal still
        still = iter([False] * (after - 1) + [True] * times)

    monkeypatch.setattr(TaskWeights, "restore_into", restore_into)
    return fail


def test_a_switch_that_fails_half_way_leaves_the_task_before(emr: EMRModel, fail: Callable[..., None]):
    model, before = emr.model, copied(emr.model)
    fail(after=7, times=1)
    with refused(OSError, "disk", "gone"):
        emr.set_task("five")
    assert emr.current == "two" and emr.model is model and model.config.num_labels == 2
    assert equal(copied(model), before)
    fail(after=7, times=1)
    with refused(OSError, "disk", "gone"), emr.task("five"):
        pytest.fail("the block of a task that is not there ran")
    assert emr.current == "two" and equal(copied(model), before)
    torch.testing.assert_close(emr(TOKENS).logits, model(TOKENS).logits)


def test_a_model_of_no_task_answers_nobody(emr: EMRModel, fail: Callable[..., None]):
    model, before = emr.model, copied(emr.model)
    # Nor can the weights of the task before be restored.
    fail(after=1, times=2)
    with refused(OSError, "disk", "gone"):
        emr.set_task("five")
    assert emr.current is None
    for call in (emr, emr.generate):
        with refused(UsageError, "set_task"):
            call(TOKENS)
    with refused(RuntimeError, "switch", "failed"):
        model(TOKENS)
    # Who names tasks is answered by a model that is made anew.
    assert emr(TOKENS, task_ids=["two"] * len(TOKENS)).logits.shape[-1] == 2
    assert emr.model is not model and equal(copied(emr.set_task("two").model), before)
    with refused(RuntimeError, "model"):
        model(TOKENS)


@pytest.mark.usefixtures("modules_cache")
def test_code_of_the_artifact_runs_only_when_it_is_trusted(tmp_path: Path):
    merged = merge_family(tmp_path, write_code)
    with refused(ValueError, "trust_remote_code"):
        EMRModel.from_pretrained(merged)
    emr = EMRModel.from_pretrained(merged, trust_remote_code=True)
    model, first = emr.model, copied(emr.model)
    assert type(model).__name__ == "OwnModel" and emr.set_task("b").model is model
    assert equal(copied(emr.set_task("a").model), first)
    # As artifacts were that an earlier version merged.
    (merged / "own_model.py").unlink()
    with refused(UsageError, "own_model.py", "emr.json"):
        EMRModel.from_pretrained(merged, trust_remote_code=True)


BYTES = torch.arange(1, 13).view(1, 12)


def tiny_mrconv(folder: Path, seed: int = 0, *, base: Path | None = None) -> Path:
    """A classifier with sparse kernels whose statistics have seen data of its own."""
    torch.manual_seed(seed)
    if base is None:
        sizes = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 2, "max_position_embeddings": 16}
        config = MRConvConfig(**sizes, kernel_type="sparse", kernel_size=4, num_labels=3)
        model = MRConvForSequenceClassification(config)
    else:
        model = MRConvForSequenceClassification.from_pretrained(base)
        perturb(model, seed, 2e-3)
    with torch.no_grad():
        model.train()(input_ids=torch.randint(0, 16, (4, 12)))
    model.save_pretrained(folder)
    return folder


def test_statistics_and_positions_are_the_tasks_own(tmp_path):
    emr = EMRModel.from_pretrained(merge_family(tmp_path, tiny_mrconv))
    for name in "ab":
        restored, own = emr.set_task(name).model.state_dict(), load_file(tmp_path / name / "model.safetensors")
        raw = [key for key in own if "running" in key or "positions" in key or "num_batches" in key]
        assert sum("running_mean" in key for key in raw) > 2 and sum("positions" in key for key in raw) == 2
        assert all(torch.equal(restored[key], own[key]) for key in raw)
        with torch.no_grad():
            found = emr.model(input_ids=BYTES).logits
            mine = MRConvForSequenceClassification.from_pretrained(tmp_path / name).eval()(input_ids=BYTES).logits
        # The statistics are of its own weights, so that a task's model is near to its fine-tune.
        torch.testing.assert_close(found, mine, atol=0.05, rtol=0)
    # Merged into one kernel afterwards, a task's model is what it was.
    emr.model.reparameterize()
    with torch.no_grad():
        torch.testing.assert_close(emr.model(input_ids=BYTES).logits, found, atol=1e-5, rtol=1e-5)


MIXTURE_SIZES = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
MIXTURE_SIZES |= {"num_key_value_heads": 1, "num_experts_per_tok": 2}
MIXTURES = {
    "Mixtral": {"intermediate_size": 24, "num_local_experts": 4},
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 12},
}
MIXED_TOKENS = torch.randint(4, 30, (4, 5), generator=torch.Generator().manual_seed(0))


def merge_mixtures(folder: Path, family: str) -> Path:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**MIXTURE_SIZES, **MIXTURES[family])
    base = getattr(transformers, f"{family}ForCausalLM")(config)
    for seed, name in enumerate(("base", "a", "b")):
        model = copy.deepcopy(base)
        perturb(model, seed, 0.1 if seed else 0.0)
        if name != "b":
            # Two experts of equal weights: which is which must not be told by what they hold.
            weights = model.model.layers[0].mlp.experts.down_proj.data
            weights[1] = weights[0]
        model.save_pretrained(folder / name)
    return merge(folder / "base", {name: folder / name for name in "ab"}, folder / "merged")


@pytest.mark.parametrize("family", MIXTURES)
def test_fused_experts_are_switched_in_place_and_take_mixed_batches(family: str, tmp_path: Path):
    merged = merge_mixtures(tmp_path, family)
    emr = EMRModel.from_pretrained(merged, "a")
    fused = [place for place in emr._built.places.values() if place.part is not None]
    assert fused, "this version of transformers fuses no experts: the test says nothing"
    model, first = emr.model, copied(emr.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    second = copied(EMRModel.from_pretrained(merged, "b").model)
    assert not equal(first, second)
    assert emr.set_task("b").model is model and equal(copied(model), second)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert equal(copied(emr.set_task("a").model), first)
    assert equal(copied(AutoModelForCausalLM.from_pretrained(emr.export("b", tmp_path / "out"))), second)
    batch = {"input_ids": MIXED_TOKENS}
    right, wrong = alone(emr, batch, "abba"), alone(emr, batch, "baab")
    with pytest.warns(UserWarning, match="fused on loading"):
        assert_rows(emr(**batch, task_ids=[*"abba"]).logits, right)
    assert not torch.allclose(right[0], wrong[0], atol=1e-2) and equal(copied(emr.model), first)


def test_what_cannot_be_switched_in_place_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hf_ext.emr.building.revert_weight_conversion", lambda *arguments: {})
    emr = EMRModel.from_pretrained(merge_mixtures(tmp_path, "Mixtral"), "a")
    model = emr.model
    with pytest.warns(UserWarning, match="MixtralForCausalLM are changed on loading.*every switch .* new `model`"):
        emr.set_task("b")
    assert emr.model is not model
    # That is told once; a warning is an error here.
    assert equal(copied(emr.set_task("a").model), copied(model))
