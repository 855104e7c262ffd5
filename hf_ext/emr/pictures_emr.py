"""The report of a merge as one picture."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# What error bars, stacked sizes and their legends are called and coloured.
ERRORS = {
    "unified": ("unified", "#b0b0b0"),
    "masked": ("masked", "#e69f00"),
    "rescaled": ("restored: masked, times λ", "#0072b2"),
    "one_bit": ("1-bit deltas", "#d55e00"),
}
PARTS = {
    "checkpoints": ("checkpoints", "#b0b0b0"),
    "base": ("base", "#999933"),
    "unified": ("unified model", "#0072b2"),
    "masks": ("masks, or signs of 1-bit deltas", "#e69f00"),
    "extras": ("kept raw", "#332288"),
}
# Points of a letter's height and of the space that a tick label takes.
SMALL = 7.0


def draw_report(report: Mapping[str, Any], path: str | Path) -> None:
    """
    Draws a report: layers × tasks of sign conflict, mask density and error; the error of each task beside that of
    1-bit deltas; cosines of pairs of task vectors; sizes.

    Args:
        report (`Mapping`): What [`report_emr.make_report`] returned, or a `report.json`.
        path (`str` or `Path`): The PNG file; it appears whole or not at all.
    """
    # Imported here: matplotlib takes half a second.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layers, tasks, masks = len(report["layers"]), len(report["tasks"]), report["method"]["masks"]
    width = min(max(11.0, 0.6 * tasks), 18.0)
    heights = [min(max(2.6, 0.17 * layers), 9.0) + 0.6, 3.0, min(max(3.4, 0.19 * tasks), 6.0)]
    figure = Figure(figsize=(width, sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    top, middle, bottom = figure.subfigures(3, 1, height_ratios=heights, squeeze=False)[:, 0]
    _draw_layers(top, report)
    _draw_errors(middle.subplots(), report)
    left, right = bottom.subplots(1, 2, width_ratios=[1, 1.3])
    _draw_cosines(bottom, left, report)
    _draw_sizes(right, report)
    method = report["method"]
    figure.suptitle(
        f"{method['method']}, {_several(tasks, 'task')}" + (f", rescale {method['rescale']}" if masks else "")
    )
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        figure.savefig(temporary, format="png", dpi=120)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _several(count: int, what: str) -> str:
    """A count and its noun."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _matrix(rows: Sequence[Sequence[float | None]]) -> list[list[float]]:
    """Numbers with NaN for null, which is drawn grey."""
    return [[float("nan") if value is None else value for value in row] for row in rows]


