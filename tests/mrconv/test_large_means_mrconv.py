"""Inputs with a large mean: float32 results and gradients against float64, and against N branches in float32."""

import copy

import pytest
import torch
from torch import Tensor

from hf_ext.fast import mrconv_gradients
from hf_ext.mrconv import MRConvConfig
from hf_ext.mrconv import ops_mrconv as ops
from hf_ext.mrconv.modeling_layers_mrconv import MRConvLayer
from tests.mrconv.operator_cases import batch_norm_branches, layer, layer_case, leaves

LENGTH = 16384
SPANS = {"full": None, "padded": [(0, LENGTH - 100), (300, LENGTH)]}


def signal(name: str, channels: int = 2) -> Tensor:
    """Numbers that float32 has exactly."""
    noise = torch.randn(2, channels, LENGTH, generator=torch.Generator().manual_seed(0))
    time = torch.linspace(0, 1, LENGTH).expand_as(noise)
    known = {
        "white": lambda: noise,
        "constant": lambda: torch.full_like(noise, 100.0),
        "mean 100": lambda: noise + 100,
        "mean 10000": lambda: noise + 10000,
        "ramp": lambda: time,
        "steep ramp": lambda: 1000 * time + 1000,
    }
    return known[name]()


def cast(case: dict, dtype: torch.dtype) -> dict:
    def convert(value):
        if isinstance(value, list):
            return [convert(item) for item in value]
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return value.detach().to(dtype).requires_grad_()

    return {name: convert(value) for name, value in case.items()}


def large_case(
    name: str, backward: int | None, spans: list[tuple[int, int]] | None, channels: int = 2
) -> tuple[dict, dict]:
    """The same numbers in float32 and in float64."""
    case = layer_case(2, LENGTH, 16, 10, backward, spans, channels=channels)
    case["u"] = signal(name, channels)
    for sample, (start, stop) in zip(case["u"], spans or [], strict=False):
        sample[:, :start], sample[:, stop:] = 0, 0
    single = cast(case, torch.float32)
    return single, cast(single, torch.float64)


def results(function, case: dict, spans: list[tuple[int, int]]) -> list[Tensor]:
    """Output and all gradients, zero where they are of no meaning."""
    inside = torch.zeros(case["u"].shape[0], 1, LENGTH, dtype=torch.bool)
    for row, (start, stop) in zip(inside, spans, strict=True):
        row[:, start:stop] = True
    y = torch.where(inside, function(case), 0)
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.dtype)
    g_u, *gradients = torch.autograd.grad((y * cotangent).sum(), leaves(case))
    return [y, torch.where(inside, g_u, 0), *gradients]


def errors(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    """Largest differences, relative to the largest value of each tensor."""
    pairs = zip(found, wanted, strict=True)
    return [((a.double() - b).abs().max() / b.abs().max()).item() for a, b in pairs]


@pytest.mark.parametrize(
    ("name", "backward", "spans"),
    [("constant", None, SPANS["full"]), ("mean 100", 16, SPANS["padded"]), ("mean 10000", 16, SPANS["full"])],
    ids=["constant", "mean 100", "mean 10000"],
)
def test_training_is_near_float64(name, backward, spans):
    single, double = large_case(name, backward, spans)
    spans = spans or [(0, LENGTH)] * 2
    wanted = results(lambda case: batch_norm_branches(case, spans), double, spans)
    found = results(lambda case: layer(case)[0], single, spans)
    assert [value.dtype for value in found] == [torch.float32] * len(found)
    assert max(errors(found, wanted)) < 1e-6


@pytest.mark.parametrize("name", ["white", "ramp", "steep ramp"])
def test_small_means_stay_in_float32_and_are_as_near_as_branches(name):
    """The kernel gradient of a ramp is a small difference of large ones, of which float32 branches know a digit."""
    single, double = large_case(name, None, None)
    spans = [(0, LENGTH)] * 2
    wanted = results(lambda case: batch_norm_branches(case, spans), double, spans)
    branches = errors(results(lambda case: batch_norm_branches(case, spans), single, spans), wanted)
    found = errors(results(lambda case: layer(case)[0], single, spans), wanted)
    assert found[0] < 5e-6
    assert max(found) < max(1.2 * max(branches), 5e-6)


def test_only_channels_with_a_large_mean_take_float64(monkeypatch):
    """They and those that are worked on with them, forward and backward."""
    begin, taken = mrconv_gradients.BatchNormLayer.branches, []

    def branches(*arguments):
        taken.append(begin(*arguments))
        return taken[-1]

    monkeypatch.setattr(mrconv_gradients.BatchNormLayer, "branches", branches)
    single, double = large_case("white", None, None, channels=50)
    for case in (single, double):
        case["u"].data[:, 49] += 1000
    spans = [(0, LENGTH)] * 2
    found = results(lambda case: layer(case)[0], single, spans)
    # Two parts; the second is tried in float32.
    float32, float64 = torch.float32, torch.float64
    assert [part.dtype for part in taken] == [float32, float32, float64, float32, float64]
    wanted = results(lambda case: layer(case)[0], double, spans)
    assert max(errors(found, wanted)) < 5e-6


@pytest.mark.parametrize(("mean", "bidirectional"), [(100.0, True), (10000.0, False)])
def test_evaluation_and_merged_inference_are_as_near_as_branches(bidirectional, mean):
    torch.manual_seed(0)
    sizes = {"hidden_size": 2, "num_hidden_layers": 1, "max_position_embeddings": LENGTH, "kernel_size": 16}
    trained = MRConvLayer(MRConvConfig(vocab_size=None, input_size=1, bidirectional=bidirectional, **sizes))
    trained.norm.momentum = 1.0
    u = signal("white") + mean
    start, stop = torch.tensor(SPANS["padded"]).mT
    trained(u, start, stop)
    trained.eval()
    merged, twin = copy.deepcopy(trained), copy.deepcopy(trained).double()
    merged.reparameterize()
    inside = (torch.arange(LENGTH) >= start[:, None]) & (torch.arange(LENGTH) < stop[:, None])
    with torch.no_grad():
        wanted = twin(u.double(), start, stop) * inside[:, None]
        kernels, ahead = trained.branch_kernels()
        scale, shift = trained.norm(trained.alpha)
        branches = torch.zeros_like(u)
        for index, kernel in enumerate(kernels):
            response = ops.long_conv(u * inside[:, None], kernel, None if ahead is None else ahead[index])
            branches += scale[index][:, None] * response + shift[index][:, None]
        found = [model(u, start, stop) * inside[:, None] for model in (trained, merged)]
    bound = max(2 * errors([branches * inside[:, None]], [wanted])[0], 2e-6)
    assert bound < 1e-5
    assert max(errors(found, [wanted] * 2)) < bound
