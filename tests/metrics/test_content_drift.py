"""Coarse and fine parts of images, and content drift, on images whose answer is known."""

import numpy as np
import pytest
from skimage import data
from skimage.transform import resize

from hf_ext.metrics import content_drift, high_frequency_energy, split_frequencies


def photograph(size: int = 64) -> np.ndarray:
    return data.astronaut()[:256, 100:356][:: 256 // size, :: 256 // size].copy()


def test_the_parts_add_up_and_are_orthogonal():
    images = np.random.default_rng(0).uniform(size=(2, 3, 12, 17, 3))
    slow, fast = split_frequencies(images, 0.2)
    np.testing.assert_allclose(slow + fast, images, atol=1e-14)
    np.testing.assert_allclose(np.sum(slow * fast, axis=(2, 3, 4)), 0, atol=1e-10)
    again, rest = split_frequencies(slow, 0.2)
    np.testing.assert_allclose(again, slow, atol=1e-12)
    np.testing.assert_allclose(rest, 0, atol=1e-12)


def test_the_transform_is_scipys():
    dctn = pytest.importorskip("scipy.fft").dctn
    images = np.random.default_rng(1).uniform(size=(10, 14, 1))
    coefficients = dctn(images[:, :, 0], norm="ortho")
    frequencies = np.hypot(np.arange(10)[:, None] / 20, np.arange(14)[None] / 28)
    expected = np.sum(coefficients[frequencies > 0.3] ** 2) / images.size
    assert high_frequency_energy(images, 0.3) == pytest.approx(expected, rel=1e-10)


def test_a_wave_is_slow_or_fast_by_its_frequency():
    # Three half waves over 24 pixels: 1/16 cycle per pixel.
    wave = np.cos(np.pi * (np.arange(24) + 0.5) * 3 / 24)[None, :, None] * np.ones((20, 1, 3))
    slow, fast = split_frequencies(wave, 1 / 16)
    np.testing.assert_allclose(slow, wave, atol=1e-12)
    slow, fast = split_frequencies(wave, 1 / 16 - 1e-6)
    np.testing.assert_allclose(fast, wave, atol=1e-12)


def test_energy_is_that_of_the_values_and_falls_where_an_image_was_enlarged():
    sharp = photograph()
    energies = [
        float(high_frequency_energy(resize(sharp[::step, ::step], (64, 64), order=3, mode="edge").clip(0, 1)))
        for step in (1, 2, 4)
    ]
    assert energies[0] > 5 * energies[1] > 5 * energies[2] > 0
    # A Fourier transform would see a jump where the right side meets the left.
    gradient = np.broadcast_to(np.linspace(0, 1, 64)[None, :, None], (64, 64, 3))
    assert high_frequency_energy(gradient) < 1e-6
    image = photograph()
    np.testing.assert_array_equal(high_frequency_energy(image[None]), high_frequency_energy(image[None] / 255))
    assert high_frequency_energy(np.stack([image, image])[None]).shape == (1, 2)


def test_detail_is_told_from_content():
    base = np.full((1, 16, 16, 3), 0.5)
    # The fastest wave there is, and a brighter image.
    checks = base + 0.1 * ((np.arange(16)[:, None] + np.arange(16)) % 2 * 2 - 1)[None, :, :, None]
    detail = content_drift(np.stack([base, checks]))
    assert detail["pixel_distance"] == pytest.approx(0.1)
    assert detail["detail_distance"] > 0.9 * detail["pixel_distance"]
    assert detail["content_distance"] < 0.01
    content = content_drift(np.stack([base, base + 0.2]))
    assert content["content_distance"] == pytest.approx(0.2) == content["pixel_distance"]
    assert content["detail_distance"] < 1e-12
    assert "agreement" not in content


def test_means_are_over_pairs_of_settings_and_over_images():
    values = np.array([[0.0, 0.5], [0.1, 0.5], [0.4, 0.9]])
    images = np.broadcast_to(values[:, :, None, None, None], (3, 2, 4, 4, 1))
    # Pairs of settings: 0.1, 0.4, 0.3 for the first image; 0, 0.4, 0.4 for the second.
    drift = content_drift(images, np.array([[0, 1], [0, 1], [2, 1]]))
    assert drift["pixel_distance"] == pytest.approx(1.6 / 6)
    assert drift["agreement"] == pytest.approx(4 / 6)
    # Equal images have none.
    equal = content_drift(np.stack([np.stack([photograph(32), photograph(32)[::-1]])] * 3), np.array([[4, 5]] * 3))
    assert equal == {"pixel_distance": 0, "content_distance": 0, "detail_distance": 0, "agreement": 1}


IMAGES = np.zeros((2, 3, 8, 8, 3))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: content_drift(IMAGES[:1]), ValueError, "at least 2 settings"),
        (lambda: content_drift(IMAGES[0]), ValueError, r"\[settings, images, height, width, channels\]"),
        (lambda: content_drift(IMAGES, np.zeros(3, dtype=int)), ValueError, r"\(2, 3\) of the images, got \(3,\)"),
        (lambda: content_drift(IMAGES + np.nan), ValueError, "values from 0 to 1"),
        (lambda: content_drift(IMAGES.astype(int)), TypeError, "int64"),
        (lambda: content_drift(IMAGES, cutoff=0.6), ValueError, "at most 0.5"),
        (lambda: high_frequency_energy(IMAGES[0, 0, 0]), ValueError, r"\[..., height, width, channels\]"),
    ],
)
def test_what_makes_no_sense_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
