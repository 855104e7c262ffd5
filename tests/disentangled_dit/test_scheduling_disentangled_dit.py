"""Schedules for other sizes: the signal-to-noise ratio at equal t, and what survives saving and changing the class."""

import diffusers
import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler

from hf_ext.pipelines.disentangled_dit import rescale_noise_schedule
from tests.kit.refusals import refused

SOLVERS = [diffusers.DPMSolverMultistepScheduler, diffusers.UniPCMultistepScheduler]
FAMILY = [DDIMScheduler, diffusers.DDPMScheduler, diffusers.PNDMScheduler, EulerDiscreteScheduler, *SOLVERS]
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
SCHEDULE = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}


def kept(scheduler) -> torch.Tensor:
    return scheduler.alphas_cumprod.double()


def assert_four_times_the_noise(rescaled, scheduler, rtol: float) -> None:
    """Of all timesteps with a part of the picture."""
    found, before = ((1 - kept(one)) / kept(one) for one in (rescaled, scheduler))
    known = scheduler.alphas_cumprod > 1e-6
    torch.testing.assert_close((found / before)[known], torch.full_like(before[known], 4), rtol=rtol, atol=0)


@pytest.mark.parametrize("kind", FAMILY)
def test_twice_the_size_has_four_times_the_noise_over_signal(kind):
    scheduler = kind(**SCHEDULE)
    before = scheduler.betas.clone()
    rescaled = rescale_noise_schedule(scheduler, 256, 512)
    assert type(rescaled) is kind and rescaled is not scheduler
    assert torch.equal(scheduler.betas, before) and scheduler.config.trained_betas is None
    assert_four_times_the_noise(rescaled, scheduler, 2e-3)
    # the values that were worked out by hand for this schedule
    assert kept(scheduler)[-1] == pytest.approx(4.66e-3, rel=2e-3)
    assert kept(rescaled)[-1] == pytest.approx(1.17e-3, rel=3e-3)
    assert kept(rescaled)[500] == pytest.approx(0.0877, rel=1e-2)
    assert rescaled.betas.min() > 0 and rescaled.betas.max() < 0.0121


def test_equal_sizes_change_nothing_and_two_steps_are_one():
    scheduler = DDIMScheduler(**SCHEDULE)
    torch.testing.assert_close(kept(rescale_noise_schedule(scheduler, 64, 64)), kept(scheduler), rtol=0, atol=1e-6)
    # Of a rectangle its area counts.
    twice = rescale_noise_schedule(rescale_noise_schedule(scheduler, 16, (48, 12)), 24, 64)
    torch.testing.assert_close(kept(twice), kept(rescale_noise_schedule(scheduler, 16, 64)), rtol=0, atol=1e-6)
    back = rescale_noise_schedule(rescale_noise_schedule(scheduler, 16, 64), 64, 16)
    torch.testing.assert_close(kept(back), kept(scheduler), rtol=0, atol=1e-6)
    assert torch.equal(*(rescale_noise_schedule(scheduler, size, 64).betas for size in (32, np.int64(32))))
    for size in (0, "32", (32,), (32, -1), None, float("nan"), (32, "a")):
        with refused(ValueError, "from_size"):
            rescale_noise_schedule(scheduler, size, 64)


def test_the_betas_survive_saving_and_a_change_of_class(tmp_path):
    rescaled = rescale_noise_schedule(DDIMScheduler(**SCHEDULE), 32, 64)
    rescaled.save_pretrained(tmp_path)
    loaded = DDIMScheduler.from_pretrained(tmp_path)
    assert torch.equal(loaded.betas, rescaled.betas)
    for kind in FAMILY:
        torch.testing.assert_close(kept(kind.from_config(loaded.config)), kept(rescaled), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", [DDIMScheduler, EulerDiscreteScheduler])
def test_zero_terminal_signal_stays_zero(kind):
    scheduler = kind(**SCHEDULE, rescale_betas_zero_snr=True)
    rescaled = rescale_noise_schedule(scheduler, 8, 16)
    assert kept(rescaled)[-1] < 1e-7
    assert_four_times_the_noise(rescaled, scheduler, 2e-2)


@pytest.mark.parametrize("kind", [FlowMatchEulerDiscreteScheduler, diffusers.FlowMatchHeunDiscreteScheduler])
def test_flow_matching_is_shifted(kind):
    scheduler = kind(shift=1.5)
    rescaled = rescale_noise_schedule(scheduler, 32, 64)
    assert type(rescaled) is kind and rescaled.config.shift == 3.0 and scheduler.config.shift == 1.5
    plain, shifted = kind(), rescale_noise_schedule(kind(), 32, 64)
    sigma = plain.sigmas.double()
    torch.testing.assert_close(shifted.sigmas.double(), 2 * sigma / (1 + sigma), rtol=0, atol=1e-6)
    twice = rescale_noise_schedule(rescale_noise_schedule(scheduler, 8, 24), 24, 32)
    assert twice.config.shift == pytest.approx(rescale_noise_schedule(scheduler, 8, 32).config.shift)
    config = rescale_noise_schedule(SOLVERS[0](**FLOW, flow_shift=1.0), 32, 64).config
    assert config.flow_shift == 2.0 and config.trained_betas is None


def test_schedulers_that_no_beta_or_shift_describes_are_refused():
    for scheduler, error, message in (
        (diffusers.EDMEulerScheduler(), TypeError, "EDMEulerScheduler has neither betas nor a constant flow shift"),
        (FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), ValueError, "use_dynamic_shifting=True"),
        (FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True), ValueError, "use_karras_sigmas=True"),
        (FlowMatchEulerDiscreteScheduler(shift_terminal=0.1), ValueError, "shift_terminal=0.1"),
        # Their levels of noise do not follow `flow_shift` either.
        *((kind(**FLOW, use_karras_sigmas=True), ValueError, "use_karras_sigmas=True") for kind in SOLVERS),
    ):
        with refused(error, message):
            rescale_noise_schedule(scheduler, 16, 32)
    for sizes, name in (((0, 32), "from_size"), ((32, (8, -1)), "to_size")):
        with pytest.raises(ValueError, match=f"{name} is .*positive"):
            rescale_noise_schedule(DDIMScheduler(), *sizes)
