"""MRConv layers: branches, merging, causality, padding, statistics, precision."""

import pytest
import torch
import torch.nn.functional as F

from hf_ext.mrconv import MRConvConfig, MRConvForSequenceClassification, MRConvLayer
from hf_ext.mrconv.configuration_mrconv import KERNEL_TYPES
from hf_ext.mrconv.modeling_layers_mrconv import MRConvBatchNorm, MRConvBranchNorm
from tests.kit.models import assert_same_answers, assert_same_weights
from tests.kit.refusals import refused
from tests.mrconv.mrconv_testing import EVERY_KERNEL, TOKENS, make_layer, make_model, make_signal, make_tokens
from tests.mrconv.reference_ops import batch_norm_conv, long_conv


def sum_of_branches(layer: MRConvLayer, u: torch.Tensor) -> torch.Tensor:
    """The equation by direct sums: each branch, or its kernel, is normalised, weighed by alpha and added."""
    (kernels, ahead), norm, kind, total = layer.branch_kernels(), layer.norm, layer.config.branch_norm, 0
    for index, kernel in enumerate(kernels):
        wing = None if ahead is None else ahead[index]
        branch = long_conv(u, kernel, wing)
        if kind == "kernel":
            whole = kernel if wing is None else torch.cat([kernel, wing], dim=-1)
            branch = branch / whole.norm(dim=-1)[:, None]
        elif kind in ("batch", "layer"):
            # Over channels, or by the running statistics of each.
            mean, var = branch.mean(1, keepdim=True), branch.var(1, keepdim=True, unbiased=False)
            if kind == "batch":
                mean, var = norm.running_mean[index][:, None], norm.running_var[index][:, None]
            branch = (branch - mean) / (var + 1e-5).sqrt() * norm.weight[index][:, None] + norm.bias[index][:, None]
        total = total + layer.alpha[index][:, None] * branch
    return total


LAYERS = [
    *({"kernel_type": kind, "bidirectional": both} for kind, both in EVERY_KERNEL),
    *({"branch_norm": kind, "bidirectional": both} for kind in ("kernel", "none") for both in (False, True)),
    {"branch_norm": "layer"},
]


@pytest.mark.parametrize("fields", LAYERS)
def test_a_layer_is_the_sum_of_its_normalised_branches_and_merging_keeps_it(fields):
    norm = fields.get("branch_norm", "batch")
    # Without statistics it is the same in training.
    layer, u = make_layer(**fields).double().train(norm in ("kernel", "none")), make_signal(2, 4, 37)
    output, expected = layer(u), sum_of_branches(layer, u)
    torch.testing.assert_close(output, expected, atol=1e-10, rtol=0)
    parameters = list(layer.parameters())
    found, wanted = (torch.autograd.grad(values.square().sum(), parameters) for values in (output, expected))
    torch.testing.assert_close(found, wanted, atol=1e-8, rtol=1e-8)
    if norm == "layer":
        with refused(ValueError, "branch_norm", "layer"):
            layer.reparameterize()
        return
    with torch.inference_mode():
        layer.reparameterize()
    assert not list(layer.parameters())
    # Any shorter input, with the spectra that are kept and with more of them than are.
    for length in (37, *range(1, 37, 5), 1, 37):
        changed = layer(u[..., :length])
        if not layer.config.bidirectional or length == 37:
            torch.testing.assert_close(changed, expected[..., :length], atol=1e-10, rtol=0)
        assert 1 <= len(layer.kept_kernel().spectra) <= 4
    # What was merged in inference mode passes gradients.
    layer(u.requires_grad_()).square().sum().backward()
    assert u.grad.any()


def test_a_model_of_layer_normalised_branches_is_not_changed_half_way():
    model = make_model(**TOKENS, branch_norm="layer")
    with refused(ValueError, "batch", "kernel", "none"):
        model.reparameterize()
    assert not model.config.reparameterized
    assert model(make_tokens(1, 5)).logits.isfinite().all()


@pytest.mark.parametrize("bidirectional", [False, True])
def test_training_is_that_of_n_branches_with_batch_norm(bidirectional):
    layer = make_layer(bidirectional=bidirectional).double().train()
    twin = make_layer(bidirectional=bidirectional).double().train()
    u = make_signal(3, 4, 37)
    start, stop = torch.tensor([0, 5, 0]), torch.tensor([37, 37, 20])
    kernels, ahead = twin.branch_kernels()
    inside = (torch.arange(37) >= start[:, None]) & (torch.arange(37) < stop[:, None])
    expected, mean, var, count = batch_norm_conv(
        u * inside[:, None], kernels, twin.alpha, twin.norm.weight, twin.norm.bias, 1e-5, backward_kernels=ahead,
        start=start, stop=stop,
    )  # fmt: skip
    valid = inside[:, None].expand_as(u)
    output, expected = layer(u, start, stop)[valid], expected[valid]
    torch.testing.assert_close(output, expected, atol=1e-10, rtol=0)
    gradients = torch.autograd.grad(output.square().sum(), list(layer.parameters()))
    wanted = torch.autograd.grad(expected.square().sum(), list(twin.parameters()))
    torch.testing.assert_close(gradients, wanted, atol=1e-8, rtol=1e-8)
    before, after = twin.norm, layer.norm
    torch.testing.assert_close(after.running_mean, 0.9 * before.running_mean + 0.1 * mean)
    torch.testing.assert_close(after.running_var, 0.9 * before.running_var + 0.1 * var * count / (count - 1))


