"""The report of a merge: as JSON, as lines for a terminal, as a section of a model card.

Sign conflict and cosine are those of appendix F of EMR-Merging (https://arxiv.org/abs/2405.17461). The reconstruction
error is ‖τ - τ̂‖² / ‖τ‖². Beside it stands that of 1-bit deltas, sign times mean magnitude of each tensor (BitDelta,
https://arxiv.org/abs/2402.10193), which take the room of the masks and need no unified model.
"""

import functools
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .arithmetic import RESCALES, SUMS, TOTALS, compute_scales

Array = np.ndarray
# Above these values the report warns.
NORM_RATIO = 3.0
NORM_TO_BASE = 1.0
COSINE = 0.9
_SAMPLE = " in a sample"
_EQUAL = "{} equals the base in every merged tensor{}."


class TensorSums(NamedTuple):
    """Sums of a merge of M tensors of N tasks."""

    elements: Array  # `[M]`, int64
    participates: Array  # `[M, N]`, bool
    sums: Array  # `[M, N, 10]`, fp64: `SUMS` of each task in each tensor
    totals: Array  # `[M, 4]`, fp64: `TOTALS` of each tensor
    gram: Array  # `[N, N]`, fp64: sampled inner products of the task vectors


def make_report(
    tasks: Sequence[str],
    found: TensorSums,
    *,
    method: Mapping[str, Any],
    masks: bool,
    sizes: Mapping[str, int],
    measured: bool = True,
) -> dict[str, Any]:
    r"""Makes the report of a merge. Numbers that do not exist, such as the cosine of a zero vector, are null, as are
    cosines of a task that was added frozen, whose inner products with the others are NaN in `gram`. If not `measured`,
    the sums are those of a sample, of which only warnings are made."""
    elements, participates, sums, totals, gram = found
    norms, products = np.sqrt(np.diag(gram)), np.triu(gram) + np.triu(gram, 1).T
    cosines = [[*map(_finite_or_none, row)] for row in _ratio(products, np.outer(norms, norms)).tolist()]
    about = {"format_version": 1, "measured": measured, "method": {**method, "masks": masks}}
    stored = _sizes(sizes, masks, method.get("deltas") or 1)
    if not measured:
        squares = totals[:, TOTALS.index("base_square")] @ participates
        shares = dict(zip(tasks, map(_finite_or_none, _ratio(norms, np.sqrt(squares)).tolist()), strict=True))
        # An average may have the base among its models, as mergekit's `linear` has.
        unchanged = () if method.get("method") == "average" else np.flatnonzero(norms == 0)
        warnings = [_EQUAL.format(tasks[int(index)], _SAMPLE) for index in unchanged]
        warnings += _warn_of_far(shares, _SAMPLE) + _cosine_warnings(tasks, cosines, _SAMPLE)
        return {**about, "tasks": [{"task": name} for name in tasks], "sizes": stored, "warnings": warnings}
    scales = {mode: compute_scales(sums, elements, participates, mode) for mode in RESCALES}
    measures = _measure(found, scales, method)
    entries = [
        {"task": name, "elements": int(elements @ participates[:, task]), **_of_task(measures, task, participates)}
        for task, name in enumerate(tasks)
    ]
    report = {**about, "tasks": entries, "mean": mean_of(entries), "cosines": cosines, "sizes": stored}
    return {**report, "warnings": _warnings(report)}


def is_measured(report: Mapping[str, Any]) -> bool:
    """True for a report that has the distances of the tasks; those of earlier versions always have them."""
    return bool(report.get("measured", True))


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _of_task(measure: Any, task: int, participates: Array) -> Any:
    """A task's part of the measures; where each tensor has its own number, what they lie between."""
    if isinstance(measure, Mapping):
        return {key: _of_task(part, task, participates) for key, part in measure.items()}
    if measure.ndim == 1:
        return _finite_or_none(float(measure[task]))
    own = measure[participates[:, task], task]
    if own.size == 0:
        return None
    return {"least": float(own.min()), "median": float(np.median(own)), "greatest": float(own.max())}


def mean_of(entries: Sequence[Any]) -> Any:
    """The mean over the tasks of every number; null where no task has one."""
    known = [entry for entry in entries if entry is not None]
    if known and isinstance(known[0], Mapping):
        return {key: mean_of([entry[key] for entry in known]) for key in known[0] if key != "task"}
    return sum(known) / len(known) if known else None


