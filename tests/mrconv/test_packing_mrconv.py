"""Packed sequences: results, losses, gradients and statistics are those of a row for each sequence."""

import pytest
import torch
import torch.distributed as dist
from transformers import DataCollatorWithFlattening

from hf_ext import mrconv
from hf_ext.mrconv import MRConvForCausalLM, MRConvModel
from hf_ext.mrconv import ops_mrconv as ops
from hf_ext.mrconv.packing_mrconv import group_lengths, read_packing
from tests.kit.refusals import refused
from tests.mrconv.mrconv_testing import TOKENS, in_two_processes, make_model, make_signal, make_tokens

FIELDS = {name: value for name, value in TOKENS.items() if name != "num_labels"}
# Groups of one and of several, of one position, and as long as the longest kernel.
LENGTHS = [37, 5, 1, 20, 9, 30, 2]
SEQUENCES = [make_tokens(length, seed=seed) for seed, length in enumerate(LENGTHS)]
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]


def gradients_of(model) -> dict[str, torch.Tensor]:
    return {name: value.grad for name, value in model.named_parameters()}


# As rows of their own, and their mask.
ROWS, MASK = (
    torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
    for parts in (SEQUENCES, [torch.ones_like(sequence) for sequence in SEQUENCES])
)


CASES = [
    {},
    {"norm": "layer", "bidirectional": True},
    {"branch_norm": "layer", "bidirectional": True},
    {"branch_norm": "kernel", "norm": "layer"},
    {"branch_norm": "none", "bidirectional": True},
    *({"kernel_type": kind, "bidirectional": True, "prenorm": False}
      for kind in ("dilated", "sparse", "fourier_sparse")),
]  # fmt: skip
WITHOUT_PACKAGE = [{}, {"bidirectional": True}]


@pytest.mark.parametrize(
    ("fields", "form"), [*((case, "fast") for case in CASES), *((case, "plain") for case in WITHOUT_PACKAGE)]
)
def test_training_is_that_of_a_row_for_each_sequence(fields, form, monkeypatch):
    if form == "plain":
        monkeypatch.setattr(ops, "FAST", {})
    packed, padded = (make_model(MRConvModel, **{**FIELDS, **fields}).double().train() for _ in range(2))
    found = packed(torch.cat(SEQUENCES)[None], position_ids=POSITIONS).last_hidden_state[0]
    wanted = padded(ROWS, MASK).last_hidden_state[MASK.bool()]
    torch.testing.assert_close(found, wanted, atol=1e-11, rtol=1e-11)
    for outputs in (found, wanted):
        (outputs * make_signal(*found.shape)).sum().backward()
    torch.testing.assert_close(gradients_of(packed), gradients_of(padded), atol=1e-9, rtol=1e-9)
    # Running means and variances.
    torch.testing.assert_close(list(packed.buffers()), list(padded.buffers()), atol=1e-12, rtol=1e-12)
    # Rows that are one sequence each are what they were.
    tokens = make_tokens(2, 20)
    wanted = packed(tokens).last_hidden_state
    found = packed(tokens, position_ids=torch.arange(20)[None]).last_hidden_state
    torch.testing.assert_close(found, wanted, atol=1e-11, rtol=1e-11)


def test_in_float32_with_a_large_mean_it_is_near_float64():
    # The sums of several groups are joined; their variance is the small difference of large numbers.
    inputs = [make_signal(2, 3, 37) + 1000, make_signal(1, 3, 9) + 1000]
    kernels = [make_signal(3, size) for size in (5, 10, 20)]
    coefficients = [make_signal(3, 3).abs() + 0.5 for _ in range(3)]
    spans = [(None, torch.tensor([37, 30])), (None, torch.tensor([9]))]
    inputs[0][1, :, 30:] = 0
    results = []
    for dtype in (torch.float32, torch.float64):
        cast = [[value.to(dtype) for value in values] for values in (inputs, kernels, coefficients)]
        results.append(ops.grouped_batch_norm_conv(cast[0], spans, cast[1], *cast[2], 1e-5, None, None))
    for found, wanted in zip(results[0][3:], results[1][3:], strict=True):
        torch.testing.assert_close(found[:1].double(), wanted[:1], atol=5e-3, rtol=0)
    torch.testing.assert_close(results[0][1].double(), results[1][1], atol=0, rtol=1e-4)


