"""Degradations: MATLAB's bicubic by hand and by properties, JPEG, noise and mosaics by fixed hashes, patches."""

import hashlib

import numpy as np
import pytest
import scipy.ndimage
from skimage import data

from hf_ext.metrics.psnr import psnr
from hf_ext.settings import build
from hf_ext.tasks import degradations
from hf_ext.tasks.degradations import Degradation, blur, gaussian_noise, jpeg, matlab_bicubic, matlab_luma, mosaic
from tests.kit.refusals import refused


def photo(height=61, width=47):
    return data.astronaut()[40 : 40 + height, 180 : 180 + width]


def digest(image):
    return hashlib.sha256(np.ascontiguousarray(image).tobytes()).hexdigest()[:16]


def by_definition(signal, scale):
    """The sum over the mirrored signal, as written in the docstring."""

    def cubic(t):
        t = abs(t)
        if t <= 1:
            return 1.5 * t**3 - 2.5 * t**2 + 1
        return -0.5 * t**3 + 2.5 * t**2 - 4 * t + 2 if t <= 2 else 0.0

    mirrored = np.concatenate([signal[::-1], signal, signal[::-1]])
    result = []
    for place in range(int(np.ceil(len(signal) * scale))):
        u = (place + 0.5) / scale - 0.5
        weights = np.array([cubic((u - i) * min(scale, 1)) for i in range(-len(signal), 2 * len(signal))])
        result.append(weights @ mirrored / weights.sum())
    return np.array(result)


@pytest.mark.parametrize("scale", [2, 3, 4, 1 / 2, 1 / 3, 1 / 4, 1, 0.7, 1.37])
def test_bicubic_is_the_sum_over_the_mirrored_image(scale):
    signal = np.random.default_rng(0).random(17)
    expected = by_definition(signal, scale)
    np.testing.assert_allclose(matlab_bicubic(np.tile(signal, (3, 1)), scale)[0], expected, atol=1e-12)
    np.testing.assert_allclose(matlab_bicubic(np.tile(signal[:, None], 3), scale)[:, 0], expected, atol=1e-12)


def test_bicubic_values_known_from_matlab():
    # Weights of Keys' kernel at 1/4 and 3/4: -9/128, 111/128, 29/128, -3/128.
    impulse = np.zeros((1, 9))
    impulse[0, 4] = 128
    doubled = matlab_bicubic(np.tile(impulse, (2, 1)), 2)[0, 4:14]
    np.testing.assert_allclose(doubled, [0, -3, -9, 29, 111, 111, 29, -9, -3, 0], atol=1e-12)
    # Halving takes eight pixels: (-3, -9, 29, 111, 111, 29, -9, -3) / 256. The first is of pixels 2 1 0 0 1 2 3 4.
    halves = matlab_bicubic(np.tile(np.arange(8.0), (2, 1)), 0.5)[0]
    assert halves[0] == pytest.approx((-6 - 9 + 111 + 58 - 27 - 12) / 256, abs=1e-12)
    np.testing.assert_allclose(halves + halves[::-1], 7, atol=1e-12)


def test_degradations_have_fixed_values():
    image, generator = photo(), np.random.default_rng(7)
    assert digest(matlab_bicubic(image, 1 / 4)) == "2c7af662395655b8"
    assert digest(jpeg(image, 10)) == "c1e53c5b8496771b"
    assert digest(jpeg(image[..., :1], 40)) == "3c3d29a241998d74"
    assert digest(gaussian_noise(image, 25, generator)) == "6c6349925fabbe04"
    assert digest(mosaic(image[:60, :46])) == "69dfaf64ce2971de"