@pytest.mark.parametrize("fields", [{}, {"bidirectional": True, "prenorm": False}])
def test_padding_changes_nothing_in_training(fields):
    tokens, labels = make_tokens(3, 9), torch.tensor([0, 1, 2])
    mask = torch.ones_like(tokens)
    mask[1, 6:] = 0
    runs = []
    for left, right in ((0, 0), (0, 6), (4, 0)):
        model = make_model(**TOKENS, **fields).double().train()
        padded, inside = F.pad(tokens, (left, right), value=7), F.pad(mask, (left, right))
        loss = model(padded, inside, labels=labels).loss
        loss.backward()
        gradients = {name: value.grad for name, value in model.named_parameters()}
        runs.append({"loss": loss.detach(), **gradients, **dict(model.named_buffers())})
    assert sum("running" in name for name in runs[0]) >= 8
    for other in runs[1:]:
        torch.testing.assert_close(other, runs[0], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(("reentrant", "masked"), [(False, False), (False, True), (True, False), (True, True)])
def test_statistics_are_counted_once_under_activation_checkpointing(reentrant, masked):
    tokens, labels = make_tokens(3, 20), torch.tensor([0, 1, 2])
    mask = torch.ones_like(tokens)
    mask[0, 15:] = int(not masked)
    statistics = []
    for checkpointing in (False, True):
        model = make_model().train()
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        # The recomputation must have something to differentiate.
        embeds = model.model.embedding(tokens)
        for _ in range(2):
            model(attention_mask=mask, inputs_embeds=embeds.detach().requires_grad_(), labels=labels).loss.backward()
        statistics.append(dict(model.named_buffers()))
    norms = [module for module in model.modules() if isinstance(module, (MRConvBatchNorm, MRConvBranchNorm))]
    assert len(statistics[0]) == 2 * len(norms) == 10
    for name, value in statistics[0].items():
        assert_same_answers(statistics[1][name], value, name)


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (2, 1), (2, 2), (2, 4)])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_lengths_below_the_shortest_kernel(batch, length, bidirectional):
    model = make_model(**TOKENS, bidirectional=bidirectional).double()
    tokens = make_tokens(batch, length)
    model.train()(tokens, labels=torch.arange(batch)).loss.backward()
    assert all(value.grad.isfinite().all() for value in model.parameters())
    assert all(value.isfinite().all() for value in model.buffers())
    with torch.no_grad():
        expected = model.eval()(tokens).logits
        assert expected.isfinite().all()
        torch.testing.assert_close(model.reparameterize()(tokens).logits, expected, atol=1e-10, rtol=0)


def test_statistics_and_merged_kernels_stay_precise_in_half_precision(tmp_path):
    model = make_model()
    expected = {name: value.clone() for name, value in model.named_buffers()}
    for halved in (model.bfloat16(), make_model().half()):
        assert {value.dtype for value in halved.parameters()} <= {torch.bfloat16, torch.float16}
        assert all(value.equal(expected[name]) for name, value in halved.named_buffers())
    model = make_model()
    model.save_pretrained(tmp_path)
    loaded = MRConvForSequenceClassification.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {value.dtype for value in loaded.parameters()} == {torch.bfloat16}
    assert all(value.equal(expected[name]) for name, value in loaded.named_buffers())
    with torch.no_grad():
        before = loaded(make_tokens(2, 20)).logits
        after = loaded.reparameterize()(make_tokens(2, 20)).logits
    assert {value.dtype for value in loaded.buffers()} == {torch.float32}
    assert_same_answers(after, before)
    loaded.save_pretrained(tmp_path / "merged")
    again = MRConvForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert_same_weights(again, loaded)
    assert_same_answers(again(make_tokens(2, 20)).logits, after)
    assert {value.dtype for value in again.double().buffers()} == {torch.float64}


def test_training_a_merged_model_leaves_its_convolutions_and_what_needs_branches_is_refused():
    model = make_model().reparameterize().train()
    kernels = {name: value.clone() for name, value in model.named_buffers() if "merged" in name}
    model(make_tokens(2, 20), labels=torch.tensor([0, 1])).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert all(value.equal(kernels[name]) for name, value in model.named_buffers() if name in kernels)
    for facts, call in (
        (["merged", "model"], model.kernel_parameters),
        (["change_rate"], lambda: model.change_rate(2)),
        (["branches"], model.convolutions()[0].branch_kernels),
    ):
        with refused(ValueError, *facts):
            call()


@pytest.mark.parametrize("kernel_type", KERNEL_TYPES)
def test_kernel_parameters_are_those_that_make_kernels(kernel_type):
    model = make_model(**TOKENS, kernel_type=kernel_type, bidirectional=True)
    names = model.kernel_parameters()
    assert set(names) == {name for name, _ in model.named_parameters() if "kernel" in name}
    assert len(names) == len(set(names)) == 4 * (4 if kernel_type == "fourier_sparse" else 1)


def test_the_first_variance_of_a_layer_is_one_about():
    torch.manual_seed(0)
    for bidirectional in (False, True):
        config = MRConvConfig(hidden_size=32, max_position_embeddings=512, bidirectional=bidirectional)
        output = MRConvLayer(config)(torch.randn(8, 32, 512))
        assert 0.7 < output.std() < 1.3
