"""Ends that a stranger found open in MRConv: derivatives of every kind, labels, texts and files that do not fit."""

import json

import datasets
import peft
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch.autograd import forward_ad, functional
from transformers import Trainer, TrainingArguments, pipeline
from transformers.trainer_pt_utils import LabelSmoother

from hf_ext import (
    MRConvConfig,
    MRConvForAudioClassification,
    MRConvForCausalLM,
    MRConvForImageClassification,
    MRConvForMaskedLM,
    MRConvForRetrieval,
    MRConvForSequenceClassification,
    MRConvForTokenClassification,
    MRConvModel,
    MRConvNextImageProcessor,
)
from tests.kit.refusals import refused
from tests.mrconv.mrconv_testing import make_image_model, make_model, operators_in

functorch = torch.func
SMALL = {"hidden_size": 4, "num_hidden_layers": 2, "max_position_embeddings": 16, "kernel_size": 4}


def in_forward_mode(answer, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(answer(forward_ad.make_dual(x, x.cos()))).tangent


def batched(answer, x):
    x = x.clone().requires_grad_()
    y = answer(x)
    return torch.vmap(lambda v: torch.autograd.grad(y, x, v, retain_graph=True)[0])(
        torch.eye(y.numel()).to(y).unflatten(1, y.shape)
    )


def of_weights(model, x):
    weights = dict(model.named_parameters())

    def loss(given):
        return functorch.functional_call(model, given, args=(), kwargs={"input_values": x}).logits.sin()

    return functorch.jvp(loss, (weights,), ({name: one.detach().cos() for name, one in weights.items()},))[1]


def penalty(model, x):
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(input_values=x).logits.sin().sum(), x, create_graph=True)
    model.zero_grad()
    slope.square().sum().backward()
    return torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])


# The answer of a model to an input, `a`, and the derivatives that a caller may ask for.
DERIVATIVES = {
    "grad": lambda a, m, x: functorch.grad(lambda one: a(one).sum())(x),
    "each sample": lambda a, m, x: functorch.vmap(functorch.grad(lambda one: a(one[None]).sum()))(x),
    "jacrev": lambda a, m, x: functorch.jacrev(a)(x),
    "jacfwd": lambda a, m, x: functorch.jacfwd(a)(x),
    "hessian": lambda a, m, x: functorch.hessian(lambda one: a(one).sum())(x),
    "jvp of weights": lambda a, m, x: of_weights(m, x),
    "forward mode": lambda a, m, x: in_forward_mode(a, x),
    "functional.jvp": lambda a, m, x: functional.jvp(a, x, x.cos())[1],
    "functional.hvp": lambda a, m, x: functional.hvp(lambda one: a(one).sum(), x, x.cos())[1],
    "batched gradients": lambda a, m, x: batched(a, x),
    "penalty": lambda a, m, x: penalty(m, x),
}