@pytest.mark.parametrize(("clip", "least", "most"), [(0.0, 0, 0), (0.5, 70, 130), (1.0, 200, 200)])
def test_noise_is_clipped_to_8_bits_as_often_as_it_is_told(clip, least, most):
    noise = Degradation("gaussian_noise", sigma=25.0, clip=clip)
    label = {0.0: "gaussian_noise_25", 0.5: "gaussian_noise_25_clipped_0.5", 1.0: "gaussian_noise_25_clipped"}[clip]
    black = np.zeros((8, 8, 3), np.uint8)
    found = [noise.patch([black], 1, 8, np.random.default_rng(seed))[0] for seed in range(200)]
    clipped = [image for image in found if image.min() == 0]
    assert least <= len(clipped) <= most and noise.label == label
    assert all(np.array_equal(image * 255, np.rint(image * 255)) for image in clipped)
    if clip == 0:
        assert np.std(found) * 255 == pytest.approx(25, rel=0.02) and np.min(found) < 0
    # What is always or never clipped draws no more than before there was a choice.
    if clip != 0.5:
        plain = Degradation("gaussian_noise", sigma=25.0).patch([black], 1, 8, np.random.default_rng(0))[0]
        expected = np.rint(255 * plain.clip(0, 1)) / np.float32(255) if clip else plain
        np.testing.assert_allclose(found[0], expected, atol=1e-7)


def test_a_mosaic_keeps_one_colour_of_each_pixel():
    image = photo(6, 4)
    packed = mosaic(image)
    assert packed.shape == (3, 2, 4)
    np.testing.assert_array_equal(packed[1, 1], [image[2, 2, 0], image[2, 3, 1], image[3, 2, 1], image[3, 3, 2]])
    seen = degradations.unpack_mosaic(packed)
    assert np.count_nonzero(seen == image) >= 24 and np.all((seen == 0) | (seen == image))


def test_a_blur_is_that_of_scipy():
    image = photo(23, 9)
    for sigma in (0.4, 1.3, 6):
        options = {"axes": (0, 1), "mode": "reflect", "radius": int(np.ceil(4 * sigma))}
        expected = scipy.ndimage.gaussian_filter(image / 255, sigma, **options)
        np.testing.assert_allclose(blur(image / 255, sigma), expected, atol=1e-12)
        np.testing.assert_array_equal(blur(image, sigma), np.rint(blur(image.astype(float), sigma)))
    np.testing.assert_array_equal(blur(image, 0), image)


@pytest.mark.parametrize("channels", [1, 3])
def test_what_is_resized_keeps_its_size_and_loses_detail_when_smaller(channels):
    image, channel = photo()[..., :channels], "rgb" if channels == 3 else "gray"
    scores = [psnr(degradations.resize_and_back(image, factor), image, channel=channel) for factor in (0.25, 0.5, 2)]
    assert scores[0] < scores[1] < scores[2] and scores[2] > 35
    assert degradations.resize_and_back(image[:1, :3], 0.1).shape == (1, 3, channels)


def test_a_chain_takes_its_steps_after_one_another():
    fields = [{"kind": "blur", "sigma": 1.5}, {"kind": "jpeg", "quality": 20}]
    clean = photo()
    chain = build(Degradation, {"kind": "chain", "steps": fields})
    expected = jpeg(blur(clean, 1.5), 20)
    degraded, target = chain.whole([clean], 1, np.random.default_rng(0))
    np.testing.assert_array_equal(degraded, expected.astype(np.float32) / np.float32(255))
    np.testing.assert_array_equal(np.rint(target * 255), clean)
    assert (chain.label, chain.title) == ("chain_blur_1.5_jpeg_20", "blur σ 1.5, JPEG quality 20 in this order")

    mixed = build(Degradation, {"kind": "chain", "steps": fields, "shuffle": True})
    found = {digest(mixed.of(clean, 1, np.random.default_rng(seed))) for seed in range(12)}
    assert found == {digest(expected), digest(blur(jpeg(clean, 20), 1.5))}

    noise = {"kind": "gaussian_noise", "sigma": [5, 50], "chance": 0.5}
    seldom = build(Degradation, {"kind": "chain", "steps": [noise]})
    images = [seldom.of(clean, 1, np.random.default_rng(seed)) for seed in range(200)]
    changed = [image for image in images if not np.array_equal(image, clean)]
    assert 70 < len(changed) < 130 and len({digest(image) for image in changed}) == len(changed)
    assert all(image.dtype == np.uint8 for image in images)


