"""Generated images measured: seeds, batches, distances, and a pipeline whose answers are known."""

import numpy as np
import pytest
from diffusers import DDIMScheduler

from hf_ext.metrics import content_drift, high_frequency_energy
from hf_ext.pipelines.disentangled_dit.pipeline import DisentangledDiTPipeline
from tests.disentangled_dit.dit_testing import make_transformer
from tests.kit.models import assert_same_picture
from tests.kit.studies import EXAMPLES, module_loader

load = module_loader(EXAMPLES / "disentangled_dit")

STEPS = {"num_inference_steps": 2, "guidance_scale": 1.0}


@pytest.fixture
def generating(load):
    return load("generating")


@pytest.fixture(scope="module")
def pipeline() -> DisentangledDiTPipeline:
    scheduler = DDIMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
    transformer = make_transformer(sample_size=8, num_layers=2, control_alpha={"original_size": 0.0, "flip": 0.0})
    return DisentangledDiTPipeline(transformer, scheduler, None, None, None)


class Brightness:
    """In place of a classifier: an image's features are its mean colours, its class the brightness in fifths."""

    def classify(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        means = np.asarray(images).mean((1, 2)).astype(np.float32)
        return means, (means.mean(1) / 51.2).astype(np.int64)


def test_an_image_depends_on_seed_and_place_not_on_the_batch(generating, pipeline):
    labels = [0, 3, 1, 4, 4]
    whole = generating.generate_images(pipeline, labels, **STEPS)
    assert whole.shape == (5, 8, 8, 3)
    assert whole.dtype == np.uint8
    small = generating.generate_images(pipeline, labels, batch_size=2, **STEPS)
    # Other shapes of matrix products round differently: at most one level.
    assert np.abs(whole.astype(int) - small).max() <= 1
    assert_same_picture(generating.generate_images(pipeline, labels, **STEPS), whole)
    # Noise of its own for each place, also for one class; the same place keeps its noise when other labels change.
    assert np.abs(whole[3].astype(int) - whole[4]).max() > 20
    assert np.abs(whole[1].astype(int) - generating.generate_images(pipeline, [4, 3], **STEPS)[1]).max() <= 1
    assert np.abs(whole.astype(int) - generating.generate_images(pipeline, labels, seed=1, **STEPS)).max() > 20


def test_the_size_control_is_varied_alone(generating, pipeline):
    result = generating.evaluate_size_control(pipeline, Brightness(), [8, 32, 64], images_per_class=2, **STEPS)
    labels = [0, 1, 2, 3, 4] * 2
    images = np.stack(
        [generating.generate_images(pipeline, labels, original_size=(s, s), **STEPS) for s in (8, 32, 64)]
    )
    seen = np.stack([Brightness().classify(made)[1] for made in images])
    expected = content_drift(images, seen)
    assert expected["pixel_distance"] > 0.01
    # Drawn twice: a grey level here and there may be rounded the other way.
    assert {name: result[name] for name in expected} == pytest.approx(expected, rel=1e-3)
    assert result["sizes"] == [8, 32, 64]
    energies = [float(high_frequency_energy(made).mean()) for made in images]
    assert result["high_frequency_energy"] == pytest.approx(energies, rel=1e-3)
    assert result["accuracy"] == [float(np.mean(classes == np.array(labels))) for classes in seen]
