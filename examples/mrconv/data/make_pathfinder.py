"""Pathfinder and Path-X as in Long Range Arena (https://arxiv.org/abs/2011.04006): does a path join two discs?

python examples/mrconv/data/make_pathfinder.py data/pathfinder32
python examples/mrconv/data/make_pathfinder.py data/pathfinder128 --size 128 --num-workers 8

Two paths of 14 dashes begin near the middle, a fixed distance apart, and wind outwards; short paths are drawn around
them to distract. One disc marks the beginning of one path. The other marks the end of the same path (class 1) or of
the other path (class 0), so whoever does not follow the dashes cannot tell. The rules and values are those by which
the benchmark's pictures were drawn (https://arxiv.org/abs/1805.08315, and the notes of the benchmark's reader):

- After a dash the path goes on straight over a gap of `margin`, turns by an angle d with a probability in proportion
  to cos(continuity · d)^2, and the next dash begins `margin` later.
- Dashes with a margin around each may touch, not overlap. A dash does not see the one it follows, a long path not the
  newest dash of the other one, and short paths not the last dash of the first long one.
- A short path begins where its first dash fits, and is left out where it finds no way. At 32 pixels short paths are
  brighter than long ones. A picture is made as bright as can be.

What differs, with numbers and in brackets those of 310 and 27 pictures that the benchmark's own code drew:

- Where a long path finds no way, the benchmark begins the picture anew, which one in 40 to 250 survives; here both
  paths give up their last rounds first. Half of the paths end more than 13.3 (13.4) and 79 (78) pixels from where they
  begin.
- Directions are 256ths of a turn, not those between whole pixels; edges are smoothed by 16 samples a pixel, not by a
  Lanczos filter. Of all pixels 16.2 % (17.3 %) and 4.0 % (4.0 %) are brighter than a quarter of the brightest, their
  mean is 28.2 (27.7) and 7.8 (7.8) of 255.
- Of 5 and 8 short paths 4.64 (4.65) and 7.75 (7.56) find a way.

A picture is a function of seed, split and index, the same on any machine: directions and their probabilities are
tables of whole numbers, places are counted in 1,024ths of a pixel, and whether a dash covers a place is asked in whole
numbers too. Nothing is left to the last digit of a cosine.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import datasets
import numpy as np
from huggingface_hub.dataclasses import strict
from made_data import Made, main

# Parts of a pixel in which places are counted, and directions of a full turn.
UNIT = 1024
TURN = 256
DIRECTIONS = np.array(
    [[round(UNIT * f(2 * math.pi * turn / TURN)) for f in (math.cos, math.sin)] for turn in range(TURN)]
)
PATH_DASHES, DISTRACTOR_DASHES = 14, 4
# A side of a pixel is sampled at so many places.
_SAMPLES = 4
# Directions that are tried for a dash, beginnings for a distractor, and pictures before none is found to fit.
_MOST_TURNS, _MOST_STARTS, _MOST_PICTURES = 3, 5, 10_000
# Pixels around a picture that count as taken: no dash that begins in it ends farther outside.
_AROUND = 16
# Rounds of dashes that two paths in a dead end give up, and how often, before the picture is begun anew.
_ROUNDS_BACK, _MOST_RETREATS = 3, 40


class Drawing(NamedTuple):
    """The values of the benchmark for pictures of one size, lengths in pixels."""

    dash: int
    thickness: float
    margins: tuple[int, ...]
    continuity: float
    radius: float
    # Between the beginnings of the two paths.
    distance: int
    distractors: int
    # Brightness of dashes that cover a pixel, of the two paths and of distractors, where that of discs is 1.
    contrasts: tuple[float, float]
    # The largest share of a pixel that a dash covers: thin lines of the benchmark are thinner where they are slanted.
    cover: float


DRAWINGS = {
    32: Drawing(2, 0.65, (1,), 1.0, 1.5, 7, 5, (1.5, 2.0), 0.57),
    128: Drawing(5, 1.42, (2, 3), 1.8, 3.0, 20, 8, (0.9, 0.9), 1.0),
}


class Scene(NamedTuple):
    """The content of a picture: dashes [n, 2 ends, (x, y)] in 1,024ths of a pixel and discs [2, (x, y)]."""

    dashes: np.ndarray
    discs: np.ndarray
    margin: int
    label: int


@strict
@dataclass
class Pathfinder(Made):
    """
    Pictures of Pathfinder as functions of (seed, split, index); odd ones show a joined pair of discs.

    Args:
        size (`int`, defaults to 32): Side in pixels: 32 is the benchmark's Pathfinder, 128 its Path-X.
    """

    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    # As many as the benchmark has.
    usual = (160_000, 20_000, 20_000)

    size: int = 32

    def validate_size(self) -> None:
        if self.size not in DRAWINGS:
            raise ValueError(f"size must be 32 (Pathfinder) or 128 (Path-X), got {self.size}.")

    def scene(self, index: int, split: str = "train") -> Scene:
        """The dashes and discs of a picture."""
        generator = self.generator(index, split)
        for _ in range(_MOST_PICTURES):
            canvas = _Canvas(self.size, generator)
            if canvas.draw_pair():
                break
        else:
            raise ValueError(f"{_MOST_PICTURES:,} pictures had no room for two paths: take another seed.")
        for _ in range(canvas.drawing.distractors):
            canvas.draw_distractor()
        label, first = index % 2, int(generator.integers(2))
        paths = canvas.dashes[: 2 * PATH_DASHES]
        discs = np.stack([paths[first][0], paths[(first if label else 1 - first) - 2][1]])
        return Scene(np.stack(canvas.dashes), discs, canvas.margin, label)

    def example(self, index: int, split: str = "train") -> tuple[np.ndarray, int]:
        """One example, the grey picture and its class."""
        scene = self.scene(index, split)
        return draw_scene(scene, self.size), scene.label

    def readme(self) -> str:
        """The classes of the pictures."""
        name = {32: "Pathfinder", 128: "Path-X"}[self.size]
        return (
            f"# {name}\n\n{{sizes}}; seed {self.seed}; {self.size} x {self.size} grey pixels. Label 1: the discs are "
            "the ends of one path of 14 dashes; 0: of two.\nWritten by `examples/mrconv/data/make_pathfinder.py` by "
            f"the rules of Long Range Arena's {name} (curv_contour_length_14); the pictures are its own, so scores "
            "compare with published ones only as far as two draws of nearly one distribution do.\n"
        )


class _Canvas:
    """Paths that grow dash by dash and keep their distance."""

    def __init__(self, size: int, generator: np.random.Generator):
        self.drawing = drawing = DRAWINGS[size]
        self.size = size
        self.generator = generator
        self.margin = drawing.margins[int(generator.integers(len(drawing.margins)))]
        # Bends of less than a right angle after `continuity`, and their chances.
        most = math.ceil(TURN / 4 / drawing.continuity) - 1
        self.bends = np.arange(-most, most + 1)
        angles = drawing.continuity * 2 * math.pi / TURN * self.bends
        self.chances = np.array([round(2**20 * math.cos(angle) ** 2) for angle in angles])
        self.dashes: list[np.ndarray] = []
        # Rows and columns of the pixels of each dash.
        self.own: list[tuple[np.ndarray, np.ndarray]] = []
        # How many dashes own a pixel; those of the edge are taken too.
        self.taken = self._free_within(1)

    def _free_within(self, edge: int) -> np.ndarray:
        """Pixels, with those around the picture, of which all but those in the middle are taken once."""
        taken, edge = np.ones((self.size + 2 * _AROUND,) * 2, dtype=np.uint8), _AROUND + edge
        taken[edge:-edge, edge:-edge] = 0
        return taken

    def draw_pair(self) -> bool:
        """The two long paths, which grow in turns: dashes of even number are of the first. Whether there was a way."""
        distance = self.drawing.distance
        found = self._find_start(self._free_within(2 * distance))
        if found is None:
            return False
        end, *turns = *found, int(self.generator.integers(TURN))
        self._add(*self._dash(end, turns[0]))
        start = self.dashes[0][0] + distance * DIRECTIONS[self.generator.integers(TURN)]
        self._add(*self._dash(start + self.drawing.dash * DIRECTIONS[turns[1]], turns[1]))
        retreats = 0
        while len(self.dashes) < 2 * PATH_DASHES:
            last = len(self.dashes) - 2
            following = self._extend(last, turns[last])
            if following is not None:
                turns.append(following)
                # Only now: the newest dash of each path is not in the way of the other, as in the benchmark.
                self.taken[self.own[last]] += 1
                continue
            retreats += 1
            if retreats > _MOST_RETREATS:
                return False
            kept = max(len(self.dashes) - 2 * _ROUNDS_BACK, 2)
            self._remove(kept, slice(kept - 2, -2))
            del turns[kept:]
        # The benchmark forgets the last dash of the first path.
        self.taken[self.own[-1]] += 1
        return True

    def draw_distractor(self) -> None:
        """A short path where there is room, or nothing."""
        before = len(self.dashes)
        for _ in range(_MOST_STARTS):
            found = self._find_start(self.taken)
            if found is None:
                continue
            end, turn = found
            self._add(*self._dash(end, turn))
            following: int | None = turn
            while following is not None and len(self.dashes) < before + DISTRACTOR_DASHES:
                following = self._extend(len(self.dashes) - 1, following)
                if following is not None:
                    self.taken[self.own[-2]] += 1
            if following is not None:
                self.taken[self.own[-1]] += 1
                return
            self._remove(before, slice(before, -1))

    def _find_start(self, taken: np.ndarray) -> tuple[np.ndarray, int] | None:
        """Places for the end of a path's first dash, in a direction drawn before; nothing where there is no place."""
        turn = int(self.generator.integers(TURN))
        rows, columns = _own_pixels(self.size, self.margin, turn)
        blocked = np.zeros((self.size, self.size), dtype=np.uint8)
        for row, column in zip(rows + _AROUND, columns + _AROUND, strict=True):
            blocked |= taken[row : row + self.size, column : column + self.size]
        places = np.argwhere(blocked == 0)
        return (places[self.generator.integers(len(places))][::-1] * UNIT, turn) if len(places) else None

    def _extend(self, last: int, turn: int) -> int | None:
        """Adds a dash after the last one of a path and tells its direction; nothing where all ways are taken."""
        joint = self.dashes[last][1] + self.margin * DIRECTIONS[turn]
        ways = (turn + self.bends) % TURN
        ends = joint + (self.margin + self.drawing.dash) * DIRECTIONS[ways]
        at = ends // UNIT + _AROUND
        chances = np.cumsum(self.chances * (self.taken[at[:, 1], at[:, 0]] == 0))
        if chances[-1] == 0:
            return None
        for draw in self.generator.integers(chances[-1], size=_MOST_TURNS):
            way = int(np.searchsorted(chances, draw, side="right"))
            new = int(ways[way])
            dash, own = self._dash(ends[way], new)
            if not self.taken[own].any():
                self._add(dash, own)
                return new
        return None

    def _dash(self, end: np.ndarray, turn: int) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
        """A dash and its pixels. It ends at the centre of a pixel: gaps differ by half of one, as in the benchmark."""
        pixel = end // UNIT
        centre = pixel * UNIT + UNIT // 2
        rows, columns = _own_pixels(self.size, self.margin, turn)
        own = rows + (pixel[1] + _AROUND), columns + (pixel[0] + _AROUND)
        return np.stack([centre - self.drawing.dash * DIRECTIONS[turn], centre]), own

    def _add(self, dash: np.ndarray, own: tuple[np.ndarray, np.ndarray]) -> None:
        self.dashes.append(dash)
        self.own.append(own)

    def _remove(self, kept: int, taking: slice) -> None:
        """Keep so many dashes; those of a slice had taken their pixels."""
        for own in self.own[taking]:
            self.taken[own] -= 1
        del self.dashes[kept:], self.own[kept:]


