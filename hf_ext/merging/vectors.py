"""Task vectors for merge methods, after DARE and trimming to their largest elements; how far they are, and whether
they are numbers.

DARE (Yu et al., https://arxiv.org/abs/2311.03099) drops elements at random and divides the others by 1 - p. Trimming,
as TIES asks for it, keeps the largest share of each task vector over all tensors.

The bits depend neither on how tensors are cut into blocks nor on how many workers there are: DARE's random numbers
come from a counter. A threshold comes from counts that may be added up in any order: as a 31-bit integer a magnitude
sorts as the number does, so one pass over the data counts the upper 16 bits of each, and finds the digit at which the
share ends; a second pass counts the lower 15 bits of those with that digit. Two passes of 64 Ki counters give the
exact rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..emr.arithmetic import SEGMENT, SUMS, TOTALS, Sums
from ..emr.emr_loader import restore_tensor
from ..errors import DataError
from ..hub.checkpoints import open_checkpoint
from .configuration import MergeConfig
from .plan import Plan
from .sources import Source
from .tensors import Row

LOWER_BITS = 15
BINS = 1 << 16


class TaskVectors:
    """Makes task vectors, block by block, after `passes` over all merged tensors that count what is trimmed."""

    def __init__(self, config: MergeConfig) -> None:
        self.drop, self.seed, self.tasks = config.drop, config.seed, len(config.tasks)
        self._method = config.method
        options = config.find_options("", 0.0, list(config.tasks))
        self.density: list[float] = options.get(config.merge_method.trim or "", [1.0] * self.tasks)
        self.passes = 2 if min(self.density) < 1 else 0
        # Bit patterns of the smallest magnitudes kept, and how many of the largest are still to be found below them;
        # elements of each task, and how many of them are kept
        self._found = np.zeros((4, self.tasks), np.int64)
        self._threshold, self._wanted, self._counted, self._kept = self._found
        self.passes_done = 0

    def new_counts(self) -> np.ndarray:
        """Zeros for the counts of one pass over the data, `int64` `[N, 65536]`; they may be added up in any order."""
        return np.zeros((self.tasks, BINS), np.int64)

    def count(self, index: int, task: int, vector: Tensor, counts: np.ndarray) -> None:
        """Adds how many magnitudes of a block have each digit: the upper one in pass 0, the lower in pass 1."""
        magnitudes = vector.numpy().view(np.int32) & 0x7FFFFFFF
        digits = magnitudes >> LOWER_BITS
        if index == 1:
            digits = magnitudes[digits == self._threshold[task] >> LOWER_BITS] & ((1 << LOWER_BITS) - 1)
        counts[task] += np.bincount(digits, minlength=BINS)

    def close_pass(self, index: int, counts: np.ndarray) -> None:
        """Narrows the thresholds by the counts of one whole pass over the data.

        Kept are the `int(density · elements)` largest of a task, at least one, and all as large as the last of them.
        """
        for task, row in enumerate(counts):
            if index == 0:
                self._counted[task] = row.sum()
                self._kept[task] = max(1, int(self.density[task] * int(self._counted[task])))
            wanted = self._kept[task] if index == 0 else self._wanted[task]
            # at_least[b]: how many have digit b or a larger one.
            at_least = np.cumsum(row[::-1])[::-1]
            digit = max(int(np.count_nonzero(at_least >= wanted)) - 1, 0)
            self._wanted[task] = wanted - (at_least[digit] - row[digit])
            self._threshold[task] |= digit << LOWER_BITS if index == 0 else digit
            if index == 1 and self._threshold[task] > 0:
                self._kept[task] += row[digit] - self._wanted[task]
        self.passes_done += 1

    def make(
        self, tensor: int, task: int, start: int, base: Tensor, weights: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """A block of a task vector after DARE and, once thresholds are known, trimmed; it may be in `out`."""
        if out is not None and weights.dtype != torch.float32:
            weights = out.copy_(weights)
        vector = torch.sub(weights.float(), base.float(), out=out)
        if self.drop > 0:
            kept = kept_elements(self.seed, task, tensor, start, vector.numel(), self.drop)
            vector.mul_(torch.from_numpy(kept)).div_(1 - self.drop)
        if 0 < self.passes == self.passes_done and self._threshold[task] > 0:
            # hardshrink keeps what is larger than its argument, and the threshold itself is to be kept.
            below = float(np.int32(self._threshold[task] - 1).view(np.float32))
            vector = torch.nn.functional.hardshrink(vector, below)
        return vector

    def state(self) -> dict[str, Any]:
        """The results of the passes so far, from which an interrupted merge resumes."""
        return {"passes": self.passes_done, "found": self._found.tolist()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._found[:], self.passes_done = state["found"], state["passes"]

    def warn_of_equals(self, labels: Sequence[str]) -> list[str]:
        """Warnings of tasks of which much more than the density asks for is kept: the authors' code keeps all that
        are as large as the last one, and differences of half-precision weights have few magnitudes."""
        rows = zip(labels, self._kept, self._counted, self.density, strict=True)
        told = [
            f"task {label!r}: {kept / count:.1%} of its task vector are kept, not the {density:.1%} of `density`"
            for label, kept, count, density in rows
            if kept > 1.1 * max(1, int(density * count))
        ]
        reason = "as in half precision, many elements are as large as the last of them; choose another density"
        if told and self._method == "ties":
            return [f"{'; '.join(told)}: {reason}, or ties_by_tensor, which keeps the share exactly"]
        # with a task that is removed goes its line
        return [f"{text}: {reason}" for text in told]


def kept_elements(seed: int, task: int, tensor: int, start: int, count: int, drop: float) -> np.ndarray:
    """The elements that DARE keeps, by random numbers of 32 bits of (seed, task, tensor, element) and of nothing else.

    Each 64-bit number of the SplitMix64 sequence (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014) serves two neighbouring elements, its lower half the even one.
    """
    key = np.array([seed % 2**64], np.uint64)
    for part in (task, tensor):
        key = mix(key + np.uint64(part + 1) * STEP)
    first, last = start // 2, (start + count + 1) // 2
    numbers = mix(np.arange(first, last, dtype=np.uint64) * STEP + key)
    # Little-endian by name, so that the lower half comes first on every machine.
    halves = numbers.astype("<u8", copy=False).view("<u4")
    return halves[start % 2 :][:count] >= round(drop * 2**32)


# An array of one element: a scalar would warn of the overflow that is meant.
STEP = np.array([0x9E3779B97F4A7C15], np.uint64)


def mix(numbers: np.ndarray) -> np.ndarray:
    """SplitMix64's output function, element by element."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


