"""The models of `emr_large.py`: `python emr_large_set.py write FOLDER SHAPE`, and `compare FOLDER OUT` after a merge.

Each prints a line of JSON. Programs of their own, so that the memory that they take is not counted as the merge's.
"""

import json
import random
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2ForCausalLM

from hf_ext.files import write_json
from hf_ext.hub.checkpoints import open_checkpoint

TASKS = 4
SHARD_BYTES = 1e9
MOVE = 2e-3
COMPARED = 4


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


def write_models(folder: Path, config: Qwen2Config) -> int:
    """Writes base and fine-tunes, one shard of each in memory at a time; the number of weights."""
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


def main() -> None:
    command, folder, word = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    if command == "write":
        config = Qwen2Config(**json.loads(word), tie_word_embeddings=True, dtype="bfloat16")
        found = {"weights": write_models(folder, config)}
    else:
        found = {"tensors": COMPARED, "different_elements": compare(folder, Path(word))}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
