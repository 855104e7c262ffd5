"""diffusers' schedulers in the pipeline: right on the exact answer for Gaussian pictures, or refused by name."""

import copy
import inspect
import itertools
from functools import cache
from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler

from hf_ext.pipelines import DisentangledDiTPipeline
from tests.disentangled_dit.dit_testing import generator
from tests.disentangled_dit.pipeline_testing import GaussianDenoiser, from_picture, make_pipeline, quiet, within_mask
from tests.kit.refusals import refused

# torchsde rounds the ends of the time that it is given
pytestmark = pytest.mark.filterwarnings("ignore:Should have t[ab]:UserWarning")


def in_numpy(convert):
    return lambda self, sigma, levels: convert(self, np.asarray(sigma), np.asarray(levels))


@pytest.fixture(autouse=True)
def numpy_alone(monkeypatch):
    """KDPM2 and DPMSolverSDE convert 1000 noise levels, each from torch to NumPy and back: 3 s for each new one."""
    for name in ("KDPM2DiscreteScheduler", "KDPM2AncestralDiscreteScheduler", "DPMSolverSDEScheduler"):
        kind = getattr(diffusers, name)
        if not hasattr(kind, "_backends"):
            monkeypatch.setattr(kind, "_sigma_to_t", in_numpy(kind._sigma_to_t))


def _named(names: str) -> list[str]:
    return [f"{name}Scheduler" for name in names.split()]


# What each of diffusers' schedulers is to this pipeline. A scheduler of a new version of diffusers is in none of these
# and fails the test below: it has to be tried.
SOLVERS = _named(
    "CogVideoXDDIM DDIMParallel DDIM DEISMultistep DPMSolverMultistep DPMSolverSinglestep EulerDiscrete HeunDiscrete "
    "KDPM2Discrete LMSDiscrete PNDM UniPCMultistep"
)
# These add noise at every step; TCD and LCM have few steps, the latter for networks that were distilled for it.
NOISY = _named("DDPMParallel DDPM DPMSolverSDE EulerAncestralDiscrete KDPM2AncestralDiscrete SASolver TCD")
DISTILLED = _named("LCM")
FLOW = _named("FlowMatchEulerDiscrete FlowMatchHeunDiscrete")
# Neither family, or a schedule of their own; steps that need more than a network's output; from picture to noise.
FOREIGN = _named(
    "Amused BlockRefinement CMStochasticIterative ConsistencyDecoder CosineDPMSolverMultistep DDPMWuerstchen "
    "DiscreteDDIM EDMDPMSolverMultistep EDMEuler EntropyBound FlowMapEulerDiscrete FlowMatchLCM HeliosDMD Helios "
    "IPNDM KarrasVe LTXEulerAncestralRF MiniMaxH3 Piflow RFD4Proteina SCM ScoreSdeVe ScoreSdeVp UnCLIP VQDiffusion "
    "CogVideoXDPM RePaint"
)
INVERSE = _named("DDIMInverse DPMSolverMultistepInverse")
# These start at their first step only.
FROM_THE_FIRST_STEP = _named("LMSDiscrete PNDM")
# What some of them cannot be made without.
NEEDED = {
    "AmusedScheduler": {"mask_token_id": 1},
    "VQDiffusionScheduler": {"num_vec_classes": 3},
    "RFD4ProteinaScheduler": {"schedule_mode": "log", "noise_mode": "tan", "tsr_k": 1.0, "tsr_sigma": 1.0},
}
# Those that say themselves not to read a predicted picture.
NO_SAMPLE = _named("PNDM KDPM2Discrete EulerAncestralDiscrete KDPM2AncestralDiscrete DPMSolverSDE")


def find(name):
    """The class of a scheduler; two of them need torchsde, and where it is absent a stand-in has their name."""
    kind = getattr(diffusers, name)
    if hasattr(kind, "_backends"):
        pytest.skip(f"{name} needs {' and '.join(kind._backends)}")
    return kind


