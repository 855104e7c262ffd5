"""MRConvForCausalLM: streaming and every way to generate equal the full forward pass."""

import copy

import pytest
import torch
from transformers import DynamicCache
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging

from hf_ext.mrconv.configuration_mrconv import MRConvConfig
from hf_ext.mrconv.modeling_positions_mrconv import MRConvForCausalLM
from hf_ext.mrconv.streaming_mrconv import MRConvCache
from tests.kit.models import LoraTesterMixin, ModelTesterMixin, TrainerTesterMixin
from tests.kit.refusals import refused

VOCABULARY, PAD, EOS, LENGTH = 40, 0, 39, 128


def make_config(**changes) -> MRConvConfig:
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "kernel_size": 8, "max_position_embeddings": LENGTH}
    return MRConvConfig(**{**sizes, "vocab_size": VOCABULARY, "pad_token_id": PAD, "eos_token_id": EOS, **changes})


def make_model(**changes) -> MRConvForCausalLM:
    """In evaluation and float64, with statistics of data and every parameter away from where it starts."""
    torch.manual_seed(0)
    model = MRConvForCausalLM(make_config(**changes)).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter += (1.0 if "embedding" in name else 0.1) * torch.randn_like(parameter)
        for _ in range(3):
            model(make_tokens(4, min(100, model.config.longest_input)))
    return model.eval()


