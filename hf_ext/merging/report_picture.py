"""The report of a merge as one picture."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_ext.figures import new_figure, save_figure

from .sources import size_text

# Measures of layers with their titles and colours: of deltas, of masks, of one model.
CONFLICT = ("conflict", "sign conflict of task vectors", "magma")
RESTORED = ("error_rescaled", "error of the restored vectors", "cividis")
LAYERS = {
    "deltas": [("norm", "length of task vectors", "viridis"), RESTORED],
    "masks": [CONFLICT, ("density", "mask density", "viridis"), RESTORED],
    "one": [CONFLICT, ("error_unified", "error of the unified vector", "cividis")],
}
# Names and colours of error bars and of the parts of sizes.
ERRORS = {
    "unified": ("unified", "#b0b0b0"),
    "masked": ("masked", "#e69f00"),
    "rescaled": ("restored: masked, times its scale", "#0072b2"),
    "one_bit": ("1-bit deltas", "#d55e00"),
}
PARTS = {
    "checkpoints": ("checkpoints", "#b0b0b0"),
    "base": ("base", "#999933"),
    "unified": ("unified model", "#0072b2"),
    "masks": ("masks, or signs of 1-bit deltas", "#e69f00"),
    "extras": ("kept raw", "#332288"),
}
# Points of a letter's height, and inches of its width; names are cut to so many letters.
SMALL = 7.0
LETTER = 0.062
LETTERS = 24


def draw_report(report: Mapping[str, Any], path: str | Path) -> None:
    """
    Draws a report: layers × tasks of sign conflict, mask density and error; the error of each task beside that of
    1-bit deltas; cosines of pairs of task vectors; sizes.
    """
    tasks = [_short(entry["task"]) for entry in report["tasks"]]
    layers = [_short(layer["layer"]) for layer in report["layers"]]
    names = LETTER * max(map(len, tasks))
    width = min(max(11.0, 0.6 * len(tasks)), 18.0)
    rows = min(max(2.2, 0.17 * len(layers)), 9.0)
    side = min(max(2.4, 0.14 * len(tasks)), 4.5)
    # With room for titles above and for names below.
    heights = [rows + names + 0.5, 2.3 + names + 0.5, side + names + 0.5]
    figure = new_figure(width, sum(heights) + 0.4)
    method = report["method"]
    rescale = f", rescale {method['rescale']}" if method["masks"] else ""
    figure.suptitle(f"{method['method']}, tasks: {len(tasks)}{rescale}", fontsize=12)
    parts: Any = figure.subfigures(3, 1, height_ratios=heights)
    top, middle, bottom = parts
    _draw_layers(top, report, tasks, layers, (width, rows))
    _draw_errors(middle.subplots(), report, tasks, width)
    left, right = bottom.subplots(1, 2, width_ratios=(1, 2))
    _draw_cosines(left, report, tasks, side)
    _draw_sizes(right, report)
    # A picture of many tasks should not take much more memory.
    save_figure(figure, path, dpi=min(120, 1800 / width))


def _short(name: str) -> str:
    """A name that fits beside axes; between two dollar signs matplotlib would read a formula."""
    half = LETTERS // 2 - 1
    short = name if len(name) <= LETTERS else f"{name[:half]}…{name[-half:]}"
    return short.replace("$", r"\$")


def _matrix(rows: Sequence[Sequence[float | None]]) -> np.ndarray:
    """Numbers with NaN for null, which is drawn grey."""
    return np.array([[math.nan if value is None else value for value in row] for row in rows])


def _write_names(axis: Any, names: Sequence[str], inches: float) -> None:
    """Writes names along an axis, as many as there is room for, evenly."""
    room = max(int(inches * 72 / (SMALL * 1.2)), 1)
    places = range(0, len(names), max(-(-len(names) // room), 1))
    axis.set_ticks(places, [names[place] for place in places], fontsize=SMALL)


def _heat_map(axis: Any, values: np.ndarray, title: str, colours: str, limits: tuple[float, float]) -> None:
    """Values as colours, grey where there is none, with their scale at the right."""
    from matplotlib import colormaps

    shades = colormaps[colours].with_extremes(bad="#dddddd")
    image = axis.imshow(values, shades, aspect="auto", interpolation="nearest", vmin=limits[0], vmax=limits[1])
    axis.set_title(title, fontsize=9)
    axis.figure.colorbar(image, ax=axis, pad=0.01).ax.tick_params(labelsize=SMALL)
    axis.tick_params(axis="x", rotation=90)


def _draw_layers(
    figure: Any, report: Mapping[str, Any], tasks: Sequence[str], layers: Sequence[str], size: tuple[float, float]
) -> None:
    """Heat maps, the first layer at the top; `size` is the width and height of all in inches."""
    kind = "deltas" if report["method"].get("deltas") else "masks" if report["method"]["masks"] else "one"
    measures = LAYERS[kind]
    axes = figure.subplots(1, len(measures), sharey=True, squeeze=False)[0]
    for axis, (key, title, colours) in zip(axes, measures, strict=True):
        values = _matrix([layer[key] for layer in report["layers"]])
        known = np.sort(values[np.isfinite(values)]) if np.isfinite(values).any() else np.zeros(1)
        # A layer in which a task hardly changed can have any error: it must not hide the others.
        limit = max(float(known[int(0.98 * (len(known) - 1))]), float(known[0]) + 0.01)
        _heat_map(axis, values, title, colours, (float(known[0]), limit))
        _write_names(axis.xaxis, tasks, size[0] / len(measures) - 1)
    _write_names(axes[0].yaxis, layers, size[1])


def _draw_errors(axis: Any, report: Mapping[str, Any], tasks: Sequence[str], width: float) -> None:
    """Grouped bars; what is beyond the edge has its number written on it."""
    kinds = list(ERRORS) if report["method"]["masks"] else ["unified"]
    kinds = ["rescaled", "one_bit"] if report["method"].get("deltas") else kinds
    errors = {kind: [entry["error"][kind] or 0.0 for entry in report["tasks"]] for kind in kinds}
    highest = max(map(max, errors.values()))
    # With room for numbers above the line at 1.
    edge = 1.05 * max(highest, 1.0) if highest <= 2 or len(kinds) == 1 else 2.5
    bar = 0.84 / len(kinds)
    for index, (kind, values) in enumerate(errors.items()):
        places = np.arange(len(values)) + (index + 0.5) * bar - 0.42
        label, colour = ERRORS[kind]
        axis.bar(places, values, bar, color=colour, label=label)
        for place, value in zip(places, values, strict=True):
            if value > edge:
                axis.text(place, 0.98 * edge, f"{value:.3g}", fontsize=6, rotation=90, ha="center", va="top")
    axis.axhline(1, color="black", linestyle=":", linewidth=0.8)
    axis.set(ylim=(0, edge), xlim=(-0.5, len(tasks) - 0.5))
    axis.set_ylabel("squared distance, relative", fontsize=8)
    title = "reconstruction error of task vectors (0: the task's checkpoint, 1: the base)"
    axis.set_title(title, fontsize=9, loc="left")
    axis.tick_params(labelsize=SMALL)
    axis.tick_params(axis="x", rotation=90)
    _write_names(axis.xaxis, tasks, width - 1)
    if len(kinds) > 1:
        axis.legend(fontsize=SMALL, ncols=len(kinds), frameon=False, loc="lower right", bbox_to_anchor=(1, 1))


def _draw_cosines(axis: Any, report: Mapping[str, Any], tasks: Sequence[str], side: float) -> None:
    """Cosines of pairs; where there is room each has its number."""
    values = _matrix(report["cosines"])
    np.fill_diagonal(values, math.nan)
    # Often all are small; the colours reach as far as they do.
    limit = max(0.2, *np.abs(values[np.isfinite(values)]).tolist()) if np.isfinite(values).any() else 0.2
    _heat_map(axis, values, "cosines of task vectors", "RdBu_r", (-limit, limit))
    _write_names(axis.xaxis, tasks, side)
    _write_names(axis.yaxis, tasks, side)
    for row, column in np.argwhere(np.isfinite(values)) if len(tasks) <= 12 else ():
        value = values[row, column]
        colour = "white" if abs(value) > 0.6 * limit else "black"
        # Without the sign of a zero.
        axis.text(column, row, f"{round(value, 2) + 0.0:.2f}", fontsize=6, color=colour, ha="center", va="center")


def _draw_sizes(axis: Any, report: Mapping[str, Any]) -> None:
    from matplotlib.ticker import EngFormatter

    sizes = report["sizes"]
    bars = {"checkpoints": ["checkpoints"], "this artifact": ["unified"]}
    if report["method"]["masks"]:
        bars["this artifact"] += ["masks", "extras"]
        bars["with the base"] = ["unified", "masks", "extras", "base"]
    if report["method"]["masks"] and not report["method"].get("deltas"):
        bars["1-bit with the base"] = ["masks", "extras", "base"]
    named = set[str]()
    for name, parts in bars.items():
        start = 0.0
        for part in parts:
            label, colour = PARTS[part]
            # A name that begins with a line is left out of the legend.
            axis.barh(name, sizes[part], 0.76, left=start, color=colour, label="_" if part in named else label)
            named.add(part)
            start += sizes[part]
        axis.text(start, name, f" {size_text(int(start))}", fontsize=SMALL, va="center")
    axis.xaxis.set_major_formatter(EngFormatter(unit="B"))
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title("size", fontsize=9)
    axis.tick_params(labelsize=SMALL)
    axis.legend(fontsize=SMALL, ncols=3, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12))
