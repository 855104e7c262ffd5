"""Every scheduler against the exact answer for Gaussian pictures, and schedulers that do not fit."""

import itertools

import numpy as np
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    UniPCMultistepScheduler,
)

from hf_ext.pipelines import DisentangledDiTPipeline
from tests.disentangled_dit.dit_testing import generator
from tests.disentangled_dit.pipeline_testing import GaussianDenoiser, make_pipeline, quiet
from tests.kit.refusals import refused

EVEN = {"timestep_spacing": "trailing"}


def ancestral_spread(steps):
    """Standard deviation that ancestral sampling of so many steps gives exactly: every step is a scaled sum."""
    kept = torch.cat([torch.ones(1), DDIMScheduler().alphas_cumprod])[:: 1000 // steps].flip(0).tolist()
    variance = 1.0
    for now, then in itertools.pairwise(kept):
        alpha = now / then
        found = now**0.5 * 0.25 / (now * 0.25 + 1 - now)
        scale = then**0.5 * (1 - alpha) / (1 - now) * found + alpha**0.5 * (1 - then) / (1 - now)
        variance = scale**2 * variance + (1 - then) / (1 - now) * (1 - alpha)
    return variance**0.5


def test_eta_reaches_ddim_and_is_refused_elsewhere():
    scheduler = DDIMScheduler(**EVEN, clip_sample=False)
    pipeline = quiet(DisentangledDiTPipeline(GaussianDenoiser(), scheduler, None, None, None))
    options = {"class_labels": 0, "num_inference_steps": 50, "output_type": "latent", "guidance_scale": 1.0}
    noise = torch.randn(1, 1, 48, 48, generator=generator())
    even, noisy = (pipeline(eta=eta, latents=noise, generator=generator(1), **options).images for eta in (0.0, 1.0))
    assert float(noisy.std()) == pytest.approx(ancestral_spread(50), rel=0.045)
    assert float((even - noisy).std()) > 0.2
    pipeline.scheduler = EulerDiscreteScheduler.from_config(pipeline.scheduler.config)
    with pytest.raises(ValueError, match="eta=1.0 means nothing to EulerDiscreteScheduler"):
        pipeline(eta=1.0, **options)


def test_timesteps_and_sigmas_are_the_callers():
    noise = torch.randn(1, 1, 48, 48, generator=generator())
    seen = []

    def draw(scheduler, prediction, **schedule):
        pipeline = quiet(DisentangledDiTPipeline(GaussianDenoiser(prediction), scheduler, None, None, None))
        options = {"latents": noise, "guidance_scale": 1.0, "output_type": "latent", **schedule}
        seen.clear()

        def note(pipe, step, timestep, tensors):
            seen.append(float(timestep))
            return {}

        return pipeline(class_labels=0, callback_on_step_end=note, **options).images

    flow, euler = FlowMatchEulerDiscreteScheduler(), EulerDiscreteScheduler()
    images = draw(flow, "flow_prediction", sigmas=[1.0, 0.5, 0.1])
    assert seen == [1000, 500, pytest.approx(100)]
    torch.testing.assert_close(images, draw(flow, "flow_prediction", sigmas=np.array([1.0, 0.5, 0.1])))
    draw(DDPMScheduler(clip_sample=False), "epsilon", timesteps=[900, 300])
    assert seen == [900, 300]
    with pytest.raises(ValueError, match="DDIMScheduler does not take timesteps; leave"):
        draw(DDIMScheduler(), "epsilon", timesteps=[900, 300])
    with pytest.raises(ValueError, match="EulerDiscreteScheduler does not take timesteps and sigmas"):
        draw(euler, "epsilon", timesteps=[900, 300], sigmas=[2.0, 1.0])


REFUSED = {
    "a change to flow matching": (FlowMatchEulerDiscreteScheduler(), "reads the network's output as flow_prediction"),
    "another prediction": (DDIMScheduler(prediction_type="v_prediction"), "predicts epsilon"),
    "fewer training timesteps": (DDIMScheduler(num_train_timesteps=500), "500 training timesteps"),
    "a learned variance": (DDPMScheduler(variance_type="learned"), "variance_type='learned', and the network"),
    "flow sigmas without the prediction": (
        DPMSolverMultistepScheduler(use_flow_sigmas=True),
        "prediction_type='epsilon' and use_flow_sigmas=True",
    ),
    "timesteps that the network has not seen": (
        EulerDiscreteScheduler(prediction_type="v_prediction", timestep_type="continuous"),
        "timestep_type='continuous', numbers that the network has not seen",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_scheduler_that_does_not_fit_is_refused(case):
    scheduler, message = REFUSED[case]
    pipeline = make_pipeline()
    pipeline.scheduler = scheduler
    with pytest.raises(ValueError, match=message):
        pipeline(class_labels=0, num_inference_steps=1)
    # the same when it is loaded with a saved prediction
    with pytest.raises(ValueError, match=message):
        DisentangledDiTPipeline(pipeline.transformer, scheduler, None, None, None, prediction_type="epsilon")


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize(
    ("scheduler", "fact"),
    [
        (DDIMScheduler(trained_betas=0.5), "IndexError"),
        (DDIMScheduler(steps_offset=2**200), "OverflowError"),
        (UniPCMultistepScheduler(solver_p="x"), "AttributeError"),
        (FlowMatchHeunDiscreteScheduler(shift=float("inf")), "FlowMatchHeunDiscreteScheduler"),
    ],
)
def test_a_scheduler_whose_configuration_is_damaged_is_named(scheduler, fact):
    prediction = "flow_prediction" if isinstance(scheduler, FlowMatchHeunDiscreteScheduler) else "epsilon"
    pipeline = quiet(DisentangledDiTPipeline(GaussianDenoiser(prediction), scheduler, None, None, None))
    with refused(ValueError, type(scheduler).__name__, fact):
        pipeline(class_labels=0, num_inference_steps=2, output_type="latent")
