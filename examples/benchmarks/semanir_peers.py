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
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timing import describe_machine, in_turns, write_result
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
    fields = PRESETS[preset]
    config = Swin2SRConfig(
        image_size=side,
        embed_dim=fields["embed_dim"],
        depths=list(fields["depths"]),
        num_heads=list(fields["num_heads"]),
        mlp_ratio=fields["mlp_ratio"],
        window_size=window,
        upscale=SCALE,
        upsampler="pixelshuffle",
    )
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


def run_once(entry: Forward, image: torch.Tensor) -> float:
    start = time.perf_counter()
    with torch.no_grad():
        entry(image)
    return time.perf_counter() - start


def warm(entries: dict[str, Forward], window: int) -> None:
    """A first call on one window, which compiles."""
    for entry in entries.values():
        run_once(entry, make_image(window))


def resident(field: str) -> int:
    """Bytes. Not getrusage, whose maximum a process inherits from the one that starts it."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(status.split(field + ":")[1].split()[0])


def memory_of(name: str, window: int, side: int) -> dict[str, float]:
    entries, _ = make_entries(window, side, [name])
    warm(entries, window)
    image = make_image(side)
    # Memory that the first call has freed but still holds would hide what the next one needs.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = resident("VmRSS")
    seconds = run_once(entries[name], image)
    return {"bytes": resident("VmHWM") - before, "loaded_bytes": before, "seconds": seconds}


def measure(window: int, words: argparse.Namespace) -> tuple[dict[str, int], dict[str, list[float]], dict[str, Any]]:
    """Parameters of each entry, its seconds by round, and its memory in a process of its own."""
    entries, models = make_entries(window, words.side, words.entries)
    parameters = {name: sum(weight.numel() for weight in model.parameters()) for name, model in models.items()}
    warm(entries, window)
    image, memory = make_image(words.side), {}
    times = in_turns(words.entries, words.rounds, lambda name: run_once(entries[name], image))
    for name in words.entries:
        command = [sys.executable, __file__, "--memory", name, "--windows", str(window), "--side", str(words.side)]
        memory[name] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return parameters, times, memory


def summarize(content: dict[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """Of each window and entry: median seconds, MiB, and what they are of Swin2SR's."""
    result: dict[str, dict[str, dict[str, float]]] = {}
    for window, times in content["seconds"].items():
        memory, rows = content["memory"].get(window, {}), {}
        for name, seconds in times.items():
            rows[name] = row = {}
            pairs = list(zip(seconds, times.get(PEER, []), strict=False))
            if pairs:
                row["seconds"] = statistics.median(seconds)
                row["time_ratio"] = statistics.median(ours / theirs for ours, theirs in pairs)
            if name in memory and PEER in memory:
                row["mebibytes"] = memory[name]["bytes"] / 2**20
                row["memory_ratio"] = memory[name]["bytes"] / memory[PEER]["bytes"]
        result[window] = rows
    return result


def markdown(content: dict[str, Any]) -> str:
    lines = [
        "| window | model | parameters | s | of Swin2SR's time | peak MiB | of Swin2SR's memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for window, rows in summarize(content).items():
        for name, row in rows.items():
            millions = content["parameters"].get(window, {}).get(name, 0) / 1e6
            cells = [
                f"{row[field]:{style}}" if field in row else "not run"
                for field, style in (("seconds", ".2f"), ("time_ratio", ".2f"), ("mebibytes", ".0f"))
                + (("memory_ratio", ".2f"),)
            ]
            lines.append(f"| {window} | {name} | {millions:.3f} M | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=128, help="of the input, a multiple of every window")
    parser.add_argument("--windows", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--entries", nargs="+", default=entry_names(), choices=entry_names(), metavar="ENTRY")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--memory", metavar="ENTRY", help="measure one entry in this process, and print")
    words = parser.parse_args()
    torch.set_num_threads(1)
    if words.memory:
        print(json.dumps(memory_of(words.memory, words.windows[0], words.side)))
        return
    setting = {"input": [words.side, words.side], "scale": SCALE, "dtype": "float32"}
    content: dict[str, Any] = {"setting": setting, "parameters": {}, "seconds": {}, "memory": {}}
    name = "semanir_peers.json" if words.side == 128 else f"semanir_peers_{words.side}.json"
    for window in words.windows:
        for kind, found in zip(("parameters", "seconds", "memory"), measure(window, words), strict=True):
            content[kind][str(window)] = found
        # After each window: it is a long run.
        content["setting"] = setting | describe_machine("torch", "transformers", "numba")
        write_result(words.output or Path(__file__).parent / "results" / name, content, markdown(content))


if __name__ == "__main__":
    main()
