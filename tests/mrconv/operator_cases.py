"""Inputs of MRConv's operators, and the layer that forms its branches."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_ext.mrconv import ops_mrconv as ops
from hf_ext.mrconv.modeling_layers_mrconv import MRConvBatchNorm

FAST_FORMS = {"long_conv", "batch_norm_conv", "branch_sums", "kept_kernel", "merge_kernels", "fourier_kernels"}


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
) -> dict:
    """Arguments of `batch_norm_conv`; `spans` are the valid positions of each sample."""
    u = random(batch, channels, length, seed=1, gradient=False) + 0.5
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


@contextmanager
def operators_in(form: str) -> Iterator[None]:
    """`fast`: as the package runs them; `plain`: as a checkpoint's copy of the code does without the package."""
    assert ops.FAST.keys() == FAST_FORMS
    with mock.patch.object(ops, "FAST", ops.FAST if form == "fast" else {}):
        yield


def layer(case: dict) -> tuple[Tensor, ...]:
    return ops.batch_norm_conv(**case)


def layer_and_norm(case: dict, group: object = None) -> tuple[tuple[Tensor, ...], ...]:
    """The layer's results and gradients, and those of the norm of blocks with its statistics, for fixed cotangents."""
    results = layer({**case, "group": group})
    cotangent = torch.linspace(-1, 1, results[0][0].numel(), dtype=torch.float64).view_as(results[0][0])
    gradients = torch.autograd.grad(results[0], leaves(case), cotangent.expand_as(results[0]).sin())
    norm = MRConvBatchNorm(len(cotangent), 1e-5, group is not None).double()
    hidden = case["u"].detach().mT.clone().requires_grad_()
    time = torch.arange(hidden.shape[1])
    valid = (time >= case["start"][:, None]) & (time < case["stop"][:, None])
    normed = norm(hidden, valid)
    gradient = torch.autograd.grad((normed * cotangent.T * valid[..., None]).sum(), hidden)[0]
    return results, gradients, (normed, gradient, norm.running_mean, norm.running_var)


def leaves(case: dict) -> list[Tensor]:
    values = [x for value in case.values() for x in (value if isinstance(value, list) else [value])]
    return [x for x in values if isinstance(x, Tensor) and x.requires_grad]


def shared_case(rank: int | None) -> dict:
    """The share of one of two processes, which have unequal numbers of samples; None: the joined batch."""
    case = layer_case(5, 29, 2, 5, 2, [(0, 29), (0, 13), (0, 0), (16, 29), (5, 20)], channels=18)
    if rank is not None:
        share = slice(0, 2) if rank == 0 else slice(2, 5)
        case |= {name: case[name].detach()[share] for name in ("u", "start", "stop")}
        case["u"].requires_grad_()
    return case