@pytest.mark.parametrize("size", [16, 64])
def test_patches_of_chains_are_degraded_with_their_surroundings(size):
    steps = [{"kind": "blur", "sigma": [0.5, 2]}, {"kind": "resize", "factor": [0.5, 1.5]}]
    steps += [{"kind": "gaussian_noise", "sigma": [0, 20]}, {"kind": "jpeg", "quality": [30, 90]}]
    chain = build(Degradation, {"kind": "chain", "steps": steps, "shuffle": True})
    for seed in range(6):
        patches = (chain.patch([photo(150, 130)], 1, size, np.random.default_rng(seed)) for _ in range(2))
        (degraded, clean), again = patches
        np.testing.assert_array_equal(degraded, again[0])
        assert degraded.shape == clean.shape == (size, size, 3) and degraded.dtype == np.float32
        # The same picture at the same place, turned alike.
        score = psnr(degraded, clean, channel="rgb", data_range=1.0)
        assert 15 < score < 50 and score > psnr(degraded[::-1].copy(), clean, channel="rgb", data_range=1.0)


CASES = [({"kind": "blur", "sigma": 1.3}, 1, 1), ({"kind": "jpeg", "quality": 10}, 1, 1)]
CASES += [*(({"kind": "bicubic"}, scale, 1) for scale in (2, 3, 4)), ({"kind": "paired"}, 2, 1)]
CASES += [({"kind": "mosaic"}, 2, 3), *((fields, scale, 3) for fields, scale, _ in CASES)]


