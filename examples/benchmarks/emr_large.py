"""The largest merge for 40 GB of disk: four fine-tunes of a model of 3.1 G weights (the shape of Qwen2.5-3B), bf16.

    python examples/benchmarks/emr_large.py --folder SCRATCH [--quick]

Base and fine-tunes have random weights and are written in shards, 31 GB; the artifact takes 8 GB more. `hf-ext
merge` runs in a process of its own, first with --dry-run, which is the plan alone. Then tensors of the result are
compared with the election by plain torch on the whole tensor. A model of 7 G weights would take 70 GB for the
checkpoints alone, and needs no more memory. All that was written is deleted. Needs Linux (/proc). `--quick` takes a
small model, and writes its results to SCRATCH.
"""

import argparse
import json
import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from emr_measuring import prepare, run_child, write_base, write_task
from timing import Content, apart, run
from transformers import Qwen2Config

from hf_ext.hub.checkpoints import open_checkpoint

TASKS = 4
# Checkpoints and artifact together.
MOST_BYTES = 40e9
SHARD_BYTES = 1e9
COMPARED = 4
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


def elect(models: list[Path], name: str) -> torch.Tensor:
    """The paper's election of a whole tensor in plain torch: signs of the sums, then the largest that agree."""
    base, *tasks = (open_checkpoint(model)[name].float() for model in models)
    vectors = [task - base for task in tasks]
    total = vectors[0].clone()
    for vector in vectors[1:]:
        total += vector
    highest, lowest = torch.stack(tasks).amax(0), torch.stack(tasks).amin(0)
    return torch.where(total > 0, highest, torch.where(total < 0, lowest, base)).bfloat16()


def compare(models: list[Path], out: Path) -> int:
    """The number of elements, in some tensors of the result, that differ from plain torch."""
    merged = open_checkpoint(out)
    names = [name for name in merged if merged.info(name).nbytes < SHARD_BYTES]
    chosen = random.Random(0).sample(sorted(names), COMPARED)
    return sum(int((merged[name] != elect(models, name)).sum()) for name in chosen)


def measure(words: argparse.Namespace) -> Iterator[Content]:
    """Writes the models, plans and merges them, compares, and deletes everything."""
    scratch, shape = prepare(words), SMALL if words.quick else LARGE
    free = shutil.disk_usage(scratch).free
    if not words.quick and free < MOST_BYTES:
        sys.exit(f"{MOST_BYTES / 1e9:.0f} GB are needed in {scratch}, {free / 1e9:.1f} GB are free")
    folder, out, log = scratch / "large", scratch / "large_merged", scratch / "last.log"
    models = [folder / name for name in ("base", *(f"task{index}" for index in range(1, TASKS + 1)))]
    try:
        shutil.rmtree(folder, ignore_errors=True)
        started = time.perf_counter()
        # In processes of their own, so that the memory that they take is not counted as the merge's.
        apart(write_base, models[0], Qwen2Config(**shape, tie_word_embeddings=True, dtype=torch.bfloat16))
        for seed, model in enumerate(models[1:], 1):
            apart(write_task, models[0], model, seed)
        written = time.perf_counter() - started
        yaml = folder / "merge.yaml"
        yaml.write_text(
            json.dumps({"base": str(models[0]), "tasks": {model.name: str(model) for model in models[1:]}})
        )
        command = [sys.executable, "-m", "hf_ext_cli.main", "merge", str(yaml), str(out)]
        plan = run_child([*command, "--dry-run"], log)[1]
        merge = run_child([*command, "--overwrite"], log)[1]
        sizes = {place: sum(path.stat().st_size for path in place.rglob("*")) / 1e9 for place in (folder, out)}
        checkpoint = open_checkpoint(models[0])
        weights = sum(checkpoint.info(name).nbytes for name in checkpoint) // 2
        different = apart(compare, models, out)
    finally:
        for place in (folder, out, scratch / ".large_merged.partial"):
            shutil.rmtree(place, ignore_errors=True)
    yield {
        "model": shape,
        "weights": weights,
        "tasks": TASKS,
        "checkpoint_gigabytes": sizes[folder],
        "artifact_gigabytes": sizes[out],
        "seconds_to_write_the_models": written,
        "plan": plan,
        "merge": merge,
        "seconds_per_gigabyte": merge["process_seconds"] / sizes[folder],
        "processor_seconds_per_gigabyte": merge["process_processor_seconds"] / sizes[folder],
        "peak_above_plan": merge["process_peak"] - plan["process_peak"],
        "compared": {"tensors": COMPARED, "different_elements": different},
    }


if __name__ == "__main__":
    run("emr_large", __doc__, measure, None, folder="", quick=False)