# What torch says of itself.
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:There is a performance drop")
@pytest.mark.parametrize("way", DERIVATIVES)
def test_every_derivative_is_that_of_the_plain_forms(way):
    model = make_model(MRConvForSequenceClassification, **SMALL, num_labels=3).double().eval()
    x = torch.randn(2, 9, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = []
    for _merged in (False, True):
        for form in ("plain", "fast"):
            with operators_in(form):
                found.append(DERIVATIVES[way](lambda one: model(input_values=one).logits.sin(), model, x))
        torch.testing.assert_close(*found[-2:], rtol=1e-9, atol=1e-12)
        assert found[-1].abs().max() > 1e-9
        model.reparameterize()


POSITIONS = {
    MRConvForCausalLM: {"vocab_size": 9},
    MRConvForMaskedLM: {"vocab_size": 9, "bidirectional": True},
    MRConvForTokenClassification: {"vocab_size": 9, "num_labels": 3},
}
TOKENS = torch.arange(10).view(2, 5) % 3
LABELS = {"flat": TOKENS.flatten(), "turned": TOKENS.mT, "cut": TOKENS[:, :-1], "values": TOKENS.double()}


@pytest.mark.parametrize("wrong", LABELS)
@pytest.mark.parametrize("head", POSITIONS)
def test_labels_of_positions_fit_the_positions(head, wrong):
    model = make_model(head, **SMALL, **POSITIONS[head])
    wanted = model(TOKENS, labels=TOKENS).loss
    assert torch.equal(wanted, model(TOKENS, labels=TOKENS.int()).loss)
    with pytest.raises(ValueError, match=r"expected \(2, 5\) and whole numbers"):
        model(TOKENS, labels=LABELS[wrong])


def test_a_configuration_names_the_code_that_its_folder_has(tmp_path):
    classifier = make_model(MRConvForSequenceClassification, **SMALL, num_labels=3)
    classifier.save_pretrained(tmp_path)
    named = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert "AutoModelForCausalLM" not in named
    loaded = MRConvConfig.from_pretrained(tmp_path)
    assert loaded.auto_map == named
    # Of a folder of the Hub: written again, it names its own files.
    assert MRConvConfig(auto_map={"AutoModel": "org/name--code.Model"}).auto_map == {"AutoModel": "code.Model"}


def test_a_pipeline_of_pictures_asks_for_no_code_beside_the_weights(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("builtins.input", asked.append)
    make_image_model().save_pretrained(tmp_path)
    MRConvNextImageProcessor(size={"shortest_edge": 16}).save_pretrained(tmp_path)
    assert pipeline("image-classification", str(tmp_path)).image_processor is not None
    assert not asked


def make_trainer(model, folder, data, **options):
    return Trainer(model, TrainingArguments(str(folder), report_to=[], use_cpu=True, **options), eval_dataset=data)


ROWS = {"labels": torch.tensor([0, 1])}
PLACES = {"position_ids": torch.tensor([[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]])}
# No label where a sequence begins, as `DataCollatorWithFlattening` has it: Trainer counts the labels.
PACKED = {"input_ids": TOKENS, "labels": TOKENS.masked_fill(PLACES["position_ids"] == 0, -100), **PLACES}
VALUES = {"input_values": TOKENS + 2.5, "observed_mask": (torch.arange(10).view(2, 5) % 4 > 0).long()}
PADDED = {"attention_mask": torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])}
COLUMNS = {
    MRConvForCausalLM: PACKED,
    MRConvForMaskedLM: PACKED,
    MRConvForTokenClassification: {**VALUES, **PLACES, "labels": PACKED["labels"].clamp_max(1)},
    MRConvForSequenceClassification: {**VALUES, **PADDED, **ROWS},
    MRConvForAudioClassification: {**VALUES, **PADDED, **ROWS},
    MRConvForImageClassification: {**VALUES, **PADDED, **ROWS},
}


@pytest.mark.parametrize("head", COLUMNS)
def test_trainer_keeps_each_column_that_a_head_takes(head, tmp_path):
    fields = {**SMALL, "num_labels": 2, "bidirectional": head is MRConvForMaskedLM}
    inputs = COLUMNS[head]
    model = make_model(head, **fields, **({"vocab_size": 9} if "input_ids" in inputs else {}))
    data = datasets.Dataset.from_dict({name: values.tolist() for name, values in inputs.items()})
    wanted = model(**inputs).loss.item()
    for name in inputs.keys() - {"labels", "input_ids", "input_values"}:
        assert abs(wanted - model(**{**inputs, name: None}).loss.item()) > 1e-5
    assert make_trainer(model, tmp_path, data).evaluate()["eval_loss"] == pytest.approx(wanted, rel=1e-5)


def test_trainer_smooths_labels_of_next_tokens(tmp_path):
    model = make_model(MRConvForCausalLM, **SMALL, vocab_size=9)
    trainer = make_trainer(model, tmp_path, None, label_smoothing_factor=0.1)
    wanted = LabelSmoother(0.1)({"logits": model(TOKENS).logits}, TOKENS, shift_labels=True)
    torch.testing.assert_close(trainer.compute_loss(model, {"input_ids": TOKENS, "labels": TOKENS}), wanted)


class Added(torch.nn.Module):
    """What an adapter adds, as a value that is no parameter of the layer."""

    def __init__(self, value):
        super().__init__()
        self.value = [value]

    def forward(self, weight):
        return weight + self.value[0]


