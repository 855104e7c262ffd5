"""What MRConv's operators promise beside their values: memory, precision, chunks, compilation, export, processes."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hf_ext.fast import mrconv_gradients
from hf_ext.mrconv import ops_mrconv as ops
from tests.mrconv.mrconv_testing import in_two_processes, make_layer
from tests.mrconv.operator_cases import (
    batch_norm_branches,
    layer,
    layer_and_norm,
    layer_case,
    leaves,
    operators_in,
    random,
    shared_case,
)


def test_chunks_and_strides_do_not_matter():
    """Long inputs, of which some channels are worked on at a time: each is as if it were alone."""
    length = 2**19
    u, kernel, wing = random(1, 7, length), random(7, 12, seed=1), random(7, 5, seed=2)
    assert len(list(mrconv_gradients.channel_chunks(u, length))) > 1
    strided = u.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    given = (strided, kernel, wing)
    parts = ops.long_conv(*given)
    found = torch.autograd.grad(parts.sin().sum(), given)
    for channel in (0, 3, 6):
        alone = [u[:, [channel]], kernel[[channel]], wing[[channel]]]
        whole = ops.long_conv(*alone)
        expected = torch.autograd.grad(whole.sin().sum(), alone)
        here = (parts[:, [channel]], found[0][:, [channel]], found[1][[channel]], found[2][[channel]])
        torch.testing.assert_close(here, (whole, *expected), atol=1e-10, rtol=1e-12)


def test_a_layer_in_chunks_is_the_layer_of_each_channel():
    case = layer_case(4, 1009, 8, 8, 3, [(0, 1009), (17, 1009), (0, 700), (5, 6)], channels=300)
    assert len(list(mrconv_gradients.channel_chunks(case["u"], 2017))) > 1
    whole = layer(case)
    gradients = torch.autograd.grad(whole[0].sin().sum(), leaves(case))
    for part in (slice(0, 3), slice(298, 300)):

        def take(value, part=part):
            if isinstance(value, list):
                return [kernel[part] for kernel in value]
            return value[:, part] if isinstance(value, Tensor) and value.is_floating_point() else value

        few = {name: take(value) for name, value in case.items()}
        results = layer(few)
        torch.testing.assert_close([x[:, part] for x in whole[:3]], list(results[:3]), atol=1e-12, rtol=1e-12)
        wanted = torch.autograd.grad(results[0].sin().sum(), leaves(few))
        # What is summed over channels is not; kernels have the channel first.
        here = [g[part] if g.shape[0] == 300 else g[:, part] for g in gradients]
        torch.testing.assert_close(here, list(wanted), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("function", ["long_conv", "batch_norm_conv"])
def test_under_autocast_ffts_and_statistics_stay_in_float32(function):
    case = layer_case(2, 50, 4, 4)
    small = {name: value.detach().bfloat16() if isinstance(value, Tensor) else value for name, value in case.items()}
    small["kernels"] = [kernel.detach().bfloat16().requires_grad_() for kernel in case["kernels"]]
    small["u"].requires_grad_()

    def call():
        if function == "long_conv":
            return (ops.long_conv(small["u"], small["kernels"][3]),)
        return layer(small)

    results = call()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        automatic = call()
        gradients = torch.autograd.grad(automatic[0].float().sum(), [small["u"], small["kernels"][3]])
    assert results[0].dtype == torch.bfloat16
    assert all(result.dtype == torch.float32 for result in results[1:])
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16] * 2
    torch.testing.assert_close(automatic, results, atol=0, rtol=0)


def test_layer_saves_its_input_and_kernels_only(monkeypatch):
    """An eighth of what one saves by forming the branches; of a small input also spectra."""

    def saved(function, case):
        storages = {}

        def pack(x):
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            function(case)
        return sum(storages.values())

    case = layer_case(16, 512, 8, 7)
    small = saved(layer, case)
    monkeypatch.setattr(mrconv_gradients, "KEPT_POINTS", 0)
    found, branches = saved(layer, case), saved(lambda given: batch_norm_branches(given, [(0, 512)] * 16), case)
    parameters = sum(x.nbytes for x in leaves(case))
    assert found <= parameters + 3 * 7 * 3 * 8
    assert found < branches / 8
    assert found < small < branches / 2


@pytest.mark.parametrize("backward", [None, 5])
def test_what_is_kept_changes_nothing(backward, monkeypatch):
    """Formed in the backward pass again, kept, and kept for two backward passes."""
    case = layer_case(3, 200, 4, 7, backward, [(0, 200), (7, 200), (0, 150)])
    found, kept = [], mrconv_gradients.KEPT_POINTS
    for points in (0, kept, kept):
        monkeypatch.setattr(mrconv_gradients, "KEPT_POINTS", points)
        y = layer(case)[0].sin().sum()
        if len(found) == 2:
            torch.autograd.grad(y, leaves(case), retain_graph=True)
        found.append(torch.autograd.grad(y, leaves(case)))
    for one in found[1:]:
        torch.testing.assert_close(one, found[0], atol=1e-13, rtol=1e-13)


def test_statistics_have_no_gradient_and_nothing_is_saved_without_one():
    case = layer_case(2, 20, 2, 3)
    y, mean, var, count = layer(case)
    assert y.requires_grad
    assert not (mean.requires_grad or var.requires_grad or count.requires_grad)
    with torch.no_grad():
        torch.testing.assert_close(layer(case)[0], y, atol=0, rtol=0)


@pytest.mark.parametrize("plain", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["fast", "plain"])
def test_compiled_layer_and_convolution_are_one_graph_each(plain, monkeypatch):
    if plain:
        monkeypatch.setattr(ops, "FAST", {})
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    # The second has another length, for which a graph of any length is made.
    for length in (33, 40):
        case = layer_case(2, length, 4, 3, 2, [(0, length), (4, 30)])
        found, expected = compiled(case), layer(case)
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
        gradients = [torch.autograd.grad(results[0].sin().sum(), leaves(case)) for results in (found, expected)]
        torch.testing.assert_close(*gradients, atol=1e-10, rtol=0)
    case = layer_case(2, 33, 4, 4)
    convolve = torch.compile(ops.long_conv, backend="aot_eager", fullgraph=True)
    kernel = case["kernels"][1]
    torch.testing.assert_close(convolve(case["u"], kernel), ops.long_conv(case["u"], kernel), atol=1e-12, rtol=0)


class Convolution(torch.nn.Module):
    def __init__(self, kernel: Tensor, wing: Tensor):
        super().__init__()
        self.kernel, self.wing = torch.nn.Parameter(kernel), torch.nn.Parameter(wing)

    def forward(self, u: Tensor) -> Tensor:
        return ops.long_conv(u, self.kernel, self.wing, bias=self.kernel[:, 0])


def test_convolution_is_exported_for_any_length():
    model = Convolution(random(3, 40, gradient=False), random(3, 7, seed=1, gradient=False))
    sizes = {"u": {0: torch.export.Dim("batch", max=8), 2: torch.export.Dim("length", max=512)}}
    exported = torch.export.export(model, (random(2, 3, 60, gradient=False),), dynamic_shapes=sizes).module()
    for length in (1, 7, 39, 41, 200):
        u = random(3, 3, length, gradient=False)
        torch.testing.assert_close(exported(u), model(u), atol=1e-12, rtol=0)


def test_bad_input():
    u, kernel = random(2, 3, 10), random(3, 4)
    spectrum = ops.kernel_spectrum(kernel, None, 12)
    alone, trained = make_layer(hidden_size=3), make_layer(hidden_size=3).train()
    for message, call in {
        "does not fit an FFT": lambda: ops.kernel_spectrum(kernel, kernel, 6),
        "length >= 1": lambda: ops.long_conv(u[..., :0], kernel),
        "with the 3 channels": lambda: ops.long_conv(u, kernel[:2]),
        "needs a spectrum at n >= 16": lambda: ops.long_conv(u, kernel, spectrum=spectrum),
        r"with the 2 channels .* got \(3,": lambda: alone(u[:, :2].float()),
        r"length >= 1, got shape \(2, 3, 0\)": lambda: trained(u[..., :0].float()),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


def results_of_a_share(rank: int, points: str, form: str) -> tuple:
    """The layer's results and gradients, those of the norm, the size of each collective, and parts of the channels."""
    warnings.simplefilter("error")
    calls, all_reduce = [], dist.all_reduce

    def counted(values, *arguments, **options):
        calls.append(values.numel())
        return all_reduce(values, *arguments, **options)

    dist.all_reduce = counted
    mrconv_gradients.POINTS_CPU = int(points)
    case = shared_case(rank)
    with operators_in(form):
        found = layer_and_norm(case, dist.group.WORLD)
    return *found, (calls, len(list(mrconv_gradients.channel_chunks(case["u"], 64))))


