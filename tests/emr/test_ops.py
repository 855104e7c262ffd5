"""EMR's operations, and layers for rows of several tasks: compiled, torch and textbook agree."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ext.emr import arithmetic as ops
from hf_ext.emr.arithmetic import compiled_kernels
from hf_ext.emr.layers import TaskLayers
from hf_ext.emr.weights import Parts
from hf_ext.errors import UsageError
from tests.emr import reference_ops as reference
from tests.kit.models import TOLERANCES, file_limit
from tests.kit.refusals import refused

DTYPES = ops.DTYPES
COLUMN = {name: index for index, name in enumerate(ops.SUMS)}
# Sums that may cancel are compared against the sum of their magnitudes.
RELATIVE = 1e-12


class Block:
    def __init__(self, base, tasks, dtype=torch.float32):
        self.base, self.tasks, self.dtype = base, tasks, dtype
        count, n = len(tasks), len(base)
        # Filled with what a wrong result would keep.
        self.unified = torch.full((n,), torch.nan).to(dtype)
        self.masks = torch.full((count, -(-n // 8) + 3), 0xA5, dtype=torch.uint8)
        self.added = ops.Sums.zeros(count)
        self.sums, self.totals, self.gram = self.added

    def mask(self, unified, module=ops):
        self.unified = unified
        return self.merge(module, operation="mask_block")

    def merge(self, module=ops, cuts=(), *, operation="merge_block", first=0, **options):
        """Merge, cut into blocks after the sub-blocks in `cuts`."""
        edges = [0, *(cut * ops.SUB_BLOCK for cut in cuts), len(self.base)]
        for low, high in itertools.pairwise(edges):
            masks, parts = self.masks[:, low // 8 :].clone(), [task[low:high] for task in self.tasks]
            given = (self.base[low:high], parts, self.unified[low:high], masks, self.added)
            getattr(module, operation)(*given, first=first + low // ops.SUB_BLOCK, **options)
            self.masks[:, low // 8 :] = masks
        return self

    def bits(self, task):
        return reference.unpack_mask(self.masks[task], len(self.base))

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
    return Block(start.to(base), [weight.to(tasks[i % len(tasks)]) for i, weight in enumerate(weights)], dtype)


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


def assert_same_bits(found: Block, expected: Block, *names: str) -> None:
    for name in names:
        assert same_bits(getattr(found, name), getattr(expected, name)), name


SIZES = (0, 1, 7, 8, 15, 16, 17, 63, 511, 513, 1023, 1024, 8191, 8192, 8193, 20001)


@pytest.mark.parametrize(("n", "count"), [*((n, 3) for n in SIZES), *((9001, count) for count in (1, 2, 8, 30))])
def test_sizes_and_numbers_of_tasks(kernels, n, count):
    assert_matches_reference(random_block(n, count, seed=n + count))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("base", DTYPES)
def test_dtypes_mixed_at_will(kernels, base, dtype):
    for tasks in [(kind,) for kind in DTYPES] + [DTYPES]:
        # Large steps: with small ones most deltas of bfloat16 are zero.
        for spread in (2e-2, 1e-4):
            block = random_block(1024 + 77, 4, base=base, tasks=tasks, dtype=dtype, spread=spread)
            assert_matches_reference(block)
            assert_matches_reference(Block(block.base, block.tasks, dtype), tie="negative")


@pytest.mark.parametrize("kind", DTYPES)
def test_special_values(kernels, kind):
    largest, smallest = torch.finfo(kind).max, torch.finfo(kind).smallest_normal
    tiny = smallest * torch.finfo(kind).eps
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, tiny, -tiny, smallest, 3 * tiny, largest / 4, -largest / 4])
    grid = torch.cartesian_prod(values, values, values).to(kind)
    block = Block(grid[:, 0].contiguous(), [grid[:, 1].contiguous(), grid[:, 2].contiguous()], kind)
    assert_matches_reference(block)
    # Every unified weight is one of the inputs, to the bit; of equal zeros the first.
    inputs = torch.stack([block.base, *block.tasks]).float()
    assert ((inputs == block.unified.float()).any(dim=0)).all()
    zeros = [torch.tensor([0.0, -0.0]), torch.tensor([-0.0, 0.0])]
    for base in (-1.0, 1.0):
        assert same_bits(Block(torch.full((2,), base), zeros).merge().unified, zeros[0])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["base", "task"])
@pytest.mark.parametrize("kind", DTYPES)
def test_values_that_are_not_finite_show_in_the_sums(kernels, kind, where, value):
    for place in (0, 5000, 9000):
        block = random_block(9001, 3, base=kind, tasks=(kind,), dtype=kind)
        (block.base if where == "base" else block.tasks[1])[place] = value
        block.merge()
        finite = block.column("abs").isfinite() & block.column("square").isfinite()
        assert finite.tolist() == ([False] * 3 if where == "base" else [True, False, True])
    # So does an overflow of the type of the result in the totals.
    assert Block(torch.ones(9), [torch.full((9,), 1e6)], torch.float16).merge().totals[1].isinf()


NUMBERS = st.floats(-(2.0**127), 2.0**127, width=32) | st.floats(-1, 1, width=32)
NUMBERS |= st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45])


@settings(max_examples=60)
@given(data=st.data())
def test_fuzz_against_the_textbook(data):
    count, n = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 40))
    kinds = st.sampled_from(DTYPES)

    def weights(kind):
        values = torch.tensor(data.draw(st.lists(NUMBERS, min_size=n, max_size=n)))
        # A quarter of the range, so that neither a delta nor a sum of five overflows.
        limit = torch.finfo(kind).max / 16
        return values.clamp(-limit, limit).to(kind)

    block = Block(weights(data.draw(kinds)), [weights(data.draw(kinds)) for _ in range(count)], data.draw(kinds))
    tie = data.draw(st.sampled_from(["zero", "negative"]))
    expected = Block(block.base, block.tasks, block.dtype).merge(reference, tie=tie)
    # float16 cannot hold a winner of a wider type: both overflow alike, and sums of infinities are not compared.
    if expected.unified.isfinite().all():
        assert_agree(block.merge(tie=tie), expected)


# Blocks, threads, buffers.


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_how_a_segment_is_cut_changes_no_bit(kernels, kind):
    n = 26 * ops.SUB_BLOCK + 4099
    whole = random_block(n, 3, base=kind, tasks=(kind,), dtype=kind).merge(first=7)
    for cuts in [(8, 9, 25), tuple(range(1, 27))]:
        cut = Block(whole.base, whole.tasks, kind).merge(cuts=cuts, first=7)
        assert all(torch.equal(cut.bits(task), whole.bits(task)) for task in range(3))
        assert_same_bits(cut, whole, "unified", "sums", "totals", "gram")
    # Sub-blocks 16, 32 of the tensor are sampled, not those of the block.
    parts = [slice(place * ops.SUB_BLOCK, (place + 1) * ops.SUB_BLOCK) for place in (9, 25)]
    sampled = [Block(whole.base[part], [task[part] for task in whole.tasks], kind).merge().gram for part in parts]
    assert same_bits(sum(sampled), whole.gram)


def test_given_weights_are_masked_alike(kernels):
    block = random_block(20001, 3, tasks=DTYPES, dtype=torch.float16).merge()
    again = Block(block.base, block.tasks, torch.float16).mask(block.unified.clone())
    assert_same_bits(again, block, "unified", "masks", "sums", "totals", "gram")
    # Masks are optional.
    other = random_block(20001, 3, tasks=DTYPES, dtype=torch.float16)
    ops.merge_block(other.base, other.tasks, other.unified, None, other.added)
    assert_same_bits(other, block, "sums", "unified")
    # Any merged model may be given: here the mean.
    mean = torch.stack([task.float() for task in block.tasks]).mean(dim=0)
    other = Block(block.base, block.tasks).mask(mean)
    assert_agree(other, Block(block.base, block.tasks).mask(mean.clone(), reference))


def test_buffers_at_odd_addresses(kernels):
    """Blocks lie anywhere in a buffer: no alignment beyond that of an element is assumed."""
    block = random_block(3001, 2).merge()
    inputs = zip((3, 5, 5), (block.base, *block.tasks), strict=True)
    base, *tasks = (torch.empty(3001 + place)[place:].copy_(own) for place, own in inputs)
    shifted = Block(base, tasks)
    shifted.unified, shifted.masks = torch.empty(3002)[1:3002], torch.empty(2, 385, dtype=torch.uint8)[:, 7:]
    shifted.merge()
    assert same_bits(shifted.unified, block.unified)
    assert all(torch.equal(shifted.bits(task), block.bits(task)) for task in range(2))


def test_bad_input_is_refused(kernels):
    block = random_block(100, 2)
    good = [block.base, block.tasks, block.unified, block.masks, block.added]
    for place, value, kind, fact in (
        (0, block.base.double(), TypeError, "base is torch.float64"),
        (1, [], ValueError, "at least one task"),
        (1, [block.base, block.base[1:]], ValueError, "task 1 has 99 elements"),
        (2, torch.empty(200)[::2], ValueError, "unified has 100 elements with strides"),
        (3, block.masks[:1], ValueError, "one row"),
        (3, block.masks[:, :12], ValueError, "100 elements need 13"),
        (3, block.masks.int(), TypeError, "packed bits in uint8"),
        (4, block.added._replace(tasks=block.sums.float()), ValueError, "sums of tasks are torch.float32"),
    ):
        with refused(kind, fact):
            ops.mask_block(*good[:place], value, *good[place + 1 :])
    with refused(UsageError, "positive"):
        ops.merge_block(*good, tie="positive")
    with refused(UsageError, "99 elements"):
        ops.restore_block(block.base, block.base, block.masks[0], 1.0, torch.empty(99))


def test_torch_computes_where_numba_is_unwanted_or_missing(monkeypatch):
    choose = compiled_kernels.__wrapped__
    monkeypatch.setenv("HF_EXT_NO_NUMBA", "1")
    assert choose() is None
    monkeypatch.setenv("HF_EXT_NO_NUMBA", "0")
    # What an import finds of a package that is not installed.
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "hf_ext.fast.emr_blocks", raising=False)
    assert choose() is None


def test_kernels_know_nothing_of_emr():
    for path in (Path(__file__).parents[2] / "hf_ext" / "fast").glob("emr_*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"^\s*(from|import) (hf_ext|\.)\.emr", text, re.MULTILINE), path.name


def test_toy_by_hand(kernels):
    """λ of the specification's counterexample is 16 / 13 = 1.23: masked-out mass may exceed what remains."""
    ours = torch.tensor([10.0, 1, 1, 1, -1, -1, -1])
    elected = torch.tensor([10.0, 1, 1, 1, 3, 3, 3])
    block = Block(torch.zeros(7), [ours, elected]).merge()
    assert torch.equal(block.unified, elected)
    assert block.masks[:, 0].tolist() == [0b0001111, 0b1111111]
    assert block.sums.tolist() == [[16, 106, 7, 4, 13, 103, 103, 94, 3, 3], [22, 130, 7, 7, 22, 130, 130, 130, 0, 0]]
    assert block.totals.tolist() == [0, 22, 130, 7]
    assert block.gram.tolist() == [[106, 94], [0, 130]]
    assert block.scale(0) == 16 / 13
    # The rescaled vector is farther from the task than the masked one: 8.49 against 3.
    assert (elected[:4] - ours[:4]).square().sum() + ours[4:].square().sum() == 3
    assert (block.restored(0) - ours).square().sum().item() == pytest.approx(103 * (3 / 13) ** 2 + 3)