def _sizes(sizes: Mapping[str, int], masks: bool, planes: int) -> dict[str, int]:
    """Bytes of what is stored, beside the checkpoints themselves and 1-bit deltas; `planes` are the bits of a mask."""
    found = {**sizes, "artifact": sizes["unified"] + sizes["masks"] + sizes["extras"]}
    if masks:
        found["artifact_and_base"] = found["artifact"] + sizes["base"]
        found["one_bit_and_base"] = sizes["masks"] // planes + sizes["extras"] + sizes["base"]
    return found


def _warnings(report: Mapping[str, Any]) -> list[str]:
    warnings, masks = [], report["method"]["masks"]
    for entry in report["tasks"]:
        task, error = entry["task"], entry["error"]
        if entry["norm"] == 0:
            warnings.append(_EQUAL.format(task, ""))
        elif entry["density"] == 0:
            effect = "its mask is empty, and it is restored as the base" if masks else "nothing of it is in the result"
            warnings.append(f"{task} lost every election: {effect}.")
        elif masks and (error["rescaled"] or 0) > 1:
            warnings.append(
                f"{task} is restored with a larger error than the base has (error {error['rescaled']:.2f}): rescale "
                f"l2 gives {error['l2']:.2f}."
            )
        warnings += _warn_of_far({task: entry["norm_to_base"]})
    norms = {entry["task"]: entry["norm"] for entry in report["tasks"] if entry["norm"]}
    if norms and not report["method"].get("deltas") and max(norms.values()) > NORM_RATIO * min(norms.values()):
        longest, shortest = max(norms, key=norms.__getitem__), min(norms, key=norms.__getitem__)
        warnings.append(
            f"the task vector of {longest} is {norms[longest] / norms[shortest]:.1f} times as long as that of "
            f"{shortest}: long task vectors dominate the election. Check the errors of the short ones, and try "
            "rescale l2."
        )
    if masks and report["method"].get("deltas") != 1:
        warnings += _one_bit_warnings(report)
    return warnings + _cosine_warnings([entry["task"] for entry in report["tasks"]], report["cosines"])


def _one_bit_warnings(report: Mapping[str, Any]) -> list[str]:
    """The tasks that deltas of one bit, which take the room of the masks alone, would restore better than this."""
    known = [entry for entry in report["tasks"] if None not in (entry["error"]["one_bit"], entry["error"]["rescaled"])]
    better = [entry for entry in known if entry["error"]["one_bit"] < entry["error"]["rescaled"]]
    if not better:
        return []
    mean = {key: mean_of([entry["error"][key] for entry in better]) for key in ("one_bit", "rescaled", *RESCALES[:-1])}
    best = min((mode for mode in RESCALES[:-1] if mean[mode] is not None), key=mean.__getitem__)
    advice = f" Rescale {best} would come to {mean[best]:.3f}." if mean[best] < 0.99 * mean["rescaled"] else ""
    names = ", ".join(entry["task"] for entry in better)
    return [
        f"method onebit would restore {names} better: error {mean['one_bit']:.3f}, here {mean['rescaled']:.3f}; its "
        f"1-bit deltas take the room of the masks alone.{advice} A small error does not imply good scores: evaluate "
        "the tasks before you choose."
    ]


def _warn_of_far(shares: Mapping[str, float | None], where: str = "") -> list[str]:
    """Warnings of tasks that are no fine-tunes of this base, by their distance from it."""
    return [
        f"{task} is farther from the base than the base is from zero (‖τ‖/‖W0‖ {share:.2f}{where}): it was probably "
        "fine-tuned from another model."
        for task, share in shares.items()
        if share is not None and share > NORM_TO_BASE
    ]


