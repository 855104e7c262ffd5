"""What the method promises of one block: the identities of the specification, section 1.5."""

import math

import pytest
import torch

from tests.emr.blocks import DTYPES, Block, random_block, same_bits


def test_one_task_is_itself(kernels):
    for kind in DTYPES:
        block = random_block(9001, 1, base=kind, tasks=(kind,), dtype=kind).merge()
        assert same_bits(block.unified, torch.where(block.tasks[0] == block.base, block.base, block.tasks[0]))
        assert torch.equal(block.bits(0), block.tasks[0] != block.base)
        assert block.scale(0) == 1.0
        if kind != torch.float32:
            assert torch.equal(block.restored(0), block.tasks[0])
        torch.testing.assert_close(block.restored(0), block.tasks[0], rtol=1e-6, atol=1e-9)


def test_identical_tasks_are_one_task(kernels):
    single = random_block(9001, 1, seed=5).merge()
    block = Block(single.base, single.tasks * 4).merge()
    assert same_bits(block.unified, single.unified)
    assert all(same_bits(block.masks[task], single.masks[0]) for task in range(4))
    assert all(same_bits(block.sums[task], single.sums[0]) for task in range(4))


def test_positive_scalings_are_recovered(kernels):
    # Powers of two and few mantissa bits, so that every number here is exact.
    direction = torch.randint(-64, 64, (9001,), generator=torch.Generator().manual_seed(0)) / 1024
    base, factors = torch.full((9001,), 0.5), [0.25, 1.0, 0.5]
    block = Block(base, [base + factor * direction for factor in factors]).merge()
    assert torch.equal(block.unified, base + direction)
    for task, factor in enumerate(factors):
        assert torch.equal(block.bits(task), direction != 0)
        assert block.scale(task) == factor
        assert torch.equal(block.restored(task), block.tasks[task])


def test_disjoint_supports_are_recovered(kernels):
    block = random_block(9001, 3, seed=3)
    turn = torch.arange(9001) % 3
    block.tasks = [torch.where(turn == index, task, block.base) for index, task in enumerate(block.tasks)]
    block.merge()
    assert torch.equal(block.unified, torch.stack(block.tasks).gather(0, turn[None])[0])
    for task in range(3):
        assert torch.equal(block.bits(task), block.tasks[task] != block.base)
        assert block.scale(task) == 1.0
        torch.testing.assert_close(block.restored(task), block.tasks[task], rtol=0, atol=1e-8)


def test_permuted_tasks_permute_the_result(kernels):
    # In steps of 2**-13 the order in which a vote is added up does not matter.
    block = random_block(9001, 4, spread=2e-3)
    block.base = (block.base * 8192).round() / 8192
    block.tasks = [(task * 8192).round() / 8192 for task in block.tasks]
    block.merge()
    order = [2, 0, 3, 1]
    other = Block(block.base, [block.tasks[task] for task in order]).merge()
    # Of +0 and -0 the first is elected.
    assert torch.equal(other.unified, block.unified)
    assert same_bits(other.masks, block.masks[order])
    assert same_bits(other.sums, block.sums[order])


def test_scaled_vectors_scale_the_result(kernels):
    block = random_block(9001, 4)
    block.base = torch.zeros(9001)
    block.merge()
    larger = Block(block.base, [8 * task for task in block.tasks]).merge()
    assert torch.equal(larger.unified, 8 * block.unified)
    assert same_bits(larger.masks, block.masks)
    assert [larger.scale(task) for task in range(4)] == [block.scale(task) for task in range(4)]


def test_masks_lie_in_the_supports_and_cover_the_unified_one(kernels):
    block = random_block(9001, 5, base=torch.bfloat16, tasks=(torch.bfloat16,), dtype=torch.bfloat16).merge()
    bits = torch.stack([block.bits(task) for task in range(5)])
    deltas = torch.stack([task.float() - block.base.float() for task in block.tasks])
    common = block.unified.float() - block.base.float()
    assert not (bits & (deltas == 0)).any()
    assert torch.equal(bits.any(dim=0), common != 0)
    # No restored weight moves against its task: the sign conflict is zero.
    for task in range(5):
        moved = block.restored(task, torch.float32) - block.base.float()
        assert not (moved * deltas[task] < 0).any()


def test_density_of_random_vectors(kernels):
    """½ + arcsin(1/√N)/π for independent symmetric Gaussian task vectors."""
    for count in (2, 4, 8):
        block = random_block(2**17, count, seed=count)
        block.base, block.tasks = torch.zeros(2**17), [torch.randn(2**17) for _ in range(count)]
        density = block.merge().column("mask") / 2**17
        expected = 0.5 + math.asin(count**-0.5) / math.pi
        # Four standard deviations of a share of 2**17.
        assert (density - expected).abs().max() < 4 * 0.5 / 2**8.5


def test_toy_by_hand(kernels):
    """λ of the specification's counterexample is 16 / 13 = 1.23: masked-out mass may exceed what remains."""
    ours = torch.tensor([10.0, 1, 1, 1, -1, -1, -1])
    elected = torch.tensor([10.0, 1, 1, 1, 3, 3, 3])
    block = Block(torch.zeros(7), [ours, elected]).merge()
    assert torch.equal(block.unified, elected)
    assert block.masks[:, 0].tolist() == [0b0001111, 0b1111111]
    assert block.sums.tolist() == [
        [16, 106, 7, 4, 13, 103, 103, 94, 3, 3],
        [22, 130, 7, 7, 22, 130, 130, 130, 0, 0],
    ]
    assert block.totals.tolist() == [0, 22, 130, 7]
    assert block.gram.tolist() == [[106, 94], [0, 130]]
    assert block.scale(0) == 16 / 13
    # The rescaled vector is farther from the task than the masked one: 8.49 against 3.
    assert (elected[:4] - ours[:4]).square().sum() + ours[4:].square().sum() == 3
    assert (block.restored(0) - ours).square().sum().item() == pytest.approx(103 * (3 / 13) ** 2 + 3)
