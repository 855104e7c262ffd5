"""Pathfinder and Path-X: the class is what the dashes say, and the pictures are functions of seed, split and index."""

import hashlib

import datasets
import numpy as np
import pytest
from PIL import Image, ImageDraw

from hf_ext.settings import build
from hf_ext.tasks.made_data import SPLITS
from hf_ext.tasks.pathfinder import DRAWINGS, UNIT, Pathfinder, draw_scene, write_pathfinder


def groups(scene):
    """The path of each dash, found from the gaps between ends of dashes alone: a gap is at most two margins."""
    ends = scene.dashes / UNIT
    owner = np.arange(len(ends))
    for first in range(len(ends)):
        for second in range(first):
            gap = np.linalg.norm(ends[first][:, None] - ends[second][None], axis=-1).min()
            if gap <= 2 * scene.margin + 0.05:
                owner[owner == owner[first]] = owner[second]
    return owner


def marked(scene, owner):
    """The paths at whose free ends the two discs lie."""
    return [owner[np.flatnonzero((scene.dashes == disc).all(-1).any(-1))[0]] for disc in scene.discs]


@pytest.mark.parametrize(("size", "count"), [(32, 40), (128, 10)])
def test_the_class_says_whether_one_path_has_both_discs(size, count):
    task, labels = Pathfinder(1, size), []
    for index in range(count):
        scene = task.scene(index)
        owner = groups(scene)
        lengths = np.unique(owner, return_counts=True)[1]
        assert sorted(lengths)[-2:] == [14, 14] and set(lengths) <= {4, 14}
        first, second = marked(scene, owner)
        assert (owner == first).sum() == (owner == second).sum() == 14
        assert scene.label == int(first == second)
        labels.append(scene.label)
        assert len(lengths) - 2 <= DRAWINGS[size].distractors
    assert sum(labels) * 2 == count


def test_paths_begin_apart_as_in_the_benchmark_and_stay_in_the_picture():
    for size, drawing in DRAWINGS.items():
        for index in range(4):
            scene = Pathfinder(2, size).scene(index, "test")
            # The first two dashes begin the two paths.
            distance = np.linalg.norm(scene.dashes[0][0] - scene.dashes[1][0]) / UNIT
            assert distance == pytest.approx(drawing.distance, abs=0.02)
            assert scene.dashes.min() >= UNIT and scene.dashes.max() <= (size - 1) * UNIT
            lengths = np.linalg.norm(scene.dashes[:, 1] - scene.dashes[:, 0], axis=-1) / UNIT
            assert np.allclose(lengths, drawing.dash, atol=0.01)
            assert scene.margin in drawing.margins


def test_the_picture_shows_the_scene():
    for size, drawing in DRAWINGS.items():
        scene = Pathfinder(5, size).scene(3)
        # Drawn by Pillow sixteen times as large.
        large = Image.new("F", (size * 16, size * 16))
        pen = ImageDraw.Draw(large)
        for (left, top), (right, bottom) in scene.dashes * 16 / UNIT:
            pen.line([left, top, right, bottom], fill=255 * drawing.contrast, width=round(16 * drawing.thickness))
        for x, y in scene.discs * 16 / UNIT:
            reach = 16 * drawing.radius
            pen.ellipse([x - reach, y - reach, x + reach, y + reach], fill=255)
        expected = np.asarray(large.resize((size, size), Image.Resampling.BOX)).clip(0, 255)
        picture = draw_scene(scene, size)
        assert np.corrcoef(expected.ravel(), picture.ravel())[0, 1] > 0.95
        for x, y in scene.discs // UNIT:
            assert picture[y, x] == 255


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


@pytest.mark.parametrize(("size", "digest"), [(32, "857a9464e8f763f0"), (128, "e48418ccc9912327")])
def test_pictures_are_the_same_on_any_machine(size, digest):
    """Recorded; they change when numpy changes its generator or we the rules, and then the README's note must too."""
    pictures = b"".join(Pathfinder(0, size).example(index)[0].tobytes() for index in range(2))
    assert hashlib.sha256(pictures).hexdigest()[:16] == digest


def test_the_folder_holds_the_examples_or_is_not_there(tmp_path):
    task = Pathfinder(9)
    folder = write_pathfinder(tmp_path / "data", {"train": 4, "validation": 2, "test": 2}, task, progress=False)
    data = datasets.load_dataset(str(folder))
    picture, label = task.example(3, "train")
    assert data["train"][3]["label"] == label and np.array_equal(np.asarray(data["train"][3]["image"]), picture)
    assert "4 train, 2 validation, 2 test; seed 9" in (folder / "README.md").read_text()

    class Interrupted(Pathfinder):
        def scene(self, index, split="train"):
            if split == "validation":
                raise KeyboardInterrupt
            return super().scene(index, split)

    with pytest.raises(KeyboardInterrupt):
        write_pathfinder(tmp_path / "half", {"train": 2, "validation": 2}, Interrupted(9), progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    with pytest.raises(ValueError, match="data exists: name another folder"):
        write_pathfinder(folder, {"train": 1}, task)


@pytest.mark.slow
def test_two_processes_write_what_one_does(tmp_path):
    for name, workers in (("one", 1), ("two", 2)):
        counts = {"train": 120, "validation": 2}
        write_pathfinder(tmp_path / name, counts, Pathfinder(9), progress=False, num_workers=workers)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"seed": -1}, "seed must be 0 or more, got -1"),
        ({"size": 64}, r"size must be 32 \(Pathfinder\) or 128 \(Path-X\)"),
    ],
)
def test_wrong_values_are_named(values, words):
    with pytest.raises(ValueError, match=words):
        build(Pathfinder, values, "make-pathfinder")


def test_a_split_that_is_none_is_named():
    with pytest.raises(ValueError, match="there is no example 0 of 'dev'; splits: train, validation, test"):
        Pathfinder().scene(0, "dev")
