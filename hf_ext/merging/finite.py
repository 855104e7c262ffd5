"""Refusal of NaN and infinity, in the inputs of a merge and in its result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from hf_ext.emr.ops import SUMS, TOTALS, Sums

from ..errors import DataError
from .plan import Plan
from .sources import Source
from .tensors import Row


class NotFiniteError(DataError):
    """NaN or infinity in an input: no repetition of the merge can succeed."""


def is_finite(values: torch.Tensor) -> bool:
    """True without NaN and infinity, which minimum and maximum hand on: one reading, and no memory."""
    return all(math.isfinite(float(end)) for end in torch.aminmax(values))


def require_finite(plan: Plan, row: Row, members: Sequence[int], sums: Sums) -> None:
    """Refuses a tensor whose sums show NaN or infinity."""
    if bool(torch.isfinite(sums.tasks).all()) and bool(torch.isfinite(sums.totals).all()):
        return
    if not math.isfinite(sums.totals[TOTALS.index("base_square")]):
        raise make_not_finite(row.name, plan.base)
    for place, task in enumerate(members):
        if not math.isfinite(sums.tasks[place, SUMS.index("square")]):
            raise make_not_finite(str(row.task_names[task]), plan.tasks[task])
    raise make_overflow(row.name, row.dtype)


# Of an input that is not finite, no task vector is: W_0 is subtracted from each, and what DARE drops is multiplied by
# 0. Not every method hands that on to its result, so the vectors are looked at before the method overwrites them, and
# before they are trimmed, which turns NaN to 0: in the first pass that counts them.
def require_finite_vectors(plan: Plan, row: Row, base: torch.Tensor, vectors: Mapping[int, torch.Tensor]) -> None:
    """[`require_finite`] for a merge that is not measured and so has no sums."""
    for task, vector in vectors.items():
        if not is_finite(vector):
            wrong = (str(row.task_names[task]), plan.tasks[task]) if is_finite(base) else (row.name, plan.base)
            raise make_not_finite(*wrong)


def make_not_finite(name: str, source: Source) -> NotFiniteError:
    return NotFiniteError(
        f"tensor {name!r} of {source.title} contains NaN or infinity, or is farther from the base than float32 can "
        "tell, and cannot be merged; repair the checkpoint, leave it out, or exclude the tensor."
    )


def make_overflow(name: str, dtype: torch.dtype) -> NotFiniteError:
    return NotFiniteError(
        f"tensor {name!r}: the merged values exceed the range of {dtype}, or the merged model contains NaN or "
        "infinity; choose another dtype, or another merged model."
    )
