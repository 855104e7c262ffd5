"""Pathfinder and Path-X: the class is what the dashes say, and the pictures are functions of seed, split and index."""

import hashlib

import numpy as np
import pytest
from made_data import SPLITS
from make_pathfinder import DRAWINGS, UNIT, Pathfinder, draw_scene, write_pathfinder
from PIL import Image, ImageDraw

LARGE = pytest.param(128, 8, (7.56, 0.8), 0.040, marks=pytest.mark.slow)


def chains(scene):
    """The dashes of each path, in order: the two long ones grow in turns, then come the short ones."""
    return [scene.dashes[0:28:2], scene.dashes[1:28:2], *scene.dashes[28:].reshape(-1, 4, 2, 2)]


def own_pixels(scene, size):
    """Of each dash the pixels whose centres are near it: [dashes, size * size]."""
    drawing, ends = DRAWINGS[size], scene.dashes / UNIT
    centres = np.stack(np.meshgrid(np.arange(size), np.arange(size)), axis=-1).reshape(1, -1, 2) + 0.5
    from_start, span = centres - ends[:, None, 0], (ends[:, 1] - ends[:, 0])[:, None]
    along = ((from_start * span).sum(-1) / (span * span).sum(-1)).clip(0, 1)
    distances = np.linalg.norm(from_start - along[..., None] * span, axis=-1)
    return distances < scene.margin + drawing.thickness / 2 - 0.51


@pytest.mark.parametrize(("size", "count"), [(32, 20), (128, 4)])
def test_the_class_says_whether_one_path_has_both_discs(size, count):
    task, drawing, labels = Pathfinder(1, size), DRAWINGS[size], []
    for index in range(count):
        scene = task.scene(index)
        paths = chains(scene)
        assert len(paths) - 2 <= drawing.distractors
        for path in paths:
            directions = np.diff(path, axis=1)[:, 0] / UNIT / drawing.dash
            assert np.allclose(np.linalg.norm(directions, axis=-1), 1, atol=0.01)
            # Straight on over one margin, then a turn; dashes end at the centres of pixels.
            joints = path[:-1, 1] / UNIT + scene.margin * directions[:-1]
            ends = joints + (scene.margin + drawing.dash) * directions[1:]
            assert np.abs(ends - path[1:, 1] / UNIT).max() <= 0.51
            bends = np.arccos((directions[1:] * directions[:-1]).sum(-1).clip(-1, 1))
            assert bends.max() < np.pi / 2 / drawing.continuity + 0.05
        begins = [np.array_equal(scene.discs[0], path[0][0]) for path in paths]
        finishes = [np.array_equal(scene.discs[1], path[-1][1]) for path in paths]
        assert sum(begins[:2]) == sum(finishes[:2]) == 1
        assert scene.label == int(begins == finishes)
        labels.append(scene.label)
    assert sum(labels) * 2 == count


@pytest.mark.parametrize(("size", "count"), [(32, 8), (128, 2)])
def test_dashes_keep_the_benchmarks_distance(size, count):
    for index in range(count):
        scene = Pathfinder(6, size).scene(index)
        own = own_pixels(scene, size).astype(np.int64)
        shared = own @ own.T
        for later in range(2, len(own)):
            # In the way of a long path is what was drawn three dashes before; of a short one all but its own last dash
            # and the last one of the first path.
            in_the_way = list(range(later - 2))
            if later >= 28:
                before = later if later % 4 == 0 else later - 1
                in_the_way = [dash for dash in range(before) if dash != 26]
            assert not shared[later, in_the_way].any()


