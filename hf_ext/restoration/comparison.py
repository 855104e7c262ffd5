# Copyright 2026 The hf-ext authors. Licensed under the Apache License, Version 2.0.
"""Pictures before and after their restoration: a sheet of the whole of each and crops, and a page with sliders."""

import html
import os
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from hf_ext.semanir.image_processing_semanir import to_unit

PANEL, GAP, TITLE = 320, 16, 26
_INK, PAPER = (25, 25, 25), (255, 255, 255)
# Frames around a window or the middle, and around a patch or what changed most.
WINDOW, PATCH = (255, 200, 0), (255, 40, 40)
# Restored pixels of a crop's side; enlarged four times it fills a panel.
_CROP = 80

# Formats that browsers show.
_SHOWN = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".avif")
_PAGE = """<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Before and after</title>
<style>
body {{ font-family: sans-serif; max-width: 1100px; margin: auto; padding: 1em }}
figure {{ margin: 0 0 2em; width: fit-content; max-width: 100%; --at: 50% }}
figure div {{ position: relative; line-height: 0 }}
img {{ max-width: 100% }}
img.before {{ position: absolute; inset: 0; width: 100%; height: 100% }}
img.before {{ clip-path: inset(0 calc(100% - var(--at)) 0 0) }}
img.after {{ clip-path: inset(0 0 0 var(--at)) }}
input {{ width: 100% }}
</style>
<p>Left of the slider: before. Right: after.{left_out}</p>
{figures}
</html>
"""
_FIGURE = """<figure><figcaption>{title}</figcaption>
<div><img class="after" loading="lazy" src="{after}" alt="after">
<img class="before" loading="lazy" src="{before}" alt="before"></div>
<input type="range" min="0" max="100" aria-label="Share that is shown as before"
 oninput="this.parentNode.style.setProperty('--at', this.value + '%')"></figure>"""


def comparison_page(folder: Path, pairs: list[tuple[str, Path, Path]]) -> str:
    """
    A page of pictures before and after under a slider each, which opens from disk.

    Args:
        folder (`Path`): Where the page will lie; it names the pictures from there.
        pairs (`list[tuple[str, Path, Path]]`): Title, file before and file after. Kinds that browsers do not show are
            left out, and the page says how many.
    """
    figures = [
        _FIGURE.format(title=html.escape(title), before=_address(before, folder), after=_address(after, folder))
        for title, before, after in pairs
        if {before.suffix.lower(), after.suffix.lower()} <= {*_SHOWN}
    ]
    hidden = len(pairs) - len(figures)
    told = f" Left out: {hidden} of {len(pairs)}, in formats that browsers do not show." if hidden else ""
    return _PAGE.format(figures="\n".join(figures), left_out=told)


def _address(file: Path, folder: Path) -> str:
    """The address of a file for a page in a folder."""
    try:
        return quote(os.fsencode(Path(os.path.relpath(file, folder)).as_posix()))
    except ValueError:
        # Of another drive.
        return file.resolve().as_uri()


def show_colours(pixels: np.ndarray) -> np.ndarray:
    """Pixels as a screen shows them: uint8 RGB, what is transparent is white."""
    unit = to_unit(pixels)
    if unit.shape[-1] % 2 == 0:
        alpha = unit[..., -1:]
        unit = unit[..., :-1] * alpha + (1 - alpha)
    unit = np.repeat(unit, 3, axis=-1) if unit.shape[-1] == 1 else unit[..., :3]
    return np.rint(unit.clip(0, 1) * 255).astype(np.uint8)


def write_line(draw: ImageDraw.ImageDraw, place: tuple[float, float], text: str, size: int = 16) -> None:
    """Write a line of text that ends where the panel does."""
    # Names of files may have several lines.
    font, text = ImageFont.load_default(size), " ".join(text.split())
    while len(text) > 4 and draw.textlength(text, font) > PANEL:
        text = text[:-4] + "..."
    draw.text(place, text, _INK, font)


class Crop(NamedTuple):
    """A part of a picture before and after."""

    title: str
    # Left, top, right, bottom as parts of the sides.
    box: tuple[float, ...]
    before: np.ndarray
    after: np.ndarray


class Comparison(NamedTuple):
    """A picture on the sheet of comparisons."""

    title: str
    before: np.ndarray
    after: np.ndarray
    crops: list[Crop]


def compare_pictures(title: str, before: np.ndarray, after: np.ndarray) -> Comparison:
    """
    A picture before and after: the whole; its middle, a choice independent of the result; and the part that changed
    most, which may be the best or the worst.
    """
    scale = after.shape[0] // before.shape[0]
    height, width = before.shape[:2]
    side = min(_CROP // scale, height, width)
    changes = np.abs(show_colours(after)[::scale, ::scale].astype(np.int16) - show_colours(before)).sum(-1)
    sums = np.pad(changes.cumsum(0, dtype=np.int64).cumsum(1), ((1, 0), (1, 0)))
    inside = sums[side:, side:] - sums[:-side, side:] - sums[side:, :-side] + sums[:-side, :-side]
    places = {
        "middle": ((height - side) // 2, (width - side) // 2),
        "changed most": tuple(map(int, np.unravel_index(inside.argmax(), inside.shape))),
    }
    crops = []
    for name, (top, left) in places.items():
        place = slice(top, top + side), slice(left, left + side)
        enlarged = tuple(slice(part.start * scale, part.stop * scale) for part in place)
        box = (left / width, top / height, (left + side) / width, (top + side) / height)
        crops.append(Crop(name, box, show_colours(before[place]), show_colours(after[enlarged])))
    label = f"{title}, {width} x {height}" + (f" to {width * scale} x {height * scale}" if scale > 1 else "")
    return Comparison(label, _small(before), _small(after), crops)


def _small(pixels: np.ndarray) -> np.ndarray:
    """A whole picture that fits a panel."""
    picture = Image.fromarray(show_colours(pixels))
    picture.thumbnail((PANEL, PANEL))
    return np.asarray(picture)


def comparison_sheet(comparisons: list[Comparison]) -> Image.Image:
    """
    Pictures before (left) and after (right): the whole with the places of the crops, and each crop enlarged without
    smoothing.
    """
    step, row = PANEL + GAP, PANEL + GAP + TITLE
    sheet = Image.new("RGB", (3 * step + GAP, 2 * len(comparisons) * row + GAP), PAPER)
    draw = ImageDraw.Draw(sheet)
    for number, comparison in enumerate(comparisons):
        for line, (when, whole) in enumerate((("before", comparison.before), ("after", comparison.after))):
            top = GAP + (2 * number + line) * row
            write_line(draw, (GAP, top), comparison.title if line == 0 else f"after: {comparison.title}")
            picture = Image.fromarray(whole)
            sheet.paste(picture, (GAP, top + TITLE))
            for column, (crop, colour) in enumerate(zip(comparison.crops, (WINDOW, PATCH), strict=True), start=1):
                left = GAP + column * step
                write_line(draw, (left, top), f"{crop.title}, {when}")
                pixels = Image.fromarray(crop.before if line == 0 else crop.after)
                sheet.paste(pixels.resize((PANEL, PANEL), Image.Resampling.NEAREST), (left, top + TITLE))
                draw.rectangle((left - 2, top + TITLE - 2, left + PANEL + 1, top + TITLE + PANEL + 1), None, colour, 2)
                corners = [
                    part * length + start
                    for part, length, start in zip(crop.box, picture.size * 2, (GAP, top + TITLE) * 2, strict=True)
                ]
                draw.rectangle(corners, outline=colour, width=2)
    return sheet
