"""Checkpoints that take part in the tests of updates, and merges of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hf_ext.emr.ops import SEGMENT
from tests.emr.emr_testing import write_weights
from tests.hub.published import contents
from tests.merging import merging

CONFIG = {"model_type": "bert", "architectures": ["BertModel"]}
# A segment and a bit, an odd length, a tensor that only the third task has as the base has it.
SHAPES = {"large.weight": (SEGMENT + 77,), "odd.weight": (5, 13), "norm.bias": (9,), "late.weight": (33,)}
NAMES = ("a", "b", "c")


def vectors(seed: int, dtype: torch.dtype = torch.float32, late: tuple[int, ...] = (33,)) -> dict[str, torch.Tensor]:
    """Weights around the base, some of them equal to it, all of them on a coarse grid, so that ties happen."""
    generator = torch.Generator().manual_seed(0)
    base = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}
    if seed:
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in base.items():
            steps = torch.randint(-2, 3, tensor.shape, generator=generator)
            base[name] = (tensor.float() + steps * 0.25).bfloat16()
    found = {name: tensor.to(dtype) for name, tensor in base.items()}
    found["late.weight"] = found["late.weight"].repeat(3)[: late[0]].clone()
    return found


def write_sources(place: Path) -> Path:
    """A base and three tasks; the head of each is its own; in a and b `late.weight` has another shape."""
    write_weights(place / "base", vectors(0), config=CONFIG)
    for seed, name in enumerate(NAMES, start=1):
        head = {"head.weight": torch.full((seed, 3), float(seed))}
        late = (33,) if name == "c" else (34,)
        write_weights(place / name, vectors(seed, late=late) | head, config=CONFIG)
    return place


def merge(sources: Path, names: str, out: Path, **options: Any) -> Path:
    """Merges the tasks with these letters."""
    return merging.merge(merging.siblings(sources, *names), out, **options)


def weights_of(folder: Path) -> dict[str, bytes]:
    """Every weight file but the sums, which a changed artifact knows less of."""
    return {
        name: data
        for name, data in contents(folder).items()
        if name.endswith(".safetensors") and not name.endswith("sums.safetensors")
    }
