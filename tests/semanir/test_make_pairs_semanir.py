"""Pairs for the recipes of deblurring and weather: from a seed, damaged, and never written over others."""

import sys
from contextlib import nullcontext

import numpy as np
import pytest
from PIL import Image

from tests.kit.studies import EXAMPLES, module_loader

load = module_loader(EXAMPLES / "semanir")


def write_photos(folder, count=3, shape=(40, 52, 3)):
    """Pictures with a slope of light and some grain."""
    folder.mkdir(parents=True)
    for index in range(count):
        slope = np.linspace(40, 200, shape[1])[None, :, None] + np.zeros(shape)
        pixels = slope + np.random.default_rng(index).normal(0, 10, shape)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{index}.png")
    return folder


def read_pairs(folder):
    return [
        [np.asarray(Image.open(folder / part / path.name)).astype(int) for part in ("lq", "hq")]
        for path in sorted((folder / "hq").iterdir())
    ]


def test_pairs_are_made_from_a_seed_and_every_damage_damages(load, tmp_path):
    make_pairs = load("make_pairs")
    photos = sorted(write_photos(tmp_path / "photos", shape=(160, 200, 3)).iterdir())
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_pairs.make_pairs(photos, tmp_path / name, seed)
    for kind in ("deblur", "weather"):
        first, again, other = (read_pairs(tmp_path / name / kind) for name in "abc")
        assert len(first) == 3
        for one, two, three in zip(first, again, other, strict=True):
            np.testing.assert_array_equal(one, two)
            np.testing.assert_array_equal(one[1], three[1])
            assert one[0].shape == one[1].shape and (one[0] != three[0]).any()
            # Damaged, yet the same picture.
            assert 0.5 < np.abs(one[0] - one[1]).mean() < 40


def test_what_a_shaking_camera_sees(load):
    make_pairs, generator = load("make_pairs"), np.random.default_rng(0)
    even = np.full((30, 40, 3), 0.4)
    np.testing.assert_allclose(make_pairs.shake(even, generator), even, atol=1e-12)
    # One bright point becomes the path; light is neither lost nor made.
    point = np.zeros((61, 61, 1))
    point[30, 30] = 1
    seen = make_pairs.shake(point, generator) ** make_pairs.GAMMA
    assert seen.sum() == pytest.approx(1) and np.count_nonzero(seen) > 8
    rows, columns = np.nonzero(seen[..., 0])
    assert max(np.ptp(rows), np.ptp(columns)) <= 16


def test_small_kernels_are_convolved_as_defined(load):
    generator = np.random.default_rng(0)
    image, kernel = generator.random((6, 7, 2)), generator.random((3, 5))
    padded = np.pad(image, ((1, 1), (2, 2), (0, 0)), "symmetric")
    wanted = [[np.einsum("rc,rcd->d", kernel, padded[y : y + 3, x : x + 5]) for x in range(7)] for y in range(6)]
    np.testing.assert_allclose(load("make_pairs").convolve(image, kernel), wanted)


def test_pairs_are_not_made_over_others_or_of_nothing(load, monkeypatch, tmp_path, capsys):
    make_pairs, photos = load("make_pairs"), write_photos(tmp_path / "photos", 1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.png").write_text("no picture")
    for source, out, said in (
        (photos, "out", ""),
        (photos, "out", "exist: give another OUT"),
        (tmp_path / "empty", "new", "holds no pictures"),
        (tmp_path / "text", "new", "a.png is not a picture"),
    ):
        monkeypatch.setattr(sys, "argv", ["make_pairs.py", str(source), str(tmp_path / out)])
        with pytest.raises(SystemExit) if said else nullcontext() as ended:
            make_pairs.main()
        assert said in f"{capsys.readouterr().err} {ended and ended.value}"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["deblur", "weather"]
    assert not list(tmp_path.glob("new/*"))
