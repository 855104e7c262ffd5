"""Layers for rows of several tasks: what each task's restored weight gives, without that weight."""

from __future__ import annotations

import pytest
import torch

from hf_ext.emr import ops
from hf_ext.emr.arithmetic import find_kernels
from hf_ext.emr.layers import TaskRows

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def named_rows(*tasks: str) -> TaskRows:
    names = dict.fromkeys(tasks)
    return TaskRows({name: torch.tensor([i for i, task in enumerate(tasks) if task == name]) for name in names})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5), (24, 40), (37, 29), (1030, 131)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 70])
def test_rows_by_each_tasks_weight(dtype: torch.dtype, shape: tuple[int, int], transposed: bool, tokens: int):
    multiply = find_kernels("cpu").multiply_tasks
    if multiply is None:
        pytest.skip("numba is not installed, or not wanted")
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(shape, generator=generator).to(dtype)
    unified = (base.float() + torch.randn(shape, generator=generator)).to(dtype)
    masks = [torch.randint(0, 256, (-(-base.numel() // 8),), generator=generator, dtype=torch.uint8) for _ in range(3)]
    scales = [1.0, 0.7, 1.3]
    weights = [torch.empty_like(base) for _ in range(3)]
    for mask, scale, weight in zip(masks, scales, weights, strict=True):
        ops.restore_block(base, unified, mask, scale, weight)
    rows = named_rows("a", "b", "a", "c", "b").repeat(tokens)
    x = torch.randn(5 * tokens, shape[0] if transposed else shape[1], generator=generator).to(dtype)
    biases = torch.randn(3, shape[1] if transposed else shape[0], generator=generator).to(dtype)
    edited = torch.randn(shape, generator=generator).to(dtype)
    cases = {
        "all restored": (-1, weights[1], masks),
        "one is the model's": (1, weights[1], masks),
        "one is the model's alone": (1, edited, [masks[0], None, masks[2]]),
    }
    for current, own, given in cases.values():
        held = [*weights]
        if current >= 0:
            held[current] = own
        for bias in (None, biases):
            y = multiply(x, rows, base, unified, own, current, given, scales, bias, transposed)
            assert y.dtype == dtype
            for row, task in enumerate(rows.tasks.tolist()):
                weight = held[task].double() if transposed else held[task].double().t()
                expected = x[row].double() @ weight + (0 if bias is None else bias[task].double())
                size = DTYPES[dtype] * float(expected.abs().max())
                torch.testing.assert_close(y[row].double(), expected, atol=3 * size, rtol=0)


def test_threads_change_the_sums_alone():
    multiply = find_kernels("cpu").multiply_tasks
    if multiply is None:
        pytest.skip("numba is not installed, or not wanted")
    generator, shape = torch.Generator().manual_seed(0), (700, 601)
    base, unified = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    mask = torch.randint(0, 256, (-(-base.numel() // 8),), generator=generator, dtype=torch.uint8)
    rows, before = named_rows("a", "b"), torch.get_num_threads()
    try:
        for transposed in (False, True):
            x = torch.randn(2, shape[0] if transposed else shape[1], generator=generator)
            found = []
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                found.append(multiply(x, rows, base, unified, base, -1, [mask, mask], [1.0, 0.5], None, transposed))
            for one in found[1:]:
                torch.testing.assert_close(one, found[0], atol=1e-3, rtol=0)
    finally:
        torch.set_num_threads(before)


def test_rows_of_tasks():
    rows = named_rows("b", "a", "a", "b")
    assert rows.names == ["b", "a"] and rows.order.tolist() == [0, 3, 1, 2] and rows.edges == [0, 2, 4]
    assert rows.tasks.tolist() == [0, 1, 1, 0] and rows.order[rows.inverse].tolist() == [0, 1, 2, 3]
    assert rows.runs == [[slice(0, 1), slice(3, 4)], [slice(1, 3)]]
    twice = rows.repeat(2)
    assert twice.tasks.tolist() == [0, 0, 1, 1, 1, 1, 0, 0] and twice.runs == [
        [slice(0, 2), slice(6, 8)],
        [slice(2, 6)],
    ]
