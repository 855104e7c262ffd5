"""Writes checkpoints to merge: `python emr_sets.py FOLDER --tasks 8 --width 768 --layers 12`.

The base is a GPT-2 of transformers' own initialisation; in each fine-tune every weight is moved by a uniform random
number of ±2e-3. What is there is kept.
"""

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel

MOVE = 2e-3


def write_base(folder: Path, width: int, layers: int) -> None:
    torch.manual_seed(0)
    config = GPT2Config(n_embd=width, n_layer=layers, n_head=width // 64)
    GPT2LMHeadModel(config).save_pretrained(folder, max_shard_size="100GB")


def write_task(base: Path, folder: Path, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    # One model at a time in memory: the large set has 5 GB a file.
    weights = load_file(base / "model.safetensors")
    for weight in weights.values():
        weight += torch.rand(weight.shape, generator=generator).mul_(2 * MOVE).sub_(MOVE)
    for file in base.glob("*.json"):
        shutil.copy(file, folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    words = parser.parse_args()
    for index in tqdm(range(words.tasks + 1), "checkpoints", disable=None):
        folder = words.folder / (f"task{index}" if index else "base")
        if folder.exists():
            continue
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        if index:
            write_task(words.folder / "base", partial, index)
        else:
            write_base(partial, words.width, words.layers)
        partial.rename(folder)


if __name__ == "__main__":
    main()
