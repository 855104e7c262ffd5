"""Models of a merge that a user changed, copied, or loads in a way that does not fit."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from hf_ext import EMRModel
from hf_ext.emr.weights import TaskWeights
from hf_ext.errors import DataError, UsageError
from tests.emr.emr_testing import tiny_bert, tiny_gpt2, write_weights
from tests.emr.use_testing import copied, equal, merge, merge_berts, merge_family
from tests.kit.refusals import refused

TOKENS = torch.tensor([[2, 5, 6, 3], [2, 9, 8, 3]])
MODES = ("global", "official", "tensor", "l2", "none", "tensor_l2", None)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return merge_family(tmp_path_factory.mktemp("gpt2"), tiny_gpt2, "abc")


@pytest.fixture(scope="module")
def berts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks of one network, but for the third, which has another dropout."""
    kinds = {"two": {}, "five": {"num_labels": 5}, "drop": {"hidden_dropout_prob": 0.3}}
    return merge_berts(tmp_path_factory.mktemp("berts"), **kinds)


@pytest.mark.parametrize("method", ["onebit", "ternary"])
@pytest.mark.parametrize("mode", MODES)
def test_signs_of_differences_have_one_way_to_be_scaled(tmp_path: Path, method: str, mode: str | None):
    out = merge_family(tmp_path, tiny_gpt2, given={"method": method})
    if mode in (None, "tensor_l2"):
        name = "transformer.h.0.attn.c_attn.weight"
        assert torch.equal(TaskWeights(out, rescale=mode).restore("a", name), TaskWeights(out).restore("a", name))
        return
    with refused(UsageError, repr(mode), "scale"):
        TaskWeights(out, rescale=mode)


def _adapt(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))


def _drop_layer(model: Any) -> None:
    model.transformer.h = model.transformer.h[:1]


def _lay_bare(model: Any) -> None:
    model.transformer.ln_f = torch.nn.Identity()


def _norm(model: Any) -> None:
    torch.nn.utils.parametrizations.weight_norm(model.transformer.h[0].mlp.c_fc)