def make_scheduler(name, prediction):
    """One that samples from `prediction` without cutting Gaussian values."""
    kind = find(name)
    wanted = {"prediction_type": prediction, "clip_sample": False, "timestep_spacing": "trailing"}
    # one of them draws its noise from a seed of its own, not from the call's generator
    wanted["noise_sampler_seed"] = 0
    if prediction == "flow_prediction":
        wanted["use_flow_sigmas"] = True
    known = inspect.signature(kind.__init__).parameters
    return kind(**{option: value for option, value in wanted.items() if option in known})


def sample(scheduler, prediction, steps, side=48, **given):
    """A picture of N(0.3, 0.5^2): from noise, from a picture, or within a mask."""
    network = GaussianDenoiser(prediction, mean=0.3, sample_size=side)
    # some have another schedule where none is asked for
    network.kept = getattr(scheduler, "alphas_cumprod", network.kept)
    pipeline = quiet(DisentangledDiTPipeline(network, scheduler))
    if "image" in given:
        pipeline = within_mask(pipeline) if "mask_image" in given else from_picture(pipeline)
    options = {"num_inference_steps": steps, "output_type": "latent", "generator": generator(1)}
    return pipeline(class_labels=0, guidance_scale=1.0, **options, **given).images


def predictions(name):
    if name in FLOW:
        return ["flow_prediction"]
    flow = "use_flow_sigmas" in inspect.signature(getattr(diffusers, name).__init__).parameters
    return ["epsilon", "v_prediction"] + ["sample"] * (name not in NO_SAMPLE) + ["flow_prediction"] * flow


def test_every_scheduler_of_diffusers_was_tried():
    groups = [SOLVERS, NOISY, DISTILLED, FLOW, FOREIGN, INVERSE]
    tried = [name for group in groups for name in group]
    assert len(tried) == len(set(tried))
    present = {name for name in dir(diffusers.schedulers) if name.endswith("Scheduler")}
    assert present - set(tried) == set(), "new in diffusers: try them, and name them in one of the lists above"


@pytest.mark.parametrize(
    ("name", "prediction"), [(name, item) for name in [*SOLVERS, *FLOW] for item in predictions(name)]
)
def test_every_solver_finds_the_exact_picture(name, prediction):
    noise = torch.randn(1, 1, 48, 48, generator=generator())
    images, exact = sample(make_scheduler(name, prediction), prediction, 100, latents=noise), 0.3 + 0.5 * noise
    assert float((images - exact).norm() / exact.norm()) < (0.07 if name == "CogVideoXDDIMScheduler" else 0.03)


@pytest.mark.parametrize(("name", "prediction"), [(name, item) for name in NOISY for item in predictions(name)])
def test_every_sampler_that_adds_noise_finds_mean_and_spread(name, prediction):
    noise = torch.randn(1, 1, 48, 48, generator=generator())
    steps = 50 if name == "TCDScheduler" else 100
    images = sample(make_scheduler(name, prediction), prediction, steps, latents=noise)
    # 2304 pixels: standard errors of .01 and of 1.5 %; beside them the error of the steps
    assert float(images.mean()) == pytest.approx(0.3, abs=0.03)
    assert float(images.std()) == pytest.approx(0.5, rel=0.08)


@pytest.mark.parametrize("steps", [4, 20])
def test_lcm_shows_what_the_network_predicts_of_its_last_noise(steps):
    """Each step draws the predicted picture with new noise: x0 = m + g y, g = a s^2 / (a^2 s^2 + b^2)."""
    noise = torch.randn(1, 1, 48, 48, generator=generator())
    scheduler = make_scheduler("LCMScheduler", "epsilon")
    images = sample(scheduler, "epsilon", steps, latents=noise)
    scheduler.set_timesteps(steps)
    spread = 1.0
    for index, timestep in enumerate(scheduler.timesteps):
        kept = float(scheduler.alphas_cumprod[timestep])
        # The first step is of noise alone.
        assert index > 0 or kept <= 0.01
        spread = (kept * spread + 1 - kept if index else 1) * kept * 0.25**2 / (kept * 0.25 + 1 - kept) ** 2
    assert float(images.mean()) == pytest.approx(0.3, abs=0.03)
    assert float(images.std()) == pytest.approx(spread**0.5, rel=0.06)


