"""Merges into one model, block by block: weight average, task arithmetic, TIES, and DARE in front of them or of EMR.

Weight average: Wortsman et al., "Model soups", https://arxiv.org/abs/2203.05482. Task arithmetic: Ilharco et al.,
https://arxiv.org/abs/2212.04089, W0 + w Σ_t τ_t. TIES: Yadav et al., https://arxiv.org/abs/2306.01708, trim, elect the
sign, mean of those that agree. DARE: Yu et al., https://arxiv.org/abs/2311.03099, drop at random, divide by 1 - p.

All arithmetic is in fp32, sequential in task order. The bits depend neither on how the tensors are cut into blocks nor
on how many workers there are: the threshold of TIES comes from counts, and DARE's random numbers from a counter.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from .configuration import MergeConfig

# The 31 bits of a magnitude, sorted as integers as they are as numbers, are counted by their upper and lower digits.
LOWER_BITS = 15
BINS = 1 << 16


class Baseline:
    """
    A merge into one model, applied to blocks of tensors.

    ```python
    >>> baseline = Baseline(config, tasks=2)
    >>> for index in range(baseline.passes):  # over all merged tensors; TIES only
    ...     counts = baseline.new_counts()
    ...     for tensor, task, start, base, weights in blocks:
    ...         baseline.count(index, task, baseline.preprocess(tensor, task, start, base, weights), counts)
    ...     baseline.close_pass(index, counts)  # summed over workers and ranks
    >>> vectors = [baseline.preprocess(tensor, task, start, base, weights[task]) for task in range(2)]
    >>> baseline.unify(base, vectors, out)
    ```

    Args:
        config ([`MergeConfig`]):
            `method`, `factor`, `density`, `drop`, `seed` and `tie` are read. `emr` and `elect` are here for DARE in
            front of them; without it the engine elects by itself.
        tasks (`int`): Number of tasks, N.

    Raises:
        ValueError: If the method is `given`, which needs no computation.
    """

    def __init__(self, config: "MergeConfig", tasks: int) -> None:
        if config.method == "given":
            raise ValueError("method 'given' computes nothing: the merged model is read from where it is.")
        self.method = config.method
        self.factor = config.factor
        self.density = config.density if config.method == "ties" else 1.0
        self.drop = config.drop
        self.seed = config.seed
        self.tie = config.tie
        self.tasks = tasks
        self.passes = 2 if self.density < 1 else 0
        # Bit patterns of the smallest magnitudes kept, and how many of the largest are still to be found below them.
        self._threshold = np.zeros(tasks, np.int64)
        self._wanted = np.zeros(tasks, np.int64)
        self._passes_done = 0

    def new_counts(self) -> np.ndarray:
        """Zeros for the counts of one pass over the data, `int64` `[N, 65536]`; they may be added up in any order."""
        return np.zeros((self.tasks, BINS), np.int64)

    def count(self, index: int, task: int, vector: torch.Tensor, counts: np.ndarray) -> None:
        r"""Adds to `counts` (int64 `[N, 65536]`) how many magnitudes of a block of a task vector have each digit.

        Pass 0 counts the upper 16 bits of \\(|\tau|\\), pass 1 the lower 15 of those at the edge.
        """
        magnitudes = vector.numpy().view(np.int32) & 0x7FFFFFFF
        digits = magnitudes >> LOWER_BITS
        if index == 1:
            digits = magnitudes[digits == self._threshold[task] >> LOWER_BITS] & ((1 << LOWER_BITS) - 1)
        counts[task] += np.bincount(digits, minlength=BINS)

    def close_pass(self, index: int, counts: np.ndarray) -> None:
        """Narrows the thresholds by the counts of one whole pass over the data.

        The share is taken over all merged elements of a task: the `int(density · elements)` largest, at least one,
        and every element that is as large as the last of them.
        """
        if index != self._passes_done:
            raise ValueError(f"pass {index} cannot be closed now: the next one is {self._passes_done}.")
        for task, row in enumerate(counts):
            wanted = max(1, int(self.density * int(row.sum()))) if index == 0 else self._wanted[task]
            # at_least[b]: how many have digit b or a larger one.
            at_least = np.cumsum(row[::-1])[::-1]
            digit = max(int(np.count_nonzero(at_least >= wanted)) - 1, 0)
            self._wanted[task] = wanted - (at_least[digit] - row[digit])
            self._threshold[task] |= digit << LOWER_BITS if index == 0 else digit
        self._passes_done += 1

    @property
    def passes_done(self) -> int:
        """How many passes are closed."""
        return self._passes_done

    @property
    def thresholds(self) -> torch.Tensor:
        """The smallest magnitude that TIES keeps of each task vector, `[N]`, fp32; 0 keeps all."""
        return torch.from_numpy(self._threshold.astype(np.int32).view(np.float32))

    def preprocess(
        self, tensor: int, task: int, start: int, base: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """A block of a task vector after DARE and, once the thresholds are known, the trimming of TIES."""
        vector = weights.float() - base.float()
        if self.drop > 0:
            kept = kept_elements(self.seed, task, tensor, start, vector.numel(), self.drop)
            vector.mul_(torch.from_numpy(kept)).div_(1 - self.drop)
        if 0 < self.passes == self._passes_done and self._threshold[task] > 0:
            # hardshrink keeps what is larger than its argument, and the threshold itself is to be kept.
            below = float(np.int32(self._threshold[task] - 1).view(np.float32))
            vector = torch.nn.functional.hardshrink(vector, below)
        return vector

    def unify(self, base: torch.Tensor, vectors: list[torch.Tensor], out: torch.Tensor) -> None:
        """Writes a block of the merged model."""
        if self._passes_done < self.passes:
            raise ValueError(f"{self.passes - self._passes_done} pass(es) of counting are missing before the merge.")
        if self.method in ("elect", "emr"):
            _elect(base, vectors, out, self.tie)
            return
        merged = _agreeing_mean(vectors) if self.method == "ties" else _sum(vectors)
        scale = 1 / len(vectors) if self.method == "average" else self.factor
        out.copy_(merged.mul_(scale).add_(base))

    def state(self) -> dict[str, Any]:
        """What the passes have found so far: an interrupted merge goes on from it."""
        return {
            "passes": self._passes_done,
            "threshold_bits": self._threshold.tolist(),
            "wanted": self._wanted.tolist(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continues from a saved state."""
        threshold, wanted = np.array(state["threshold_bits"], np.int64), np.array(state["wanted"], np.int64)
        if threshold.shape != (self.tasks,) or wanted.shape != (self.tasks,) or state["passes"] > self.passes:
            raise ValueError(
                f"the state is of {threshold.size} task(s) and {state['passes']} pass(es), this merge has "
                f"{self.tasks} and {self.passes}: start the merge anew."
            )
        self._threshold, self._wanted, self._passes_done = threshold, wanted, state["passes"]


