"""Ends that a stranger found open in MRConv: derivatives of every kind, labels, texts and files that do not fit."""

import json

import pytest
import torch
from torch.autograd import forward_ad, functional
from transformers import pipeline

from hf_ext import (
    MRConvConfig,
    MRConvForCausalLM,
    MRConvForMaskedLM,
    MRConvForSequenceClassification,
    MRConvForTokenClassification,
    MRConvNextImageProcessor,
)
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