@pytest.mark.parametrize("name", [*FOREIGN, *INVERSE])
def test_every_other_scheduler_is_refused_by_name(name):
    # a few are deprecated, and then no name of diffusers itself
    kind = find(name) if hasattr(diffusers, name) else getattr(diffusers.schedulers, name)
    scheduler = kind(**NEEDED.get(name, {}))
    message = "goes from pictures to noise" if name in INVERSE else "is neither of the DDPM family"
    with pytest.raises(ValueError, match=f"{name} {message}"):
        DisentangledDiTPipeline(GaussianDenoiser(), scheduler)


@pytest.mark.parametrize("kind", [DDIMScheduler, DDPMScheduler])
def test_noise_is_not_predicted_where_there_is_nothing_else(kind):
    def draw(prediction, spacing, **more):
        options = {"rescale_betas_zero_snr": True, "clip_sample": False, "timestep_spacing": spacing}
        return sample(kind(prediction_type=prediction, **options), prediction, 20, **more)

    with pytest.raises(ValueError, match=f"{kind.__name__} starts from noise alone .zero-terminal SNR"):
        draw("epsilon", "trailing")
    # the same schedule where there is a picture: another prediction, a later start
    image = torch.rand(1, 1, 48, 48, generator=generator(3))
    for prediction, spacing, more in (
        ("v_prediction", "trailing", {}),
        ("sample", "trailing", {}),
        ("epsilon", "leading", {}),
        ("epsilon", "trailing", {"image": image, "strength": 0.5}),
    ):
        images = draw(prediction, spacing, **more)
        assert images.isfinite().all() and 0.35 < float(images.std()) < 0.65


# All spacings of noise levels, all schedules, predictions, kinds of pictures to start from, few steps and many. The
# recipes have the last schedule, whose noise begins at 20,291.
SPACINGS = ["", "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas"]
LINEAR, LATENT, COSINE = SCHEDULES = ["linear", "scaled_linear", "squaredcos_cap_v2"]
# Relative distance to the probability flow's end after 20 and 50 steps. Beta sigmas put few of them near the picture.
# CogVideoX's levels are coarse at the end: with 20, 50, 100 and 200 steps the distance is 0.24, 0.13, 0.07 and 0.04.
DISTANCE = {20: {"use_beta_sigmas": 0.8}, 50: {"use_beta_sigmas": 0.35, "CogVideoXDDIMScheduler": 0.14}}
DISTANCE[20][COSINE, "use_karras_sigmas"], DISTANCE[50][COSINE, "use_karras_sigmas"] = 0.31, 0.14
OTHERWISE = {20: 0.25, 50: 0.11}
PIXELS = (0.65 + 0.25 * torch.randn(1, 1, 16, 16, generator=generator(5))).clamp(0, 1)
NOISE = torch.randn(1, 1, 16, 16, generator=generator())
HOLE = torch.zeros(1, 1, 16, 16, dtype=torch.bool)
HOLE[..., 8:] = True


def spacings():
    for name in [*SOLVERS, *NOISY, *DISTILLED, *FLOW]:
        known = inspect.signature(getattr(diffusers, name).__init__).parameters
        yield from ((name, spacing) for spacing in SPACINGS if spacing in ("", *known))


@cache
def make_spaced(name, spacing, prediction, schedule=LINEAR):
    made = make_scheduler(name, prediction)
    options = {"beta_start": 0.00085, "beta_end": 0.012} if schedule == LATENT else {}
    options |= {} if schedule == LINEAR else {"beta_schedule": schedule}
    return type(made).from_config(made.config, **options, **({spacing: True} if spacing else {}))


def draw(name, spacing, prediction, mode, steps, schedule=LINEAR):
    """A picture of 16 x 16; with few steps from noise alone, else from a picture at 0.7 of the way."""
    given = {} if mode == "text" else {"image": PIXELS, "strength": 1.0 if steps < 3 else 0.7}
    given |= {"mask_image": HOLE} if mode == "mask" else {}
    scheduler = copy.deepcopy(make_spaced(name, spacing, prediction, schedule))
    return sample(scheduler, prediction, steps, 16, latents=NOISE, **given)


def is_refused(name, spacing, prediction, mode, steps, schedule):
    """Combinations that diffusers cannot do, or does wrongly."""
    flow = prediction == "flow_prediction" and name not in FLOW
    return (
        # two spacings at once; the noise of SASolver grows without bound
        (spacing and (flow or name == "SASolverScheduler"))
        # its Runge-Kutta steps are four
        or (name == "PNDMScheduler" and steps < 4)
        or (name in FROM_THE_FIRST_STEP and mode != "text" and steps >= 3)
        # these end at the level of the last step, which is the first one here
        or (name == "DEISMultistepScheduler" and steps == 1 and (spacing or flow))
        or (name == "SASolverScheduler" and steps == 1 and flow)
        # no step where a picture appears; several answers of which none has a picture; noise of trained networks
        or (schedule == COSINE and spacing == "use_beta_sigmas")
        or (schedule == COSINE and name == "KDPM2AncestralDiscreteScheduler" and not spacing and mode == "text")
        or (schedule == COSINE and name == "PNDMScheduler" and prediction == "epsilon")
    )


def check_picture(name, spacing, mode, steps, images, schedule):
    assert images.isfinite().all()
    if mode == "mask":
        assert torch.equal(images[~HOLE], 2 * PIXELS[~HOLE] - 1)
        images = images[HOLE]
    mean, spread = float(images.mean()), float(images.std())
    # 256 pixels, or the half of them: standard errors of .03 or .045, and of 4.5 or 6 %
    assert abs(mean - 0.3) < 0.15 and spread < (0.85 if steps < 4 else 0.65)
    if steps >= 20 and name not in DISTILLED and spacing != "use_beta_sigmas":
        assert spread > 0.33
    if mode == "text" and name in [*SOLVERS, *FLOW]:
        exact = 0.3 + 0.5 * NOISE
        distance = float((images - exact).norm() / (exact - 0.3).norm())
        # of few steps the result is between the mean and the exact picture
        if steps < 4:
            assert distance < 1.05
        else:
            known = DISTANCE[steps].get(spacing or name, OTHERWISE[steps])
            assert distance < DISTANCE[steps].get((schedule, spacing), known)


@pytest.fixture
def told(monkeypatch):
    """Warnings of the pipeline."""
    found = []
    monkeypatch.setattr(DisentangledDiTPipeline, "_LOGGER", SimpleNamespace(warning=found.append))
    return found


def check_row(told, name, spacing, prediction, steps, schedule=LINEAR):
    find(name)
    made = {}
    for mode in ("text", "image", "mask"):
        if is_refused(name, spacing, prediction, mode, steps, schedule):
            with pytest.raises(ValueError, match=name):
                draw(name, spacing, prediction, mode, steps, schedule)
            continue
        told.clear()
        made[mode] = draw(name, spacing, prediction, mode, steps, schedule)
        assert not (told and steps >= 50)
        # Of the linear schedule the limits are known also where a call warns.
        if not told or schedule == LINEAR:
            check_picture(name, spacing, mode, steps, made[mode], schedule)
    if steps < 3 and "image" in made:
        # strength 1 is noise alone
        assert torch.equal(made["image"], made["text"])
    if "mask" in made:
        # Pixels are independent here: what is kept has no influence on what is made anew.
        torch.testing.assert_close(made["mask"][HOLE], made["image"][HOLE], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "spacing"), list(spacings()))
