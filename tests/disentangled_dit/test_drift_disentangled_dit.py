"""Coarse and fine parts of images, and content drift, on images whose answer is known."""

import numpy as np
import pytest
from skimage import data
from skimage.transform import resize

from tests.kit.studies import EXAMPLES, module_loader

load = module_loader(EXAMPLES / "disentangled_dit")


@pytest.fixture
def drift(load):
    return load("drift")


def photograph(size: int = 64) -> np.ndarray:
    return data.astronaut()[:256, 100:356][:: 256 // size, :: 256 // size].copy()


def test_the_parts_add_up_and_are_orthogonal(drift):
    images = np.random.default_rng(0).uniform(size=(2, 3, 12, 17, 3))
    slow, fast = drift.split_frequencies(images, 0.2)
    np.testing.assert_allclose(slow + fast, images, atol=1e-14)
    np.testing.assert_allclose(np.sum(slow * fast, axis=(2, 3, 4)), 0, atol=1e-10)
    again, rest = drift.split_frequencies(slow, 0.2)
    np.testing.assert_allclose(again, slow, atol=1e-12)
    np.testing.assert_allclose(rest, 0, atol=1e-12)


def test_the_transform_is_scipys(drift):
    dctn = pytest.importorskip("scipy.fft").dctn
    images = np.random.default_rng(1).uniform(size=(10, 14, 1))
    coefficients = dctn(images[:, :, 0], norm="ortho")
    frequencies = np.hypot(np.arange(10)[:, None] / 20, np.arange(14)[None] / 28)
    expected = np.sum(coefficients[frequencies > 0.3] ** 2) / images.size
    assert drift.high_frequency_energy(images, 0.3) == pytest.approx(expected, rel=1e-10)


def test_a_wave_is_slow_or_fast_by_its_frequency(drift):
    # Three half waves over 24 pixels: 1/16 cycle per pixel.
    wave = np.cos(np.pi * (np.arange(24) + 0.5) * 3 / 24)[None, :, None] * np.ones((20, 1, 3))
    slow, fast = drift.split_frequencies(wave, 1 / 16)
    np.testing.assert_allclose(slow, wave, atol=1e-12)
    slow, fast = drift.split_frequencies(wave, 1 / 16 - 1e-6)
    np.testing.assert_allclose(fast, wave, atol=1e-12)


def test_energy_is_that_of_the_values_and_falls_where_an_image_was_enlarged(drift):
    sharp = photograph()
    energies = [
        float(drift.high_frequency_energy(resize(sharp[::step, ::step], (64, 64), order=3, mode="edge").clip(0, 1)))
        for step in (1, 2, 4)
    ]
    assert energies[0] > 5 * energies[1] > 5 * energies[2] > 0
    # A Fourier transform would see a jump where the right side meets the left.
    gradient = np.broadcast_to(np.linspace(0, 1, 64)[None, :, None], (64, 64, 3))
    assert drift.high_frequency_energy(gradient) < 1e-6
    image = photograph()
    np.testing.assert_array_equal(
        drift.high_frequency_energy(image[None]), drift.high_frequency_energy(image[None] / 255)
    )
    assert drift.high_frequency_energy(np.stack([image, image])[None]).shape == (1, 2)


def test_detail_is_told_from_content(drift):
    base = np.full((1, 16, 16, 3), 0.5)
    # The fastest wave there is, and a brighter image.
    checks = base + 0.1 * ((np.arange(16)[:, None] + np.arange(16)) % 2 * 2 - 1)[None, :, :, None]
    detail = drift.content_drift(np.stack([base, checks]))
    assert detail["pixel_distance"] == pytest.approx(0.1)
    assert detail["detail_distance"] > 0.9 * detail["pixel_distance"]
    assert detail["content_distance"] < 0.01
    content = drift.content_drift(np.stack([base, base + 0.2]))
    assert content["content_distance"] == pytest.approx(0.2) == content["pixel_distance"]
    assert content["detail_distance"] < 1e-12
    assert "agreement" not in content


def test_means_are_over_pairs_of_settings_and_over_images(drift):
    values = np.array([[0.0, 0.5], [0.1, 0.5], [0.4, 0.9]])
    images = np.broadcast_to(values[:, :, None, None, None], (3, 2, 4, 4, 1))
    # Pairs of settings: 0.1, 0.4, 0.3 for the first image; 0, 0.4, 0.4 for the second.
    found = drift.content_drift(images, np.array([[0, 1], [0, 1], [2, 1]]))
    assert found["pixel_distance"] == pytest.approx(1.6 / 6)
    assert found["agreement"] == pytest.approx(4 / 6)
    # Equal images have none.
    equal = drift.content_drift(
        np.stack([np.stack([photograph(32), photograph(32)[::-1]])] * 3), np.array([[4, 5]] * 3)
    )
    assert equal == {"pixel_distance": 0, "content_distance": 0, "detail_distance": 0, "agreement": 1}