CHANGES: dict[str, Any] = {
    "an adapter": _adapt,
    "a layer less": _drop_layer,
    "another module": _lay_bare,
    "weight norm": _norm,
    "more tokens": lambda model: model.resize_token_embeddings(40),
    "fewer tokens": lambda model: model.resize_token_embeddings(20),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_whose_modules_changed_takes_no_other_task_and_stays(gpt2: Path, change: str):
    emr = EMRModel.from_pretrained(gpt2, "a")
    changed = CHANGES[change](emr.model) if change == "an adapter" else CHANGES[change](emr.model) and None
    model = changed or emr.model
    before, output = copied(model), model(TOKENS).logits
    mixed = {"input_ids": TOKENS, "task_ids": ["a", "b"]}
    for act in (lambda: emr.set_task("b"), lambda: emr.task("b").__enter__(), lambda: emr(**mixed)):
        with refused(UsageError, "changed", "."):
            act()
        assert emr.current == "a" and equal(copied(model), before) and torch.equal(model(TOKENS).logits, output)


def test_what_was_set_of_a_model_stays_set(berts: Path):
    def state(model: Any) -> tuple[Any, ...]:
        trained = [name for name, part in model.named_parameters() if part.requires_grad]
        return model.training, model.bert.pooler.training, trained, model.config._attn_implementation

    emr = EMRModel.from_pretrained(berts, "two")
    first = state(emr.model)
    for task in ("drop", "five", "two"):
        assert state(emr.set_task(task).model) == first
    emr.train()
    emr.model.bert.requires_grad_(False).pooler.eval()
    emr.model.set_attn_implementation("eager")
    expected = state(emr.model)
    assert expected == (True, False, ["classifier.weight", "classifier.bias"], "eager") != first
    for task in ("drop", "five", "drop", "two"):
        assert state(emr.set_task(task).model) == expected
    emr.model.dropout.p = emr.model.bert.embeddings.dropout.p = 0.42
    emr.set_task("five")
    assert emr.model.dropout.p == emr.model.bert.embeddings.dropout.p == 0.42
    assert emr.model.num_labels == emr.model.classifier.out_features == 5
    # a head of another width gives way to that of the next task
    emr.model.classifier = torch.nn.Linear(emr.model.classifier.in_features, 7)
    emr.set_task("two").set_task("five").set_task("two")
    assert emr.model.num_labels == emr.model.classifier.out_features == len(emr.model.classifier.weight) == 2


@pytest.mark.parametrize("error", [ValueError, ImportError])
def test_attention_that_another_class_lacks_is_told(berts: Path, error: type[Exception], monkeypatch: Any):
    emr = EMRModel.from_pretrained(berts, "two")
    emr.model.set_attn_implementation("eager")

    def lack(model: Any, name: str) -> None:
        raise error("no such attention")

    monkeypatch.setattr(type(emr.model), "set_attn_implementation", lack)
    with pytest.warns(UserWarning, match="keeps its own attention, 'sdpa', not 'eager': no such"):
        emr.set_task("drop")
    assert emr.current == "drop"


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_maps_files_is_not_copied(gpt2: Path, act: Any):
    emr = EMRModel.from_pretrained(gpt2, "a")
    for thing in (emr, emr.weights):
        with refused(UsageError, type(thing).__name__, "again"):
            act(thing)
    assert equal(copied(copy.deepcopy(emr.model)), copied(emr.model))


@pytest.mark.parametrize("act", ["build", "switch", "width", "class", "to"])
def test_what_was_made_in_inference_mode_can_be_trained(berts: Path, act: str):
    task = "two" if act == "build" else "five"
    emr = None if act == "build" else EMRModel.from_pretrained(berts, {"width": "two", "class": "drop"}.get(act, task))
    with torch.inference_mode():
        emr = emr or EMRModel.from_pretrained(berts, "two")
        emr.to(torch.float64) if act == "to" else emr.set_task(task)
    emr.set_task("two").set_task("five").train()
    emr(TOKENS, labels=torch.tensor([0, 1])).loss.backward()
    assert all(part.grad is not None for part in emr.model.parameters())


# The tensor of a task that has a value beyond float16.
LARGE = {"merged": "bert.encoder.layer.0.output.dense.weight", "its own": "classifier.weight", "none": None}


@pytest.mark.parametrize("kind", LARGE)
@pytest.mark.parametrize("act", ["load", "switch", "to"])
def test_no_weight_becomes_infinite_in_float16(tmp_path: Path, kind: str, act: str):
    folders = {name: tiny_bert(tmp_path / name, 1, base=tiny_bert(tmp_path / "base")) for name in "ab"}
    tensors, name = load_file(folders["a"] / "model.safetensors"), LARGE[kind]
    # b votes against a
    for task, value in (("a", 7e4), ("b", -1.0)) if name else ():
        tensors[name].view(-1)[0] = value
        write_weights(folders[task], tensors)
    out = merge(tmp_path / "base", folders, tmp_path / "out", exclude=["classifier"], rescale="none")
    emr = EMRModel.from_pretrained(out, "a" if act == "to" else "b", dtype=None if act == "to" else torch.float16)
    acts = {
        "load": lambda: EMRModel.from_pretrained(out, "a", dtype=torch.float16),
        "switch": lambda: emr.set_task("a"),
        "to": lambda: emr.to(torch.float16),
    }
    if name is None:
        assert acts[act]().dtype == torch.float16
        return
    with refused(DataError, repr(name), "float16"):
        acts[act]()
    assert all(part.isfinite().all() for part in emr.model.parameters())
    assert (emr.current, emr.dtype) == (("a", torch.float32) if act == "to" else ("b", torch.float16))