def _sum(vectors: list[torch.Tensor]) -> torch.Tensor:
    """Σ_t τ_t in task order."""
    total = vectors[0].clone()
    for vector in vectors[1:]:
        total += vector
    return total


def _agreeing_mean(vectors: list[torch.Tensor]) -> torch.Tensor:
    """The mean of the values whose sign is that of their sum; a sum of zero elects +1."""
    elected = torch.ones_like(vectors[0]).copysign_(_sum(vectors).add_(0.0))
    total, count = torch.zeros_like(elected), torch.zeros_like(elected)
    for vector in vectors:
        agreeing = vector.mul_(elected).clamp_(min=0)
        total += agreeing
        count += agreeing.sign()
    return total.div_(count.clamp_(min=1)).mul_(elected)


def _elect(base: torch.Tensor, vectors: list[torch.Tensor], out: torch.Tensor, tie: str) -> None:
    """EMR's election among weights that DARE has changed."""
    from hf_ext.emr.ops import merge_block

    tasks, n = [base.float() + vector for vector in vectors], len(vectors)
    sums, totals = torch.zeros(n, 10, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    gram = torch.zeros(n, n, dtype=torch.float64)
    merge_block(base, tasks, out, None, sums, totals, gram, tie=tie)


def kept_elements(seed: int, task: int, tensor: int, start: int, count: int, drop: float) -> np.ndarray:
    """Which elements DARE keeps: random numbers of (seed, task, tensor, element) and of nothing else.

    Each 64-bit number of the SplitMix64 sequence (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014) serves two neighbouring elements, its lower half the even one.
    """
    key = np.array([seed % 2**64], np.uint64)
    for part in (task, tensor):
        key = _mix(key + np.uint64(part + 1) * _STEP)
    first, last = start // 2, (start + count + 1) // 2
    numbers = _mix(np.arange(first, last, dtype=np.uint64) * _STEP + key)
    # Little-endian by name, so that the lower half comes first on every machine.
    halves = numbers.astype("<u8", copy=False).view("<u4")
    return halves[start % 2 :][:count] >= round(drop * 2**32)


# An array of one element: a scalar would warn of the overflow that is meant.
_STEP = np.array([0x9E3779B97F4A7C15], np.uint64)


def _mix(numbers: np.ndarray) -> np.ndarray:
    """SplitMix64's output function, element by element."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