def test_every_spacing_of_noise_levels_is_right_or_refused(told, name, spacing):
    for place, prediction in enumerate(predictions(name)):
        for steps in (1, 2, 3, 20) if place == 0 else (1, 3):
            check_row(told, name, spacing, prediction, steps)


@pytest.mark.parametrize(("name", "spacing"), [pair for pair in spacings() if pair[0] not in FLOW])
def test_every_spacing_is_right_told_or_refused_on_the_schedule_of_the_recipes(told, name, spacing):
    check_row(told, name, spacing, "v_prediction", 20, COSINE)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("name", "spacing"), list(spacings()))
def test_every_spacing_of_noise_levels_is_right_with_many_steps(told, name, spacing, schedule):
    for prediction in predictions(name):
        # Flow matching has no such schedule.
        for steps in (20, 50) if schedule == LINEAR or prediction != "flow_prediction" else ():
            check_row(told, name, spacing, prediction, steps, schedule)


@pytest.mark.parametrize(
    ("name", "spacing", "schedule", "prediction", "steps", "tells"),
    [
        ("HeunDiscrete", "", COSINE, "v_prediction", 49, True),
        ("HeunDiscrete", "", COSINE, "v_prediction", 50, False),
        ("HeunDiscrete", "", LINEAR, "v_prediction", 20, False),
        ("DPMSolverMultistep", "use_beta_sigmas", LINEAR, "sample", 20, True),
        ("EulerDiscrete", "use_beta_sigmas", LATENT, "epsilon", 20, False),
        ("EulerDiscrete", "", COSINE, "v_prediction", 5, False),
        ("DPMSolverMultistep", "use_karras_sigmas", COSINE, "v_prediction", 8, True),
        ("DPMSolverMultistep", "use_karras_sigmas", COSINE, "v_prediction", 49, True),
        ("UniPCMultistep", "use_exponential_sigmas", COSINE, "v_prediction", 20, True),
        ("DPMSolverMultistep", "use_karras_sigmas", COSINE, "v_prediction", 50, False),
        ("DPMSolverMultistep", "", COSINE, "v_prediction", 20, False),
        ("EulerDiscrete", "use_karras_sigmas", COSINE, "v_prediction", 20, False),
        ("SASolver", "", COSINE, "v_prediction", 20, True),
        ("KDPM2Discrete", "", COSINE, "epsilon", 20, True),
        ("KDPM2Discrete", "", COSINE, "v_prediction", 20, True),
        ("KDPM2Discrete", "", LATENT, "v_prediction", 20, False),
    ],
)
def test_too_few_steps_for_a_schedule_are_told(told, name, spacing, schedule, prediction, steps, tells):
    draw(f"{name}Scheduler", spacing, prediction, "text", steps, schedule)
    assert len(told) == tells and all(name in text for text in told)


# Options with which schedulers of diffusers make no pictures: of each the prediction, and the steps.
USELESS = [
    ("FlowMatchEulerDiscreteScheduler", "flow_prediction", {"invert_sigmas": True}, 20),
    ("FlowMatchEulerDiscreteScheduler", "flow_prediction", {"use_dynamic_shifting": True}, 20),
    ("DPMSolverMultistepScheduler", "flow_prediction", {"use_lu_lambdas": True}, 20),
    ("UniPCMultistepScheduler", "flow_prediction", {"shift_terminal": 0.1}, 1),
    ("UniPCMultistepScheduler", "epsilon", {"lower_order_final": False}, 20),
    ("UniPCMultistepScheduler", "epsilon", {"predict_x0": False}, 3),
    ("UniPCMultistepScheduler", "epsilon", {"solver_type": "bh1"}, 3),
    ("SASolverScheduler", "epsilon", {"lower_order_final": False}, 20),
    *(("EulerDiscreteScheduler", kind, {"interpolation_type": "log_linear"}, 50) for kind in ("epsilon", "sample")),
]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(("name", "prediction", "options", "steps"), USELESS)
def test_options_that_spoil_pictures_are_refused_by_name(name, prediction, options, steps):
    made = make_scheduler(name, prediction)
    with pytest.raises(ValueError, match=name):
        sample(type(made).from_config(made.config, **options), prediction, steps)


