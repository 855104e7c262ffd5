"""Measures of images: noise of their own, drift and detail, effects of the controls, and the judging classifier."""

import json
import sys
from functools import partial

import datasets
import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler
from PIL import Image
from skimage import data
from skimage.transform import resize
from torch.utils.data import default_collate
from transformers import AutoImageProcessor, AutoModelForImageClassification

from hf_ext.metrics import ClassifierFeatures
from hf_ext.pipelines.disentangled_dit.pipeline import DisentangledDiTPipeline
from hf_ext.training import TrainingArguments, train
from hf_ext.training.arguments import build, read_yaml
from tests.disentangled_dit.dit_testing import make_transformer
from tests.disentangled_dit.pipeline_testing import make_pipeline
from tests.kit.models import assert_same_picture
from tests.kit.studies import EXAMPLES, module_loader
from tests.tasks.diffusion_testing import make_arguments

FOLDER = EXAMPLES / "disentangled_dit"
load = module_loader(FOLDER)
generating, drift, controls, classifier = (
    pytest.fixture(lambda load, name=name: load(name)) for name in ("generating", "drift", "controls", "classifier")
)
STEPS = {"num_inference_steps": 2, "guidance_scale": 1.0}


@pytest.fixture(scope="module")
def pipeline() -> DisentangledDiTPipeline:
    scheduler = DDIMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
    transformer = make_transformer(sample_size=8, num_layers=2, control_alpha={"original_size": 0.0, "flip": 0.0})
    return DisentangledDiTPipeline(transformer, scheduler)


def test_an_image_depends_on_seed_and_place_not_on_the_batch(generating, pipeline):
    labels = [0, 3, 1, 4, 4]
    generate = partial(generating.generate_images, pipeline, **STEPS)
    whole = generate(labels)
    assert whole.shape == (5, 8, 8, 3) and whole.dtype == np.uint8
    assert_same_picture(generate(labels), whole)
    whole = whole.astype(int)
    # Other shapes of matrix products round differently: at most one level.
    assert np.abs(whole - generate(labels, batch_size=2)).max() <= 1
    # Noise of its own for each place, also for one class; the same place keeps its noise when other labels change.
    assert np.abs(whole[3] - whole[4]).max() > 20
    assert np.abs(whole[1] - generate([4, 3])[1]).max() <= 1
    assert np.abs(whole - generate(labels, seed=1)).max() > 20