def make_tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Without padding and the end of a text."""
    return torch.randint(1, EOS, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def model() -> MRConvForCausalLM:
    return make_model()


@torch.no_grad()
def stream(model, tokens, chunks) -> torch.Tensor:
    cache = MRConvCache(model.config)
    outputs = [model(chunk, past_key_values=cache) for chunk in tokens.split(chunks, dim=1)]
    assert all(each.past_key_values is cache for each in outputs) and cache.get_seq_length() == tokens.shape[1]
    return torch.cat([each.logits for each in outputs], dim=1)


@torch.no_grad()
def full(model, tokens, **arguments) -> torch.Tensor:
    return model(tokens, **arguments).logits


@pytest.mark.parametrize(
    "changes",
    [
        *({"kernel_type": kind} for kind in ("dilated", "fourier", "sparse", "fourier_sparse")),
        {"branch_norm": "kernel", "norm": "layer"},
        {"branch_norm": "none", "prenorm": False},
        {"rate_factor": 2.0},
        {"num_branches": 1},
    ],
    ids=lambda changes: "-".join(f"{name}={value}" for name, value in changes.items()),
)
def test_chunks_equal_the_full_forward_merged_or_not(changes):
    model = make_model(**changes)
    tokens = make_tokens(2, model.config.longest_input)
    expected = full(model, tokens)
    for chunks in (1, [20, 1, 1, tokens.shape[1] - 22]):
        torch.testing.assert_close(stream(model, tokens, chunks), expected, atol=1e-10, rtol=0)
    model.reparameterize()
    torch.testing.assert_close(stream(model, tokens, 3), expected, atol=1e-10, rtol=0)


def test_a_stream_may_be_longer_than_the_kernels(model):
    """Then an output depends on the last positions only: two layers reach back twice their kernels."""
    tokens = make_tokens(1, 5 * LENGTH)
    logits = stream(model, tokens, [3 * LENGTH + 5, 1, 2 * LENGTH - 6])
    torch.testing.assert_close(stream(model, tokens, 7), logits, atol=1e-10, rtol=0)
    changed = tokens.clone()
    changed[:, : 3 * LENGTH] = 1
    torch.testing.assert_close(stream(model, changed, 64)[:, -1], logits[:, -1], atol=1e-10, rtol=0)
    assert not torch.allclose(stream(model, changed, 64)[:, 3 * LENGTH], logits[:, 3 * LENGTH])
    generated = model.generate(tokens[:, :100], max_new_tokens=2 * LENGTH, do_sample=False, eos_token_id=None)
    assert generated.shape == (1, 100 + 2 * LENGTH)


# What `generate` is asked for; `use_cache=False` computes every token by a full forward pass.
WAYS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 2.0},
    "beam-search": {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
    "penalty": {"do_sample": False, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
}


def generate(model, tokens, **options):
    torch.manual_seed(1)
    return model.generate(tokens, max_new_tokens=20, **options)


@pytest.mark.parametrize("way", WAYS)
def test_generating_with_the_cache_equals_recomputing(model, way):
    tokens = make_tokens(2, 45)
    generated = generate(model, tokens, **WAYS[way])
    assert torch.equal(generated, generate(model, tokens, use_cache=False, **WAYS[way])) and generated.shape[1] > 45


def test_prompts_in_chunks_change_no_token_and_nothing_is_taken_back(model):
    tokens = make_tokens(1, 20).repeat(1, 3)
    expected = generate(model, tokens, do_sample=False)
    assert torch.equal(generate(model, tokens, do_sample=False, prefill_chunk_size=7), expected)
    with refused(ValueError, "assisted generation"):
        generate(model, tokens, do_sample=False, prompt_lookup_num_tokens=5)


def left_padded(prompts):
    rows = [prompt[0] for prompt in prompts]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD, padding_side="left")
    return tokens, (tokens != PAD).long()


@pytest.mark.parametrize(("way", "chunk"), [("greedy", 8), ("beam-search", None)])
def test_left_padded_batches_equal_single_prompts(model, way, chunk):
    prompts = [make_tokens(1, length, seed=length) for length in (3, 40, 17)]
    tokens, mask = left_padded(prompts)
    together = generate(model, tokens, attention_mask=mask, prefill_chunk_size=chunk, **WAYS[way])
    together = together.view(3, -1, together.shape[1])
    for row, prompt in zip(together, prompts, strict=True):
        single = generate(model, prompt, **WAYS[way])[:, prompt.shape[1] :]
        new = row[:, tokens.shape[1] :]
        width = min(single.shape[1], new.shape[1])
        assert torch.equal(new[:, :width], single[:, :width])
        # The longer of the two goes on with padding only.
        assert (new[:, width:] == PAD).all() and (single[:, width:] == PAD).all()


def test_generation_goes_on_from_a_returned_cache(model):
    tokens, mask = left_padded([make_tokens(1, 12), make_tokens(1, 30, seed=1)])
    options = {"do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    expected = model.generate(tokens, attention_mask=mask, max_new_tokens=20, **options).sequences
    first = model.generate(tokens, attention_mask=mask, max_new_tokens=8, **options)
    cache = first.past_key_values
    assert isinstance(cache, MRConvCache)
    assert cache.get_seq_length() == 37
    options |= {"attention_mask": torch.nn.functional.pad(mask, (0, 8), value=1), "max_new_tokens": 12}
    for past in (copy.deepcopy(cache), cache):
        assert torch.equal(model.generate(first.sequences, past_key_values=past, **options).sequences, expected)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_both_names_of_the_cache_are_taken_without_a_warning(model, name):
    tokens, options = make_tokens(2, 20), {"do_sample": False, "eos_token_id": None, "max_new_tokens": 6}
    logging.warning_once.cache_clear()
    first, second, cache = (MRConvCache(model.config) for _ in range(3))
    with torch.no_grad(), CaptureLogger(logging.get_logger("transformers")) as said:
        for run, own in ((model, first), (model.model, second)):
            parts = [run(part, **{name: own})[0] for part in tokens.split(9, dim=1)]
            torch.testing.assert_close(torch.cat(parts, dim=1), run(tokens)[0], atol=1e-10, rtol=0)
        model(tokens[:, :-1], **{name: cache})
        found = model.generate(tokens, **{name: cache}, **options)
    assert said.out == "" and cache.get_seq_length() == 20 + 6 - 1
    assert torch.equal(found, model.generate(tokens, use_cache=False, **options))


def test_a_cache_whose_blocks_were_interrupted_is_refused_until_it_is_reset(model):
    def stop(*_):
        raise KeyboardInterrupt

    tokens, cache = make_tokens(2, 30), MRConvCache(model.config)
    with torch.no_grad():
        model(tokens[:, :20], past_key_values=cache)
        hook = model.model.layers[1].register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            model(tokens[:, 20:], past_key_values=cache)
        hook.remove()
        with refused(ValueError, "seen 20", "30 positions", "reset()"):
            model(tokens[:, 20:], past_key_values=cache)
        cache.reset()
        again = model(tokens, past_key_values=cache).logits
    torch.testing.assert_close(again, full(model, tokens), atol=1e-10, rtol=0)


def test_embeddings_instead_of_tokens_and_some_logits_of_all(model):
    tokens = make_tokens(2, 30)
    embedded = model.get_input_embeddings()(tokens).detach()
    expected = full(model, tokens)
    torch.testing.assert_close(full(model, None, inputs_embeds=embedded), expected)
    # Logits of the last positions only.
    for keep, places in ((3, slice(-3, None)), (torch.tensor([0, 5]), [0, 5])):
        torch.testing.assert_close(full(model, tokens, logits_to_keep=keep), expected[:, places])
    generated = generate(model, tokens, do_sample=False)
    assert torch.equal(generate(model, None, inputs_embeds=embedded, do_sample=False), generated[:, 30:])


def test_labels_are_shifted_and_padding_is_not_predicted(model):
    tokens, mask = left_padded([make_tokens(1, 12), make_tokens(1, 30, seed=1)])
    labels = tokens.masked_fill(mask == 0, -100)
    with torch.no_grad():
        outputs = model(tokens, attention_mask=mask, labels=labels)
    predicted = torch.nn.functional.log_softmax(outputs.logits[:, :-1].double(), dim=-1)
    chosen = predicted.gather(2, tokens[:, 1:, None]).squeeze(2)[labels[:, 1:] != -100]
    assert chosen.numel() == 12 + 29
    # transformers computes the loss in float32.
    torch.testing.assert_close(outputs.loss.double(), -chosen.mean(), atol=1e-5, rtol=0)
    assert outputs.past_key_values is None


def test_models_that_cannot_stream_and_bad_input_are_refused_with_the_reason(model):
    layered, options = MRConvForCausalLM(make_config(branch_norm="layer")).eval(), {"max_new_tokens": 2}
    with refused(ValueError, "layer"):
        layered.generate(make_tokens(1, 5), **options)
    assert layered.generate(make_tokens(1, 5), use_cache=False, eos_token_id=None, **options).shape == (1, 7)
    tokens, cache, right = make_tokens(2, 10), MRConvCache(model.config), torch.ones(2, 10, dtype=torch.long)
    right[0, 7:] = 0
    for kind, facts, arguments in (
        (ValueError, [], {"cache_params": cache}),
        (ValueError, ["position_ids"], {"position_ids": torch.arange(10)[None], "past_key_values": cache}),
        (TypeError, ["DynamicCache", "MRConvCache", "model.config"], {"past_key_values": DynamicCache()}),
        (ValueError, ["padding_side", "left"], {"attention_mask": right, "past_key_values": cache}),
    ):
        with refused(kind, *facts):
            model(tokens, **arguments)
    with refused(ValueError, "cache_implementation", "static"):
        model.generate(tokens, cache_implementation="static", max_new_tokens=2)
    assert model(tokens, attention_mask=right).logits.shape == (2, 10, VOCABULARY)
    model(tokens, past_key_values=cache)
    with refused(ValueError, "attention_mask", "(2, 20)"):
        model(tokens, attention_mask=torch.ones(2, 10), past_key_values=cache)
    for depth in (1, 3):
        with refused(ValueError, f"{depth} layers", "the model has 2"):
            model(tokens, past_key_values=MRConvCache(make_config(num_hidden_layers=depth)))
    with refused(ValueError, "cache"):
        model(tokens[:1], past_key_values=cache)
    for run in (model, model.model, model.generate):
        with pytest.raises(ValueError):
            run(tokens, cache=cache, past_key_values=MRConvCache(model.config))
    training = copy.deepcopy(model).train()
    for arguments in ({"use_cache": True}, {"past_key_values": cache}):
        with refused(ValueError, "model.eval"):
            training(tokens, **arguments)


class TestModel(ModelTesterMixin, TrainerTesterMixin, LoraTesterMixin):
    model_class = MRConvForCausalLM
    bfloat16_tolerance = 0.05
    lora_targets = ["pointwise"]
    trainer_steps = 30
    trainer_learning_rate = 2e-2

    def make_config(self):
        return make_config()

    def make_inputs(self):
        return {"input_ids": make_tokens(4, 30), "labels": make_tokens(4, 30)}
