"""EMR's block operations: compiled, torch and textbook agree; the identities that the method promises hold."""

import itertools
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ext.emr import ops_emr as ops
from hf_ext.emr import reference_emr as reference

DTYPES = ops.DTYPES
COLUMN = {name: index for index, name in enumerate(ops.SUMS)}
# Sums that may cancel are compared against the sum of their magnitudes.
RELATIVE = 1e-12
PATHS = ("compiled", "torch")


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    """Run a test on the compiled kernels and on plain torch."""
    if request.param == "torch":
        monkeypatch.setattr(ops, "_compiled", lambda: None)
    elif ops._compiled() is None:
        pytest.skip("numba is not installed")
    return request.param


@dataclass
class Block:
    """What one call takes and gives."""

    base: torch.Tensor
    tasks: list[torch.Tensor]
    dtype: torch.dtype = torch.float32
    unified: torch.Tensor = field(init=False)
    masks: torch.Tensor = field(init=False)
    sums: torch.Tensor = field(init=False)
    totals: torch.Tensor = field(init=False)
    gram: torch.Tensor = field(init=False)

    def __post_init__(self):
        count, n = len(self.tasks), len(self.base)
        # Filled with what a wrong result would keep.
        self.unified = torch.full((n,), torch.nan).to(self.dtype)
        self.masks = torch.full((count, -(-n // 8) + 3), 0xA5, dtype=torch.uint8)
        self.sums = torch.zeros(count, len(ops.SUMS), dtype=torch.float64)
        self.totals = torch.zeros(len(ops.TOTALS), dtype=torch.float64)
        self.gram = torch.zeros(count, count, dtype=torch.float64)

    def merge(self, module=ops, cuts=(), **options):
        """Merge, cut into blocks after the sub-blocks in `cuts`."""
        return self._run(module.merge_block, cuts, options)

    def mask(self, unified, module=ops, cuts=(), **options):
        self.unified = unified
        return self._run(module.mask_block, cuts, options)

    def _run(self, operation, cuts, options):
        first = options.pop("first", 0)
        edges = [0, *(cut * ops.SUB_BLOCK for cut in cuts), len(self.base)]
        for low, high in itertools.pairwise(edges):
            masks = self.masks[:, low // 8 :].clone()
            operation(
                self.base[low:high],
                [task[low:high] for task in self.tasks],
                self.unified[low:high],
                masks,
                self.sums,
                self.totals,
                self.gram,
                first=first + low // ops.SUB_BLOCK,
                **options,
            )
            self.masks[:, low // 8 :] = masks
        return self

    def bits(self, task):
        return ops.unpack_mask(self.masks[task], len(self.base))

    def column(self, name):
        return self.sums[:, COLUMN[name]]

    def scale(self, task):
        """λ of the paper: Σ|τ_t| / Σ M_t|τ_uni|."""
        return (self.column("abs")[task] / self.column("masked_abs")[task]).item()

    def restored(self, task, dtype=None):
        out = torch.empty(len(self.base), dtype=dtype or self.dtype)
        ops.restore_block(self.base, self.unified, self.masks[task], self.scale(task), out)
        return out


def random_block(n, count, *, base=torch.float32, tasks=(torch.float32,), dtype=torch.float32, seed=0, spread=2e-3):
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(n, generator=generator) * 0.02
    weights = [start + torch.randn(n, generator=generator) * spread for _ in range(count)]
    chosen = itertools.cycle(tasks)
    return Block(start.to(base), [weight.to(next(chosen)) for weight in weights], dtype)


def same_bits(first, second):
    """Equal dtypes, shapes and bits: -0.0 is not 0.0 and every NaN is a NaN."""
    assert first.dtype == second.dtype and first.shape == second.shape
    view = {4: torch.int32, 2: torch.int16, 1: torch.uint8, 8: torch.int64}[first.element_size()]
    numbers = ~(first.isnan() & second.isnan()) if first.is_floating_point() else slice(None)
    return torch.equal(first.view(view)[numbers], second.view(view)[numbers])


def assert_agree(block, other, relative=RELATIVE):
    """`same` weights and masks; sums within `relative`."""
    assert torch.equal(block.unified, other.unified)
    for task in range(len(block.tasks)):
        assert torch.equal(block.bits(task), other.bits(task))
    counts = [COLUMN[name] for name in ("nonzero", "mask", "opposed", "weight_opposed")]
    assert torch.equal(block.sums[:, counts], other.sums[:, counts])
    assert block.totals[3] == other.totals[3]
    plain = [COLUMN[name] for name in ("abs", "square", "masked_abs", "masked_square", "masked_dot")]
    torch.testing.assert_close(block.sums[:, plain], other.sums[:, plain], rtol=relative, atol=0)
    torch.testing.assert_close(block.totals, other.totals, rtol=relative, atol=0)
    # By Cauchy-Schwarz the magnitudes of what was added are at most the product of the norms.
    dot = (block.column("dot") - other.column("dot")).abs()
    assert (dot <= relative * (other.column("square") * other.totals[2]).sqrt()).all()
    norms = other.column("square").sqrt()
    assert ((block.gram - other.gram).abs() <= relative * norms[:, None] * norms).all()


def assert_matches_reference(block, **options):
    expected = Block(block.base, block.tasks, block.dtype).merge(reference, **options)
    assert_agree(block.merge(**options), expected)
    # Bytes after the block's last are somebody else's.
    assert (block.masks[:, -3:] == 0xA5).all()
    rest = len(block.base) % 8
    if rest:
        assert not (block.masks[:, -4] >> rest).any()


SIZES = (1, 7, 8, 15, 16, 17, 63, 511, 513, 1023, 1024, 8191, 8192, 8193, 20001)


@pytest.mark.parametrize("n", SIZES)
def test_sizes(path, n):
    assert_matches_reference(random_block(n, 3, seed=n))


@pytest.mark.parametrize("count", [1, 2, 3, 8, 30])
def test_numbers_of_tasks(path, count):
    assert_matches_reference(random_block(9001, count, seed=count))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("base", DTYPES)
def test_dtypes_mixed_at_will(path, base, dtype):
    for tasks in [(kind,) for kind in DTYPES] + [DTYPES]:
        # Large steps: with small ones most deltas of bfloat16 are zero.
        for spread in (2e-2, 1e-4):
            block = random_block(8192 + 77, 4, base=base, tasks=tasks, dtype=dtype, spread=spread)
            assert_matches_reference(block)
            assert_matches_reference(Block(block.base, block.tasks, dtype), tie="negative")


@pytest.mark.parametrize("tie", ["zero", "negative"])
def test_ties(path, tie):
    base = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5]).repeat(30)
    steps = torch.tensor([1.0, -2.0, 0.25]).repeat_interleave(5).repeat(10)
    block = Block(base, [base + steps, base - steps, base.clone()])
    assert_matches_reference(block, tie=tie)
    elected = base if tie == "zero" else base - steps.abs()
    assert same_bits(block.unified, elected)
    assert block.column("mask").tolist() == ([0, 0, 0] if tie == "zero" else [50, 100, 0])
    assert block.column("nonzero").tolist() == [150, 150, 0]


@pytest.mark.parametrize("kind", DTYPES)
def test_special_values(path, kind):
    largest, smallest = torch.finfo(kind).max, torch.finfo(kind).smallest_normal
    tiny = smallest * torch.finfo(kind).eps
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, tiny, -tiny, smallest, 3 * tiny, largest / 4, -largest / 4])
    grid = torch.cartesian_prod(values, values, values).to(kind)
    block = Block(grid[:, 0].contiguous(), [grid[:, 1].contiguous(), grid[:, 2].contiguous()], kind)
    assert_matches_reference(block)
    # Every unified weight is one of the inputs, to the bit.
    inputs = torch.stack([block.base, *block.tasks]).float()
    assert ((inputs == block.unified.float()).any(dim=0)).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["base", "task"])
