"""What the Disentangled DiT learns to predict: noise schedules, noisy samples and their targets.

Images x, noise e [batch, channels, height, width]; u in [0, 1) is the place on the schedule, 0 the clean end.
"""

import inspect
from typing import Any

import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from torch import Tensor

OBJECTIVES = ("epsilon", "v_prediction", "flow")
# The schedule of latent diffusion, sampled from its noisiest step on.
_DIFFUSION = {
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "timestep_spacing": "trailing",
}


def make_scheduler(objective: str, changes: dict[str, Any], clip_sample: bool) -> SchedulerMixin:
    """The noise schedule of an objective, as a sampler that is saved with the model; `changes` are its options."""
    if objective not in OBJECTIVES:
        raise ValueError(f"objective is {objective!r}; allowed: {', '.join(OBJECTIVES)}.")
    if objective == "flow":
        kind: Any = FlowMatchEulerDiscreteScheduler
        settings: dict[str, Any] = {}
    else:
        kind = DDIMScheduler
        settings = {**_DIFFUSION, "clip_sample": clip_sample, "prediction_type": objective}
    allowed = set(inspect.signature(kind).parameters) - {"prediction_type", "use_dynamic_shifting"}
    unknown = sorted(set(changes) - allowed)
    if unknown:
        raise ValueError(
            f"unknown key(s) {unknown} in task.noise_schedule. Allowed are those of {kind.__name__}: "
            f"{', '.join(sorted(allowed))}."
        )
    try:
        scheduler: SchedulerMixin = kind(**{**settings, **changes})
    except NotImplementedError as error:
        raise ValueError(f"task.noise_schedule: {error}.") from error
    check_signal(scheduler, "task.noise_schedule")
    return scheduler


def check_signal(scheduler: SchedulerMixin, source: str) -> None:
    """Refuses a schedule that ends in noise alone for a network that predicts the noise."""
    # Any: of a scheduler diffusers' types know neither its configuration nor its numbers.
    schedule: Any = scheduler
    # There the input is the answer, and no picture follows: x0 = (x - sqrt(1 - a) e) / sqrt(a) with a = 0.
    if objective_of(scheduler) == "epsilon" and not schedule.alphas_cumprod.all():
        raise ValueError(
            f"{source} ends in noise alone (zero-terminal SNR, rescale_betas_zero_snr); with objective epsilon "
            "nothing is learned there and sampling divides by zero: set it to false, or objective to v_prediction."
        )


def objective_of(scheduler: SchedulerMixin) -> str:
    """The one of `OBJECTIVES` that a saved pipeline's scheduler was made for."""
    schedule: Any = scheduler
    # Schedulers that are for flow matching only do not say it.
    prediction: str = schedule.config.get("prediction_type", "flow_prediction")
    return "flow" if prediction == "flow_prediction" else prediction


def noisy_samples(scheduler: SchedulerMixin, clean: Tensor, noise: Tensor, places: Tensor) -> tuple[Tensor, ...]:
    """Noisy samples [B, C, H, W], the timesteps [B] that the network is given, and what it is to predict.

    With t = floor(u T) for places u [B] in [0, 1), and e standard normal noise:
        diffusion  x_t = sqrt(a_t) x + sqrt(1 - a_t) e,  target e or v = sqrt(a_t) e - sqrt(1 - a_t) x
        flow       s = k u / (1 + (k - 1) u),  x_s = (1 - s) x + s e,  target e - x,  t = s T,  k the schedule's shift
    """
    # Any: of a scheduler diffusers' types know neither its configuration nor its methods.
    schedule: Any = scheduler
    count = schedule.config.num_train_timesteps
    if objective_of(scheduler) == "flow":
        shift = schedule.config.get("flow_shift", schedule.config.get("shift"))
        sigma = shift * places / (1 + (shift - 1) * places)
        share = sigma[:, None, None, None]
        return (1 - share) * clean + share * noise, sigma * count, noise - clean
    timesteps = (places * count).long()
    # `scheduler.add_noise` is not used: sigma-based samplers (Euler, Heun) do not scale the image.
    schedule.alphas_cumprod = schedule.alphas_cumprod.to(clean.device)
    kept = schedule.alphas_cumprod[timesteps].to(clean.dtype)[:, None, None, None]
    signal, rest = kept.sqrt(), (1 - kept).sqrt()
    noisy = signal * clean + rest * noise
    if schedule.config.prediction_type == "v_prediction":
        return noisy, timesteps, signal * noise - rest * clean
    return noisy, timesteps, noise


def random_keep_indices(batch: int, tokens: int, mask_ratio: float, device: torch.device) -> Tensor:
    """Numbers of the image tokens that the encoder sees in masked training, [B, kept], rising in each row."""
    kept = max(1, round((1 - mask_ratio) * tokens))
    return torch.rand(batch, tokens, device=device).argsort(1)[:, :kept].sort(1).values
