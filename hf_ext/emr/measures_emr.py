"""Measures of a merge, from sums over its tensors: for the whole model, for each layer, for pairs of tasks.

Sign conflict, L2 distance and cosine are those of appendix F of EMR-Merging (https://arxiv.org/abs/2405.17461). The
reconstruction error is ‖τ - τ̂‖² / ‖τ‖². That of 1-bit deltas, sign times mean magnitude of each tensor, is BitDelta's
(https://arxiv.org/abs/2402.10193).
"""

from collections.abc import Sequence

import numpy as np

from .artifact_emr import RESCALES, compute_scales
from .ops_emr import SUMS, TOTALS

# Shapes: M merged tensors, N tasks, G groups of tensors.
Array = np.ndarray


class MergeSums:
    """
    The sums of a merge, to be added up over groups of tensors.

    Args:
        elements (`np.ndarray`): `[M]`, merged elements of each tensor.
        participates (`np.ndarray`): bool `[M, N]`, which task has which tensor.
        sums (`np.ndarray`): fp64 `[M, N, 10]`, columns [`ops_emr.SUMS`].
        totals (`np.ndarray`): fp64 `[M, 4]`, columns [`ops_emr.TOTALS`].
        rescale (`str`): The rescale mode in use.

    Raises:
        ValueError: If the arrays do not fit each other.
    """

    def __init__(self, elements: Array, participates: Array, sums: Array, totals: Array, rescale: str) -> None:
        shape = np.shape(participates)
        found = (np.shape(elements), np.shape(sums), np.shape(totals))
        expected = (shape[:1], (*shape, len(SUMS)), (*shape[:1], len(TOTALS)))
        if found != expected:
            raise ValueError(f"elements, sums and totals of {shape} tensors and tasks are {expected}, got {found}.")
        self.rescale = rescale
        self.participates = participates
        # Not a product: a sum that is not known is NaN.
        self.columns = {name: np.where(participates, sums[:, :, index], 0.0) for index, name in enumerate(SUMS)}
        self.columns["elements"] = elements[:, None] * participates
        for index, name in enumerate(TOTALS):
            self.columns[name] = np.where(participates, totals[:, index, None], 0.0)
        self.scales = {mode: compute_scales(sums, elements, participates, mode) for mode in RESCALES}

    def measure(self, groups: Array, count: int) -> dict[str, Array]:
        """Measures groups of tensors, given the group of each: `[groups, N]` by name, NaN where there is none."""

        def add(values: Array) -> Array:
            total = np.zeros((count, values.shape[1]))
            np.add.at(total, groups, values)
            return total

        column = self.columns
        square, unified_square = add(column["square"]), add(column["unified_square"])
        elements, dot = add(column["elements"]), add(column["dot"])
        found = {
            "elements": elements,
            "norm": np.sqrt(square),
            "norm_to_base": ratio(np.sqrt(square), np.sqrt(add(column["base_square"]))),
            "changed": ratio(add(column["nonzero"]), elements),
            "density": ratio(add(column["mask"]), elements),
            "conflict": ratio(add(column["opposed"]), elements),
            "weight_conflict": ratio(add(column["weight_opposed"]), elements),
            "cosine_unified": ratio(dot, np.sqrt(square * unified_square)),
            "error_unified": ratio(np.maximum(square - 2 * dot + unified_square, 0), square),
        }
        for mode, scales in self.scales.items():
            inner = add(scales * column["masked_dot"])
            outer = add(scales**2 * column["masked_square"])
            found[f"cosine_{mode}"] = ratio(inner, np.sqrt(square * outer))
            found[f"error_{mode}"] = ratio(np.maximum(square - 2 * inner + outer, 0), square)
        for measure in ("cosine", "error"):
            found[f"{measure}_masked"] = found[f"{measure}_none"]
            found[f"{measure}_rescaled"] = found[f"{measure}_{self.rescale}"]
        # One bit says + or -, so that a zero becomes one of them; with the zeros known the mean is over the others.
        for name, counted in (("one_bit", "elements"), ("one_bit_and_zeros", "nonzero")):
            explained = column["abs"] ** 2 / np.maximum(column[counted], 1)
            found[f"error_{name}"] = ratio(np.maximum(square - add(explained), 0), square)
        return found


def ratio(upper: Array, lower: Array) -> Array:
    """Quotients, NaN where the divisor is zero."""
    return np.divide(upper, lower, out=np.full(np.shape(upper), np.nan), where=lower > 0)


def cosine_matrix(gram: Array) -> Array:
    """Cosines of all pairs of task vectors."""
    norms = np.sqrt(np.diag(gram))
    return ratio(np.triu(gram) + np.triu(gram, 1).T, np.outer(norms, norms))


def group_layers(names: Sequence[str]) -> tuple[list[str], Array]:
    """The layers of a model, and the layer of each tensor: names up to the first number, without what all begin with.

    Layers come in the order of the tensors but for numbers, which are in theirs.
    """
    parts = [name.split(".") for name in names]
    common = 0
    # The word before a number stays: `layer.3`.
    while parts and all(
        len(part) > common + 1 and part[common] == parts[0][common] and not part[common + 1].isdecimal()
        for part in parts
    ):
        common += 1
    keys: list[tuple[str, int]] = []
    for part in (part[common:] for part in parts):
        place = next((index for index, word in enumerate(part) if word.isdecimal()), None)
        keys.append((part[0], -1) if place is None else (".".join(part[:place]), int(part[place])))
    kinds = list(dict.fromkeys(kind for kind, _ in keys))
    order = sorted(set(keys), key=lambda key: (kinds.index(key[0]), key[1]))
    layers = [kind if number < 0 else f"{kind}.{number}".lstrip(".") for kind, number in order]
    return layers, np.array([order.index(key) for key in keys], int)
