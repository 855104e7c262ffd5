"""Blocks for the tests of EMR's operations, and what it means that two results agree."""

import itertools
from dataclasses import dataclass, field

import torch

from hf_ext.emr import ops
from tests.emr import reference_ops as reference

DTYPES = ops.DTYPES
COLUMN = {name: index for index, name in enumerate(ops.SUMS)}
# Sums that may cancel are compared against the sum of their magnitudes.
RELATIVE = 1e-12


@dataclass
class Block:
    """What one call takes and gives."""

    base: torch.Tensor
    tasks: list[torch.Tensor]
    dtype: torch.dtype = torch.float32
    unified: torch.Tensor = field(init=False)
    masks: torch.Tensor = field(init=False)
    added: ops.Sums = field(init=False)

    def __post_init__(self):
        count, n = len(self.tasks), len(self.base)
        # Filled with what a wrong result would keep.
        self.unified = torch.full((n,), torch.nan).to(self.dtype)
        self.masks = torch.full((count, -(-n // 8) + 3), 0xA5, dtype=torch.uint8)
        self.added = ops.Sums.zeros(count)

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
                self.added,
                first=first + low // ops.SUB_BLOCK,
                **options,
            )
            self.masks[:, low // 8 :] = masks
        return self

    sums = property(lambda self: self.added.tasks)
    totals = property(lambda self: self.added.totals)
    gram = property(lambda self: self.added.gram)

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
