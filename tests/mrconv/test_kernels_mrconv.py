"""Configurations; kernels of the branches: sizes, counts, first values, the equations, another sampling rate."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from hf_ext.mrconv import MRConvConfig, ops_mrconv
from hf_ext.mrconv.configuration_mrconv import KERNEL_TYPES, branch_lengths, changed_lengths
from hf_ext.mrconv.kernels_mrconv import KERNELS
from tests.kit.models import ConfigTesterMixin
from tests.kit.refusals import refused

CHANNELS = 3


def make_kernel(kernel_type: str, ahead: bool = False, length: int = 40, seed: int = 0, **fields):
    torch.manual_seed(0)
    fields = {"kernel_size": 8, "bidirectional": ahead, **fields}
    config = MRConvConfig(kernel_type=kernel_type, hidden_size=CHANNELS, max_position_embeddings=length, **fields)
    return KERNELS[kernel_type](config, seed, ahead).double()


def count(module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("kernel_type", KERNEL_TYPES)
@pytest.mark.parametrize("length", [1, 5, 40, 64])
def test_every_branch_has_its_length_and_starts_with_norm_one(kernel_type, length):
    kernels = make_kernel(kernel_type, length=length)()
    lengths = {1: [1], 5: [5], 40: [8, 16, 32, 40], 64: [8, 16, 32, 64]}[length]
    assert [tuple(kernel.shape) for kernel in kernels] == [(CHANNELS, taps) for taps in lengths]
    if kernel_type in ("dilated", "sparse"):
        # All branches have equally many parameters.
        assert count(make_kernel(kernel_type, length=length)) == len(lengths) * CHANNELS * min(8, length)
    assert {kernel.dtype for kernel in make_kernel(kernel_type, length=length).bfloat16()()} == {torch.float32}
    norms = torch.stack([kernel.norm(dim=-1) for kernel in kernels])
    if kernel_type == "fourier_sparse":
        # Two kernels of norm one, nearly orthogonal where there is room for that.
        assert (norms <= math.sqrt(2) + 1e-6).all()
    else:
        # The initial values are float32.
        torch.testing.assert_close(norms, torch.ones_like(norms), rtol=1e-5, atol=0)
    if length == 64:
        # So do both wings together, and, about, a Fourier kernel with a sparse one.
        wings = make_kernel(kernel_type, ahead=True, length=length)()
        squares = torch.stack([wing.detach().norm(dim=-1).square() for wing in wings])
        assert float(squares.mean()) == pytest.approx(0.5, abs=0.2 if kernel_type == "fourier_sparse" else 1e-5)


@pytest.mark.parametrize(
    ("length", "fields", "of_branches"),
    [
        # 8 taps: the constant, 3 pairs, and the highest mode, which is real; longer ones: the constant and 4 pairs.
        (8, {}, [8]),
        (64, {}, [8, 9, 9, 9]),
        # An odd number of samples has no highest mode: 7 of them, and 14, 28, 37.
        (37, {"kernel_size": 7}, [7, 7, 7, 7]),
        # Only the longest branches: the highest of 5 modes is none of theirs.
        (64, {"num_branches": 2}, [9, 9]),
        (64, {"num_branches": 1, "num_modes": 33}, [64]),
        (64, {"num_modes": 1}, [1, 1, 1, 1]),
        (64, {"kernel_size": 2}, [2, 3, 3, 3, 3, 3]),
        (1, {}, [1]),
    ],
)
def test_a_fourier_kernel_has_as_many_parameters_as_a_real_kernel_of_its_modes_has_freedoms(
    length, fields, of_branches
):
    kernel = make_kernel("fourier", length=length, **fields)
    assert kernel.counts == of_branches
    assert count(kernel) == CHANNELS * sum(of_branches)
    # None is without effect, and no two have the same: the kernels' derivative has full rank.
    first = lambda weight: torch.cat([one[0] for one in torch.func.functional_call(kernel, {"weight": weight})])  # noqa: E731
    jacobian = torch.autograd.functional.jacobian(first, kernel.weight.detach())[:, 0]
    assert torch.linalg.matrix_rank(jacobian) == sum(of_branches)


@pytest.mark.parametrize("length", [2, 37])
def test_modes_start_as_normal_numbers_of_one_size(length):
    torch.manual_seed(0)
    kernel = KERNELS["fourier"](MRConvConfig(hidden_size=4000, kernel_size=8, max_position_embeddings=length))
    for numbers in kernel.weight.detach().split(kernel.counts, dim=1):
        scaled = numbers / numbers.square().mean(1, keepdim=True).sqrt()
        torch.testing.assert_close(scaled.mean(0), torch.zeros(numbers.shape[1]), atol=0.06, rtol=0)
        assert (scaled.square().mean(0) - 1).abs().max() < (0.1 if length > 2 else 0.7)


class LeakingTransform(TorchFunctionMode):
    """What CUDA does at some sizes: an imaginary part of the constant or of the highest mode gets into the result."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is not torch.fft.irfft:
            return result
        (spectrum,), n = args, kwargs["n"]
        self.calls.append(n)
        sign = 1 - 2 * (torch.arange(n) % 2)
        last = spectrum[..., -1].imag if spectrum.shape[-1] == n // 2 + 1 and n % 2 == 0 else 0
        return result + ((spectrum[..., 0].imag + last)[..., None] * sign if spectrum.shape[-1] > 0 else 0)


