"""The merged kernel that a layer keeps: made once, by whatever calls, and never stale."""

import copy
import io
import pickle
from concurrent.futures import ThreadPoolExecutor

import accelerate
import pytest
import torch
from torch.nn.utils import parametrize

from hf_ext.mrconv import MRConvCache, MRConvForCausalLM, MRConvLayer
from tests.kit.refusals import refused
from tests.mrconv.mrconv_testing import TOKENS, generator, make_model, make_tokens


@torch.no_grad()
def predict(model, tokens=None) -> torch.Tensor:
    return model(make_tokens(2, 20) if tokens is None else tokens).logits


def test_a_model_is_merged_once_for_all_calls_and_caches(monkeypatch):
    merges, merged = [], MRConvLayer.merged
    monkeypatch.setattr(MRConvLayer, "merged", lambda layer: merges.append(layer.layer_index) or merged(layer))
    model = make_model(MRConvForCausalLM)
    expected = predict(model)
    assert merges == [0, 1]
    for length in (1, 7, 20, 37):
        predict(model, make_tokens(2, length))
    caches = [MRConvCache(model.config) for _ in range(3)]
    for cache in caches:
        with torch.no_grad():
            outputs = [model(part, past_key_values=cache).logits for part in make_tokens(2, 20).split(6, dim=1)]
        torch.testing.assert_close(torch.cat(outputs, dim=1), expected, atol=1e-5, rtol=1e-5)
    model.generate(make_tokens(1, 9), max_new_tokens=5, do_sample=False)
    with torch.inference_mode():
        model(make_tokens(2, 20))
    assert merges == [0, 1]
    for layer in (0, 1):
        kernels = {id(cache.layers[layer].kernel) for cache in caches}
        assert kernels == {id(model.convolutions()[layer].streaming_kernel())}


def parameter(model: torch.nn.Module) -> torch.nn.Parameter:
    return model.get_parameter(model.kernel_parameters()[0])


def convolution(model, index: int = 0) -> MRConvLayer:
    return model.model.layers[index].convolution


def scaled_state(model):
    state = model.state_dict()
    return {name: value * 1.1 if value.is_floating_point() else value.clone() for name, value in state.items()}


def replace(model):
    path, _, name = model.kernel_parameters()[0].rpartition(".")
    setattr(model.get_submodule(path), name, torch.nn.Parameter(parameter(model).detach() * 1.5))


def replace_module(model):
    torch.manual_seed(7)
    layer = convolution(model)
    layer.kernel = type(layer.kernel)(model.config, layer.alpha.shape[1], 37)


@torch.no_grad()
def train_layer_by_layer(model):
    """In training mode, without a call of the layer's own `train`."""
    for training in (True, False):
        for module in model.modules():
            module.training = training
        model(make_tokens(2, 30))