def test_noise_where_the_network_expects_a_picture_is_told(told):
    for spacing in ("trailing", "leading"):
        sample(DDIMScheduler(timestep_spacing=spacing), "epsilon", 1)
    assert len(told) == 1 and "DDIMScheduler" in told[0]


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
    scheduler = DDIMScheduler(timestep_spacing="trailing", clip_sample=False)
    pipeline = quiet(DisentangledDiTPipeline(GaussianDenoiser(), scheduler))
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
        pipeline = quiet(DisentangledDiTPipeline(GaussianDenoiser(prediction), scheduler))
        options = {"latents": noise, "guidance_scale": 1.0, "output_type": "latent", **schedule}
        seen.clear()
        note = lambda pipe, step, timestep, tensors: seen.append(float(timestep)) or {}  # noqa: E731
        return pipeline(class_labels=0, callback_on_step_end=note, **options).images

    flow, euler = FlowMatchEulerDiscreteScheduler(), EulerDiscreteScheduler()
    draw(flow, "flow_prediction", sigmas=[1.0, 0.5, 0.1])
    assert seen == [1000, 500, pytest.approx(100)]
    solver = make_scheduler("UniPCMultistepScheduler", "flow_prediction")
    for scheduler, kind in ((flow, "flow_prediction"), (solver, "flow_prediction"), (euler, "epsilon")):
        # Those that it takes itself, Euler with the end, give the same picture, whatever holds them.
        images = draw(scheduler, kind, num_inference_steps=20)
        levels = scheduler.sigmas[: 20 + (scheduler is euler)].clone()
        for hold in (torch.Tensor.tolist, torch.Tensor.numpy, torch.clone, tuple):
            found = draw(scheduler, kind, sigmas=hold(levels))
            torch.testing.assert_close(found, images, atol=1e-3, rtol=1e-3)
            assert len(seen) == 20
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
        diffusers.DPMSolverMultistepScheduler(use_flow_sigmas=True), "_type='epsilon' and use_flow_sigmas=True"),
    "timesteps that the network has not seen": (
        EulerDiscreteScheduler(prediction_type="v_prediction", timestep_type="continuous"),
        "timestep_type='continuous', numbers that the network has not seen"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_scheduler_that_does_not_fit_is_refused(case):
    scheduler, message = REFUSED[case]
    pipeline = make_pipeline()
    pipeline.scheduler = scheduler
    with pytest.raises(ValueError, match=message):
        pipeline(class_labels=0, num_inference_steps=1)
    # the same when it is loaded with a saved prediction
    with pytest.raises(ValueError, match=message):
        DisentangledDiTPipeline(pipeline.transformer, scheduler, prediction_type="epsilon")


def test_a_scheduler_whose_configuration_is_damaged_is_named():
    for scheduler, prediction, fact in (
        (DDIMScheduler(trained_betas=0.5), "epsilon", "IndexError"),
        (DDIMScheduler(steps_offset=2**200), "epsilon", "OverflowError"),
        (diffusers.UniPCMultistepScheduler(solver_p="x"), "epsilon", "AttributeError"),
        (diffusers.FlowMatchHeunDiscreteScheduler(shift=float("inf")), "flow_prediction", "FlowMatchHeun"),
    ):
        pipeline = quiet(DisentangledDiTPipeline(GaussianDenoiser(prediction), scheduler))
        with refused(ValueError, type(scheduler).__name__, fact):
            pipeline(class_labels=0, num_inference_steps=2, output_type="latent")