@pytest.mark.parametrize(
    ("points", "form"),
    [
        (2**21, "fast"),
        pytest.param(400, "fast", marks=pytest.mark.slow),
        pytest.param(400, "plain", marks=pytest.mark.slow),
    ],
    ids=["one part", "parts", "plain"],
)
def test_two_processes_equal_one_on_the_joined_batch(tmp_path, points, form):
    """Layer and block norm, with one collective forward and one backward, however many parts the channels have."""
    case = shared_case(None)
    results, gradients, norm = layer_and_norm(case)
    (first, first_gradients, first_norm, counts), (second, second_gradients, second_norm, second_counts) = (
        in_two_processes(tmp_path, results_of_a_share, points, form)
    )
    compare = {"atol": 1e-10, "rtol": 1e-10}
    torch.testing.assert_close(torch.cat([first[0], second[0]]), results[0], **compare)
    for statistics in (first[1:], second[1:]):
        torch.testing.assert_close(statistics, results[1:], **compare)
    # What is outside of the valid positions has no meaning, and depends on the form.
    inside = case["u"] != 0
    g_u = torch.cat([first_gradients[0], second_gradients[0]])
    torch.testing.assert_close(g_u * inside, gradients[0] * inside, **compare)
    for one, other, joined in zip(first_gradients[1:], second_gradients[1:], gradients[1:], strict=True):
        torch.testing.assert_close(one + other, joined, **compare)
    # Three sums of five branches of 18 channels; the gradients of two of them, or of all in the plain form; and those
    # of the norm with its count.
    layer_calls, norm_calls = [3 * 5 * 18, 2 * 5 * 18], [2 * 18 + 1] * 2
    if form == "plain":
        layer_calls = [3 * 5 * 18] * 2
    assert [counts[0], second_counts[0]] == [layer_calls + norm_calls] * 2
    assert (counts[1], second_counts[1]) == ((1, 1) if points > 400 else (6, 9))
    for found, joined in zip(zip(first_norm[:2], second_norm[:2], strict=True), norm[:2], strict=True):
        torch.testing.assert_close(torch.cat(found), joined, **compare)
    for statistics in (first_norm[2:], second_norm[2:]):
        torch.testing.assert_close(statistics, norm[2:], **compare)
