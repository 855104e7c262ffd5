"""A whole image without tiles: peak memory of the process and time of SemanIR, by the budget of temporary memory.

    OMP_NUM_THREADS=1 python examples/benchmarks/semanir_whole_image.py --sizes 4000x3000 --budgets 256
    OMP_NUM_THREADS=1 python examples/benchmarks/semanir_whole_image.py --sizes 1024x768 --budgets 0 512 64 8

Each size and budget is measured in a process of its own: a colour image of random numbers and random weights of a
preset, float32. Peak memory is the largest resident set: the interpreter, the libraries, the model and the image
included. A budget of 0 computes the whole image at once; for sizes that were computed so, too, the largest difference
between the restored images is given.
"""

import argparse
import time
from collections.abc import Iterator
from typing import Any

import torch
from timing import Content, apart, markdown_table, reset_peak, resident, run
from torch import Tensor

from hf_ext.semanir import SemanIRConfig, SemanIRForImageRestoration
from hf_ext.semanir.configuration_semanir import PRESETS


@torch.no_grad()
def restore(preset: str, width: int, height: int, budget: int) -> tuple[dict[str, Any], Tensor]:
    """The row of one image, and a part of what it became for comparison."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = SemanIRForImageRestoration(SemanIRConfig(**PRESETS[preset])).eval()
    # As large as in training, so that differences in the body are seen in the image.
    model.reconstruction[0].weight *= 50
    model(torch.rand(1, 3, 64, 64))
    model.memory_budget = budget * 2**20 or None
    reset_peak()
    before, image = resident("VmRSS"), torch.rand(1, 3, height, width)
    start, processor_start = time.perf_counter(), time.process_time()
    result = model(image).reconstruction
    seconds, processor_seconds = time.perf_counter() - start, time.process_time() - processor_start
    row = {
        "preset": preset,
        "parameters": model.num_parameters(),
        "width": width,
        "height": height,
        "budget_mib": budget or None,
        "peak_gb": resident("VmHWM") / 1e9,
        "peak_before_the_image_gb": before / 1e9,
        "seconds": seconds,
        "processor_seconds": processor_seconds,
        "finite": bool(result.isfinite().all()),
    }
    return row, result[..., :1024, :1024].clone()


def measure(words: argparse.Namespace) -> Iterator[Content]:
    """All sizes and budgets, the whole image first."""
    rows = []
    for size in words.sizes:
        width, height = map(int, size.split("x"))
        whole = None
        for budget in sorted(words.budgets):
            row, restored = apart(restore, words.preset, width, height, budget)
            if budget == 0:
                whole = restored
            elif whole is not None:
                row["largest_difference"] = (restored - whole).abs().max().item()
            rows.append(row)
            yield {"rows": rows, "dtype": "float32"}


def markdown(content: Content) -> str:
    """A row for each image and budget."""
    lines = []
    for row in content["rows"]:
        difference = row.get("largest_difference")
        image = f"{row['width']} x {row['height']} ({row['width'] * row['height'] / 1e6:.1f} MP)"
        numbers = [f"{row['peak_gb']:.2f}", f"{row['seconds']:.0f}", f"{row['processor_seconds']:.0f}"]
        told = "" if difference is None else f"{difference:.1e}"
        lines.append([row["preset"], image, str(row["budget_mib"] or "none"), *numbers, told])
    header = ["preset", "image", "budget MiB", "peak GB", "seconds", "processor seconds"]
    return markdown_table([*header, "largest difference to one piece"], lines)


if __name__ == "__main__":
    words = {"preset": "u-shaped-small", "sizes": ["4000x3000"], "budgets": [512]}
    run("semanir_whole_image", __doc__, measure, markdown, **words)
