"""The report of a merge as one picture."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_ext.files import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
# Points of a letter's height, and inches of its width; names are cut to so many letters.
SMALL = 7.0
LETTER = 0.059
LETTERS = 24


def load_drawing() -> None:
    """Imports matplotlib, which takes a third of a second, so that it can be done beside something else."""
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401


def draw_report(report: Mapping[str, Any], path: str | Path) -> None:
    """Draws a report: layers × tasks of sign conflict, mask density and error; the error of each task beside that
    of 1-bit deltas; cosines of pairs of task vectors; sizes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tasks = [_short(entry["task"]) for entry in report["tasks"]]
    layers = [_short(layer["layer"]) for layer in report["layers"]]
    names = 0.12 + LETTER * max(map(len, tasks))
    width, rows = min(max(11.0, 0.6 * len(tasks)), 18.0), min(max(2.2, 0.17 * len(layers)), 9.0)
    side = min(max(2.4, 0.14 * len(tasks)), 4.5)
    # The upper edges of the three rows, in inches from the top, with room for titles and for names below.
    tops = [0.7]
    tops.append(tops[0] + rows + names + 0.4)
    tops.append(tops[1] + 2.1 + 0.55 * names + 0.5)
    # A picture of many tasks should not take much more memory.
    figure = Figure(figsize=(width, tops[2] + side + max(names, 0.75) + 0.1), dpi=min(120, 1800 / width))
    canvas = FigureCanvasAgg(figure)
    # In inches from the upper left corner.
    paper = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(figure.get_figheight(), 0), autoscale_on=False)
    paper.set_axis_off()
    _draw_layers(paper, report, tasks, layers, (tops[0], rows))
    _draw_errors(_axes(figure, 0.6, tops[1], width - 0.75, 2.1), report, tasks)
    _draw_cosines(paper, report, tasks, (names + 0.3, tops[2], side, side))
    left = names + side + 2.4
    _draw_sizes(_axes(figure, left, tops[2], width - left - 0.15, side), report)
    method, count = report["method"], _count_noun(len(tasks), "task")
    title = f"{method['method']}, {count}" + (f", rescale {method['rescale']}" if method["masks"] else "")
    paper.text(width / 2, 0.22, title, ha="center", va="center", fontsize=12)
    with whole_file(path) as file:
        # savefig would draw twice; a higher level takes longer and saves little.
        canvas.print_png(file, pil_kwargs={"compress_level": 2})


def _axes(figure: "Figure", left: float, top: float, width: float, height: float) -> "Axes":
    """Axes at a place in inches from the upper left corner; a layout engine would take longer than all the drawing."""
    whole, tall = figure.get_figwidth(), figure.get_figheight()
    axis = figure.add_axes((left / whole, 1 - (top + height) / tall, width / whole, height / tall))
    # Looking for a place that no tick label takes would be half of the drawing.
    axis.yaxis.set_label_coords(-0.033 * 11 / width, 0.5)
    axis.xaxis.set_label_coords(0.5, -0.1)
    return axis


def _title(axis: "Axes", text: str, **style: Any) -> None:
    axis.set_title(text, fontsize=9, y=1.0, **style)


def _short(name: str) -> str:
    """A name that fits beside axes."""
    half = LETTERS // 2 - 1
    return name if len(name) <= LETTERS else f"{name[:half]}…{name[-half:]}"


