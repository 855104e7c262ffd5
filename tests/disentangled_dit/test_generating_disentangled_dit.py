"""Images for measurements: noise of their own, whatever the batch."""

import numpy as np
import pytest
from diffusers import DDIMScheduler

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
