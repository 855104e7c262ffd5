"""The report of a merge as one picture. Pillow draws it in a tenth of the time that importing matplotlib takes."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from hf_ext.files import whole_file

Box = tuple[float, float, float, float]

# What error bars, stacked sizes and their legends are called and coloured. The font has no Greek letters.
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
# Colours from low to high.
PALETTES = {
    "conflict": ((8, 8, 36), (110, 26, 110), (226, 90, 90), (252, 236, 176)),
    "density": ((66, 10, 86), (48, 100, 142), (60, 180, 115), (250, 230, 40)),
    "error": ((0, 34, 80), (90, 92, 112), (165, 156, 116), (254, 232, 70)),
    "cosine": ((33, 84, 160), (146, 197, 222), (247, 247, 247), (244, 165, 130), (178, 24, 43)),
}
# Points of a letter's height, and inches of its width; names are cut to so many letters.
SMALL = 7.0
LETTER = 0.062
LETTERS = 24
DPI = 120


def draw_report(report: Mapping[str, Any], path: str | Path) -> None:
    """Draws a report: layers × tasks of sign conflict, mask density and error; the error of each task beside that
    of 1-bit deltas; cosines of pairs of task vectors; sizes."""
    tasks = [_short(entry["task"]) for entry in report["tasks"]]
    layers = [_short(layer["layer"]) for layer in report["layers"]]
    names = 0.12 + LETTER * max(map(len, tasks))
    width, rows = min(max(11.0, 0.6 * len(tasks)), 18.0), min(max(2.2, 0.17 * len(layers)), 9.0)
    side = min(max(2.4, 0.14 * len(tasks)), 4.5)
    # The upper edges of the three rows, in inches from the top, with room for titles and for names below.
    tops = [0.7]
    tops.append(tops[0] + rows + names + 0.4)
    tops.append(tops[1] + 2.1 + names + 0.5)
    paper = Paper(width, tops[2] + side + max(names, 0.75) + 0.15)
    _draw_layers(paper, report, tasks, layers, (tops[0], rows))
    _draw_errors(paper, report, tasks, (0.6, tops[1], width - 0.75, 2.1))
    _draw_cosines(paper, report, tasks, (names + 0.3, tops[2], side, side))
    left = names + side + 2.4
    _draw_sizes(paper, report, (left, tops[2], width - left - 0.9, side - 0.2))
    method, count = report["method"], _count_noun(len(tasks), "task")
    title = f"{method['method']}, {count}" + (f", rescale {method['rescale']}" if method["masks"] else "")
    paper.text(width / 2, 0.22, title, size=12)
    with whole_file(path) as file:
        # a higher level takes longer and saves little
        paper.image.save(file, format="PNG", compress_level=2)


class Paper:
    """A white picture that is drawn on in inches from its upper left corner."""

    def __init__(self, width: float, height: float) -> None:
        self.width = width
        # A picture of many tasks should not take much more memory.
        self.scale = min(DPI, 1800 / width)
        self.image = Image.new("RGB", (round(width * self.scale), round(height * self.scale)), "white")
        self._draw = ImageDraw.Draw(self.image)
        self._fonts: dict[float, Any] = {}

    def font(self, size: float) -> Any:
        """The font of so many points."""
        return self._fonts.setdefault(size, ImageFont.load_default(size * self.scale / 72))

    def text(
        self, x: float, y: float, text: str, *, size: float = SMALL, anchor: str = "mm", color: str = "black"
    ) -> None:
        """Writes from left to right; the anchor is Pillow's, horizontal and vertical."""
        self._draw.text((x * self.scale, y * self.scale), text, color, self.font(size), anchor)

    def text_up(
        self, x: float, y: float, text: str, *, size: float = SMALL, color: str = "black", below: bool = True
    ) -> None:
        """Writes from below to above, centred at `x`; `y` is the upper end, or with `below=False` the middle."""
        left, top, right, bottom = self.font(size).getbbox(text)
        shape = Image.new("L", (max(int(right - left) + 2, 1), max(int(bottom - top) + 2, 1)))
        ImageDraw.Draw(shape).text((1 - left, 1 - top), text, 255, self.font(size))
        shape = shape.transpose(Image.Transpose.ROTATE_90)
        corner = (round(x * self.scale - shape.width / 2), round(y * self.scale - (0 if below else shape.height / 2)))
        self.image.paste(color, corner, shape)

    def box(self, box: Box, *, fill: str | None = None, outline: str | None = None) -> None:
        """A rectangle: left, top, width, height."""
        left, top, width, height = (value * self.scale for value in box)
        if width >= 0.5 and height >= 0.5:
            # Less than a pixel is one: Pillow takes both corners, and refuses a last one before the first.
            last = (max(left, left + width - 1), max(top, top + height - 1))
            self._draw.rectangle((left, top, *last), fill, outline)

    def line(self, *points: tuple[float, float], color: str = "black") -> None:
        self._draw.line([(x * self.scale, y * self.scale) for x, y in points], color)

    def pixels(self, values: np.ndarray, box: Box) -> None:
        """Colours `[rows, columns, 3]`, each as a rectangle."""
        left, top, width, height = box
        size = (max(round(width * self.scale), 1), max(round(height * self.scale), 1))
        picture = Image.fromarray(values).resize(size, Image.Resampling.NEAREST)
        self.image.paste(picture, (round(left * self.scale), round(top * self.scale)))

    def legend(self, x: float, y: float, name: str, color: str) -> float:
        """Writes a name after its colour; how much room it took."""
        self.box((x, y - 0.05, 0.14, 0.1), fill=color)
        self.text(x + 0.19, y, name, anchor="lm")
        return 0.35 + float(self.font(SMALL).getlength(name)) / self.scale