def _add_one(number):
    return number + 1


def test_machine_code_that_is_kept_on_disk_helps_where_it_can_and_never_hinders(tmp_path, monkeypatch):
    config = pytest.importorskip("numba").config
    from hf_ext.fast.compiling import compile_kernel

    def compile_in(place, function=_add_one):
        monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / place))
        config.reload_config()
        compiled = compile_kernel.__wrapped__(function, "int64(int64)")
        assert compiled(1) == 2
        return compiled

    try:
        with file_limit(0):
            compile_in("full disk")
        assert sum(file.stat().st_size for file in tmp_path.rglob("*.nb?")) == 0
        compile_in("kept")
        assert sum(compile_in("kept").stats.cache_hits.values()) == 1
        for file in tmp_path.rglob("*.nb?"):
            file.write_bytes(b"no pickle")
        compile_in("kept")
        # Of a function without a file numba does not know where to keep it.
        compile_in("none", eval("lambda number: number + 1"))
    finally:
        monkeypatch.undo()
        config.reload_config()


@pytest.mark.slow
def test_processes_that_compile_at_once(tmp_path):
    script = (
        "import torch; from hf_ext.emr import arithmetic as ops; out = torch.empty(99)\n"
        "mask = torch.full((13,), 255, dtype=torch.uint8)\n"
        "ops.restore_block(torch.ones(99), torch.zeros(99), mask, 0.5, out); assert (out == 0.5).all()"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    running = [subprocess.Popen([sys.executable, "-c", script], env=environment) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert list(tmp_path.rglob("*.nbc"))


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
    # Weights outside of the mask stay to the bit.
    base, out = torch.tensor([0.0, -0.0, 1e-45, -3.0] * 8), torch.empty(32)
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
    assert torch.equal(reference.unpack_mask(packed, n), bits)


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
    edited = torch.randn(shape, generator=generator).to(dtype)
    for of_tasks, held in ((parts, weights), ([None, *parts[1:]], [edited, *weights[1:]])):
        for bias in ([None] * 3, biases):
            found = TaskLayers(SimpleNamespace()).multiply(x, edited, of_tasks, bias, transposed)
            for own, weight, add, y in zip(x, held, bias, found, strict=True):
                expected = own.double() @ (weight if transposed else weight.t()).double()
                expected = expected if add is None else expected + add.double()
                assert y.dtype == dtype
                atol = 3 * TOLERANCES[dtype] * float(expected.abs().max())
                torch.testing.assert_close(y.double(), expected, atol=atol, rtol=0)
