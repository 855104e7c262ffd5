"""MRConv layers and models: branches, merging, padding, statistics; inputs, losses, training, change of rate."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hf_ext import mrconv
from hf_ext.mrconv import MRConvConfig, MRConvForAudioClassification, MRConvForRetrieval, MRConvLayer, MRConvModel
from hf_ext.mrconv.configuration_mrconv import KERNEL_TYPES
from hf_ext.mrconv.modeling_layers_mrconv import MRConvBatchNorm, MRConvBranchNorm
from tests.kit.models import LoraTesterMixin, TrainerTesterMixin, assert_same_answers, assert_same_weights
from tests.kit.refusals import refused
from tests.mrconv import mrconv_testing
from tests.mrconv.mrconv_testing import SIZES, TOKENS, MRConvTester, make_mask, make_model, make_signal, make_tokens
from tests.mrconv.reference_ops import batch_norm_conv, long_conv


class TestTokens(MRConvTester, TrainerTesterMixin, LoraTesterMixin):
    model_class = mrconv.MRConvForSequenceClassification
    fields = {**TOKENS, "kernel_type": "fourier_sparse", "hidden_size": 8}
    lora_targets = ["pointwise", "classifier"]

    def make_inputs(self):
        labels = torch.tensor([0, 1, 2, 1])
        return {"input_ids": make_tokens(4, 20), "attention_mask": make_mask(), "labels": labels}


class TestAudio(MRConvTester, TrainerTesterMixin):
    model_class = MRConvForAudioClassification
    fields = {**SIZES, "hidden_size": 8, "kernel_type": "fourier_sparse", "bidirectional": True, "prenorm": False}

    def make_inputs(self):
        labels = torch.tensor([0, 1, 2, 1])
        time = torch.arange(30) / 30
        waves = torch.sin(6.28 * (1 + labels[:, None]) * time) + 0.1 * make_signal(4, 30, dtype=torch.float32)
        return {"input_values": waves, "labels": labels}


class TestRetrieval(MRConvTester):
    model_class = MRConvForRetrieval
    fields = {**TOKENS, "hidden_size": 8, "kernel_type": "dilated", "norm": "layer", "num_labels": 2}

    def make_inputs(self):
        second = {"input_ids_2": make_tokens(4, 20, seed=1), "attention_mask_2": make_mask()}
        return {"input_ids": make_tokens(4, 20), **second, "labels": torch.tensor([0, 1, 1, 0])}


RATES = {**SIZES, "kernel_size": 8, "max_position_embeddings": 64, "sampling_rate": 16000}


@pytest.mark.parametrize("kernel_type", KERNEL_TYPES)
def test_a_model_moves_to_half_the_rate_and_is_saved_so(kernel_type, tmp_path):
    fields = {**RATES, "kernel_type": kernel_type, "num_modes": 3, "bidirectional": True}
    model = make_model(MRConvForAudioClassification, **fields)
    wave = torch.sin(6.28 * 2 * (torch.arange(128) / 128))[None]
    expected = model(wave[:, :64]).logits
    assert model.change_rate(np.float32(2)) is model
    assert (model.config.rate_factor, model.config.sampling_rate, model.config.longest_input) == (2.0, 8000, 32)
    changed = model(wave[:, :64:2]).logits
    if kernel_type == "fourier":
        # Zero-shot: what a slow wave gives stays nearly the same. Without a change of the kernels it does not.
        unchanged = make_model(MRConvForAudioClassification, **fields)(wave[:, :64:2]).logits
        assert (changed - expected).norm() < 0.5 * (unchanged - expected).norm()
    assert any("positions" in name for name in model.state_dict()) is ("sparse" in kernel_type)
    twin = copy.deepcopy(model).reparameterize()
    for saved in (model, twin):
        saved.save_pretrained(tmp_path)
        loaded, report = MRConvForAudioClassification.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(report.values()), report
        assert loaded.config.reparameterized is (saved is twin)
        assert_same_weights(loaded, saved)
        assert_same_answers(loaded(wave[:, :64:2]).logits, saved(wave[:, :64:2]).logits)
        torch.testing.assert_close(loaded(wave[:, :64:2]).logits, changed, atol=1e-5, rtol=1e-5)
    model.change_rate(0.5)
    assert (model.config.rate_factor, model.config.sampling_rate) == (1.0, 16000)
    assert_same_answers(model(wave[:, :64]).logits, expected)


def test_a_change_of_rate_that_cannot_be_is_refused():
    for rate, factor, words in (
        *((16000, factor, f"`factor` is {factor}") for factor in (0, float("inf"), "2", None)),
        *((16000, factor, "must divide the length of every kernel") for factor in (3, 16)),
        (11025, 2, "11025 Hz would become 5512.5"),
    ):
        model = make_model(MRConvForAudioClassification, **{**RATES, "sampling_rate": rate})
        before = model.config.to_dict()
        with refused(ValueError, words):
            model.change_rate(factor)
        assert model.config.to_dict() == before


def test_dropout_drops_whole_channels_where_it_is_tied():
    for tied in (True, False):
        model = make_model(MRConvModel, **{**TOKENS, "hidden_size": 64}, dropout=0.5, tied_dropout=tied).train()
        seen = []
        model.layers[0].pointwise.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(*given))
        model(make_tokens(2, 20))
        dropped = seen[0] == 0
        assert 0.3 < dropped.float().mean() < 0.7
        assert bool((dropped == dropped[:, :1]).all()) is tied


def test_blocks_are_normalised_before_or_after():
    tokens = make_tokens(4, 30)
    torch.manual_seed(0)
    after, before = (MRConvModel(MRConvConfig(**TOKENS, prenorm=prenorm)).train() for prenorm in (False, True))
    _, *states = after(tokens, output_hidden_states=True).hidden_states
    assert len(states) == 2 and after.final_norm is None
    outputs = before(tokens, output_hidden_states=True)
    for state in (*states, outputs.last_hidden_state):
        torch.testing.assert_close(state.std((0, 1), unbiased=False), torch.ones(4), atol=1e-2, rtol=0)
    assert torch.equal(outputs.hidden_states[0], before.embedding(tokens))


def test_inputs_that_mean_the_same_give_the_same():
    model = make_model()
    tokens = make_tokens(2, 9)
    assert_same_answers(model(inputs_embeds=model.model.embedding(tokens)).logits, model(tokens).logits)
    audio = make_model(MRConvForAudioClassification, **SIZES)
    wave = make_signal(2, 20, dtype=torch.float32)
    assert_same_answers(audio(wave[..., None]).logits, audio(wave).logits)
    assert_same_answers(audio.double()(wave.double()).logits, audio(wave).logits)


def test_documents_of_different_lengths_are_compared():
    model = make_model(MRConvForRetrieval, **TOKENS).double()
    first, second = make_tokens(2, 9), make_tokens(2, 20, seed=1)
    a, b = (model.model(document).last_hidden_state.mean(1) for document in (first, second))
    expected = model.classifier(torch.relu(model.comparison(torch.cat([a, b, a - b, a * b], dim=-1))))
    torch.testing.assert_close(model(first, input_ids_2=second).logits, expected, atol=1e-10, rtol=0)


IDS = {"input_ids": make_tokens(2, 4)}
HOLES = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1]])
NOTHING = torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1]])
PAIR = {**IDS, "input_ids_2": make_tokens(2, 4)}
WRONG = [
    ({}, "Got 0 inputs"),
    ({**IDS, "inputs_embeds": torch.rand(2, 4, 4)}, "Got 2 inputs"),
    ({"input_ids": make_tokens(2, 0)}, "without a position"),
    ({"input_ids": make_tokens(2, 38)}, "has 38 positions; the model takes at most 37"),
    ({"input_ids": make_tokens(4)}, "shape (4,)"),
    ({"input_values": torch.rand(2, 4, 1)}, "`vocab_size` is 11"),
    ({"inputs_embeds": torch.rand(2, 4, 5)}, "(batch_size, length, 4)"),
    ({**IDS, "attention_mask": HOLES}, "say where they begin by `position_ids`"),
    ({**IDS, "attention_mask": NOTHING}, "at least one position"),
    ({**IDS, "attention_mask": HOLES[:, :3]}, "expected (2, 4)"),
    ({**IDS, "attention_mask": 2 * NOTHING}, "say where they begin by `position_ids`"),
    ({**IDS, "attention_mask": NOTHING / NOTHING}, "other numbers"),
    ({**IDS, "cache": object()}, "`cache` is not an input here"),
    ({**IDS, "position_ids": torch.arange(4)[None]}, "`position_ids` is not an input here"),
    ({**IDS, "cu_seq_lens_q": torch.arange(4)}, "`cu_seq_lens_q` is not an input here"),
]
OTHERS = [
    (MRConvForAudioClassification, {"input_values": torch.rand(2, 4, 2)}, ValueError, "vocabulary"),
    (MRConvForAudioClassification, {"input_values": torch.zeros(2, 4).short()}, TypeError, "torch.int16"),
    (MRConvModel, IDS, ValueError, "vocab_size"),
    (MRConvForRetrieval, {**PAIR, "input_ids_2": make_tokens(3, 4)}, ValueError, "3 second"),
    (MRConvForRetrieval, IDS, ValueError, "0 inputs"),
    (MRConvForRetrieval, {**PAIR, "attention_mask": torch.ones(2, 3)}, ValueError, "`attention_mask` has shape"),
]


@pytest.mark.parametrize(
    ("head", "inputs", "kind", "fact"),
    [*((mrconv.MRConvForSequenceClassification, inputs, ValueError, fact) for inputs, fact in WRONG), *OTHERS],
)
def test_wrong_inputs_are_refused_with_the_reason(head, inputs, kind, fact):
    model = make_model(head, **(SIZES if head in (MRConvForAudioClassification, MRConvModel) else TOKENS))
    with refused(kind, fact):
        model(**inputs)


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
    *({"kernel_type": kind, "bidirectional": both} for kind, both in mrconv_testing.EVERY_KERNEL),
    *({"branch_norm": kind, "bidirectional": both} for kind in ("kernel", "none") for both in (False, True)),
    {"branch_norm": "layer"},
]


@pytest.mark.parametrize("fields", LAYERS)
def test_a_layer_is_the_sum_of_its_normalised_branches_and_merging_keeps_it(fields):
    norm = fields.get("branch_norm", "batch")
    # Without statistics it is the same in training.
    layer, u = mrconv_testing.make_layer(**fields).double().train(norm in ("kernel", "none")), make_signal(2, 4, 37)
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
    layer = mrconv_testing.make_layer(bidirectional=bidirectional).double().train()
    twin = mrconv_testing.make_layer(bidirectional=bidirectional).double().train()
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
    loaded = mrconv.MRConvForSequenceClassification.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {value.dtype for value in loaded.parameters()} == {torch.bfloat16}
    assert all(value.equal(expected[name]) for name, value in loaded.named_buffers())
    with torch.no_grad():
        before = loaded(make_tokens(2, 20)).logits
        after = loaded.reparameterize()(make_tokens(2, 20)).logits
    assert {value.dtype for value in loaded.buffers()} == {torch.float32}
    assert_same_answers(after, before)
    loaded.save_pretrained(tmp_path / "merged")
    again = mrconv.MRConvForSequenceClassification.from_pretrained(tmp_path / "merged")
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
        assert 0.7 < MRConvLayer(config)(torch.randn(8, 32, 512)).std() < 1.3