@pytest.mark.parametrize("kind", DTYPES)
def test_values_that_are_not_finite_show_in_the_sums(path, kind, where, value):
    for place in (0, 5000, 9000):
        block = random_block(9001, 3, base=kind, tasks=(kind,), dtype=kind)
        (block.base if where == "base" else block.tasks[1])[place] = value
        block.merge()
        finite = block.column("abs").isfinite() & block.column("square").isfinite()
        assert finite.tolist() == ([False] * 3 if where == "base" else [True, False, True])


def test_overflow_of_the_unified_dtype_shows_in_the_totals(path):
    block = Block(torch.ones(9), [torch.full((9,), 1e6)], torch.float16).merge()
    assert block.totals[1].isinf()


def test_compiled_and_torch_give_the_same_bits(monkeypatch):
    if ops._compiled() is None:
        pytest.skip("numba is not installed")
    for kind, dtype, count in itertools.product(DTYPES, DTYPES, (2, 5)):
        block = random_block(30011, count, base=kind, tasks=DTYPES, dtype=dtype, spread=1e-3).merge()
        with monkeypatch.context() as patch:
            patch.setattr(ops, "_compiled", lambda: None)
            plain = Block(block.base, block.tasks, dtype).merge()
        assert same_bits(block.unified, plain.unified)
        assert same_bits(block.masks, plain.masks)
        assert_agree(block, plain)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_fuzz_against_the_textbook(data):
    count, n = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 40))
    kinds = st.sampled_from(DTYPES)
    numbers = st.one_of(
        st.floats(-(2.0**127), 2.0**127, width=32),
        st.floats(-1, 1, width=32),
        st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45]),
    )

    def weights(kind):
        values = torch.tensor(data.draw(st.lists(numbers, min_size=n, max_size=n)))
        # A quarter of the range, so that neither a delta nor a sum of five overflows.
        limit = torch.finfo(kind).max / 16
        return values.clamp(-limit, limit).to(kind)

    block = Block(weights(data.draw(kinds)), [weights(data.draw(kinds)) for _ in range(count)], data.draw(kinds))
    tie = data.draw(st.sampled_from(["zero", "negative"]))
    expected = Block(block.base, block.tasks, block.dtype).merge(reference, tie=tie)
    # float16 cannot hold a winner of a wider type: both overflow alike, and sums of infinities are not compared.
    if expected.unified.isfinite().all():
        assert_agree(block.merge(tie=tie), expected)