class Twice(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


def parametrized(model):
    path, _, name = model.kernel_parameters()[0].rpartition(".")
    parametrize.register_parametrization(model.get_submodule(path), name, Twice())


@torch.no_grad()
def reparameterize(model):
    parameter(model).mul_(1.5)
    model.reparameterize()


BRANCHES = {
    # Not counted by the parameter's version.
    "data": lambda model: parameter(model).data.mul_(1.5),
    "statistics": lambda model: convolution(model).norm.running_var.data.mul_(1.5),
    "alpha": lambda model: convolution(model, 1).alpha.data[0, 0].add_(1e-2),
    "assigned": lambda model: model.load_state_dict(scaled_state(model), assign=True),
    # To fewer digits and back: `to` makes other values in other memory.
    "cast": lambda model: model.to(torch.bfloat16).double(),
    "rate": lambda model: model.change_rate(0.5),
    "eps": lambda model: setattr(convolution(model).norm, "eps", 0.5),
    "hooked": lambda model: convolution(model).kernel.register_forward_hook(
        lambda _, __, found: [2 * x for x in found]
    ),
    **{f.__name__: f for f in (replace, replace_module, train_layer_by_layer, parametrized, reparameterize)},
}
MERGED = {
    "bias": lambda model: convolution(model, 1).merged_bias.add_(0.5),
    "replaced": lambda model: setattr(convolution(model), "merged_kernel", convolution(model).merged_kernel * 1.5),
    "set": lambda model: setattr(convolution(model).merged_kernel, "data", convolution(model).merged_kernel * 1.5),
    "loaded": lambda model: model.load_state_dict(scaled_state(model)),
    "assigned": BRANCHES["assigned"],
}


@pytest.mark.parametrize(
    ("change", "merged"), [*((name, False) for name in BRANCHES), *((name, True) for name in MERGED)]
)
def test_no_change_of_a_model_leaves_a_kernel_stale(change, merged):
    fields = {"bidirectional": True} if merged else {"kernel_type": "fourier_sparse"}
    model = make_model(**TOKENS, **fields).double()
    model = model.reparameterize() if merged else model
    before = predict(model)
    with torch.no_grad():
        (MERGED if merged else BRANCHES)[change](model)
    found = predict(model)
    # A copy keeps nothing.
    torch.testing.assert_close(found, predict(copy.deepcopy(model)), atol=1e-10, rtol=1e-10)
    assert (found - before).abs().max() > 1e-6
    assert torch.equal(predict(model), found)


@pytest.mark.parametrize("merged", [False, True])
def test_a_functional_call_takes_its_own_weights_and_leaves_none_behind(merged):
    model = make_model().double()
    model = model.reparameterize() if merged else model
    before = predict(model)
    changed = copy.deepcopy(model)
    changed.load_state_dict(scaled_state(model))
    with torch.no_grad():
        found = torch.func.functional_call(model, scaled_state(model), (make_tokens(2, 20),)).logits
    torch.testing.assert_close(found, predict(changed), atol=1e-10, rtol=1e-10)
    assert torch.equal(predict(model), before) and (found - before).abs().max() > 1e-6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("change", ["data", "assigned", "cast"])
def test_on_a_gpu_evaluation_never_waits_and_follows_every_change(change):
    model = make_model(**TOKENS).double()
    tokens = make_tokens(2, 20)
    expected = predict(model, tokens)
    model, tokens = model.cuda(), tokens.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [predict(model, tokens) for _ in range(2)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(found[1].cpu(), expected, atol=1e-10, rtol=1e-10)
    BRANCHES[change](model)
    expected = predict(copy.deepcopy(model).cpu())
    torch.testing.assert_close(predict(model, tokens).cpu(), expected, atol=1e-10, rtol=1e-10)


def test_freed_memory_that_is_given_to_another_kernel_is_another_kernel():
    """Addresses and version counters come again; the kept source holds on to the tensor that it compares."""
    model = make_model().reparameterize()
    layer = model.convolutions()[0]
    outputs = []
    for factor in (1.0, 2.0, 3.0, 4.0):
        layer.merged_kernel = torch.full_like(layer.merged_kernel, factor)
        outputs.append(predict(model))
    assert all((first - second).abs().max() > 1e-4 for first, second in zip(outputs, outputs[1:], strict=False))


def test_streams_begun_before_a_change_go_on_with_their_kernel():
    model = make_model(MRConvForCausalLM).double()
    tokens = make_tokens(1, 20)
    expected = predict(model, tokens)
    cache = MRConvCache(model.config)
    with torch.no_grad():
        first = model(tokens[:, :10], past_key_values=cache).logits
        parameter(model).mul_(2)
        second = model(tokens[:, 10:], past_key_values=cache).logits
        torch.testing.assert_close(torch.cat([first, second], dim=1), expected, atol=1e-10, rtol=0)
        cache.reset()
        anew = model(tokens, past_key_values=cache).logits
    torch.testing.assert_close(anew, predict(model, tokens), atol=1e-10, rtol=0)
    assert (anew - expected).abs().max() > 1e-3


def test_evaluation_has_gradients_where_they_are_asked_for():
    model = make_model().double()
    predict(model)
    found, wanted = (
        torch.autograd.grad(one(make_tokens(2, 20)).logits.square().sum(), list(one.parameters()))
        for one in (model, copy.deepcopy(model))
    )
    torch.testing.assert_close(found, wanted, atol=1e-10, rtol=1e-8)
    assert all(gradient.abs().max() > 0 for gradient in found)


def test_what_is_kept_is_neither_copied_nor_pickled_nor_saved():
    model = make_model()
    names = set(model.state_dict())
    predict(model)
    assert set(model.state_dict()) == names
    assert all(layer.kept is not None for layer in model.convolutions())
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(stream, weights_only=False)]
    for twin in copies:
        assert all(layer.kept is None for layer in twin.convolutions())
        torch.testing.assert_close(predict(twin), predict(model), atol=1e-6, rtol=1e-6)
    model.train()
    assert all(layer.kept is None for layer in model.convolutions())


def test_a_model_loaded_in_inference_mode_is_right_too(tmp_path):
    """Its tensors count no versions."""
    for merged in (False, True):
        model = make_model(MRConvForCausalLM)
        model = model.reparameterize() if merged else model
        model.save_pretrained(tmp_path / str(merged))
        with torch.inference_mode():
            loaded = MRConvForCausalLM.from_pretrained(tmp_path / str(merged))
            before = loaded(make_tokens(2, 20)).logits
            torch.testing.assert_close(before, predict(model), atol=1e-6, rtol=1e-6)
            for name, value in loaded.named_buffers():
                if "merged" in name or "running" in name:
                    value.mul_(1.5)
            after = loaded(make_tokens(2, 20)).logits
            torch.testing.assert_close(after, copy.deepcopy(loaded)(make_tokens(2, 20)).logits, atol=1e-6, rtol=1e-6)
        assert (after - before).abs().max() > 1e-3


def test_threads_share_the_kernels_of_a_model():
    model = make_model(MRConvForCausalLM).double()
    lengths = [3, 9, 14, 20, 26, 33, 37] * 3
    expected = {length: predict(copy.deepcopy(model), make_tokens(1, length)) for length in set(lengths)}

    def work(seed: int) -> list[float]:
        order = torch.randperm(len(lengths), generator=generator(seed)).tolist()
        found = [(predict(model, make_tokens(1, lengths[index])), expected[lengths[index]]) for index in order]
        return [float((one - other).abs().max()) for one, other in found]

    with ThreadPoolExecutor(4) as pool:
        assert max(map(max, pool.map(work, range(4)))) <= 1e-10


OFFLOADED = {
    "branches": {},
    "two wings": {"bidirectional": True, "prenorm": False},
    "sparse": {"kernel_type": "fourier_sparse"},
    "kernel": {"kernel_type": "sparse", "branch_norm": "kernel"},
    "layer norm": {"branch_norm": "layer", "norm": "layer"},
}


@pytest.mark.parametrize(
    ("case", "merged", "buffers"),
    [*((case, False, False) for case in OFFLOADED), ("branches", True, True), ("two wings", True, False)],
)
def test_offloaded_weights_are_brought_in_and_changes_are_seen(case, merged, buffers):
    model = make_model(**TOKENS, **OFFLOADED[case])
    if merged:
        model.reparameterize()
    expected = predict(model)
    changed = copy.deepcopy(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    offloaded = accelerate.cpu_offload(model, torch.device("cpu"), offload_buffers=buffers, state_dict=state)
    assert {value.device.type for value in offloaded.parameters()} == {"meta"}
    for _ in range(2):
        torch.testing.assert_close(predict(offloaded), expected, atol=1e-6, rtol=1e-6)
    if not merged:
        # What the next call brings in is another kernel.
        for name in state:
            if "kernel" in name and "positions" not in name:
                state[name].mul_(1.5)
                changed.state_dict()[name].mul_(1.5)
        torch.testing.assert_close(predict(offloaded), predict(changed), atol=1e-6, rtol=1e-6)
    accelerate.hooks.remove_hook_from_module(offloaded, recurse=True)


def test_an_offloaded_model_is_not_merged():
    offloaded = accelerate.cpu_offload(make_model(), torch.device("cpu"))
    with refused(ValueError, "offloaded", "weights"):
        offloaded.reparameterize()
    assert not offloaded.config.reparameterized
    assert predict(offloaded).isfinite().all()
    # Nor where the last layer alone is.
    model = make_model()
    model.convolutions()[-1].to("meta")
    with refused(ValueError, "offloaded", len(model.convolutions()) - 1):
        model.reparameterize()
    assert not any(layer.reparameterized for layer in model.convolutions())
