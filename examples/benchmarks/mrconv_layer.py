"""What one MRConv layer costs: a training step beside N branches, and the merged layer beside a bare FFT convolution.

    OMP_NUM_THREADS=2 python examples/benchmarks/mrconv_layer.py
    OMP_NUM_THREADS=2 chrt -r 1 python examples/benchmarks/mrconv_layer.py    # on a machine that others use
    python examples/benchmarks/mrconv_layer.py --device cuda
    OMP_NUM_THREADS=1 python examples/benchmarks/mrconv_layer.py --bare

Three training layers of equal outputs: `exact`, ours; `shared`, N branches through torch.nn.BatchNorm1d which share
the FFT of their input; `simple`, N branches which do not. They take turns in one process, so that other load of the
machine hits all; times are medians. Memory is that of a process of its own for each layer: what a forward pass saves
for the backward pass beside input and parameters, and how far the process, or the device, grows in a step.

With --bare, instead: a training step of the whole layer, kernels of the branches included, beside one convolution with
a free kernel, irfft(rfft(u) rfft(k)) by autograd, at small batches too: processor time, medians of ratios of rounds.
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_ext.mrconv import MRConvConfig
from hf_ext.mrconv.modeling_layers_mrconv import MRConvLayer
from hf_ext.mrconv.ops_mrconv import batch_norm_conv, convolution_size, kernel_spectrum, long_conv

Sizes = tuple[int, int, int, int]

# Batch, channels, length and taps of the shortest kernel.
SIZES: list[Sizes] = [(8, 64, 16384, 16), (8, 64, 4096, 16), (32, 64, 1024, 16)]
SIZES_CUDA: list[Sizes] = [(16, 256, 16384, 16)]
# Batch, channels and length beside a bare convolution; kernels of 16 parameters, 16, 32, ... taps.
BARE_SIZES = [(8, 32, 1024), (4, 32, 4096), (2, 32, 16384), (8, 64, 16384), (1, 64, 1024), (1, 256, 4096)]
KERNEL_TYPES = ("dilated", "fourier")
FORMS = ("exact", "shared", "simple")


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
            if self.form == "simple":
                spectrum = torch.fft.rfft(u, n=n)
            y = y + alpha[:, None] * norm(
                torch.fft.irfft(spectrum * torch.fft.rfft(kernel, n=n), n=n)[..., : self.length]
            )
        return y


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(function: Callable[[], Any], device: str) -> float:
    synchronize(device)
    start = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - start


def in_turns(functions: dict[str, Callable[[], Any]], device: str, rounds: int) -> dict[str, float]:
    """Median seconds of each function, which are called one after the other in each round."""
    for function in functions.values():
        function()
    times = [{name: timed(function, device) for name, function in functions.items()} for _ in range(rounds)]
    return {name: statistics.median(one[name] for one in times) for name in functions}


def draw(sizes: Sizes, device: str, seed: int) -> Tensor:
    return torch.randn(sizes[:3], generator=torch.Generator().manual_seed(seed)).to(device)


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


def training_step(sizes: Sizes, device: str, rounds: int) -> dict[str, Any]:
    layers = {form: Layer(form, sizes).to(device) for form in FORMS}
    u, cotangent = draw(sizes, device, 1).requires_grad_(), draw(sizes, device, 2)

    def step(layer: Layer) -> None:
        layer.zero_grad()
        u.grad = None
        layer(u).backward(cotangent)

    seconds = in_turns({form: lambda layer=layer: step(layer) for form, layer in layers.items()}, device, rounds)
    differences = disagreement(layers, u, cotangent)
    del layers
    memory = {form: measured_apart(form, sizes, device) for form in FORMS}
    return {
        "batch_channels_length_taps": sizes,
        "branches": 1 + math.ceil(math.log2(sizes[2] / sizes[3])),
        "seconds": seconds,
        "memory": memory,
        "speedup_over_shared": seconds["shared"] / seconds["exact"],
        "speedup_over_simple": seconds["simple"] / seconds["exact"],
        "saved_part_of_shared": memory["exact"]["saved_bytes"] / memory["shared"]["saved_bytes"],
        "peak_part_of_shared": memory["exact"]["peak_bytes"] / memory["shared"]["peak_bytes"],
        "relative_difference_from_shared": differences,
    }


def measured_apart(form: str, sizes: Sizes, device: str) -> dict[str, int]:
    """Memory of a step in a process of its own."""
    command = [sys.executable, __file__, "--memory", form, *map(str, sizes), "--device", device]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def memory_of_step(form: str, sizes: Sizes, device: str) -> dict[str, int]:
    layer = Layer(form, sizes).to(device)
    # What FFT libraries and threads take at their first call is not the layer's.
    tiny = (1, 1, 64, 16)
    Layer(form, tiny).to(device)(draw(tiny, device, 0).requires_grad_()).sum().backward()
    u, cotangent = draw(sizes, device, 1).requires_grad_(), draw(sizes, device, 2)
    given = {x.untyped_storage().data_ptr() for x in (u, *layer.parameters(), *layer.buffers())}
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    before = peak(device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = layer(u)
    y.backward(cotangent)
    activations = sum(size for pointer, size in saved.items() if pointer not in given)
    return {"saved_bytes": activations + u.nbytes, "peak_bytes": peak(device) - before}


def peak(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    # Not getrusage, whose maximum a process inherits from the one that starts it.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


@torch.no_grad()
def inference(sizes: Sizes, device: str, rounds: int) -> dict[str, Any]:
    channels, length = sizes[1:3]
    u, bias = draw(sizes, device, 1), torch.ones(channels, device=device)
    kernel = torch.randn(channels, length, generator=torch.Generator().manual_seed(3)).to(device) / math.sqrt(length)
    n = convolution_size(length, length)
    spectrum = kernel_spectrum(kernel, None, n)

    def merged() -> Tensor:
        return long_conv(u, kernel, spectrum=spectrum, bias=bias)

    def bare() -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(u, n=n) * spectrum, n=n)

    difference = relative(merged(), bare()[..., :length] + bias[:, None])
    seconds = in_turns({"merged": merged, "bare": bare}, device, 3 * rounds)
    return {
        "batch_channels_length": sizes[:3],
        "seconds": seconds,
        "part_of_bare": seconds["merged"] / seconds["bare"],
        "relative_difference": difference,
    }


def beside_bare(sizes: tuple[int, int, int], device: str, rounds: int) -> dict[str, Any]:
    """A training step of the layer and of one convolution."""
    _, channels, length = sizes
    u, cotangent = draw((*sizes, 0), device, 1).requires_grad_(), draw((*sizes, 0), device, 2)
    kernel = (draw((1, channels, length, 0), device, 3)[0] / math.sqrt(length)).requires_grad_()

    def bare(u: Tensor) -> Tensor:
        n = convolution_size(length, length)
        return torch.fft.irfft(torch.fft.rfft(u, n=n) * torch.fft.rfft(kernel, n=n), n=n)[..., :length]

    functions: dict[str, Callable[[Tensor], Tensor]] = {"bare": bare}
    for kind in KERNEL_TYPES:
        fields = {"max_position_embeddings": length, "kernel_size": 16, "kernel_type": kind}
        config = MRConvConfig(vocab_size=None, input_size=1, hidden_size=channels, num_hidden_layers=1, **fields)
        functions[kind] = MRConvLayer(config).to(device)

    def seconds(function: Callable[[Tensor], Tensor]) -> float:
        # As many steps as take a fiftieth of a second, at least: the clock of a process is coarse.
        start, steps = clock(device), 0
        while steps == 0 or clock(device) - start < 0.02:
            function(u).backward(cotangent)
            u.grad = kernel.grad = None
            if isinstance(function, nn.Module):
                function.zero_grad()
            steps += 1
        return (clock(device) - start) / steps

    times = [{name: seconds(function) for name, function in functions.items()} for _ in range(rounds + 1)][1:]
    return {
        "batch_channels_length": sizes,
        "seconds": {name: statistics.median(one[name] for one in times) for name in functions},
        "times_bare": {kind: statistics.median(one[kind] / one["bare"] for one in times) for kind in KERNEL_TYPES},
    }


def clock(device: str) -> float:
    """Processor time; of a GPU the time that passes."""
    synchronize(device)
    return time.perf_counter() if device == "cuda" else time.process_time()


def table(result: dict[str, Any]) -> str:
    lines = [
        "| batch, channels, length, l0 | N | ours | N branches | ratio | simple | ratio | saved | peak | difference |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["training_step"]:
        seconds, difference = row["seconds"], max(row["relative_difference_from_shared"].values())
        lines.append(
            f"| {row['batch_channels_length_taps']} | {row['branches']} | {seconds['exact']:.3f} s "
            f"| {seconds['shared']:.3f} s | {row['speedup_over_shared']:.1f} | {seconds['simple']:.3f} s "
            f"| {row['speedup_over_simple']:.1f} | {row['saved_part_of_shared']:.3f} "
            f"| {row['peak_part_of_shared']:.3f} | {difference:.1e} |"
        )
    lines += ["", "| batch, channels, length | merged layer | bare FFT convolution | ratio |", "|---|---|---|---|"]
    for row in result["merged_inference"]:
        lines.append(
            f"| {row['batch_channels_length']} | {row['seconds']['merged']:.4f} s | {row['seconds']['bare']:.4f} s "
            f"| {row['part_of_bare']:.2f} |"
        )
    return "\n".join(lines)


def bare_table(result: dict[str, Any]) -> str:
    lines = ["| batch, channels, length | bare convolution | dilated | Fourier |", "|---|---|---|---|"]
    for row in result["beside_bare"]:
        parts = [f"{row['times_bare'][kind]:.2f} ×" for kind in KERNEL_TYPES]
        lines.append(
            f"| {row['batch_channels_length']} | {1e3 * row['seconds']['bare']:.1f} ms | {' | '.join(parts)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bare", action="store_true", help="compare with one convolution instead")
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument(
        "--memory", nargs=5, metavar=("FORM", "B", "D", "L", "L0"), help="measure one layer, and print"
    )
    arguments = parser.parse_args()
    if arguments.memory is not None:
        form, *numbers = arguments.memory
        batch, channels, length, first = map(int, numbers)
        print(json.dumps(memory_of_step(form, (batch, channels, length, first), arguments.device)))
        return
    device, rounds = arguments.device, arguments.rounds
    sizes = SIZES + (SIZES_CUDA if device == "cuda" else [])
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "dtype": "float32",
    }
    name = f"mrconv_layer{'_bare' * arguments.bare}{'_cuda' * (device == 'cuda')}.json"
    if arguments.bare:
        result["beside_bare"] = [beside_bare(size, device, rounds) for size in BARE_SIZES]
    else:
        result["training_step"] = [training_step(size, device, rounds) for size in sizes]
        result["merged_inference"] = [inference(size, device, rounds) for size in sizes]
    output = arguments.output or Path(__file__).parent / "results" / name
    temporary = output.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    temporary.replace(output)
    print(bare_table(result) if arguments.bare else table(result))


if __name__ == "__main__":
    main()