# Elements at the beginning of each segment that are looked at where nothing is measured.
_SAMPLE = 1 << 12


# A merge into one model measures nothing unless it is asked to: sums over all elements take as long as the merge. But
# a fine-tune of another base must not be averaged in silence. Norms and cosines are ratios of sums, and 4,096 of each
# 1,048,576 elements, taken from every tensor and scaled to its size, give them within a few percent: `test_compare`
# holds them beside the measured ones. That takes 0.14 ms for each segment or smaller tensor of three tasks, 2 % of the
# time of an average. The elements are looked at as they are stored, before DARE and trimming, and the journal keeps
# their sums as it keeps those of a merge that is measured.
def pick_sample(values: Tensor) -> Tensor:
    """The sample of a run of elements, in float64."""
    return torch.cat([values[low : low + _SAMPLE].double() for low in range(0, len(values), SEGMENT)])


def add_sample(base: Tensor, tasks: Sequence[Tensor], count: int, sums: Sums) -> None:
    """Adds to sums what a sample tells of `count` elements: squares, and inner products of the task vectors."""
    vectors, share = torch.stack([*tasks]) - base, count / len(base)
    products = (vectors @ vectors.T).mul_(share)
    sums.gram.add_(products)
    sums.tasks[:, SUMS.index("square")] += products.diagonal()
    sums.totals[TOTALS.index("base_square")] += share * base.square().sum()