@pytest.mark.parametrize("norm", ["batch", "layer", "kernel", "none"])
@pytest.mark.parametrize("training", [True, False])
def test_an_adapter_on_alpha_is_trained(norm, training):
    model = make_model(MRConvForCausalLM, **SMALL, vocab_size=9, branch_norm=norm).requires_grad_(False)
    values = [torch.zeros_like(layer.alpha, requires_grad=True) for layer in model.convolutions()]
    for layer, value in zip(model.convolutions(), values, strict=True):
        torch.nn.utils.parametrize.register_parametrization(layer, "alpha", Added(value))
    model.train(training)(TOKENS, labels=TOKENS).loss.backward()
    assert all(value.grad.abs().sum() > 0 for value in values)
    if not training and norm != "layer":
        with pytest.raises(RuntimeError, match="no gradient"):
            model(TOKENS, use_cache=True).logits.sum().backward()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_lora_trains_alpha():
    lora = peft.LoraConfig(target_modules=[], target_parameters=["convolution.alpha"], init_lora_weights=False)
    model = peft.get_peft_model(make_model(MRConvForCausalLM, **SMALL, vocab_size=9), lora).train()
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    grads = [value.grad for value in model.parameters() if value.requires_grad]
    assert grads and all(grad is not None and grad.abs().sum() > 0 for grad in grads)


TEXTS = {**POSITIONS, MRConvForSequenceClassification: {"vocab_size": 9}, MRConvModel: {"vocab_size": 9}}


@pytest.mark.parametrize("head", [*TEXTS, MRConvForRetrieval])
def test_segments_of_one_text_alone_are_taken(head):
    model = make_model(head, **SMALL, **TEXTS.get(head, {"vocab_size": 9}))
    inputs = {"input_ids": TOKENS} | ({"input_ids_2": TOKENS} if head is MRConvForRetrieval else {})
    zeros = torch.zeros_like(TOKENS)
    assert torch.equal(model(**inputs, token_type_ids=zeros)[0], model(**inputs)[0])
    with refused(ValueError, "token_type_ids", "MRConvForRetrieval"):
        model(**inputs, token_type_ids=zeros + torch.arange(5) // 3)


def test_fields_given_at_loading_are_checked_in_the_place_of_those_of_the_file(tmp_path):
    units = {"target_mean": [2.0], "target_std": [3.0]}
    make_model(MRConvForSequenceClassification, **SMALL, num_labels=1, **units).save_pretrained(tmp_path)
    for others in ({"target_mean": None, "target_std": None}, {"target_mean": [0.0] * 4, "target_std": [1.0] * 4}):
        options = {"num_labels": 4, "ignore_mismatched_sizes": True, **others}
        loaded = MRConvForSequenceClassification.from_pretrained(tmp_path, **options)
        assert loaded(input_values=torch.ones(2, 9)).logits.shape == (2, 4)
        assert (loaded.config.target_mean, loaded.config.num_labels) == (others["target_mean"], 4)
    for wrong in ({"num_labels": 4}, {"target_mean": [1.0, 2.0]}, {"target_std": None}, {"norm": "group"}):
        with pytest.raises(StrictDataclassError):
            MRConvConfig.from_pretrained(tmp_path, **wrong)


TRACED = {head: {"input_ids": TOKENS, **PADDED} for head in TEXTS}
TRACED |= {MRConvForAudioClassification: {"input_values": TOKENS + 2.5, **PADDED}}
TRACED |= {MRConvForRetrieval: {"input_ids": TOKENS, "input_ids_2": TOKENS}}


class Answer(torch.nn.Module):
    """The first output of a model, to inputs by their order."""

    def __init__(self, model, names):
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *values):
        return self.model(**dict(zip(self.names, values, strict=True)))[0]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("head", TRACED)
def test_models_are_traced_for_any_length_and_padding(head, merged):
    inputs = TRACED[head]
    model = make_model(head, **SMALL, **TEXTS.get(head, {"vocab_size": 9 if "input_ids" in inputs else None}))
    model = model.reparameterize() if merged else model
    answer, whole = Answer(model, list(inputs)), {**inputs, **dict.fromkeys(inputs.keys() & PADDED, torch.ones(2, 5))}
    with torch.no_grad():
        traced = torch.jit.trace(answer, tuple(whole.values()), check_trace=False)
        for longer in (inputs, {name: torch.cat([value, value.flip(1)], 1) for name, value in whole.items()}):
            torch.testing.assert_close(traced(*longer.values()), answer(*longer.values()))
