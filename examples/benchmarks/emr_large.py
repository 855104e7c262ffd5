"""The largest merge for 40 GB of disk: four fine-tunes of a model of 3.1 G weights (the shape of Qwen2.5-3B), bf16.

    python examples/benchmarks/emr_large.py --folder SCRATCH [--quick]

Base and fine-tunes have random weights and are written shard by shard, 31 GB; the artifact takes 8 GB more. `hf-ext
merge` runs in a process of its own, first with --dry-run, which is the plan alone. Then tensors of the result are
compared with the election by plain torch on the whole tensor. A model of 7 G weights would take 70 GB for the
checkpoints alone, and needs no more memory. All that was written is deleted. Needs Linux (/proc). `--quick` takes a
small model, and writes its results to SCRATCH.
"""

import json
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from emr_measuring import read_words, run_child, write_found
from safetensors.torch import save_file
from timing import apart
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2ForCausalLM

from hf_ext.files import write_json
from hf_ext.hub.checkpoints import open_checkpoint

TASKS = 4
# Checkpoints and artifact together.
MOST_BYTES = 40e9
SHARD_BYTES = 1e9
MOVE = 2e-3
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


def list_shards(config: Qwen2Config) -> list[dict[str, tuple[int, ...]]]:
    """Names and shapes of the model's tensors, shard by shard."""
    with torch.device("meta"):
        held = Qwen2ForCausalLM(config).state_dict()
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, tensor in held.items():
        if name == "lm_head.weight":
            # tied to the embedding
            continue
        size = 2 * tensor.numel()
        if shards[-1] and filled + size > SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = tuple(tensor.shape)
        filled += size
    return shards


def write_models(folder: Path, shape: dict[str, int]) -> int:
    """Writes base and fine-tunes, one shard of each in memory at a time; the number of weights."""
    config = Qwen2Config(**shape, tie_word_embeddings=True, dtype="bfloat16")
    shards = list_shards(config)
    places = [folder / name for name in ("base", *(f"task{index}" for index in range(1, TASKS + 1)))]
    weight_map = {}
    generator = torch.Generator().manual_seed(0)
    for place in places:
        place.mkdir(parents=True)
        config.save_pretrained(place)
    for number, shapes in enumerate(tqdm(shards, "shards", disable=None), 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        weight_map |= dict.fromkeys(shapes, file)
        base = {name: torch.empty(shape).normal_(0, 0.02, generator=generator) for name, shape in shapes.items()}
        for place in places:
            weights = base
            if place != places[0]:
                weights = {
                    name: weight + torch.empty(weight.shape).uniform_(-MOVE, MOVE, generator=generator)
                    for name, weight in base.items()
                }
            halves = {name: weight.bfloat16() for name, weight in weights.items()}
            save_file(halves, place / file, metadata={"format": "pt"})
    count = sum(torch.Size(shape).numel() for shapes in shards for shape in shapes.values())
    index = {"metadata": {"total_size": 2 * count}, "weight_map": weight_map}
    for place in places:
        write_json(place / "model.safetensors.index.json", index)
    return count


def elect(folder: Path, name: str) -> torch.Tensor:
    """The paper's election of a whole tensor in plain torch: signs of the sums, then the largest that agree."""
    read = (open_checkpoint(folder / place) for place in ("base", *(f"task{index}" for index in range(1, TASKS + 1))))
    base, *tasks = (checkpoint[name].float() for checkpoint in read)
    vectors = [task - base for task in tasks]
    total = vectors[0].clone()
    for vector in vectors[1:]:
        total += vector
    highest, lowest = torch.stack(tasks).amax(0), torch.stack(tasks).amin(0)
    return torch.where(total > 0, highest, torch.where(total < 0, lowest, base)).bfloat16()


def compare(folder: Path, out: Path) -> int:
    """The number of elements, in some tensors of the result, that differ from plain torch."""
    merged = open_checkpoint(out)
    names = [name for name in merged if merged.info(name).nbytes < SHARD_BYTES]
    chosen = random.Random(0).sample(sorted(names), COMPARED)
    return sum(int((merged[name] != elect(folder, name)).sum()) for name in chosen)


def measure(folder: Path, shape: dict[str, int]) -> dict[str, Any]:
    """Writes the models, plans and merges them, compares, and deletes everything."""
    models, out, stderr = folder / "large", folder / "large_merged", folder / "last.log"
    places = (models, out, folder / ".large_merged.partial")
    for place in places:
        shutil.rmtree(place, ignore_errors=True)
    try:
        started = time.perf_counter()
        # In a process of its own, so that the memory that it takes is not counted as the merge's.
        weights = apart(write_models, models, shape)
        written = time.perf_counter() - started
        tasks = {f"task{index}": str(models / f"task{index}") for index in range(1, TASKS + 1)}
        yaml = models / "merge.yaml"
        yaml.write_text(json.dumps({"base": str(models / "base"), "tasks": tasks}))
        command = [sys.executable, "-m", "hf_ext_cli.main", "merge", str(yaml), str(out)]
        plan = run_child([*command, "--dry-run"], stderr)[1]
        merge = run_child(command, stderr)[1]
        artifact = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
        different = apart(compare, models, out)
    finally:
        for place in places:
            shutil.rmtree(place, ignore_errors=True)
    gigabytes = 2 * weights * (TASKS + 1) / 1e9
    return {
        "model": shape,
        "weights": weights,
        "tasks": TASKS,
        "checkpoint_gigabytes": gigabytes,
        "artifact_gigabytes": artifact / 1e9,
        "seconds_to_write_the_models": written,
        "plan": plan,
        "merge": merge,
        "seconds_per_gigabyte": merge["process_seconds"] / gigabytes,
        "processor_seconds_per_gigabyte": merge["process_processor_seconds"] / gigabytes,
        "peak_above_plan": merge["process_peak"] - plan["process_peak"],
        "compared": {"tensors": COMPARED, "different_elements": different},
    }


def main() -> None:
    words, scratch, results = read_words(__doc__)
    free = shutil.disk_usage(scratch).free
    if not words.quick and free < MOST_BYTES:
        sys.exit(f"{MOST_BYTES / 1e9:.0f} GB are needed in {scratch}, {free / 1e9:.1f} GB are free")
    write_found(measure(scratch, SMALL if words.quick else LARGE), results, "emr_large")


if __name__ == "__main__":
    main()