class NotFiniteError(DataError):
    """NaN or infinity in an input: no repetition of the merge can succeed."""

    @classmethod
    def of_input(cls, name: str, source: Source) -> NotFiniteError:
        return cls(
            f"tensor {name!r} of {source.title} contains NaN or infinity, or is farther from the base than float32 "
            "can tell, and cannot be merged; repair the checkpoint, leave it out, or exclude the tensor."
        )

    @classmethod
    def of_result(cls, name: str, dtype: torch.dtype) -> NotFiniteError:
        return cls(
            f"tensor {name!r}: the merged values exceed the range of {dtype}, or the merged model contains NaN or "
            "infinity; choose another dtype, or another merged model."
        )


def is_finite(values: Tensor) -> bool:
    """True without NaN and infinity, which minimum and maximum hand on: one reading, and no memory."""
    return all(math.isfinite(float(end)) for end in torch.aminmax(values))


def require_finite(plan: Plan, row: Row, members: Sequence[int], sums: Sums) -> None:
    """Refuses a tensor whose sums show NaN or infinity."""
    if bool(torch.isfinite(sums.tasks).all()) and bool(torch.isfinite(sums.totals).all()):
        return
    if not math.isfinite(sums.totals[TOTALS.index("base_square")]):
        raise NotFiniteError.of_input(row.name, plan.base)
    for place, task in enumerate(members):
        if not math.isfinite(sums.tasks[place, SUMS.index("square")]):
            raise NotFiniteError.of_input(row.members[task], plan.tasks[task])
    raise NotFiniteError.of_result(row.name, row.dtype)


# What is restored is never stored, so no sum shows it. No element is larger than the norm of its tensor: few tensors
# come near the end of a type's range, and these are restored as a reader will.
def require_restorable(folder: Path, plan: Plan, totals: np.ndarray, scales: np.ndarray) -> None:
    """Refuses an artifact whose weights are written if a task's would be restored with infinity."""
    deltas = plan.config.merge_method.deltas
    scales = np.broadcast_to(scales, (len(plan.merged_rows), len(plan.tasks)))
    base, unified = (np.sqrt(totals[:, TOTALS.index(name)]) for name in ("base_square", "unified_square"))
    largest = base[:, None] + scales * (1.0 if deltas else unified[:, None])
    for place, row in enumerate(plan.merged_rows):
        for task, name in row.members.items():
            if largest[place, task] < torch.finfo(row.dtype).max:
                continue
            source, started = plan.tasks[task], plan.base.read(row.name).flatten()[: row.elements]
            with open_checkpoint(folder / "tasks" / source.label / "mask.safetensors") as masks:
                mask = masks[name]
            merged = torch.empty(0, dtype=row.dtype)
            if not deltas:
                with open_checkpoint(folder) as root:
                    merged = root[row.name].flatten()[: row.elements]
            scale = float(scales[place, task])
            if not is_finite(restore_tensor(started, merged, mask, scale, row.elements, deltas)):
                raise NotFiniteError(
                    f"tensor {name!r} of {source.title}: restored, its values exceed the range of {row.dtype}; choose "
                    "another dtype (--dtype float32), method or rescale, or exclude the tensor."
                )


# Of an input that is not finite, no task vector is: W_0 is subtracted from each, and what DARE drops is multiplied by
# 0. Not every method hands that on to its result, so the vectors are looked at before the method overwrites them, and
# before they are trimmed, which turns NaN to 0: in the first pass that counts them.
def require_vectors(plan: Plan, row: Row, base: Tensor, vectors: Mapping[int, Tensor]) -> None:
    """[`require_finite`] for a merge that is not measured and so has no sums."""
    for task, vector in vectors.items():
        if not is_finite(vector):
            wrong = (row.members[task], plan.tasks[task]) if is_finite(base) else (row.name, plan.base)
            raise NotFiniteError.of_input(*wrong)
