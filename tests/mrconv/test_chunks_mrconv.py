"""Training on chunks of long sequences: outputs and gradients of the whole, truncation, statistics of a chunk."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from hf_ext.mrconv import MRConvForCausalLM, MRConvModel, MRConvTrainingCache
from hf_ext.mrconv.modeling_layers_mrconv import MRConvBatchNorm, MRConvBranchNorm
from tests.kit.refusals import refused
from tests.mrconv.mrconv_testing import TOKENS, make_layer, make_model, make_signal, make_tokens
from tests.mrconv.reference_ops import batch_norm_conv

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "mrconv.md"
LENGTH = 37
FIELDS = {name: value for name, value in TOKENS.items() if name != "num_labels"}


def model_of(**fields):
    return make_model(MRConvModel, **{**FIELDS, **fields}).double()


def gradients_of(model, outputs, weights):
    return torch.autograd.grad((outputs * weights).sum(), list(model.parameters()))


def in_chunks(model, tokens, size, mask=None):
    """Outputs chunk by chunk."""
    cache, outputs = MRConvTrainingCache(model.config), []
    for chunk in tokens.split(size, dim=1):
        done = cache.get_seq_length() + chunk.shape[1]
        covered = None if mask is None else mask[:, :done]
        outputs.append(model(chunk, attention_mask=covered, past_key_values=cache).last_hidden_state)
    return torch.cat(outputs, dim=1)


# Fields, what is in training mode, and how long a chunk is.
CASES = [
    ({"kernel_type": "fourier"}, "nothing", 6),
    *(({"kernel_type": kind}, "nothing", 20) for kind in ("fourier_sparse", "implicit")),
    # In training too, without statistics of the batch, and with frozen ones position by position.
    *(({"branch_norm": norm, "norm": "layer"}, "all", 6) for norm in ("layer", "kernel", "none")),
    ({"num_hidden_layers": 3}, "all but norms", 1),
]


@pytest.mark.parametrize(("fields", "trained", "size"), CASES)
def test_chunks_are_the_whole_sequence_with_all_gradients(fields, trained, size):
    model = model_of(**fields).train(trained != "nothing")
    for module in model.modules():
        if trained == "all but norms" and isinstance(module, (MRConvBatchNorm, MRConvBranchNorm)):
            module.eval()
    tokens, weights = make_tokens(3, LENGTH), make_signal(3, LENGTH, 4)
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    mask[1, :15] = 0
    # Padding on the left changes nothing.
    found, wanted = in_chunks(model, tokens, size, mask), model(tokens, mask).last_hidden_state
    torch.testing.assert_close(found[mask.bool()], wanted[mask.bool()], atol=1e-11, rtol=1e-11)
    whole, parts = model(tokens).last_hidden_state, in_chunks(model, tokens, size)
    torch.testing.assert_close(parts, whole, atol=1e-11, rtol=1e-11)
    found, wanted = gradients_of(model, parts, weights), gradients_of(model, whole, weights)
    torch.testing.assert_close(found, wanted, atol=1e-9, rtol=1e-9)


def test_kernels_that_are_shorter_than_a_chunk_and_than_the_sequence():
    model = model_of(branch_norm="kernel", norm="layer", max_position_embeddings=12).train()
    wide = model_of(branch_norm="kernel", norm="layer", max_position_embeddings=12)
    # What a longer input gives cannot be asked for at once: the model takes 12 positions.
    tokens = make_tokens(2, 37)
    wanted = in_chunks(wide, tokens, 37)
    for size in (4, 12, 20):
        torch.testing.assert_close(in_chunks(model, tokens, size), wanted, atol=1e-11, rtol=1e-11)
    kernel, _, bias = wide.layers[0].convolution.merged()
    hidden = wide.layers[0].norm(wide.embedding(tokens)).transpose(1, 2)
    flipped = F.conv1d(F.pad(hidden, (11, 0)), kernel.flip(1)[:, None], bias, groups=4)
    cache = MRConvTrainingCache(wide.config)
    found = [wide.layers[0].convolution(part, cache=cache) for part in hidden.split(5, dim=2)]
    torch.testing.assert_close(torch.cat(found, dim=2), flipped, atol=1e-11, rtol=1e-11)
    assert cache.layers[0].past.shape == (2, 4, 11)


def test_after_detaching_the_gradient_is_that_of_the_last_chunk_with_fixed_inputs_before_it():
    model, size = model_of(), 12
    tokens, weights = make_tokens(2, LENGTH), make_signal(2, LENGTH, 4)
    cache, found = MRConvTrainingCache(model.config), 0
    for chunk, weight in zip(tokens.split(size, dim=1), weights.split(size, dim=1), strict=True):
        outputs = model(chunk, past_key_values=cache).last_hidden_state
        gradients = gradients_of(model, outputs, weight)
        found = gradients if found == 0 else [a + b for a, b in zip(found, gradients, strict=True)]
        assert cache.detach_() is cache
    # The definition: what a layer had as inputs of earlier chunks is constant.
    inputs = [[] for _ in model.layers]
    total = 0
    for chunk, weight in zip(tokens.split(size, dim=1), weights.split(size, dim=1), strict=True):
        hidden = model.embedding(chunk)
        for layer, before in zip(model.layers, inputs, strict=True):
            normed = layer.norm(hidden).transpose(1, 2)
            whole = torch.cat([*before, normed], dim=2)
            before.append(normed.detach())
            mixed = F.gelu(layer.convolution(whole)[..., -chunk.shape[1] :]).transpose(1, 2)
            hidden = hidden + F.glu(layer.pointwise(mixed), dim=-1)
        total = total + (model.final_norm(hidden) * weight).sum()
    wanted = torch.autograd.grad(total, list(model.parameters()))
    whole = gradients_of(model, in_chunks(model, tokens, size), weights)
    torch.testing.assert_close(list(found), list(wanted), atol=1e-9, rtol=1e-9)
    assert any((mine - full).abs().max() > 1e-3 for mine, full in zip(found, whole, strict=True))


def test_in_training_batch_statistics_are_those_of_the_chunk():
    layer, twin = make_layer().double().train(), make_layer().double().train()
    cache = MRConvTrainingCache(layer.config)
    u = make_signal(3, 4, LENGTH).requires_grad_()
    first, second = layer(u[..., :20], cache=cache), layer(u[..., 20:], cache=cache)
    kernels, _ = twin.branch_kernels()
    starts = torch.full((3,), 20)
    expected, mean, var, count = batch_norm_conv(
        u, kernels, twin.alpha, twin.norm.weight, twin.norm.bias, 1e-5, start=starts, stop=torch.full((3,), LENGTH)
    )
    torch.testing.assert_close(second, expected[..., 20:], atol=1e-10, rtol=0)
    torch.testing.assert_close(first, make_layer().double().train()(u[..., :20]), atol=1e-10, rtol=0)
    found = torch.autograd.grad(second.square().sum(), [u, *layer.parameters()], retain_graph=True)
    wanted = torch.autograd.grad(expected[..., 20:].square().sum(), [u, *twin.parameters()])
    torch.testing.assert_close(found, wanted, atol=1e-8, rtol=1e-8)
    assert count == 3 * 17
    assert not torch.equal(mean, torch.zeros_like(mean)) and bool((var > 0).all())


def test_the_example_trains_on_a_long_text_chunk_by_chunk():
    (example,) = [
        code
        for code in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
        if "MRConvTrainingCache" in code
    ]
    torch.manual_seed(0)
    model = make_model(MRConvForCausalLM, **{**FIELDS, "branch_norm": "kernel", "norm": "layer"}).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    # Longer than what the model takes at once.
    text, losses = torch.arange(121).remainder(7)[None], []
    for _ in range(8):
        names = {"model": model, "optimizer": optimizer, "text": text}
        exec(example.replace("4096", "24"), names)
        losses.append(names["loss"].item())
    assert losses[-1] < 0.7 * losses[0]


def test_what_cannot_be_is_refused_with_the_reason():
    tokens = make_tokens(2, 10)
    bidirectional = model_of(bidirectional=True)
    with refused(ValueError, "bidirectional"):
        bidirectional(tokens, past_key_values=MRConvTrainingCache(bidirectional.config))
    model = model_of().train()
    cache = MRConvTrainingCache(model.config)
    model(tokens, past_key_values=cache)
    with refused(ValueError, "cache"):
        model(tokens[:1], past_key_values=cache)
    model.activation_checkpointing_enable()
    with refused(ValueError, "checkpointing", "activation"):
        model(tokens, past_key_values=cache)
