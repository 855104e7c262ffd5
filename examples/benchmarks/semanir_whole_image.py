"""A whole image without tiles: peak memory of the process and time of SemanIR, by the budget of temporary memory.

    OMP_NUM_THREADS=1 python examples/benchmarks/semanir_whole_image.py --sizes 4000x3000 --budgets 256
    OMP_NUM_THREADS=1 python examples/benchmarks/semanir_whole_image.py --sizes 1024x768 --budgets 0 512 64 8

Each size and budget is measured in a process of its own: a colour image of random numbers and random weights of a
preset, float32. Peak memory is the largest resident set: the interpreter, the libraries, the model and the image
included. A budget of 0 computes the whole image at once; for sizes that were computed so, too, the largest difference
between the restored images is given. A row is added to the results when it is done, and replaces an older one.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from timing import describe_machine, markdown_table, write_result

from hf_ext.semanir import SemanIRConfig, SemanIRForImageRestoration
from hf_ext.semanir.configuration_semanir import PRESETS

RESULTS = Path(__file__).parent / "results"


def peak_bytes() -> int:
    """Largest resident set of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@torch.no_grad()
def measure(preset: str, width: int, height: int, budget: int, restored: Path) -> dict[str, Any]:
    """Restore one image and keep it for comparison."""
    torch.manual_seed(0)
    model = SemanIRForImageRestoration(SemanIRConfig(**PRESETS[preset])).eval()
    # As large as in training, so that differences in the body are seen in the image.
    model.reconstruction[0].weight *= 50
    model(torch.rand(1, 3, 64, 64))
    model.memory_budget = budget * 2**20 or None
    before = peak_bytes()
    image = torch.rand(1, 3, height, width)
    start, processor_start = time.perf_counter(), time.process_time()
    result = model(image).reconstruction
    seconds, processor_seconds = time.perf_counter() - start, time.process_time() - processor_start
    peak = peak_bytes()
    torch.save(result[..., :1024, :1024].clone(), restored)
    return {
        "preset": preset,
        "parameters": model.num_parameters(),
        "width": width,
        "height": height,
        "megapixels": width * height / 1e6,
        "budget_mib": budget or None,
        "peak_gb": peak / 1e9,
        "peak_before_the_image_gb": before / 1e9,
        "seconds": seconds,
        "processor_seconds": processor_seconds,
        "finite": bool(result.isfinite().all()),
        "threads": torch.get_num_threads(),
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    """A row for each image and budget."""
    lines = []
    for row in rows:
        difference = row.get("largest_difference")
        image = f"{row['width']} x {row['height']} ({row['megapixels']:.1f} MP)"
        numbers = [f"{row['peak_gb']:.2f}", f"{row['seconds']:.0f}", f"{row['processor_seconds']:.0f}"]
        told = "" if difference is None else f"{difference:.1e}"
        lines.append([row["preset"], image, str(row["budget_mib"] or "none"), *numbers, told])
    header = ["preset", "image", "budget MiB", "peak GB", "seconds", "processor seconds"]
    return markdown_table([*header, "largest difference to one piece"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="u-shaped-small", choices=PRESETS)
    parser.add_argument("--sizes", nargs="+", default=["4000x3000"], help="width x height")
    parser.add_argument("--budgets", type=int, nargs="+", default=[512], help="MiB; 0 is no bound")
    parser.add_argument("--output", type=Path, default=RESULTS / "semanir_whole_image.json")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.one:
        width, height = map(int, words.sizes[0].split("x"))
        print(json.dumps(measure(words.preset, width, height, words.budgets[0], words.one)))
        return
    rows = json.loads(words.output.read_text())["rows"] if words.output.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        for size in words.sizes:
            whole = None
            for budget in sorted(words.budgets):
                restored = Path(folder) / f"{size}-{budget}.pt"
                command = [sys.executable, __file__, "--preset", words.preset, "--sizes", size, "--budgets"]
                done = subprocess.run(
                    [*command, str(budget), "--one", str(restored)], check=True, stdout=subprocess.PIPE, text=True
                )
                row = json.loads(done.stdout)
                if budget == 0:
                    whole = torch.load(restored)
                elif whole is not None:
                    row["largest_difference"] = (torch.load(restored) - whole).abs().max().item()
                same = ("preset", "width", "height", "budget_mib")
                rows = [old for old in rows if any(old[name] != row[name] for name in same)] + [row]
                content = {"rows": rows, "dtype": "float32", **describe_machine("torch", "transformers", "hf-ext")}
                write_result(words.output, content, markdown(rows))


if __name__ == "__main__":
    main()
