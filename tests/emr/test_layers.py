"""Layers for rows of several tasks: what each task's restored weight gives, without that weight."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_ext.emr import ops
from hf_ext.emr.layers import TaskLayers
from hf_ext.emr.weights import Parts

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def make_parts(shape: tuple[int, int], dtype: torch.dtype) -> tuple[list[Parts], list[torch.Tensor]]:
    """Three tasks' parts of a weight, and the whole weights."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(shape, generator=generator).to(dtype)
    unified = (base.float() + torch.randn(shape, generator=generator)).to(dtype)
    masks = [torch.randint(0, 256, (-(-base.numel() // 8),), generator=generator, dtype=torch.uint8) for _ in range(3)]
    parts = [Parts(base.view(-1), unified.view(-1), m, s) for m, s in zip(masks, [1.0, 0.7, 1.3], strict=True)]
    weights = [torch.empty_like(base) for _ in parts]
    for found, weight in zip(parts, weights, strict=True):
        ops.restore_block(base, unified, found.mask, found.scale, weight)
    return parts, weights


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5), (24, 40), (37, 29), (1030, 131)])
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_by_each_tasks_weight(dtype: torch.dtype, shape: tuple[int, int], transposed: bool, kernels: str):
    parts, weights = make_parts(shape, dtype)
    generator = torch.Generator().manual_seed(1)
    x = [torch.randn(n, shape[0 if transposed else 1], generator=generator).to(dtype) for n in (1, 7, 70)]
    biases = [torch.randn(shape[1 if transposed else 0], generator=generator).to(dtype) for _ in parts]
    given: Any = SimpleNamespace()
    edited = torch.randn(shape, generator=generator).to(dtype)
    cases: list[tuple[list[Any], list[Any]]] = [(parts, weights), ([None, *parts[1:]], [edited, *weights[1:]])]
    for of_tasks, held in cases:
        for bias in ([None] * 3, biases):
            found = TaskLayers(given).multiply(x, edited, of_tasks, bias, transposed)
            for own, weight, add, y in zip(x, held, bias, found, strict=True):
                expected = own.double() @ (weight if transposed else weight.t()).double()
                expected = expected if add is None else expected + add.double()
                assert y.dtype == dtype
                size = 3 * DTYPES[dtype] * float(expected.abs().max())
                torch.testing.assert_close(y.double(), expected, atol=size, rtol=0)