def _ticks(axis: Any, names: Sequence[str], inches: float, **style: Any) -> None:
    """Labels as many of the names as there is room for, evenly."""
    room = max(int(inches * 72 / (SMALL * 1.35)), 1)
    step = -(-len(names) // room)
    places = range(0, len(names), step)
    short = [name if len(name) <= 24 else f"{name[:11]}…{name[-11:]}" for name in names]
    # A name is no formula, even if it has two dollar signs.
    axis.set_ticks(list(places), [short[place] for place in places], fontsize=SMALL, parse_math=False, **style)


def _draw_layers(figure: Any, report: Mapping[str, Any]) -> None:
    """Heat maps, the first layer at the top."""
    layers, tasks = report["layers"], [entry["task"] for entry in report["tasks"]]
    measures = {"conflict": ("sign conflict of τ", "magma")}
    if report["method"]["masks"]:
        measures["density"] = ("mask density", "viridis")
        measures["error_rescaled"] = ("error of the restored τ", "cividis")
    else:
        measures["error_unified"] = ("error of the unified τ", "cividis")
    width, height = figure.bbox.width / figure.dpi, figure.bbox.height / figure.dpi
    axes = figure.subplots(1, len(measures), sharey=True, squeeze=False)[0]
    for axis, (key, (title, colors)) in zip(axes, measures.items(), strict=True):
        values = _matrix([layer[key] for layer in layers])
        known = sorted(value for row in values for value in row if value == value)
        # A layer in which a task hardly changed can have any error: it must not hide the others.
        limit = known[int(0.98 * (len(known) - 1))] if known else 1.0
        least = known[0] if known else 0.0
        limits = {"vmin": least, "vmax": max(limit, least + 0.01)}
        image = axis.imshow(values, aspect="auto", interpolation="nearest", cmap=colors, **limits)
        axis.set_facecolor("#dddddd")
        axis.set_title(title, fontsize=9)
        _ticks(axis.xaxis, tasks, 0.7 * width / len(measures), rotation=90)
        more = "max" if known and known[-1] > limit else "neither"
        bar = figure.colorbar(image, ax=axis, extend=more, fraction=0.05, pad=0.02, aspect=6 * height)
        bar.ax.tick_params(labelsize=SMALL)
    _ticks(axes[0].yaxis, [layer["layer"] for layer in layers], 0.75 * height)


def _draw_errors(axis: "Axes", report: Mapping[str, Any]) -> None:
    """Grouped bars; what is beyond the edge has its number written on it."""
    entries = report["tasks"]
    kinds = list(ERRORS) if report["method"]["masks"] else ["unified"]
    known = [entry["error"][kind] or 0.0 for entry in entries for kind in kinds]
    edge = max(known)
    if len(kinds) > 1:
        shown = [entry["error"][kind] or 0.0 for entry in entries for kind in ("rescaled", "one_bit")]
        edge = min(edge, max(1.0, 1.15 * max(shown)), 2.0)
    # Room for the numbers above the line at 1.
    edge = (1.25 if max(known) > edge else 1.05) * max(edge, 1.0)
    width = 0.84 / len(kinds)
    for index, kind in enumerate(kinds):
        label, color = ERRORS[kind]
        for place, entry in enumerate(entries):
            value, x = entry["error"][kind] or 0.0, place + (index - (len(kinds) - 1) / 2) * width
            axis.bar(x, min(value, edge), width, color=color, label=label if place == 0 else None)
            if value > edge:
                text = f"{value:.3g}"
                axis.text(x, 0.97 * edge, text, ha="center", va="top", rotation=90, fontsize=6, color="black")
    axis.set(ylim=(0, edge), xlim=(-0.6, len(entries) - 0.4))
    axis.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    axis.set_ylabel("‖τ - restored τ‖² / ‖τ‖²", fontsize=8)
    axis.set_title("reconstruction error (0: the task's checkpoint, 1: the base)", fontsize=9, loc="left")
    axis.tick_params(axis="y", labelsize=SMALL)
    inches = axis.figure.bbox.width / axis.figure.dpi
    _ticks(axis.xaxis, [entry["task"] for entry in entries], inches * 0.9, rotation=30, ha="right")
    axis.legend(fontsize=SMALL, ncols=len(kinds), loc="lower right", bbox_to_anchor=(1, 1), frameon=False)


def _draw_cosines(figure: Any, axis: "Axes", report: Mapping[str, Any]) -> None:
    """Cosines of pairs; where there is room each has its number."""
    tasks = [entry["task"] for entry in report["tasks"]]
    values = _matrix(report["cosines"])
    for place in range(len(tasks)):
        values[place][place] = float("nan")
    # Often all are small; the colours reach as far as they do.
    limit = max([0.2, *(abs(value) for row in values for value in row if value == value)])
    image = axis.imshow(values, vmin=-limit, vmax=limit, cmap="RdBu_r", interpolation="nearest")
    axis.set_facecolor("#dddddd")
    inches = 0.75 * figure.bbox.height / figure.dpi
    _ticks(axis.xaxis, tasks, inches, rotation=90)
    _ticks(axis.yaxis, tasks, inches)
    axis.set_title("cosines of task vectors", fontsize=9)
    for row, line in enumerate(values if len(tasks) <= 12 else []):
        for column, value in enumerate(line):
            if value == value:
                color = "white" if abs(value) > 0.6 * limit else "black"
                # Without the sign of a zero.
                text = f"{round(value, 2) + 0.0:.2f}"
                axis.text(column, row, text, ha="center", va="center", fontsize=6, color=color)
    figure.colorbar(image, ax=axis, fraction=0.05, pad=0.02).ax.tick_params(labelsize=SMALL)


def _bytes(count: float) -> tuple[float, str]:
    """Bytes in the largest unit that leaves at least one, and what one of that unit is called."""
    power, unit = next((p, u) for p, u in ((9, "GB"), (6, "MB"), (3, "kB"), (0, "bytes")) if count >= 10**p or p == 0)
    return 10.0**power, unit


def _draw_sizes(axis: "Axes", report: Mapping[str, Any]) -> None:
    """Stacked bars of bytes."""
    sizes, count = report["sizes"], len(report["tasks"])
    bars = {_several(count, "checkpoint"): ["checkpoints"], "this artifact": ["unified"]}
    if report["method"]["masks"]:
        bars["this artifact"] += ["masks", "extras"]
        bars["with the base"] = ["unified", "masks", "extras", "base"]
        bars["1-bit deltas\nwith the base"] = ["masks", "extras", "base"]
    largest = max(sum(sizes[part] for part in parts) for parts in bars.values())
    divisor, unit = _bytes(largest)
    named = set()
    for place, (name, parts) in enumerate(bars.items()):
        start = 0
        for part in parts:
            label, color = PARTS[part]
            shown = None if part in named else label
            axis.barh(name, sizes[part] / divisor, left=start / divisor, color=color, label=shown)
            start += sizes[part]
            named.add(part)
        own, own_unit = _bytes(start)
        axis.text(start / divisor, place, f" {start / own:.3g} {own_unit}", va="center", fontsize=SMALL)
    axis.invert_yaxis()
    axis.margins(x=0.15)
    axis.tick_params(labelsize=SMALL)
    axis.set_xlabel(unit, fontsize=8)
    axis.set_title("size", fontsize=9)
    axis.legend(fontsize=SMALL, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False)
