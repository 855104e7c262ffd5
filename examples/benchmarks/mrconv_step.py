"""A training step of MRConv beside one bare FFT convolution: time, calls, points of FFTs, bytes.

    OMP_NUM_THREADS=1 python examples/benchmarks/mrconv_step.py

The bare convolution has a free kernel as long as the input: irfft(rfft(u) rfft(k)), differentiated by autograd. A
layer of MRConv makes the kernels of its branches, normalises and adds them; a model has two blocks, and the bare one
the same blocks around bare convolutions. All take turns in one process: processor time, medians of ratios of rounds.

What is counted does not depend on the machine: calls are operations of torch that are no views, points of FFTs are
real numbers (a complex one is two), bytes are those of all that an operation reads and writes. Least possible for one
convolution are three FFTs forward, of input, kernel and product, and three backward.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from timing import Content, in_turns, markdown_table, median_ratio, run
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_ext.mrconv import MRConvConfig, MRConvLayer, MRConvModel
from hf_ext.mrconv.ops_mrconv import convolution_size

Sizes = tuple[int, int, int]

# Batch, channels and length.
SHAPES: list[Sizes] = [(1, 32, 1024), (8, 32, 1024), (1, 32, 4096), (4, 32, 4096), (1, 32, 16384), (2, 64, 16384)]
KINDS: dict[str, dict[str, str]] = {
    "dilated": {"kernel_type": "dilated"},
    "Fourier": {"kernel_type": "fourier"},
    "Fourier, kernel norm": {"kernel_type": "fourier", "branch_norm": "kernel"},
}
# Seconds that a measurement takes at least: the clock of a process is coarse.
LEAST = 0.02


class Bare(nn.Module):
    """One convolution with a free kernel."""

    def __init__(self, channels: int, length: int):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(channels, length) / math.sqrt(length))

    def forward(self, u: Tensor, *_: Any) -> Tensor:
        n = convolution_size(u.shape[2], self.kernel.shape[1])
        return torch.fft.irfft(torch.fft.rfft(u, n=n) * torch.fft.rfft(self.kernel, n=n), n=n)[..., : u.shape[2]]


class Counted(TorchDispatchMode):
    """Work of all operations within."""

    def __init__(self) -> None:
        super().__init__()
        self.work = {"calls": 0, "fft_points": 0, "bytes": 0}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        if not function.is_view:
            tensors = [x for x in torch.utils._pytree.tree_leaves((arguments, options, result)) if torch.is_tensor(x)]
            self.work["calls"] += 1
            self.work["bytes"] += sum(x.numel() * x.element_size() for x in tensors)
            if function._schema.name.startswith("aten::_fft_"):
                real = [x for x in tensors if not x.is_complex()]
                self.work["fft_points"] += real[0].numel() if real else 2 * tensors[0].numel()
        return result


def make_layers(sizes: Sizes) -> tuple[dict[str, nn.Module], Tensor, Tensor]:
    """Layers by name, their input and the gradient of their output."""
    batch, channels, length = sizes
    layers: dict[str, nn.Module] = {"bare": Bare(channels, length)}
    for name, kind in KINDS.items():
        layers[name] = MRConvLayer(MRConvConfig(hidden_size=channels, max_position_embeddings=length, **kind))
    u = torch.randn(batch, channels, length).requires_grad_()
    return layers, u, torch.randn(batch, channels, length)


def make_models(sizes: Sizes) -> tuple[dict[str, nn.Module], Tensor, Tensor]:
    """Models of two blocks by name, their input and the gradient of their output."""
    batch, channels, length = sizes
    fields = {"hidden_size": channels, "max_position_embeddings": length, "num_hidden_layers": 2}
    models: dict[str, nn.Module] = {"bare": MRConvModel(MRConvConfig(**fields))}
    for block in models["bare"].layers:
        block.convolution = Bare(channels, length)
    models |= {name: MRConvModel(MRConvConfig(**fields, **kind)) for name, kind in KINDS.items()}
    embedded = torch.randn(batch, length, channels).requires_grad_()
    return models, embedded, torch.randn(batch, length, channels)


def step(module: nn.Module, given: Tensor, cotangent: Tensor) -> None:
    """Forward and backward pass."""
    output = module(inputs_embeds=given).last_hidden_state if isinstance(module, MRConvModel) else module(given)
    output.backward(cotangent)
    module.zero_grad()
    given.grad = None


def seconds_of(call: Callable[[], None]) -> float:
    """Processor time of a call, the mean of as many as take long enough."""
    start, calls = time.process_time(), 0
    while calls == 0 or time.process_time() - start < LEAST:
        call()
        calls += 1
    return (time.process_time() - start) / calls


def compare(what: str, sizes: Sizes, rounds: int) -> dict[str, Any]:
    """Time and work of all at one size."""
    modules, given, cotangent = (make_layers if what == "layer" else make_models)(sizes)
    work = {}
    for name, module in modules.items():
        step(module.train(), given, cotangent)
        with Counted() as counted:
            step(module, given, cotangent)
        work[name] = counted.work
    times = in_turns(list(modules), rounds, lambda name: seconds_of(lambda: step(modules[name], given, cotangent)))
    ratios = {name: [a / b for a, b in zip(times[name], times["bare"], strict=True)] for name in KINDS}
    return {
        "what": what,
        "batch_channels_length": sizes,
        "seconds": {name: statistics.median(taken) for name, taken in times.items()},
        "times_bare": {name: median_ratio(times[name], times["bare"]) for name in KINDS},
        "spread": {name: [min(found), max(found)] for name, found in ratios.items()},
        "work": work,
    }


def markdown(content: Content) -> str:
    """Times, then counts."""
    times, counts = [], []
    for row in content["rows"]:
        title = f"{row['what']}, {', '.join(map(str, row['batch_channels_length']))}"
        spread = [
            f"{row['times_bare'][name]:.2f} ({low:.2f} to {high:.2f})" for name, (low, high) in row["spread"].items()
        ]
        times.append([title, f"{1e3 * row['seconds']['bare']:.2f} ms", *spread])
        bare = row["work"]["bare"]
        cells = [title, f"{bare['calls']}, {bare['fft_points'] / 2**20:.2f} M, {bare['bytes'] / 2**20:.1f} MiB"]
        for name in KINDS:
            work = row["work"][name]
            parts = (work[key] / bare[key] for key in ("fft_points", "bytes"))
            cells.append(", ".join([str(work["calls"]), *(f"{part:.2f} ×" for part in parts)]))
        counts.append(cells)
    header = ["batch, channels, length", "bare: calls, FFT points, bytes", *KINDS]
    table = markdown_table(["batch, channels, length", "bare", *(f"{name}, × bare" for name in KINDS)], times)
    return f"{table}\n{markdown_table(header, counts)}"


def measure(words: argparse.Namespace) -> Iterator[Content]:
    """All sizes."""
    rows = []
    for what in ("layer", "model"):
        for sizes in SHAPES:
            rows.append(compare(what, sizes, words.rounds))
            yield {"rows": rows}


if __name__ == "__main__":
    run("mrconv_step", __doc__, measure, markdown, rounds=7)