# The identities of the specification, section 1.5.


def test_one_task_is_itself(path):
    for kind in DTYPES:
        block = random_block(9001, 1, base=kind, tasks=(kind,), dtype=kind).merge()
        assert same_bits(block.unified, torch.where(block.tasks[0] == block.base, block.base, block.tasks[0]))
        assert torch.equal(block.bits(0), block.tasks[0] != block.base)
        assert block.scale(0) == 1.0
        if kind != torch.float32:
            assert torch.equal(block.restored(0), block.tasks[0])
        torch.testing.assert_close(block.restored(0), block.tasks[0], rtol=1e-6, atol=1e-9)


def test_identical_tasks_are_one_task(path):
    single = random_block(9001, 1, seed=5).merge()
    block = Block(single.base, single.tasks * 4).merge()
    assert same_bits(block.unified, single.unified)
    assert all(same_bits(block.masks[task], single.masks[0]) for task in range(4))
    assert all(same_bits(block.sums[task], single.sums[0]) for task in range(4))


def test_positive_scalings_are_recovered(path):
    # Powers of two and few mantissa bits, so that every number here is exact.
    direction = torch.randint(-64, 64, (9001,), generator=torch.Generator().manual_seed(0)) / 1024
    base, factors = torch.full((9001,), 0.5), [0.25, 1.0, 0.5]
    block = Block(base, [base + factor * direction for factor in factors]).merge()
    assert torch.equal(block.unified, base + direction)
    for task, factor in enumerate(factors):
        assert torch.equal(block.bits(task), direction != 0)
        assert block.scale(task) == factor
        assert torch.equal(block.restored(task), block.tasks[task])


