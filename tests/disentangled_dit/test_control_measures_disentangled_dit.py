"""Measures of the controls' effects: of made pictures, whose answers are known, and of a random network."""

import json
import sys

import numpy as np
import pytest

from tests.disentangled_dit.pipeline_testing import make_pipeline
from tests.kit.studies import EXAMPLES, module_loader

load = module_loader(EXAMPLES / "disentangled_dit")


@pytest.fixture
def controls(load):
    return load("controls")


def blobs(places: list[tuple[float, float]], side: int = 32) -> np.ndarray:
    """A bright spot at each place, on grey: uint8 [images, side, side, 3]."""
    rows, columns = np.mgrid[:side, :side]
    spots = [np.exp(-((rows - top) ** 2 + (columns - left) ** 2) / 8) for top, left in places]
    return np.rint(90 + 120 * np.stack(spots)[..., None].repeat(3, -1)).astype(np.uint8)


@pytest.mark.parametrize("axis", [0, 1])
def test_content_that_moves_against_the_crop_has_slope_minus_one(controls, axis):
    places = [2, 8, 14]
    moved = [[(20 - place, 16) if axis == 0 else (16, 20 - place) for _ in range(4)] for place in places]
    images = np.stack([blobs(part) for part in moved])
    assert controls.measure_shift(images, places, axis)["slope"] == pytest.approx(-1, abs=0.05)
    assert controls.measure_shift(images, places, 1 - axis)["slope"] == pytest.approx(0, abs=0.05)
    assert controls.measure_shift(images[:1].repeat(3, 0), places, axis)["slope"] == pytest.approx(0, abs=1e-9)


class Lightness:
    """In place of a classifier: a class is the lightness in fifths."""

    def classify(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        means = images.mean((1, 2, 3))
        return means[:, None], (means / 51.2).astype(np.int64)


def test_a_network_is_measured_by_the_controls_that_it_has(controls):
    options = {
        "images_per_class": 2,
        "num_inference_steps": 2,
        "guidance_scale": 1.0,
        "sizes": (4, 6),
        "places": (0, 1, 2),
    }
    found = controls.measure_controls(make_pipeline(), Lightness(), **options)
    assert found["left_out"] == []
    assert found["control_alpha"] == {"original_size": 8.0, "crop": 0.0, "flip": 0.0}
    parts = [found[name] for name in ("original_size", "crop_down", "crop_right", "flip")]
    assert all(part["pixel_distance"] > 0 and 0 <= part["agreement"] <= 1 for part in parts)
    assert [len(part["accuracy"]) for part in parts] == [2, 3, 3, 2]
    less = controls.measure_controls(make_pipeline(control_alpha={"flip": 8.0}), Lightness(), **options)
    assert less["left_out"] == ["original_size", "crop"] and less["control_alpha"] == {"flip": 8.0}
    assert set(less) == {"control_alpha", "left_out", "flip"}


def test_the_command_measures_a_saved_model_by_the_judge(controls, monkeypatch, capsys, tmp_path):
    make_pipeline(num_classes=10, sample_size=32, patch_size=8, num_layers=1).save_pretrained(tmp_path / "model")
    monkeypatch.setattr(controls, "SAMPLING", {"num_inference_steps": 1, "guidance_scale": 1.0})
    words = [str(tmp_path / "model"), "--per-class", "1", "--out", str(tmp_path / "found.json")]
    monkeypatch.setattr(sys, "argv", ["controls.py", *words])
    controls.main()
    found = json.loads((tmp_path / "found.json").read_text())
    assert json.loads(capsys.readouterr().out) == found and found["original_size"]["sizes"] == list(controls.SIZES)


def test_a_mirrored_picture_is_known_by_its_mirror_image(controls):
    plain = blobs([(16, 8), (20, 25)])
    obeyed, ignored = controls.measure_mirror(plain, plain[:, :, ::-1]), controls.measure_mirror(plain, plain)
    assert obeyed["turned_back"] == pytest.approx(1) and obeyed["as_they_are"] < 0.2
    assert ignored == {"turned_back": obeyed["as_they_are"], "as_they_are": pytest.approx(1)}