def _count_noun(count: int, what: str) -> str:
    """A count and its noun."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _matrix(rows: Sequence[Sequence[float | None]]) -> list[list[float]]:
    """Numbers with NaN for null, which is drawn grey."""
    return [[float("nan") if value is None else value for value in row] for row in rows]


def _choose_names(names: Sequence[str], inches: float) -> list[tuple[int, str]]:
    """As many of the names as there is room for, evenly, with their numbers."""
    room = max(int(inches * 72 / (SMALL * 1.2)), 1)
    return list(enumerate(names))[:: max(-(-len(names) // room), 1)]


def _draw_layers(
    paper: "Axes",
    report: Mapping[str, Any],
    tasks: Sequence[str],
    layers: Sequence[str],
    place: tuple[float, float],
) -> None:
    """Heat maps, the first layer at the top; `place` is their upper edge and height in inches."""
    measures = {"conflict": ("sign conflict of τ", "magma")}
    if report["method"]["masks"]:
        measures["density"] = ("mask density", "viridis")
        measures["error_rescaled"] = ("error of the restored τ", "cividis")
    else:
        measures["error_unified"] = ("error of the unified τ", "cividis")
    (top, height), bar = place, 0.85
    left = 0.15 + LETTER * max(map(len, layers))
    width = (paper.get_xlim()[1] - left) / len(measures) - bar
    for index, (key, (title, colors)) in enumerate(measures.items()):
        values = _matrix([layer[key] for layer in report["layers"]])
        known = sorted(value for row in values for value in row if value == value) or [0.0]
        # A layer in which a task hardly changed can have any error: it must not hide the others.
        limit = max(known[int(0.98 * (len(known) - 1))], known[0] + 0.01)
        box = (left + index * (width + bar), top, width, height)
        _heat_map(paper, values, box, title, colors, (known[0], limit))
        if known[-1] > limit:
            edge = box[0] + width + 0.13
            paper.fill([edge - 0.06, edge, edge + 0.06], [top, top - 0.1, top], color=paper.images[-1].cmap(1.0))
        _names(paper, box, tasks, layers if index == 0 else [])


def _heat_map(
    paper: "Axes",
    values: Sequence[Sequence[float]],
    box: tuple[float, float, float, float],
    title: str,
    colors: str,
    limits: tuple[float, float],
) -> None:
    """Values as colours, with their scale at the right; axes of their own would take three times as long to draw."""
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import MaxNLocator

    left, top, width, height = box
    scale = (left + width + 0.07, top, 0.12, height)
    shades = [[limits[1] + (limits[0] - limits[1]) * step / 255] for step in range(256)]
    for (x, y, wide, tall), colored in ((box, values), (scale, shades)):
        paper.imshow(
            colored,
            extent=(x, x + wide, y + tall, y),
            aspect="auto",
            interpolation="nearest",
            cmap=colormaps[colors].with_extremes(bad="#dddddd"),
            vmin=limits[0],
            vmax=limits[1],
        )
        paper.add_patch(Rectangle((x, y), wide, tall, fill=False, linewidth=0.8))
    paper.text(left + width / 2, top - 0.07, title, ha="center", va="bottom", fontsize=9)
    ticks = MaxNLocator(max(min(int(2.5 * height), 8), 2), steps=[1, 2, 5, 10]).tick_values(*limits)
    step = ticks[1] - ticks[0]
    digits = max(0, math.ceil(-math.log10(step) - 1e-9))
    edge, reach = scale[0] + scale[2], limits[1] - limits[0]
    shown = [tick for tick in ticks if limits[0] - 1e-6 * step <= tick <= limits[1] + 1e-6 * step]
    heights = [top + height * (limits[1] - tick) / reach for tick in shown]
    paper.hlines(heights, edge, edge + 0.04, color="black", linewidth=0.8)
    for tick, y in zip(shown, heights, strict=True):
        # Without the sign of a zero.
        text = f"{round(tick, digits) + 0.0:.{digits}f}"
        paper.text(edge + 0.07, y, text, va="center", fontsize=SMALL)


def _names(paper: "Axes", box: tuple[float, float, float, float], columns: Sequence[str], rows: Sequence[str]) -> None:
    """Names below and at the left of a heat map."""
    left, top, width, height = box
    style: dict[str, Any] = {"fontsize": SMALL, "parse_math": False}
    for place, name in _choose_names(columns, width):
        x = left + width * (place + 0.5) / len(columns)
        paper.text(x, top + height + 0.06, name, ha="center", va="top", rotation=90, **style)
    for place, name in _choose_names(rows, height):
        y = top + height * (place + 0.5) / len(rows)
        paper.text(left - 0.06, y, name, ha="right", va="center", **style)


def _draw_errors(axis: "Axes", report: Mapping[str, Any], tasks: Sequence[str]) -> None:
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
        values = [entry["error"][kind] or 0.0 for entry in entries]
        places = [place + (index - (len(kinds) - 1) / 2) * width for place in range(len(entries))]
        axis.bar(places, [min(value, edge) for value in values], width, color=color, label=label)
        for x, value in zip(places, values, strict=True):
            if value > edge:
                text = f"{value:.3g}"
                axis.text(x, 0.97 * edge, text, ha="center", va="top", rotation=90, fontsize=6, color="black")
    axis.set(ylim=(0, edge), xlim=(-0.6, len(entries) - 0.4))
    axis.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    axis.set_ylabel("‖τ - restored τ‖² / ‖τ‖²", fontsize=8)
    _title(axis, "reconstruction error (0: the task's checkpoint, 1: the base)", loc="left")
    axis.tick_params(axis="y", labelsize=SMALL)
    chosen = _choose_names(tasks, 0.5 * axis.bbox.width / axis.figure.dpi)
    places, labels = [place for place, _ in chosen], [name for _, name in chosen]
    # A name is no formula, even if it has two dollar signs.
    axis.set_xticks(places, labels, fontsize=SMALL, parse_math=False, rotation=30, ha="right")
    axis.legend(fontsize=SMALL, ncols=len(kinds), loc="lower right", bbox_to_anchor=(1, 1), frameon=False)


def _draw_cosines(
    paper: "Axes", report: Mapping[str, Any], tasks: Sequence[str], box: tuple[float, float, float, float]
) -> None:
    """Cosines of pairs; where there is room each has its number."""
    values = _matrix(report["cosines"])
    for index in range(len(tasks)):
        values[index][index] = float("nan")
    # Often all are small; the colours reach as far as they do.
    limit = max([0.2, *(abs(value) for row in values for value in row if value == value)])
    _heat_map(paper, values, box, "cosines of task vectors", "RdBu_r", (-limit, limit))
    _names(paper, box, tasks, tasks)
    left, top, side, _ = box
    for row, line in enumerate(values if len(tasks) <= 12 else []):
        for column, value in enumerate(line):
            if value == value:
                color = "white" if abs(value) > 0.6 * limit else "black"
                # Without the sign of a zero.
                text = f"{round(value, 2) + 0.0:.2f}"
                x, y = (left + side * (column + 0.5) / len(tasks), top + side * (row + 0.5) / len(tasks))
                paper.text(x, y, text, ha="center", va="center", fontsize=6, color=color)


def _bytes(count: float) -> tuple[float, str]:
    """Bytes in the largest unit that leaves at least one, and what one of that unit is called."""
    power, unit = next((p, u) for p, u in ((9, "GB"), (6, "MB"), (3, "kB"), (0, "bytes")) if count >= 10**p or p == 0)
    return 10.0**power, unit


def _draw_sizes(axis: "Axes", report: Mapping[str, Any]) -> None:
    """Stacked bars of bytes."""
    sizes, count = report["sizes"], len(report["tasks"])
    bars = {_count_noun(count, "checkpoint"): ["checkpoints"], "this artifact": ["unified"]}
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
    height = axis.bbox.height / axis.figure.dpi
    axis.invert_yaxis()
    axis.margins(x=0.15)
    axis.tick_params(labelsize=SMALL)
    _title(axis, f"size in {unit}")
    axis.legend(fontsize=SMALL, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.29 / height), frameon=False)