def test_disjoint_supports_are_recovered(path):
    block = random_block(9001, 3, seed=3)
    turn = torch.arange(9001) % 3
    block.tasks = [torch.where(turn == index, task, block.base) for index, task in enumerate(block.tasks)]
    block.merge()
    assert torch.equal(block.unified, torch.stack(block.tasks).gather(0, turn[None])[0])
    for task in range(3):
        assert torch.equal(block.bits(task), block.tasks[task] != block.base)
        assert block.scale(task) == 1.0
        torch.testing.assert_close(block.restored(task), block.tasks[task], rtol=0, atol=1e-8)


def test_permuted_tasks_permute_the_result(path):
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


def test_scaled_vectors_scale_the_result(path):
    block = random_block(9001, 4)
    block.base = torch.zeros(9001)
    block.merge()
    larger = Block(block.base, [8 * task for task in block.tasks]).merge()
    assert torch.equal(larger.unified, 8 * block.unified)
    assert same_bits(larger.masks, block.masks)
    assert [larger.scale(task) for task in range(4)] == [block.scale(task) for task in range(4)]


def test_masks_lie_in_the_supports_and_cover_the_unified_one(path):
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


def test_density_of_random_vectors(path):
    """½ + arcsin(1/√N)/π for independent symmetric Gaussian task vectors."""
    for count in (2, 4, 8):
        block = random_block(2**17, count, seed=count)
        block.base, block.tasks = torch.zeros(2**17), [torch.randn(2**17) for _ in range(count)]
        density = block.merge().column("mask") / 2**17
        expected = 0.5 + math.asin(count**-0.5) / math.pi
        # Four standard deviations of a share of 2**17.
        assert (density - expected).abs().max() < 4 * 0.5 / 2**8.5


def test_toy_by_hand(path):
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


# Blocks, threads, buffers.


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_how_a_segment_is_cut_changes_no_bit(path, kind):
    n = 40 * ops.SUB_BLOCK + 4099
    whole = random_block(n, 3, base=kind, tasks=(kind,), dtype=kind).merge(first=7)
    for cuts in [(1,), (8, 9, 25), tuple(range(1, 41))]:
        cut = Block(whole.base, whole.tasks, kind).merge(cuts=cuts, first=7)
        assert same_bits(cut.unified, whole.unified)
        assert all(torch.equal(cut.bits(task), whole.bits(task)) for task in range(3))
        for name in ("sums", "totals", "gram"):
            assert same_bits(getattr(cut, name), getattr(whole, name)), name
    # Sub-blocks 16, 32 of the tensor are sampled, not those of the block.
    sampled = Block(whole.base[9 * 8192 : 10 * 8192], [task[9 * 8192 : 10 * 8192] for task in whole.tasks], kind)
    other = Block(whole.base[25 * 8192 : 26 * 8192], [task[25 * 8192 : 26 * 8192] for task in whole.tasks], kind)
    assert same_bits(sampled.merge().gram + other.merge().gram, whole.gram)


def test_given_weights_are_masked_alike(path):
    block = random_block(20001, 3, tasks=DTYPES, dtype=torch.float16).merge()
    again = Block(block.base, block.tasks, torch.float16).mask(block.unified.clone())
    for name in ("unified", "masks", "sums", "totals", "gram"):
        assert same_bits(getattr(again, name), getattr(block, name)), name
    # Any merged model may be given: here the mean.
    mean = torch.stack([task.float() for task in block.tasks]).mean(dim=0)
    other = Block(block.base, block.tasks).mask(mean)
    assert_agree(other, Block(block.base, block.tasks).mask(mean.clone(), reference))


def test_masks_are_optional(path):
    block, other = random_block(9001, 2).merge(), random_block(9001, 2)
    ops.merge_block(other.base, other.tasks, other.unified, None, other.sums, other.totals, other.gram)
    assert same_bits(other.sums, block.sums) and same_bits(other.unified, block.unified)


