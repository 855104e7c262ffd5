"""The short studies beside `study.py`: made pairs, windows and keys, other damages, and their tables."""

import re

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


def test_a_bilinear_mosaic_keeps_what_was_measured_and_is_right_on_slopes(load):
    rows, columns = np.mgrid[:12, :16]
    image = np.stack([0.01 * rows + 0.02 * columns, 0.5 - 0.01 * columns, 0.03 * rows], axis=-1)
    found = load("damages").interpolate_mosaic(mosaic(image))
    # At the edge a neighbour is missing.
    np.testing.assert_allclose(found[2:-2, 2:-2], image[2:-2, 2:-2], atol=1e-9)
    np.testing.assert_array_equal(mosaic(found), mosaic(image))


def test_every_run_has_valid_settings(load):
    windows, damages = load("windows"), load("damages")
    counts = set()
    for task in windows.TASKS:
        for window in windows.WINDOWS:
            arguments = windows.run_arguments(windows.find_values(task, window, 0))
            model = build_task(arguments).build_model(arguments.model, None)
            counts.add(sum(value.numel() for value in model.parameters()))
            assert arguments.task["patch_size"] % window == 0
    # Equal parameters: what differs is the window alone.
    assert len(counts) == 1
    for name in damages.DAMAGES:
        values = damages.find_values(name, STUDY)
        arguments = damages.read_arguments(damages.find_recipe(name), values)
        build_task(arguments).build_model(arguments.model, arguments.init_from and str(released(arguments.init_from)))


@pytest.mark.slow
def test_all_steps_fit_each_other(load, tmp_path, monkeypatch):
    """Both studies with trainings of two steps on tiny pictures."""
    windows, damages = load("windows"), load("damages")
    for folder, count in (("bsds500/train", 2), ("bsds500/test", 2), ("set12", 2), ("set5", 2)):
        write_photos(tmp_path / "data" / folder, count, (64, 72, 3))
    for path in (tmp_path / "data" / "bsds500").rglob("*.png"):
        Image.open(path).save(path.with_suffix(".jpg"))
    short = {"max_steps": 2, "warmup_steps": 1, "per_device_train_batch_size": 1}
    monkeypatch.setattr(windows, "NETWORK", {**windows.NETWORK, **short, "model.embed_dim": 8})
    monkeypatch.setattr(windows, "TASKS", dict(list(windows.TASKS.items())[:1]))
    monkeypatch.setattr(windows, "SEEDS", (0,))
    windows.compute(windows.find_data(tmp_path / "data"), tmp_path / "work", tmp_path / "results")
    assert len(re.findall(r"\| \d+\.\d\d \| \d+ \|", windows.make_table(tmp_path / "results"))) == 12
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
    for name in ("windows", "damages"):
        assert f"<!-- {name} -->\n{load(name).make_table()}\n<!-- /{name} -->" in text
    # No folder of a machine is in what is committed.
    for path in (STUDY / "results" / "steps").glob("*.json"):
        assert not re.search(r'"/\w+', path.read_text(encoding="utf-8")), path
