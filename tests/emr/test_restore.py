"""EMR's operations that restore weights: masks, rescaled weights, rows of an adapter."""

import itertools

import pytest
import torch

from hf_ext.emr import ops
from tests.emr import reference_ops as reference
from tests.emr.blocks import DTYPES, random_block, same_bits


@pytest.mark.parametrize("shape", [(), (0,), (1,), (13,), (5, 7), (5003,)])
@pytest.mark.parametrize("kind", DTYPES)
def test_restore_matches_the_textbook(kernels, kind, shape):
    generator = torch.Generator().manual_seed(1)
    for other in DTYPES:
        base = torch.randn(shape, generator=generator).to(kind)
        unified = (base.float() + torch.randn(shape, generator=generator) * 0.1).to(other)
        mask = torch.randint(0, 256, (-(-base.numel() // 8) + 64,), generator=generator, dtype=torch.uint8)
        for scale in (1.0, 0.7371234, 0.0):
            out, expected = torch.empty(shape, dtype=other), torch.empty(shape, dtype=other)
            ops.restore_block(base, unified, mask, scale, out)
            reference.restore_block(base, unified, mask, scale, expected)
            assert same_bits(out, expected)
    # In place.
    if kind == unified.dtype:
        ops.restore_block(base, unified, mask, 0.0, base)
        assert same_bits(base, expected)


def test_restore_keeps_weights_outside_the_mask_to_the_bit(kernels):
    base = torch.tensor([0.0, -0.0, 1e-45, -3.0] * 8)
    out = torch.empty(32)
    ops.restore_block(base, torch.ones(32), torch.zeros(4, dtype=torch.uint8), 0.9, out)
    assert same_bits(out, base)


def test_restore_on_any_number_of_threads(kernels):
    block = random_block(700_001, 2).merge()
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(block.restored(0))
    finally:
        torch.set_num_threads(before)
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 1000])
def test_masks_are_packed_lowest_bit_first(n):
    bits = torch.rand(n, generator=torch.Generator().manual_seed(n)) < 0.4
    packed = ops.pack_mask(bits)
    assert same_bits(packed, reference.pack_mask(bits)) and packed.shape == (-(-n // 8),)
    assert torch.equal(ops.unpack_mask(packed, n), bits)
    assert torch.equal(reference.unpack_mask(packed, n), bits)


@pytest.mark.parametrize("rank", [1, 5])
def test_rows_of_an_adapter(kernels, rank):
    generator = torch.Generator().manual_seed(rank)
    rows, columns = 37, 29
    base = torch.randn(rows * columns, generator=generator)
    a = torch.randn(rank, columns, generator=generator).bfloat16()
    b = torch.randn(rows, rank, generator=generator)
    expected = torch.empty(rows * columns, dtype=torch.float16)
    reference.lora_rows(base, a, b, 0.3, 0, rows * columns, expected)
    exact = base.view(rows, columns).double() + 0.3 * (b.double() @ a.double())
    torch.testing.assert_close(expected.double().view(rows, columns), exact, rtol=1e-3, atol=1e-3)
    for edges in ([0, 1073], [0, 1, 28, 29, 30, 500, 500, 1073], [*range(0, 1073, 29), 1073]):
        out = torch.full((rows * columns,), torch.nan, dtype=torch.float16)
        for start, stop in itertools.pairwise(edges):
            ops.lora_rows(base[start:stop], a, b, 0.3, start, stop, out[start:stop])
        assert same_bits(out, expected)