def _cosine_warnings(names: Sequence[str], cosines: Sequence[Sequence[float | None]], where: str = "") -> list[str]:
    """Warnings about pairs of nearly equal task vectors, which share more than the base, and of opposite ones."""
    pairs = [(names[i], names[j], cosines[i][j] or 0.0) for i, j in itertools.combinations(range(len(names)), 2)]
    alike, opposite = ([pair for pair in pairs if sign * pair[2] > COSINE] for sign in (1, -1))
    warnings = []
    if len(alike) == len(pairs) > 1:
        warnings.append(
            f"all task vectors nearly coincide{where} (cosines above {COSINE}): the tasks were probably fine-tuned "
            "from another model than this base, such as a later version of it."
        )
    elif alike:
        warnings.append(
            f"task vectors nearly coincide{where}: {_pair_text(alike)}. They may be one checkpoint, one fine-tuned "
            "from the other, or both fine-tuned from another model than this base."
        )
    if opposite:
        warnings.append(
            f"task vectors nearly cancel{where}: {_pair_text(opposite)}. The base lies between the two: it may be "
            "their average, or one was subtracted from it."
        )
    return warnings


def _pair_text(pairs: Sequence[tuple[str, str, float]]) -> str:
    more = f" and {len(pairs) - 5} pairs more" if len(pairs) > 5 else ""
    return ", ".join(f"{one} and {two} ({cosine:.2f})" for one, two, cosine in pairs[:5]) + more


def report_tables(report: Mapping[str, Any]) -> list[tuple[list[str], list[list[str]]]]:
    """The tables of a report, each a header and its rows: tasks if measured, rescale modes of masks, sizes."""
    tables = [_task_table(report)] if is_measured(report) else []
    if report["method"]["masks"] and not report["method"].get("deltas"):
        used, error = report["method"]["rescale"], report["mean"]["error"]
        modes = {mode: f"{mode} (used)" if mode == used else mode for mode in RESCALES if mode != "none"}
        values = ["mean error", *(number_text(error[mode]) for mode in modes), number_text(error["masked"])]
        tables.append((["rescale", *modes.values(), "none"], [values]))
    return [*tables, _size_table(report)]


def report_legend(report: Mapping[str, Any]) -> str:
    """The meaning of the words of the first table; without one, how to get it."""
    if not is_measured(report):
        return NOT_MEASURED
    return _OF_DELTAS if report["method"].get("deltas") else _OF_MASKS if report["method"]["masks"] else _OF_ONE


def report_markdown(report: Mapping[str, Any]) -> str:
    """The report as a section of a model card, without a heading."""
    marked = [[header, ["---", *["---:"] * (len(header) - 1)], *rows] for header, rows in report_tables(report)]
    first, *others = ("\n".join(f"| {' | '.join(row)} |" for row in table) for table in marked)
    warnings = "\n".join(f"- **Warning**: {text}" for text in report["warnings"])
    return "\n\n".join(filter(None, (first, report_legend(report), *others, warnings))) + "\n"


NOT_MEASURED = (
    "How far the model is from each task was not measured: merge again with `--measure` (`measure: true`) to see it "
    "here and in `hf-ext emr compare`."
)
_OF_ONE = (
    "Conflict: share of elements where the task vector τ = W - W0 and that of the merged model differ in sign, then "
    "the same for the weights. Cosine: cosine of both vectors. Error: ‖τ - τ̂‖² / ‖τ‖², which is 0 for the task's own "
    "checkpoint and 1 for the base."
)
_OF_MASKS = (
    f"λ: the rescaler. Mask: share of its bits that are set. {_OF_ONE} The table has the error of the unified task "
    "vector, of the masked one, of the restored one (masked, times λ), and of 1-bit deltas (sign times mean magnitude "
    "of each tensor), which take the space of the masks alone."
)
_OF_DELTAS = (
    "λ: median of the tensors' scales. Kept: share of elements whose sign is stored. Error: ‖τ - τ̂‖² / ‖τ‖² of the "
    "task vector τ = W - W0, which is 0 for the task's own checkpoint and 1 for the base; next to it, that of 1-bit "
    "deltas."
)


