"""MRConv models: inputs, losses, saving, training, adapters, change of rate, loading anywhere."""

import copy

import numpy as np
import pytest
import torch

from hf_ext import mrconv
from hf_ext.mrconv import MRConvConfig, MRConvForAudioClassification, MRConvForRetrieval, MRConvModel
from hf_ext.mrconv.configuration_mrconv import KERNEL_TYPES
from tests.kit.models import LoraTesterMixin, TrainerTesterMixin, assert_same_answers, assert_same_weights
from tests.kit.refusals import refused
from tests.mrconv.mrconv_testing import SIZES, TOKENS, MRConvTester, make_mask, make_model, make_signal, make_tokens


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
    time = torch.arange(128) / 128
    wave = torch.sin(6.28 * 2 * time)[None]
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


@pytest.mark.parametrize(
    ("fields", "factor", "words"),
    [
        ({}, 0, "`factor` is 0"),
        ({}, float("inf"), "`factor` is inf"),
        ({}, 3, "must divide the length of every kernel"),
        ({}, 16, "must divide"),
        ({"sampling_rate": 11025}, 2, "11025 Hz would become 5512.5"),
        ({}, "2", "`factor` is 2"),
        ({}, None, "`factor` is None"),
    ],
)
def test_a_change_of_rate_that_cannot_be_is_refused(fields, factor, words):
    model = make_model(MRConvForAudioClassification, **{**RATES, **fields})
    before = model.config.to_dict()
    with pytest.raises(ValueError, match=words):
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


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({}, "Got 0 inputs"),
        ({**IDS, "inputs_embeds": torch.rand(2, 4, 4)}, "Got 2 inputs"),
        ({"input_ids": make_tokens(2, 0)}, "without a position"),
        ({"input_ids": make_tokens(2, 38)}, "has 38 positions; the model takes at most 37"),
        ({"input_ids": make_tokens(4)}, r"shape \(4,\)"),
        ({"input_values": torch.rand(2, 4, 1)}, "`vocab_size` is 11"),
        ({"inputs_embeds": torch.rand(2, 4, 5)}, "expected .batch_size, length, 4."),
        ({**IDS, "attention_mask": HOLES}, "say where they begin by `position_ids`"),
        ({**IDS, "attention_mask": NOTHING}, "at least one position"),
        ({**IDS, "attention_mask": HOLES[:, :3]}, r"expected \(2, 4\)"),
        ({**IDS, "attention_mask": 2 * NOTHING}, "say where they begin by `position_ids`"),
        ({**IDS, "attention_mask": NOTHING / NOTHING}, "other numbers"),
        ({**IDS, "cache": object()}, "`cache` is not an input here"),
        ({**IDS, "position_ids": torch.arange(4)[None]}, "`position_ids` is not an input here"),
        ({**IDS, "cu_seq_lens_q": torch.arange(4)}, "`cu_seq_lens_q` is not an input here"),
    ],
)
def test_wrong_inputs_are_refused_with_the_reason(inputs, words):
    with pytest.raises(ValueError, match=words):
        make_model()(**inputs)


PAIR = {**IDS, "input_ids_2": make_tokens(2, 4)}


@pytest.mark.parametrize(
    ("head", "inputs", "kind", "facts"),
    [
        (MRConvForAudioClassification, {"input_values": torch.rand(2, 4, 2)}, ValueError, ["vocabulary"]),
        (MRConvForAudioClassification, {"input_values": torch.zeros(2, 4).short()}, TypeError, ["torch.int16"]),
        (MRConvModel, {"input_ids": make_tokens(2, 4)}, ValueError, ["vocab_size"]),
        (MRConvForRetrieval, {**PAIR, "input_ids_2": make_tokens(3, 4)}, ValueError, ["3 second"]),
        (MRConvForRetrieval, {"input_ids": make_tokens(2, 4)}, ValueError, ["0 inputs"]),
        (MRConvForRetrieval, {**PAIR, "attention_mask": torch.ones(2, 3)}, ValueError, ["attention", "shape"]),
    ],
)
def test_other_heads_refuse_wrong_inputs_too(head, inputs, kind, facts):
    model = make_model(head, **(TOKENS if head is MRConvForRetrieval else SIZES))
    with refused(kind, *facts):
        model(**inputs)
