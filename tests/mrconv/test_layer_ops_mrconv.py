"""What MRConv's operators promise beside their values: memory, precision, chunks, compilation, export, processes."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hf_ext.fast import mrconv_gradients
from hf_ext.mrconv import MRConvConfig
from hf_ext.mrconv import ops_mrconv as ops
from hf_ext.mrconv.modeling_layers_mrconv import MRConvLayer
from tests.mrconv import mrconv_testing
from tests.mrconv.mrconv_testing import batch_norm_branches, layer, layer_and_norm, layer_case, leaves, random


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
        return layer(small) if function == "batch_norm_conv" else (ops.long_conv(small["u"], small["kernels"][3]),)

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
    assert found <= sum(x.nbytes for x in leaves(case)) + 3 * 7 * 3 * 8
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
    y, *statistics = layer(case)
    assert y.requires_grad and not any(value.requires_grad for value in statistics)
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
    alone, trained = (mrconv_testing.make_layer(hidden_size=3).train(training) for training in (False, True))
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
    case = mrconv_testing.shared_case(rank)
    with mrconv_testing.operators_in(form):
        found = layer_and_norm(case, dist.group.WORLD)
    return *found, (calls, len(list(mrconv_gradients.channel_chunks(case["u"], 64))))


@pytest.mark.parametrize(
    ("points", "form"),
    [(2**21, "fast"), *(pytest.param(400, form, marks=pytest.mark.slow) for form in ("fast", "plain"))],
)
def test_two_processes_equal_one_on_the_joined_batch(tmp_path, points, form):
    """Layer and block norm, with one collective forward and one backward, however many parts the channels have."""
    case = mrconv_testing.shared_case(None)
    results, gradients, norm = layer_and_norm(case)
    found = mrconv_testing.in_two_processes(tmp_path, results_of_a_share, points, form)
    found_results, found_gradients, found_norms, counts = zip(*found, strict=True)
    # What is outside of the valid positions has no meaning, and depends on the form.
    inside = case["u"] != 0
    first, *others = zip(*found_gradients, strict=True)
    pairs = [
        (torch.cat([each[0] for each in found_results]), results[0]),
        (torch.cat(first) * inside, gradients[0] * inside),
    ]
    pairs += [(sum(parts), joined) for parts, joined in zip(others, gradients[1:], strict=True)]
    pairs += [(torch.cat([each[place] for each in found_norms]), norm[place]) for place in range(2)]
    # Statistics are those of the joined batch in each process.
    pairs += [(each[1:], results[1:]) for each in found_results] + [(each[2:], norm[2:]) for each in found_norms]
    for one, joined in pairs:
        torch.testing.assert_close(one, joined, atol=1e-10, rtol=1e-10)
    # Three sums of five branches of 18 channels; the gradients of two of them, or of all in the plain form; and those
    # of the norm with its count.
    calls, parts = zip(*counts, strict=True)
    assert calls == ([3 * 5 * 18, (3 if form == "plain" else 2) * 5 * 18] + [2 * 18 + 1] * 2,) * 2
    assert parts == ((1, 1) if points > 400 else (6, 9))


# Inputs with a large mean: float32 results and gradients against float64, and against N branches in float32.
LENGTH = 16384
SPANS = {"full": None, "padded": [(0, LENGTH - 100), (300, LENGTH)]}


def signal(name: str, channels: int = 2) -> Tensor:
    """Numbers that float32 has exactly."""
    noise = torch.randn(2, channels, LENGTH, generator=torch.Generator().manual_seed(0))
    time = torch.linspace(0, 1, LENGTH).expand_as(noise)
    known = {"white": noise, "constant": torch.full_like(noise, 100.0), "mean 100": noise + 100}
    known |= {"mean 10000": noise + 10000, "ramp": time, "steep ramp": 1000 * time + 1000}
    return known[name]


def cast(case: dict, dtype: torch.dtype) -> dict:
    def convert(value):
        if isinstance(value, list):
            return [convert(item) for item in value]
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return value.detach().to(dtype).requires_grad_()

    return {name: convert(value) for name, value in case.items()}


def large_case(name: str, backward: int | None, spans: list | None, channels: int = 2) -> tuple[dict, dict]:
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
    assert [part.dtype.itemsize for part in taken] == [4, 4, 8, 4, 8]
    assert max(errors(found, results(lambda case: layer(case)[0], double, spans))) < 5e-6


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