@pytest.mark.parametrize(("fields", "scale", "channels"), CASES)
def test_a_patch_is_part_of_the_whole_degraded_image(fields, scale, channels):
    degradation = build(Degradation, fields)
    clean = photo(121, 107)[..., :channels]
    images = [clean[::scale, ::scale][: 121 // scale, : 107 // scale], clean[: 121 // scale * scale]]
    images = images if degradation.kind == "paired" else [clean]
    degraded, whole = degradation.whole(images, scale, np.random.default_rng(0))
    size, found = 8, set()
    for seed in range(12):
        (small, large), again = (degradation.patch(images, scale, size, np.random.default_rng(seed)) for _ in range(2))
        np.testing.assert_array_equal(small, again[0])
        assert small.shape[:2] == (size, size) and large.shape == (size * scale, size * scale, channels)
        # The same draws as the patch: a place, a turn and a reflection.
        generator = np.random.default_rng(seed)
        top, left = (int(generator.integers(side // scale - size + 1)) for side in images[-1].shape[:2])
        turns, mirror = int(generator.integers(4)), bool(generator.integers(2))
        part = degraded[top : top + size, left : left + size]
        place = whole[top * scale : (top + size) * scale, left * scale : (left + size) * scale]
        part, place = (np.rot90(image, turns)[:, :: -1 if mirror else 1] for image in (part, place))
        np.testing.assert_array_equal(large, place)
        np.testing.assert_array_equal(small, mosaic(large) if degradation.kind == "mosaic" else part)
        found.add((turns, mirror))
    assert len(found) > 4


def test_ranges_are_drawn_evenly_and_from_the_generator_alone():
    fields = [{"kind": "gaussian_noise", "sigma": [5, 50]}, {"kind": "jpeg", "quality": [10, 12]}]
    noise, compression = degradations.read_degradations(fields, "task.degradation")
    generator = np.random.default_rng(0)
    sigmas = [noise.drawn(generator).sigma for _ in range(1000)]
    assert min(sigmas) > 5 and max(sigmas) < 50 and np.mean(sigmas) == pytest.approx(27.5, abs=1.5)
    assert {compression.drawn(np.random.default_rng(seed)).quality for seed in range(40)} == {10, 11, 12}
    assert (noise.label, compression.title) == ("gaussian_noise_5_to_50", "JPEG quality 10 to 12")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"kind": "haze"}, "haze"),
        ({"kind": "blur"}, "sigma belongs to kind gaussian_noise and blur and is needed there"),
        ({"kind": "blur", "sigma": 9}, "from 0 to 8, got 9"),
        ({"kind": "resize", "factor": [0, 1]}, "from 0.1 to 4"),
        ({"kind": "resize", "factor": 1, "chance": 0}, "chance must be more than 0"),
        ({"kind": "resize", "factor": 1, "chance": 0.5}, "chance is only for the steps of a chain"),
        ([{"kind": "chain", "steps": [{"kind": "jpeg"}]}], r"^here\[0\].*quality belongs to kind jpeg"),
        ({"kind": "chain"}, "steps are required for kind chain and not allowed for other kinds; got None"),
        ({"kind": "chain", "steps": [{"kind": "bicubic"}]}, "a chain has steps of kind .*; got bicubic"),
        ({"kind": "jpeg", "quality": 5, "shuffle": True}, "shuffle is only for kind chain"),
        ({"kind": "gaussian_noise", "sigma": [50, 5]}, "sigma must be a number or a range"),
        ({"kind": "jpeg", "quality": [10.5, 20]}, "quality must be a whole number or a range"),
        ({"kind": "jpeg", "quality": 10, "weight": 0}, "weight must be more than 0"),
        ({"kind": "jpeg", "qualty": 10}, "unknown key 'qualty' in section 'here'. Did you mean 'quality'"),
        ("jpeg", "here must be a mapping of keys, got 'jpeg'"),
        ([], "at least one degradation"),
        ({"kind": "chain", "steps": [{"kind": "gaussian_noise", "sigma": 5, "clip": 1}]}, "no weight and no clip"),
        ([{"kind": "jpeg", "quality": 10}] * 2, "each only once; got .'jpeg_10', 'jpeg_10'."),
    ],
)
def test_wrong_settings_are_refused(value, message):
    with pytest.raises(ValueError, match=message):
        degradations.read_degradations(value, "here")


def test_matlab_luma_is_the_rounded_formula():
    """Known values of rgb2ycbcr, and the formula in floating point wherever it is no half."""
    colours = np.array([[[0, 0, 0], [255, 255, 255], [255, 0, 0], [0, 255, 0], [0, 0, 255]]], np.uint8)
    assert matlab_luma(colours)[0, :, 0].tolist() == [16, 235, 81, 145, 41]
    image = np.random.default_rng(0).integers(256, size=(200, 300, 3), dtype=np.uint8)
    exact = 16 + image @ np.array([65.481, 128.553, 24.966]) / 255
    clear = np.abs(exact % 1 - 0.5) > 1e-6
    luma = matlab_luma(image)
    assert luma.shape == (200, 300, 1) and luma.dtype == np.uint8 and clear.mean() > 0.99
    assert np.array_equal(luma[..., 0][clear], np.rint(exact)[clear])


def test_values_of_another_range_are_refused():
    for degrade in (lambda image: jpeg(image, 10), lambda image: degradations.resize_and_back(image, 2), matlab_luma):
        with refused(TypeError, "float32"):
            degrade(np.zeros((2, 2, 3), np.float32))
    with refused(TypeError, "int64"):
        gaussian_noise(np.zeros((2, 2, 3), np.int64), 5, np.random.default_rng(0))


@pytest.mark.parametrize("scale", [1, 2, 3])
def test_pairs_smaller_than_a_patch_stay_aligned(scale):
    lq = photo(8, 5)
    hq = lq.repeat(scale, 0).repeat(scale, 1)
    for seed in range(8):
        small, large = Degradation("paired").patch([lq, hq], scale, 16, np.random.default_rng(seed))
        np.testing.assert_array_equal(large, small.repeat(scale, 0).repeat(scale, 1))
