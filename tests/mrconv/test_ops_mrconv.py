"""Fast MRConv operators against the textbook ones, and what the method promises about its kernels and statistics."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_ext.mrconv import kernels_sums_mrconv as sums
from hf_ext.mrconv import ops_mrconv as ops
from hf_ext.mrconv import reference_mrconv as reference
from tests.testing import assert_operators_agree, operator_pairs

PAIRS = operator_pairs(ops, reference)
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 4e-2}


def random(*shape: int, seed: int = 0, gradient: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(gradient)


def branch_kernels(count: int, channels: int, first: int, seed: int = 0, longest: int | None = None) -> list[Tensor]:
    """Kernels of unit norm, each twice as long as the one before."""
    taps = [min(first << i, longest or first << i) for i in range(count)]
    return [
        (random(channels, length, seed=seed + i, gradient=False) / length**0.5).requires_grad_()
        for i, length in enumerate(taps)
    ]


def layer_case(
    batch: int,
    length: int,
    first: int,
    count: int,
    backward: int | None = None,
    spans: list[tuple[int, int]] | None = None,
    channels: int = 3,
    mean: float = 0.5,
) -> dict:
    """Arguments of `batch_norm_conv`; `spans` are the valid positions of each sample."""
    u = random(batch, channels, length, seed=1, gradient=False) + mean
    case = {
        "kernels": branch_kernels(count, channels, first, seed=10),
        "alpha": random(count, channels, seed=2),
        "weight": random(count, channels, seed=3),
        "bias": random(count, channels, seed=4),
        "eps": 1e-5,
    }
    if backward is not None:
        wings = branch_kernels(count, channels, backward, seed=30)
        # With a single sample the future has no effect, and the textbook form no gradient.
        case["backward_kernels"] = wings if length > 1 else [wing.detach() for wing in wings]
    if spans is not None:
        case["start"], case["stop"] = torch.tensor(spans).mT
        for sample, (start, stop) in zip(u, spans, strict=True):
            sample[:, :start], sample[:, stop:] = 0, 0
    return {"u": u.requires_grad_(), **case}


def size_cases():
    yield from ({"length": length} for length in [*range(1, 70), 719, 1025])


def convolution_size_cases():
    for length, taps, backward in itertools.product((1, 2, 7, 30), (0, 1, 5, 40), (0, 1, 6, 40)):
        yield {"length": length, "taps": taps, "backward_taps": backward}


def dilated_cases():
    for taps, dilation, length in ((4, 1, 4), (4, 3, 10), (4, 3, 13), (5, 2, 3), (1, 4, 1), (3, 4, 1)):
        yield {"weight": random(3, taps), "dilation": dilation, "length": length}


def fourier_cases():
    for modes, length in ((1, 1), (3, 1), (3, 2), (3, 4), (3, 5), (5, 8), (5, 9), (2, 33)):
        yield {"modes": random(3, modes, 2), "length": length}


def sparse_cases():
    for positions, length in (([[0, 3], [1, 2]], 5), ([[2, 2, 0], [1, 0, 1]], 3), ([[0], [0]], 1)):
        yield {"weight": random(2, len(positions[0])), "positions": torch.tensor(positions), "length": length}


def merge_cases():
    for taps in ((4, 8, 16), (1,), (3, 7), (5, 2)):
        kernels = [random(3, count, seed=count) for count in taps]
        yield {"kernels": kernels, "scales": random(len(taps), 3, seed=9)}


def spectrum_cases():
    for taps, backward, n in ((5, None, 8), (5, 3, 8), (1, None, 2), (3, 2, 15), (1, 1, 2)):
        wing = None if backward is None else random(3, backward, seed=1)
        yield {"kernel": random(3, taps), "backward_kernel": wing, "n": n}


def convolution_cases():
    for batch, length, taps, backward in (
        (2, 11, 5, None),
        (1, 12, 12, None),
        (3, 7, 20, None),
        (2, 1, 1, None),
        (2, 1, 4, 3),
        (2, 11, 3, 2),
        (2, 10, 10, 9),
        (2, 9, 4, 30),
        (1, 6, 20, 20),
        (0, 5, 3, None),
    ):
        # With a single sample the future has no effect, and the textbook form no gradient.
        wing = None if backward is None else random(3, backward, seed=2, gradient=length > 1)
        yield {"u": random(batch, 3, length), "kernel": random(3, taps, seed=1), "backward_kernel": wing}
    yield {"u": random(2, 3, 9), "kernel": random(3, 4, seed=1), "bias": random(3, seed=2)}
    # The spectrum was computed before; the kernels then only tell the size.
    kernel = random(3, 5, seed=1)
    for n in (16, 20):
        spectrum = reference.kernel_spectrum(kernel.detach(), None, n)
        yield {"u": random(2, 3, 11), "kernel": kernel, "backward_kernel": None, "spectrum": spectrum}


def layer_cases():
    for batch, length, first, count in ((2, 32, 4, 4), (3, 37, 3, 5), (9, 1, 1, 1), (9, 1, 4, 2), (3, 5, 16, 1)):
        for backward in (None, first):
            yield layer_case(batch, length, first, count, backward)
    # A backward kernel that is longer, shorter.
    yield layer_case(2, 23, 2, 4, backward=3)
    yield layer_case(2, 23, 3, 3, backward=1)
    # Padding on the left, on the right, on both sides; nobody padded; an empty sample.
    for spans in (
        [(0, 29), (0, 13), (0, 1)],
        [(0, 29), (16, 29), (5, 20)],
        [(0, 29)] * 3,
        [(3, 20), (7, 7), (28, 29)],
    ):
        for backward in (None, 2):
            yield layer_case(3, 29, 2, 5, backward, spans)
    # One position of all, where gradients are differences of terms as large as 1 / sqrt(eps); none at all.
    yield {**layer_case(1, 1, 2, 2), "eps": 1e-3}
    yield layer_case(2, 9, 2, 3, spans=[(0, 0), (9, 9)])
    yield layer_case(0, 9, 2, 3)


CASES = {
    "fft_size": size_cases,
    "convolution_size": convolution_size_cases,
    "dilated_kernel": dilated_cases,
    "fourier_kernel": fourier_cases,
    "sparse_kernel": sparse_cases,
    "merge_kernels": merge_cases,
    "kernel_spectrum": spectrum_cases,
    "long_conv": convolution_cases,
    "batch_norm_conv": layer_cases,
}


def flat(function, case: dict):
    """The function and its arguments with the tensors of its lists as arguments of their own, which are compared."""
    lists = {name: value for name, value in case.items() if isinstance(value, list)}
    arguments = {name: value for name, value in case.items() if name not in lists}
    arguments |= {f"{name} {i}": value for name, values in lists.items() for i, value in enumerate(values)}

    def call(**given):
        gathered = {name: [given.pop(f"{name} {i}") for i in range(len(values))] for name, values in lists.items()}
        # u is zero outside of the valid positions, and so is what of its gradient is used.
        if case.get("start") is not None:
            time = torch.arange(given["u"].shape[2])
            inside = (time >= case["start"][:, None]) & (time < case["stop"][:, None])
            given["u"] = given["u"] * inside[:, None]
        result = function(**gathered, **given)
        if isinstance(result, int):
            return torch.tensor(result)
        return torch.view_as_real(result) if isinstance(result, Tensor) and result.is_complex() else result

    return call, arguments


def assert_agree(name: str, case: dict, dtype: torch.dtype) -> None:
    fast, plain = PAIRS[name]
    call, arguments = flat(fast, case)
    assert_operators_agree(call, flat(plain, case)[0], arguments, dtype, TOLERANCES[dtype])


def test_every_operator_has_cases():
    assert CASES.keys() == PAIRS.keys()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_operator_equals_its_reference(name, dtype):
    for case in CASES[name]():
        assert_agree(name, case, dtype)


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 41),
    taps=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=4),
    bidirectional=st.booleans(),
    data=st.data(),
)
def test_layer_equals_its_reference_at_any_length_and_kernels(batch, length, taps, bidirectional, data):
    """Kernels in any order of length, formed and not; any valid positions, empty ones too."""
    case = layer_case(batch, length, 1, 0, channels=2)
    case["kernels"] = [random(2, past, seed=i) for i, (past, _) in enumerate(taps)]
    if bidirectional:
        gradient = length > 1
        case["backward_kernels"] = [
            random(2, ahead, seed=9 + i, gradient=gradient) for i, (_, ahead) in enumerate(taps)
        ]
    for seed, name in enumerate(("alpha", "weight", "bias")):
        case[name] = random(len(taps), 2, seed=seed)
    ends = st.lists(st.integers(0, length), min_size=batch, max_size=batch)
    case["start"], case["stop"] = torch.tensor(data.draw(ends)), torch.tensor(data.draw(ends))
    outside = (torch.arange(length) < case["start"][:, None]) | (torch.arange(length) >= case["stop"][:, None])
    case["u"] = case["u"].detach().masked_fill(outside[:, None], 0).requires_grad_()
    # Gradients are differences of terms as large as 1 / sqrt(eps).
    case["eps"] = 1e-2
    assert_agree("batch_norm_conv", case, torch.float64)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 60), st.integers(1, 80), st.integers(0, 80))
def test_convolution_equals_its_reference_at_any_length(length, taps, backward):
    wing = random(2, backward, seed=2, gradient=length > 1) if backward else None
    case = {"u": random(2, 2, length), "kernel": random(2, taps, seed=1), "backward_kernel": wing}
    assert_agree("long_conv", case, torch.float64)


def batch_norm_branches(case: dict, spans: list[tuple[int, int]]) -> Tensor:
    """N branches, each formed by FFT and passed through torch.nn.BatchNorm1d; zero outside of the valid positions."""
    u, wings = case["u"], case.get("backward_kernels", [None] * len(case["kernels"]))
    length, y = u.shape[2], torch.zeros_like(u)
    for i, (kernel, wing) in enumerate(zip(case["kernels"], wings, strict=True)):
        factors = ops.kernel_spectrum(kernel[:, :length], None if wing is None else wing[:, : length - 1], 2 * length)
        branch = torch.fft.irfft(torch.fft.rfft(u, 2 * length) * factors, 2 * length)[..., :length]
        valid = torch.cat([sample[:, a:b] for sample, (a, b) in zip(branch, spans, strict=True)], dim=1)
        normed = F.batch_norm(valid[None], None, None, case["weight"][i], case["bias"][i], True, 0.0, case["eps"])[0]
        parts = normed.split([b - a for a, b in spans], dim=1)
        padded = [F.pad(part, (a, length - b)) for part, (a, b) in zip(parts, spans, strict=True)]
        y = y + case["alpha"][i, :, None] * torch.stack(padded)
    return y


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("backward", [None, 3])
@pytest.mark.parametrize("spans", [None, [(0, 1009), (17, 1009), (0, 700)]], ids=["full", "padded"])
def test_layer_equals_batch_norms_of_branches(spans, backward, dtype, monkeypatch):
    """Outputs and all gradients, at a length where most branches are not formed, and in several chunks of channels."""
    monkeypatch.setattr(sums, "_POINTS_CPU", 2 * 3 * 2048)
    case = layer_case(3, 1009, 8, 8, backward, spans)
    function = flat(ops.batch_norm_conv, case)[0]
    spans = spans or [(0, 1009)] * 3
    inside = torch.zeros(3, 1, 1009, dtype=torch.float64)
    for sample, (start, stop) in zip(inside, spans, strict=True):
        sample[:, start:stop] = 1
    plain, arguments = flat(lambda **given: batch_norm_branches(given, spans), case)
    assert_operators_agree(
        lambda **given: function(**given)[0] * inside,
        lambda **given: plain(**given),
        arguments,
        dtype,
        TOLERANCES[dtype],
    )


def layer(case: dict) -> tuple[Tensor, ...]:
    return ops.batch_norm_conv(**case)


def leaves(case: dict) -> list[Tensor]:
    values = [x for value in case.values() for x in (value if isinstance(value, list) else [value])]
    return [x for x in values if isinstance(x, Tensor) and x.requires_grad]


@pytest.mark.parametrize("backward", [None, 2])
def test_gradcheck(backward):
    case = {**layer_case(2, 12, 2, 3, backward, spans=[(0, 12), (2, 10)], channels=1), "eps": 1e-2}
    kernels = [name for name in ("kernels", "backward_kernels") if name in case]
    inside = (case["u"] != 0).detach()

    def function(u, alpha, weight, bias, *flat_kernels):
        lists = dict(zip(kernels, (flat_kernels[:3], flat_kernels[3:]), strict=False))
        given_case = {**case, **lists, "u": u * inside, "alpha": alpha, "weight": weight, "bias": bias}
        return layer(given_case)[0]

    inputs = [case[name] for name in ("u", "alpha", "weight", "bias")] + [k for name in kernels for k in case[name]]
    assert torch.autograd.gradcheck(function, inputs)
    wing = None if backward is None else case["backward_kernels"][0]
    assert torch.autograd.gradcheck(ops.long_conv, (case["u"], case["kernels"][1], wing))


def test_gradients_of_tensors_used_twice_add_up():
    case = layer_case(2, 20, 2, 3)
    shared = {**case, "kernels": [case["kernels"][0]] * 3}
    y = layer(shared)[0] + layer({**shared, "weight": case["alpha"]})[0]
    wanted = PAIRS["batch_norm_conv"][1](**shared)[0]
    wanted = wanted + PAIRS["batch_norm_conv"][1](**{**shared, "weight": case["alpha"]})[0]
    inputs = [case["u"], case["kernels"][0], case["alpha"]]
    for found, expected in zip(
        torch.autograd.grad(y.sin().sum(), inputs), torch.autograd.grad(wanted.sin().sum(), inputs), strict=True
    ):
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)


def test_chunks_and_strides_do_not_matter(monkeypatch):
    u, kernel, wing = random(2, 7, 30), random(7, 12, seed=1), random(7, 5, seed=2)
    strided = u.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    whole = ops.long_conv(u, kernel, wing)
    expected = torch.autograd.grad(whole.sin().sum(), (u, kernel, wing))
    monkeypatch.setattr(sums, "_POINTS_CPU", 300)
    assert len(list(sums.channel_chunks(u, 64))) == 4
    parts = ops.long_conv(strided, kernel, wing)
    found = torch.autograd.grad(parts.sin().sum(), (strided, kernel, wing))
    torch.testing.assert_close((parts, *found), (whole, *expected), atol=1e-12, rtol=0)


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


def test_layer_saves_its_input_and_kernels_only():
    """An eighth of what one saves by forming the branches."""

    def saved(function, case):
        storages = {}

        def pack(x):
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            function(case)
        return sum(storages.values())

    case = layer_case(16, 512, 8, 7)
    found, branches = saved(layer, case), saved(lambda given: batch_norm_branches(given, [(0, 512)] * 16), case)
    parameters = sum(x.nbytes for x in leaves(case))
    assert found <= parameters + 2 * 7 * 3 * 8 + 8
    assert found < branches / 8


def test_statistics_have_no_gradient_and_nothing_is_saved_without_one():
    case = layer_case(2, 20, 2, 3)
    y, mean, var, count = layer(case)
    assert y.requires_grad
    assert not (mean.requires_grad or var.requires_grad or count.requires_grad)
    with torch.no_grad():
        torch.testing.assert_close(layer(case)[0], y, atol=0, rtol=0)


def test_variance_of_a_large_mean():
    """The variance of formed branches is that around the mean; for the others, float32 inputs limit it."""
    case = layer_case(4, 4000, 8, 10, mean=3.0)
    single = {
        name: [x.detach().float() for x in value] if isinstance(value, list) else value.detach().float()
        for name, value in case.items()
        if name != "eps"
    }
    for found, wanted in zip(layer({**single, "eps": 1e-5}), layer(case), strict=True):
        torch.testing.assert_close(found.double(), wanted, atol=1e-5 * wanted.abs().max().item(), rtol=0)


def test_compiled_layer_falls_back_and_convolution_is_one_graph():
    case = layer_case(2, 33, 4, 4)
    torch._dynamo.reset()
    compiled = torch.compile(lambda u: layer({**case, "u": u})[0].sin(), backend="aot_eager")
    expected = layer(case)[0].sin()
    found = compiled(case["u"])
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    gradients = [torch.autograd.grad(y.sum(), case["u"])[0] for y in (found, expected)]
    torch.testing.assert_close(*gradients, atol=1e-10, rtol=0)
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
    one = torch.ones(1, 3)
    for message, call in {
        "at least one point": lambda: ops.fft_size(0),
        "at least one sample apart": lambda: ops.dilated_kernel(kernel, 0, 5),
        "real and imaginary part": lambda: ops.fourier_kernel(kernel, 5),
        "does not fit an FFT": lambda: ops.kernel_spectrum(kernel, kernel, 6),
        "length >= 1": lambda: ops.long_conv(u[..., :0], kernel),
        "with the 3 channels": lambda: ops.long_conv(u, kernel[:2]),
        "needs a spectrum at n >= 16": lambda: ops.long_conv(u, kernel, spectrum=spectrum),
        "at least one branch": lambda: ops.merge_kernels([], one),
        "need coefficients of shape": lambda: ops.batch_norm_conv(u, [kernel] * 2, one, one, one, 1e-5),
        "as many backward kernels": lambda: ops.batch_norm_conv(
            u, [kernel], one, one, one, 1e-5, backward_kernels=[kernel] * 2
        ),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


PROCESS = """
import sys
import torch
import torch.distributed as dist
from tests.mrconv.test_ops_mrconv import layer, leaves, shared_case

torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/meeting", rank=int(sys.argv[2]), world_size=2)
case = shared_case(int(sys.argv[2]))
results = layer({**case, "group": dist.group.WORLD})
cotangent = torch.linspace(-1, 1, results[0][0].numel(), dtype=torch.float64).view_as(results[0][0])
gradients = torch.autograd.grad(results[0], leaves(case), cotangent.expand_as(results[0]).sin())
torch.save((results, gradients), f"{sys.argv[1]}/result{sys.argv[2]}")
dist.destroy_process_group()
"""


def shared_case(rank: int | None) -> dict:
    """The share of one of two processes, which have unequal numbers of samples; None: the joined batch."""
    case = layer_case(5, 29, 2, 5, 2, [(0, 29), (0, 13), (0, 0), (16, 29), (5, 20)], channels=18)
    if rank is not None:
        share = slice(0, 2) if rank == 0 else slice(2, 5)
        case |= {name: case[name].detach()[share] for name in ("u", "start", "stop")}
        case["u"].requires_grad_()
    return case


def test_two_processes_equal_one_on_the_joined_batch(tmp_path):
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", PROCESS, str(tmp_path)]
    processes = [subprocess.Popen([*command, str(rank)], cwd=root, env=environment) for rank in range(2)]
    case = shared_case(None)
    results = layer(case)
    cotangent = torch.linspace(-1, 1, results[0][0].numel(), dtype=torch.float64).view_as(results[0][0])
    gradients = torch.autograd.grad(results[0], leaves(case), cotangent.expand_as(results[0]).sin())
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    (first, first_gradients), (second, second_gradients) = (
        torch.load(tmp_path / f"result{rank}") for rank in range(2)
    )
    compare = {"atol": 1e-10, "rtol": 1e-10}
    torch.testing.assert_close(torch.cat([first[0], second[0]]), results[0], **compare)
    for statistics in (first[1:], second[1:]):
        torch.testing.assert_close(statistics, results[1:], **compare)
    torch.testing.assert_close(torch.cat([first_gradients[0], second_gradients[0]]), gradients[0], **compare)
    for one, other, joined in zip(first_gradients[1:], second_gradients[1:], gradients[1:], strict=True):
        torch.testing.assert_close(one + other, joined, **compare)