@pytest.mark.parametrize("kernel_type", ["fourier", "fourier_sparse"])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("rate", [1, 2, 4, 0.5])
def test_no_imaginary_part_of_a_real_mode_reaches_the_transform(kernel_type, ahead, rate, monkeypatch):
    kernel = make_kernel(kernel_type, ahead, length=64)
    expected = kernel(rate)
    monkeypatch.setattr(ops_mrconv, "FAST", {})
    torch.testing.assert_close(kernel(rate), expected, atol=1e-14, rtol=1e-12)
    expected = kernel(rate)
    with LeakingTransform() as leaking:
        assert all(torch.equal(branch, wanted) for branch, wanted in zip(kernel(rate), expected, strict=True))
    assert leaking.calls == [branch.shape[1] for branch in expected]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("length", "fields"), [(64, {}), (37, {}), (37, {"kernel_size": 7}), (64, {"num_modes": 3}), (1, {}), (2, {})]
)
def test_fourier_kernels_are_inverse_transforms_of_their_numbers(ahead, length, fields, monkeypatch):
    kernel = make_kernel("fourier", ahead, length=length, **fields)
    numbers = kernel.weight.detach().split(kernel.counts, dim=1)
    for (_, samples), branch, own in zip(kernel.branches, kernel(), numbers, strict=True):
        modes = torch.zeros(CHANNELS, kernel.modes, dtype=torch.complex128)
        modes.real[:, 0] = own[:, 0]
        real, imaginary = own[:, 1::2], own[:, 2::2]
        modes.real[:, 1 : 1 + real.shape[1]], modes.imag[:, 1 : 1 + imaginary.shape[1]] = real, imaginary
        torch.testing.assert_close(branch, torch.fft.irfft(modes, n=samples), atol=1e-14, rtol=1e-12)
    gradients = []
    for forms in (ops_mrconv.FAST, {}):
        monkeypatch.setattr(ops_mrconv, "FAST", forms)
        total = sum((branch.sin() * branch.shape[1]).sum() for branch in kernel())
        gradients += torch.autograd.grad(total, [kernel.weight])
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=1e-12)
    assert kernel.weight.shape == (CHANNELS, sum(kernel.counts))


def test_dilated_taps_lie_powers_of_two_apart():
    kernel = make_kernel("dilated", length=64)
    for index, branch in enumerate(kernel()):
        wanted = torch.zeros_like(branch)
        for tap in range(8):
            wanted[:, tap * 2**index] = kernel.weight[index, :, tap]
        assert branch.equal(wanted)


def test_sparse_taps_are_at_places_of_their_own_in_every_channel():
    kernel = make_kernel("sparse", length=200)
    positions = kernel.positions
    for index, (_, length) in enumerate(kernel.branches):
        assert all(len(set(row)) == 8 and max(row) < length for row in positions[index].tolist())
    assert torch.equal(positions[0], torch.arange(8).expand(CHANNELS, -1))
    assert not torch.equal(positions[-1][0], positions[-1][1])
    # The same in every model, others in every layer and on the other wing.
    torch.manual_seed(1)
    kernel.reset_parameters()
    again = make_kernel("sparse", length=200)
    assert torch.equal(kernel.positions, again.positions)
    assert not torch.equal(kernel.weight, again.weight)
    for other in (make_kernel("sparse", length=200, seed=1), make_kernel("sparse", True, length=200)):
        assert not torch.equal(kernel.positions[-1], other.positions[-1])


def test_scales_weigh_fourier_and_sparse_kernels():
    kernel = make_kernel("fourier_sparse")
    with torch.no_grad():
        kernel.fourier_scale.fill_(2.0)
        kernel.sparse_scale.fill_(-3.0)
    parts = zip(kernel.fourier(), kernel.sparse(), strict=True)
    torch.testing.assert_close(kernel(), [2 * fourier - 3 * sparse for fourier, sparse in parts])


@pytest.mark.parametrize("rate", [2, 4])
def test_at_another_rate_samples_are_the_same_with_another_weight(rate):
    # Without modes above what half and a quarter of the rate can represent.
    fields = {"length": 64, "kernel_size": 16, "num_modes": 2}
    kernel = make_kernel("fourier", **fields)
    torch.testing.assert_close(kernel(rate), [rate * before[:, ::rate] for before in kernel()])
    # More samples pass through the old ones.
    torch.testing.assert_close([2 * changed[:, ::2] for changed in kernel(0.5)], kernel())
    # Lag rate (1 + j) of the wing ahead is its entry rate (1 + j) - 1.
    kernel = make_kernel("fourier", ahead=True, **fields)
    torch.testing.assert_close(kernel(rate), [rate * before[:, rate - 1 :: rate] for before in kernel()])


