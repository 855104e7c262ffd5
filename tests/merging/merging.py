"""Small checkpoints to merge and how merges are compared; for the tests of the merge."""

from pathlib import Path
from typing import Any

import torch

from hf_ext.emr.arithmetic import SEGMENT, SUB_BLOCK
from hf_ext.merging.merge import merge_checkpoints
from hf_ext.merging.methods import METHODS, Block
from tests.emr.emr_testing import write_tokenizer, write_weights
from tests.hub import published


def write_set(place: Path, tasks: int = 3, seed: int = 0) -> dict[str, Any]:
    """A base and its fine-tunes in several types, with heads, buffers and odd lengths; their configuration."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (411, 97), "a.bias": (97,), "b.weight": (SUB_BLOCK * 2 + 1,), "scale": ()}
    base = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}
    write_weights(place / "base", base | {"position_ids": torch.arange(9)}, config={"vocab_size": 9})
    write_tokenizer(place / "base")
    for task in range(tasks):
        moved = {name: values + torch.randn(values.shape, generator=generator) * 1e-2 for name, values in base.items()}
        dtype = (torch.float32, torch.bfloat16, torch.float16)[task % 3]
        moved = {name: values.to(dtype) for name, values in moved.items()}
        moved["head.weight"] = torch.randn(4 + task, 97, generator=generator)
        moved["position_ids"] = torch.arange(9) + task // 2
        write_weights(place / f"t{task}", moved, config={"vocab_size": 9}, max_shard_size=100_000)
        write_tokenizer(place / f"t{task}")
    return siblings(place, *(f"t{task}" for task in range(tasks)))


def siblings(place: Path, *tasks: str, base: str = "base", **options: Any) -> dict[str, Any]:
    """The configuration of a merge of folders that lie side by side."""
    return {"base": str(place / base), "tasks": {name: str(place / name) for name in tasks}, **options}


def merge(config: dict[str, Any], out: Path, **options: Any) -> Path:
    return merge_checkpoints(config | options, out, progress=False).path


def contents(folder: Path) -> dict[str, bytes]:
    """Every file by its path; the card without its title, which is the name of the folder."""
    found = published.contents(folder)
    return found | {"README.md": found["README.md"].replace(folder.name.encode(), b"NAME")}


def weights_of(folder: Path) -> dict[str, bytes]:
    """Every weight file but the sums, which a changed artifact knows less of, and code may take in another order."""
    found = published.contents(folder)
    return {name: data for name, data in found.items() if name.endswith(".safetensors") and "sums" not in name}


def assert_same_files(first: Path, second: Path) -> None:
    ours, theirs = contents(first), contents(second)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


def run_method(
    name: str,
    base: torch.Tensor,
    models: list[torch.Tensor],
    *,
    statistics: list[torch.Tensor] | None = None,
    inputs_first: bool = False,
    count: int | None = None,
    **options: Any,
) -> torch.Tensor:
    """What a method makes of one tensor; it may overwrite task vectors and statistics."""
    vectors = [model - base for model in models]
    block = Block("w", tuple(base.shape), 0, base, vectors, count=count or len(models), inputs_first=inputs_first)
    block.statistic = lambda place: None if statistics is None else statistics[place].clone()
    found: torch.Tensor = METHODS[name].function(block, **options)
    return found


# Checkpoints of the tests of updates. A segment and a bit, an odd length, a tensor that only the third task has as the
# base has it.
CONFIG = {"model_type": "bert", "architectures": ["BertModel"]}
SHAPES = {"large.weight": (SEGMENT + 77,), "odd.weight": (5, 13), "norm.bias": (9,), "late.weight": (33,)}


def vectors(seed: int, late: int = 33) -> dict[str, torch.Tensor]:
    """Weights around the base, some of them equal to it, all of them on a coarse grid, so that ties happen."""
    generator = torch.Generator().manual_seed(0)
    found = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}
    if seed:
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in found.items():
            steps = torch.randint(-2, 3, tensor.shape, generator=generator)
            found[name] = (tensor.float() + steps * 0.25).bfloat16()
    found = {name: tensor.float() for name, tensor in found.items()}
    return found | {"late.weight": found["late.weight"].repeat(3)[:late].clone()}


def write_sources(place: Path) -> Path:
    """A base and three tasks; the head of each is its own; in a and b `late.weight` has another shape."""
    write_weights(place / "base", vectors(0), config=CONFIG)
    for seed, name in enumerate("abc", start=1):
        head = {"head.weight": torch.full((seed, 3), float(seed))}
        write_weights(place / name, vectors(seed, 33 if name == "c" else 34) | head, config=CONFIG)
    return place