def photograph(size: int = 64) -> np.ndarray:
    return data.astronaut()[:256, 100:356][:: 256 // size, :: 256 // size].copy()


def test_the_parts_and_their_energy_are_those_of_scipys_transform(drift):
    fft = pytest.importorskip("scipy.fft")
    images, options = np.random.default_rng(1).uniform(size=(2, 3, 10, 14, 3)), {"norm": "ortho", "axes": (2, 3)}
    frequencies = np.hypot(np.arange(10)[:, None] / 20, np.arange(14)[None] / 28)[:, :, None]
    rapid = fft.dctn(images, **options) * (frequencies > 0.3)
    slow, fast = drift.split_frequencies(images, 0.3)
    np.testing.assert_allclose(fast, fft.idctn(rapid, **options), atol=1e-12)
    np.testing.assert_allclose(slow + fast, images, atol=1e-14)
    expected = np.square(rapid).mean(axis=(2, 3, 4))
    np.testing.assert_allclose(drift.high_frequency_energy(images, 0.3), expected, rtol=1e-10)


def test_a_wave_is_slow_or_fast_by_its_frequency(drift):
    # Three half waves over 24 pixels: 1/16 cycle per pixel.
    wave = np.cos(np.pi * (np.arange(24) + 0.5) * 3 / 24)[None, :, None] * np.ones((20, 1, 3))
    for part, limit in ((0, 1 / 16), (1, 1 / 16 - 1e-6)):
        np.testing.assert_allclose(drift.split_frequencies(wave, limit)[part], wave, atol=1e-12)


def test_energy_is_that_of_the_values_and_falls_where_an_image_was_enlarged(drift):
    image, energy = photograph(), drift.high_frequency_energy
    enlarged = [resize(image[::step, ::step], (64, 64), order=3, mode="edge").clip(0, 1) for step in (1, 2, 4)]
    first, second, third = map(energy, enlarged)
    assert first > 5 * second > 5 * third > 0
    # A Fourier transform would see a jump where the right side meets the left.
    assert energy(np.broadcast_to(np.linspace(0, 1, 64)[None, :, None], (64, 64, 3))) < 1e-6
    np.testing.assert_array_equal(energy(image[None]), energy(image[None] / 255))
    assert energy(np.stack([image, image])[None]).shape == (1, 2)


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
    assert (found["pixel_distance"], found["agreement"]) == (pytest.approx(1.6 / 6), pytest.approx(4 / 6))
    # Equal images have none.
    images = np.stack([[photograph(32), photograph(32)[::-1]]] * 3)
    equal = drift.content_drift(images, np.array([[4, 5]] * 3))
    assert equal == {"pixel_distance": 0, "content_distance": 0, "detail_distance": 0, "agreement": 1}


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
    still = images[:1].repeat(3, 0)
    for seen, along, slope in ((images, axis, -1), (images, 1 - axis, 0), (still, axis, 0)):
        found = controls.measure_shift(seen, places, along)["slope"]
        assert found == pytest.approx(slope, abs=1e-9 if seen is still else 0.05)


class Lightness:
    """In place of a classifier: a class is the lightness in fifths."""

    def classify(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        means = images.mean((1, 2, 3))
        return means[:, None], (means / 51.2).astype(np.int64)


def test_a_network_is_measured_by_the_controls_that_it_has(controls):
    options = {"images_per_class": 2, **STEPS, "sizes": (4, 6), "places": (0, 1, 2)}
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


def picture(label: int, seed: int, size: int = 16) -> Image.Image:
    """Class 0 is reddish, class 1 blueish."""
    pixels = np.random.default_rng(seed).integers(100, size=(size, size, 3), dtype=np.uint8)
    pixels[:, :, 2 * label] += 120
    return Image.fromarray(pixels)


def test_it_trains_and_its_snapshot_tells_classes_apart(classifier, tmp_path):
    rows = {"image": [picture(index % 2, index) for index in range(64)], "label": [index % 2 for index in range(64)]}
    datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image()).to_parquet(str(tmp_path / "rows.parquet"))
    changes = {"method": "classifier", "task": {"image_size": 16, "part": 16, "num_labels": 2}}
    changes |= {"model": {"widths": [8, 12, 16]}, "max_steps": 20, "per_device_train_batch_size": 16}
    arguments = make_arguments(tmp_path / "run", tmp_path / "rows.parquet", **changes)
    assert train(classifier.ClassifierTask(**arguments.task), arguments)["accuracy"] > 0.9
    network = ClassifierFeatures(str(tmp_path / "run" / "snapshot"))
    features, classes = network.classify([picture(index % 2, 100 + index) for index in range(20)])
    assert features.shape == (20, 16) and np.mean(classes == np.arange(20) % 2) > 0.9
    # Images of another size are resized.
    assert network.classify([picture(0, 7, size=24)])[0].shape == (1, 16)


def test_what_it_sees_in_training_is_what_its_processor_makes(classifier, tmp_path):
    task = classifier.ClassifierTask(image_size=16, part=13, smallest=16, num_labels=2)
    task.processor().save_pretrained(tmp_path)
    processor = AutoImageProcessor.from_pretrained(tmp_path)
    for size in (16, 20):
        example = {"image": picture(1, 3, size), "label": 1}
        expected = processor(example["image"], return_tensors="pt")["pixel_values"][0]
        # The processor rounds as the resized image does.
        torch.testing.assert_close(task.encode(example)["pixel_values"], expected, atol=1e-5, rtol=0)
    batch = default_collate([task.training_sample(example, np.random.default_rng(index)) for index in range(8)])
    assert batch["pixel_values"].shape == (8, 3, 13, 13) and batch["pixel_values"].std(0).max() > 0.1
    # One image of three has lost detail on its way through a smaller one.
    task = classifier.ClassifierTask(image_size=16, part=16, smallest=4, num_labels=2)
    seen = [task.training_sample(example, np.random.default_rng(index))["pixel_values"] for index in range(20)]
    sharp = task.encode(example)["pixel_values"]
    assert 8 < sum(torch.equal(image, sharp) or torch.equal(image.flip(-1), sharp) for image in seen) < 20
    with pytest.raises(ValueError, match="smallest must be from 1 to image_size, 16; got 17"):
        build(classifier.ClassifierTask, {"image_size": 16, "part": 16, "smallest": 17}, "task")


@pytest.mark.parametrize("recipe", ["classifier", "judge"])
def test_a_recipe_builds_a_network_that_transformers_loads(classifier, tmp_path, recipe):
    arguments = build(TrainingArguments, read_yaml(FOLDER / f"{recipe}.yaml"))
    task = build(classifier.ClassifierTask, arguments.task, "task")
    model = task.build_model(arguments.model, None)
    assert model.num_parameters() < 2_000_000
    task.save_model(model, model.state_dict(), tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(loaded(pixels).logits, model.eval()(pixels).logits)
    assert loaded.config.id2label[6] == "frog"
    # Smoothed labels cost in training alone; of what is not training only the middle counts.
    labels = torch.tensor([1, 2])
    network = classifier.JudgeForImageClassification(classifier.JudgeConfig(widths=[4, 4], num_labels=3)).eval()
    found = network(pixels, labels=labels)
    torch.testing.assert_close(found.loss, torch.nn.functional.cross_entropy(found.logits, labels))
    border = pixels.clone()
    border[:, :, :2] = 0
    torch.testing.assert_close(network(border).logits, found.logits)
    assert not torch.allclose(network.train()(border).logits, network(pixels).logits)
    # Ten views: mirroring changes nothing, corners count, and the features that are kept are the middle's.
    network.eval().config.views = True
    seen = network(pixels).logits
    torch.testing.assert_close(network(pixels.flip(3)).logits, seen)
    assert not torch.allclose(network(border).logits, seen)
    with pytest.raises(ValueError, match="part must be from 8 to image_size, 32; got 33"):
        build(classifier.ClassifierTask, {"part": 33}, "task")
