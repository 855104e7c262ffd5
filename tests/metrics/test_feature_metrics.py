"""Distances in features of networks, classifiers and CLIP: tiny real models, as objects and through evaluate.load."""

import json
import os
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPModel, CLIPProcessor, ConvNextImageProcessor, RegNetForImageClassification

from hf_ext.metrics import (
    FID,
    KID,
    ClassifierFeatures,
    CLIPScore,
    FeatureDistance,
    FeatureStatistics,
    InceptionFeatures,
    frechet_distance,
    kernel_distance_of_subsets,
    metric_path,
)
from hf_ext.metrics.clip_score import clip_score
from hf_ext.metrics.features import as_rgb
from hf_ext.metrics.psnr import psnr
from tests.kit import warm_python
from tests.kit.refusals import refused
from tests.kit.scorers import write_clip, write_inception
from tests.tasks.diffusion_testing import write_judge


def pictures(seed: int, count: int = 6, size: int = 16) -> np.ndarray:
    return np.random.default_rng(seed).integers(256, size=(count, size, size, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> str:
    return write_judge(tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="module")
def inception(tmp_path_factory) -> str:
    return write_inception(tmp_path_factory.mktemp("inception") / "network.pt")


def test_a_classifiers_features_and_classes(classifier):
    network = ClassifierFeatures(classifier, batch_size=4)
    features, classes = network.classify(pictures(0))
    model = RegNetForImageClassification.from_pretrained(classifier).eval()
    pixels = ConvNextImageProcessor.from_pretrained(classifier)(list(pictures(0)), return_tensors="pt")
    with torch.no_grad():
        expected = model.regnet(**pixels).pooler_output.flatten(1).numpy()
        logits = model(**pixels).logits
    np.testing.assert_allclose(features, expected, atol=1e-5)
    np.testing.assert_array_equal(classes, logits.argmax(-1).numpy())
    assert features.dtype == np.float32
    again = network([Image.fromarray(image) for image in pictures(0)])
    np.testing.assert_allclose(again, features, rtol=0, atol=1e-5 * np.abs(features).max())
    # Grey is RGB with three equal channels.
    grey = pictures(0)[:, :, :, :1]
    coloured = network(grey.repeat(3, axis=3))
    np.testing.assert_allclose(network(grey[:, :, :, 0]), coloured, rtol=0, atol=1e-5 * np.abs(coloured).max())


def test_feature_distance(classifier, tmp_path):
    metric = FeatureDistance(network=classifier, cache_dir=str(tmp_path))
    network = ClassifierFeatures(classifier)
    first, second = pictures(0, 7), pictures(1, 9)
    expected = frechet_distance(network(first), network(second))
    assert expected > 1e-4
    result = metric.compute(predictions=first, reference=second)
    assert list(result) == ["feature_distance"]
    assert result["feature_distance"] == pytest.approx(expected, rel=1e-3)
    # Batch by batch, PIL images, statistics in a file or features as the reference.
    for start in range(0, 7, 3):
        metric.add_batch(predictions=[Image.fromarray(image) for image in first[start : start + 3]])
    FeatureStatistics.of(network(second)).save(tmp_path / "statistics.npz")
    assert metric.compute(reference=tmp_path / "statistics.npz") == pytest.approx(result, rel=1e-3)
    assert metric.compute(predictions=first, reference=network(second)) == pytest.approx(result, rel=1e-3)
    # The call of metrics of pairs.
    for options in ({}, {"references": second}):
        metric = FeatureDistance(network=classifier, cache_dir=str(tmp_path / str(len(options))))
        with refused(ValueError, "feature_distance"):
            metric.compute(predictions=first, **options)


def test_fid_and_kid_use_the_networks_features(inception, tmp_path):
    first, second = pictures(0, 8, 4), pictures(1, 9, 4)
    network = InceptionFeatures(inception, batch_size=3)
    features = network(first), network(second)
    np.testing.assert_allclose(features[0][:, :12], first.mean(1).transpose(0, 2, 1).reshape(8, 12) / 255, rtol=1e-5)
    fid = FID(network=inception, batch_size=3, cache_dir=str(tmp_path))
    result = fid.compute(predictions=first, reference=second)
    assert result["fid"] == pytest.approx(frechet_distance(*features), rel=1e-4)
    kid = KID(network=inception, cache_dir=str(tmp_path))
    result = kid.compute(predictions=first, reference=second, subset_size=5, subsets=7, seed=3)
    mean, spread = kernel_distance_of_subsets(*features, subset_size=5, subsets=7, seed=3)
    assert result == {"kid": pytest.approx(mean), "kid_standard_deviation": pytest.approx(spread)}


def test_an_inception_network_that_is_none_is_refused(inception, classifier, tmp_path):
    with refused(ValueError, "org/name/file.pt"):
        FID(network="inception", cache_dir=str(tmp_path))
    with refused(ValueError, "size"):
        InceptionFeatures(inception)([pictures(0, 1)[0], pictures(0, 1, 8)[0]])
    network = InceptionFeatures(inception)
    network.network = lambda images, return_features: images.float().flatten(1)
    with refused(ValueError, "768", "6 images", "2048"):
        network(pictures(0))


@pytest.mark.parametrize(
    ("images", "error", "message"),
    [
        ([], ValueError, "is empty"),
        ([pictures(0)[0] / 255.0], TypeError, "array of float64"),
        (["cat.png"], TypeError, "got str"),
        ([Image.new("RGBA", (4, 4))], ValueError, "mode RGBA"),
        ([np.zeros((4, 4, 2), dtype=np.uint8)], ValueError, r"got \(4, 4, 2\)"),
    ],
)
def test_what_is_no_picture_is_refused(images, error, message):
    with pytest.raises(error, match=message):
        as_rgb(images)


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> str:
    return write_clip(tmp_path_factory.mktemp("clip"))


def test_clip_score_is_a_hundred_cosines():
    images = np.array([[3.0, 0.0], [1.0, 1.0], [1.0, 0.0]])
    texts = np.array([[5.0, 0.0], [0.0, 2.0], [-1.0, 0.1]])
    np.testing.assert_allclose(clip_score(images, texts), [100, 100 / np.sqrt(2), 0], atol=1e-12)
    with refused(ValueError, "(3, 2) and (2, 2)"):
        clip_score(images, texts[:2])
    with refused(ValueError, "finite", "zero"):
        clip_score(images * 0, texts)


def test_clip_score_is_the_models_own_similarity(clip, tmp_path):
    images, texts = list(pictures(0, 3)), ["a cat", "dog", "something longer than the model can read at once"]
    metric = CLIPScore(model=clip, batch_size=2, cache_dir=str(tmp_path))
    result = metric.compute(predictions=images, references=texts)
    model, processor = CLIPModel.from_pretrained(clip).eval(), CLIPProcessor.from_pretrained(clip)
    inputs = processor(images=images, text=texts, return_tensors="pt", padding=True, truncation=True)
    with torch.no_grad():
        similarities = model(**inputs).logits_per_image.diagonal() / model.logit_scale.exp()
    expected = (100 * similarities.clamp(min=0)).tolist()
    assert max(expected) > 0
    assert result["clip_score_per_image"] == pytest.approx(expected, abs=1e-3)
    assert result["clip_score"] == pytest.approx(np.mean(expected), abs=1e-3)
    with refused(TypeError, "PIL", "uint8"):
        metric.compute(predictions=[images[0] / 255.0], references=texts[:1])


LOAD_PROGRAM = """
import json
import socket
import sys


def refuse(*args, **kwargs):
    raise AssertionError(f"the network was used: {args}")


socket.socket.connect = refuse
socket.getaddrinfo = refuse

import evaluate
import numpy as np

classifier, inception, clip, *paths = sys.argv[1:]
first, second = np.random.default_rng(0).integers(256, size=(2, 6, 16, 16, 3), dtype=np.uint8)
pair = {"predictions": list(first), "references": list(second), "channel": "rgb"}
result = evaluate.combine([evaluate.load(path) for path in paths[:3]]).compute(**pair)
assert "hf_ext" not in sys.modules
result |= evaluate.load(paths[3], network=classifier).compute(predictions=first, reference=second)
for path, options in zip(paths[4:6], ({}, {"subset_size": 5})):
    result |= evaluate.load(path, network=inception).compute(predictions=first, reference=second, **options)
result |= evaluate.load(paths[6], model=clip).compute(predictions=list(first), references=["a cat"] * 6)
print(json.dumps(result))
"""


@pytest.mark.slow
def test_evaluate_loads_the_scripts_without_a_network(classifier, inception, clip, tmp_path):
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home")}
    names = ["psnr", "ssim", "psnr_b", "feature_distance", "fid", "kid", "clip_score"]
    command = [sys.executable, "-c", LOAD_PROGRAM, classifier, inception, clip, *map(metric_path, names)]
    done = warm_python.run(command, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {*names, "kid_standard_deviation", "clip_score_per_image"} <= found.keys()
    first, second = np.random.default_rng(0).integers(256, size=(2, 6, 16, 16, 3), dtype=np.uint8)
    expected = np.mean([psnr(*pair, channel="rgb") for pair in zip(first, second, strict=True)])
    assert found["psnr"] == pytest.approx(expected, rel=1e-9)
