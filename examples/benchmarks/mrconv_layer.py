"""The cost of a training step of an MRConv layer beside N branches; mrconv_step.py has it beside one convolution.

    OMP_NUM_THREADS=1 python examples/benchmarks/mrconv_layer.py

Two training layers of equal outputs: `exact`, ours; `shared`, N branches through torch.nn.BatchNorm1d which share the
FFT of their input. They take turns in one process, so that other load of the machine hits both; times are medians.
Memory is that of a process of its own for each layer: what a forward pass saves for the backward pass beside input and
parameters, and how far the process grows in a step.
"""

import argparse
import math
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from timing import Content, apart, compare, markdown_table, reset_peak, resident, run
from torch import Tensor, nn

from hf_ext.mrconv.ops_mrconv import batch_norm_conv

Sizes = tuple[int, int, int, int]

# Batch, channels, length and taps of the shortest kernel.
SIZES: list[Sizes] = [(8, 64, 16384, 16), (8, 64, 4096, 16), (32, 64, 1024, 16)]
FORMS = ("exact", "shared")


class Layer(nn.Module):
    """N branches l_0 2^i, as free kernels, their BatchNorms and alpha; `form` says how they are computed."""

    def __init__(self, form: str, sizes: Sizes):
        super().__init__()
        _, channels, self.length, first = sizes
        generator = torch.Generator().manual_seed(0)
        taps = [min(first << i, self.length) for i in range(1 + math.ceil(math.log2(self.length / first)))]
        drawn = [torch.randn(channels, count, generator=generator) / math.sqrt(count) for count in taps]
        self.kernels = nn.ParameterList(drawn)
        self.alpha = nn.Parameter(torch.randn(len(taps), channels, generator=generator))
        self.norms = nn.ModuleList(nn.BatchNorm1d(channels) for _ in taps)
        self.form = form

    def forward(self, u: Tensor) -> Tensor:
        if self.form == "exact":
            weight, bias = (torch.stack([getattr(norm, name) for norm in self.norms]) for name in ("weight", "bias"))
            return batch_norm_conv(u, list(self.kernels), self.alpha, weight, bias, self.norms[0].eps)[0]
        n = 2 * self.length
        spectrum, y = torch.fft.rfft(u, n=n), 0
        for kernel, norm, alpha in zip(self.kernels, self.norms, self.alpha, strict=True):
            y = y + alpha[:, None] * norm(
                torch.fft.irfft(spectrum * torch.fft.rfft(kernel, n=n), n=n)[..., : self.length]
            )
        return y


def draw(sizes: Sizes, seed: int) -> Tensor:
    return torch.randn(sizes[:3], generator=torch.Generator().manual_seed(seed))


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def disagreement(layers: dict[str, Layer], u: Tensor, cotangent: Tensor) -> dict[str, float]:
    """Largest relative difference of outputs and gradients between ours and the branches."""
    found = {}
    for name in ("exact", "shared"):
        layer, point = layers[name], u.detach().requires_grad_()
        y = layer(point)
        found[name] = [y.detach(), *torch.autograd.grad(y, [point, *layer.parameters()], cotangent)]
    pairs = list(zip(found["exact"], found["shared"], strict=True))
    return {"output": relative(*pairs[0]), "gradients": max(relative(*pair) for pair in pairs[1:])}


def training_step(sizes: Sizes, rounds: int) -> dict[str, Any]:
    layers = {form: Layer(form, sizes) for form in FORMS}
    u, cotangent = draw(sizes, 1).requires_grad_(), draw(sizes, 2)

    def step(layer: Layer) -> None:
        layer.zero_grad()
        u.grad = None
        layer(u).backward(cotangent)

    steps = {form: partial(step, layer) for form, layer in layers.items()}
    rows = compare(steps, rounds, clock=time.perf_counter)
    seconds = {form: row["seconds"] for form, row in rows.items()}
    differences = disagreement(layers, u, cotangent)
    del layers
    memory = {form: apart(memory_of_step, form, sizes) for form in FORMS}
    parts = {key: memory["exact"][f"{key}_bytes"] / memory["shared"][f"{key}_bytes"] for key in ("saved", "peak")}
    return {
        "batch_channels_length_taps": sizes,
        "branches": 1 + math.ceil(math.log2(sizes[2] / sizes[3])),
        "seconds": seconds,
        "memory": memory,
        "speedup_over_shared": seconds["shared"] / seconds["exact"],
        **{f"{key}_part_of_shared": part for key, part in parts.items()},
        "relative_difference_from_shared": differences,
    }


def memory_of_step(form: str, sizes: Sizes) -> dict[str, int]:
    layer = Layer(form, sizes)
    # What FFT libraries and threads take at their first call is not the layer's.
    tiny = (1, 1, 64, 16)
    Layer(form, tiny)(draw(tiny, 0).requires_grad_()).sum().backward()
    u, cotangent = draw(sizes, 1).requires_grad_(), draw(sizes, 2)
    given = {x.untyped_storage().data_ptr() for x in (u, *layer.parameters(), *layer.buffers())}
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    reset_peak()
    before = resident("VmRSS")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = layer(u)
    y.backward(cotangent)
    activations = sum(size for pointer, size in saved.items() if pointer not in given)
    return {"saved_bytes": activations + u.nbytes, "peak_bytes": resident("VmHWM") - before}


def markdown(content: Content) -> str:
    """Table of what was measured."""
    rows = []
    for row in content["training_step"]:
        seconds, difference = row["seconds"], max(row["relative_difference_from_shared"].values())
        cells = [str(row["batch_channels_length_taps"]), str(row["branches"]), f"{seconds['exact']:.3f} s"]
        cells += [f"{seconds['shared']:.3f} s", f"{row['speedup_over_shared']:.1f}"]
        cells += [f"{row['saved_part_of_shared']:.3f}", f"{row['peak_part_of_shared']:.3f}", f"{difference:.1e}"]
        rows.append(cells)
    header = ["batch, channels, length, l0", "N", "ours", "N branches", "ratio", "saved", "peak"]
    return markdown_table([*header, "difference"], rows)


def measure(words: argparse.Namespace) -> Iterator[Content]:
    """All sizes."""
    yield {"training_step": [training_step(size, words.rounds) for size in SIZES]}


if __name__ == "__main__":
    run("mrconv_layer", __doc__, measure, markdown, rounds=5)
