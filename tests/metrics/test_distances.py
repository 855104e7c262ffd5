"""Fréchet and kernel distances against closed forms; features of networks and classifiers; CLIP scores."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPModel, CLIPProcessor, ConvNextImageProcessor, RegNetForImageClassification

from hf_ext.metrics import (
    ClassifierFeatures,
    CLIPScores,
    FeatureStatistics,
    FeatureSums,
    InceptionFeatures,
    frechet_distance,
    kernel_distance,
    kernel_distance_of_subsets,
)
from hf_ext.metrics.distances import as_features
from hf_ext.metrics.features import as_rgb
from tests.kit.refusals import refused
from tests.kit.scorers import write_clip, write_inception
from tests.tasks.diffusion_testing import write_judge


def samples(seed: int, count: int = 300, dimensions: int = 12, offset: float = 0.0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    mixing = generator.normal(size=(dimensions, dimensions))
    return generator.normal(size=(count, dimensions)) @ mixing + offset


def test_frechet_distance_is_the_textbook_formula_with_scipys_root():
    sqrtm = pytest.importorskip("scipy.linalg").sqrtm
    first, second = samples(0), samples(1, count=500, offset=0.7)
    covariances = [np.cov(values, rowvar=False) for values in (first, second)]
    trace = np.trace(sum(covariances) - 2 * sqrtm(covariances[0] @ covariances[1]).real)
    expected = np.sum((first.mean(0) - second.mean(0)) ** 2) + trace
    assert frechet_distance(first, second) == pytest.approx(expected, rel=1e-9)


def test_frechet_distance_of_commuting_covariances_has_a_closed_form():
    generator = np.random.default_rng(2)
    basis = np.linalg.qr(generator.normal(size=(7, 7)))[0]
    values = generator.uniform(0, 3, size=(2, 7))
    # One direction has no spread at all.
    values[0, 3] = 0.0
    means = generator.normal(size=(2, 7))
    pair = [FeatureStatistics(mean, (basis * value) @ basis.T) for mean, value in zip(means, values, strict=True)]
    expected = np.sum((means[0] - means[1]) ** 2) + np.sum((np.sqrt(values[0]) - np.sqrt(values[1])) ** 2)
    assert frechet_distance(*pair) == pytest.approx(expected, rel=1e-10)


def test_frechet_distance_of_a_set_to_itself_is_zero_even_with_fewer_samples_than_dimensions():
    features = samples(3, count=5, dimensions=40, offset=100.0)
    assert 0 <= frechet_distance(features, features) < 1e-18 * np.sum(features**2)
    # Shifted, only the means differ: in float64, next to a mean of 100, nothing is lost.
    assert frechet_distance(features, features + 1e-3) == pytest.approx(40 * 1e-6, rel=1e-9)
    # Arrays with fewer samples than dimensions go another way than statistics, to the same distance.
    for counts in ((5, 40), (9, 300), (300, 7)):
        pair = [samples(seed, count, 40) for seed, count in enumerate(counts)]
        expected = frechet_distance(*(FeatureStatistics.of(features) for features in pair))
        assert frechet_distance(*pair) == pytest.approx(expected, rel=1e-9), counts


def test_small_distances_of_singular_covariances_do_not_drown_in_rounding():
    # All spread is along one axis: standard deviations 1 and 1.0001, a distance of 1e-8 beside a trace of 2.
    covariance = np.zeros((50, 50))
    covariance[0, 0] = 1.0
    pair = [FeatureStatistics(np.zeros(50), covariance * scale**2) for scale in (1.0, 1.0001)]
    assert frechet_distance(*pair) == pytest.approx(1e-8, rel=1e-6)


@pytest.mark.parametrize("sizes", [[300], [1, 299], [100, 0, 150, 50]])
def test_sums_of_batches_are_the_statistics_of_all(sizes):
    features, whole = samples(4, offset=1e6), FeatureSums()
    for part in np.split(features, np.cumsum(sizes)[:-1]):
        sums = FeatureSums()
        if len(part):
            sums.add(part)
        whole.join(sums)
    # A mean of 1e6 beside a spread of about 3: sums of squares would lose all digits of float32 and half of float64's.
    for result in (whole.statistics(), FeatureStatistics.of(features)):
        assert result.count == 300
        np.testing.assert_allclose(result.mean, features.mean(0), rtol=1e-14)
        np.testing.assert_allclose(result.covariance, np.cov(features, rowvar=False), rtol=1e-8, atol=1e-8)
    assert as_features(np.ones((2, 3), dtype=np.float16), "features").dtype == np.float64


def test_statistics_survive_their_file(tmp_path):
    statistics = FeatureStatistics.of(samples(6))
    statistics.save(tmp_path / "reference.npz")
    loaded = FeatureStatistics.load(tmp_path / "reference.npz")
    np.testing.assert_array_equal(loaded.mean, statistics.mean)
    np.testing.assert_array_equal(loaded.covariance, statistics.covariance)
    assert loaded.count == 300 and frechet_distance(loaded, samples(6)) < 1e-18
    assert [path.name for path in tmp_path.iterdir()] == ["reference.npz"]
    # Files of others have no count, and often float32.
    np.savez(tmp_path / "other.npz", mu=statistics.mean.astype(np.float32), sigma=np.eye(12, dtype=np.float32))
    assert FeatureStatistics.load(tmp_path / "other.npz").count is None
    np.savez(tmp_path / "wrong.npz", arr_0=np.zeros(3))
    with refused(ValueError, "mu", "sigma"):
        FeatureStatistics.load(tmp_path / "wrong.npz")


@pytest.mark.parametrize("counts", [(23, 17), (1100, 1061)])
def test_kernel_distance_is_the_sum_over_all_pairs(counts):
    """Large sets are compared in blocks of 1024 rows, which do not divide them."""
    first, second = (samples(7 + place, count, 5) for place, count in enumerate(counts))

    def mean(x, y):
        values = (x @ y.T / 5 + 1) ** 3
        return values.mean() if x is not y else (values.sum() - np.trace(values)) / (len(x) * (len(x) - 1))

    expected = mean(first, first) + mean(second, second) - 2 * mean(first, second)
    assert kernel_distance(first, second) == pytest.approx(expected, rel=1e-10)


def test_kernel_distance_is_unbiased_where_the_distributions_are_equal():
    generator = np.random.default_rng(9)
    values = [kernel_distance(*generator.normal(size=(2, 20, 4))) for _ in range(400)]
    # The biased estimate would be about 0.4 here.
    assert abs(np.mean(values)) < 4 * np.std(values) / np.sqrt(len(values))
    assert min(values) < 0 < max(values)


def test_kernel_distance_of_subsets():
    first, second = samples(10, 30, 4), samples(11, 40, 4)
    whole = kernel_distance_of_subsets(first, first[::-1].copy(), subset_size=30, subsets=3)
    # A subset as large as the set is the set, whatever its order.
    assert whole[0] == pytest.approx(kernel_distance(first, first), rel=1e-9)
    assert whole[1] < 1e-9 * abs(whole[0])
    mean, spread = kernel_distance_of_subsets(first, second, subset_size=10, subsets=500)
    assert spread > 0
    # Unbiased subsets of finite sets agree with the whole on average.
    assert abs(mean - kernel_distance(first, second)) < 4 * spread / np.sqrt(500)
    again = [kernel_distance_of_subsets(first, second, subset_size=10, subsets=5, seed=1) for _ in range(2)]
    assert again[0] == again[1]


GOOD = np.ones((3, 4)) * np.arange(3)[:, None]


@pytest.mark.parametrize(
    ("first", "second", "error", "message"),
    [
        (GOOD, GOOD[:, :3], ValueError, "got 4 and 3 dimensions"),
        (GOOD, GOOD[:1], ValueError, "at least 2"),
        (GOOD, GOOD.astype(int), TypeError, "array of int64"),
        (GOOD.tolist(), GOOD, TypeError, "got list"),
        (GOOD, GOOD[0], ValueError, r"\[samples, dimensions\]"),
        (GOOD, np.full((3, 4), np.nan), ValueError, "NaN or infinite"),
    ],
)
@pytest.mark.parametrize("distance", [frechet_distance, kernel_distance])
def test_what_makes_no_sense_is_refused(distance, first, second, error, message):
    with pytest.raises(error, match=message):
        distance(first, second)


def test_statistics_and_subsets_that_cannot_be_are_refused():
    for fact, call in {
        "(2,) and (3, 3)": lambda: FeatureStatistics(np.zeros(2), np.eye(3)),
        "eigenvalues": lambda: frechet_distance(FeatureStatistics(np.zeros(2), np.diag([1, -0.5])), GOOD[:, :2]),
        "from 2 to the 3": lambda: kernel_distance_of_subsets(GOOD, GOOD, subset_size=4),
        "subsets": lambda: kernel_distance_of_subsets(GOOD, GOOD, subset_size=2, subsets=0),
        "at least 2": lambda: FeatureSums().statistics(),
    }.items():
        with refused(ValueError, fact):
            call()


def pictures(seed: int, count: int = 6, size: int = 16) -> np.ndarray:
    return np.random.default_rng(seed).integers(256, size=(count, size, size, 3), dtype=np.uint8)


def test_a_classifiers_features_and_classes(tmp_path):
    classifier = write_judge(tmp_path)
    network = ClassifierFeatures(classifier, batch_size=4)
    features, classes = network.classify(pictures(0))
    model = RegNetForImageClassification.from_pretrained(classifier).eval()
    pixels = ConvNextImageProcessor.from_pretrained(classifier)(list(pictures(0)), return_tensors="pt")
    with torch.no_grad():
        expected, logits = model.regnet(**pixels).pooler_output.flatten(1).numpy(), model(**pixels).logits
    np.testing.assert_allclose(features, expected, atol=1e-5)
    np.testing.assert_array_equal(classes, logits.argmax(-1).numpy())
    assert features.dtype == np.float32
    again = network([Image.fromarray(image) for image in pictures(0)])
    np.testing.assert_allclose(again, features, rtol=0, atol=1e-5 * np.abs(features).max())
    # Grey is RGB with three equal channels.
    grey = pictures(0)[:, :, :, :1]
    coloured = network(grey.repeat(3, axis=3))
    np.testing.assert_allclose(network(grey[:, :, :, 0]), coloured, rtol=0, atol=1e-5 * np.abs(coloured).max())


def test_an_inception_networks_features_and_what_is_no_such_network_or_no_picture(tmp_path):
    network, images = InceptionFeatures(write_inception(tmp_path / "network.pt"), batch_size=3), pictures(0, 8, 4)
    features = network(images)
    assert features.shape == (8, 2048)
    np.testing.assert_allclose(features[:, :12], images.mean(1).transpose(0, 2, 1).reshape(8, 12) / 255, rtol=1e-5)
    with refused(ValueError, "org/name/file.pt"):
        InceptionFeatures("inception")
    with refused(ValueError, "size"):
        network([pictures(0, 1)[0], pictures(0, 1, 8)[0]])
    network.batch_size = 32
    network.network = lambda images, return_features: images.float().flatten(1)
    with refused(ValueError, "768", "6 images", "2048"):
        network(pictures(0))
    for wrong, fact in (
        ([], "at least one"),
        ([Image.new("RGBA", (4, 4))], "mode RGBA"),
        ([np.zeros((4, 4, 2), dtype=np.uint8)], "got (4, 4, 2)"),
    ):
        with refused(ValueError, fact):
            as_rgb(wrong)


def test_clip_scores_are_the_models_own_similarities(tmp_path):
    clip = write_clip(tmp_path)
    images, texts = list(pictures(0, 3)), ["a cat", "dog", "something longer than the model can read at once"]
    model, processor = CLIPModel.from_pretrained(clip).eval(), CLIPProcessor.from_pretrained(clip)
    inputs = processor(images=images, text=texts, return_tensors="pt", padding=True, truncation=True)
    with torch.no_grad():
        similarities = model(**inputs).logits_per_image.diagonal() / model.logit_scale.exp()
    expected = (100 * similarities.clamp(min=0)).tolist()
    scores = CLIPScores(clip)
    assert max(expected) > 0 and scores(images, texts).tolist() == pytest.approx(expected, abs=1e-3)
    with refused(TypeError, "PIL", "uint8"):
        scores([images[0] / 255.0], texts[:1])
    for wrong in (texts[:1], texts[:2], "dog", []):
        with refused(ValueError, "texts", "3 images"):
            scores(images, wrong)
    torch.nn.init.zeros_(scores.model.text_projection.weight)
    with refused(ValueError, "zero", "finite"):
        scores(images, texts)
