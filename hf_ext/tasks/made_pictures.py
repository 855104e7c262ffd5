"""Pictures that no camera takes, for training: flat colours, ramps, drawings, text and pages as on a screen."""

import string
from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

Colour = tuple[int, int, int]
# With spaces, so that lines have words.
LETTERS = string.ascii_letters + string.digits + ".,:;-()%&" + 12 * " "
# Pillow's own font, by its size: no file is looked for.
_load_font = cache(ImageFont.load_default)


def make_picture(side: int, generator: np.random.Generator) -> Image.Image:
    """A square RGB picture of one kind of `KINDS`, each as often; all draws are the generator's."""
    kinds = list(KINDS.values())
    return kinds[int(generator.integers(len(kinds)))](side, generator)


def _draw_colour(generator: np.random.Generator) -> Colour:
    """Every second channel is empty or full, since those are what photographs lack; every fourth colour is a grey."""
    ends, values = 255 * generator.integers(2, size=3), generator.integers(256, size=3)
    channels = np.where(generator.random(3) < 0.5, ends, values)
    red, green, blue = (int(value) for value in (channels[[0, 0, 0]] if generator.random() < 0.25 else channels))
    return red, green, blue


def _flat(side: int, generator: np.random.Generator) -> Image.Image:
    return Image.new("RGB", (side, side), _draw_colour(generator))


def _ramp(side: int, generator: np.random.Generator) -> Image.Image:
    """From one colour to another, in any direction."""
    angle = generator.uniform(0, 2 * np.pi)
    places = np.linspace(-0.5, 0.5, side)
    share = 0.5 + (np.cos(angle) * places[:, None] + np.sin(angle) * places) / np.sqrt(2)
    first, last = (np.array(_draw_colour(generator)) for _ in range(2))
    return Image.fromarray(np.rint(first + share[..., None] * (last - first)).astype(np.uint8))


def _drawing(side: int, generator: np.random.Generator) -> Image.Image:
    """Shapes over one another; of every second picture the edges are smooth, as it is drawn large and shrunk."""
    zoom = int(generator.choice([1, 4]))
    picture = Image.new("RGB", (zoom * side, zoom * side), _draw_colour(generator))
    pen = ImageDraw.Draw(picture)
    for _ in range(int(generator.integers(2, 9))):
        corners = generator.integers(-zoom * side // 4, zoom * side * 5 // 4, size=(3, 2))
        points = [(int(x), int(y)) for x, y in corners]
        box = (*(int(value) for value in corners[:2].min(0)), *(int(value) for value in corners[:2].max(0)))
        colour, width = _draw_colour(generator), zoom * int(generator.integers(1, 5))
        shape = generator.integers(5)
        if shape == 0:
            pen.line(points, colour, width)
        elif shape == 1:
            pen.polygon(points, colour)
        elif shape == 2:
            pen.ellipse(box, None, colour, width)
        else:
            (pen.rectangle if shape == 3 else pen.ellipse)(box, colour)
    return picture.reduce(zoom)


def _text(side: int, generator: np.random.Generator) -> Image.Image:
    picture = _flat(side, generator)
    _write(picture, (0, 0, side, side), int(generator.integers(9, 33)), _draw_colour(generator), generator)
    return picture


def _page(side: int, generator: np.random.Generator) -> Image.Image:
    """Boxes with and without a frame on light or dark ground, each with a little text."""
    dark = bool(generator.integers(2))
    paper, ink = sorted(((level,) * 3 for level in map(int, generator.choice([0, 24, 240, 255], 2))), reverse=not dark)
    if paper == ink:
        ink = (255,) * 3 if dark else (0,) * 3
    picture = Image.new("RGB", (side, side), paper)
    pen = ImageDraw.Draw(picture)
    for _ in range(int(generator.integers(1, 5))):
        left, top = (int(value) for value in generator.integers(side * 3 // 4, size=2))
        right, bottom = (start + int(generator.integers(side // 6 + 1, side)) for start in (left, top))
        filled = generator.random() < 0.5
        pen.rectangle((left, top, right, bottom), _draw_colour(generator) if filled else paper, ink)
        _write(picture, (left + 2, top + 1, right, bottom), int(generator.integers(8, 15)), ink, generator)
    return picture


def _write(
    picture: Image.Image, box: tuple[int, int, int, int], size: int, colour: Colour, generator: np.random.Generator
) -> None:
    """Lines of random words in a box; what is too long is cut off at its right and lower edge."""
    left, top, right, bottom = box
    font, width = _load_font(size), min(right, picture.width) - left
    lines = max(1, (min(bottom, picture.height) - top) // (size + 2))
    letters = 1 + max(0, width) // (size // 2)
    text = "\n".join("".join(generator.choice(list(LETTERS), letters)) for _ in range(lines))
    ImageDraw.Draw(picture).multiline_text((left, top), text, colour, font, spacing=2)


# In this order: a kind that is put between others changes what every training draws.
KINDS = {kind.__name__[1:]: kind for kind in (_flat, _ramp, _drawing, _text, _page)}