def _short(name: str) -> str:
    """A name that fits beside axes."""
    half = LETTERS // 2 - 1
    return name if len(name) <= LETTERS else f"{name[:half]}…{name[-half:]}"


def _count_noun(count: int, what: str) -> str:
    """A count and its noun."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _matrix(rows: Sequence[Sequence[float | None]]) -> np.ndarray:
    """Numbers with NaN for null, which is drawn grey."""
    return np.array([[math.nan if value is None else value for value in row] for row in rows])


def _choose_names(names: Sequence[str], inches: float) -> list[tuple[int, str]]:
    """As many of the names as there is room for, evenly, with their numbers."""
    room = max(int(inches * 72 / (SMALL * 1.2)), 1)
    return list(enumerate(names))[:: max(-(-len(names) // room), 1)]


def _ticks(low: float, high: float, count: int) -> list[tuple[float, str]]:
    """At most so many round numbers between two, with their texts."""
    rough = max((high - low) / count, 1e-12)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    digits = max(0, math.ceil(-math.log10(step) - 1e-9))
    first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
    # Without the sign of a zero.
    return [(number * step, f"{number * step + 0.0:.{digits}f}") for number in range(first, last + 1)]


def _draw_layers(
    paper: Paper, report: Mapping[str, Any], tasks: Sequence[str], layers: Sequence[str], place: tuple[float, float]
) -> None:
    """Heat maps, the first layer at the top; `place` is their upper edge and height in inches."""
    measures = {"conflict": ("sign conflict of task vectors", "conflict")}
    if report["method"].get("deltas"):
        measures = {
            "norm": ("length of task vectors", "density"),
            "error_rescaled": ("error of the restored", "error"),
        }
    elif report["method"]["masks"]:
        measures["density"] = ("mask density", "density")
        measures["error_rescaled"] = ("error of the restored vectors", "error")
    else:
        measures["error_unified"] = ("error of the unified vector", "error")
    (top, height), bar = place, 0.85
    left = 0.15 + LETTER * max(map(len, layers))
    width = (paper.width - left) / len(measures) - bar
    for index, (key, (title, colors)) in enumerate(measures.items()):
        values = _matrix([layer[key] for layer in report["layers"]])
        known = np.sort(values[np.isfinite(values)]) if np.isfinite(values).any() else np.zeros(1)
        # A layer in which a task hardly changed can have any error: it must not hide the others.
        limit = max(float(known[int(0.98 * (len(known) - 1))]), float(known[0]) + 0.01)
        box = (left + index * (width + bar), top, width, height)
        _heat_map(paper, values, box, title, colors, (float(known[0]), limit))
        _names(paper, box, tasks, layers if index == 0 else [])


def _heat_map(
    paper: Paper, values: np.ndarray, box: Box, title: str, colors: str, limits: tuple[float, float]
) -> None:
    """Values as colours, with their scale at the right."""
    left, top, width, height = box
    scale = (left + width + 0.07, top, 0.12, height)
    low, high = limits
    shades = np.linspace(high, low, 256)[:, None]
    for place, shown in ((box, values), (scale, shades)):
        paper.pixels(_color(shown, limits, colors), place)
        paper.box(place, outline="black")
    paper.text(left + width / 2, top - 0.07, title, size=9, anchor="ms")
    edge = scale[0] + scale[2]
    for tick, text in _ticks(low, high, max(min(int(2.5 * height), 8), 2)):
        y = top + height * (high - tick) / (high - low)
        paper.line((edge, y), (edge + 0.04, y))
        paper.text(edge + 0.07, y, text, anchor="lm")


def _color(values: np.ndarray, limits: tuple[float, float], colors: str) -> np.ndarray:
    """RGB of numbers between two limits; grey where there is none."""
    anchors = np.array(PALETTES[colors], float)
    share = np.clip((np.nan_to_num(values, nan=limits[0]) - limits[0]) / (limits[1] - limits[0]), 0, 1)
    place = share * (len(anchors) - 1)
    found = np.stack([np.interp(place, np.arange(len(anchors)), anchors[:, channel]) for channel in range(3)], -1)
    found[np.isnan(values)] = 0xDD
    return found.round().astype(np.uint8)


def _names(paper: Paper, box: Box, columns: Sequence[str], rows: Sequence[str]) -> None:
    """Names below and at the left of a heat map."""
    left, top, width, height = box
    for place, name in _choose_names(columns, width):
        paper.text_up(left + width * (place + 0.5) / len(columns), top + height + 0.06, name)
    for place, name in _choose_names(rows, height):
        paper.text(left - 0.06, top + height * (place + 0.5) / len(rows), name, anchor="rm")


def _draw_errors(paper: Paper, report: Mapping[str, Any], tasks: Sequence[str], box: Box) -> None:
    """Grouped bars; what is beyond the edge has its number written on it."""
    entries, (left, top, width, height) = report["tasks"], box
    kinds = list(ERRORS) if report["method"]["masks"] else ["unified"]
    kinds = ["rescaled", "one_bit"] if report["method"].get("deltas") else kinds
    known = [entry["error"][kind] or 0.0 for entry in entries for kind in kinds]
    edge = max(known)
    if len(kinds) > 1:
        shown = [entry["error"][kind] or 0.0 for entry in entries for kind in ("rescaled", "one_bit")]
        edge = min(edge, max(1.0, 1.15 * max(shown)), 2.0)
    # Room for the numbers above the line at 1.
    edge = (1.25 if max(known) > edge else 1.05) * max(edge, 1.0)
    room = width / len(entries)
    bar = 0.84 * room / len(kinds)
    for place, entry in enumerate(entries):
        for index, kind in enumerate(kinds):
            value = entry["error"][kind] or 0.0
            x, tall = left + place * room + 0.08 * room + index * bar, height * min(value, edge) / edge
            paper.box((x, top + height - tall, bar, tall), fill=ERRORS[kind][1])
            if value > edge:
                paper.text_up(x + bar / 2, top + 0.03, f"{value:.3g}", size=6)
    one = top + height * (1 - 1 / edge)
    for x in np.arange(left, left + width, 0.06):
        paper.line((x, one), (x + 0.02, one))
    for tick, text in _ticks(0, edge, 6):
        paper.text(left - 0.05, top + height * (1 - tick / edge), text, anchor="rm")
    paper.box(box, outline="black")
    paper.text_up(0.15, top + height / 2, "squared distance, relative", below=False, size=8)
    title = "reconstruction error of task vectors (0: the task's checkpoint, 1: the base)"
    paper.text(left, top - 0.07, title, size=9, anchor="ls")
    for place, name in _choose_names(tasks, width):
        paper.text_up(left + room * (place + 0.5), top + height + 0.06, name)
    x = left + width - 5.2
    for kind in kinds if len(kinds) > 1 else ():
        x += paper.legend(x, top - 0.11, *ERRORS[kind])


def _draw_cosines(paper: Paper, report: Mapping[str, Any], tasks: Sequence[str], box: Box) -> None:
    """Cosines of pairs; where there is room each has its number."""
    values = _matrix(report["cosines"])
    np.fill_diagonal(values, math.nan)
    # Often all are small; the colours reach as far as they do.
    limit = max(0.2, *np.abs(values[np.isfinite(values)]).tolist()) if np.isfinite(values).any() else 0.2
    _heat_map(paper, values, box, "cosines of task vectors", "cosine", (-limit, limit))
    _names(paper, box, tasks, tasks)
    left, top, side, _ = box
    for row, line in enumerate(values if len(tasks) <= 12 else []):
        for column, value in enumerate(line):
            if value == value:
                color = "white" if abs(value) > 0.6 * limit else "black"
                x, y = left + side * (column + 0.5) / len(tasks), top + side * (row + 0.5) / len(tasks)
                # Without the sign of a zero.
                paper.text(x, y, f"{round(value, 2) + 0.0:.2f}", size=6, color=color)


def _bytes(count: float) -> tuple[float, str]:
    """Bytes in the largest unit that leaves at least one, and what one of that unit is called."""
    power, unit = next((p, u) for p, u in ((9, "GB"), (6, "MB"), (3, "kB"), (0, "bytes")) if count >= 10**p or p == 0)
    return 10.0**power, unit


def _draw_sizes(paper: Paper, report: Mapping[str, Any], box: Box) -> None:
    """Stacked bars of bytes."""
    sizes, count, (left, top, width, height) = report["sizes"], len(report["tasks"]), box
    bars = {_count_noun(count, "checkpoint"): ["checkpoints"], "this artifact": ["unified"]}
    if report["method"]["masks"]:
        bars["this artifact"] += ["masks", "extras"]
        bars["with the base"] = ["unified", "masks", "extras", "base"]
    if report["method"]["masks"] and not report["method"].get("deltas"):
        bars["1-bit with the base"] = ["masks", "extras", "base"]
    largest = max(1, *(sum(sizes[part] for part in parts) for parts in bars.values()))
    divisor, unit = _bytes(largest)
    room = height / len(bars)
    for place, (name, parts) in enumerate(bars.items()):
        start, y = 0, top + room * (place + 0.5)
        for part in parts:
            wide = width * sizes[part] / largest
            paper.box((left + width * start / largest, y - 0.38 * room, wide, 0.76 * room), fill=PARTS[part][1])
            start += sizes[part]
        own, own_unit = _bytes(start)
        paper.text(left + width * start / largest + 0.05, y, f"{start / own:.3g} {own_unit}", anchor="lm")
        paper.text(left - 0.06, y, name, anchor="rm")
    paper.line((left, top), (left, top + height), (left + width, top + height))
    for tick, text in _ticks(0, largest / divisor, 5):
        paper.text(left + width * tick * divisor / largest, top + height + 0.05, text, anchor="ma")
    paper.text(left + width / 2, top - 0.07, f"size in {unit}", size=9, anchor="ms")
    named = list(dict.fromkeys(part for parts in bars.values() for part in parts))
    for place, part in enumerate(named):
        paper.legend(left - 0.9 + place % 2 * 2.2, top + height + 0.35 + place // 2 * 0.17, *PARTS[part])
