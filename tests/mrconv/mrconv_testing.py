"""Tiny MRConv layers and models away from their initial values; inputs of the operators, and the layer that forms its
branches: `from tests.mrconv.mrconv_testing import ...`."""

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_ext.mrconv import MRConvConfig, MRConvForSequenceClassification, MRConvLayer
from hf_ext.mrconv import MRConvNextConfig as ImageConfig
from hf_ext.mrconv import MRConvNextForImageClassification as ImageModel
from hf_ext.mrconv import ops_mrconv as ops
from hf_ext.mrconv.configuration_mrconv import KERNEL_TYPES
from hf_ext.mrconv.modeling_layers_mrconv import MRConvBatchNorm
from tests.kit import warm_python
from tests.kit.models import ModelTesterMixin

# The shortest kernel does not divide the longest, and no length is a power of two.
SIZES = {"hidden_size": 4, "num_hidden_layers": 2, "kernel_size": 5, "max_position_embeddings": 37, "num_labels": 3}
TOKENS = {**SIZES, "vocab_size": 11}
EVERY_KERNEL = list(itertools.product(KERNEL_TYPES, (False, True)))


class MRConvTester(ModelTesterMixin):
    bfloat16_tolerance = 0.05
    fields: dict

    def make_config(self):
        return MRConvConfig(**self.fields)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 11, shape, generator=generator(seed))


def make_mask() -> torch.Tensor:
    """Of four rows of 20, one is padded on the right and one on the left."""
    mask = torch.ones(4, 20, dtype=torch.int64)
    mask[1, 13:] = 0
    mask[2, :4] = 0
    return mask


def shake(module: torch.nn.Module) -> None:
    """Move parameters and statistics from their initial values, where a missing term would not be seen."""
    with torch.no_grad():
        for index, value in enumerate(itertools.chain(module.parameters(), module.buffers())):
            if value.is_floating_point():
                value += 0.3 * torch.rand(value.shape, generator=generator(index)).to(value.dtype)


def make_model(model_class=MRConvForSequenceClassification, **fields):
    torch.manual_seed(0)
    model = model_class(MRConvConfig(**(fields or TOKENS)))
    shake(model)
    return model.eval()


# A scale as large as after training, so that a difference in a layer is seen in the output.
IMAGES = {"image_size": 16, "patch_size": 2, "hidden_sizes": [6, 8], "depths": [1, 2], "kernel_size": 4}
IMAGES |= {"num_labels": 3, "layer_scale_init_value": 0.5}


def make_image_model(**fields) -> ImageModel:
    torch.manual_seed(0)
    model = ImageModel(ImageConfig(**{**IMAGES, **fields}))
    shake(model)
    return model.eval()


def make_images(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed))


def make_layer(layer_index: int = 0, **fields) -> MRConvLayer:
    torch.manual_seed(0)
    layer = MRConvLayer(MRConvConfig(**{**SIZES, **fields}), layer_index)
    shake(layer)
    return layer.eval()


def make_signal(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=generator(), dtype=torch.float64).to(dtype)


# Both processes are forks of one, which imports once. Arguments: a folder, a module, the name of its function, words.
_TWO_PROCESSES = """
import importlib
import multiprocessing
import sys

import torch
import torch.distributed as distributed

folder, module, name, *words = sys.argv[1:]
function = getattr(importlib.import_module(module), name)


def run(rank):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.save(function(rank, *words), f"{folder}/result{rank}")
    distributed.destroy_process_group()


processes = [multiprocessing.get_context("fork").Process(target=run, args=(rank,)) for rank in range(2)]
for process in processes:
    process.start()
for process in processes:
    process.join()
sys.exit(any(process.exitcode for process in processes))
"""


def in_two_processes(folder: Path, function: Callable[..., Any], *words: object) -> list[Any]:
    """Results of a function of a module here in each of two processes; it gets its rank and the words as texts."""
    root = Path(__file__).resolve().parents[2]
    module = f"tests.mrconv.{function.__module__.rpartition('.')[2]}"
    command = [sys.executable, "-c", _TWO_PROCESSES, str(folder), module, function.__name__, *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    done = warm_python.run(command, cwd=root, env=environment)
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"result{rank}") for rank in range(2)]


FAST_FORMS = {"long_conv", "batch_norm_conv", "branch_sums", "kept_kernel", "merge_kernels", "fourier_kernels"}


def random(*shape: int, seed: int = 0, gradient: bool = True) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64).requires_grad_(gradient)


def branch_kernels(count: int, channels: int, first: int, seed: int = 0) -> list[Tensor]:
    """Kernels of unit norm, each twice as long as the one before."""
    drawn = [random(channels, first << i, seed=seed + i, gradient=False) for i in range(count)]
    return [(kernel / kernel.shape[1] ** 0.5).requires_grad_() for kernel in drawn]


def layer_case(
    batch: int, length: int, first: int, count: int, backward: int | None = None, spans: list | None = None,
    channels: int = 3,
) -> dict:  # fmt: skip
    """Arguments of `batch_norm_conv`; `spans` are the valid positions of each sample."""
    u = random(batch, channels, length, seed=1, gradient=False) + 0.5
    case = {name: random(count, channels, seed=seed) for seed, name in enumerate(("alpha", "weight", "bias"), 2)}
    case |= {"kernels": branch_kernels(count, channels, first, seed=10), "eps": 1e-5}
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
