"""Fast MRConv operators against the textbook ones, and what the method promises about its kernels and statistics."""

import itertools

import pytest
import torch
from torch import Tensor

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