def test_the_collator_of_transformers_trains_a_language_model():
    torch.manual_seed(0)
    packed, padded = (make_model(MRConvForCausalLM, **FIELDS).double().train() for _ in range(2))
    samples = [{"input_ids": sequence.tolist()} for sequence in SEQUENCES]
    wanted = padded(ROWS, MASK, labels=torch.where(MASK == 1, ROWS, -100)).loss
    wanted.backward()
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(samples)
    assert {"position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "seq_idx"} <= set(batch)
    loss = packed(**batch).loss
    loss.backward()
    # The loss of transformers is in float32.
    torch.testing.assert_close(loss, wanted, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradients_of(packed), gradients_of(padded), atol=1e-6, rtol=1e-5)
    packed.eval()
    expected = packed(**batch).logits
    # Labels without separators are none at the first tokens either.
    again = packed(batch["input_ids"], labels=batch["input_ids"], position_ids=batch["position_ids"])
    torch.testing.assert_close(again.logits, expected)
    torch.testing.assert_close(again.loss, packed(**batch).loss)


def test_merged_models_and_several_rows_with_padding_between():
    model = make_model(MRConvForCausalLM, **FIELDS).double()
    tokens, mask, positions = torch.zeros(3, 2, 30, dtype=torch.long)
    placed = [((row, slice(start, start + LENGTHS[which])), SEQUENCES[which][None])
              for row, start, which in ((0, 0, 1), (0, 7, 3), (1, 12, 4))]  # fmt: skip
    for where, sequence in placed:
        tokens[where], mask[where], positions[where] = sequence[0], 1, torch.arange(sequence.shape[1])
    for _ in range(2):
        logits = model(tokens, attention_mask=mask, position_ids=positions).logits
        for where, sequence in placed:
            torch.testing.assert_close(logits[where], model(sequence).logits[0], atol=1e-11, rtol=1e-11)
        model.reparameterize()


def test_channels_are_dropped_of_whole_sequences():
    packing = read_packing(torch.zeros(1, sum(LENGTHS), 4), None, position_ids=POSITIONS)
    torch.manual_seed(0)
    parts = packing.drop_channels(torch.ones(1, 400, sum(LENGTHS)), 0.25, True)[0].split(LENGTHS, dim=1)
    for part in parts:
        assert (part == part[:, :1]).all() and 0.15 < (part[:, 0] == 0).float().mean() < 0.35
        torch.testing.assert_close(part.max(), torch.tensor(4 / 3))
    assert len({tuple(part[:, 0].tolist()) for part in parts}) == len(LENGTHS)
    ones = torch.ones(1, 4, sum(LENGTHS))
    assert packing.drop_channels(ones, 0.25, False) is ones


def test_padding_is_less_than_half_however_unequal_the_lengths():
    lengths = [4096, *[3] * 900, 2049, 2048, 17, 31, 1]
    groups = group_lengths(lengths)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    assert sum(len(group) * lengths[group[0]] for group in groups) < 2 * sum(lengths)
    assert len(groups) <= 13


PAIRS = {"position_ids": torch.tensor([[0, 1, 0, 1]])}
WRONG = [
    ({"position_ids": torch.tensor([[0, 1, 3, 4]])}, r"has 3 after 1, at \[0, 2\].*from 0 again"),
    ({"position_ids": torch.tensor([[2, 3, 0, 1]])}, r"has 2 where the row begins, at \[0, 0\]"),
    ({"position_ids": torch.arange(3)[None]}, r"shape \(1, 3\); expected \(2, 4\)"),
    ({"cu_seq_lens_q": torch.tensor([0, 3, 8])}, "`cu_seq_lens_q` is not an input here.*`position_ids`"),
    ({**PAIRS, "attention_mask": torch.tensor([[1, 1, 0, 1]] * 2)}, "padding inside of a sequence of `position_ids`"),
    ({**PAIRS, "attention_mask": torch.ones(2, 3)}, r"expected \(2, 4\)"),
]


@pytest.mark.parametrize(("inputs", "words"), WRONG)
def test_wrong_bounds_are_refused_with_the_reason(inputs, words):
    with pytest.raises(ValueError, match=words):
        make_model(MRConvModel, **FIELDS)(make_tokens(2, 4), **inputs)


def test_what_needs_one_sequence_in_a_row_refuses_packed_ones():
    tokens, model = make_tokens(2, 4), make_model(MRConvForCausalLM, **FIELDS)
    with refused(ValueError, "position_ids"):
        make_model()(tokens, **PAIRS)
    with refused(ValueError, "answer", "row"):
        make_model(mrconv.MRConvForRetrieval)(tokens, input_ids_2=tokens, **PAIRS)
    with refused(ValueError, "sequence", "cache"):
        model(tokens, past_key_values=mrconv.MRConvCache(model.config), **PAIRS)
    with refused(ValueError, "38 positions"):
        model(make_tokens(1, 40), position_ids=torch.tensor([[*range(38), 0, 1]]))


def step(rank: int | None) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Gradients and statistics of a share of the sequences, of which the first process has one, or of all."""
    chosen = {0: [3], 1: [0, 1, 2], None: [3, 0, 1, 2]}[rank]
    model = make_model(MRConvModel, **FIELDS).double().train()
    positions = torch.cat([torch.arange(LENGTHS[index]) for index in chosen])[None]
    outputs = model(torch.cat([SEQUENCES[index] for index in chosen])[None], position_ids=positions).last_hidden_state
    weights = make_signal(1, 63, 4)
    (outputs * {0: weights[:, :20], 1: weights[:, 20:], None: weights}[rank]).sum().backward()
    gradients = gradients_of(model)
    if rank is not None:
        for gradient in gradients.values():
            dist.all_reduce(gradient)
    return gradients, dict(model.named_buffers())


@pytest.mark.slow
def test_two_processes_with_other_groups_are_one_on_all_sequences(tmp_path):
    gradients, buffers = step(None)
    for found in in_two_processes(tmp_path, step):
        torch.testing.assert_close(found[0], gradients, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(found[1], buffers, atol=1e-10, rtol=0)
