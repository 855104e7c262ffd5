"""Fast MRConv operators against the textbook ones: values and gradients."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ext.fast import mrconv_gradients as ops_gradients
from hf_ext.mrconv import ops_mrconv as ops
from tests.kit.models import assert_operators_agree, operator_pairs
from tests.mrconv import reference_ops as reference
from tests.mrconv.mrconv_testing import batch_norm_branches, flat, layer_case, operators_in, random

PAIRS = operator_pairs(ops, reference)
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 4e-2}


def tap_cases():
    # Of one branch; two of unlike lengths; two taps at one place.
    for positions, lengths in (
        ([[[0], [0]]], [1]),
        ([[[0, 3], [1, 2]], [[6, 2], [0, 1]]], [5, 7]),
        ([[[2, 2, 0], [1, 0, 1]]], [3]),
    ):
        weight = random(len(positions), 2, len(positions[0][0]))
        yield {"weight": weight, "positions": torch.tensor(positions), "lengths": lengths}


def merge_cases():
    for taps in ((4, 8, 16), (1,), (3, 7), (5, 2)):
        kernels = [random(3, count, seed=count) for count in taps]
        yield {"kernels": kernels, "scales": random(len(taps), 3, seed=9)}


def spectrum_cases():
    for taps, backward, n in ((5, None, 8), (5, 3, 8), (1, None, 2), (3, 2, 15), (1, 1, 2)):
        wing = None if backward is None else random(3, backward, seed=1)
        yield {"kernel": random(3, taps), "backward_kernel": wing, "n": n}


def convolution_cases():
    sizes = [(2, 11, 5, None), (1, 12, 12, None), (3, 7, 20, None), (2, 1, 1, None), (2, 1, 4, 3), (2, 11, 3, 2)]
    for batch, length, taps, backward in [*sizes, (2, 10, 10, 9), (2, 9, 4, 30), (1, 6, 20, 20), (0, 5, 3, None)]:
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
    right, both = [(0, 29), (0, 13), (0, 1)], [(0, 29), (16, 29), (5, 20)]
    for spans in (right, both, [(0, 29)] * 3, [(3, 20), (7, 7), (28, 29)]):
        for backward in (None, 2):
            yield layer_case(3, 29, 2, 5, backward, spans)
    # One position of all, where gradients are differences of terms as large as 1 / sqrt(eps); none at all.
    yield {**layer_case(1, 1, 2, 2), "eps": 1e-3}
    yield layer_case(2, 9, 2, 3, spans=[(0, 0), (9, 9)])
    yield layer_case(0, 9, 2, 3)


def sum_cases():
    for case in layer_cases():
        u, kernels, wings = case["u"], case["kernels"], case.get("backward_kernels", [])
        if len(u):
            cropped, ahead, n = ops._crop_kernels(u, kernels, wings)
            yield {
                "u": u,
                "kernels": cropped,
                "wings": ahead,
                "n": n,
                "start": case.get("start"),
                "stop": case.get("stop"),
            }


def grouped_cases():
    for backward in (None, 3):
        case = {"backward_kernels": None, "group": None, **layer_case(1, 30, 2, 4, backward)}
        del case["u"]
        lengths = (30, 13, 2)
        inputs = [random(batch, 3, length, seed=length) for batch, length in zip((2, 1, 3), lengths, strict=True)]
        spans = [(None, None), (None, torch.tensor([13])), (torch.zeros(3, dtype=torch.long), None)]
        yield {"inputs": inputs, "spans": spans, **case}


POSITIONS = [(None, None), (None, [5, 0]), ([1, 4], [6, 4]), ([-2, 9], [8, 12])]
CASES = {
    "fft_size": lambda: [{"length": length} for length in [*range(1, 70), 719, 1025]],
    "convolution_size": lambda: [
        {"length": length, "taps": taps, "backward_taps": backward}
        for length, taps, backward in itertools.product((1, 2, 7, 30), (0, 1, 5, 40), (0, 1, 6, 40))
    ],
    "fourier_kernel": lambda: [
        {"modes": random(3, modes, 2), "length": length}
        for modes, length in ((1, 1), (3, 1), (3, 2), (3, 4), (3, 5), (5, 8), (5, 9), (2, 33))
    ],
    "tap_kernels": tap_cases,
    "merge_kernels": merge_cases,
    "kernel_spectrum": spectrum_cases,
    "long_conv": convolution_cases,
    "valid_positions": lambda: [
        {"u": random(2, 3, 7), "start": start and torch.tensor(start), "stop": stop and torch.tensor(stop)}
        for start, stop in POSITIONS
    ],
    "batch_norm_conv": layer_cases,
    "branch_sums": sum_cases,
    "grouped_batch_norm_conv": grouped_cases,
}


def assert_agree(name: str, case: dict, dtype: torch.dtype) -> None:
    fast, plain = PAIRS[name]
    call, arguments = flat(fast, case)
    assert_operators_agree(call, flat(plain, case)[0], arguments, dtype, TOLERANCES[dtype])


def test_every_operator_has_cases():
    assert CASES.keys() == PAIRS.keys()


FORMS = {*ops.FAST, "grouped_batch_norm_conv"}
WITH_FORMS = [(name, form) for name in CASES for form in (("fast", "plain") if name in FORMS else ("plain",))]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("name", "form"), WITH_FORMS)
def test_operator_equals_its_reference(name, form, dtype):
    with operators_in(form):
        for case in CASES[name]():
            assert_agree(name, case, dtype)


def gradients_of(function):
    """Gradients of all inputs, of which a graph is made."""

    def call(**given):
        results = function(**given)
        values = [y for y in (results if isinstance(results, tuple) else (results,)) if y.requires_grad]
        inputs = [x for x in given.values() if isinstance(x, torch.Tensor) and x.requires_grad]
        total = sum(y.sin().sum() for y in values)
        return torch.autograd.grad(total, inputs, create_graph=True, allow_unused=True, materialize_grads=True)

    return call


@pytest.mark.parametrize("points", [ops_gradients.POINTS_CPU, 40], ids=["whole", "chunks"])
@pytest.mark.parametrize("name", sorted(FORMS & CASES.keys()))
def test_second_derivatives_of_fast_forms_equal_the_reference(name, points, monkeypatch):
    monkeypatch.setattr(ops_gradients, "POINTS_CPU", points)
    for case in CASES[name]():
        fast, plain = (gradients_of(flat(form, case)[0]) for form in PAIRS[name])
        assert_operators_agree(fast, plain, flat(fast, case)[1], torch.float64, 1e-9)


@settings(max_examples=25)
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 41),
    taps=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=4),
    bidirectional=st.booleans(),
    form=st.sampled_from(["fast", "plain"]),
    data=st.data(),
)
def test_layer_equals_its_reference_at_any_length_and_kernels(batch, length, taps, bidirectional, form, data):
    """Kernels in any order of length, formed and not; any valid positions, empty ones too."""
    case = layer_case(batch, length, 1, 0, channels=2)
    case["kernels"] = [random(2, past, seed=i) for i, (past, _) in enumerate(taps)]
    if bidirectional:
        ahead = [random(2, ahead, seed=9 + i, gradient=length > 1) for i, (_, ahead) in enumerate(taps)]
        case["backward_kernels"] = ahead
    for seed, name in enumerate(("alpha", "weight", "bias")):
        case[name] = random(len(taps), 2, seed=seed)
    ends = st.lists(st.integers(0, length), min_size=batch, max_size=batch)
    case["start"], case["stop"] = torch.tensor(data.draw(ends)), torch.tensor(data.draw(ends))
    outside = (torch.arange(length) < case["start"][:, None]) | (torch.arange(length) >= case["stop"][:, None])
    case["u"] = case["u"].detach().masked_fill(outside[:, None], 0).requires_grad_()
    # Gradients are differences of terms as large as 1 / sqrt(eps).
    case["eps"] = 1e-2
    with operators_in(form):
        assert_agree("batch_norm_conv", case, torch.float64)


@pytest.mark.parametrize(
    ("spans", "backward", "dtype"),
    [(None, None, torch.float32), ([(0, 1009), (17, 1009), (0, 700)], 3, torch.float64)],
    ids=["full", "padded"],
)
@pytest.mark.parametrize("form", ["fast", "plain"])
def test_layer_equals_batch_norms_of_branches(form, spans, backward, dtype):
    """Outputs and all gradients, at a length where most branches are not formed."""
    case = layer_case(3, 1009, 8, 8, backward, spans)
    function = flat(ops.batch_norm_conv, case)[0]
    spans = spans or [(0, 1009)] * 3
    inside = torch.zeros(3, 1, 1009, dtype=torch.float64)
    for sample, (start, stop) in zip(inside, spans, strict=True):
        sample[:, start:stop] = 1
    plain, arguments = flat(lambda **given: batch_norm_branches(given, spans), case)
    with operators_in(form):
        found = lambda **given: function(**given)[0] * inside  # noqa: E731
        assert_operators_agree(found, plain, arguments, dtype, TOLERANCES[dtype])