@pytest.mark.parametrize(
    ("size", "count", "distractors", "lit"),
    [(32, 60, (4.65, 0.25), 0.173), LARGE],
)
def test_pictures_are_as_full_as_those_of_the_benchmark(size, count, distractors, lit):
    """Numbers recorded from its own code, of 310 and 27 pictures: short paths, and pixels above a quarter of 255."""
    task = Pathfinder(3, size)
    scenes = [task.scene(index) for index in range(count)]
    mean, tolerance = distractors
    assert np.mean([len(scene.dashes) // 4 - 7 for scene in scenes]) == pytest.approx(mean, abs=tolerance)
    pictures = np.stack([draw_scene(scene, size) for scene in scenes])
    assert (pictures > 64).mean() == pytest.approx(lit, rel=0.1)
    assert (pictures.max((1, 2)) == 255).all()


def test_paths_begin_apart_as_in_the_benchmark_and_stay_in_the_picture():
    for size, drawing in DRAWINGS.items():
        for index in range(4):
            scene = Pathfinder(2, size).scene(index, "test")
            # The first two dashes begin the two paths, at the centres of pixels.
            distance = np.linalg.norm(scene.dashes[0][0] - scene.dashes[1][0]) / UNIT
            assert distance == pytest.approx(drawing.distance, abs=0.75)
            assert scene.dashes.min() >= UNIT and scene.dashes.max() <= (size - 1) * UNIT
            assert scene.margin in drawing.margins


def test_the_picture_shows_the_scene():
    for size, drawing in DRAWINGS.items():
        scene = Pathfinder(5, size).scene(3)
        # Drawn by Pillow sixteen times as large, paths and short paths and discs each by themselves.
        layers = [Image.new("F", (size * 16, size * 16)) for _ in range(3)]
        pens = [ImageDraw.Draw(layer) for layer in layers]
        for number, ((left, top), (right, bottom)) in enumerate(scene.dashes * 16 / UNIT):
            pens[number >= 28].line([left, top, right, bottom], fill=1, width=round(16 * drawing.thickness))
        for x, y in scene.discs * 16 / UNIT:
            reach = 16 * drawing.radius
            pens[2].ellipse([x - reach, y - reach, x + reach, y + reach], fill=1)
        shares = [np.asarray(layer.resize((size, size), Image.Resampling.BOX)) for layer in layers]
        dashes = [
            np.minimum(share, drawing.cover) * contrast
            for share, contrast in zip(shares[:2], drawing.contrasts, strict=True)
        ]
        expected = np.maximum.reduce([*dashes, shares[2]])
        picture = draw_scene(scene, size)
        assert np.corrcoef(expected.ravel(), picture.ravel())[0, 1] > 0.95
        # Distractors of the small pictures are brighter than discs.
        for x, y in scene.discs // UNIT:
            assert picture[y, x] == pytest.approx(255 / max(1, drawing.contrasts[1] * drawing.cover), abs=1)


def test_discs_lie_alike_in_both_classes():
    """The discs of both classes are as far apart: who looks at them alone learns nothing."""
    scenes = [Pathfinder(4).scene(index) for index in range(100)]
    distances = [
        [np.linalg.norm(np.diff(s.discs, axis=0)) / UNIT for s in scenes if s.label == side] for side in (0, 1)
    ]
    means, errors = np.mean(distances, 1), np.std(distances, 1) / np.sqrt(50)
    assert abs(means[0] - means[1]) < 4 * np.hypot(*errors)


def test_pictures_are_functions_of_seed_split_and_index():
    assert np.array_equal(Pathfinder(0).example(2)[0], Pathfinder(0).example(2)[0])
    different = [Pathfinder(seed).example(index, split)[0] for seed in (0, 1) for split in SPLITS for index in (0, 1)]
    assert len({picture.tobytes() for picture in different}) == 12


@pytest.mark.parametrize(("size", "digest"), [(32, "efd67b62036bd6a7"), (128, "ae99ff06d6587922")])
def test_pictures_are_the_same_on_any_machine(size, digest):
    """Recorded; they change when numpy changes its generator or we the rules, and then the README's note must too."""
    pictures = b"".join(Pathfinder(0, size).example(index)[0].tobytes() for index in range(2))
    assert hashlib.sha256(pictures).hexdigest()[:16] == digest


@pytest.mark.slow
def test_two_processes_write_what_one_does(tmp_path):
    for name, workers in (("one", 1), ("two", 2)):
        counts = {"train": 120, "validation": 2}
        write_pathfinder(tmp_path / name, counts, Pathfinder(9), progress=False, num_workers=workers)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
