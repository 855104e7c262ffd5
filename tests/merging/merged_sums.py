"""A merge by the textbook operations and the sums of it, for the tests of reports and pictures."""

import numpy as np
import torch

from hf_ext.emr.ops import SUMS, TOTALS, Sums
from hf_ext.emr.report import make_report
from tests.emr.reference_ops import mask_block, merge_block

SIZES = {"checkpoints": 4000, "base": 1000, "unified": 900, "masks": 100, "extras": 8}


class Merge:
    """Tensors, their merge by the textbook operations, and the sums of it."""

    def __init__(self, base, tasks, participates=None, unified=None, **method):
        self.base, self.tasks, self.unified = base, tasks, []
        self.method = {"method": "emr", "rescale": "global", "masks": None, **method}
        count = len(tasks)
        self.participates = np.ones((len(base), count), bool) if participates is None else participates
        self.sums = np.zeros((len(base), count, len(SUMS)))
        self.totals, self.gram = np.zeros((len(base), len(TOTALS))), np.zeros((count, count))
        for index, tensor in enumerate(base):
            who = np.flatnonzero(self.participates[index])
            found = Sums.zeros(len(who))
            weights = [tasks[task][index] for task in who]
            merged = torch.empty_like(tensor) if unified is None else unified[index]
            operation = merge_block if unified is None else mask_block
            operation(tensor, weights, merged, None, found)
            self.unified.append(merged)
            self.sums[index, who], self.totals[index] = found.tasks, found.totals
            self.gram[np.ix_(who, who)] += found.gram.numpy()

    def report(self, **changes):
        names = [f"task-{index}" for index in range(len(self.tasks))]
        given = {
            "tasks": names,
            "elements": np.array([tensor.numel() for tensor in self.base]),
            "participates": self.participates,
            "sums": self.sums,
            "totals": self.totals,
            "gram": self.gram,
            "method": self.method,
            "masks": self.method["method"] == "emr" if self.method["masks"] is None else self.method["masks"],
            "sizes": SIZES,
        }
        return make_report(**{**given, **changes})

    def vectors(self, task, tensors=None):
        """τ, τ_uni, the mask, W0 and W_t over the tensors in which the task takes part, fp64."""
        own = [i for i in np.flatnonzero(self.participates[:, task]) if tensors is None or i in tensors]
        base, uni, weights = (
            torch.cat([tensors[i].double() for i in own]) for tensors in (self.base, self.unified, self.tasks[task])
        )
        vector, common = weights - base, uni - base
        return vector, common, vector * common > 0, base, weights


def tensors(seed, scale=1.0, sizes=(300, 100, 7, 200, 50, 1)):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) * scale for size in sizes]


def fine_tunes(count=3, scales=None):
    base = tensors(0)
    scales = scales or [0.1] * count
    changes = [tensors(1 + task, scales[task]) for task in range(count)]
    return base, [[b + c for b, c in zip(base, change, strict=True)] for change in changes]
