"""SemanIR beside Swin2SR of transformers: time and memory of x4 super-resolution against k and window.

    OMP_NUM_THREADS=1 python examples/benchmarks/semanir_peers.py              # 128 x 128 -> 512 x 512, for hours
    OMP_NUM_THREADS=1 python examples/benchmarks/semanir_peers.py --side 64

The paper's S model (36 layers, 180 channels, 6 heads) and Swin2SR with the same depths, widths and heads, which has
2 % more parameters; random weights, float32, CPU, one image, no gradients, each as transformers gives it by default.
One group for each window; k from N/8 to N, where N is dense. Within a round every entry of a group runs once, in an
order that turns from round to round; a ratio is the median over the rounds. Memory is measured in a process of its own
for each entry: by how much the largest resident size during a forward pass (VmHWM, reset before it) exceeds the
resident size of the loaded and warmed-up model. The file is written after each window.
"""

import argparse
import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timing import Content, apart, compare, markdown_table, reset_peak, resident, run, time_of
from torch import nn
from transformers import Swin2SRConfig, Swin2SRForImageSuperResolution

from hf_ext.semanir import SemanIRConfig, SemanIRForImageRestoration
from hf_ext.semanir.configuration_semanir import PRESETS

SCALE, PARTS = 4, (8, 4, 2, 1)
PEER = "Swin2SR"
Forward = Callable[[torch.Tensor], Any]


def entry_names() -> list[str]:
    return [PEER] + [f"SemanIR, k = N/{part}" if part > 1 else "SemanIR, k = N" for part in PARTS]


def make_semanir(window: int, preset: str) -> SemanIRForImageRestoration:
    tokens = window**2
    changes = {"window_size": window, "scale": SCALE, "top_k": tokens // 2, "train_top_k": [tokens // 8, tokens]}
    torch.manual_seed(0)
    return SemanIRForImageRestoration(SemanIRConfig(**{**PRESETS[preset], **changes})).eval()


def make_swin2sr(window: int, side: int, preset: str) -> Swin2SRForImageSuperResolution:
    fields = {name: PRESETS[preset][name] for name in ("embed_dim", "depths", "num_heads", "mlp_ratio")}
    sizes = {"image_size": side, "window_size": window, "upscale": SCALE, "upsampler": "pixelshuffle"}
    config = Swin2SRConfig(**fields, **sizes)
    torch.manual_seed(0)
    return Swin2SRForImageSuperResolution(config).eval()


def make_entries(
    window: int, side: int, names: list[str], preset: str = "columnar-s"
) -> tuple[dict[str, Forward], dict[str, nn.Module]]:
    """Calls, and the models behind them; one SemanIR serves every k."""
    ours = make_semanir(window, preset) if any(name != PEER for name in names) else None
    entries: dict[str, Forward] = {}
    models: dict[str, nn.Module] = {}
    for name, part in zip(entry_names(), (0, *PARTS), strict=True):
        if name == PEER and name in names:
            models[name] = entries[name] = make_swin2sr(window, side, preset)
        elif name in names and ours is not None:
            models[name] = ours
            entries[name] = lambda image, k=window**2 // part: ours(image, top_k=k)
    return entries, models


def make_image(side: int) -> torch.Tensor:
    """Smooth shapes with some grain."""
    generator = torch.Generator().manual_seed(0)
    shapes = F.interpolate(torch.rand(1, 3, 16, 16, generator=generator), (side, side), mode="bicubic")
    return (shapes + 0.05 * torch.rand(1, 3, side, side, generator=generator)).clamp(0, 1)


@torch.no_grad()
def memory_of(name: str, window: int, side: int) -> dict[str, float]:
    torch.set_num_threads(1)
    entry = make_entries(window, side, [name])[0][name]
    # A first call on one window, which compiles.
    entry(make_image(window))
    image = make_image(side)
    # Memory that the first call has freed but still holds would hide what the next one needs.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    reset_peak()
    before = resident("VmRSS")
    seconds = time_of(lambda: entry(image), time.perf_counter)
    return {"bytes": resident("VmHWM") - before, "loaded_bytes": before, "seconds": seconds}


@torch.no_grad()
def measure_window(window: int, words: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Of each entry: parameters, median seconds, memory in a process of its own, and their share of Swin2SR's."""
    entries, models = make_entries(window, words.side, entry_names())
    image = make_image(words.side)
    calls = {name: partial(entry, image) for name, entry in entries.items()}
    times = compare(calls, words.rounds, clock=time.perf_counter)
    memory = {name: apart(memory_of, name, window, words.side)["bytes"] for name in entries}
    return {
        name: {
            "parameters": sum(weight.numel() for weight in models[name].parameters()),
            "seconds": times[name]["seconds"],
            "time_ratio": times[name]["ratio"],
            "mebibytes": memory[name] / 2**20,
            "memory_ratio": memory[name] / memory[PEER],
        }
        for name in entries
    }


def measure(words: argparse.Namespace) -> Iterator[Content]:
    """All windows."""
    windows: dict[str, Any] = {}
    for window in words.windows:
        windows[str(window)] = measure_window(window, words)
        # After each window: it is a long run.
        yield {"windows": windows, "setting": {"input": [words.side, words.side], "scale": SCALE, "dtype": "float32"}}


def markdown(content: Content) -> str:
    lines = []
    for window, rows in content["windows"].items():
        for name, row in rows.items():
            cells = [f"{row[key]:.2f}" for key in ("seconds", "time_ratio")]
            memory = [f"{row['mebibytes']:.0f}", f"{row['memory_ratio']:.2f}"]
            lines.append([window, name, f"{row['parameters'] / 1e6:.3f} M", *cells, *memory])
    header = ["window", "model", "parameters", "s", "of Swin2SR's time", "peak MiB", "of Swin2SR's memory"]
    return markdown_table(header, lines)


if __name__ == "__main__":
    run("semanir_peers", __doc__, measure, markdown, side=128, windows=[8, 16, 32], rounds=5)