def test_modes_above_the_new_nyquist_frequency_are_dropped():
    kernel = make_kernel("fourier", length=64, num_modes=5)
    for (_, length), before, changed in zip(kernel.branches, kernel(), kernel(4), strict=True):
        kept = torch.fft.rfft(before)[:, : length // 8 + 1]
        torch.testing.assert_close(changed, torch.fft.irfft(kept, n=length // 4))


@pytest.mark.parametrize("kernel_type", ["dilated", "sparse"])
@pytest.mark.parametrize("ahead", [False, True])
def test_taps_move_to_earlier_samples_and_add_up(kernel_type, ahead):
    kernel = make_kernel(kernel_type, ahead, length=64)
    torch.testing.assert_close(kernel(2), [before[:, ::2] + before[:, 1::2] for before in kernel()])
    for changed, before in zip(kernel(0.5), kernel(), strict=True):
        torch.testing.assert_close(changed[:, ::2], before)
        assert not changed[:, 1::2].any()


STATISTICS = dict.fromkeys(("input_mean", "input_std", "input_delta_std", "target_mean", "target_std"), [0.5, 0.5])
NO_NUMBERS = ([math.nan, 0.5], [0.5, math.nan], [0.5, math.inf], [-math.inf, 0.5])


class TestMRConvConfig(ConfigTesterMixin):
    config_class = MRConvConfig
    # Inputs; kernels; norms; rates and tokens; units.
    config_changes = (
        {"vocab_size": 20, "input_size": 3, "hidden_size": 8, "num_hidden_layers": 2, "max_position_embeddings": 64}
        | {"kernel_type": "sparse", "kernel_size": 8, "num_branches": 2, "num_modes": 5, "bidirectional": True}
        | {"branch_norm": "kernel", "norm": "layer", "prenorm": False, "norm_eps": 1e-3, "sync_batch_norm": False}
        | {"dropout": 0.1, "tied_dropout": False, "reparameterized": True, "initializer_range": 0.1}
        | {"sampling_rate": 8000, "rate_factor": 2.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        | {"tie_word_embeddings": False, "input_columns": ["x", "y", "z"], "input_mean": [1.0, 2.0, 3.0]}
        | {"input_std": [1.0, 0.5, 0.1], "target_mean": [1.0, -1.0], "target_std": [2.0, 3.0]}
    )
    bad_configs = [
        ({"hidden_size": "256"}, "expected int"),
        ({"kernel_type": "wavelet"}, "allowed: 'dilated', 'fourier', 'sparse', 'fourier_sparse'"),
        ({"branch_norm": "instance"}, "allowed: 'batch', 'layer', 'kernel', 'none'"),
        ({"kernel_size": 0}, "`kernel_size` is 0"),
        ({"dropout": 1.0}, "at least 0 and below 1"),
        ({"norm_eps": 0.0}, "`norm_eps` is 0.0"),
        ({"rate_factor": float("nan")}, "must be positive"),
        ({"rate_factor": 3.0}, "must divide the length of every kernel"),
        ({"num_branches": 8}, "have 7 resolutions, give 1 to 7"),
        ({"num_modes": 10}, "a kernel of 16 samples has 1 to 9 modes"),
        ({"reparameterized": True, "branch_norm": "layer"}, "cannot be merged"),
        ({"input_mean": [0.0]}, "`input_mean` is [0.0] and `input_std` None; give both, 1 finite numbers each"),
        ({"input_size": 2, "input_mean": [0.0], "input_std": [1.0]}, "give both, 2 finite numbers each"),
        ({"target_mean": [0.0, 0.0], "target_std": [1.0, 0.0]}, "spreads over 0"),
    ] + [({"input_size": 2, **STATISTICS, name: wrong}, f"`{name}`") for name in STATISTICS for wrong in NO_NUMBERS]


@given(st.integers(1, 300), st.integers(1, 5000))
def test_resolutions_of_any_size(kernel_size, length):
    branches = branch_lengths(kernel_size, length)
    assert branches[-1][1] == length
    for index, (dilation, taps) in enumerate(branches[:-1]):
        assert (dilation, taps) == (2**index, kernel_size * 2**index) and taps < length
    assert branches[-1][0] == 2 ** (len(branches) - 1)
    # Fewer of them are the longest ones.
    assert branch_lengths(kernel_size, length, 1) == branches[-1:]


def test_lengths_at_another_rate_are_whole_or_refused():
    branches = branch_lengths(16, 64)
    assert [changed_lengths(branches, rate)[0] for rate in (1.0, 4, 0.5)] == [16, 4, 32]
    assert [changed_lengths(branches, rate)[1:] for rate in (1.0, 4, 0.5)] == [[32, 64], [8, 16], [64, 128]]
    assert [MRConvConfig(rate_factor=rate).longest_input for rate in (1.0, 2.0, 0.5)] == [1024, 512, 2048]
    for factor in (3, 32.0):
        with refused(ValueError, "samples", "whole"):
            changed_lengths(branches, factor)
