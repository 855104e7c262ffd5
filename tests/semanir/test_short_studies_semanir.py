"""The short study beside `study.py`: made pairs, other damages, and their table."""

import re
import sys
from contextlib import nullcontext

import numpy as np
import pytest
from PIL import Image

from hf_ext.hub.released import released
from hf_ext.tasks.degradations import mosaic
from hf_ext.training import build_task
from tests.kit.studies import EXAMPLES, module_loader

STUDY = EXAMPLES / "semanir"
load = module_loader(STUDY)


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


def test_a_bilinear_mosaic_keeps_what_was_measured_and_is_right_on_slopes(load):
    rows, columns = np.mgrid[:12, :16]
    image = np.stack([0.01 * rows + 0.02 * columns, 0.5 - 0.01 * columns, 0.03 * rows], axis=-1)
    found = load("damages").interpolate_mosaic(mosaic(image))
    # At the edge a neighbour is missing.
    np.testing.assert_allclose(found[2:-2, 2:-2], image[2:-2, 2:-2], atol=1e-9)
    np.testing.assert_array_equal(mosaic(found), mosaic(image))


def test_every_run_has_valid_settings(load):
    damages = load("damages")
    for name in damages.DAMAGES:
        values = damages.find_values(name, STUDY)
        arguments = damages.read_arguments(damages.find_recipe(name), values)
        build_task(arguments).build_model(arguments.model, arguments.init_from and str(released(arguments.init_from)))


@pytest.mark.slow
def test_all_steps_fit_each_other(load, tmp_path, monkeypatch):
    """The study with trainings of two steps on tiny pictures."""
    damages = load("damages")
    for folder, count in (("bsds500/train", 2), ("bsds500/test", 2), ("set5", 2)):
        write_photos(tmp_path / "data" / folder, count, (64, 72, 3))
    for path in (tmp_path / "data" / "bsds500").rglob("*.png"):
        Image.open(path).save(path.with_suffix(".jpg"))
    short = {"max_steps": 2, "warmup_steps": 1, "per_device_train_batch_size": 1}
    monkeypatch.setattr(damages, "SHORT", {**damages.SHORT, **short})
    names = ("demosaicking", "× 4")
    chosen = {
        name: damage._replace(values={**damage.values, **short})
        for name, damage in damages.DAMAGES.items()
        if name in names
    }
    monkeypatch.setattr(damages, "DAMAGES", chosen)
    damages.compute(tmp_path / "data", tmp_path / "work", tmp_path / "results")
    assert damages.make_table(tmp_path / "results").count("\n") == 3
    assert (tmp_path / "results" / "damages.png").stat().st_size > 10_000

    def fail(*words):
        raise AssertionError("trained twice")

    monkeypatch.setattr(damages, "train_run", fail)
    damages.compute(tmp_path / "data", tmp_path / "work", tmp_path / "results")


def test_readme_holds_the_committed_results(load):
    text = (STUDY / "README.md").read_text(encoding="utf-8")
    assert f"<!-- damages -->\n{load('damages').make_table()}\n<!-- /damages -->" in text
    # No folder of a machine is in what is committed.
    for path in (STUDY / "results" / "steps").glob("*.json"):
        assert not re.search(r'"/\w+', path.read_text(encoding="utf-8")), path
