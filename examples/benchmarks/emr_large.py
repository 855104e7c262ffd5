"""The largest merge for 40 GB of disk: four fine-tunes of a model of 3.1 G weights (the shape of Qwen2.5-3B), bf16.

    python examples/benchmarks/emr_large.py --folder SCRATCH [--quick]

Base and fine-tunes have random weights and are written shard by shard, 31 GB; the artifact takes 8 GB more. `hf-ext
merge` runs in a process of its own, first with --dry-run, which is the plan alone. Then tensors of the result are
compared with the election by plain torch on the whole tensor. A model of 7 G weights would take 70 GB for the
checkpoints alone, and needs no more memory. All that was written is deleted. Needs Linux (/proc). `--quick` takes a
small model, and writes its results to SCRATCH.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from emr_measuring import HERE, keep_to_cores, run_child
from emr_results import machine

TASKS = 4
# Checkpoints and artifact together.
MOST_BYTES = 40e9
LARGE = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
}
SMALL = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def describe(row: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from (
        (key, row[f"process_{key}"]) for key in ("seconds", "processor_seconds", "peak", "bytes_read", "bytes_written")
    )


def measure(folder: Path, shape: dict[str, int]) -> dict[str, Any]:
    """Writes the models, plans and merges them, compares, and deletes everything."""
    stderr, program = folder / "last.log", [sys.executable, str(HERE / "emr_large_set.py")]
    models, out = folder / "large", folder / "large_merged"
    places = (models, out, folder / ".large_merged.partial")
    for place in places:
        shutil.rmtree(place, ignore_errors=True)
    try:
        printed, written = run_child([*program, "write", str(models), json.dumps(shape)], stderr)
        weights = json.loads(printed)["weights"]
        tasks = {f"task{index}": str(models / f"task{index}") for index in range(1, TASKS + 1)}
        yaml = models / "merge.yaml"
        yaml.write_text(json.dumps({"base": str(models / "base"), "tasks": tasks}))
        command = [sys.executable, "-m", "hf_ext_cli.main", "merge", str(yaml), str(out)]
        plan = run_child([*command, "--dry-run"], stderr)[1]
        merge = run_child(command, stderr)[1]
        artifact = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
        compared = json.loads(run_child([*program, "compare", str(models), str(out)], stderr)[0])
    finally:
        for place in places:
            shutil.rmtree(place, ignore_errors=True)
    gigabytes = 2 * weights * (TASKS + 1) / 1e9
    return {
        "weights": weights,
        "tasks": TASKS,
        "checkpoint_gigabytes": gigabytes,
        "artifact_gigabytes": artifact / 1e9,
        "seconds_to_write_the_models": written["process_seconds"],
        "plan": dict(describe(plan)),
        "merge": dict(describe(merge)),
        "seconds_per_gigabyte": merge["process_seconds"] / gigabytes,
        "processor_seconds_per_gigabyte": merge["process_processor_seconds"] / gigabytes,
        "peak_above_plan": merge["process_peak"] - plan["process_peak"],
        "compared": compared,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="scratch folder, outside the repository")
    parser.add_argument("--quick", action="store_true", help="a small model")
    words = parser.parse_args()
    cores = keep_to_cores()
    folder = words.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    shape = SMALL if words.quick else LARGE
    free = shutil.disk_usage(folder).free
    if not words.quick and free < MOST_BYTES:
        parser.error(f"{MOST_BYTES / 1e9:.0f} GB are needed in {folder}, {free / 1e9:.1f} GB are free")
    found = {"model": shape, "machine": machine(cores), **measure(folder, shape)}
    place = folder if words.quick else HERE / "results"
    (place / "emr_large.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