def test_buffers_at_odd_addresses(path):
    """Blocks lie anywhere in a buffer: no alignment beyond that of an element is assumed."""
    block = random_block(3001, 2).merge()
    shifted = Block(torch.empty(3004)[3:3004], [torch.empty(3006)[5:3006] for _ in range(2)])
    shifted.base.copy_(block.base)
    for task, weights in zip(shifted.tasks, block.tasks, strict=True):
        task.copy_(weights)
    shifted.unified, shifted.masks = torch.empty(3002)[1:3002], torch.empty(2, 385, dtype=torch.uint8)[:, 7:]
    shifted.merge()
    assert same_bits(shifted.unified, block.unified)
    assert all(torch.equal(shifted.bits(task), block.bits(task)) for task in range(2))


def test_empty_block(path):
    block = Block(torch.empty(0), [torch.empty(0)]).merge()
    assert not block.sums.any() and not block.totals.any() and not block.gram.any()


def test_threads_do_not_disturb_each_other(path):
    blocks = [random_block(30011, 4, tasks=DTYPES, seed=seed) for seed in range(6)]
    expected = [Block(block.base, block.tasks).merge() for block in blocks]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(3):
            done = list(pool.map(lambda block: Block(block.base, block.tasks).merge(), blocks))
            restored = list(pool.map(lambda block: block.restored(1), done))
            for ours, theirs, weights in zip(done, expected, restored, strict=True):
                assert same_bits(ours.unified, theirs.unified) and same_bits(ours.sums, theirs.sums)
                assert same_bits(weights, theirs.restored(1))


# Restore, masks, adapters.


@pytest.mark.parametrize("shape", [(), (0,), (1,), (13,), (5, 7), (300_001,)])
@pytest.mark.parametrize("kind", DTYPES)
def test_restore_matches_the_textbook(path, kind, shape):
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


def test_restore_keeps_weights_outside_the_mask_to_the_bit(path):
    base = torch.tensor([0.0, -0.0, 1e-45, -3.0] * 8)
    out = torch.empty(32)
    ops.restore_block(base, torch.ones(32), torch.zeros(4, dtype=torch.uint8), 0.9, out)
    assert same_bits(out, base)


def test_restore_on_any_number_of_threads(path):
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
def test_rows_of_an_adapter(path, rank):
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


# Bad input, and machines without numba.


def test_bad_input_is_refused(path):
    block = random_block(100, 2)
    good = [block.base, block.tasks, block.unified, block.masks, block.sums, block.totals, block.gram]

    def refused(place, value, kind, message):
        arguments = list(good)
        arguments[place] = value
        with pytest.raises(kind, match=message):
            ops.mask_block(*arguments)

    refused(0, block.base.double(), TypeError, "base is torch.float64")
    refused(1, [], ValueError, "at least one task")
    refused(1, [block.base, block.base[1:]], ValueError, "task 1 has 99 elements")
    refused(2, torch.empty(200)[::2], ValueError, "unified has 100 elements with strides")
    refused(3, block.masks[:1], ValueError, "one row")
    refused(3, block.masks[:, :12], ValueError, "100 elements need 13")
    refused(3, block.masks.int(), TypeError, "packed bits in uint8")
    refused(4, block.sums.float(), ValueError, "sums is torch.float32")
    refused(5, block.totals[:3], ValueError, "totals is")
    with pytest.raises(ValueError, match="tie is 'positive'"):
        ops.merge_block(*good, tie="positive")
    with pytest.raises(ValueError, match="out has 99 elements"):
        ops.restore_block(block.base, block.base, block.masks[0], 1.0, torch.empty(99))
    with pytest.raises(ValueError, match="do not fit"):
        ops.lora_rows(block.base, torch.ones(2, 5), torch.ones(3, 2), 1.0, 0, 16, torch.empty(16))


def test_numba_is_not_imported_when_unwanted():
    script = (
        "import sys, torch; from hf_ext.emr import ops_emr as ops; assert 'numba' not in sys.modules\n"
        "out = torch.empty(9); ops.restore_block(torch.ones(9), torch.zeros(9), torch.full((2,), 255, "
        "dtype=torch.uint8), 0.5, out); assert (out == 0.5).all() and 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], env={**os.environ, "HF_EXT_NO_NUMBA": "1"}, check=True)