def number_text(value: float | None, digits: int = 3) -> str:
    """A number as tables show it; a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def _task_table(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    masks, deltas = report["method"]["masks"], report["method"].get("deltas")
    # Title, decimals, and the keys of the number in an entry.
    of_masks = [("λ", 3, f"scales/{report['method']['rescale']}"), ("mask", 3, "density")]
    of_all = [("conflict τ", 3, "sign_conflict/task_vector"), ("of W", 3, "sign_conflict/weights")]
    of_all += [("cosine", 3, "cosine/unified"), ("error unified", 3, "error/unified")]
    errors = [("masked", 3, "error/masked"), ("restored", 3, "error/rescaled"), ("1-bit", 3, "error/one_bit")]
    of_deltas = [("λ", 6, "scales/tensor_l2"), ("kept", 3, "density"), ("error restored", 3, "error/rescaled")]
    columns = [("‖τ‖/‖W0‖", 4, "norm_to_base")]
    if deltas:
        columns += [*of_deltas, errors[-1]]
    else:
        columns += [*of_masks, *of_all, *errors] if masks else of_all

    def read(entry: Any, keys: str) -> Any:
        found = functools.reduce(operator.getitem, keys.split("/"), entry)
        return found["median"] if isinstance(found, Mapping) else found

    rows = [
        [entry["task"], *(number_text(read(entry, keys), digits) for _, digits, keys in columns)]
        for entry in (*report["tasks"], {**report["mean"], "task": "mean"})
    ]
    return ["task", *(title for title, _, _ in columns)], rows


def _size_table(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    sizes, count = report["sizes"], len(report["tasks"])
    titles = {
        "checkpoints": "checkpoint" if count == 1 else f"{count} checkpoints",
        "unified": "unified model",
        "masks": "masks",
        "extras": "kept raw (heads and the like)",
        "artifact": "this artifact",
        "artifact_and_base": "this artifact and the base",
        "one_bit_and_base": "1-bit deltas and the base",
    }
    hidden = [] if report["method"]["masks"] else ["masks", "extras"]
    if report["method"].get("deltas"):
        titles["masks"] = "signs"
        hidden = ["unified", "one_bit_and_base"]
    shown = [key for key in titles if key in sizes and key not in hidden]
    share = {key: f"{100 * sizes[key] / sizes['checkpoints']:.1f} %" if sizes["checkpoints"] else "-" for key in shown}
    return ["size", "bytes", "of all checkpoints"], [[titles[key], f"{sizes[key]:,}", share[key]] for key in shown]


def _measure(found: TensorSums, scales: Mapping[str, Array], method: Mapping[str, Any]) -> dict[str, Any]:
    """Measures all tensors together: `[N]` by name, NaN where there is none; and the scales, `[N]` or `[M, N]`."""
    elements, participates, sums, totals, _ = found
    # Not a product: a sum that is not known is NaN.
    column = {name: np.where(participates, sums[:, :, index], 0.0) for index, name in enumerate(SUMS)}
    column |= {name: np.where(participates, totals[:, index, None], 0.0) for index, name in enumerate(TOTALS)}
    total = {name: values.sum(axis=0) for name, values in column.items()}
    square, dot, unified_square = total["square"], total["dot"], total["unified_square"]
    count = elements @ participates

    def compare(upper: Array, lower: Array) -> Array:
        """Compares with the unified model, which deltas do not have."""
        return np.full_like(upper, np.nan) if method.get("deltas") else _ratio(upper, lower)

    def error(mode: str) -> Any:
        inner, outer = scales[mode] * column["masked_dot"], scales[mode] ** 2 * column["masked_square"]
        return np.maximum(square - (2 * inner - outer).sum(axis=0), 0)

    # One bit says + or -, so that a zero becomes one of them.
    explained = column["abs"] ** 2 / np.maximum(elements, 1)[:, None]
    return {
        "norm": np.sqrt(square),
        "norm_to_base": _ratio(np.sqrt(square), np.sqrt(total["base_square"])),
        "density": _ratio(total["mask"], count),
        "sign_conflict": {
            "task_vector": compare(total["opposed"], count),
            "weights": compare(total["weight_opposed"], count),
        },
        "scales": scales,
        "cosine": {"unified": compare(dot, np.sqrt(square * unified_square))},
        "error": {
            "unified": compare(np.maximum(square - 2 * dot + unified_square, 0), square),
            "masked": compare(error("none"), square),
            **{mode: _ratio(error(mode), square) for mode in RESCALES if mode != "none"},
            "one_bit": _ratio(np.maximum(square - explained.sum(axis=0), 0), square),
            "rescaled": _ratio(error(method["rescale"]), square),
        },
    }


def _ratio(upper: Array, lower: Array) -> Array:
    """Quotients, NaN where the divisor is zero."""
    found: Array = np.divide(upper, lower, out=np.full(np.shape(upper), np.nan), where=lower > 0)
    return found