@functools.cache
def _own_pixels(size: int, margin: int, turn: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of a dash's pixels, counted from the one where it ends."""
    # They are those half a pixel or more within the outline that lies `margin` around it: as many as the benchmark's
    # smoothed outlines cover by nine tenths, which no two may.
    drawing, middle = DRAWINGS[size], size // 2
    end = np.full(2, middle * UNIT + UNIT // 2)
    radius = round((drawing.thickness / 2 + margin - 0.5) * UNIT)
    ends = np.stack([end - drawing.dash * DIRECTIONS[turn], end])
    rows, columns, own = _cover_pixels(ends, radius, size, 1)
    found = np.argwhere(own)
    return found[:, 0] + rows.start - middle, found[:, 1] + columns.start - middle


def draw_scene(scene: Scene, size: int) -> np.ndarray:
    """The picture [size, size] of bytes, as bright as can be."""
    drawing = DRAWINGS[size]
    picture = np.zeros((size, size), dtype=np.int64)
    half = round(drawing.thickness * UNIT / 2)
    for number, ends in enumerate(scene.dashes):
        contrast = drawing.contrasts[number >= 2 * PATH_DASHES]
        _draw(picture, ends, half, round(256 * contrast), round(256 * contrast * drawing.cover))
    for disc in scene.discs:
        _draw(picture, np.stack([disc, disc]), round(drawing.radius * UNIT), 256, 256)
    return (255 * picture // picture.max()).astype(np.uint8)


def _draw(picture: np.ndarray, ends: np.ndarray, radius: int, brightness: int, most: int) -> None:
    """Brightens the pixels near a line, none above `most`: of each 16 places are asked whether it covers them."""
    rows, columns, covered = _cover_pixels(ends, radius, len(picture), _SAMPLES)
    part = picture[rows, columns]
    shares = covered.reshape(part.shape[0], _SAMPLES, part.shape[1], _SAMPLES).sum((1, 3))
    np.maximum(part, np.minimum(shares * brightness // _SAMPLES**2, most), out=part)


def _cover_pixels(ends: np.ndarray, radius: int, size: int, samples: int) -> tuple[slice, slice, np.ndarray]:
    """Rows and columns of pixels around a line, at most a few pixels long, and which of their places are near it."""
    low = np.maximum((ends.min(0) - radius) // UNIT, 0)
    high = np.minimum((ends.max(0) + radius) // UNIT + 1, size)
    x, y = ((np.arange(low[axis] * samples, high[axis] * samples) * 2 + 1) * UNIT // (2 * samples) for axis in (0, 1))
    span, from_start = ends[1] - ends[0], (x[None] - ends[0][0], y[:, None] - ends[0][1])
    dot = from_start[0] * span[0] + from_start[1] * span[1]
    square = int((span * span).sum())
    to_start = from_start[0] ** 2 + from_start[1] ** 2
    to_end = (x[None] - ends[1][0]) ** 2 + (y[:, None] - ends[1][1]) ** 2
    # Beside the line the distance is |cross| / length, so it is at most `radius` exactly where |cross| is at most the
    # whole part of sqrt(radius^2 length^2). A disc is a line without length, and nothing lies beside it.
    cross = from_start[0] * span[1] - from_start[1] * span[0]
    near = np.abs(cross) <= math.isqrt(radius * radius * square)
    beside = near & (dot >= 0) & (dot <= square) & (square > 0)
    covered = beside | (to_start <= radius * radius) | (to_end <= radius * radius)
    return slice(low[1], high[1]), slice(low[0], high[0]), covered


if __name__ == "__main__":
    main(Pathfinder, __doc__)
