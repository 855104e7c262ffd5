"""Small checkpoints to merge and how merges are compared; for the tests of the merge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hf_ext.emr.ops import SUB_BLOCK
from hf_ext.merging.merge import merge_checkpoints
from tests.emr.emr_testing import write_tokenizer, write_weights


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
        head = {
            "head.weight": torch.randn(4 + task, 97, generator=generator),
            "position_ids": torch.arange(9) + task // 2,
        }
        write_weights(place / f"t{task}", moved | head, config={"vocab_size": 9}, max_shard_size=100_000)
        write_tokenizer(place / f"t{task}")
    return {"base": str(place / "base"), "tasks": {f"t{task}": str(place / f"t{task}") for task in range(tasks)}}


def siblings(place: Path, *tasks: str, base: str = "base", **options: Any) -> dict[str, Any]:
    """The configuration of a merge of folders that lie side by side."""
    return {"base": str(place / base), "tasks": {name: str(place / name) for name in tasks}, **options}


def merge(config: dict[str, Any], out: Path, **options: Any) -> Path:
    return merge_checkpoints(config | options, out, progress=False).path


def contents(folder: Path) -> dict[str, bytes]:
    """Every file by its path; the card without its title, which is the name of the folder."""
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    found["README.md"] = found["README.md"].replace(folder.name.encode(), b"NAME")
    return found


def assert_same_files(first: Path, second: Path) -> None:
    ours, theirs = contents(first), contents(second)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []
